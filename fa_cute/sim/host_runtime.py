"""The CUDA runtime as a compiled host function sees it: a dozen C callbacks, one of which launches.

A callback must not raise through C. An exception is kept in `HostProgram.error`, the rest of the
host function runs on with launches disabled, and whoever called it re-raises
(`HostProgram.check`).
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char_p,
    c_int32,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
)

from ..errors import MisuseError, SimError
from . import ptx

_ATTRIBUTE_COOPERATIVE = 2
_LARGEST_GRID = (2**31 - 1, 65535, 65535)
_ATTRIBUTE_CLUSTER_DIMENSION = 4
_DEVICE_MAX_SHARED_OPTIN = 97
_ERROR_NO_DEVICE = 100  # cudaErrorNoDevice


class NoSessionError(SimError):
    """Simulated code that runs after its session: nobody would look at a kept error, so C gets a
    code.
    """


class _LaunchAttribute(Structure):
    _fields_ = [("id", c_int32), ("pad", c_int32), ("value", c_uint32 * 16)]


class _LaunchConfig(Structure):
    _fields_ = [
        ("grid", c_uint32 * 3),
        ("block", c_uint32 * 3),
        ("dynamic_smem", c_uint64),
        ("stream", c_void_p),
        ("attributes", POINTER(_LaunchAttribute)),
        ("num_attributes", c_uint32),
    ]


@functools.lru_cache(maxsize=64)
def parse(text: str):
    """The parsed module of a PTX text; a session launches the same text many times."""
    return ptx.parse(text)


class HostProgram:
    """One compiled host function: its PTX, the callbacks that its native code calls, its pending
    error.
    """

    def __init__(self, launch, smem_bytes: int, text: str | None = None):
        """`launch(kernel, grid, block, cluster, dynamic_smem, params)` runs a kernel of this
        program.
        """
        self.text = text
        self.arg_names: tuple[str, ...] = ()  # of the host function, for messages
        self.error: BaseException | None = None
        self._launch = launch
        self.smem_bytes = smem_bytes
        self._kernel_names: list[str] = []
        self.callbacks = self._make_callbacks()

    def check(self) -> None:
        """Raise what went wrong inside the last call, if anything did."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    def kernel(self, name: str):
        if self.text is None:
            raise SimError(
                f"kernel {name!r} has no PTX text: it was compiled without keeping its PTX"
            )
        kernels = parse(self.text).kernels
        if name not in kernels:
            raise SimError(f"kernel {name!r} is not in its PTX; there: {', '.join(kernels)}")
        return kernels[name]

    def launch(self, config: _LaunchConfig, handle: int, args) -> None:
        kernel = self.kernel(self._kernel_names[handle - 1])
        cluster = (1, 1, 1)
        for i in range(config.num_attributes):
            attribute = config.attributes[i]
            if attribute.id == _ATTRIBUTE_CLUSTER_DIMENSION:
                cluster = tuple(attribute.value[:3])
        grid = tuple(config.grid)
        if any(g % c for g, c in zip(grid, cluster, strict=True)):
            raise MisuseError(f"grid {grid} is not a multiple of the cluster {cluster}")
        if any(g > most for g, most in zip(grid, _LARGEST_GRID, strict=True)):
            raise MisuseError(f"grid {grid} of {kernel.name} is larger than {_LARGEST_GRID}")
        if config.dynamic_smem > self.smem_bytes:
            raise MisuseError(
                f"{kernel.name} asks for {config.dynamic_smem} bytes of dynamic shared memory; "
                f"the architecture allows {self.smem_bytes}"
            )
        params = pack_params(kernel.params, args)
        self._launch(kernel, grid, tuple(config.block), cluster, int(config.dynamic_smem), params)

    def _guarded(self, function):
        @functools.wraps(function)
        def call(*args):
            if self.error is None:
                try:
                    function(*args)
                except NoSessionError:
                    return _ERROR_NO_DEVICE
                except BaseException as error:  # raised again by `check`
                    self.error = error
            return 0

        return call

    def _make_callbacks(self) -> dict[str, object]:
        """Symbol -> C function object.  Pointers arrive as plain integers (or None for NULL)."""
        p, i = c_void_p, c_int32

        def load_library(library, _image, *_rest):
            c_void_p.from_address(library).value = 1

        def get_kernel(kernel, _library, name):
            self._kernel_names.append(name.decode())
            c_void_p.from_address(kernel).value = len(self._kernel_names)

        def kernel_attribute(out, _attribute, _kernel, _device):
            c_int32.from_address(out).value = 0

        def device_attribute(out, attribute, _device):
            known = attribute == _DEVICE_MAX_SHARED_OPTIN
            c_int32.from_address(out).value = self.smem_bytes if known else 0

        def write(value):
            def store(out, *_rest):
                c_int32.from_address(out).value = value

            return store

        def nothing(*_):
            pass

        def launch_ex(config, kernel, args):
            self.launch(_LaunchConfig.from_address(config), kernel, args)

        def launch_plain(kernel, *rest):
            *sizes, _stream, smem, args = rest
            config = _LaunchConfig(tuple(sizes[:3]), tuple(sizes[3:]), smem, None, None, 0)
            self.launch(config, kernel, args)

        def init_once(state, init, load, _describe_error):
            cell = c_void_p.from_address(state)
            if not cell.value:
                CFUNCTYPE(c_int32, c_void_p)(init)(state)
                CFUNCTYPE(c_int32, c_void_p, c_int32)(load)(state, 0)

        functions = {
            "_cudaLibraryLoadData": (load_library, (p, p, p, p, i, p, p, i)),
            "_cudaLibraryGetKernel": (get_kernel, (p, p, c_char_p)),
            "_cuKernelGetAttribute": (kernel_attribute, (p, i, p, i)),
            "_cudaDeviceGetAttribute": (device_attribute, (p, i, i)),
            "_cudaGetDevice": (write(0), (p,)),
            "_cudaSetDevice": (nothing, (i,)),
            "_cudaGetDeviceCount": (write(1), (p,)),
            "_cudaKernelSetAttributeForDevice": (nothing, (p, i, i, i)),
            "_cudaFuncSetAttribute": (nothing, (p, i, i)),
            "_cudaOccupancyMaxActiveBlocksPerMultiprocessor": (write(1), (p, p, i, c_int64)),
            "_cudaLaunchKernelEx": (launch_ex, (p, p, p)),
            "_cudaLaunchKernel": (launch_plain, (p, i, i, i, i, i, i, p, c_int64, p)),
            "cuda_dialect_init_library_once": (init_once, (p, p, p, p)),
            "cuda_dialect_unload_library_once": (nothing, (p,)),
            "cuda_dialect_get_error_name": (nothing, (i,)),
            "CuteDSLRT_TVMFFISetRaisedCudaError": (nothing, (p, i)),
        }
        return {
            name: CFUNCTYPE(c_int32, *types)(self._guarded(function))
            for name, (function, types) in functions.items()
        }

    def callback(self, name: str):
        """The callback of a symbol; one that fails loudly for a symbol nobody has met yet."""
        if name not in self.callbacks:

            def unknown(*_):
                raise SimError(
                    f"the compiled host code calls {name}, which the simulator does not model"
                )

            self.callbacks[name] = CFUNCTYPE(c_int32)(self._guarded(unknown))
        return self.callbacks[name]


def pack_params(params, args: int) -> bytes:
    """The kernel's parameter buffer: `args` is a C array of pointers to the values, in order."""
    size = max((param.offset + param.size for param in params), default=0)
    buffer = bytearray(size)
    pointers = (c_void_p * len(params)).from_address(args) if params else ()
    for param, pointer in zip(params, pointers, strict=True):
        buffer[param.offset : param.offset + param.size] = ctypes.string_at(pointer, param.size)
    return bytes(buffer)
