"""Host time of a warm call on this machine's processor, without a GPU: all of Python, none of the
driver.

    python -m benchmarks.host_time [--profile]

CPU tensors take the path of CUDA tensors, and a function of TVM-FFI that does nothing stands for
the kernel: its arguments are converted as a kernel's are. What a GPU adds is the launch itself.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time

import torch
import tvm_ffi

from fa_cute import (
    compile,
    dispatch,
    flash_attn_func,
    flash_attn_varlen_func,
    launch,
    operators,
    tune,
)

CALLS, ROUNDS = 40, 600  # short rounds: the least is one that nothing interrupted


def pretend() -> None:
    """CPU tensors are like CUDA tensors; kernels do nothing."""
    nothing = tvm_ffi.get_global_func("testing.nop")
    dispatch._REPEATED = "is_cpu"
    compile.get = lambda request, target: nothing
    launch._run = lambda kernel, args, arch, cfg: kernel(*args)
    launch.allocator = lambda q: torch._C._dynamo.guards._empty_strided_cpu
    for table in (tune.FORWARD_DOES, tune.BACKWARD_DOES):
        table["sm100"] = (tune.WINDOW, tune.VARLEN, tune.NEGATIVE_SCALE)
    launch.tile_ints = lambda *args: 1024


def microseconds(fn) -> float:
    """The least mean of `CALLS` calls."""
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(CALLS):
            fn()
        best = min(best, time.perf_counter() - start)
    return best / CALLS * 1e6


def cases():
    """name -> a call."""
    q, k, v = (torch.randn(1, 64, 2, 64).bfloat16() for _ in range(3))
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    packed = [t[0] for t in (q, k, v)]
    packed_leaves = [t.detach().clone().requires_grad_() for t in packed]
    cu = torch.tensor([0, 30, 64], dtype=torch.int32)
    most = torch.tensor(34)
    operator = torch.ops.fa_cute.fwd
    yield "function", lambda: flash_attn_func(q, k, v, causal=True)
    yield "function, window", lambda: flash_attn_func(q, k, v, window_size=(128, 0))
    yield "function, grad", lambda: flash_attn_func(*leaves, causal=True)
    yield "operator", lambda: operator(q, k, v, None, True)
    yield "operator, grad", lambda: operator(*leaves, None, True)
    out = flash_attn_func(*leaves, causal=True)
    how = {"grad_outputs": torch.ones_like(out), "retain_graph": True}
    yield "backward alone", lambda: torch.autograd.grad(out, leaves, **how)
    yield "low level", lambda: operators.flash_fwd(q, k, v, causal=True)
    yield "varlen", lambda: flash_attn_varlen_func(*packed, cu, cu, most, most, causal=True)
    yield (
        "varlen, grad",
        lambda: flash_attn_varlen_func(*packed_leaves, cu, cu, most, most, causal=True),
    )


def main() -> int:
    """Print a line per kind of call."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--profile", action="store_true", help="where the time goes")
    args = parser.parse_args()
    pretend()
    for name, call in cases():
        for _ in range(100):
            call()
        if args.profile:
            with cProfile.Profile() as profile:
                for _ in range(CALLS):
                    call()
            print(name)
            pstats.Stats(profile).sort_stats("tottime").print_stats(14)
        print(f"{name:20} {microseconds(call):6.1f} us")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
