"""Check and time variants of the Hopper forward kernel, many in one call.

    python -m benchmarks.sm90_forward SET [--out DIR]

Every variant is a process: all compile in parallel, and take the GPU one after the other. A set
is a list of (config, spec, shapes) below; results are one JSON line per variant.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time

CHECKS = (  # batch, seqlen_q, seqlen_k, heads, heads_kv
    (1, 128, 128, 1, 1),
    (2, 113, 203, 2, 1),
    (1, 384, 256, 2, 2),
    (1, 640, 128, 2, 1),
    (2, 1, 339, 4, 2),
    (1, 1023, 1024, 2, 1),
    (1, 2048, 2048, 2, 2),
)
TOKENS = 32768
WIDTH = 2048  # heads x head_dim


def bench_shape(d: int, seqlen: int):
    """32k tokens, as in the published tables."""
    return (TOKENS // seqlen, seqlen, seqlen, WIDTH // d, WIDTH // d)


def rest(scale: float) -> tuple:
    """What a compiled function takes after its tensors."""
    import torch

    from fa_cute import arch, launch

    return launch.rest(scale, launch.num_sms(torch.device("cuda"), arch.get("sm_90a")))


def variant(
    d=64, dv=None, causal=False, seqlens=(), checks=True, dtype="bf16", without=None, **cfg
):
    """One entry of a set."""
    dv = d if dv is None else dv
    pad = {"head_dim": -(-d // 32) * 32, "head_dim_v": -(-dv // 32) * 32}
    return {
        "cfg": {**pad, **cfg},
        "spec": {"dtype": dtype, "head_dim": d, "head_dim_v": dv, "causal": causal},
        "seqlens": list(seqlens),
        "checks": checks and without is None,
        "without": without,
    }


def shapes():
    """Tiles, teams and orders, one process per core."""
    both, every = {"seqlens": (1024, 16384)}, {"seqlens": (1024, 4096, 16384)}
    base = {"early_pass": 0, "checks": False}
    d64 = {"teams": 3, "kv_stages": 4, **base}
    four = d64 | {"teams": 4, "tile_n": 64}
    d128 = {"teams": 3, "tile_n": 80, "kv_stages": 3, **base}
    d256 = {"teams": 2, "tile_n": 80, "q_stages": 1, "scores_first": True, **base}
    yield variant(64, **d64, **both)
    yield variant(64, take_turns=False, **d64, seqlens=(16384,))
    yield variant(64, **four, **both)
    yield variant(64, causal=True, scheduler="snake", **d64, **every)
    yield variant(64, causal=True, scheduler="lpt", **d64, seqlens=(16384,))
    yield variant(64, causal=True, scheduler="snake", **(d64 | {"teams": 2}), seqlens=(1024,))
    yield variant(64, causal=True, scheduler="snake", **four, **both)
    yield variant(128, **d128, **both)
    yield variant(128, scheduler="single", **d128, seqlens=(1024,))
    yield variant(128, causal=True, scheduler="snake", **d128, **every)
    yield variant(128, causal=True, scheduler="lpt", **d128, **both)
    two = base | {"teams": 2, "scores_first": True}
    yield variant(128, causal=True, scheduler="snake", **two, seqlens=(1024,))
    yield variant(256, scheduler="single", **d256, **both)
    yield variant(256, causal=True, scheduler="lpt", **d256, **both)
    yield variant(256, causal=True, scheduler="snake", **d256, **both)
    yield variant(
        192,
        128,
        causal=True,
        q_stages=1,
        scheduler="lpt",
        **(d128 | {"kv_stages": 2}),
        seqlens=(4096,),
    )


def causal_1k():
    """Head dim 128, causal, 1024 queries: tiles of 128 rows divide them, tiles of 192 do not."""
    base = {"early_pass": 0, "causal": True, "seqlens": (1024, 2048, 4096, 16384)}
    two = base | {"teams": 2}
    for tile in ({"tile_n": 80, "kv_stages": 3}, {"tile_n": 64, "kv_stages": 4}):
        for order in ("snake", "lpt"):
            yield variant(128, scheduler=order, teams=3, **tile, **base)
    for order, first in (("snake", False), ("lpt_persistent", True), ("lpt_persistent", False)):
        yield variant(128, scheduler=order, scores_first=first, **two)


SETS = {"shapes": shapes, "causal_1k": causal_1k}


def check(fn, spec, shape) -> dict:
    """Error of out and lse against fp64, beside what torch's own 16-bit computation makes."""
    import torch

    from . import gpu

    batch, sq, sk, heads, heads_kv = shape
    dtype = torch.bfloat16 if spec.dtype == "bf16" else torch.float16
    q, k, v = gpu.inputs(
        (batch, sq, sk), (heads, heads_kv), (spec.head_dim, spec.head_dim_v), dtype
    )
    scale = spec.head_dim**-0.5
    out = torch.full(
        (batch, sq, heads, spec.head_dim_v), float("nan"), device=gpu.DEVICE, dtype=dtype
    )
    lse = torch.full((batch, heads, sq), float("nan"), device=gpu.DEVICE)
    fn(q, k, v, out, lse, *rest(scale))
    torch.cuda.synchronize()
    want, want_lse = gpu.reference(q, k, v, spec.causal, scale)
    low, _ = gpu.reference(q, k, v, spec.causal, scale, low=dtype)
    error = (out.double() - want).abs().max().item()
    theirs = (low.double() - want).abs().max().item()
    rounding = (want.to(dtype).double() - want).abs().max().item()
    seen = want_lse > -float("inf")
    lse_error = (lse.double() - want_lse)[seen].abs().max().item() if seen.any() else 0.0
    unseen_right = bool((lse[~seen] == -float("inf")).all()) and bool(
        (out.transpose(1, 2)[~seen] == 0).all()
    )
    good = error <= 2 * theirs + rounding and lse_error <= 1e-3 and unseen_right
    return {
        "shape": shape,
        "error": error,
        "torch": theirs,
        "lse": lse_error,
        "unseen": unseen_right,
        "ok": good,
    }


def run_one(task: dict) -> dict:
    """Compile, check and time one variant in this process."""
    import torch

    from fa_cute import arch, compile
    from fa_cute.fwd.args import FwdSpec
    from fa_cute.fwd.sm90.plan import FwdConfig

    from . import gpu

    if task.get("without"):
        from . import ablations

        ablations.apply(task["without"])
    began = time.perf_counter()
    cfg = FwdConfig(**task["cfg"])
    fns = {}

    def fn_for(ratio):
        if ratio not in fns:
            spec = FwdSpec(**task["spec"], qhead_per_kvhead=ratio)
            fns[ratio] = (compile.build_forward(cfg, spec, arch.get("sm_90a")), spec)
        return fns[ratio]

    shapes = [s for s in CHECKS if task["checks"]]
    for ratio in {1, *(s[3] // s[4] for s in shapes)}:
        fn_for(ratio)
    result = {
        **task,
        "compile_s": time.perf_counter() - began,
        "checked": [],
        "tflops": {},
        "timed": {},
    }
    torch.zeros(1, device=gpu.DEVICE)  # the context, outside the lock
    with gpu.gpu(25):
        for shape in shapes:
            fn, spec = fn_for(shape[3] // shape[4])
            result["checked"].append(check(fn, spec, shape))
        fn, spec = fn_for(1)
        dtype = torch.bfloat16 if spec.dtype == "bf16" else torch.float16
        for seqlen in task["seqlens"]:
            batch, sq, sk, heads, heads_kv = bench_shape(spec.head_dim, seqlen)
            q, k, v = gpu.inputs(
                (batch, sq, sk), (heads, heads_kv), (spec.head_dim, spec.head_dim_v), dtype
            )
            out = torch.empty(batch, sq, heads, spec.head_dim_v, device=gpu.DEVICE, dtype=dtype)
            lse = torch.empty(batch, heads, sq, device=gpu.DEVICE)
            scale = spec.head_dim**-0.5
            got = gpu.measure(lambda: fn(q, k, v, out, lse, *rest(scale)))  # noqa: B023 (called at once)
            ms = got["ms"]
            rows = torch.randint(0, sq, (64,), device=gpu.DEVICE)
            want, _ = gpu.reference(
                q[:1, :, :2], k[:1, :, :2], v[:1, :, :2], spec.causal, scale, rows, torch.float32
            )
            off = (out[:1, rows, :2].float() - want).abs().max().item()
            work = gpu.flops(batch, heads, (sq, sk), (spec.head_dim, spec.head_dim_v), spec.causal)
            result["timed"][seqlen], result["tflops"][seqlen] = got, work / ms / 1e9
            result["checked"].append(
                {"shape": (batch, sq, sk, heads, heads_kv), "error": off, "ok": off < 0.02}
            )
    return result


def profile(task: dict) -> None:
    """Three launches of the first length of a variant."""
    import torch

    from fa_cute import arch, compile
    from fa_cute.fwd.args import FwdSpec
    from fa_cute.fwd.sm90.plan import FwdConfig

    from . import gpu

    spec = FwdSpec(**task["spec"])
    fn = compile.build_forward(FwdConfig(**task["cfg"]), spec, arch.get("sm_90a"))
    batch, sq, sk, heads, heads_kv = bench_shape(spec.head_dim, task["seqlens"][0])
    q, k, v = gpu.inputs(
        (batch, sq, sk), (heads, heads_kv), (spec.head_dim, spec.head_dim_v), torch.bfloat16
    )
    out = torch.empty(batch, sq, heads, spec.head_dim_v, device=gpu.DEVICE, dtype=torch.bfloat16)
    lse = torch.empty(batch, heads, sq, device=gpu.DEVICE)
    for _ in range(3):
        fn(q, k, v, out, lse, *rest(spec.head_dim**-0.5))
    torch.cuda.synchronize()


def peers(task: dict) -> dict:
    """flash-attn-4 and cuDNN on the same shapes, for orientation."""
    import torch
    from flash_attn.cute.interface import flash_attn_func
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from . import gpu

    d, causal = task["peer"], task["causal"]
    result = {**task, "tflops": {}}
    for seqlen in task["seqlens"]:
        batch, sq, sk, heads, heads_kv = bench_shape(d, seqlen)
        q, k, v = gpu.inputs((batch, sq, sk), (heads, heads_kv), (d, d), torch.bfloat16)
        Q, K, V = (x.transpose(1, 2) for x in (q, k, v))
        work = gpu.flops(batch, heads, (sq, sk), (d, d), causal)

        def cudnn():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                torch.nn.functional.scaled_dot_product_attention(Q, K, V, is_causal=causal)  # noqa: B023

        def fa4():
            flash_attn_func(q, k, v, causal=causal)  # noqa: B023

        fa4()
        with gpu.gpu(60):
            result["tflops"][seqlen] = [work / gpu.measure(f)["ms"] / 1e9 for f in (fa4, cudnn)]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("set", choices=sorted(SETS), nargs="?")
    parser.add_argument("--one")
    parser.add_argument("--profile", help="launch one variant a few times and end, for a profiler")
    parser.add_argument("--out", default="benchmarks/results")
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--peers", action="store_true")
    options = parser.parse_args()
    if options.one:
        task = json.loads(options.one)
        print(json.dumps(peers(task) if "peer" in task else run_one(task)))
        return
    if options.profile:
        profile(json.loads(options.profile))
        return
    tasks = list(SETS[options.set]())
    if options.peers:
        tasks += [
            {"peer": d, "causal": causal, "seqlens": [1024, 4096, 16384]}
            for d, causal in itertools.product((64, 128, 256), (False, True))
        ]
    waiting, running, done = list(enumerate(tasks)), {}, []
    os.makedirs(options.out, exist_ok=True)
    with open(os.path.join(options.out, f"sm90_forward_{options.set}.jsonl"), "w") as log:
        while waiting or running:
            while waiting and len(running) < options.jobs:
                i, task = waiting.pop(0)
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.sm90_forward",
                    "--one",
                    json.dumps(task),
                ]
                running[i] = (
                    task,
                    subprocess.Popen(
                        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                    ),
                )
            for i, (task, process) in list(running.items()):
                if process.poll() is None:
                    continue
                text = process.stdout.read()
                del running[i]
                lines = text.strip().splitlines() or [""]
                try:
                    result = json.loads(lines[-1])
                except ValueError:
                    result = {**task, "failed": "\n".join(lines[-6:])[-1500:]}
                done.append((i, result))
                log.write(json.dumps(result) + "\n")
                log.flush()
            time.sleep(0.1)
    for i, r in sorted(done, key=lambda x: x[0]):
        print(summary(i, r))


def summary(i: int, r: dict) -> str:
    """One line per variant."""
    if "peer" in r:
        what = f"peers d{r['peer']} {'causal' if r['causal'] else 'full'} (flash-attn-4, cuDNN)"
        return (
            f"{what}: "
            + str({s: [round(x) for x in t] for s, t in r.get("tflops", {}).items()})
            + r.get("failed", "")[-300:]
        )
    spec = r["spec"]
    cfg = {k: v for k, v in r["cfg"].items() if not k.startswith("head")}
    bad = [c for c in r.get("checked", []) if not c["ok"]]
    state = "FAILED " + r["failed"][-400:] if "failed" in r else (f"WRONG {bad}" if bad else "ok")
    timed = r.get("timed", {})
    speed = {s: f"{t:.0f}@{timed[s]['mhz']}" for s, t in r.get("tflops", {}).items()}
    if r.get("without"):
        state = "without " + r["without"]
    kind = "causal" if spec["causal"] else "full"
    return f"{i:2d} d{spec['head_dim']}/{spec['head_dim_v']} {kind} {cfg} {speed} {state}"


if __name__ == "__main__":
    main()
