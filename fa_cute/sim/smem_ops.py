"""Copies between 16-byte chunks of shared memory, which every asynchronous engine is made of."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from fa_cute.errors import MisuseError
from fa_cute.sim import layouts
from fa_cute.sim.layouts import CHUNK, swizzle
from fa_cute.sim.memory import place
from fa_cute.sim.operands import OFFSET_MASK, RANK_SHIFT, first_lane
from fa_cute.sim.proxy import VISIBLE

if TYPE_CHECKING:
    from fa_cute.sim.cta import Cta
    from fa_cute.sim.layouts import Gather
    from fa_cute.sim.ptx import Instr

RAW_TYPE = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}  # by element bytes
CHUNK_TYPE = np.complex128  # 16 bytes that numpy moves as one item
_PHASE = 1024


def chunk_view(array: np.ndarray) -> np.ndarray:
    """A byte array as 16-byte items (a ragged tail is left out)."""
    return array[: array.size & -CHUNK].view(CHUNK_TYPE)


@functools.lru_cache(maxsize=1024)
def tile_chunks(nbytes: int, mode: str, phase: int) -> np.ndarray:
    """Chunk i of a densely packed tile that starts at `phase` lies in chunk `table[i]` behind it.

    The XOR is its own inverse, so the same table reads and writes.
    """
    linear = phase + np.arange(0, nbytes, CHUNK)
    table = (swizzle(linear, mode) - phase) // CHUNK
    if table.min() < 0 or table.max() >= nbytes // CHUNK:
        raise MisuseError(
            f"a {nbytes}-byte tile with swizzle {mode} at offset {phase} of its pattern "
            f"leaves itself"
        )
    table.setflags(write=False)
    return table


def write_tile(cta: Cta, offset: int, data: np.ndarray, mode: str) -> None:
    """Dense bytes -> shared memory at `offset`, swizzled."""
    n = data.size
    if mode == "none":
        cta.smem[offset : offset + n] = data
    else:
        table = tile_chunks(n, mode, offset % _PHASE)
        target = cta.smem[offset : offset + n].view(CHUNK_TYPE)
        np.take(data.view(CHUNK_TYPE), table, out=target, mode="clip")
    cta.smem_valid[offset : offset + n] = 1
    if cta.machine.races is not None:
        cta.machine.races.shared(cta, offset, n, True)


def read_tile(cta: Cta, offset: int, nbytes: int, mode: str) -> np.ndarray:
    """Shared memory -> dense bytes (a copy)."""
    source = cta.smem[offset : offset + nbytes]
    if mode == "none":
        return source.copy()
    table = tile_chunks(nbytes, mode, offset % _PHASE)
    return np.take(source.view(CHUNK_TYPE), table, mode="clip").view(np.uint8)


def note_unset_range(cta: Cta, offset: int, nbytes: int, ins: Instr) -> None:
    """Report bytes of a range that nothing wrote."""
    valid = cta.smem_valid[offset : offset + nbytes]
    if cta.machine.races is not None:
        cta.machine.races.shared(cta, offset, nbytes, False)
    if valid.max() > VISIBLE:
        cta.cluster.proxy.check(cta, valid, offset, ins)
    if not valid.all():
        unset = np.flatnonzero(valid == 0)
        cta.machine.note_unset("shared", ins, cta.window | (offset + int(unset[0])), len(unset))


def gather(cta: Cta, base: int, table: Gather, ins: Instr) -> np.ndarray:
    """The chunks of a matrix operand, checked against the window and for bytes never written."""
    low, high = base + table.first, base + table.end
    cta.check_smem(low, high - low, ins, "matrix operand read")
    valid = cta.smem_valid[low:high]
    if valid.max() > VISIBLE or not valid.all():
        _check_chunks(cta, base, table, ins)
    cta.machine.counters["mma.smem"] += table.chunks.size * CHUNK
    if cta.machine.races is not None:
        cta.machine.races.chunks(cta, table.chunks + base // CHUNK, False)
    return _take(cta.smem, base, table)


def _take(memory: np.ndarray, base: int, table: Gather) -> np.ndarray:
    """The table's chunks; a later K step may lie before the first one (in a ring that wraps)."""
    if table.first >= 0:
        return np.take(chunk_view(memory[base:]), table.chunks)
    return np.take(chunk_view(memory), table.chunks + base // CHUNK)


def operand_values(cta: Cta, descs, shape, dtype: str, mn_major: bool, ins: Instr) -> np.ndarray:
    """A matrix operand as (rows, all K) float32; `shape` is (rows, K of one step)."""
    elem_bytes = layouts.ELEM_BYTES[dtype]
    base, table = layouts.operand_gather(descs, *shape, elem_bytes, mn_major)
    raw = gather(cta, base, table, ins).view(RAW_TYPE[elem_bytes])
    values = layouts.to_float32(raw, dtype)
    return values.T if mn_major else values


def _check_chunks(cta: Cta, base: int, table: Gather, ins: Instr) -> None:
    """The operand need not be dense: look at its own chunks only."""
    marks = _take(cta.smem_valid, base, table).view(np.uint8)
    cta.cluster.proxy.check(cta, marks, base + table.first, ins)
    unset = np.flatnonzero(marks == 0)
    if len(unset):
        chunk = int(table.chunks.reshape(-1)[unset[0] // CHUNK])
        cta.machine.note_unset("shared", ins, cta.window | (base + chunk * CHUNK), len(unset))


def split(cta: Cta, address: int, ins: Instr) -> tuple[Cta, int]:
    """A shared::cluster address -> (the CTA that owns it, offset)."""
    rank = address >> RANK_SHIFT
    ctas = cta.cluster.ctas
    if rank >= len(ctas):
        raise MisuseError(
            f"{place(ins)}address {address:#x} names CTA {rank} of a cluster of {len(ctas)}"
        )
    return ctas[rank], address & OFFSET_MASK


def one_issuer(mask: int, ins: Instr, what: str) -> int:
    """The lane that executes a single-thread instruction whose repetition would not be harmless."""
    if mask & (mask - 1):
        raise MisuseError(
            f"{place(ins)}{what} is issued by {bin(mask).count('1')} threads of a warp, so "
            f"it happens that many "
            "times; guard it with elect.sync"
        )
    return first_lane(mask)


def aligned(address: int, to: int, ins: Instr, what: str) -> None:
    if address % to:
        raise MisuseError(f"{place(ins)}{what} address {address:#x} is not {to}-byte aligned")


def one_cta_group(ins: Instr, k) -> int:
    """The cta_group of a tcgen05 instruction; all of a kernel must have the same."""
    group = 2 if ins.has("cta_group::2") else 1
    first, other = vars(k).setdefault("cta_group", (group, ins))
    if first != group:
        raise MisuseError(
            f"{place(ins)}cta_group::{group} in a kernel that has cta_group::{first}: {other.where}"
        )
    return group
