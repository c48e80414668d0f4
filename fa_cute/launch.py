"""Run a compiled kernel: on the tensors' CUDA device, or on CPU tensors in the simulator."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from . import compile, tune
from .arch import Arch
from .bwd.args import BwdSpec, Sizes, workspace_floats
from .errors import FaCuteError, UnsupportedError
from .plan import show
from .problem import AttnProblem, plain_strides

MOST_INDEX = 2**31 - 1  # of 32 bits
NONE = (None,) * len(compile.LENGTHS)  # of the lengths of a varlen call
_one_machine = threading.RLock()  # a process simulates one machine at a time
# Without what torch.cuda.current_device and torch.empty_strided do beside (1 us in all of it).
_current_device = getattr(torch._C, "_cuda_getDevice", None)
_empty_on_current_device = torch._C._dynamo.guards._empty_strided_cuda


def capability(index: int) -> tuple[int, int]:
    """Compute capability of a CUDA device, by its index in this process."""
    return (
        _attribute(index, "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR"),
        _attribute(index, "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR"),
    )


def num_sms(device: torch.device, arch: Arch) -> int:
    """Multiprocessors of the device; of the usual part where it is simulated."""
    if device.type != "cuda":
        return arch.num_sms
    return _num_sms(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _num_sms(index: int) -> int:
    return _attribute(index, "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT")


def _attribute(index: int, name: str) -> int:
    """What the driver says of a device."""
    from cuda.bindings import driver

    _check(driver.cuInit(0)[0])
    status, device = driver.cuDeviceGet(index)
    _check(status)
    status, value = driver.cuDeviceGetAttribute(getattr(driver.CUdevice_attribute, name), device)
    _check(status)
    return value


def _check(status) -> None:
    if int(status) != 0:
        raise FaCuteError(f"the CUDA driver answered {status}")


def resolve(problem: AttnProblem, arch: Arch, backend: str, lengths=compile.NO_LENGTHS):
    """The compiled forward of a problem, and its config."""
    spec = tune.forward_spec(problem, arch)
    cfg = tune.forward(spec, arch)
    return compile.forward(cfg, spec, arch, backend, lengths), cfg


def tile_ints(cfg, spec, problem: AttnProblem, units: int) -> int:
    """Length of the int32 scratch for the tiles of a varlen call.

    ``units``: what has tiles of its own: kv heads in the forward, query heads in the backward.
    """
    sizes = (problem.batch, problem.seqlen_q, problem.seqlen_k, units)
    work = cfg.work(spec)
    ints = work.workspace(*sizes).size
    rows = [work.tiles("q", problem.seqlen_q, problem.batch) * work.tile_q]
    rows.append(work.tiles("k", problem.seqlen_k, problem.batch) * work.tile_k)
    if max(ints, *rows) > MOST_INDEX:
        raise UnsupportedError(
            f"{problem.batch} sequences of {problem.seqlen_q} and {problem.seqlen_k} rows, "
            f"{problem.heads} heads: kernels count tiles and their rows in 32 bits; call with fewer"
        )
    return ints


def rest(scale: float, sms: int, window=(None, None), lengths=NONE, tiles=None) -> tuple:
    """What every compiled function takes after its tensors.

    Args:
        sms: multiprocessors that a persistent grid fills.
        window: limits on the left and on the right, None where the spec has none.
        lengths: cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k.
        tiles: int32 scratch for the list of tiles of a varlen call.
    """
    return (scale, *window, *lengths, tiles, sms)


def forward(tensors, resolved, rest: tuple, arch: Arch) -> None:
    """Fill out and lse of ``tensors`` = (q, k, v, out, lse) by what `resolve` gave."""
    kernel, cfg = resolved
    _run(kernel, (*tensors, *rest), arch, cfg)


def backward(
    tensors, spec: BwdSpec, problem: AttnProblem, arch: Arch, backend: str, grads, lengths=NONE
) -> None:
    """Fill ``grads`` = (dq, dk, dv) for ``tensors`` = (q, k, v, out, lse, dout, dlse or None).

    ``lengths``: as in `rest`.
    """
    tensors, grads = (
        tuple(None if t is None else plain_strides(t) for t in given) for given in (tensors, grads)
    )
    given = tuple(t is not None for t in lengths)
    found = resolve_backward(spec, problem, arch, backend, tensors[6] is not None, given)
    q = tensors[0]
    how = (problem.limits, lengths, scratch(q, found.ints))
    tail = rest(problem.softmax_scale, num_sms(q.device, arch), *how)
    run_backward(tensors, grads, found, tail, arch)


@dataclass(frozen=True)
class Backward:
    """A compiled backward, and the scratch memory of a call."""

    kernel: Callable
    cfg: Any
    floats: int
    ints: int  # for the list of tiles of a varlen call; 0: none


def resolve_backward(
    spec: BwdSpec, problem: AttnProblem, arch: Arch, backend: str, has_dlse: bool, given: tuple
) -> Backward:
    """The compiled backward of a problem; ``given`` as in `compile.backward`."""
    cfg = tune.backward(spec, arch)
    kernel = compile.backward(cfg, spec, arch, backend, has_dlse, given)
    p = problem
    sizes = Sizes(p.batch, p.heads, p.heads_kv, p.seqlen_q, p.seqlen_k)
    ints = tile_ints(cfg, spec, p, p.heads) if spec.varlen else 0
    return Backward(kernel, cfg, workspace_floats(cfg, spec, sizes), ints)


def run_backward(tensors, grads, found: Backward, rest: tuple, arch: Arch) -> None:
    """`backward` by what `resolve_backward` gave, for `plain_strides`."""
    work = allocator(tensors[0])((found.floats,), (1,), torch.float32)
    _run(found.kernel, (*tensors, *grads, work, *rest), arch, found.cfg)


def scratch(q, ints: int):
    """Uninitialised memory for the list of tiles; None where there is none."""
    return allocator(q)((ints,), (1,), torch.int32) if ints else None


def allocator(q) -> Callable:
    """What makes uninitialised tensors on the device of q: (shape, strides, dtype) -> tensor."""
    if q.is_cuda and q.get_device() == _current_device():
        return _empty_on_current_device
    return partial(_empty, q)


def _empty(q, shape, strides, dtype):
    return q.new_empty_strided(shape, strides, dtype=dtype)


def _run(kernel, args, arch: Arch, cfg) -> None:
    """Call a compiled function on its tensors' device."""
    q = args[0]
    if not q.is_cuda:
        _simulate(kernel, args, arch, cfg)
    elif q.get_device() == _current_device():
        kernel(*args)
    else:
        with torch.cuda.device(q.device):
            kernel(*args)


def simulated_arch() -> Arch | None:
    """The architecture of the simulator session that is open, if one is."""
    host = sys.modules.get("fa_cute.sim.host")
    session = host.current() if host is not None else None
    return None if session is None else session.arch


def simulated_schedule() -> str:
    """FA_CUTE_SIM_SCHEDULE: "early" (default), "late", "random:SEED" or "priority:SEED"."""
    return os.environ.get("FA_CUTE_SIM_SCHEDULE", "").strip() or "early"


@cache
def plan_names(cfg) -> dict:
    """The plan in the form that the simulator's reports take their names from."""
    return show.to_dict(cfg)


def _simulate(kernel, args, arch: Arch, cfg) -> None:
    from .sim import host

    with _one_machine:
        if host.current() is not None:
            kernel(*args)
            return
        options = {"schedule": simulated_schedule(), "plan": plan_names(cfg)}
        with host.session(arch, dsl=False, **options):
            kernel(*args)
