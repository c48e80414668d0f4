"""Compile a kernel for an architecture, once: the config and the spec are the key.

Tensor sizes and strides are symbols here, so one compiled function serves every batch, length and
view. Compiled functions are kept on disk as well (cache.py).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache as once
from importlib import import_module
from pathlib import Path
from typing import Any

from . import cache, log, tune, watchdog
from .arch import Arch
from .errors import ArgumentError, CompileDuringCaptureError, CompileError, FaCuteError

ALIGN_BYTES = 16
TARGETS = ("cuda", "sim")
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
NO_LENGTHS = (False, False, False, False)
WINDOWS = {  # sides with a limit -> their name on the command line
    (False, False): "none",
    (True, False): "left",
    (False, True): "right",
    (True, True): "both",
}
EXPORTED = "fa_cute_kernel"  # the symbol of a compiled function in its object file
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
    # varlen: which of LENGTHS come in
    lengths: tuple[bool, bool, bool, bool] = NO_LENGTHS

    @property
    def where(self) -> tuple[str, str]:
        """Module and class."""
        table = tune.KERNELS if self.kind == "forward" else tune.BACKWARD_KERNELS
        return table[self.arch.family]

    @property
    def label(self) -> str:
        """What it is, in one word: sm_90a-bwd-d192_128-causal-deterministic."""
        s = self.spec
        dims = dict.fromkeys((s.head_dim, s.head_dim_v))
        words = [self.arch.name, {"forward": "fwd", "backward": "bwd"}[self.kind]]
        words += ["d" + "_".join(map(str, dims)), "causal" if s.causal else "full"]
        words += [f"window_{WINDOWS[s.window]}"] * any(s.window)
        words += [f"gqa{s.qhead_per_kvhead}"] * (s.qhead_per_kvhead > 1)
        words += ["varlen"] * s.varlen + [str(s.custom)] * (s.custom is not None)
        words += ["negative_scale"] * getattr(s, "negative_scale", False)
        words += ["deterministic"] * getattr(s, "deterministic", False)
        return "-".join(words + ["lse_grad"] * self.has_dlse)

    def __str__(self) -> str:
        return f"{self.where[1]} {self.label} in {self.spec.dtype}"

    def command(self, target: str) -> str:
        """The command that compiles this kernel, in a process of its own."""
        spec = self.spec
        words = [f"python -m fa_cute warmup --arch {self.arch} --target {target}"]
        words.append(f"--dtype {spec.dtype} --head-dim {spec.head_dim}")
        if spec.head_dim_v != spec.head_dim:
            words.append(f"--head-dim-v {spec.head_dim_v}")
        words.append(f"--mask {'causal' if spec.causal else 'full'} --pass {self.kind}")
        if spec.custom is not None:
            return f"{' '.join(words)}  # but with the mask {spec.custom}, which no command knows"
        if any(spec.window):
            words.append(f"--window {WINDOWS[spec.window]}")
        if spec.varlen:
            given = (name for name, here in zip(LENGTHS, self.lengths, strict=True) if here)
            words.append(f"--varlen {' '.join(given)}")
        if getattr(spec, "negative_scale", False):
            words.append("--negative-scale")
        if self.kind == "backward":
            words.append(f"--gqa {spec.qhead_per_kvhead}")
            words += ["--deterministic"] * spec.deterministic + ["--lse-grad"] * self.has_dlse
        return " ".join(words)


def forward(cfg, spec, arch: Arch, target: str, lengths=NO_LENGTHS) -> Callable:
    """The forward kernel as ``fn(q, k, v, out, lse, *launch.rest(...))`` on torch tensors.

    ``target`` "cuda" runs on the current device and stream, "sim" on CPU tensors in the simulator;
    ``lengths`` says which of LENGTHS a varlen call gives.
    """
    return get(Request("forward", cfg, spec, arch, lengths=lengths), target)


def backward(cfg, spec, arch: Arch, target: str, has_dlse: bool, lengths=NO_LENGTHS) -> Callable:
    """The backward: ``fn(q, k, v, out, lse, dout, dlse, dq, dk, dv, work, *launch.rest(...))``.

    ``dlse`` is None unless ``has_dlse``; ``work`` is fp32 scratch, as long as
    `bwd.args.workspace_floats` says.
    """
    return get(Request("backward", cfg, spec, arch, has_dlse, lengths), target)


def clear() -> None:
    """Forget the kernels in memory; those on disk stay."""
    with _lock:
        _memory.clear()


MODES = ("off", "warn", "error")
_monitor: list[str] = []  # what jit_monitor set, if it did


def jit_monitor(mode: str) -> str:
    """Say what a compile does: "off" nothing, "warn" a warning, "error" a CompileError.

    FA_CUTE_JIT_MONITOR sets it from outside. A kernel that comes from the disk is no compile.
    Returns the mode before.
    """
    if mode not in MODES:
        raise ArgumentError(f"jit_monitor takes {', '.join(MODES)}; not {mode!r}")
    before = _mode()
    _monitor[:] = [mode]
    return before


@contextlib.contextmanager
def wanted():
    """Compiles in this `with` are asked for: `jit_monitor` is silent, and after it as before."""
    before = _monitor[:]
    _monitor[:] = ["off"]
    try:
        yield
    finally:
        _monitor[:] = before


def _mode() -> str:
    mode = _monitor[0] if _monitor else os.environ.get("FA_CUTE_JIT_MONITOR", "").strip() or "off"
    if mode not in MODES:
        raise ArgumentError(f"FA_CUTE_JIT_MONITOR is {mode!r}; allowed: {', '.join(MODES)}")
    return mode


def capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    torch = sys.modules.get("torch")
    return (
        torch is not None
        and torch.cuda.is_initialized()
        and torch.cuda.is_current_stream_capturing()
    )


def get(request: Request, target: str) -> Callable:
    """The function of a request: from memory, from disk, or compiled now."""
    key = (request, target)
    fn = _memory.get(key)
    if fn is None:
        if target == "cuda" and capturing():  # loading one that is on disk is not allowed either
            raise CompileDuringCaptureError(
                f"{request} is not loaded, and the stream is being captured into a CUDA graph; run "
                "the same call once before the capture (torch.cuda.graph's warm-up), or load it "
                f"before by: {request.command(target)}"
            )
        with _lock:  # two threads that ask for one kernel compile it once
            fn = _memory.get(key)
            if fn is None:
                fn = _memory[key] = _load_or_build(request, target)
    return fn


def entry(request: Request, target: str) -> cache.Entry:
    """Where a kernel lies on disk."""
    if target not in TARGETS:
        raise CompileError(f"unknown target {target!r}; allowed: {', '.join(TARGETS)}")
    return cache.entry(request.kind, target, request)


def _load_or_build(request: Request, target: str) -> Callable:
    place = entry(request, target)
    fn = _load(place, target)
    if fn is not None:
        return fn
    with cache.lock(place):
        fn = _load(place, target)  # another process made it meanwhile
        if fn is None:
            announce(request, target)
            start = time.perf_counter()
            limit = cache.lock_seconds()
            late = (
                f"fa_cute: {request} is not done after {limit:g} s (FA_CUTE_COMPILE_TIMEOUT)\n"
                f"  to repeat it: {request.command(target)}"
            )
            with watchdog.at_most(limit, late):
                fn, payload = (build_sim if target == "sim" else build_cuda)(request)
            cache.store(place, payload, seconds=round(time.perf_counter() - start, 2))
    return fn


def _load(place: cache.Entry, target: str) -> Callable | None:
    payload = cache.find(place)
    if payload is None:
        return None
    try:
        return load_sim(payload) if target == "sim" else load_cuda(payload)
    except Exception as error:  # nothing that lies on a disk may stop a call
        cache.drop(place, error)
        return None


def announce(request: Request, target: str) -> None:
    """Log a compile, as loudly as `jit_monitor` says."""
    mode = _mode()
    if mode == "error":
        raise CompileError(
            f"{request} has to be compiled and jit_monitor is 'error'; compile it before by: "
            f"{request.command(target)}"
        )
    say = _log.warning if mode == "warn" else _log.info
    say("compiling %s; to do so before: %s", request, request.command(target))


def load_sim(payload: bytes) -> Callable:
    """A function for the simulator."""
    from .sim import host

    return host.from_bytes(payload)


def build_sim(request: Request) -> tuple[Callable, bytes]:
    """The same compiled now, and its bytes."""
    from .sim import host

    require_dsl()
    with host.compiling(request.arch):
        fn = host.function_of(build(request))
    return fn, fn.to_bytes()


def load_cuda(payload: bytes) -> Callable:
    """A function for CUDA devices: linked into this process without the DSL's Python."""
    import tvm_ffi

    from .sim import mlir

    libraries = [*_runtime_libraries(), tvm_ffi.libinfo.find_libtvm_ffi()]
    engine = mlir.binary_engine(payload, libraries)
    address = engine.lookup(f"__tvm_ffi_{EXPORTED}")
    return tvm_ffi.Function.__from_extern_c__(address, keep_alive_object=engine)


def build_cuda(request: Request) -> tuple[Callable, bytes]:
    """The same compiled now, and its object file."""
    fn = build(request)
    with tempfile.TemporaryDirectory(prefix="fa_cute_export_") as folder:
        file = Path(folder) / "kernel.o"
        fn.export_to_c(str(file), function_name=EXPORTED)
        return fn, file.read_bytes()


@once
def _runtime_libraries() -> list[str]:
    """The shared library of the DSL that compiled host code calls."""
    found = importlib.util.find_spec("cutlass")
    if found is None:
        raise CompileError("nvidia-cutlass-dsl is not installed")
    from .sim import mlir

    package = Path(next(iter(found.submodule_search_locations))).parents[1]
    # Of several toolkits (cu12, cu13) the one whose extension module the DSL's loader chose.
    toolkit = Path(mlir.extension().__file__).name.split(".")[1]
    library = package / toolkit / "lib" / "libcute_dsl_runtime.so"
    if library.exists():
        return [str(library)]
    from cutlass.runtime import find_runtime_libraries  # of a build that is laid out otherwise

    return find_runtime_libraries(enable_tvm_ffi=False)


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
    try:
        kernel = getattr(import_module(module), name)(request.cfg, request.spec)
        return cute.compile(kernel, *_arguments(request), options=flags)
    except FaCuteError:
        raise
    except Exception as error:  # the DSL raises its own kinds
        raise CompileError(
            f"{name} for {request.arch} does not compile: {type(error).__name__}: {error}\n"
            f"  spec: {request.spec}\n  config: {request.cfg}\n"
            f"  to repeat it: {request.command('sim')}"
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
    from cutlass.cute import runtime, sym_int

    spec = request.spec
    dtype = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}[spec.dtype]
    batch, seqlen_q, seqlen_k, heads, heads_kv = (sym_int() for _ in range(5))
    first = () if spec.varlen else (batch,)  # else all sequences share the dimension of rows

    def like_q(head_dim):
        return _strided(dtype, (*first, seqlen_q, heads, head_dim))

    def like_k(head_dim):
        return _strided(dtype, (*first, seqlen_k, heads_kv, head_dim))

    def rows():
        return packed(cutlass.Float32, *first, heads, seqlen_q)

    def packed(kind, *shape):
        order = tuple(reversed(range(len(shape))))
        return runtime.make_fake_compact_tensor(kind, shape, stride_order=order, assumed_align=4)

    d, dv = spec.head_dim, spec.head_dim_v
    tensors = [like_q(d), like_k(d), like_k(dv), like_q(dv), rows()]
    if request.kind == "backward":
        tensors += [like_q(dv), rows() if request.has_dlse else None]
        tensors += [like_q(d), like_k(d), like_k(dv)]
        tensors.append(_scratch(cutlass.Float32))
    limits = [cutlass.Int32(1) if limited else None for limited in spec.window]
    lengths = [packed(cutlass.Int32, sym_int()) if given else None for given in request.lengths]
    tiles = _scratch(cutlass.Int32) if spec.varlen else None
    stream = runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    rest = (cutlass.Float32(1.0), *limits, *lengths, tiles, cutlass.Int32(1))
    return *tensors, *rest, stream


def _scratch(kind):
    """Memory that a call allocates for its kernels."""
    from cutlass.cute import runtime, sym_int64

    return runtime.make_fake_tensor(kind, (sym_int64(),), (1,), assumed_align=ALIGN_BYTES)


def _strided(dtype, shape):
    """Any strides that keep rows 16-byte aligned, the last one 1."""
    from cutlass.cute import runtime, sym_int64

    elements = ALIGN_BYTES * 8 // dtype.width
    strides = (*(sym_int64(divisibility=elements) for _ in shape[:-1]), 1)
    return runtime.make_fake_tensor(dtype, shape, strides, assumed_align=ALIGN_BYTES)
