"""The Hopper backward on a real GPU: numbers, repeatability. `python -m tests.gpu.bwd PART [DIM
...]`; `benchmarks.backward_race` times it.

Not collected by pytest: run it on a machine with a Hopper GPU. Writes `$OUT/bwd_<part>.json`.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time

import torch

from fa_cute import arch, compile, launch, reference
from fa_cute.bwd.args import BwdSpec, Sizes, workspace_floats
from fa_cute.bwd.sm90.plan import config

HOPPER = arch.get("sm_90a")
TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16}
# (seqlen_q, seqlen_k): ends inside a tile, one row, one key, longer on either side
SHAPES = [(128, 128), (1, 1), (3, 3), (64, 1), (64, 32), (239, 1), (300, 300), (113, 203), (799, 3)]
SHAPES += [(255, 256), (512, 256), (256, 512), (384, 1000), (1023, 1024)]


class Backward:
    """A compiled backward that allocates like the API does."""

    def __init__(self, spec: BwdSpec, cfg=None):
        self.spec, self.cfg = spec, cfg or config(spec)
        start = time.time()
        self.fn = compile.build_backward(self.cfg, spec, HOPPER, has_dlse=True)
        self.compile_s = time.time() - start

    def __call__(self, tensors, scale, poison=False):
        q, k, v, out, lse, dout, dlse = tensors
        n = Sizes(q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1])
        work = torch.empty(workspace_floats(self.cfg, self.spec, n), device=q.device)
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        if poison:
            for x in (work, dq, dk, dv):
                x.fill_(float("nan"))
        rest = launch.rest(scale, launch.num_sms(q.device, HOPPER))
        self.fn(q, k, v, out, lse, dout, dlse, dq, dk, dv, work, *rest)
        return dq, dk, dv


def inputs(spec: BwdSpec, sq: int, sk: int, batch=2, heads_kv=2):
    """Random q, k, v, dout, dlse as views into NaN: whatever lies beside them must not matter."""
    heads = heads_kv * spec.qhead_per_kvhead

    def view(seqlen, h, d):
        x = torch.full(
            (batch, seqlen + 3, h, d + 8), float("nan"), device="cuda", dtype=TORCH[spec.dtype]
        )
        x[:, :seqlen, :, :d] = torch.randn(batch, seqlen, h, d, device="cuda")
        return x[:, :seqlen, :, :d]

    q, k = view(sq, heads, spec.head_dim), view(sk, heads_kv, spec.head_dim)
    v, dout = view(sk, heads_kv, spec.head_dim_v), view(sq, heads, spec.head_dim_v)
    return q, k, v, dout, torch.randn(batch, heads, sq, device="cuda")


def check(run: Backward, sq: int, sk: int) -> dict:
    """Errors of dq, dk, dv against fp64, as multiples of torch's own in the same dtype."""
    spec = run.spec
    q, k, v, dout, dlse = inputs(spec, sq, sk)
    scale = spec.head_dim**-0.5
    out, lse = reference.attention(q, k, v, scale, spec.causal)
    dlse = dlse.masked_fill(lse == float("-inf"), 0.0)
    lse = lse.contiguous()
    got = run((q, k, v, out.to(q.dtype), lse, dout, dlse), scale, poison=True)
    exact = reference.gradients(dout, q, k, v, scale, spec.causal, dlse=dlse)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    o, stats = reference.attention(*leaves, scale, spec.causal, dtype=None)
    seen = stats != float("-inf")
    torch.autograd.backward([o, stats[seen]], [dout.to(o.dtype), dlse.to(stats.dtype)[seen]])
    row = {"sq": sq, "sk": sk}
    for name, x, ref, leaf in zip(("dq", "dk", "dv"), got, exact, leaves, strict=True):
        ref = torch.nan_to_num(ref, nan=0.0)
        ours, theirs = (
            (y.double() - ref).abs().max().item() for y in (x, torch.nan_to_num(leaf.grad))
        )
        atol = 2 * (ref.to(q.dtype).double() - ref).abs().max().item() + 1e-5
        row[name] = [ours, theirs]
        row["ok"] = row.get("ok", True) and ours == ours and ours <= 2 * theirs + atol
    return row


def numbers(dims):
    """Every variant over every shape."""
    rows = []
    for d, causal, ratio, det in itertools.product(dims, (False, True), (1, 3), (False, True)):
        dtype = "fp16" if det and ratio == 1 else "bf16"
        spec = BwdSpec(dtype, *head_dims(d), causal, ratio, det)
        run = Backward(spec)
        bad, worst = [], 0.0
        for sq, sk in SHAPES:
            row = check(run, sq, sk)
            worst = max([worst] + [a / max(b, 1e-9) for a, b in (row["dq"], row["dk"], row["dv"])])
            if not row["ok"]:
                bad.append(row)
        print(
            f"{spec} compile {run.compile_s:.1f} s: {len(bad)} of {len(SHAPES)} bad,",
            f"worst ratio {worst:.2f}",
            bad[:3],
        )
        rows.append({"spec": str(spec), "bad": bad, "worst": worst})
    return rows


def head_dims(name: str) -> tuple[int, int]:
    """'128' or '192,128'."""
    d, _, dv = name.partition(",")
    return int(d), int(dv or d)


def repeat(dims, times=1000):
    """Bits of a deterministic backward over many runs with another stream loading the GPU; without
    the flag for comparison (ten runs)."""
    rows = []
    for d, causal, ratio, det in itertools.product(dims, (False, True), (1, 4), (True, False)):
        spec = BwdSpec("bf16", *head_dims(d), causal, ratio, det)
        run = Backward(spec)
        q, k, v, dout, dlse = inputs(spec, 2000, 1900, heads_kv=2)
        out, lse = reference.attention(q, k, v, spec.head_dim**-0.5, causal)
        dlse = dlse.masked_fill(lse == float("-inf"), 0.0)
        args = (q, k, v, out.to(q.dtype), lse.contiguous(), dout, dlse), spec.head_dim**-0.5
        first, noise = run(*args), torch.randn(2048, 2048, device="cuda")
        side = torch.cuda.Stream()
        different = torch.zeros((), dtype=torch.int64, device="cuda")
        runs = times if det else 10
        for i in range(runs):
            if i % 3 == 0:
                with torch.cuda.stream(side):
                    noise = (noise @ noise).clamp(-1, 1)
            pairs = zip(first, run(*args), strict=True)
            different += torch.stack([(a != b).any() for a, b in pairs]).any()
        rows.append({"spec": str(spec), "runs": runs, "different": different.item()})
        print(spec, f"{different.item()} of {runs} runs differ", flush=True)
    return rows


def small(dims):
    """A few small shapes, for a memory checker."""
    rows = []
    for d, (causal, ratio, det) in itertools.product(dims, ((False, 1, False), (True, 2, True))):
        run = Backward(BwdSpec("bf16", *head_dims(d), causal, ratio, det))
        for sq, sk in ((1, 1), (64, 64), (113, 203), (300, 300)):
            rows.append(check(run, sq, sk))
            print(run.spec, sq, sk, "ok" if rows[-1]["ok"] else rows[-1])
    return rows


def main():
    part, dims = sys.argv[1], sys.argv[2:] or ["64", "96", "128"]
    start = time.time()
    torch.manual_seed(0)
    parts = {f.__name__: f for f in (numbers, repeat, small)}
    rows = parts[part](dims)
    torch.cuda.synchronize()
    with open(
        os.path.join(os.environ.get("OUT", "."), f"bwd_{part}_{'_'.join(dims)}.json"), "w"
    ) as f:
        json.dump(rows, f, indent=1)
    print(f"{part} {dims}: {time.time() - start:.0f} s")
    return 1 if any(map(fails, rows)) else 0


def fails(row: dict) -> bool:
    """Whether a line of `numbers`, `repeat` or `small` says that something is wrong."""
    steady = "deterministic=True" in row.get("spec", "")
    differs = steady and row.get("different", 0) > 0
    return differs or bool(row.get("bad")) or not row.get("ok", True)


if __name__ == "__main__":
    sys.exit(main())
