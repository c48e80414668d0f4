"""The Hopper backward on a real GPU: numbers, repeatability, time. `python tests/gpu/bwd.py PART
[DIM ...]`.

Not collected by pytest: run it on a machine with a Hopper GPU. Writes `$OUT/bwd_<part>.json`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
import time

import torch

from benchmarks.gpu import gpu, in_turn
from fa_cute import arch, compile, launch, reference
from fa_cute.bwd.args import BwdSpec, Sizes, workspace_floats
from fa_cute.bwd.sm90.plan import config

HOPPER = arch.get("sm_90a")
LENGTHS = (1024, 4096, 16384)  # of races
LIMIT_S = 120.0  # of one race
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


def median_ms(fns: dict, rounds=7, warm=2, reps=3) -> dict:
    """Milliseconds of each function, interleaved round by round."""
    times = {name: [] for name in fns}
    for r in range(rounds + warm):
        for name in in_turn(fns, r):
            fn = fns[name]
            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            a.record()
            for _ in range(reps):
                fn()
            b.record()
            b.synchronize()
            if r >= warm:
                times[name].append(a.elapsed_time(b) / reps)
    return {name: sorted(t)[len(t) // 2] for name, t in times.items()}


def peer(q, k, v, dout, causal, det):
    """flash-attn-4's backward of the same call."""
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    out, lse = _flash_attn_fwd(q, k, v, causal=causal, return_lse=True)[:2]
    return (
        out,
        lse,
        lambda: _flash_attn_bwd(q, k, v, out, dout, lse, causal=causal, deterministic=det),
    )


def problem(spec, seqlen):
    """Random tensors of 32k tokens, heads x head_dim = 2048."""
    batch, heads = 32768 // seqlen, 2048 // spec.head_dim
    shape = (batch, seqlen, heads, spec.head_dim)
    q, k = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    v, dout = (q.new_empty(*shape[:3], spec.head_dim_v).normal_() for _ in range(2))
    return q, k, v, dout


def forward(q, k, v, causal):
    """out and lse by torch."""
    by_head = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention(*by_head, 0.0, causal)[:2]
    return out.transpose(1, 2).contiguous(), lse.contiguous()


def race(spec, seqlen, runs: dict, det: bool, peers: bool) -> dict:
    """TFLOP/s of several backwards on one problem; their results must agree. Several processes
    compile side by side and have the GPU in turn.
    """
    if peers:  # compile it
        shapes = [(1, 256, 2, d) for d in (spec.head_dim, spec.head_dim, *[spec.head_dim_v] * 2)]
        small = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes)
        peer(*small, spec.causal, det)[2]()
    with gpu(LIMIT_S):
        found = _race(spec, seqlen, runs, det, peers)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return found


def _race(spec, seqlen, runs: dict, det: bool, peers: bool) -> dict:
    q, k, v, dout = problem(spec, seqlen)
    batch, _, heads, _ = q.shape
    zero, fns = q.new_zeros((batch, heads, seqlen), dtype=torch.float32), {}
    if peers:
        out, lse, fns["fa4"] = peer(q, k, v, dout, spec.causal, det)
        expect = fns["fa4"]()
    else:
        out, lse = forward(q, k, v, spec.causal)
        expect = next(iter(runs.values()))(
            (q, k, v, out, lse, dout, zero), spec.head_dim**-0.5, poison=True
        )
    args = (q, k, v, out, lse, dout, zero), spec.head_dim**-0.5
    for name, run in runs.items():
        got = run(*args, poison=True)
        pairs = zip(got, expect[:3], strict=True)
        off = max((a.float() - b.float()).abs().max().item() for a, b in pairs)
        if not off < 0.1:
            print("WRONG", name, spec, seqlen, off)
        fns[name] = lambda run=run: run(*args)
    ms = median_ms(fns)
    pairs = batch * heads * seqlen**2 / (2 if spec.causal else 1)
    flops = 2.5 * 2 * pairs * (spec.head_dim + spec.head_dim_v)
    tflops = {name: flops / t / 1e9 for name, t in ms.items()}
    print(spec.head_dim, "causal" if spec.causal else "full", "det" if det else "", seqlen, end=" ")
    print({n: f"{t:.0f}" for n, t in tflops.items()}, flush=True)
    return {"spec": str(spec), "seqlen": seqlen, "ms": ms, "tflops": tflops}


def once(dims):
    """One call, for a profiler."""
    for d in dims:
        spec = BwdSpec("bf16", *head_dims(d), False)
        q, k, v, dout = problem(spec, 4096)
        out, lse = forward(q, k, v, False)
        run = Backward(spec)
        for _ in range(2):
            run((q, k, v, out, lse, dout, torch.zeros_like(lse)), spec.head_dim**-0.5)
    return []


def speed(dims):
    """TFLOP/s beside flash-attn-4 over 32k tokens, heads x head_dim = 2048."""
    rows = []
    for d, causal, det in itertools.product(dims, (False, True), (False, True)):
        spec = BwdSpec("bf16", *head_dims(d), causal, 1, det)
        runs = {"ours": Backward(spec)}
        rows += [race(spec, seqlen, runs, det, True) for seqlen in LENGTHS]
    return rows


# what was tried beside the table's row; a change that is the row already is left out
ROOM = {"ds_stages": 3}
ONE_TILE = {"persistent": False, "q_stages": 2}
PARTS, WHOLE = {"by_parts": True}, {"by_parts": False}
ALONE = {"pair": False}
VARIANTS = {  # (head dim, whether the order is kept) -> changes to the table's row
    ("64", False): (PARTS, ONE_TILE | ROOM),
    ("64", True): (PARTS, ONE_TILE | ROOM, {"store_warps": 3}),
    ("96", False): (ROOM, PARTS, WHOLE, {"do_stages": 3}),
    ("96", True): (PARTS, ONE_TILE | {"schedule": "lockstep"}),
    ("128", False): (ROOM, {"ds_stages": 2}, PARTS, WHOLE),
    ("128", True): (ROOM, {"ds_stages": 2}, PARTS, WHOLE, {"store_warps": 3}),
    ("192", False): (ALONE, {"multicast": True}),
    ("256", False): (ALONE, ALONE | {"do_stages": 2}, {"multicast": True}),
    ("256", True): ({"persistent": True}, {"store_warps": 3}),
}


def variants(dims):
    """The table's row and its variants."""
    rows = []
    masks = {"full": (False,), "causal": (True,)}.get(dims[-1].split("-")[0], (False, True))
    det = dims[-1].endswith("-det")
    for d, causal in itertools.product([x for x in dims if x[0].isdigit()], masks):
        spec = BwdSpec("bf16", *head_dims(d), causal, 1, det)
        base = config(spec)
        runs = {"ours": Backward(spec)}
        for change in VARIANTS.get((d, det), ()):
            name = ",".join(f"{k}={v}" for k, v in change.items())
            cfg = dataclasses.replace(base, **change)
            if cfg != base:
                runs[name] = Backward(spec, cfg)
        rows += [race(spec, seqlen, runs, det, True) for seqlen in LENGTHS]
    return rows


def main():
    part, dims = sys.argv[1], sys.argv[2:] or ["64", "96", "128"]
    start = time.time()
    torch.manual_seed(0)
    parts = {f.__name__: f for f in (numbers, repeat, small, speed, variants, once)}
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
