"""Compile a kernel for an architecture, once: the config and the spec are the key.

Tensor sizes and strides are symbols here, so one compiled function serves every batch, length and
view. Functions for the simulator are kept on disk as well.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
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


def forward(cfg, spec, arch: Arch, target: str) -> Callable:
    """The forward kernel as ``fn(q, k, v, out, lse, softmax_scale)`` on torch tensors.

    ``target`` "cuda" runs on the current device and stream, "sim" on CPU tensors in the simulator.
    """
    key = ("forward", cfg, spec, arch.name, target)
    with _lock:  # two threads that ask for one kernel compile it once
        fn = _memory.get(key)
        if fn is None:
            fn = _memory[key] = _load_or_build(cfg, spec, arch, target)
    return fn


def clear() -> None:
    """Forget the kernels in memory; those on disk stay."""
    with _lock:
        _memory.clear()


def require_dsl():
    """The module ``cutlass.cute``, or an error that says how to install it."""
    try:
        return import_module("cutlass.cute")
    except ImportError as error:
        raise CompileError(
            "compiling a kernel needs NVIDIA's CuTe DSL, which cannot be imported: "
            f"{error}; pip install 'nvidia-cutlass-dsl>=4.8.1,<4.9', or use backend='reference'"
        ) from error


def _load_or_build(cfg, spec, arch: Arch, target: str) -> Callable:
    if target == "cuda":
        return build_forward(cfg, spec, arch)
    if target != "sim":
        raise CompileError(f"unknown target {target!r}; allowed: {', '.join(TARGETS)}")
    from .sim import host

    name = f"forward-{cache.key(cfg, spec, arch)}.sim"
    file = cache.find(name)
    if file is not None:
        try:
            return host.load(file)
        except Exception as error:  # a truncated or foreign file must not stop a call
            cache.drop(name, error)
    require_dsl()
    with host.compiling(arch):
        fn = host.function_of(build_forward(cfg, spec, arch))
    cache.store(name, fn.save)
    return fn


def build_forward(cfg, spec, arch: Arch, options: str = ""):
    """Trace and compile the forward kernel, without any cache; ``options`` as in cute.compile."""
    cute = require_dsl()
    module, name = tune.KERNELS[arch.family]
    flags = f"--enable-tvm-ffi --gpu-arch {arch.name} {options}".strip()
    _log.info("compiling %s for %s: %s", name, arch, spec)
    try:
        kernel = getattr(import_module(module), name)(cfg, spec)
        return cute.compile(kernel, *_forward_arguments(spec), options=flags)
    except FaCuteError:
        raise
    except Exception as error:  # the DSL raises its own kinds
        raise CompileError(
            f"{name} for {arch} does not compile: {type(error).__name__}: {error}\n"
            f"  spec: {spec}\n  config: {cfg}\n"
            f"  again: python -m fa_cute regs --arch {arch} --head-dim {spec.head_dim}"
        ) from error


def forward_cubin(cfg, spec, arch: Arch) -> bytes:
    """The assembled forward kernel."""
    with tempfile.TemporaryDirectory(prefix="fa_cute_cubin_") as folder:
        compiled = build_forward(cfg, spec, arch, f"--keep-cubin --dump-dir {folder}")
        return compiled.artifacts.CUBIN


def _forward_arguments(spec) -> tuple:
    """Stand-ins for q, k, v, out, lse, softmax_scale and the stream."""
    import cutlass
    from cutlass.cute import runtime, sym_int

    dtype = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}[spec.dtype]
    batch, seqlen_q, seqlen_k, heads, heads_kv = (sym_int() for _ in range(5))
    q = _strided(dtype, (batch, seqlen_q, heads, spec.head_dim))
    k = _strided(dtype, (batch, seqlen_k, heads_kv, spec.head_dim))
    v = _strided(dtype, (batch, seqlen_k, heads_kv, spec.head_dim_v))
    out = _strided(dtype, (batch, seqlen_q, heads, spec.head_dim_v))
    lse = runtime.make_fake_compact_tensor(
        cutlass.Float32, (batch, heads, seqlen_q), stride_order=(2, 1, 0), assumed_align=4
    )
    stream = runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return q, k, v, out, lse, cutlass.Float32(1.0), stream


def _strided(dtype, shape):
    """Any strides that keep rows 16-byte aligned, the last one 1."""
    from cutlass.cute import runtime, sym_int64

    elements = ALIGN_BYTES * 8 // dtype.width
    strides = (*(sym_int64(divisibility=elements) for _ in shape[:-1]), 1)
    return runtime.make_fake_tensor(dtype, shape, strides, assumed_align=ALIGN_BYTES)
