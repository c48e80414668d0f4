"""tcgen05.mma, commit and cp: the tensor core of Blackwell.

The MMAs of one thread run in order in a pipe. Consecutive ones that accumulate into the same D
are K steps of one product; they are collected and multiplied at once, when the thread issues
anything else to the pipe (a commit, another accumulator). What is collected depends on the
program alone, so the bits don't depend on the schedule; and nothing can observe an MMA before the
commit that follows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fa_cute.errors import MisuseError, UnknownInstructionError
from fa_cute.sim import layouts
from fa_cute.sim.handlers import handles
from fa_cute.sim.memory import place
from fa_cute.sim.operands import (
    address,
    lanes_of,
    predicate,
    shared_address,
    uniform32,
    uniform64,
)
from fa_cute.sim.ptx import Imm, Mem, Vec
from fa_cute.sim.smem_ops import RAW_TYPE, gather, one_cta_group, one_issuer, operand_values, split

if TYPE_CHECKING:
    from fa_cute.sim.layouts import InstrDesc, SmemDesc
    from fa_cute.sim.ptx import Instr
    from fa_cute.sim.warp import Warp

_MAX_STEPS = 32  # K steps that are multiplied at once
_KINDS = ("f16", "tf32", "f8f6f4", "i8")


@dataclass(frozen=True)
class Step:
    """One tcgen05.mma with its register values, as captured at issue."""

    shape: InstrDesc
    cta_group: int
    ws: bool
    d: int  # tensor-memory address
    a: SmemDesc | int  # descriptor, or tensor-memory address
    b: SmemDesc
    accumulate: bool
    lanes_off: tuple[int, ...]  # 32-bit words of disabled lanes, 4 per CTA
    scale: int  # D is multiplied by 2^-scale before the addition

    def continues(self, first: Step) -> bool:
        """Can this step be added to the product that `first` begins?"""
        same_a = isinstance(self.a, int) == isinstance(first.a, int)
        return (
            self.accumulate
            and self.scale == 0
            and same_a
            and (self.shape, self.cta_group, self.ws, self.d, self.lanes_off)
            == (first.shape, first.cta_group, first.ws, first.d, first.lanes_off)
            and _same_pattern(self.b, first.b)
            and (isinstance(self.a, int) or _same_pattern(self.a, first.a))
        )


def _same_pattern(x: SmemDesc, y: SmemDesc) -> bool:
    return (x.lbo, x.sbo, x.swizzle) == (y.lbo, y.sbo, y.swizzle)


class Pipe:
    """What one thread has issued to the tensor core; also the agent of its queue."""

    __slots__ = ("cta", "ins", "steps", "warp_index")

    def __init__(self, warp: Warp):
        self.cta, self.warp_index = warp.cta, warp.index
        self.steps: list[Step] = []
        self.ins: Instr | None = None

    def add(self, step: Step, ins: Instr) -> None:
        steps = self.steps
        if steps and (len(steps) == _MAX_STEPS or not step.continues(steps[0])):
            self.flush()
        self.steps.append(step)
        self.ins = ins

    def flush(self) -> None:
        """Hand the collected product to the machine's queue."""
        if self.steps:
            steps, ins, cta = tuple(self.steps), self.ins, self.cta
            self.steps.clear()
            cta.machine.queue.post("mma", self, lambda: multiply(cta, steps, ins))

    def then(self, kind: str, run) -> None:
        self.flush()
        self.cta.machine.queue.post(kind, self, run)


def pipe_of(warp: Warp) -> Pipe:
    key = ("umma", warp.index)
    pipe = warp.cta.scratch.get(key)
    if pipe is None:
        pipe = warp.cta.scratch[key] = Pipe(warp)
        warp.flush = pipe.flush  # what was issued may happen while the warp waits
    return pipe


# ---- arithmetic ----


def multiply(cta, steps: tuple[Step, ...], ins: Instr) -> None:
    """D = A B (+ D) of all steps, for one CTA or a pair."""
    first = steps[0]
    shape, n = first.shape, first.shape.n
    ctas = _executing(cta, first.cta_group)
    b = _joined([_smem_b(c, steps, n // len(ctas), ins) for c in ctas])
    if shape.negate_b:
        b = -b
    lane_base = first.d >> 16 & 16
    blocks = layouts.d_blocks(shape.m, n, first.cta_group, first.ws, lane_base)
    a_of: dict = {}
    for block in blocks:
        owner = ctas[block.cta]
        key = (block.cta, block.lane if isinstance(first.a, int) else None)
        a = a_of.get(key)
        if a is None:
            a = a_of[key] = _a_transposed(owner, steps, block, ins)
        if isinstance(first.a, int):
            a_rows = a
        else:
            local = block.row - block.cta * (shape.m // len(ctas))
            a_rows = a[:, local : local + block.rows]
        b_rows = b if block.cols == n else b[block.col : block.col + block.cols]
        _accumulate(owner, first, block, b_rows, a_rows, ins)
    cta.machine.counters["mma.flops"] += 2 * shape.m * n * shape.k * len(steps)


def _executing(cta, cta_group: int) -> list:
    """The CTAs whose memories an instruction works on: this one, or its pair, even rank first."""
    ctas = cta.cluster.ctas
    return [cta] if cta_group == 1 else [ctas[cta.rank & ~1], ctas[cta.rank | 1]]


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _smem_b(cta, steps, rows: int, ins: Instr) -> np.ndarray:
    """(rows, all K) float32 of B."""
    shape = steps[0].shape
    return operand_values(
        cta, tuple(s.b for s in steps), (rows, shape.k), shape.b_type, shape.b_mn_major, ins
    )


def _a_transposed(cta, steps, block, ins: Instr) -> np.ndarray:
    """(all K, rows) float32 of the CTA's A; from tensor memory, of the block's own lanes."""
    shape = steps[0].shape
    if isinstance(steps[0].a, int):
        a = _joined([_tmem_a(cta, s, block, ins) for s in steps])
    else:
        rows = shape.m // steps[0].cta_group
        descs = tuple(s.a for s in steps)
        a = operand_values(cta, descs, (rows, shape.k), shape.a_type, shape.a_mn_major, ins).T
    return -a if shape.negate_a else a


def _tmem_a(cta, step: Step, block, ins: Instr) -> np.ndarray:
    """(K, lanes) float32 of one step's A: 32-bit columns that hold 1, 2 or 4 consecutive k each."""
    shape = step.shape
    elem_bytes = layouts.ELEM_BYTES[shape.a_type]
    cols = shape.k * elem_bytes // 4
    col = step.a & 0xFFFF
    cta.check_tmem(col, cols, ins)
    where = (slice(col, col + cols), slice(block.lane, block.lane + block.rows))
    if not cta.tmem_valid_cols[where].all():
        cta.machine.note_unset("tmem", ins, step.a, int((cta.tmem_valid_cols[where] == 0).sum()))
    if cta.machine.races is not None:
        cta.machine.races.tensor(cta, where, False)
    words = cta.tmem_cols[where]
    if shape.a_type == "bf16":
        halves = np.empty((cols, 2, block.rows), np.uint32)
        halves[:, 0] = words << np.uint32(16)
        halves[:, 1] = words & np.uint32(0xFFFF0000)
        return halves.view(np.float32).reshape(2 * cols, block.rows)
    raw = np.ascontiguousarray(words).view(RAW_TYPE[elem_bytes])
    raw = raw.reshape(cols, block.rows, 4 // elem_bytes).transpose(0, 2, 1)
    raw = np.ascontiguousarray(raw).reshape(shape.k, block.rows)
    return layouts.to_float32(raw, shape.a_type)


def _accumulate(cta, first: Step, block, b: np.ndarray, a: np.ndarray, ins: Instr) -> None:
    """D block (columns x lanes, as tensor memory is stored) = b @ a (+ D)."""
    col = (first.d & 0xFFFF) + block.tmem_col
    cta.check_tmem(col, block.cols, ins)
    where = (slice(col, col + block.cols), slice(block.lane, block.lane + block.rows))
    if cta.machine.races is not None:
        cta.machine.races.tensor(cta, where, True)
    words, valid = cta.tmem_cols[where], cta.tmem_valid_cols[where]
    if first.accumulate and not valid.all():
        cta.machine.note_unset("tmem", ins, first.d, int((valid == 0).sum()))
    kind = first.shape.d_type
    enabled = _enabled_lanes(first, block)
    if kind == "f32" and enabled is None:
        d = words.view(np.float32)
        if not first.accumulate:
            np.matmul(b, a, out=d)
        elif first.scale:
            d[...] = d * np.float32(2.0**-first.scale) + b @ a
        else:
            d += b @ a
        valid[...] = 1
        return
    new = _new_values(words, first, b, a)
    if enabled is None:
        words[...] = new
        valid[...] = 1
    else:
        words[:, enabled] = new[:, enabled]
        valid[:, enabled] = 1


def _new_values(words: np.ndarray, first: Step, b: np.ndarray, a: np.ndarray) -> np.ndarray:
    """The raw 32-bit cells of the result."""
    factor, kind = np.float32(2.0**-first.scale), first.shape.d_type
    if kind != "s32":
        product = b @ a
        if kind == "f16":  # in the low half of each cell
            if first.accumulate:
                old = (words & np.uint32(0xFFFF)).astype(np.uint16).view(np.float16)
                product = product + old.astype(np.float32) * factor
            return product.astype(np.float16).view(np.uint16).astype(np.uint32)
        if first.accumulate:
            product = product + words.view(np.float32) * factor
        return product.view(np.uint32)
    total = (b.astype(np.float64) @ a).astype(np.int64)  # exact: fp32 holds 24 bits only
    if first.accumulate:
        total = total + words.view(np.int32)
    if first.shape.saturate:
        total = np.clip(total, -(2**31), 2**31 - 1)
    return total.astype(np.int64).astype(np.uint32)


def _enabled_lanes(first: Step, block) -> np.ndarray | None:
    """bool per lane of the block, or None when no lane is disabled."""
    if not any(first.lanes_off):
        return None
    words = first.lanes_off[4 * block.cta : 4 * block.cta + 4]
    off = np.unpackbits(np.array(words, np.uint32).view(np.uint8), bitorder="little").astype(bool)
    return ~off[block.lane : block.lane + block.rows]


# ---- instructions ----


@handles("tcgen05.mma")
def bind_mma(ins: Instr, k):
    kind = next((p[6:] for p in ins.parts if p.startswith("kind::")), None)
    if kind not in _KINDS or ins.has("sp") or ins.has("ashift") or ins.has("block_scale"):
        raise UnknownInstructionError(
            f"{ins.where}: {ins.op}: only dense, unscaled kinds {_KINDS} are modelled"
        )
    cta_group = one_cta_group(ins, k)
    ws = ins.has("ws")
    d_of, a_operand = address(ins.operands[0], k), ins.operands[1]
    a_in_tmem = isinstance(a_operand, Mem)
    a_of = address(a_operand, k) if a_in_tmem else uniform64(a_operand, k)
    b_of, idesc_of = uniform64(ins.operands[2], k), uniform32(ins.operands[3], k)
    rest = list(ins.operands[4:])
    off_of = []
    if rest and isinstance(rest[0], Vec):
        off_of = [uniform32(word, k) for word in rest.pop(0).items]
        if len(off_of) != 4 * cta_group:
            raise MisuseError(
                f"{place(ins)}{len(off_of)} words of disabled lanes; cta_group::{cta_group} "
                f"takes 4 each"
            )
    if not rest:
        raise UnknownInstructionError(f"{ins.where}: {ins.op}: no enable-input-d operand")
    enable_of = predicate(rest.pop(0))
    scale = rest.pop(0).bits if rest and isinstance(rest[0], Imm) and not ws else 0

    def step(warp, mask):
        lane = one_issuer(mask, ins, "an MMA")
        if cta_group == 2 and not warp.cta.peer.live:
            raise MisuseError(f"{place(ins)}the other CTA of the pair has exited")
        shape = layouts.decode_instr_desc(idesc_of(warp, mask), kind, cta_group, ws)
        a = a_of(warp, mask)
        if not a_in_tmem:
            a = _desc(a, ins)
        elif shape.a_mn_major:
            raise MisuseError(
                f"{place(ins)}A in tensor memory is K-major; the descriptor says MN-major"
            )
        enable = bool(enable_of(warp, mask) >> lane & 1)
        off = tuple(word(warp, mask) for word in off_of)
        d = d_of(warp, mask)
        made = Step(shape, cta_group, ws, d, a, _desc(b_of(warp, mask), ins), enable, off, scale)
        pipe_of(warp).add(made, ins)

    return step


def _desc(bits: int, ins: Instr) -> SmemDesc:
    desc = layouts.decode_desc(bits, "sm100")
    if desc.lbo_is_absolute:
        raise UnknownInstructionError(f"{place(ins)}absolute leading offsets are not modelled")
    return desc


@handles("tcgen05.commit")
def bind_commit(ins: Instr, k):
    mbar_of = shared_address(ins.operands[0], k)
    one_cta_group(ins, k)
    multicast = ins.has("multicast::cluster")
    mask_of = uniform32(ins.operands[1], k) if multicast else None

    def step(warp, mask):
        one_issuer(mask, ins, "a commit")
        cta = warp.cta
        home, offset = split(cta, mbar_of(warp, mask), ins)
        targets = [home]
        if mask_of is not None:
            targets = [split(cta, r << 24, ins)[0] for r in lanes_of(mask_of(warp, mask) & 0xFFFF)]
        barriers = [c.mbarrier(c.window | offset, ins) for c in targets]

        def run():
            for barrier in barriers:
                barrier.arrive(1, ins)

        pipe_of(warp).then("commit", run)

    return step


# rows -> lanes of tcgen05.cp
_COPY_LANES = {
    "128x256b": lambda i: [i],
    "128x128b": lambda i: [i],
    "4x256b": lambda i: [32 * i],
    "64x128b.warpx2::02_13": lambda i: [i, i + 64],
    "64x128b.warpx2::01_23": lambda i: [i, i + 32] if i < 32 else [i + 32, i + 64],
    "32x128b.warpx4": lambda i: [i, i + 32, i + 64, i + 96],
}


@handles("tcgen05.cp")
def bind_cp(ins: Instr, k):
    shape = ins.parts[3]
    multicast = next((p for p in ins.parts if p.startswith("warpx")), "")
    name = f"{shape}.{multicast}" if multicast else shape
    if name not in _COPY_LANES or any(p.startswith(("b8x16", "b6x16", "b4x16")) for p in ins.parts):
        raise UnknownInstructionError(f"{ins.where}: {ins.op}")
    rows, row_bytes = int(shape.split("x")[0]), int(shape.split("x")[1][:-1]) // 8
    lanes = np.array([_COPY_LANES[name](i) for i in range(rows)]).T  # (copies, rows)
    pair = one_cta_group(ins, k) == 2
    taddr_of, desc_of = address(ins.operands[0], k), uniform64(ins.operands[1], k)

    def step(warp, mask):
        one_issuer(mask, ins, "a copy to tensor memory")
        cta = warp.cta
        taddr, desc = taddr_of(warp, mask), _desc(desc_of(warp, mask), ins)
        ctas = _executing(cta, 2 if pair else 1)

        def run():
            base, table = layouts.operand_gather(desc, rows, row_bytes, 1, False)
            col, cols = taddr & 0xFFFF, row_bytes // 4
            for c in ctas:
                words = gather(c, base, table, ins).view(np.uint32)
                c.check_tmem(col, cols, ins)
                for copy in lanes + (taddr >> 16):
                    c.tmem_cols[col : col + cols, copy] = words.T
                    c.tmem_valid_cols[col : col + cols, copy] = 1

        pipe_of(warp).then("tcgen05.cp", run)

    return step
