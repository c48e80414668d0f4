"""Attention in one call: on CPU tensors the kernel's own PTX runs in the simulator, step by step.

Run it by ``make demo``, or ``python examples/attention.py --help``. Pictures go to ``out/``.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from pathlib import Path

import torch

from fa_cute import api, compile, flash_attn_func, reference, sim, tune
from fa_cute.plan import show
from fa_cute.problem import AttnProblem


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--full", action="store_true", help="no causal mask")
    parser.add_argument("--out", type=Path, default=Path("out"))
    return parser.parse_args()


def on_gpu(call):
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    result = call()
    stop.record()
    torch.cuda.synchronize()
    print(f"ran in {start.elapsed_time(stop):.3f} ms on {torch.cuda.get_device_name()}")
    return result


def in_simulator(call, arch, cfg, folder: Path):
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with sim.session(arch, dsl=False, trace=True, plan=show.to_dict(cfg)) as session:
        result = call()
    report, seconds = session.launches[-1], time.perf_counter() - start
    print(f"simulated {report.instructions} warp instructions in {seconds:.2f} s")
    report.timeline.save_chrome(folder / "attention.json")
    print(f"timeline: {folder}/attention.json (for ui.perfetto.dev)")
    if importlib.util.find_spec("matplotlib"):
        report.timeline.save_png(folder / "attention.png", title=f"{arch}, the first CTA")
        print(f"picture: {folder}/attention.png")
    return result


def main() -> None:
    args = arguments()
    gpu = torch.cuda.is_available()
    torch.manual_seed(0)
    shape = (1, args.seqlen, 1, args.head_dim)
    q, k, v = (torch.randn(shape).to("cuda" if gpu else "cpu", torch.bfloat16) for _ in range(3))
    masks = {"causal": not args.full}

    arch = api.arch_of(q.device)
    spec = tune.forward_spec(AttnProblem.of(q, k, v, **masks), arch)
    cfg = tune.forward(spec, arch)
    request = compile.Request("forward", cfg, spec, arch)
    print(show.text(cfg, str(request)))
    start = time.perf_counter()
    compile.get(request, "cuda" if gpu else "sim")
    print(f"compiled, or found in the cache, in {time.perf_counter() - start:.2f} s")

    def call():
        return flash_attn_func(q, k, v, return_lse=True, **masks)

    call()  # the first one also prepares the simulator, or the device
    out, lse = on_gpu(call) if gpu else in_simulator(call, arch, cfg, args.out)
    exact, exact_lse = reference.attention(q, k, v, **masks)
    in_torch, _ = reference.attention(q, k, v, dtype=torch.bfloat16, **masks)
    error, torch_error = ((x.float() - exact).abs().max().item() for x in (out, in_torch))
    print(f"out: largest error {error:.2e} against float32; torch in bf16: {torch_error:.2e}")
    print(f"lse: largest error {(lse - exact_lse).abs().max().item():.2e}")
    if error > 2 * torch_error + 1e-3:
        raise SystemExit("the error is larger than it should be")


if __name__ == "__main__":
    main()
