"""Compiled CuTe-DSL functions, called with torch CPU tensors, on the simulated machine.

with host.session("sm_100a") as s: compiled = cute.compile(kernel, ..., options="--enable-tvm-
ffi") compiled(q, k, v) s.launches # one report per kernel launch

host.save(compiled, path) # another process, no DSL and no tracing: with host.session("sm_100a",
dsl=False): host.load(path)(q, k, v)
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import shutil
import struct
import tempfile
from pathlib import Path

from .. import arch as arches
from ..errors import SimError
from .host_object import HostObject
from .host_patch import Patches, patch_dsl
from .host_runtime import HostProgram, NoSessionError
from .host_tensors import CudaLooking, Extent, extent_of, map_tensors

_MAGIC = b"fa_cute host function 2\n"
_current: Session | None = None
_kept: list = []  # engines and C callbacks, for ever: native code may still call them


@functools.cache
def _dump_dir() -> Path:
    """Where the DSL writes PTX: private, because its file names are not unique."""
    folder = Path(tempfile.mkdtemp(prefix="fa_cute_ptx_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class Session:
    """One machine that compiled functions run on; `launches` has a report per kernel launch."""

    def __init__(
        self, arch, schedule=None, num_sms: int | None = None, lineinfo: bool = True, **options
    ):
        self.arch = arches.get(arch) if isinstance(arch, str) else arch
        self.schedule = schedule  # None: asynchronous work completes at once
        self.num_sms = num_sms or self.arch.num_sms
        self.lineinfo = lineinfo
        self.options = options
        self.launches: list = []
        self._shared: dict[int, tuple] = {}
        self._arguments: list[Extent] = []

    @property
    def dump_dir(self) -> Path:
        return _dump_dir()

    def share(self, tensor, name: str = "tensor") -> None:
        """Let every launch of this session access `tensor`, which no call has as an argument."""
        self._shared[tensor.data_ptr()] = (extent_of(tensor, name), tensor)

    @contextlib.contextmanager
    def call_arguments(self):
        """Yields the mapping of arguments; its tensors are accessible until the end."""
        import tvm_ffi

        before, keep = list(self._arguments), []

        def convert_one(tensor, path):
            self._arguments.append(extent_of(tensor, path or "argument"))
            keep.append(tensor)
            return tvm_ffi.from_dlpack(CudaLooking(tensor))

        def convert(values, names=()):
            labels = [
                *names[: len(values)],
                *(f"argument {i}" for i in range(len(names), len(values))),
            ]
            return tuple(map_tensors(v, convert_one, n) for v, n in zip(values, labels))

        try:
            yield convert
        finally:
            self._arguments = before

    def launch(self, kernel, grid, block, cluster, dynamic_smem: int, params: bytes) -> None:
        from . import machine, memory

        world = memory.GlobalMemory()
        for extent in (*self._arguments, *(extent for extent, _ in self._shared.values())):
            world.add(extent.ptr, extent.nbytes, extent.name)
        report = machine.run(
            kernel,
            grid,
            block,
            cluster,
            dynamic_smem,
            params,
            world,
            self.schedule or "early",
            machine.Options(**self.options),
        )
        self.launches.append(report)

    @staticmethod
    def launch_in_current(*args) -> None:
        """What compiled code calls: it may have been compiled in an earlier session."""
        if _current is None:
            raise NoSessionError("a simulated kernel was launched outside a session")
        _current.launch(*args)

    @staticmethod
    def keep_program(engine, program: HostProgram) -> None:
        _kept.append((engine, program))

    @staticmethod
    def program_of(engine) -> HostProgram | None:
        return next((p for e, p in reversed(_kept) if e is engine), None)


@contextlib.contextmanager
def session(arch="sm_100a", *, schedule=None, dsl: bool = True, **options):
    """Run compiled functions on a simulated `arch` inside the `with`; nothing is changed after it.

    With `dsl=False` nothing of the DSL is imported or patched, and only functions of `load` and
    `function_of` can be called.
    """
    global _current
    if _current is not None:
        raise SimError("simulator sessions don't nest; leave the other `with` first")
    new = Session(arch, schedule=schedule, **options)
    with Patches() as patches:
        if dsl:
            patch_dsl(patches, new)
        _current = new
        try:
            yield new
        finally:
            _current = None


def current() -> Session | None:
    """The session whose `with` is open, if one is."""
    return _current


@contextlib.contextmanager
def compiling(arch):
    """Compile functions for a simulated `arch` inside the `with`; they run in later sessions."""
    with Patches() as patches:
        new = Session(arch)
        patch_dsl(patches, new)
        yield new


class HostFunction:
    """A compiled function without the DSL: called by position, with CPU tensors, inside a
    session.
    """

    def __init__(self, host: HostObject, blob: bytes, names, symbol: str, program: HostProgram):
        import tvm_ffi

        self._blob, self._names, self._symbol, self._program = blob, tuple(names), symbol, program
        self._function = tvm_ffi.Function.__from_extern_c__(
            host.symbol(symbol), keep_alive_object=host
        )
        _kept.append((host, program))

    @property
    def ptx(self) -> str:
        return self._program.text

    def __call__(self, *args):
        if _current is None:
            raise SimError("a simulated function is called inside `with host.session(arch):`")
        with _current.call_arguments() as convert:
            result = self._function(*convert(args, self._program.arg_names))
        self._program.check()
        return result

    def to_bytes(self) -> bytes:
        """A JSON header, the PTX, the object code of the host function."""
        text = self.ptx.encode()
        header = {
            "symbol": self._symbol,
            "names": self._names,
            "arg_names": self._program.arg_names,
            "smem_bytes": self._program.smem_bytes,
            "ptx_bytes": len(text),
        }
        head = json.dumps(header).encode()
        return _MAGIC + struct.pack("<I", len(head)) + head + text + self._blob

    def save(self, path) -> None:
        """One file that `load` reads."""
        path = Path(path)
        partial = path.with_name(f"{path.name}.{id(self):x}.partial")
        partial.write_bytes(self.to_bytes())
        partial.replace(path)  # readers see the whole file or none


def function_of(compiled) -> HostFunction:
    """The native half of a TVM-FFI function that was compiled in a session."""
    parts = getattr(compiled, "_fa_cute_host", None)
    if parts is None:
        raise SimError(
            "only functions compiled with --enable-tvm-ffi inside a session can be taken out of it"
        )
    return HostFunction(*parts)


def save(compiled, path) -> None:
    """Write a TVM-FFI function that was compiled in a session to one file."""
    function = compiled if isinstance(compiled, HostFunction) else function_of(compiled)
    function.save(path)


def load(path) -> HostFunction:
    """The function that `save` wrote; costs some 10 ms, imports nothing of the DSL's Python."""
    return from_bytes(Path(path).read_bytes())


def from_bytes(data: bytes) -> HostFunction:
    """The function that `HostFunction.to_bytes` took apart."""
    if not data.startswith(_MAGIC):
        raise SimError("these bytes are not a saved host function of this version")
    start = len(_MAGIC) + 4
    (head_bytes,) = struct.unpack("<I", data[len(_MAGIC) : start])
    header = json.loads(data[start : start + head_bytes])
    text_at = start + head_bytes
    blob_at = text_at + header["ptx_bytes"]
    program = HostProgram(
        Session.launch_in_current, header["smem_bytes"], data[text_at:blob_at].decode()
    )
    program.arg_names = tuple(header["arg_names"])
    names, blob = header["names"], data[blob_at:]
    host = HostObject(blob, names, {name: program.callback(name) for name in names})
    return HostFunction(host, blob, names, header["symbol"], program)
