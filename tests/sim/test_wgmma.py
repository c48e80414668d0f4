"""wgmma: every operand type and place, accumulation, and what a missing wait does."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from fa_cute.errors import MisuseError
from fa_cute.sim import layouts as lay
from tests.sim import operands as ops
from tests.sim.asm import SMEM_BASE, Program, load_image

DATA = 1024
B_AT = 32768


@dataclass
class Case:
    """One product of 64 x n x (steps of 32 bytes), its image and its program."""

    n: int
    a_type: str
    b_type: str
    d_type: str = "f32"
    steps: int = 2
    a_mn: bool = False
    b_mn: bool = False
    swizzle: str = "128B"
    a_in_registers: bool = False
    signs: tuple[int, int] = (1, 1)
    groups: bool = False  # each step is a group of its own

    def __post_init__(self):
        rng = np.random.default_rng(0)
        self.size = lay.ELEM_BYTES[self.a_type]
        self.k_step = 32 // self.size
        self.image = ops.Image(65536, SMEM_BASE + DATA)
        k = self.steps * self.k_step
        self.a_raw, self.a = ops.random_raw(rng, (64, k), self.a_type)
        self.b_raw, self.b = ops.random_raw(rng, (self.n, k), self.b_type)
        start = SMEM_BASE + DATA
        self.a_descs = self._place(self.a_raw, start, self.a_mn)
        self.b_descs = self._place(self.b_raw, start + B_AT, self.b_mn)
        self.fragments = self._fragments() if self.a_in_registers else None
        self.d_regs = self.n // 4 if self.d_type == "f16" else self.n // 2
        self.out = np.zeros((128, self.d_regs), np.uint32)

    def _place(self, raw, start, mn_major):
        form = ops.pattern(len(raw), self.size, self.swizzle, mn_major)
        descs = [
            lay.SmemDesc(start + form["steps"][s], form["lbo"], form["sbo"], self.swizzle, 0)
            for s in range(self.steps)
        ]
        self.image.place(lambda s: descs[s], raw, self.k_step, mn_major)
        return descs

    def _fragments(self):
        """(128 threads, steps, 4 registers) of A, by the documented positions."""
        per = 4 // self.size
        cells = np.zeros((128, self.steps, 4, per), self.a_raw.dtype)
        for t, s, reg, i in np.ndindex(cells.shape):
            g, h = divmod(reg, 2)
            row = 16 * (t // 32) + t % 32 // 4 + 8 * h
            k = self.k_step * s + 4 * per * g + per * (t % 4) + i
            cells[t, s, reg, i] = self.a_raw[row, k]
        return cells.reshape(128, -1).view(np.uint32).copy()

    def opcode(self):
        shape = f"m64n{self.n}k{self.k_step}"
        return f"wgmma.mma_async.sync.aligned.{shape}.{self.d_type}.{self.a_type}.{self.b_type}"

    def flags(self):
        if self.d_type == "s32":
            return ""
        scales = f", {self.signs[0]}, {self.signs[1]}"
        if self.size != 2:
            return scales
        left = "" if self.fragments is not None else f", {int(self.a_mn)}"
        return scales + left + f", {int(self.b_mn)}"

    def body(self, wait="wgmma.wait_group.sync.aligned 0;"):
        d = ", ".join(f"%f{i}" for i in range(self.d_regs))
        text = [load_image(self.image.bytes.size, "%image", at=DATA)]
        if self.fragments is not None:
            count = 4 * self.steps
            text.append(f"mul.wide.u32 %d4, %t, {4 * count}; add.s64 %d4, %d4, %a;")
            text += [f"ld.global.b32 %r{i}, [%d4+{4 * i}];" for i in range(count)]
        text.append("wgmma.fence.sync.aligned;")
        for s in range(self.steps):
            if self.fragments is None:
                text.append(f"mov.b64 %d0, {ops.encode_desc(self.a_descs[s], 'sm90')};")
                a = "%d0"
            else:
                a = "{" + ", ".join(f"%r{4 * s + i}" for i in range(4)) + "}"
            text.append(f"mov.b64 %d1, {ops.encode_desc(self.b_descs[s], 'sm90')};")
            text.append(f"{self.opcode()} {{{d}}}, {a}, %d1, {int(s > 0)}{self.flags()};")
            text += ["wgmma.commit_group.sync.aligned;"] * self.groups
        text += ["wgmma.commit_group.sync.aligned;", wait]
        text.append(f"mul.wide.u32 %d5, %t, {4 * self.d_regs}; add.s64 %d5, %d5, %out;")
        text += [f"st.global.b32 [%d5+{4 * i}], %f{i};" for i in range(self.d_regs)]
        text.append("wgmma.wait_group.sync.aligned 0;")
        return "\n".join(text)

    def run(self, schedule="early", **kw):
        params = {"image": self.image.bytes, "out": self.out}
        if self.fragments is not None:
            params["a"] = self.fragments
        program = Program("sm_90a", self.body(**kw), params, regs={"f": 128, "r": 64})
        program.run(smem=70000, schedule=schedule, unset="ignore")
        return self.matrix()

    def matrix(self):
        got = np.zeros((64, self.n), np.float64)
        cells = self.out
        if self.d_type == "f16":
            cells = self.out.view(np.float16)
        elif self.d_type == "f32":
            cells = self.out.view(np.float32)
        else:
            cells = self.out.view(np.int32)
        for t, d in np.ndindex(cells.shape):
            j, h, i = d // 4, d // 2 % 2, d % 2
            got[16 * (t // 32) + t % 32 // 4 + 8 * h, 8 * j + 2 * (t % 4) + i] = cells[t, d]
        return got

    def want(self):
        return self.signs[0] * self.signs[1] * (self.a @ self.b.T)


@pytest.mark.parametrize("swizzle", ["none", "32B", "64B", "128B"])
@pytest.mark.parametrize(("a_mn", "b_mn"), [(False, False), (False, True), (True, True)])
def test_majors_and_swizzles(swizzle, a_mn, b_mn):
    case = Case(64, "bf16", "bf16", a_mn=a_mn, b_mn=b_mn, swizzle=swizzle)
    np.testing.assert_allclose(case.run(), case.want(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("a_in_registers", [False, True])
@pytest.mark.parametrize(
    ("a", "b", "d"),
    [
        ("f16", "f16", "f32"),
        ("f16", "f16", "f16"),
        ("tf32", "tf32", "f32"),
        ("e4m3", "e5m2", "f32"),
        ("s8", "u8", "s32"),
    ],
)
def test_element_types(a, b, d, a_in_registers):
    case = Case(32, a, b, d, a_in_registers=a_in_registers)
    atol = {"f16": 3e-2, "f32": 1e-3, "s32": 0}[d]
    np.testing.assert_allclose(case.run(), case.want(), rtol=0, atol=atol)


def test_integer_sums_are_exact():
    """sixteen steps of large bytes: sums of more than the 24 bits of an fp32 product."""
    case = Case(8, "u8", "u8", "s32", steps=16)
    for raw, values in ((case.a_raw, case.a), (case.b_raw, case.b)):
        raw[:] = raw | 0xF0
        values[:] = raw
    case.image.bytes[:] = 0xFF
    case.a_descs = case._place(case.a_raw, SMEM_BASE + DATA, False)
    case.b_descs = case._place(case.b_raw, SMEM_BASE + DATA + B_AT, False)
    assert case.want().max() > 2**24
    np.testing.assert_array_equal(case.run(), case.want())


def test_signs():
    case = Case(8, "bf16", "bf16", signs=(-1, 1), swizzle="32B")
    np.testing.assert_allclose(case.run(), case.want(), rtol=0, atol=1e-4)


def test_all_schedules_give_the_same_bits():
    results = []
    for schedule in ("early", "late", "random:1", "random:2"):
        case = Case(64, "bf16", "bf16", steps=4, a_in_registers=True)
        case.run(schedule)
        results.append(case.out.copy())
    assert all(np.array_equal(results[0], r) for r in results)


@pytest.mark.parametrize("schedule", ["early", "late", "random:1", "priority:1"])
def test_a_group_adds_to_what_the_group_before_it_has_not_finished(schedule):
    """Also where one warp has issued both before the others have issued the first."""
    case = Case(64, "bf16", "bf16", steps=4, groups=True)
    np.testing.assert_allclose(case.run(schedule), case.want(), rtol=1e-5, atol=1e-5)


def test_results_do_not_appear_before_the_wait():
    case = Case(64, "bf16", "bf16")
    assert np.isnan(case.run("late", wait="")).all()


def test_the_warps_must_agree():
    case = Case(8, "bf16", "bf16", steps=1, swizzle="32B")
    text = case.body().replace(
        "wgmma.mma_async", "cvt.u64.u32 %d6, %warp; add.s64 %d1, %d1, %d6; wgmma.mma_async", 1
    )
    program = Program("sm_90a", text, {"image": case.image.bytes, "out": case.out}, {"f": 128})
    with pytest.raises(MisuseError, match="disagree"):
        program.run(smem=70000)


def test_shapes_that_do_not_exist_are_refused():
    case = Case(32, "bf16", "bf16", steps=1)
    text = case.body().replace("m64n32k16", "m64n32k8")
    with pytest.raises(MisuseError, match="32 bytes of K"):
        Program("sm_90a", text, {"image": case.image.bytes, "out": case.out}, {"f": 128}).run()
