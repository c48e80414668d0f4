"""Attention in one call: on CPU tensors the kernel's own PTX runs in the simulator, step by step.

Run it by ``make demo``, or ``python examples/attention.py --help``. Pictures go to ``out/``.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from fa_cute import api, compile, flash_attn_func, reference, tune
from fa_cute.plan import show
from fa_cute.problem import AttnProblem
from fa_cute.sim import host


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--full", action="store_true", help="no causal mask")
    parser.add_argument("--out", type=Path, default=Path("out"))
    return parser.parse_args()


def run_on_gpu(q, k, v, causal):
    """Second call of the compiled kernel, timed by events."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    out, lse = flash_attn_func(q, k, v, causal=causal, return_lse=True)
    stop.record()
    torch.cuda.synchronize()
    print(f"run: {start.elapsed_time(stop):.3f} ms on {torch.cuda.get_device_name()}")
    return out, lse


def run_in_simulator(q, k, v, causal, cfg, folder: Path):
    """The same call with a timeline of what each role did."""
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with host.session(api.default_arch(), dsl=False, trace=True, plan=show.to_dict(cfg)) as s:
        out, lse = flash_attn_func(q, k, v, causal=causal, return_lse=True)
    report = s.launches[-1]
    print(f"simulated in {time.perf_counter() - start:.2f} s: {report.instructions} instructions")
    report.timeline.save_chrome(folder / "attention.json")
    print(f"timeline: {folder / 'attention.json'} (open it in ui.perfetto.dev)")
    try:
        report.timeline.save_png(folder / "attention.png", title=f"{report.arch}, one block a row")
        print(f"timeline: {folder / 'attention.png'}")
    except ImportError:
        print("no picture: matplotlib is not installed")
    return out, lse


def main() -> None:
    args = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (1, args.seqlen, args.heads, args.head_dim)
    torch.manual_seed(0)
    q, k, v = (torch.randn(shape).to(device, torch.bfloat16) for _ in range(3))
    causal = not args.full
    arch = api.arch_of(q.device)
    spec = tune.forward_spec(AttnProblem.of(q, k, v, causal=causal), arch)
    cfg = tune.forward(spec, arch)
    print(show.text(cfg, f"{tune.KERNELS[arch.family][1]} on {arch}: {spec}"))

    start = time.perf_counter()
    compile.forward(cfg, spec, arch, "cuda" if device == "cuda" else "sim")
    print(f"compiled (or found in the cache) in {time.perf_counter() - start:.2f} s")
    flash_attn_func(q, k, v, causal=causal)
    if device == "cuda":
        out, lse = run_on_gpu(q, k, v, causal)
    else:
        out, lse = run_in_simulator(q, k, v, causal, cfg, args.out)

    exact, exact_lse = reference.attention(q, k, v, causal=causal)
    in_torch, _ = reference.attention(q, k, v, causal=causal, dtype=torch.bfloat16)
    error, torch_error = ((x.float() - exact).abs().max().item() for x in (out, in_torch))
    print(f"out: largest error {error:.2e} against float32; torch in bf16: {torch_error:.2e}")
    print(f"lse: largest error {(lse - exact_lse).abs().max().item():.2e}")
    if error > 2 * torch_error + 1e-3:
        raise SystemExit("the error is larger than it should be")


if __name__ == "__main__":
    main()
