"""CPU torch tensors that the DSL takes for device memory, and where they lie.

The DSL derives the memory space of an argument from its DLPack device. A CPU tensor would be
traced as `generic` memory (other IR, other PTX, and TVM-FFI refuses it), so the exported DLPack
struct says CUDA while the data pointer stays what it is: an address of this process, which is
what the simulated kernel works on.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

DL_CUDA = 2
_DEVICE_TYPE_OFFSET = 8  # DLTensor: void* data, then DLDevice{int32 type, int32 id}

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


@dataclass(frozen=True)
class Extent:
    """One range of memory that a launch may touch: `nbytes` bytes from `ptr`."""

    ptr: int
    nbytes: int
    name: str


class CudaLooking:
    """DLPack exporter of a CPU tensor whose device reads CUDA 0."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack_device__(self):
        return (DL_CUDA, 0)

    def __dlpack__(self, **_):
        from torch.utils.dlpack import to_dlpack

        capsule = to_dlpack(self.tensor.detach())
        managed = _capsule_pointer(capsule, b"dltensor")
        ctypes.c_int32.from_address(managed + _DEVICE_TYPE_OFFSET).value = DL_CUDA
        return capsule


def extent_of(tensor, name: str) -> Extent:
    """From the first to the last element that the (possibly strided) view reaches."""
    if tensor.numel() == 0:
        return Extent(tensor.data_ptr(), 0, name)
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return Extent(tensor.data_ptr(), (last + 1) * tensor.element_size(), name)


def is_host_tensor(value) -> bool:
    """A torch tensor in CPU memory; asks torch nothing about `is_cuda`, which a session may have
    patched.
    """
    import torch

    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def map_tensors(value, convert, path: str = ""):
    """`value` with every CPU tensor in it, however nested, replaced by `convert(tensor, path)`."""
    if is_host_tensor(value):
        return convert(value, path)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        items = (map_tensors(v, convert, f"{path}.{f}") for f, v in zip(value._fields, value))
        return type(value)(*items)
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(v, convert, f"{path}[{i}]") for i, v in enumerate(value))
    return value
