"""wgmma: the tensor core of Hopper, driven by the four warps of a warpgroup.

Each warp issues the instruction; the product is formed once, when all four have.  As for tcgen05, K
steps that accumulate into the same registers are collected until the warps issue something else
(a commit, other registers) and then multiplied together.  While a product is outstanding its D
registers hold NaN, unless the schedule is `early`: a kernel that reads them before wait_group gets
what it deserves.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fa_cute.errors import MisuseError, UnknownInstructionError
from fa_cute.sim import layouts, sums
from fa_cute.sim.handlers import FULL, handles
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


# One wgmma.mma_async as captured at issue: A's descriptor or register rows, B's descriptor (both
# raw bits), and whether D is accumulated.
Step = tuple[int | tuple[int, ...], int, bool]

_START = 0x3FFF  # bits of a descriptor that differ between the K steps of one product


def _continues(step: Step, first: Step, in_registers: bool) -> bool:
    """Can this step be added to the product that `first` begins?"""
    a, b, accumulate = step
    return (
        accumulate
        and (b ^ first[1]) & ~_START == 0
        and (in_registers or (a ^ first[0]) & ~_START == 0)
    )


class Stream:
    """Products that one warp has issued and the others have yet to; one list per warp."""

    __slots__ = ("open", "outstanding", "sealed", "warpgroup")

    def __init__(self, warpgroup: Warpgroup):
        self.warpgroup = warpgroup
        self.open: dict[int, Held] = {}  # quarter -> what it collects
        self.sealed: dict[int, list] = {q: [] for q in range(4)}
        self.outstanding: list[Product] = []

    def add(self, warp: Warp, form: Form, step: Step, ins: Instr) -> None:
        held = self.open.get(warp.quarter)
        if held is not None:
            steps = held.steps
            if (
                held.form is form
                and len(steps) < _MAX_STEPS
                and _continues(step, steps[0], form.a_in_registers)
            ):
                steps.append(step)
                return
            self.seal(warp)
        self.open[warp.quarter] = Held(form, [step], ins)

    def seal(self, warp: Warp) -> None:
        """The warp issues something else: its collected product is complete."""
        held = self.open.pop(warp.quarter, None)
        if held is None:
            return
        share = Share(warp, held, warp.groups("wgmma").add())
        if not warp.machine.queue.early:
            # Other warps may not have issued what this one did before: it is not posted yet.
            earlier = (*self.outstanding, *(s.held for s in self.sealed[warp.quarter]))
            share.hide(earlier)
        self.sealed[warp.quarter].append(share)
        if all(self.sealed.values()):
            shares = [self.sealed[q].pop(0) for q in range(4)]
            self._post(shares)

    def _post(self, shares: list[Share]) -> None:
        held = shares[0].held
        if any((s.held.form, s.held.steps) != (held.form, held.steps) for s in shares):
            raise MisuseError(
                f"{place(held.ins)}the warps of a warpgroup disagree on descriptors or predicates"
            )
        product = Product(shares, held)
        self.outstanding.append(product)

        def run():
            product.run()
            self.outstanding.remove(product)

        shares[0].warp.machine.queue.post("wgmma", self, run)


class Held:
    """Steps that a warp has collected."""

    __slots__ = ("form", "ins", "steps")

    def __init__(self, form: Form, steps: list[Step], ins: Instr):
        self.form, self.steps, self.ins = form, steps, ins


class Share:
    """One warp's part of a product."""

    __slots__ = ("done", "held", "saved", "warp")

    def __init__(self, warp: Warp, held: Held, done):
        self.warp, self.held, self.done = warp, held, done
        self.saved: np.ndarray | None = None  # D as it was, while the registers are poisoned

    def hide(self, earlier: Sequence[Product | Held]) -> None:
        """Poison D until the product is there; a product under way will bring D's real value."""
        rows = self.held.form.d_rows
        if any(not set(rows).isdisjoint(x.form.d_rows) for x in earlier):
            return
        index = list(rows)
        self.saved = self.warp.r32[index]
        self.warp.r32[index] = FULL

    def accumulator(self) -> np.ndarray:
        rows = list(self.held.form.d_rows)
        return self.warp.r32[rows] if self.saved is None else self.saved


class Product:
    """D = A B (+ D) of a warpgroup over all collected steps."""

    __slots__ = ("form", "ins", "shares", "steps")

    def __init__(self, shares: list[Share], held: Held):
        self.shares, self.form, self.steps, self.ins = shares, held.form, held.steps, held.ins

    def run(self) -> None:
        form = self.form
        warp = self.shares[0].warp
        b = _smem(warp.cta, [step[1] for step in self.steps], form, "b", self.ins)
        a = self._a()
        if form.d_type == "s32":
            a = a.astype(np.float64)  # exact: fp32 holds 24 bits only
        rows, accumulate = list(form.d_rows), self.steps[0][2]
        warp.machine.counters["mma.flops"] += 2 * len(a) * len(b) * b.shape[1]
        old = [share.accumulator() if accumulate else None for share in self.shares]
        if warp.machine.options.sums == "hopper" and form.k == sums.STEP and form.d_type == "f32":
            fragments = self._as_hopper(a, b, old)
        else:
            product = layouts.d_to_fragment(a @ b.T)
            pairs = zip(product, old, strict=True)
            fragments = [_combine(form.d_type, new, before) for new, before in pairs]
        for share, values in zip(self.shares, fragments, strict=True):
            share.warp.r32[rows] = values
        for share in self.shares:
            share.done()

    def _as_hopper(self, a, b, old) -> np.ndarray:
        """Registers of each warp."""
        d = np.zeros((len(a), len(b)), np.float32)
        if old[0] is not None:
            d = layouts.fragment_to_d(np.stack(old).view(np.float32))
        found = layouts.d_to_fragment(sums.hopper(a, b, d))
        return np.ascontiguousarray(found).view(np.uint32)

    def _a(self) -> np.ndarray:
        """(64, all K) float32."""
        form = self.form
        if not form.a_in_registers:
            cta = self.shares[0].warp.cta
            return _smem(cta, [step[0] for step in self.steps], form, "a", self.ins)
        rows = [row for step in self.steps for row in step[0]]
        regs = np.stack([share.warp.r32[rows] for share in self.shares])
        raw = layouts.fragment_to_a(regs, layouts.ELEM_BYTES[form.a_type])
        a = layouts.to_float32(raw, form.a_type)
        return -a if form.negate_a else a


def _smem(cta, bits: list[int], form: Form, which: str, ins: Instr) -> np.ndarray:
    a = which == "a"
    rows, descs = 64 if a else form.n, tuple(layouts.decode_desc(x, "sm90") for x in bits)
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


_FORMS: dict[Form, Form] = {}  # one object per form, so that `is` compares them


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
    form = _FORMS.setdefault(_form(ins), _form(ins))
    a, b_of = ins.operands[1], uniform64(ins.operands[2], k)
    a_rows = register_rows(a) if form.a_in_registers else None
    a_of = None if form.a_in_registers else uniform64(a, k)
    accumulate_of = predicate(ins.operands[3])

    def step(warp, mask):
        whole_warp(mask, warp, ins)
        accumulate = accumulate_of(warp, mask) & FULL
        if accumulate not in (0, FULL):
            raise MisuseError(f"{place(ins)}scale-d differs between lanes: {accumulate:#010x}")
        left = a_rows if a_of is None else a_of(warp, mask)
        stream_of(warp).add(warp, form, (left, b_of(warp, mask), accumulate == FULL), ins)

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
