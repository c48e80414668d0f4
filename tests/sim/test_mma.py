"""mma.sync and the matrix loads and stores, against their documented positions."""

from __future__ import annotations

import numpy as np
import pytest

from fa_cute.errors import MisuseError
from tests.sim import operands as ops
from tests.sim.asm import Program, load_image


def fragment_a(raw):
    """(32, regs) of a 16 x K matrix."""
    per = 4 // raw.itemsize
    regs = raw.shape[1] // (2 * per)  # 4 per k-pair of groups
    cells = np.zeros((32, regs, per), raw.dtype)
    for t, reg, i in np.ndindex(cells.shape):
        g, h = divmod(reg, 2)
        cells[t, reg, i] = raw[t // 4 + 8 * h, 4 * per * g + per * (t % 4) + i]
    return cells.reshape(32, -1).view(np.uint32).copy()


def fragment_b(raw):
    """(32, regs) of a K x 8 matrix given as (8, K)."""
    per = 4 // raw.itemsize
    cells = np.zeros((32, raw.shape[1] // (4 * per), per), raw.dtype)
    for t, g, i in np.ndindex(cells.shape):
        cells[t, g, i] = raw[t // 4, 4 * per * g + per * (t % 4) + i]
    return cells.reshape(32, -1).view(np.uint32).copy()


def regs(first, count):
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


def lane_loads(name, first, count):
    text = [f"mul.wide.u32 %d0, %t, {4 * count}; add.s64 %d0, %d0, %{name};"]
    return "\n".join(
        [*text, *(f"ld.global.b32 %r{first + i}, [%d0+{4 * i}];" for i in range(count))]
    )


def lane_stores(name, first, count):
    text = [f"mul.wide.u32 %d0, %t, {4 * count}; add.s64 %d0, %d0, %{name};"]
    return "\n".join(
        [*text, *(f"st.global.b32 [%d0+{4 * i}], %r{first + i};" for i in range(count))]
    )


@pytest.mark.parametrize(
    ("k", "d", "a", "b"),
    [
        (16, "f32", "bf16", "bf16"),
        (8, "f32", "bf16", "bf16"),
        (16, "f32", "f16", "f16"),
        (16, "f16", "f16", "f16"),
        (8, "f32", "tf32", "tf32"),
        (4, "f32", "tf32", "tf32"),
        (32, "f32", "e4m3", "e5m2"),
        (32, "s32", "s8", "u8"),
        (16, "s32", "u8", "u8"),
    ],
)
def test_products(k, d, a, b):
    rng = np.random.default_rng(k)
    a_raw, a_values = ops.random_raw(rng, (16, k), a)
    b_raw, b_values = ops.random_raw(rng, (8, k), b)
    fa, fb = fragment_a(a_raw), fragment_b(b_raw)
    count = 2 if d == "f16" else 4
    kind = {"f16": np.float16, "f32": np.float32, "s32": np.int32}[d]
    c = rng.integers(-9, 9, (16, 8)).astype(kind)
    rows = [[(t // 4 + 8 * (i // 2), 2 * (t % 4) + i % 2) for i in range(4)] for t in range(32)]
    fc = np.array([[c[p] for p in row] for row in rows], kind).view(np.uint32).copy()
    out = np.zeros((32, count), np.uint32)
    na, nb = fa.shape[1], fb.shape[1]
    body = f"""
{lane_loads("a", 0, na)}
{lane_loads("b", 8, nb)}
{lane_loads("c", 16, count)}
mma.sync.aligned.m16n8k{k}.row.col.{d}.{a}.{b}.{d}
    {regs(24, count)}, {regs(0, na)}, {regs(8, nb)}, {regs(16, count)};
{lane_stores("out", 24, count)}
"""
    Program("sm_90a", body, {"a": fa, "b": fb, "c": fc, "out": out}).run(threads=32)
    got = np.zeros((16, 8))
    for t, row in enumerate(rows):
        for i, place in enumerate(row):
            got[place] = out.view(kind)[t, i]
    want = a_values @ b_values.T + c
    np.testing.assert_allclose(
        got, want, rtol=2e-3 if d == "f16" else 0, atol=1e-2 if d == "f16" else 1e-4
    )


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("num", [1, 2, 4])
def test_matrices_travel_to_registers_and_back(num, transposed):
    rng = np.random.default_rng(num)
    tiles = rng.integers(0, 2**16, (num, 8, 8), dtype=np.uint16)
    image = np.ascontiguousarray(tiles).view(np.uint8).reshape(-1)
    out, back = np.zeros((32, num), np.uint32), np.zeros(num * 64, np.uint16)
    trans = ".trans" if transposed else ""
    copies = "".join(
        f"ld.shared.b32 %r43, [%r42+{4096 + i}]; st.global.b32 [%d1+{i}], %r43;\n"
        for i in range(0, 128 * num, 128)
    )
    body = f"""
{load_image(image.size, "%image")}
shl.b32 %r40, %lane, 4;
add.s32 %r40, %r40, %base;
ldmatrix.sync.aligned.m8n8.x{num}{trans}.shared.b16 {regs(0, num)}, [%r40+1024];
{lane_stores("out", 0, num)}
stmatrix.sync.aligned.m8n8.x{num}{trans}.shared.b16 [%r40+4096], {regs(0, num)};
bar.warp.sync -1;
shl.b32 %r41, %lane, 2;
add.s32 %r42, %r41, %base;
cvt.u64.u32 %d1, %r41;
add.s64 %d1, %d1, %back;
{copies}
"""
    Program("sm_90a", body, {"image": image, "out": out, "back": back}).run(threads=32)
    for q, t, i in np.ndindex(num, 32, 2):
        row, col = t // 4, 2 * (t % 4) + i
        want = tiles[q, col, row] if transposed else tiles[q, row, col]
        assert out.view(np.uint16).reshape(32, num, 2)[t, q, i] == want
    np.testing.assert_array_equal(back.reshape(num, 8, 8), tiles)


def test_movmatrix_transposes_a_fragment():
    rng = np.random.default_rng(0)
    tile = rng.integers(0, 2**16, (8, 8), dtype=np.uint16)
    source = tile.view(np.uint32).reshape(32, 1).copy()
    out = np.zeros((32, 1), np.uint32)
    body = f"""
{lane_loads("source", 0, 1)}
movmatrix.sync.aligned.m8n8.trans.b16 %r1, %r0;
{lane_stores("out", 1, 1)}
"""
    Program("sm_90a", body, {"source": source, "out": out}).run(threads=32)
    np.testing.assert_array_equal(out.view(np.uint16).reshape(8, 8), tile.T)


def test_eight_bit_matrices():
    rng = np.random.default_rng(1)
    tile = rng.integers(0, 256, (16, 16), dtype=np.uint8)
    image = tile.reshape(-1).copy()
    out, back = np.zeros((32, 2), np.uint32), np.zeros(128, np.uint8)
    body = f"""
{load_image(256, "%image")}
and.b32 %r40, %lane, 15;
shl.b32 %r40, %r40, 4;
add.s32 %r40, %r40, %base;
ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {regs(0, 2)}, [%r40+1024];
{lane_stores("out", 0, 2)}
stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%r40+4096], {{%r0}};
bar.warp.sync -1;
shl.b32 %r41, %lane, 2;
add.s32 %r42, %r41, %base;
cvt.u64.u32 %d1, %r41;
add.s64 %d1, %d1, %back;
ld.shared.b32 %r43, [%r42+4096];
st.global.b32 [%d1], %r43;
"""
    Program("sm_100a", body, {"image": image, "out": out, "back": back}).run(threads=32)
    cells = out.view(np.uint8).reshape(32, 2, 4)
    for t, h, i in np.ndindex(cells.shape):
        assert cells[t, h, i] == tile[4 * (t % 4) + i, t // 4 + 8 * h]
    got = back.reshape(8, 16)
    for t, v in np.ndindex(32, 4):
        assert got[2 * (t % 4) + v % 2, t // 4 + 8 * (v // 2)] == cells[t, 0, v]


def test_a_misaligned_row_is_an_error():
    body = "shl.b32 %r40, %lane, 3; add.s32 %r40, %r40, %base;\n"
    body += "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r0}, [%r40];"
    with pytest.raises(MisuseError, match="aligned"):
        Program("sm_90a", body, {}).run(threads=32)
