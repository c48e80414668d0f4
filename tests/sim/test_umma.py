"""tcgen05: products of every kind and layout, tensor-memory accesses, and misuse."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from fa_cute.errors import MisuseError, OutOfBoundsError, SimError
from fa_cute.sim import layouts as lay
from tests.sim import operands as ops
from tests.sim.asm import SMEM_BASE, Program, load_image, mbarrier_wait

DATA = 1024  # operands start here in dynamic shared memory
MODES = ("early", "late", "random:3")
_FORMATS = {
    "f16": {"f16": 0, "bf16": 1},
    "tf32": {"tf32": 2},
    "f8f6f4": {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5},
    "i8": {"u8": 0, "s8": 1},
}


@dataclass(frozen=True)
class Form:
    """A product: the fields of its instruction descriptor and how its operands lie."""

    kind: str
    a: str
    b: str
    m: int
    n: int
    d: str = "f32"
    a_mn: bool = False
    b_mn: bool = False
    negate: tuple[int, int] = (0, 0)
    group: int = 1
    ws: bool = False
    steps: int = 2
    swizzle: str = "128B"
    backwards: bool = False  # the first K step lies behind the others

    @property
    def idesc(self) -> int:
        codes, d_code = _FORMATS[self.kind], {"f16": 0, "f32": 1, "s32": 2}[self.d]
        flags = self.negate[0] << 13 | self.negate[1] << 14 | self.a_mn << 15 | self.b_mn << 16
        shape = self.n >> 3 << 17 | self.m >> 4 << 24
        return d_code << 4 | codes[self.a] << 7 | codes[self.b] << 10 | flags | shape


class Operand:
    """A random (rows x K) matrix and its image from `start` on."""

    def __init__(self, form: Form, which: str, rng, start: int):
        dtype = getattr(form, which)
        rows = (form.m if which == "a" else form.n) // form.group
        self.mn_major = form.a_mn if which == "a" else form.b_mn
        size = lay.ELEM_BYTES[dtype]
        self.k_step = 32 // size
        self.raw, self.values = ops.random_raw(rng, (rows, form.steps * self.k_step), dtype)
        dense = ops.pattern(rows, size, form.swizzle, self.mn_major)
        places = [dense["steps"][s] for s in range(form.steps)]
        self.descs = [
            lay.SmemDesc(start + at, dense["lbo"], dense["sbo"], form.swizzle, 0)
            for at in (reversed(places) if form.backwards else places)
        ]

    def place(self, image):
        image.place(lambda s: self.descs[s], self.raw, self.k_step, self.mn_major)

    def codes(self):
        return [ops.encode_desc(d, "sm100") for d in self.descs]


def dump(cols: int) -> str:
    """Each thread stores its lane of tensor memory to out[rank][lane][cols]."""
    text = ["shl.b32 %r40, %warp, 21;", "add.s32 %r40, %r40, %r30;"]
    text += [f"mul.wide.u32 %d8, %t, {4 * cols};", "add.s64 %d8, %d8, %out;"]
    text += [f"mul.wide.u32 %d9, %rank, {4 * cols * 128};", "add.s64 %d8, %d8, %d9;"]
    for c in range(0, cols, 8):
        regs = ", ".join(f"%r{i}" for i in range(8))
        text.append(f"tcgen05.ld.sync.aligned.32x32b.x8.b32 {{{regs}}}, [%r40+{c}];")
        text.append("tcgen05.wait::ld.sync.aligned;")
        for i in range(0, 8, 4):
            quad = ", ".join(f"%r{i + j}" for j in range(4))
            text.append(f"st.global.v4.b32 [%d8+{4 * (c + i)}], {{{quad}}};")
    return "\n".join(text)


def prologue(nbytes: int, columns: int, group: int) -> str:
    return f"""
setp.lt.u32 %p5, %t, 32;
@!%p5 bra ALLOCATED;
tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [smem+32], {columns};
tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;
ALLOCATED:
mul.wide.u32 %d7, %rank, {nbytes};
add.s64 %image, %image, %d7;
{load_image(nbytes, "%image", at=DATA)}
bar.sync 0;
ld.shared.b32 %r30, [smem+32];
{"barrier.cluster.arrive; barrier.cluster.wait;" if group == 2 else ""}
"""


def epilogue(columns: int, group: int) -> str:
    return f"""
bar.sync 0;
{"barrier.cluster.arrive; barrier.cluster.wait;" if group == 2 else ""}
@!%p5 bra FREED;
tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %r30, {columns};
FREED:
"""


def product(form: Form, a_codes, b_codes, a_tmem=None, extra=""):
    """MMAs of all steps by one thread, a commit, and everybody's wait."""
    group = form.group
    text = ["setp.eq.u32 %p4, %t, 0;", "setp.eq.u32 %p3, %rank, 0;", "and.pred %p4, %p4, %p3;"]
    for s, b in enumerate(b_codes):
        if a_tmem is None:
            text.append(f"mov.b64 %d0, {a_codes[s]};")
            a = "%d0"
        else:
            a = f"[%r30+{a_tmem + 8 * s}]"
        op = f"tcgen05.mma{'.ws' if form.ws else ''}.cta_group::{group}.kind::{form.kind}"
        text.append(f"mov.b64 %d1, {b}; mov.b32 %r20, {form.idesc};")
        text.append(f"@%p4 {op} [%r30], {a}, %d1, %r20{extra}, {int(s > 0)};")
    if group == 1:
        text.append(
            "@%p4 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [smem+8];"
        )
    else:
        text.append("mov.b16 %h0, 3;")
        text.append(
            "@%p4 tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster"
            ".multicast::cluster.b64 [smem+8], %h0;"
        )
    return "\n".join([*text, mbarrier_wait("smem+8", 0, "MULTIPLIED")])


def place_of(form: Form, row, col):
    """The documented accumulator layouts, element by element: (cta, lane, column)."""
    m, n = form.m, form.n
    if form.group == 2:
        cta, r = divmod(row, m // 2)
        if m == 256:
            return cta, r, col
        return cta, r + 64 * (col // (n // 2)), col % (n // 2)
    if m == 128:
        return 0, row, col
    if form.ws:
        part = n // (128 // m)
        return 0, row + m * (col // part), col % part
    return 0, 32 * (row // 16) + row % 16, col


def gather_d(out, form: Form):
    got = np.empty((form.m, form.n), out.dtype)
    for row, col in np.ndindex(form.m, form.n):
        got[row, col] = out[place_of(form, row, col)]
    return got


def run_product(form: Form, schedule: str = "early"):
    """D of one product, read back from tensor memory, and the exact one."""
    rng = np.random.default_rng(0)
    start_a, start_b = SMEM_BASE + DATA, SMEM_BASE + DATA + 32768
    images, a_parts, b_parts = [], [], []
    for _ in range(form.group):
        image = ops.Image(65536, SMEM_BASE + DATA)
        a_parts.append(Operand(form, "a", rng, start_a))
        b_parts.append(Operand(form, "b", rng, start_b))
        a_parts[-1].place(image)
        b_parts[-1].place(image)
        images.append(image.bytes)
    cols = form.n // (128 // form.m) if form.ws else form.n
    body = (
        prologue(65536, 256, form.group)
        + product(form, a_parts[0].codes(), b_parts[0].codes())
        + dump(cols)
        + epilogue(256, form.group)
    )
    out = np.zeros((form.group, 128, cols), np.uint32)
    program = Program("sm_100a", body, {"image": np.stack(images), "out": out})
    options = {"schedule": schedule, "unset": "ignore"}
    program.run(ctas=form.group, cluster=form.group, smem=80000, **options)
    a_all = np.concatenate([p.values for p in a_parts]) * (-1 if form.negate[0] else 1)
    b_all = np.concatenate([p.values for p in b_parts]) * (-1 if form.negate[1] else 1)
    return gather_d(out, form), a_all @ b_all.T


def bf16_form(m, n, **kw):
    return Form("f16", "bf16", "bf16", m, n, **kw)


@pytest.mark.parametrize("swizzle", ["none", "32B", "64B", "128B"])
@pytest.mark.parametrize(("a_mn", "b_mn"), [(False, False), (False, True), (True, False)])
def test_majors_and_swizzles(swizzle, a_mn, b_mn):
    got, want = run_product(bf16_form(128, 64, a_mn=a_mn, b_mn=b_mn, swizzle=swizzle))
    np.testing.assert_allclose(got.view(np.float32), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "a", "b", "d"),
    [
        ("f16", "f16", "f16", "f32"),
        ("f16", "f16", "f16", "f16"),
        ("tf32", "tf32", "tf32", "f32"),
        ("f8f6f4", "e4m3", "e5m2", "f32"),
        ("f8f6f4", "e2m3", "e3m2", "f32"),
        ("f8f6f4", "e2m1", "e4m3", "f16"),
        ("i8", "s8", "u8", "s32"),
    ],
)
def test_element_types(kind, a, b, d):
    got, want = run_product(Form(kind, a, b, 128, 32, d=d, swizzle="64B"))
    if d == "s32":
        np.testing.assert_array_equal(got.view(np.int32), want.astype(np.int64))
    elif d == "f16":
        assert not (got >> 16).any()
        half = got.astype(np.uint16).view(np.float16).astype(np.float64)
        np.testing.assert_allclose(half, want, rtol=2e-3, atol=2e-2)
    else:
        np.testing.assert_allclose(got.view(np.float32), want, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("m", "n", "group", "ws"),
    [
        (64, 32, 1, False),
        (64, 64, 1, True),
        (32, 64, 1, True),
        (256, 32, 2, False),
        (128, 64, 2, False),
    ],
)
def test_accumulator_layouts(m, n, group, ws):
    got, want = run_product(bf16_form(m, n, group=group, ws=ws))
    np.testing.assert_allclose(got.view(np.float32), want, rtol=0, atol=1e-4)


def test_negated_operands():
    got, want = run_product(Form("f16", "f16", "f16", 128, 16, negate=(1, 0)))
    np.testing.assert_allclose(got.view(np.float32), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("mn", [False, True])
def test_a_step_may_lie_before_the_first(mn):
    """As in a ring of operand slots that wraps; further than one swizzle pattern."""
    form = bf16_form(128, 64, a_mn=mn, b_mn=mn, steps=6, backwards=True)
    got, want = run_product(form)
    np.testing.assert_allclose(got.view(np.float32), want, rtol=0, atol=1e-4)


def test_all_schedules_give_the_same_bits():
    form = bf16_form(256, 32, group=2, steps=4)
    results = [run_product(form, mode)[0] for mode in MODES]
    assert all(np.array_equal(results[0], r) for r in results)


# ---- A in tensor memory, disabled lanes ----


def tmem_store(cols: int, at: int, source: str) -> str:
    """Each thread stores its row of `source` (cols words) to tensor memory."""
    text = [f"mul.wide.u32 %d10, %t, {4 * cols}; add.s64 %d10, %d10, {source};"]
    text += ["shl.b32 %r41, %warp, 21;", "add.s32 %r41, %r41, %r30;"]
    for c in range(0, cols, 8):
        for i in range(0, 8, 4):
            quad = ", ".join(f"%r{i + j}" for j in range(4))
            text.append(f"ld.global.v4.b32 {{{quad}}}, [%d10+{4 * (c + i)}];")
        regs = ", ".join(f"%r{i}" for i in range(8))
        text.append(f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%r41+{at + c}], {{{regs}}};")
    return "\n".join(text)


@pytest.mark.parametrize(("kind", "dtype"), [("f16", "bf16"), ("f16", "f16"), ("f8f6f4", "e4m3")])
@pytest.mark.parametrize("mode", ["early", "late"])
def test_a_from_tensor_memory(kind, dtype, mode):
    rng = np.random.default_rng(4)
    form = Form(kind, dtype, dtype, 128, 32, swizzle="64B")
    b = Operand(form, "b", rng, SMEM_BASE + DATA)
    image = ops.Image(8192, SMEM_BASE + DATA)
    b.place(image)
    raw, values = ops.random_raw(rng, (128, 2 * b.k_step), dtype)
    words = np.ascontiguousarray(raw).view(np.uint32)  # consecutive k share a column
    out = np.zeros((1, 128, 32), np.uint32)
    body = (
        prologue(8192, 256, 1)
        + tmem_store(words.shape[1], 64, "%a")
        + "tcgen05.wait::st.sync.aligned;\nbar.sync 0;\n"
        + product(form, None, b.codes(), a_tmem=64)
        + dump(32)
        + epilogue(256, 1)
    )
    program = Program("sm_100a", body, {"image": image.bytes, "out": out, "a": words})
    report = program.run(smem=16384, schedule=mode)
    np.testing.assert_allclose(out[0].view(np.float32), values @ b.values.T, rtol=0, atol=1e-4)
    assert not report.unset
    if mode == "late":
        assert _without_wait_is_noticed(body, words, image)


def _without_wait_is_noticed(body, words, image) -> bool:
    """Without wait::st the MMA may run before the stores: stale data, which is reported."""
    text = body.replace("tcgen05.wait::st.sync.aligned;", "")
    out = np.zeros((1, 128, 32), np.uint32)
    program = Program("sm_100a", text, {"image": image.bytes, "out": out, "a": words})
    for seed in range(8):
        report = program.run(smem=16384, schedule=f"random:{seed}")
        if report.unset:
            return True
    return False


def test_disabled_lanes_keep_their_values():
    rng = np.random.default_rng(5)
    form = bf16_form(128, 16, steps=1)
    a = Operand(form, "a", rng, SMEM_BASE + DATA)
    b = Operand(form, "b", rng, SMEM_BASE + DATA + 16384)
    image = ops.Image(20480, SMEM_BASE + DATA)
    a.place(image)
    b.place(image)
    before = rng.integers(0, 2**31, (128, 16)).astype(np.uint32)
    out = np.zeros((1, 128, 16), np.uint32)
    mask = ", {%r21, %r22, %r23, %r24}"
    words = "mov.b32 %r21, 0xF; mov.b32 %r22, 0; mov.b32 %r23, -1; mov.b32 %r24, 0x80000000;\n"
    body = (
        prologue(20480, 32, 1)
        + tmem_store(16, 0, "%before")
        + "tcgen05.wait::st.sync.aligned;\nbar.sync 0;\n"
        + words
        + product(form, a.codes(), b.codes(), extra=mask)
        + dump(16)
        + epilogue(32, 1)
    )
    Program("sm_100a", body, {"image": image.bytes, "out": out, "before": before}).run(smem=40000)
    off = np.zeros(128, bool)
    off[:4] = off[64:96] = off[127] = True
    np.testing.assert_array_equal(out[0][off], before[off])
    want = (a.values @ b.values.T)[~off]
    np.testing.assert_allclose(out[0][~off].view(np.float32), want, rtol=0, atol=1e-4)


# ---- loads, stores, copies ----


@pytest.mark.parametrize(
    ("shape", "num"), [("16x64b", 8), ("16x128b", 4), ("16x256b", 2), ("32x32b", 8)]
)
def test_load_shapes(shape, num):
    """A store of rows and a load of another shape: registers are where the map says."""
    rng = np.random.default_rng(6)
    cells = rng.integers(0, 2**32, (128, 16), dtype=np.uint32)
    regs = num * lay.REGISTERS_PER_STEP[shape]
    out = np.zeros((128, regs), np.uint32)
    load = ", ".join(f"%r{i}" for i in range(regs))
    stores = "\n".join(f"st.global.b32 [%d8+{4 * i}], %r{i};" for i in range(regs))
    body = f"""
{prologue(16, 32, 1)}
{tmem_store(16, 0, "%cells")}
tcgen05.wait::st.sync.aligned;
tcgen05.ld.sync.aligned.{shape}.x{num}.b32 {{{load}}}, [%r41];
mul.wide.u32 %d8, %t, {4 * regs}; add.s64 %d8, %d8, %out;
{stores}
{epilogue(32, 1)}
"""
    image = np.zeros(16, np.uint8)
    Program("sm_100a", body, {"image": image, "out": out, "cells": cells}).run(smem=4096)
    for t in range(128):
        for r in range(regs):
            lane, col = _register(shape, t % 32, r)
            assert out[t, r] == cells[t // 32 * 32 + lane, col], (t, r)


def _register(shape, t, r):
    if shape == "32x32b":
        return t, r
    if shape == "16x64b":
        return 8 * (t % 2) + t // 4, 2 * r + t // 2 % 2
    if shape == "16x128b":
        return t // 4 + 8 * (r % 2), 4 * (r // 2) + t % 4
    return t // 4 + 8 * (r // 2 % 2), 8 * (r // 4) + 2 * (t % 4) + r % 2


@pytest.mark.parametrize(("operation", "pick"), [("max", np.fmax), ("min.abs", np.fmin)])
def test_load_with_reduction(operation, pick):
    rng = np.random.default_rng(9)
    cells = rng.standard_normal((128, 8)).astype(np.float32)
    out = np.zeros((128, 9), np.float32)
    regs = ", ".join(f"%r{i}" for i in range(8))
    stores = "\n".join(f"st.global.b32 [%d8+{4 * i}], %r{i};" for i in range(9))
    body = f"""
{prologue(16, 32, 1)}
{tmem_store(8, 0, "%cells")}
tcgen05.wait::st.sync.aligned;
tcgen05.ld.red.sync.aligned.32x32b.x8.{operation}.f32 {{{regs}}}, %r8, [%r41];
mul.wide.u32 %d8, %t, 36; add.s64 %d8, %d8, %out;
{stores}
{epilogue(32, 1)}
"""
    image = np.zeros(16, np.uint8)
    Program("sm_103a", body, {"image": image, "out": out, "cells": cells}).run(smem=4096)
    np.testing.assert_array_equal(out[:, :8], cells)
    values = np.abs(cells) if "abs" in operation else cells
    np.testing.assert_array_equal(out[:, 8], pick.reduce(values, axis=1))


def test_packed_store_and_load():
    rng = np.random.default_rng(7)
    words = rng.integers(0, 2**32, (128, 8), dtype=np.uint32)
    out = np.zeros((1, 128, 16), np.uint32)
    again = np.zeros((128, 8), np.uint32)
    regs = ", ".join(f"%r{i}" for i in range(8))
    store = tmem_store(8, 0, "%words").replace(".x8.b32", ".x8.unpack::16b.b32")
    body = f"""
{prologue(16, 32, 1)}
{store}
tcgen05.wait::st.sync.aligned;
tcgen05.ld.sync.aligned.32x32b.x8.pack::16b.b32 {{{regs}}}, [%r41];
mul.wide.u32 %d8, %t, 32; add.s64 %d8, %d8, %again;
st.global.v4.b32 [%d8], {{%r0, %r1, %r2, %r3}};
st.global.v4.b32 [%d8+16], {{%r4, %r5, %r6, %r7}};
{dump(16)}
{epilogue(32, 1)}
"""
    image = np.zeros(16, np.uint8)
    params = {"image": image, "out": out, "words": words, "again": again}
    Program("sm_100a", body, params).run(smem=4096)
    np.testing.assert_array_equal(again, words)
    np.testing.assert_array_equal(out[0, :, 0::2], words & 0xFFFF)
    np.testing.assert_array_equal(out[0, :, 1::2], words >> 16)


def test_copy_from_shared_to_tensor_memory():
    rng = np.random.default_rng(8)
    image = rng.integers(0, 256, 128 * 32, dtype=np.uint8)
    desc = lay.SmemDesc(SMEM_BASE + DATA, 128 * 16, 128, "none", 0)
    out = np.zeros((1, 128, 8), np.uint32)
    body = f"""
{prologue(4096, 32, 1)}
setp.eq.u32 %p4, %t, 0;
mov.b64 %d0, {ops.encode_desc(desc, "sm100")};
@%p4 tcgen05.cp.cta_group::1.128x256b [%r30], %d0;
@%p4 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [smem+8];
{mbarrier_wait("smem+8", 0, "COPIED")}
{dump(8)}
{epilogue(32, 1)}
"""
    Program("sm_100a", body, {"image": image, "out": out}).run(smem=8192, schedule="late")
    raw = image.reshape(2, 128, 16)  # chunk, row, byte
    want = np.concatenate([raw[0], raw[1]], axis=1).view(np.uint32)
    np.testing.assert_array_equal(out[0], want)


# ---- misuse ----

ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem+32], 32;"
FREE = "ld.shared.b32 %r30, [smem+32]; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r30, 32;"
LD = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r0}, [%r30];"
ONE = "setp.eq.u32 %p0, %t, 0;"
COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64"
INIT = "mbarrier.init.shared.b64 [smem+8], 1;"


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (f"mov.b32 %r30, 64; {LD}", OutOfBoundsError, "not allocated"),
        (f"{ALLOC}", SimError, "exits with tensor memory"),
        (f"{ALLOC} ld.shared.b32 %r30, [smem+32]; or.b32 %r30, %r30, 0x200000; {LD}", MisuseError,
         "lanes 0..31 only"),
        (f"tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned; {ALLOC}", MisuseError,
         "relinquished"),
        (ALLOC.replace("32;", "48;"), MisuseError, "powers of two"),
        (f"{ALLOC} mov.b32 %r30, 32; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r30, 32;",
         MisuseError, "no allocation"),
        (f"{ALLOC} ld.shared.b32 %r30, [smem+32]; {ONE} @%p0 {LD} {FREE}", MisuseError, "aligned"),
        (f"{ALLOC} mov.b64 %d0, 0; mov.b32 %r20, 0x08200490; "
         "tcgen05.mma.cta_group::1.kind::f16 [%r30], %d0, %d0, %r20, 0;", MisuseError, "elect"),
        (f"{ALLOC} {ONE} mov.b64 %d0, 0; mov.b32 %r20, 0x08200490; "
         "@%p0 tcgen05.mma.cta_group::1.kind::f16 [%r30], %d0, %d0, %r20, 0;", MisuseError,
         "46-48"),
        (f"{ALLOC} {ONE} @%p0 {COMMIT} [smem+8];", MisuseError, "no mbarrier"),
        (f"{ALLOC} {FREE.replace('group::1', 'group::2')}", MisuseError, "in a kernel that"),
    ],
)  # fmt: skip
def test_misuse(text, error, message):
    with pytest.raises(error, match=message):
        Program("sm_100a", text.replace("; ", ";\n"), {}).run(threads=32, smem=4096)


def test_an_operand_outside_shared_memory_is_an_error():
    desc = ops.encode_desc(lay.SmemDesc(0x400 + 4096, 16, 1024, "128B", 0), "sm100")
    body = f"""
{ALLOC}
{ONE}
@%p0 {INIT}
ld.shared.b32 %r30, [smem+32];
mov.b64 %d0, {desc}; mov.b32 %r20, 0x08200490;
@%p0 tcgen05.mma.cta_group::1.kind::f16 [%r30], %d0, %d0, %r20, 0;
@%p0 {COMMIT} [smem+8];
"""
    with pytest.raises(OutOfBoundsError, match="matrix operand"):
        Program("sm_100a", body, {}).run(threads=32, smem=8192)
