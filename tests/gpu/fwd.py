"""The Hopper forward on a real GPU: `python -m tests.gpu.fwd [DIM ...]`, results to
`$OUT/fwd.jsonl`.

Not collected by pytest: run it on a machine with a Hopper GPU. Outputs are poisoned with NaN,
what lies behind the inputs is NaN and must not be read, what lies behind the outputs must stay as
it was.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys

import torch

from fa_cute import arch, compile, launch, tune
from fa_cute.fwd.args import FwdSpec
from tests import tolerance

TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16}
SHAPES = [(1, 1), (3, 3), (64, 32), (64, 128), (64, 1), (128, 128), (128, 192), (256, 256)]
SHAPES += [(255, 256), (239, 1), (799, 3), (113, 203), (113, 128), (128, 217), (113, 211)]
SHAPES += [(108, 256), (256, 512), (384, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024)]
SHAPES += [(1024, 1023), (2048, 2048), (4096, 4096), (4224, 4224), (1, 339), (3, 1024), (16, 8000)]
HEADS = [(3, 3), (4, 2), (6, 1)]  # query and kv heads
DIMS = [(64, 64), (128, 128), (256, 256), (96, 96), (192, 128), (192, 192), (40, 40), (72, 72)]
DIMS += [(104, 104), (8, 8), (136, 136), (248, 248)]
PAD, SENTINEL = 3, 7.0


def behind(shape, dtype, fill):
    """A tensor inside a longer one, whose further rows hold ``fill``; also returns the longer
    one.
    """
    batch, rows, heads, d = shape
    whole = torch.full((batch, rows + PAD, heads, d), fill, device="cuda", dtype=dtype)
    return whole[:, :rows], whole


def inputs(spec: FwdSpec, seqlens, heads, batch=2):
    """q, k, v with NaN behind the rows of each batch element."""
    g = torch.Generator(device="cuda").manual_seed(sum(seqlens) + spec.head_dim)
    made = []
    for rows, h, d in (
        (seqlens[0], heads[0], spec.head_dim),
        (seqlens[1], heads[1], spec.head_dim),
        (seqlens[1], heads[1], spec.head_dim_v),
    ):
        t, _ = behind((batch, rows, h, d), TORCH[spec.dtype], float("nan"))
        t.copy_(torch.randn(batch, rows, h, d, device="cuda", generator=g))
        made.append(t)
    return made


def call(fn, spec: FwdSpec, q, k, v):
    """out and lse of a poisoned call, and whether the rows behind out were left alone."""
    batch, rows, heads, _ = q.shape
    out, whole = behind((batch, rows, heads, spec.head_dim_v), TORCH[spec.dtype], SENTINEL)
    out.fill_(float("nan"))
    lse = torch.full((batch, heads, rows), float("nan"), device="cuda")
    sms = launch.num_sms(q.device, arch.get("sm_90a"))
    fn(q, k, v, out, lse, *launch.rest(spec.head_dim**-0.5, sms))
    torch.cuda.synchronize()
    return out, lse, bool((whole[:, rows:] == SENTINEL).all())


def other_views(q, k, v):
    """The same numbers as transposed and as sliced views."""
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    sliced = []
    for x in (q, k, v):
        wide = torch.full(
            (*x.shape[:2], x.shape[2] + 1, x.shape[3] + 8),
            float("nan"),
            device="cuda",
            dtype=x.dtype,
        )
        wide[:, :, 1:, 8:] = x
        sliced.append(wide[:, :, 1:, 8:])
    return transposed, sliced


def plain(t: torch.Tensor) -> torch.Tensor:
    """Strides of dimensions of size 1 as kernels expect them."""
    return launch.plain_strides(t)


def sweep(d: int, dv: int, causal: bool, dtype: str) -> dict:
    """All shapes and head counts of one kernel."""
    spec = FwdSpec(dtype, d, dv, causal)
    target = arch.get("sm_90a")
    fn = compile.forward(tune.forward(spec, target), spec, target, "cuda")
    bad, worst, count = [], 0.0, 0
    for seqlens, heads in itertools.product(SHAPES, HEADS):
        if max(seqlens) > 2048 and heads != (4, 2):
            continue
        q, k, v = (plain(x) for x in inputs(spec, seqlens, heads))
        out, lse, alone = call(fn, spec, q, k, v)
        error = tolerance.measure(out, lse, q, k, v, None, causal)
        worst, count = max(worst, error.out / max(error.bar, 1e-30)), count + 1
        if not (error.out <= error.bar and error.lse <= tolerance.LSE_ATOL and alone):
            bad.append({"seqlens": seqlens, "heads": heads, "error": str(error), "alone": alone})
        if max(seqlens) <= 512:
            for name, views in zip(("transposed", "sliced"), other_views(q, k, v), strict=True):
                again, lse2, _ = call(fn, spec, *(plain(x) for x in views))
                if not (torch.equal(again, out) and torch.equal(lse2, lse)):
                    bad.append({"seqlens": seqlens, "heads": heads, "view": name})
    kind = "causal" if causal else "full"
    return {"kernel": f"d{d}_{dv} {kind} {dtype}", "cases": count, "worst": worst, "bad": bad}


def main() -> None:
    if len(sys.argv) == 5 and sys.argv[1] == "--one":
        d, dv = (int(x) for x in sys.argv[2].split("_"))
        print(json.dumps(sweep(d, dv, sys.argv[3] == "causal", sys.argv[4])))
        return
    wanted = {int(x) for x in sys.argv[1:]}
    jobs = [
        (f"{d}_{dv}", kind, dtype)
        for (d, dv), kind, dtype in itertools.product(DIMS, ("full", "causal"), ("bf16", "fp16"))
        if (not wanted or d in wanted) and (dtype == "bf16" or d in (64, 128, 256))
    ]
    command = [sys.executable, "-m", "tests.gpu.fwd", "--one"]
    running, results = [], []
    path = os.path.join(os.environ.get("OUT", "."), "fwd.jsonl")
    with open(path, "w") as log:
        while jobs or running:
            while jobs and len(running) < 16:
                job = jobs.pop(0)
                pipe = subprocess.PIPE
                process = subprocess.Popen(
                    [*command, *job], stdout=pipe, stderr=subprocess.STDOUT, text=True
                )
                running.append((job, process))
            job, process = running.pop(0)
            text = process.communicate()[0].strip().splitlines() or [""]
            try:
                result = json.loads(text[-1])
            except ValueError:
                result = {"kernel": " ".join(job), "bad": ["\n".join(text[-8:])[-1500:]]}
            results.append(result)
            log.write(json.dumps(result) + "\n")
            log.flush()
    for r in results:
        verdict = f"BAD {json.dumps(r['bad'])[:600]}" if r["bad"] else "ok"
        print(
            f"{r['kernel']:24s} {r.get('cases', 0)} cases, worst {r.get('worst', 0):.2f} {verdict}"
        )
    print("all good" if not any(r["bad"] for r in results) else "NOT GOOD")


if __name__ == "__main__":
    main()
