"""The asynchronous copies of sm_80: each lane moves 4, 8 or 16 bytes to shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fa_cute.errors import MisuseError
from fa_cute.sim.handlers import handles
from fa_cute.sim.memory import BASE, place
from fa_cute.sim.operands import addresses, lane_mask, lanes32, predicate

if TYPE_CHECKING:
    from fa_cute.sim.ptx import Instr

_WORDS = {4: np.uint32, 8: np.uint64, 16: np.complex128}


@handles("cp.async.ca", "cp.async.cg")
def bind_copy(ins: Instr, k):
    dst_of, src_of = addresses(ins.operands[0], k), addresses(ins.operands[1], k)
    size = ins.operands[2].bits
    if size not in _WORDS or (ins.parts[2] == "cg" and size != 16):
        raise MisuseError(f"{place(ins)}{size} bytes per lane; ca takes 4, 8 or 16, cg takes 16")
    source_bytes = _source_bytes(ins, k, size)
    counting = np.arange(size)

    def step(warp, mask):
        active = lane_mask(mask)
        cta, machine = warp.cta, warp.machine
        dst = (dst_of(warp)[active] & np.uint64(0xFFFFFF)).astype(np.int64)
        src = src_of(warp)[active]
        take = source_bytes(warp, mask)[active]
        if (dst % size).any() or (src[take > 0] % np.uint64(size)).any():
            raise MisuseError(
                f"{place(ins)}an address is not aligned to the {size} bytes that it moves"
            )
        if (take > size).any():
            raise MisuseError(
                f"{place(ins)}src-size {int(take.max())} is larger than cp-size {size}"
            )
        low, high = int(dst.min()), int(dst.max()) + size
        cta.check_smem(low, high - low, ins, "cp.async")
        done = warp.groups("cp_async").add()

        def run():
            values = np.zeros((len(dst), size), np.uint8)
            _fetch(machine.memory, values, src, take, size, ins)
            where = dst[:, None] + counting
            cta.smem[where] = values
            if machine.races is not None:
                machine.races.words(cta, where, True)
            cta.smem_valid[where] = warp.core.ctx.mark & 0xFF  # a write of the generic proxy
            machine.counters["cp.async"] += int(take.sum())
            done()

        machine.queue.post("cp.async", object(), run)

    return step


def _fetch(
    memory, values: np.ndarray, src: np.ndarray, take: np.ndarray, size: int, ins: Instr
) -> None:
    """Copy `take[i]` bytes from `src[i]` into row i; the rest stays zero."""
    for nbytes in np.unique(take):
        count = int(nbytes)
        if count == 0:
            continue
        lanes = np.flatnonzero(take == nbytes)
        memory.check_lanes(src[lanes], count, ins, "cp.async read")
        at = src[lanes].astype(np.int64) - BASE
        if count == size:
            words = _whole_words(memory, size)
            values.view(_WORDS[size])[lanes, 0] = words[at // size]
        else:
            values[lanes, :count] = memory.u8[at[:, None] + np.arange(count)]


def _whole_words(memory, size: int) -> np.ndarray:
    if size == 4:
        return memory.u32
    if size == 8:
        return memory.u64
    return memory.u64.view(np.complex128)


def _source_bytes(ins: Instr, k, size: int):
    """`fn(warp, mask) -> int64[32]`: the bytes that each lane reads."""
    extra = ins.operands[3:]
    if ins.has("L2::cache_hint"):
        extra = extra[:-1]
    if not extra:
        full = np.full(32, size, np.int64)
        return lambda warp, mask: full
    operand = extra[0]
    if getattr(operand, "bank", None) == "pred":
        ignore = predicate(operand)
        return lambda warp, mask: np.where(lane_mask(ignore(warp, mask)), 0, size)
    sizes = lanes32(operand, k)
    return lambda warp, mask: sizes(warp).astype(np.int64)


@handles("cp.async.commit_group")
def bind_commit(ins: Instr, k):
    return lambda warp, mask: warp.groups("cp_async").commit()


@handles("cp.async.wait_group")
def bind_wait(ins: Instr, k):
    allowed = ins.operands[0].bits
    return lambda warp, mask: warp.groups("cp_async").wait(allowed, ins)


@handles("cp.async.wait_all")
def bind_wait_all(ins: Instr, k):
    def step(warp, mask):
        groups = warp.groups("cp_async")
        groups.commit()
        return groups.wait(0, ins)

    return step
