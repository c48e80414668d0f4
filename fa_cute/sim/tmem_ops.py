"""Tensor memory from the side of the threads: allocation, loads, stores and their waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fa_cute.errors import MisuseError, UnknownInstructionError
from fa_cute.sim import layouts
from fa_cute.sim.handlers import FULL, Wait, handles
from fa_cute.sim.memory import place
from fa_cute.sim.operands import address, shared_address, uniform32
from fa_cute.sim.ptx import Reg, Vec
from fa_cute.sim.smem_ops import aligned, one_cta_group

if TYPE_CHECKING:
    from fa_cute.sim.ptx import Instr

_POISON = 0xFFFFFFFF


def whole_warp(mask: int, warp, ins: Instr) -> None:
    if mask != warp.live:
        raise MisuseError(
            f"{place(ins)}executed by lanes {mask:#010x} only; .sync.aligned needs the "
            f"whole warp at one place"
        )
    if mask != FULL:
        raise MisuseError(f"{place(ins)}some threads of the warp have exited")


# ---- allocation ----


@handles("tcgen05.alloc")
def bind_alloc(ins: Instr, k):
    where_of, count_of = shared_address(ins.operands[0], k), uniform32(ins.operands[1], k)
    pair = one_cta_group(ins, k) == 2

    def step(warp, mask):
        whole_warp(mask, warp, ins)
        cta = warp.cta
        where, ncols = where_of(warp, mask), count_of(warp, mask)
        aligned(where, 4, ins, "result")
        offset = cta.check_smem(where, 4, ins, "tcgen05.alloc")
        found: list[int] = []

        def try_alloc() -> bool:
            if not found:
                col = cta.tmem_alloc.alloc(ncols, ins)
                if col is None:
                    return False
                found.append(col)
            return True

        def finish(_warp) -> Wait | None:
            col = found[0]
            cta.tmem_cols[col : col + ncols] = _POISON
            cta.tmem_valid_cols[col : col + ncols] = 0
            cta.smem[offset : offset + 4].view(np.uint32)[0] = col
            cta.smem_valid[offset : offset + 4] = 1
            if cta.machine.races is not None:
                cta.machine.races.shared(cta, offset, 4, True)
            return _agree_with_peer(cta, col, ncols, ins) if pair else None

        if try_alloc():
            return finish(warp)
        return Wait(try_alloc, {"on": "tcgen05.alloc", "columns": ncols}, None, finish)

    return step


def _agree_with_peer(cta, col: int, ncols: int, ins: Instr) -> Wait | None:
    """Both CTAs of a pair allocate the same columns in the same order, and wait for each other."""
    history = cta.scratch.setdefault("tmem pair", [])
    history.append((col, ncols))
    peers = cta.peer.scratch.get("tmem pair", [])
    i = len(history) - 1
    if i < len(peers) and peers[i] != history[i]:
        raise MisuseError(
            f"{place(ins)}CTA {cta.rank} got columns {col}..{col + ncols - 1}, its peer "
            f"{peers[i][0]}.."
            f"{sum(peers[i]) - 1}: the pair must allocate in the same order"
        )
    peer = cta.peer.scratch
    if i < len(peer.get("tmem pair", ())):
        return None
    return Wait(
        lambda: i < len(peer.get("tmem pair", ())),
        {"on": "tcgen05.alloc of the peer CTA", "columns": ncols},
    )


@handles("tcgen05.dealloc")
def bind_dealloc(ins: Instr, k):
    one_cta_group(ins, k)
    taddr_of, count_of = uniform32(ins.operands[0], k), uniform32(ins.operands[1], k)

    def step(warp, mask):
        whole_warp(mask, warp, ins)
        cta = warp.cta
        taddr, ncols = taddr_of(warp, mask), count_of(warp, mask)
        cta.tmem_alloc.free(taddr & 0xFFFF, ncols, ins)
        cta.tmem_valid_cols[taddr & 0xFFFF : (taddr & 0xFFFF) + ncols] = 0

    return step


@handles("tcgen05.relinquish_alloc_permit")
def bind_relinquish(ins: Instr, k):
    one_cta_group(ins, k)

    def step(warp, mask):
        whole_warp(mask, warp, ins)
        warp.cta.tmem_alloc.relinquished = True

    return step


# ---- loads and stores ----


def register_rows(operand) -> tuple[int, ...]:
    """The rows of `warp.r32` that a register vector (or one register) names."""
    items = operand.items if isinstance(operand, Vec) else (operand,)
    if not all(isinstance(item, Reg) for item in items):
        raise UnknownInstructionError(f"a register vector with other things in it: {operand!r}")
    return tuple(item.index for item in items)


def _rows(operand) -> np.ndarray | slice:
    """An index for `warp.r32`: a slice, which is a view, where the rows are consecutive."""
    rows = register_rows(operand)
    if rows == tuple(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return np.array(rows)


class Access:
    """One tcgen05.ld or .st: which cells of tensor memory its registers are."""

    def __init__(self, ins: Instr, num_regs: int, second_half: int):
        self.ins = ins
        self.shape = next(p for p in ins.parts if p in layouts.REGISTERS_PER_STEP)
        self.num = int(next(p for p in ins.parts if p[0] == "x" and p[1:].isdigit())[1:])
        self.packed = ins.has("pack::16b") or ins.has("unpack::16b")
        expected = self.num * layouts.REGISTERS_PER_STEP[self.shape]
        if expected != num_regs:
            raise MisuseError(
                f"{place(ins)}{num_regs} registers; {self.shape}.x{self.num} takes {expected}"
            )
        self.lane, self.col = layouts.tmem_map(self.shape, self.num, second_half)
        self.cols = int(self.col.max()) + 1

    def locate(self, warp, taddr: int) -> tuple[int, int]:
        """(first lane, first column) of this warp's access, checked."""
        ins = self.ins
        field = taddr >> 16
        quarter, half = field >> 5, field & 31
        if quarter not in (0, warp.quarter):
            raise MisuseError(
                f"{place(ins)}lane {field} from warp {warp.index}, which may touch lanes "
                f"{32 * warp.quarter}.."
                f"{32 * warp.quarter + 31} only"
            )
        if half and (half != 16 or self.shape == "32x32b"):
            raise MisuseError(
                f"{place(ins)}lane {field}: {self.shape} starts at a multiple of 32 (or 16 "
                f"if it has 16)"
            )
        col = taddr & 0xFFFF
        warp.cta.check_tmem(col, self.cols * (2 if self.packed else 1), ins)
        return 32 * warp.quarter + half, col

    def cells(self, lane0: int, col0: int):
        """Index into arrays shaped (columns, lanes), giving (registers, 32)."""
        if self.shape == "32x32b" and not self.packed:
            return slice(col0, col0 + self.num), slice(lane0, lane0 + 32)
        return (col0 + self.col * (2 if self.packed else 1), lane0 + self.lane)

    def high_cells(self, lane0: int, col0: int):
        """The odd columns of a packed access, which are the high halves."""
        return (col0 + 2 * self.col + 1, lane0 + self.lane)


def _access(ins: Instr, regs, taddr_at: int) -> Access:
    count = len(regs.items) if isinstance(regs, Vec) else 1
    second = 0
    if ins.has("16x32bx2"):
        second = ins.operands[2 if taddr_at == 1 else 1].bits
    return Access(ins, count, second)


def _load(warp, access: Access, taddr: int) -> np.ndarray:
    cta = warp.cta
    lane0, col0 = access.locate(warp, taddr)
    cells = access.cells(lane0, col0)
    if cta.machine.races is not None:
        cta.machine.races.tensor(cta, cells, False)
    values = cta.tmem_cols[cells]
    valid = cta.tmem_valid_cols[cells]
    if access.packed:
        high = access.high_cells(lane0, col0)
        values = (values & np.uint32(0xFFFF)) | cta.tmem_cols[high] << np.uint32(16)
        valid = valid & cta.tmem_valid_cols[high]
    if not valid.all():
        cta.machine.note_unset("tmem", access.ins, taddr, int((valid == 0).sum()))
    return values


@handles("tcgen05.ld")
def bind_ld(ins: Instr, k):
    rows, access = _rows(ins.operands[0]), _access(ins, ins.operands[0], 1)
    taddr_of = address(ins.operands[1], k)

    def step(warp, mask):
        whole_warp(mask, warp, ins)
        warp.r32[rows] = _load(warp, access, taddr_of(warp, mask))

    return step


@handles("tcgen05.ld.red")
def bind_ld_red(ins: Instr, k):
    """Loads and also returns the minimum or maximum over each thread's own columns."""
    rows, access = _rows(ins.operands[0]), _access(ins, ins.operands[0], 2)
    result = ins.operands[1].index
    taddr_of = address(ins.operands[2], k)
    maximum, magnitude, keep_nan = ins.has("max"), ins.has("abs"), ins.has("NaN")
    kind = {"f32": np.float32, "u32": np.uint32, "s32": np.int32}[ins.parts[-1]]

    def step(warp, mask):
        whole_warp(mask, warp, ins)
        values = np.ascontiguousarray(_load(warp, access, taddr_of(warp, mask)))
        warp.r32[rows] = values
        numbers = values.view(kind)
        if magnitude:
            numbers = np.abs(numbers)
        if kind is np.float32 and not keep_nan:
            best = (np.fmax if maximum else np.fmin).reduce(numbers, axis=0)
        else:
            best = numbers.max(axis=0) if maximum else numbers.min(axis=0)
        warp.r32[result] = best.view(np.uint32)

    return step


@handles("tcgen05.st")
def bind_st(ins: Instr, k):
    regs = ins.operands[-1]
    rows, access = _rows(regs), _access(ins, regs, 0)
    taddr_of = address(ins.operands[0], k)

    def step(warp, mask):
        whole_warp(mask, warp, ins)
        cta, queue = warp.cta, warp.machine.queue
        lane0, col0 = access.locate(warp, taddr_of(warp, mask))
        cells = access.cells(lane0, col0)
        if queue.early and not access.packed:
            cta.tmem_cols[cells] = warp.r32[rows]
            cta.tmem_valid_cols[cells] = 1
            return
        values = warp.r32[rows].copy()  # the registers may change before the store happens
        groups = warp.groups("tcgen05.st")
        done = groups.add()

        def run():
            if cta.machine.races is not None:
                cta.machine.races.tensor(cta, cells, True)
            if access.packed:
                high = access.high_cells(lane0, col0)
                cta.tmem_cols[cells] = values & np.uint32(0xFFFF)
                cta.tmem_cols[high] = values >> np.uint32(16)
                cta.tmem_valid_cols[high] = 1
            else:
                cta.tmem_cols[cells] = values
            cta.tmem_valid_cols[cells] = 1
            done()

        queue.post("tcgen05.st", groups, run)

    return step


@handles("tcgen05.wait::st")
def bind_wait_st(ins: Instr, k):
    def step(warp, mask):
        groups = warp.groups("tcgen05.st")
        groups.commit()
        return groups.wait(0, ins)

    return step


@handles(
    "tcgen05.wait::ld", "tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync"
)
def bind_order(ins: Instr, k):
    """Loads are complete at issue here, and memory is sequentially consistent."""
    return lambda warp, mask: None
