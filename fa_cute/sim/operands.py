"""Operands as functions: how a handler reads and writes registers, addresses and constants.

Each function here runs once, when an instruction is bound, and returns a closure for the hot path.
The closures read flat memory views of the register banks (`warp.v32[row * 32 + lane]` is a Python
int at a fraction of the price of a numpy scalar).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fa_cute.errors import MisuseError
from fa_cute.sim.ptx import Bank, Imm, Instr, Mem, Not, Pair, Reg, Sym

FULL = 0xFFFFFFFF
RANK_SHIFT = 24
OFFSET_MASK = 0xFFFFFF
SMEM_START = 0x400  # the first KiB of the shared window belongs to the system
GENERIC_SHARED = 1 << 60  # a generic address with this bit is a shared-window address

_LANES = np.arange(32, dtype=np.uint32)


def lane_mask(mask: int) -> np.ndarray:
    """bool[32] of the lanes in `mask`."""
    return ((np.uint32(mask) >> _LANES) & 1).astype(bool)


def first_lane(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


def lanes_of(mask: int) -> list[int]:
    return [lane for lane in range(32) if mask >> lane & 1]


def bits_of(values: np.ndarray) -> int:
    """bool[32] -> lane mask."""
    return int(np.packbits(values, bitorder="little").view("<u4")[0])


def _wrong(ins_operand, what: str) -> MisuseError:
    return MisuseError(f"{what} expected, not {ins_operand!r}")


# ---- one value for the warp (of its first active lane) ----


def uniform32(operand, k=None) -> Callable[..., int]:
    """`fn(warp, mask) -> int`: a 32-bit operand that all active lanes share."""
    if isinstance(operand, Imm):
        value = operand.bits & FULL
        return lambda warp, mask: value
    if isinstance(operand, Reg) and operand.bank is Bank.R32:
        row = operand.index * 32
        return lambda warp, mask: warp.v32[row + (mask & -mask).bit_length() - 1]
    if isinstance(operand, Reg) and operand.bank is Bank.R64:
        row64 = operand.index * 32
        return lambda warp, mask: warp.v64[row64 + (mask & -mask).bit_length() - 1] & FULL
    if isinstance(operand, Sym) and k is not None:
        return _symbol(operand, k)
    raise _wrong(operand, "a 32-bit operand")


def uniform64(operand, k=None) -> Callable[..., int]:
    """`fn(warp, mask) -> int`: a 64-bit operand that all active lanes share."""
    if isinstance(operand, Imm):
        value = operand.bits
        return lambda warp, mask: value
    if isinstance(operand, Reg) and operand.bank is Bank.R64:
        row = operand.index * 32
        return lambda warp, mask: warp.v64[row + (mask & -mask).bit_length() - 1]
    if isinstance(operand, Reg) and operand.bank is Bank.R32:
        return uniform32(operand)
    if isinstance(operand, Sym) and k is not None:
        return _symbol(operand, k)
    raise _wrong(operand, "a 64-bit operand")


def _symbol(operand: Sym, k) -> Callable[..., int]:
    space, offset = k.symbol(operand.name)
    offset += operand.offset
    if space == "shared":
        return lambda warp, mask: warp.cta.window | offset
    if space == "param":
        return lambda warp, mask: warp.cta.machine.param_address + offset
    return lambda warp, mask: warp.cta.machine.globals_address + offset


def address(operand: Mem, k) -> Callable[..., int]:
    """`fn(warp, mask) -> int`: the address `[base + offset]` of the first active lane."""
    if not isinstance(operand, Mem):
        raise _wrong(operand, "an address")
    offset, base = operand.offset, operand.base
    wide = isinstance(base, Reg) and base.bank is Bank.R64
    if wide:
        row64 = base.index * 32
        return lambda w, m: (w.v64[row64 + (m & -m).bit_length() - 1] + offset) & (2**64 - 1)
    if isinstance(base, Reg):
        row = base.index * 32
        return lambda w, m: (w.v32[row + (m & -m).bit_length() - 1] + offset) & FULL
    if isinstance(base, Sym):
        return _symbol(Sym(base.name, base.offset + offset), k)
    value = (base.bits + offset) & (2**64 - 1)
    return lambda warp, mask: value


def shared_address(operand: Mem, k) -> Callable[..., int]:
    """Like `address`, but a generic address of the shared window loses its window bit."""
    inner = address(operand, k)
    return lambda warp, mask: inner(warp, mask) & FULL


def predicate(operand) -> Callable[..., int]:
    """`fn(warp, mask) -> int`: the lanes (not yet ANDed with mask) where the operand is true."""
    if isinstance(operand, Reg) and operand.bank is Bank.PRED:
        index = operand.index
        return lambda warp, mask: warp.vp[index]
    if isinstance(operand, Not):
        index = operand.reg.index
        return lambda warp, mask: warp.vp[index] ^ FULL
    if isinstance(operand, Imm):
        value = FULL if operand.bits else 0
        return lambda warp, mask: value
    raise _wrong(operand, "a predicate")


# ---- one value per lane ----


def lanes32(operand, k=None) -> Callable[..., np.ndarray]:
    """`fn(warp) -> uint32[32]`, a view where it can be: copy what must outlive the instruction."""
    if isinstance(operand, Reg) and operand.bank is Bank.R32:
        row = operand.index
        return lambda warp: warp.r32[row]
    if isinstance(operand, Imm):
        value = np.full(32, operand.bits & FULL, np.uint32)
        return lambda warp: value
    if isinstance(operand, Reg) and operand.bank is Bank.R64:
        row = operand.index
        return lambda warp: warp.r64[row].astype(np.uint32)
    if isinstance(operand, Sym) and k is not None:
        value_of = _symbol(operand, k)
        return lambda warp: np.full(32, value_of(warp, FULL) & FULL, np.uint32)
    raise _wrong(operand, "a 32-bit operand")


def lanes64(operand, k=None) -> Callable[..., np.ndarray]:
    """`fn(warp) -> uint64[32]`."""
    if isinstance(operand, Reg) and operand.bank is Bank.R64:
        row = operand.index
        return lambda warp: warp.r64[row]
    if isinstance(operand, Imm):
        value = np.full(32, operand.bits, np.uint64)
        return lambda warp: value
    if isinstance(operand, Sym) and k is not None:
        value_of = _symbol(operand, k)
        return lambda warp: np.full(32, value_of(warp, FULL), np.uint64)
    inner = lanes32(operand, k)
    return lambda warp: inner(warp).astype(np.uint64)


def addresses(operand: Mem, k) -> Callable[..., np.ndarray]:
    """`fn(warp) -> uint64[32]`: `[base + offset]` of every lane."""
    base, offset = operand.base, operand.offset
    narrow = isinstance(base, Reg) and base.bank is Bank.R32
    inner = lanes32(base, k) if narrow else lanes64(base, k)
    if narrow:
        add = np.uint32(offset & FULL)
        return lambda warp: (inner(warp) + add).astype(np.uint64)
    add64 = np.uint64(offset & (2**64 - 1))
    return lambda warp: inner(warp) + add64


def differs(operand: Mem) -> Callable[..., bool]:
    """`fn(warp, mask) -> bool`: do active lanes have different base registers?"""
    base = operand.base
    if not isinstance(base, Reg):
        return lambda warp, mask: False
    row, size = base.index, 8 if base.bank is Bank.R64 else 4

    def check(warp, mask: int) -> bool:
        if not mask & (mask - 1):
            return False
        values = (warp.r64 if size == 8 else warp.r32)[row]
        if mask == FULL:
            data = values.tobytes()
            return data != data[:size] * 32
        active = values[lane_mask(mask)]
        return bool((active != active[0]).any())

    return check


# ---- results ----


def write32(operand) -> Callable[..., None]:
    """`fn(warp, mask, value)`: value is an int or uint32[32]; only active lanes change."""
    if isinstance(operand, Sym) and operand.is_sink:
        return lambda warp, mask, value: None
    if not isinstance(operand, Reg) or operand.bank is Bank.PRED:
        raise _wrong(operand, "a register")
    row, wide = operand.index, operand.bank is Bank.R64

    def write(warp, mask: int, value) -> None:
        target = warp.r64[row] if wide else warp.r32[row]
        if mask == FULL:
            target[:] = value
        else:
            np.copyto(target, value, where=lane_mask(mask), casting="unsafe")

    return write


write64 = write32


def write_pred(operand) -> Callable[..., None]:
    """`fn(warp, mask, bits)`: set the active lanes of a predicate to those of `bits`."""
    if isinstance(operand, Sym) and operand.is_sink:
        return lambda warp, mask, bits: None
    if not isinstance(operand, Reg) or operand.bank is not Bank.PRED:
        raise _wrong(operand, "a predicate register")
    index = operand.index

    def write(warp, mask: int, bits: int) -> None:
        warp.vp[index] = (warp.vp[index] & ~mask) | (bits & mask)

    return write


def pair(operand) -> tuple:
    """`d|p` or `d` -> (d, p), with the sink for a missing second."""
    if isinstance(operand, Pair):
        return operand.first, operand.second
    return operand, Sym("_")


def guarded(ins: Instr) -> tuple[int, bool] | None:
    """(predicate row, negated) of an instruction's guard."""
    return (ins.guard[0].index, ins.guard[1]) if ins.guard else None
