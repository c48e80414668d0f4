"""Bulk copies without a tensor map: global, shared and distributed shared memory; groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fa_cute.errors import MisuseError, UnknownInstructionError
from fa_cute.sim.handlers import handles
from fa_cute.sim.memory import place
from fa_cute.sim.operands import address, lanes_of, shared_address, uniform32
from fa_cute.sim.reduce import reduce_into
from fa_cute.sim.smem_ops import aligned, note_unset_range, one_issuer, split
from fa_cute.sim.tma import bulk_tokens

if TYPE_CHECKING:
    from fa_cute.sim.ptx import Instr

_MAX_BYTES = 1_048_560  # the unit counts 16-byte pieces in 16 bits
_REDUCE_TYPES = {
    **dict.fromkeys(("u32", "s32", "f32", "b32"), np.uint32),
    **dict.fromkeys(("u64", "s64", "f64", "b64"), np.uint64),
    **dict.fromkeys(("f16", "bf16"), np.uint16),
}
_CLUSTER_REDUCE = {"u32", "s32", "u64", "b32"}


def _size(value: int, ins: Instr) -> int:
    if value % 16 or not 0 < value <= _MAX_BYTES:
        raise MisuseError(
            f"{place(ins)}{value} bytes; a bulk copy moves a multiple of 16, at most {_MAX_BYTES}"
        )
    return value


@handles("cp.async.bulk")
def bind_copy(ins: Instr, k):
    source, target = ins.parts[4], ins.parts[3]
    if source == "global" and target.startswith("shared"):
        return _bind_load(ins, k)
    if source == "shared::cta" and target == "shared::cluster":
        return _bind_to_peer(ins, k, None, "")
    if source == "shared::cta" and target == "global":
        return _bind_store(ins, k, None, "")
    raise UnknownInstructionError(f"{ins.where}: {ins.op}")


def _bind_load(ins: Instr, k):
    dst_of, src_of = shared_address(ins.operands[0], k), address(ins.operands[1], k)
    size_of, mbar_of = uniform32(ins.operands[2], k), shared_address(ins.operands[3], k)
    multicast = any(part.startswith("multicast") for part in ins.parts)
    mask_of = uniform32(ins.operands[4], k) if multicast else None

    def step(warp, mask):
        one_issuer(mask, ins, "a bulk load")
        cta, machine = warp.cta, warp.machine
        nbytes, src = _size(size_of(warp, mask), ins), src_of(warp, mask)
        home, offset = split(cta, dst_of(warp, mask), ins)
        mbar_cta, mbar_offset = split(cta, mbar_of(warp, mask), ins)
        aligned(offset, 16, ins, "destination")
        aligned(src, 16, ins, "source")
        if mask_of is None:
            targets = [home]
            if mbar_cta is not home:
                raise MisuseError(
                    f"{place(ins)}the mbarrier and the destination are in different CTAs"
                )
        else:
            targets = [split(cta, r << 24, ins)[0] for r in lanes_of(mask_of(warp, mask) & 0xFFFF)]
        barriers = []
        for target in targets:
            target.check_smem(offset, nbytes, ins, "bulk load")
            barriers.append((target, target.mbarrier(target.window | mbar_offset, ins)))

        def run():
            data = machine.memory.view(src, nbytes, ins, "bulk load")
            machine.counters["tma.load"] += nbytes
            for target, barrier in barriers:
                target.smem[offset : offset + nbytes] = data
                target.smem_valid[offset : offset + nbytes] = 1
                if machine.races is not None:
                    machine.races.shared(target, offset, nbytes, True)
                barrier.complete_tx(nbytes)

        machine.queue.post("bulk.load", object(), run)

    return step


def _bind_to_peer(ins: Instr, k, operation: str | None, dtype: str):
    """Shared memory of this CTA -> of another one of the cluster."""
    dst_of, src_of = shared_address(ins.operands[0], k), shared_address(ins.operands[1], k)
    size_of, mbar_of = uniform32(ins.operands[2], k), shared_address(ins.operands[3], k)

    def step(warp, mask):
        one_issuer(mask, ins, "a bulk copy")
        cta, machine = warp.cta, warp.machine
        nbytes = _size(size_of(warp, mask), ins)
        target, offset = split(cta, dst_of(warp, mask), ins)
        home, source = split(cta, src_of(warp, mask), ins)
        mbar_cta, mbar_offset = split(cta, mbar_of(warp, mask), ins)
        if home is not cta:
            raise MisuseError(f"{place(ins)}the source is in another CTA")
        if mbar_cta is not target:
            raise MisuseError(
                f"{place(ins)}the mbarrier must be in the destination's CTA {target.rank}"
            )
        aligned(offset, 16, ins, "destination")
        aligned(source, 16, ins, "source")
        cta.check_smem(source, nbytes, ins, "bulk copy")
        target.check_smem(offset, nbytes, ins, "bulk copy")
        barrier = target.mbarrier(target.window | mbar_offset, ins)

        def run():
            note_unset_range(cta, source, nbytes, ins)
            machine.counters["dsmem.copy"] += nbytes
            data = cta.smem[source : source + nbytes]
            into = target.smem[offset : offset + nbytes]
            if operation is None:
                into[:] = data
                target.smem_valid[offset : offset + nbytes] = 1
            else:
                raw = _REDUCE_TYPES[dtype]
                reduce_into(into.view(raw), data.view(raw), operation, dtype, ins)
            if machine.races is not None:
                machine.races.shared(target, offset, nbytes, True)
            barrier.complete_tx(nbytes)

        machine.queue.post("bulk.dsmem", object(), run)

    return step


def _bind_store(ins: Instr, k, operation: str | None, dtype: str):
    """Shared -> global memory, as a copy or a reduction."""
    dst_of, src_of = address(ins.operands[0], k), shared_address(ins.operands[1], k)
    size_of = uniform32(ins.operands[2], k)
    byte_mask_of = uniform32(ins.operands[-1], k) if ins.has("cp_mask") else None
    kind = "bulk.store" if operation is None else "bulk.reduce"

    def step(warp, mask):
        if operation is not None:
            one_issuer(mask, ins, "a bulk reduction")
        cta, machine = warp.cta, warp.machine
        nbytes, dst = _size(size_of(warp, mask), ins), dst_of(warp, mask)
        home, source = split(cta, src_of(warp, mask), ins)
        if home is not cta:
            raise MisuseError(f"{place(ins)}the source is in another CTA")
        aligned(dst, 16, ins, "destination")
        aligned(source, 16, ins, "source")
        cta.check_smem(source, nbytes, ins, "bulk store")
        machine.memory.check(dst, nbytes, ins, "bulk store")
        keep = _byte_mask(byte_mask_of(warp, mask), nbytes) if byte_mask_of else None
        read_done, done = bulk_tokens(warp)

        def read():
            note_unset_range(cta, source, nbytes, ins)
            data = cta.smem[source : source + nbytes].copy()
            read_done()
            machine.queue.post(kind + ".write", object(), lambda: write(data))

        def write(data):
            machine.counters[kind] += nbytes
            target = machine.memory.view(dst, nbytes, ins, "bulk store")
            if operation is not None:
                raw = _REDUCE_TYPES[dtype]
                reduce_into(target.view(raw), data.view(raw), operation, dtype, ins)
            elif keep is None:
                target[:] = data
            else:
                target[keep] = data[keep]
            done()

        machine.queue.post(kind, object(), read)

    return step


def _byte_mask(bits: int, nbytes: int) -> np.ndarray:
    """Bit i of the mask is byte i of every 16."""
    return np.tile(np.array([bits >> i & 1 for i in range(16)], bool), nbytes // 16)


@handles("cp.reduce.async.bulk")
def bind_reduce(ins: Instr, k):
    operation = next(
        (p for p in ins.parts if p in ("add", "min", "max", "inc", "dec", "and", "or", "xor")), None
    )
    dtype = ins.parts[-1]
    if operation is None or dtype not in _REDUCE_TYPES:
        raise UnknownInstructionError(f"{ins.where}: {ins.op}")
    if ins.parts[4] == "global":
        return _bind_store(ins, k, operation, dtype)
    if dtype not in _CLUSTER_REDUCE:
        raise MisuseError(
            f"{place(ins)}{dtype} can't be reduced in shared memory; only {sorted(_CLUSTER_REDUCE)}"
        )
    return _bind_to_peer(ins, k, operation, dtype)


@handles("cp.async.bulk.commit_group")
def bind_commit(ins: Instr, k):
    def step(warp, mask):
        warp.groups("bulk").commit()
        warp.groups("bulk.read").commit()

    return step


@handles("cp.async.bulk.wait_group")
def bind_wait(ins: Instr, k):
    allowed = ins.operands[0].bits
    kind = "bulk.read" if ins.has("read") else "bulk"
    return lambda warp, mask: warp.groups(kind).wait(allowed, ins)
