"""Cluster launch control: a running cluster takes over the work of one that has not started."""

from __future__ import annotations

import numpy as np

from fa_cute.errors import MisuseError
from fa_cute.sim import operands as ops
from fa_cute.sim.handlers import FULL, handles
from fa_cute.sim.ptx import Instr, Vec

RESPONSE_BYTES = 16


@handles("clusterlaunchcontrol.try_cancel")
def bind_try_cancel(ins: Instr, k):
    """Writes 16 bytes (valid bit, first CTA of the cancelled cluster) and completes 16 bytes."""
    where, barrier_at = (
        ops.shared_address(ins.operands[0], k),
        ops.shared_address(ins.operands[1], k),
    )
    everywhere = any(p.startswith("multicast") for p in ins.parts)

    def try_cancel(warp, mask):
        cta, machine = warp.cta, warp.machine
        addr, bar = where(warp, mask), barrier_at(warp, mask)
        if addr % RESPONSE_BYTES:
            raise MisuseError(f"{ins.where}: {ins.op}: address {addr:#x} is not 16-byte aligned")
        cluster = cta.cluster
        if cluster.refused:
            raise MisuseError(f"{ins.where}: {ins.op}: a request of this cluster has failed before")
        targets = cluster.ctas if everywhere else [cta]
        places = [(t, t.memory.check(addr, RESPONSE_BYTES, ins, "write")) for t in targets]
        barriers = [t.mbarrier(t.window | bar & ops.OFFSET_MASK, ins) for t in targets]

        def perform() -> None:
            index = machine.cancel_next()
            words = np.zeros(4, np.uint32)
            if index is None:
                cluster.refused = True
            else:
                x, y, z = (
                    i * c for i, c in zip(machine.launch.cluster_id(index), machine.launch.cluster)
                )
                words[:] = (x, (y & 0xFFFF) | z << 16, 1, 0)
            for (target, offset), barrier in zip(places, barriers):
                target.smem[offset : offset + RESPONSE_BYTES] = words.view(np.uint8)
                target.smem_valid[offset : offset + RESPONSE_BYTES] = 1
                barrier.complete_tx(RESPONSE_BYTES, ins)

        machine.queue.post("clc", ("clc", cluster), perform)

    return try_cancel


@handles("clusterlaunchcontrol.query_cancel")
def bind_query_cancel(ins: Instr, k):
    row = ins.operands[1].index  # a .b128 register: two rows of r64
    if ins.has("is_canceled"):
        write = ops.write_pred(ins.operands[0])

        def canceled(warp, mask):
            high = int(warp.r64[row + 1, ops.first_lane(mask)])
            write(warp, mask, FULL if high & 1 else 0)

        return canceled
    last = ins.parts[2]
    axes = {"get_first_ctaid::x": (0,), "get_first_ctaid::y": (1,), "get_first_ctaid::z": (2,)}
    items = ins.operands[0].items if isinstance(ins.operands[0], Vec) else (ins.operands[0],)
    writers = [ops.write32(item) for item in items]
    wanted = axes.get(last, (0, 1, 2))

    def first_ctaid(warp, mask):
        low = int(warp.r64[row, ops.first_lane(mask)])
        xyz = (low & FULL, low >> 32 & 0xFFFF, low >> 48 & 0xFFFF, 0)
        for axis, write in zip((*wanted, 3), writers):
            write(warp, mask, xyz[axis])

    return first_ctaid
