"""What every measurement needs: inputs, references, a timer, one process on the GPU at a time, a
watchdog.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import random
import statistics
import tempfile
import threading

import torch

DEVICE = "cuda"
LOCK = os.path.join(tempfile.gettempdir(), "fa_cute_gpu.lock")


def flops(batch: int, heads: int, seqlens: tuple, dims: tuple, causal: bool) -> float:
    """Of a forward: two products, half of them when causal; seqlens of q and k, head dims of k
    and v.
    """
    return 2.0 * batch * heads * seqlens[0] * seqlens[1] * sum(dims) / (2 if causal else 1)


def inputs(lengths: tuple, heads: tuple, dims: tuple, dtype, seed: int = 0) -> tuple:
    """Normal random q, k, v; (batch, seqlen_q, seqlen_k), (heads, heads_kv), (head_dim,
    head_dim_v).
    """
    g = torch.Generator(device=DEVICE).manual_seed(seed)
    batch, seqlen_q, seqlen_k = lengths

    def rand(*shape):
        return torch.randn(*shape, device=DEVICE, dtype=torch.float32, generator=g).to(dtype)

    return (
        rand(batch, seqlen_q, heads[0], dims[0]),
        rand(batch, seqlen_k, heads[1], dims[0]),
        rand(batch, seqlen_k, heads[1], dims[1]),
    )


def versions() -> dict:
    """What a result depends on."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("torch", "nvidia-cutlass-dsl", "flash-attn-4", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return {
        "gpu": torch.cuda.get_device_name(),
        "versions": found | {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()},
    }


def reference(q, k, v, causal: bool, scale: float, rows=None, dtype=torch.float64, low=None):
    """(out, lse) of chosen query rows (default all) in ``dtype``; ``low``: the products' operands
    are rounded to it first, as an unfused computation in that type does.
    """
    sq, sk = q.shape[1], k.shape[1]
    rows = torch.arange(sq, device=q.device) if rows is None else rows
    ratio = q.shape[2] // k.shape[2]
    cast = (lambda x: x.to(low)) if low is not None else (lambda x: x.to(dtype))
    Q = cast(q[:, rows].transpose(1, 2))
    K = cast(k.transpose(1, 2).repeat_interleave(ratio, 1))
    V = cast(v.transpose(1, 2).repeat_interleave(ratio, 1))
    S = (Q @ K.transpose(-1, -2)) * scale
    if causal:
        hidden = torch.arange(sk, device=q.device)[None, :] > rows[:, None] + sk - sq
        S = S.masked_fill(hidden, -math.inf)
    lse = torch.logsumexp(S.to(dtype), -1)
    P = torch.softmax(S.float() if low is not None else S, -1)
    P = torch.where(torch.isnan(P), torch.zeros_like(P), P)
    if causal:
        P = P.masked_fill((lse == -math.inf)[..., None], 0.0)
    O = cast(P) @ V
    return O.transpose(1, 2), lse


def measure(call, seconds: float = 0.25) -> dict:
    """Launches back to back for ``seconds``: median duration over the second half, when the power
    limit has settled the clock, and the SM clock and power in the middle of it.
    """
    for _ in range(2):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    n = max(10, min(4000, int(seconds * 1e3 / max(start.elapsed_time(end), 1e-3))))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
    marks[0].record()
    for i in range(n):
        call()
        marks[i + 1].record()
    marks[n * 3 // 4].synchronize()
    state = sample()
    torch.cuda.synchronize()
    ms = [marks[i].elapsed_time(marks[i + 1]) for i in range(n // 2, n)]
    return {"ms": statistics.median(ms), **state}


def mixed_lengths() -> tuple[int, ...]:
    """24 sequences of 64 to 16k, even in their logarithm."""
    rng = random.Random(1)
    return tuple(int(64 * 2 ** rng.uniform(0, 8)) for _ in range(24))


def milliseconds(call, burst_ms: float) -> float:
    """Median of one call, of some ``burst_ms`` of them back to back."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    n = max(3, min(200, int(burst_ms / max(start.elapsed_time(end), 0.01))))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
    marks[0].record()
    for i in range(n):
        call()
        marks[i + 1].record()
    torch.cuda.synchronize()
    return statistics.median(marks[i].elapsed_time(marks[i + 1]) for i in range(n))


def sample() -> dict:
    """SM clock (MHz), power (W) and temperature of the GPU now."""
    try:
        import pynvml

        pynvml.nvmlInit()
        h = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
        return {
            "mhz": pynvml.nvmlDeviceGetClockInfo(h, pynvml.NVML_CLOCK_SM),
            "watt": round(pynvml.nvmlDeviceGetPowerUsage(h) / 1000),
            "celsius": pynvml.nvmlDeviceGetTemperature(h, pynvml.NVML_TEMPERATURE_GPU),
        }
    except Exception:  # a missing or refusing NVML must not cost the measurement
        return {"mhz": None, "watt": None, "celsius": None}


def in_turn(names, number: int) -> list:
    """Contenders in the order of a round: another one begins each."""
    names, first = list(names), number % len(names)
    return names[first:] + names[:first]


@contextlib.contextmanager
def gpu(limit_s: float):
    """The GPU for this process alone; the process ends (code 3) if it holds it for longer, as a
    kernel that hangs never returns.
    """
    with open(LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        dog = threading.Timer(limit_s, _give_up, (limit_s,))
        dog.daemon = True
        dog.start()
        try:
            yield
        finally:
            dog.cancel()


def _give_up(limit_s: float) -> None:
    print(f"no end after {limit_s} s on the GPU", flush=True)
    os._exit(3)
