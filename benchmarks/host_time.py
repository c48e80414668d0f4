"""Host time of a warm call, on a problem that a GPU finishes at once.

    python -m benchmarks.host_time [--profile] [--cpu] [--seconds 8] [--out DIR | FILE.json]

On a machine with a GPU the real thing: calls, parts of them and their peers take turns, and the
queue is drained after each turn; least and median over the turns, printed and written as JSON.

Without one (or by --cpu) all of Python and none of the driver: CPU tensors take the path of CUDA
tensors, and a function of TVM-FFI that does nothing stands for the kernel: its arguments are
converted as a kernel's are. What a GPU adds is the launch itself.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import gc
import json
import pathlib
import platform
import pstats
import statistics
import sys
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
OPTIONS = (None, True, -1, -1, "auto")  # of an operator: causal


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


def turn(fn) -> float:
    """Microseconds of one of `CALLS` calls."""
    start = time.perf_counter()
    for _ in range(CALLS):
        fn()
    return (time.perf_counter() - start) / CALLS * 1e6


def inputs(device: str) -> tuple:
    """q, k, v without and with gradients."""
    tensors = [torch.randn(1, 64, 2, 64, device=device).bfloat16() for _ in range(3)]
    return tensors, [t.detach().clone().requires_grad_() for t in tensors]


def cases(device: str):
    """name -> a call."""
    (q, k, v), leaves = inputs(device)
    packed, packed_leaves = (
        [t[0].detach().requires_grad_(t.requires_grad) for t in given]
        for given in ((q, k, v), leaves)
    )
    cu = torch.tensor([0, 30, 64], dtype=torch.int32, device=device)
    most = torch.tensor(34)
    operator = torch.ops.fa_cute.fwd
    yield "function", lambda: flash_attn_func(q, k, v, causal=True)
    if device == "cpu":  # another kernel, the same work for the host
        yield "function, window", lambda: flash_attn_func(q, k, v, window_size=(128, 0))
    yield "function, grad", lambda: flash_attn_func(*leaves, causal=True)
    yield "operator", lambda: operator(q, k, v, None, True)
    yield "operator, grad", lambda: operator(*leaves, None, True)
    yield "backward alone", backward_of(flash_attn_func(*leaves, causal=True), leaves)
    yield "low level", lambda: operators.flash_fwd(q, k, v, causal=True)
    yield "varlen", lambda: flash_attn_varlen_func(*packed, cu, cu, most, most, causal=True)
    yield (
        "varlen, grad",
        lambda: flash_attn_varlen_func(*packed_leaves, cu, cu, most, most, causal=True),
    )


def backward_of(out, leaves):
    """The gradients through torch's engine, of a graph that is kept."""
    how = {"grad_outputs": torch.ones_like(out), "retain_graph": True}
    return lambda: torch.autograd.grad(out, leaves, **how)


class Nothing(torch.autograd.Function):
    """What torch itself takes for a function of three tensors with two results."""

    @staticmethod
    def forward(q, k, v):
        return torch.empty_like(q), q.new_empty((1, 2, 64), dtype=torch.float32)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dout, dlse):
        return dout, dout, dout


def parts(device: str):
    """name -> what a call consists of, and what torch takes for the like."""
    (q, k, v), leaves = inputs(device)
    out, lse = operators.flash_fwd(q, k, v, causal=True)
    call = dispatch.call_of(q, k, v, OPTIONS)
    args, kernel = (q, k, v, out, lse, *call.rest(q, None, 0)), call.resolved[0]
    yield "part: kernel", lambda: kernel(*args)
    yield "part: key and look-up", lambda: dispatch.seen(q, k, v, OPTIONS)
    yield "part: out and lse", lambda: call.outputs(q)
    yield "part: call.run", lambda: call.run(q, k, v)
    saved, dout = (q, k, v, out, lse), torch.ones_like(out)
    yield "part: call.gradients", lambda: call.gradients(saved, dout, None, False)
    apply = operators.without_signatures(Nothing)
    yield "torch: autograd function", lambda: apply(*leaves)
    yield "torch: its backward alone", backward_of(apply(*leaves)[0], leaves)
    yield "torch: add", lambda: q + q
    yield "torch: add, grad", lambda: leaves[0] + leaves[0]
    yield "torch: its backward alone, add", backward_of(leaves[0] + leaves[1], leaves[:2])


def sdpa(device: str, backend):
    """Calls of torch's own attention, for tensors (batch, heads, seqlen, head_dim)."""
    plain, leaves = ([t.transpose(1, 2) for t in given] for given in inputs(device))
    attend, name = torch.nn.functional.scaled_dot_product_attention, backend.name.lower()
    yield f"SDPA {name}", lambda: attend(*plain, is_causal=True)
    yield f"SDPA {name}, grad", lambda: attend(*leaves, is_causal=True)
    yield f"SDPA {name}, backward alone", backward_of(attend(*leaves, is_causal=True), leaves)


def peer(device: str):
    """Calls of flash-attn-4: forwards only, its backward would have to be compiled."""
    from flash_attn.cute.interface import flash_attn_func as attend

    plain, leaves = inputs(device)
    yield "flash-attn-4", lambda: attend(*plain, causal=True)
    yield "flash-attn-4, grad", lambda: attend(*leaves, causal=True)


def contenders(device: str):
    """(name, call, context that it runs in); what cannot run is left out, with a message."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    nowhere = contextlib.nullcontext
    groups = [(cases(device), nowhere), (parts(device), nowhere)]
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        groups.append((sdpa(device, backend), lambda backend=backend: sdpa_kernel(backend)))
    groups.append((peer(device), nowhere))
    for calls, context in groups:
        name = calls.__name__
        while True:
            try:
                with context():
                    name = f"what follows {name}"
                    name, call = next(calls)
                    for _ in range(CALLS):
                        call()
                    torch.cuda.synchronize()
            except StopIteration:
                break
            except Exception as error:  # the others still have something to say
                print(f"left out: {name}: {type(error).__name__}: {error}"[:400], file=sys.stderr)
            else:
                yield name, call, context


def measure(seconds: float) -> dict:
    """least and median microseconds by name, and what they depend on."""
    from . import gpu

    torch.manual_seed(0)
    racers = list(contenders(gpu.DEVICE))
    found = {name: [] for name, _, _ in racers}
    gc.collect()
    collections = [s["collections"] for s in gc.get_stats()]
    end = time.monotonic() + seconds
    for rounds in range(ROUNDS):
        if time.monotonic() > end and rounds:
            break
        for name, call, context in racers:
            with context():
                found[name].append(turn(call))
            torch.cuda.synchronize()
    after = [s["collections"] for s in gc.get_stats()]
    return {
        **gpu.versions(),
        "python": platform.python_version(),
        "cpu": processor(),
        "calls": CALLS,
        "rounds": len(next(iter(found.values()))),
        "gc": {
            "enabled": gc.isenabled(),
            "collections": [b - a for a, b in zip(collections, after)],
        },
        "microseconds": {
            name: {"least": round(min(us), 1), "median": round(statistics.median(us), 1)}
            for name, us in found.items()
        },
    }


def processor() -> str:
    """Its name, as Linux tells it."""
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def on_gpu(args) -> None:
    """Measure, print and write."""
    found = measure(args.seconds)
    for name, us in found["microseconds"].items():
        print(f"{name:32} least {us['least']:6.1f}  median {us['median']:6.1f} us")
    path = pathlib.Path(args.out)
    path = path if path.suffix == ".json" else path / "host.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


def on_cpu(args) -> None:
    """Print a line per kind of call: the least of all rounds."""
    pretend()
    for name, call in cases("cpu"):
        for _ in range(100):
            call()
        if args.profile:
            with cProfile.Profile() as profile:
                for _ in range(CALLS):
                    call()
            print(name)
            pstats.Stats(profile).sort_stats("tottime").print_stats(14)
        print(f"{name:20} {min(turn(call) for _ in range(ROUNDS)):6.1f} us")


def main() -> int:
    """Measure on what there is."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "--profile", action="store_true", help="where the time goes (without a GPU)"
    )
    parser.add_argument("--cpu", action="store_true", help="without the GPU that there is")
    parser.add_argument("--seconds", type=float, default=8.0, help="of turns on a GPU")
    parser.add_argument("--out", default="benchmarks/results", help="folder, or file.json")
    args = parser.parse_args()
    without = args.cpu or args.profile or not torch.cuda.is_available()
    (on_cpu if without else on_gpu)(args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
