"""The memories of the simulated GPU: global, shared and tensor memory, and their checks."""

from __future__ import annotations

import bisect
import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fa_cute.errors import MisuseError, OutOfBoundsError
from fa_cute.sim.operands import OFFSET_MASK, SMEM_START

if TYPE_CHECKING:
    from fa_cute.sim.ptx import Instr

BASE = 0x1000  # numpy needs a data pointer above 0: element i of `u8` is address i + BASE
_SPAN = 1 << 47

TMEM_LANES = 128
TMEM_COLS = 512
TMEM_GRANULE = 32  # columns


def _address_space(dtype: str) -> np.ndarray:
    """One array over the whole address space of this process; touch only checked ranges."""

    class Everything:
        def __init__(self) -> None:
            self.__array_interface__ = {
                "shape": (_SPAN // np.dtype(dtype).itemsize,),
                "typestr": np.dtype(dtype).str,
                "data": (BASE, False),
                "version": 3,
            }

    return np.asarray(Everything())


def aligned_zeros(nbytes: int, align: int = 1024) -> np.ndarray:
    """uint8 zeros whose address is a multiple of `align`."""
    raw = np.zeros(nbytes + align, np.uint8)
    start = -raw.ctypes.data % align
    return raw[start : start + nbytes]


def place(ins: Instr | None) -> str:
    return f"{ins.where}: {ins.op}: " if ins is not None else ""


@dataclass(frozen=True)
class Extent:
    """A tensor: bytes [start, stop) of this process."""

    start: int
    stop: int
    name: str
    writable: bool = True


class GlobalMemory:
    """What a launch may touch: the extents of the tensors it was given, at their real addresses."""

    def __init__(self, extents=()) -> None:
        self.extents: list[Extent] = []
        self.starts: list[int] = []  # of the merged ranges
        self.stops: list[int] = []
        self.u8 = _address_space("u1")
        self.u16 = _address_space("u2")
        self.u32 = _address_space("u4")
        self.u64 = _address_space("u8")
        self.f32 = _address_space("f4")
        self._keep: list = []
        for extent in extents:
            self.add(extent.ptr, extent.nbytes, extent.name)

    def add(self, ptr: int, nbytes: int, name: str, writable: bool = True) -> None:
        """Allow accesses to `nbytes` bytes from `ptr`; views of one tensor may overlap."""
        if nbytes <= 0:
            return
        extent = Extent(ptr, ptr + nbytes, name, writable)
        if extent in self.extents:
            return
        self.extents.append(extent)
        self.starts, self.stops = [], []
        for e in sorted(self.extents, key=lambda e: e.start):
            if self.stops and e.start < self.stops[-1]:
                self.stops[-1] = max(self.stops[-1], e.stop)
            else:
                self.starts.append(e.start)
                self.stops.append(e.stop)

    def add_array(self, array: np.ndarray, name: str) -> int:
        """Register a contiguous numpy array and keep it alive; its address."""
        self._keep.append(array)
        self.add(array.ctypes.data, array.nbytes, name)
        return array.ctypes.data

    def table(self) -> np.ndarray:
        """uint64[n, 2], sorted [start, stop) of the merged ranges (for native code)."""
        return np.array([self.starts, self.stops], np.uint64).T.copy().reshape(-1, 2)

    def check(self, addr: int, nbytes: int, ins: Instr | None = None, what: str = "read") -> None:
        i = bisect.bisect_right(self.starts, addr) - 1
        if i < 0 or addr + nbytes > self.stops[i]:
            raise self.outside(addr, nbytes, ins, what)

    def check_lanes(self, addrs: np.ndarray, nbytes: int, ins: Instr | None, what: str) -> None:
        """`check` for a small array of addresses."""
        starts, stops = np.array(self.starts, np.uint64), np.array(self.stops, np.uint64)
        if not len(starts):
            raise self.outside(int(addrs[0]), nbytes, ins, what)
        i = np.searchsorted(starts, addrs, side="right").astype(np.int64) - 1
        wrong = (i < 0) | (addrs + np.uint64(nbytes) > stops[np.maximum(i, 0)])
        if wrong.any():
            raise self.outside(int(addrs[wrong][0]), nbytes, ins, what)

    def view(
        self, addr: int, nbytes: int, ins: Instr | None = None, what: str = "read"
    ) -> np.ndarray:
        """The checked bytes [addr, addr + nbytes), writable."""
        i = bisect.bisect_right(self.starts, addr) - 1
        if i < 0 or addr + nbytes > self.stops[i]:
            raise self.outside(addr, nbytes, ins, what)
        return self.u8[addr - BASE : addr - BASE + nbytes]

    def name_of(self, addr: int) -> str:
        """`out+128`, or the hexadecimal address outside every tensor."""
        for e in self.extents:
            if e.start <= addr < e.stop:
                return f"{e.name}+{addr - e.start}"
        return hex(addr)

    def outside(
        self, addr: int, nbytes: int, ins: Instr | None = None, what: str = "read"
    ) -> OutOfBoundsError:
        """The error, with the tensor that the address probably meant."""
        text = f"{place(ins)}{what} of {nbytes} bytes at {addr:#x} is outside every tensor"
        if self.extents:

            def distance(e: Extent) -> int:
                return max(e.start - addr, addr + nbytes - e.stop)

            near = min(self.extents, key=distance)
            side = (
                f"{near.start - addr} bytes before the start"
                if addr < near.start
                else f"{addr + nbytes - near.stop} bytes past the end"
            )
            text += f": {side} of {near.name!r} ({near.stop - near.start} bytes)"
        return OutOfBoundsError(text)


class SharedMemory:
    """One CTA's shared window, indexed by the low 24 bits of an address (so with the system's KiB).

    Bytes start as 0xFF, a NaN in every float format; `valid` says which were written.
    """

    __slots__ = ("bytes", "size", "valid")

    def __init__(self, user_bytes: int):
        self.size = SMEM_START + user_bytes
        self.bytes = aligned_zeros(self.size)
        self.valid = np.zeros(self.size, np.uint8)
        self.reset()

    def reset(self) -> None:
        self.bytes[:] = 0xFF
        self.valid[:] = 0

    def check(self, addr: int, nbytes: int, ins: Instr | None, what: str, names=None) -> int:
        """The offset of a checked shared address."""
        offset = addr & OFFSET_MASK
        if offset < SMEM_START or offset + nbytes > self.size:
            field = f" (nearest field {names(offset)})" if names else ""
            raise OutOfBoundsError(
                f"{place(ins)}{what} of {nbytes} bytes at shared address {addr:#x} is outside the "
                f"{self.size - SMEM_START} bytes that the launch has{field}"
            )
        return offset


class TmemAllocator:
    """Which columns of tensor memory a CTA owns."""

    __slots__ = ("blocks", "last", "owned", "relinquished", "start", "stop")

    def __init__(self) -> None:
        self.start = self.stop = 0  # one run of owned columns, to answer most checks fast
        self.owned = np.zeros(TMEM_COLS, bool)
        self.blocks: dict[int, int] = {}  # first column -> columns
        self.relinquished = False
        self.last = TMEM_COLS

    def alloc(self, ncols: int, ins: Instr | None = None) -> int | None:
        """First free, size-aligned columns; None when there is no room now."""
        if ncols < TMEM_GRANULE or ncols > TMEM_COLS or ncols & (ncols - 1):
            raise MisuseError(
                f"{place(ins)}{ncols} columns; allowed are powers of two from 32 to 512"
            )
        if self.relinquished:
            raise MisuseError(f"{place(ins)}this CTA has relinquished its permit to allocate")
        if ncols > self.last:
            raise MisuseError(
                f"{place(ins)}{ncols} columns after an allocation of {self.last}: "
                "the number must not grow"
            )
        for col in range(0, TMEM_COLS, ncols):
            if not self.owned[col : col + ncols].any():
                self.owned[col : col + ncols] = True
                self.blocks[col] = ncols
                self.last = ncols
                self._widest()
                return col
        return None

    def free(self, col: int, ncols: int, ins: Instr | None = None) -> None:
        if self.blocks.get(col) != ncols:
            have = ", ".join(f"{c}..{c + n - 1}" for c, n in sorted(self.blocks.items())) or "none"
            raise MisuseError(
                f"{place(ins)}columns {col}..{col + ncols - 1} are no allocation "
                f"(there are: {have})"
            )
        del self.blocks[col]
        self.owned[col : col + ncols] = False
        self._widest()

    def _widest(self) -> None:
        """The first run of owned columns."""
        columns = self.owned.nonzero()[0]
        self.start = self.stop = int(columns[0]) if len(columns) else 0
        while self.stop < TMEM_COLS and self.owned[self.stop]:
            self.stop += 1


class TensorMemory:
    """128 lanes x 512 columns of 32 bits, kept column by column.

    A warp's 32 lanes of one column are then 128 contiguous bytes, which is what one register is.
    """

    __slots__ = ("alloc", "cols", "cols_valid", "lanes", "lanes_valid")

    def __init__(self) -> None:
        self.cols = np.empty((TMEM_COLS, TMEM_LANES), np.uint32)
        self.cols_valid = np.empty((TMEM_COLS, TMEM_LANES), np.uint8)
        self.lanes = self.cols.T
        self.lanes_valid = self.cols_valid.T
        self.alloc = TmemAllocator()
        self.reset()

    def reset(self) -> None:
        self.cols[:] = 0xFFFFFFFF
        self.cols_valid[:] = 0
        self.alloc = TmemAllocator()

    def check(self, col: int, ncols: int, ins: Instr | None = None) -> None:
        alloc = self.alloc
        if alloc.start <= col and col + ncols <= alloc.stop:
            return
        if col < 0 or col + ncols > TMEM_COLS or not alloc.owned[col : col + ncols].all():
            have = ", ".join(f"{c}..{c + n - 1}" for c, n in sorted(self.alloc.blocks.items()))
            raise OutOfBoundsError(
                f"{place(ins)}tensor-memory columns {col}..{col + ncols - 1} are not allocated "
                f"(allocated: {have or 'none'})"
            )


def bytes_at(addr: int, nbytes: int) -> bytes:
    """Unchecked copy of process memory, for launch parameters."""
    return ctypes.string_at(addr, nbytes)
