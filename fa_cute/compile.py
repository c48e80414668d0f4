"""Compile a kernel for an architecture, once: the config and the spec are the key.

Tensor sizes and strides are symbols here, so one compiled function serves every batch, length and
view. Functions for the simulator are kept on disk as well.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from . import cache, log, tune
from .arch import Arch
from .errors import CompileError, FaCuteError

ALIGN_BYTES = 16
TARGETS = ("cuda", "sim")
_log = log.get("compile")
_memory: dict[tuple, Any] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class Request:
    """One kernel to compile."""

    kind: str  # "forward" or "backward"
    cfg: Any
    spec: Any
    arch: Arch
    has_dlse: bool = False  # backward: a gradient of the LSE comes in

    @property
    def where(self) -> tuple[str, str]:
        """Module and class."""
        table = tune.KERNELS if self.kind == "forward" else tune.BACKWARD_KERNELS
        return table[self.arch.family]


def forward(cfg, spec, arch: Arch, target: str) -> Callable:
    """The forward kernel as ``fn(q, k, v, out, lse, softmax_scale)`` on torch tensors.

    ``target`` "cuda" runs on the current device and stream, "sim" on CPU tensors in the simulator.
    """
    return _get(Request("forward", cfg, spec, arch), target)


def backward(cfg, spec, arch: Arch, target: str, has_dlse: bool) -> Callable:
    """The backward: ``fn(q, k, v, out, lse, dout, dlse, dq, dk, dv, work, scale)``.

    ``dlse`` is None unless ``has_dlse``; ``work`` is fp32 scratch, as long as
    `bwd.args.workspace_floats` says.
    """
    return _get(Request("backward", cfg, spec, arch, has_dlse), target)


def clear() -> None:
    """Forget the kernels in memory; those on disk stay."""
    with _lock:
        _memory.clear()


def _get(request: Request, target: str) -> Callable:
    key = (request, target)
    fn = _memory.get(key)
    if fn is None:
        with _lock:  # two threads that ask for one kernel compile it once
            fn = _memory.get(key)
            if fn is None:
                fn = _memory[key] = _load_or_build(request, target)
    return fn


def _load_or_build(request: Request, target: str) -> Callable:
    if target == "cuda":
        return build(request)
    if target != "sim":
        raise CompileError(f"unknown target {target!r}; allowed: {', '.join(TARGETS)}")
    from .sim import host

    name = f"{request.kind}-{cache.key(request)}.sim"
    file = cache.find(name)
    if file is not None:
        try:
            return host.load(file)
        except Exception as error:  # a truncated or foreign file must not stop a call
            cache.drop(name, error)
    require_dsl()
    with host.compiling(request.arch):
        fn = host.function_of(build(request))
    cache.store(name, fn.save)
    return fn


def require_dsl():
    """The module ``cutlass.cute``, or an error that says how to install it."""
    try:
        return import_module("cutlass.cute")
    except ImportError as error:
        raise CompileError(
            "compiling a kernel needs NVIDIA's CuTe DSL, which cannot be imported: "
            f"{error}; pip install 'nvidia-cutlass-dsl>=4.8.1,<4.9', or use backend='reference'"
        ) from error


def build(request: Request, options: str = ""):
    """Trace and compile, without any cache; ``options`` as in cute.compile."""
    cute = require_dsl()
    module, name = request.where
    flags = f"--enable-tvm-ffi --gpu-arch {request.arch.name} {options}".strip()
    _log.info("compiling %s for %s: %s", name, request.arch, request.spec)
    try:
        kernel = getattr(import_module(module), name)(request.cfg, request.spec)
        return cute.compile(kernel, *_arguments(request), options=flags)
    except FaCuteError:
        raise
    except Exception as error:  # the DSL raises its own kinds
        raise CompileError(
            f"{name} for {request.arch} does not compile: {type(error).__name__}: {error}\n"
            f"  spec: {request.spec}\n  config: {request.cfg}"
        ) from error


def build_forward(cfg, spec, arch: Arch, options: str = ""):
    """`build` of a forward kernel."""
    return build(Request("forward", cfg, spec, arch), options)


def build_backward(cfg, spec, arch: Arch, options: str = "", has_dlse: bool = False):
    """`build` of a backward: one function that launches preprocess, main kernel and postprocess."""
    return build(Request("backward", cfg, spec, arch, has_dlse), options)


def cubin(request: Request) -> bytes:
    """The assembled kernels of a request."""
    with tempfile.TemporaryDirectory(prefix="fa_cute_cubin_") as folder:
        return build(request, f"--keep-cubin --dump-dir {folder}").artifacts.CUBIN


def _arguments(request: Request) -> tuple:
    """Stand-ins for what the compiled function takes, and the stream."""
    import cutlass
    from cutlass.cute import runtime, sym_int, sym_int64

    spec = request.spec
    dtype = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}[spec.dtype]
    batch, seqlen_q, seqlen_k, heads, heads_kv = (sym_int() for _ in range(5))

    def like_q(head_dim):
        return _strided(dtype, (batch, seqlen_q, heads, head_dim))

    def like_k(head_dim):
        return _strided(dtype, (batch, seqlen_k, heads_kv, head_dim))

    def rows():
        return runtime.make_fake_compact_tensor(
            cutlass.Float32, (batch, heads, seqlen_q), stride_order=(2, 1, 0), assumed_align=4
        )

    d, dv = spec.head_dim, spec.head_dim_v
    tensors = [like_q(d), like_k(d), like_k(dv), like_q(dv), rows()]
    if request.kind == "backward":
        tensors += [like_q(dv), rows() if request.has_dlse else None]
        tensors += [like_q(d), like_k(d), like_k(dv)]
        tensors.append(
            runtime.make_fake_tensor(cutlass.Float32, (sym_int64(),), (1,), assumed_align=16)
        )
    stream = runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return *tensors, cutlass.Float32(1.0), stream


def _strided(dtype, shape):
    """Any strides that keep rows 16-byte aligned, the last one 1."""
    from cutlass.cute import runtime, sym_int64

    elements = ALIGN_BYTES * 8 // dtype.width
    strides = (*(sym_int64(divisibility=elements) for _ in shape[:-1]), 1)
    return runtime.make_fake_tensor(dtype, shape, strides, assumed_align=ALIGN_BYTES)
