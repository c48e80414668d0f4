"""wgmma: the tensor core of Hopper, driven by the four warps of a warpgroup.

Each warp issues the instruction; the product is formed once, when all four have.  As for tcgen05, K
steps that accumulate into the same registers are collected until the warps issue something else
(a commit, other registers) and then multiplied together.  While a product is outstanding its D
registers hold NaN, unless the schedule is `early`: a kernel that reads them before wait_group gets
what it deserves.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fa_cute.errors import MisuseError, UnknownInstructionError
from fa_cute.sim import layouts
from fa_cute.sim.handlers import FULL, handles
from fa_cute.sim.layouts import SmemDesc
from fa_cute.sim.memory import place
from fa_cute.sim.operands import predicate, uniform64
from fa_cute.sim.ptx import Imm, Vec
from fa_cute.sim.smem_ops import operand_values
from fa_cute.sim.tmem_ops import register_rows, whole_warp

if TYPE_CHECKING:
    from fa_cute.sim.ptx import Instr
    from fa_cute.sim.warp import Warp, Warpgroup

_MAX_STEPS = 32
_SHAPE = re.compile(r"m64n(\d+)k(\d+)$")
_D_REGISTERS_PER_COLUMN = {"f32": 2, "s32": 2, "f16": 4}  # columns per register


@dataclass(frozen=True)
class Form:
    """What the opcode says: shape, types, which operand is in registers."""

    n: int
    k: int
    d_type: str
    a_type: str
    b_type: str
    d_rows: tuple[int, ...]
    a_in_registers: bool
    a_mn_major: bool
    b_mn_major: bool
    negate_a: bool
    negate_b: bool


@dataclass(frozen=True)
class Step:
    """One wgmma.mma_async with its values, as captured at issue."""

    form: Form
    a: SmemDesc | tuple[int, ...]  # descriptor, or register rows
    b: SmemDesc
    accumulate: bool

    def continues(self, first: Step) -> bool:
        return (
            self.accumulate
            and self.form == first.form
            and _same_pattern(self.b, first.b)
            and (self.form.a_in_registers or _same_pattern(self.a, first.a))
        )


def _same_pattern(x: SmemDesc, y: SmemDesc) -> bool:
    return (x.lbo, x.sbo, x.swizzle) == (y.lbo, y.sbo, y.swizzle)


class Stream:
    """Products that one warp has issued and the others have yet to; one list per warp."""

    __slots__ = ("open", "outstanding", "sealed", "warpgroup")

    def __init__(self, warpgroup: Warpgroup):
        self.warpgroup = warpgroup
        self.open: dict[int, tuple[list[Step], Instr]] = {}  # quarter -> what it collects
        self.sealed: dict[int, list] = {q: [] for q in range(4)}
        self.outstanding: list[Product] = []

    def add(self, warp: Warp, step: Step, ins: Instr) -> None:
        held = self.open.get(warp.quarter)
        if held and (len(held[0]) == _MAX_STEPS or not step.continues(held[0][0])):
            self.seal(warp)
            held = None
        if held is None:
            self.open[warp.quarter] = ([step], ins)
        else:
            held[0].append(step)

    def seal(self, warp: Warp) -> None:
        """The warp issues something else: its collected product is complete."""
        held = self.open.pop(warp.quarter, None)
        if held is None:
            return
        steps, ins = tuple(held[0]), held[1]
        share = Share(warp, steps, warp.groups("wgmma").add())
        if not warp.machine.queue.early:
            share.hide(self.outstanding)
        self.sealed[warp.quarter].append(share)
        if all(self.sealed.values()):
            shares = [self.sealed[q].pop(0) for q in range(4)]
            self._post(shares, ins)

    def _post(self, shares: list[Share], ins: Instr) -> None:
        steps = shares[0].steps
        if any(share.steps != steps for share in shares):
            raise MisuseError(
                f"{place(ins)}the warps of a warpgroup disagree on descriptors or predicates"
            )
        product = Product(shares, steps, ins)
        self.outstanding.append(product)

        def run():
            product.run()
            self.outstanding.remove(product)

        shares[0].warp.machine.queue.post("wgmma", self, run)


class Share:
    """One warp's part of a product."""

    __slots__ = ("done", "saved", "steps", "warp")

    def __init__(self, warp: Warp, steps: tuple[Step, ...], done):
        self.warp, self.steps, self.done = warp, steps, done
        self.saved: np.ndarray | None = None  # D as it was, while the registers are poisoned

    def hide(self, outstanding: list[Product]) -> None:
        """Poison D until the product is there; a product under way will bring D's real value."""
        rows = self.steps[0].form.d_rows
        if any(not set(rows).isdisjoint(p.steps[0].form.d_rows) for p in outstanding):
            return
        index = list(rows)
        self.saved = self.warp.r32[index]
        self.warp.r32[index] = FULL

    def accumulator(self) -> np.ndarray:
        rows = list(self.steps[0].form.d_rows)
        return self.warp.r32[rows] if self.saved is None else self.saved


class Product:
    """D = A B (+ D) of a warpgroup over all collected steps."""

    __slots__ = ("ins", "shares", "steps")

    def __init__(self, shares: list[Share], steps: tuple[Step, ...], ins: Instr):
        self.shares, self.steps, self.ins = shares, steps, ins

    def run(self) -> None:
        form, first = self.steps[0].form, self.steps[0]
        warp = self.shares[0].warp
        b = _smem(warp.cta, tuple(s.b for s in self.steps), form.n, form, "b", self.ins)
        product = self._a() @ b.T
        warp.machine.counters["mma.flops"] += 2 * product.size * b.shape[1]
        fragments = layouts.d_to_fragment(product)
        rows = list(form.d_rows)
        for share, values in zip(self.shares, fragments, strict=True):
            old = share.accumulator() if first.accumulate else None
            share.warp.r32[rows] = _combine(form.d_type, values, old)
        for share in self.shares:
            share.done()

    def _a(self) -> np.ndarray:
        """(64, all K) float32."""
        form = self.steps[0].form
        if not form.a_in_registers:
            cta = self.shares[0].warp.cta
            return _smem(cta, tuple(s.a for s in self.steps), 64, form, "a", self.ins)
        size = layouts.ELEM_BYTES[form.a_type]
        parts = []
        for step in self.steps:
            regs = np.stack([share.warp.r32[list(step.a)] for share in self.shares])
            parts.append(layouts.to_float32(layouts.fragment_to_a(regs, size), form.a_type))
        a = np.concatenate(parts, axis=1)
        return -a if form.negate_a else a


def _smem(cta, descs, rows: int, form: Form, which: str, ins: Instr) -> np.ndarray:
    a = which == "a"
    dtype, mn_major = (form.a_type, form.a_mn_major) if a else (form.b_type, form.b_mn_major)
    values = operand_values(cta, descs, (rows, form.k), dtype, mn_major, ins)
    return -values if (form.negate_a if a else form.negate_b) else values


def _combine(d_type: str, product: np.ndarray, old: np.ndarray | None) -> np.ndarray:
    """Registers of one warp: product fragment (N / 2, 32) float32 plus the old registers."""
    if d_type == "f32":
        return (product if old is None else product + old.view(np.float32)).view(np.uint32)
    if d_type == "s32":
        total = product.astype(np.int64)
        if old is not None:
            total = total + old.view(np.int32)
        return total.astype(np.uint32)
    if old is not None:
        product = product + layouts.unpack_halves(old).view(np.float16).astype(np.float32)
    return layouts.pack_halves(product.astype(np.float16).view(np.uint16))


def stream_of(warp: Warp) -> Stream:
    scratch, key = warp.cta.scratch, ("wgmma", warp.index // 4)
    stream = scratch.get(key)
    if stream is None:
        stream = scratch[key] = Stream(warp.warpgroup)
    return stream


def _form(ins: Instr) -> Form:
    """Everything of the instruction that is fixed at compile time."""
    shape = next((m for p in ins.parts if (m := _SHAPE.match(p))), None)
    types = [p for p in ins.parts[5:] if p in layouts.ELEM_BYTES or p in ("f32", "s32")]
    d_regs, a, rest = ins.operands[0], ins.operands[1], ins.operands[4:]
    if shape is None or len(types) != 3 or ins.has("sp"):
        raise UnknownInstructionError(f"{ins.where}: {ins.op}")
    d_type, a_type, b_type = types
    n, k = int(shape[1]), int(shape[2])
    if k * layouts.ELEM_BYTES[a_type] != 32:
        raise MisuseError(f"{place(ins)}K {k} of {a_type}; one instruction takes 32 bytes of K")
    rows = register_rows(d_regs)
    if len(rows) != n // _D_REGISTERS_PER_COLUMN[d_type]:
        raise MisuseError(f"{place(ins)}{len(rows)} accumulator registers for N {n} of {d_type}")
    flags = [imm.signed for imm in rest if isinstance(imm, Imm)]
    scales, transposed = flags[:2] or [1, 1], flags[2:]
    in_registers = isinstance(a, Vec)
    if any(transposed) and layouts.ELEM_BYTES[a_type] != 2:
        raise MisuseError(f"{place(ins)}only 16-bit operands can be MN-major")
    return Form(
        n=n, k=k, d_type=d_type, a_type=a_type, b_type=b_type, d_rows=rows,
        a_in_registers=in_registers,
        a_mn_major=bool(not in_registers and transposed and transposed[0]),
        b_mn_major=bool(transposed and transposed[-1]),
        negate_a=scales[0] == -1, negate_b=scales[1] == -1,
    )  # fmt: skip


@handles("wgmma.mma_async")
def bind_mma(ins: Instr, k):
    form = _form(ins)
    a, b_of = ins.operands[1], uniform64(ins.operands[2], k)
    a_rows = register_rows(a) if form.a_in_registers else None
    a_of = None if form.a_in_registers else uniform64(a, k)
    accumulate_of = predicate(ins.operands[3])

    def step(warp, mask):
        whole_warp(mask, warp, ins)
        accumulate = accumulate_of(warp, mask) & FULL
        if accumulate not in (0, FULL):
            raise MisuseError(f"{place(ins)}scale-d differs between lanes: {accumulate:#010x}")
        left = a_rows if a_of is None else layouts.decode_desc(a_of(warp, mask), "sm90")
        right = layouts.decode_desc(b_of(warp, mask), "sm90")
        stream_of(warp).add(warp, Step(form, left, right, bool(accumulate)), ins)

    return step


@handles("wgmma.fence")
def bind_fence(ins: Instr, k):
    """Orders register accesses, which here happen in program order; it must still be converged."""
    return lambda warp, mask: whole_warp(mask, warp, ins)


@handles("wgmma.commit_group")
def bind_commit(ins: Instr, k):
    def step(warp, mask):
        whole_warp(mask, warp, ins)
        stream_of(warp).seal(warp)
        warp.groups("wgmma").commit()

    return step


@handles("wgmma.wait_group")
def bind_wait(ins: Instr, k):
    allowed = ins.operands[0].bits

    def step(warp, mask):
        whole_warp(mask, warp, ins)
        return warp.groups("wgmma").wait(allowed, ins)

    return step
