"""What is changed in the DSL while a session lasts, and put back after it.

Everything is an attribute of a class or module of the DSL, a setting of its environment manager,
or an environment variable. torch is never touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os

from ..errors import SimError
from .host_object import HostObject, redirect, to_object
from .host_runtime import HostProgram
from .host_tensors import CudaLooking, is_host_tensor

_ABSENT = object()


class Patches(contextlib.ExitStack):
    """Attribute, mapping and environment changes that are undone in reverse order."""

    def attribute(self, owner, name: str, value) -> None:
        own = vars(owner).get(name, _ABSENT) if hasattr(owner, "__dict__") else getattr(owner, name)
        setattr(owner, name, value)
        if own is _ABSENT:
            self.callback(delattr, owner, name)
        else:
            self.callback(setattr, owner, name, own)

    def environment(self, **values: str) -> None:
        for name, value in values.items():
            old = os.environ.get(name)
            os.environ[name] = value
            if old is None:
                self.callback(os.environ.pop, name, None)
            else:
                self.callback(os.environ.__setitem__, name, old)


def patch_dsl(patches: Patches, session) -> None:
    """Make the DSL compile for `session.arch`, and its compiled functions run on the session's
    machine.
    """
    import cutlass.cute  # noqa: F401  creates the DSL's singletons, whose settings are patched
    from cutlass.base_dsl.compiler import Compiler

    _patch_environment(patches, session)
    _patch_devices(patches, session)
    _patch_locations(patches)
    if getattr(Compiler.jit, "of_simulator", False):  # compiling inside a session: patched already
        return
    _patch_engine(patches, session)
    _patch_tensors(patches, session)
    _patch_calls(patches, session)


def _patch_environment(patches: Patches, session) -> None:
    from cutlass.base_dsl import env_manager
    from cutlass.base_dsl.dsl import DSLSingletonMeta

    patches.callback(_forget_environment, env_manager)
    patches.environment(
        CUTE_DSL_ARCH=session.arch.name,
        CUTE_DSL_KEEP="ptx",
        CUTE_DSL_DUMP_DIR=str(session.dump_dir),
        CUTE_DSL_LINEINFO="1" if session.lineinfo else "0",
        CUTE_DSL_NO_CACHE="1",
    )
    _forget_environment(env_manager)
    for dsl in DSLSingletonMeta._instances.values():
        settings = dsl.envar
        for name, value in (
            ("_arch", session.arch.name),
            ("keep_ptx", True),
            ("keep_tokens", frozenset(settings.keep_tokens | {"ptx"})),
            ("dump_dir", str(session.dump_dir)),
            ("lineinfo", session.lineinfo),
            ("no_cache", True),  # a function cached outside would call the real runtime
            ("disable_file_caching", True),
        ):
            patches.attribute(settings, name, value)


def _forget_environment(env_manager) -> None:
    """The manager caches what it read; make it read again."""
    for value in vars(env_manager).values():
        if callable(getattr(value, "cache_clear", None)) and value.__name__.endswith("env_var"):
            value.cache_clear()


def _patch_locations(patches: Patches) -> None:
    """Look up the Python line of an operation at a fraction of the price.

    The DSL walks a code object's table of positions anew for each operation that it traces, which
    takes a third of the compile time of a large kernel.
    """
    from cutlass._mlir_helpers import op

    walk, is_framework = (
        getattr(op, "_CO_POSITIONS", None),
        getattr(op, "_is_framework_module", None),
    )
    if walk is None or is_framework is None:  # another version: slower, not wrong
        return
    tables: dict[int, tuple] = {}  # by identity: hashing a code object reads all of it

    def positions(code):
        entry = tables.get(id(code))
        if entry is None:
            entry = tables[id(code)] = (code, list(walk(code)))
        return entry[1]

    patches.attribute(op, "_CO_POSITIONS", positions)
    patches.attribute(op, "_is_framework_module", functools.cache(is_framework))


def _patch_devices(patches: Patches, session) -> None:
    from cutlass.cutlass_dsl.cuda_jit_executor import (
        CudaDialectJitCompiledFunction,
        CudaDialectJitModule,
    )
    from cutlass.utils import HardwareInfo

    arch = session.arch
    patches.attribute(CudaDialectJitCompiledFunction, "num_devices", 1)
    patches.attribute(CudaDialectJitModule, "unload", lambda self: setattr(self, "_unloaded", True))
    patches.attribute(HardwareInfo, "__init__", lambda self, device_id=0: None)
    patches.attribute(HardwareInfo, "get_device_multiprocessor_count", lambda self: session.num_sms)
    patches.attribute(
        HardwareInfo,
        "get_max_active_clusters",
        lambda self, cluster_size, *_, **__: session.num_sms // cluster_size,
    )
    patches.attribute(HardwareInfo, "get_l2_cache_size_in_bytes", lambda self: arch.l2_bytes)


def _patch_engine(patches: Patches, session) -> None:
    """Plain (not TVM-FFI) functions: register our runtime in the engine before anything is looked
    up.
    """
    from cutlass.base_dsl.compiler import Compiler
    from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction

    compile_to_engine = Compiler.jit
    construct = CudaDialectJitCompiledFunction.__init__
    call = CudaDialectJitCompiledFunction.__call__
    harmless = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)

    def jit(self, module, opt_level=2, shared_libs=()):
        engine = compile_to_engine(self, module, opt_level, shared_libs)
        program = HostProgram(session.launch_in_current, session.arch.smem_bytes)
        for name, callback in program.callbacks.items():
            # Called from a destructor of the engine, perhaps after Python has gone.
            late = name == "cuda_dialect_unload_library_once"
            pointer = harmless if late else ctypes.cast(callback, ctypes.c_void_p)
            engine.raw_register_runtime(name, pointer)
        session.keep_program(engine, program)
        return engine

    def init(self, *args, **kwargs):
        construct(self, *args, **kwargs)
        program = session.program_of(self.engine)
        if program is not None:
            program.text = self.artifacts.PTX if self.artifacts is not None else None
            if self.execution_args is not None:
                program.arg_names = tuple(self.execution_args.signature.parameters)
            self._fa_cute_program = program

    def run(self, *args, **kwargs):
        program = getattr(self, "_fa_cute_program", None)
        if program is None:
            raise SimError(f"{self.function_name} was compiled outside a simulator session")
        result = call(self, *args, **kwargs)
        program.check()
        return result

    jit.of_simulator = True
    patches.attribute(Compiler, "jit", jit)
    patches.attribute(CudaDialectJitCompiledFunction, "__init__", init)
    patches.attribute(CudaDialectJitCompiledFunction, "__call__", run)


def _patch_tensors(patches: Patches, session) -> None:
    from cutlass.cute import runtime

    construct = runtime._Tensor.__init__

    def init(self, tensor, *args, **kwargs):
        if type(tensor).__module__ == "numpy":
            import torch

            tensor = torch.from_numpy(tensor)
        if is_host_tensor(tensor):
            session.share(tensor)
            tensor = CudaLooking(tensor)
        construct(self, tensor, *args, **kwargs)

    patches.attribute(runtime._Tensor, "__init__", init)


def _patch_calls(patches: Patches, session) -> None:
    """TVM-FFI functions: native code that calls our runtime, and tensors mapped at the call."""
    try:
        from cutlass.cutlass_dsl import tvm_ffi_provider as provider
    except ImportError:  # apache-tvm-ffi is not installed: no such functions
        return
    import tvm_ffi

    def create(self):
        if self.engine is None:
            return None
        program = self._fa_cute_program
        text, names = redirect(str(self.ir_module))
        blob = to_object(text)
        host = HostObject(blob, names, {name: program.callback(name) for name in names})
        symbol = "__tvm_ffi_" + self.function_name
        self._fa_cute_host = (host, blob, names, symbol, program)
        self.engine = host
        return tvm_ffi.Function.__from_extern_c__(host.symbol(symbol), keep_alive_object=host)

    patches.attribute(provider.TVMFFIJitCompiledFunctionBase, "_create_tvm_ffi_function", create)
    for cls in (provider.TVMFFIJitCompiledFunction, provider.TVMFFIJitCompiledFunctionWithKwargs):
        patches.attribute(cls, "__call__", _mapped_call(cls.__call__, session))


def _mapped_call(call, session):
    def run(self, *args, **kwargs):
        program = getattr(self, "_fa_cute_program", None)
        if program is None:
            raise SimError(f"{self.function_name} was compiled outside a simulator session")
        with session.call_arguments() as convert:
            args = convert(args, program.arg_names)
            kwargs = dict(zip(kwargs, convert(tuple(kwargs.values()), tuple(kwargs)), strict=True))
            result = call(self, *args, **kwargs)
        program.check()
        return result

    return run
