"""Layouts against worked examples and against element-by-element definitions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fa_cute.errors import MisuseError
from fa_cute.sim import layouts as lay
from fa_cute.sim.smem_ops import tile_chunks

MODES = ("none", "32B", "64B", "128B")


def desc(start, lbo, sbo, swizzle):
    return lay.SmemDesc(start, lbo, sbo, swizzle, 0)


# ---- worked examples ----


@pytest.mark.parametrize(
    ("base", "mn", "k", "mn_major", "lbo", "expected"),
    [
        (0x4020, 5, 4, False, 16, 0x42F8),  # K-major, second K step, row 5, k' 4
        (0x8800, 70, 3, True, 16384, 0xC9BC),  # V: MN-major, keys 16..31, dv 70, key 19
    ],
)
def test_element_addresses_of_the_examples(base, mn, k, mn_major, lbo, expected):
    assert lay.element_offset(desc(base, lbo, 1024, "128B"), mn, k, 2, mn_major) == expected


def test_descriptor_of_a_bf16_k_major_tile():
    bits = 0x40004040 << 32 | 0x10000 | 0x4000 >> 4
    got = lay.decode_desc(bits, "sm100")
    assert got == lay.SmemDesc(0x4000, 16, 1024, "128B", 0, False)
    hopper = 1 << 62 | 64 << 32 | 1 << 16 | 0x4000 >> 4
    assert lay.decode_desc(hopper, "sm90") == lay.SmemDesc(0x4000, 16, 1024, "128B", 0)


def test_descriptors_that_mean_nothing_are_refused():
    with pytest.raises(MisuseError, match="46-48"):
        lay.decode_desc(2 << 61, "sm100")
    with pytest.raises(MisuseError, match="swizzle code 3"):
        lay.decode_desc(3 << 61 | 1 << 46, "sm100")
    with pytest.raises(MisuseError, match="base offset"):
        lay.decode_desc(1 << 49, "sm90")


@pytest.mark.parametrize(
    ("bits", "cta_group", "m", "n", "b_mn_major"),
    [
        (0x08200490, 1, 128, 128, False),
        (0x08210490, 1, 128, 128, True),
        (0x10200490, 2, 256, 128, False),
    ],
)
def test_instruction_descriptors(bits, cta_group, m, n, b_mn_major):
    got = lay.decode_instr_desc(bits, "f16", cta_group)
    assert (got.m, got.n, got.k, got.b_mn_major) == (m, n, 16, b_mn_major)
    assert (got.a_type, got.b_type, got.d_type) == ("bf16", "bf16", "f32")


@pytest.mark.parametrize(
    ("bits", "kind", "cta_group"),
    [
        (0x10200490, "f16", 1),  # M 256 needs a pair
        (0x08200410, "f16", 1),  # A f16, D f32: fine; see below for D f16 of bf16
        (0x08200480, "f16", 1),  # D f16 of bf16 inputs
        (0x08200490, "tf32", 1),
        (0x08200494, "f16", 1),  # sparse
        (0x08020490 | 1 << 17, "f16", 2),  # N 8 in a pair
    ],
)
def test_instruction_descriptors_that_are_refused(bits, kind, cta_group):
    if bits == 0x08200410:
        assert lay.decode_instr_desc(bits, kind, cta_group).a_type == "f16"
        return
    with pytest.raises(MisuseError):
        lay.decode_instr_desc(bits, kind, cta_group)


def test_accumulator_examples():
    assert _place(128, 256, 2, 70, 200) == (1, 70, 72)
    assert _place(64, 128, 1, 37, 9) == (0, 69, 9)


def _place(m, n, cta_group, row, col, ws=False):
    found = [
        (b.cta, b.lane + row - b.row, b.tmem_col + col - b.col)
        for b in lay.d_blocks(m, n, cta_group, ws)
        if b.row <= row < b.row + b.rows and b.col <= col < b.col + b.cols
    ]
    assert len(found) == 1
    return found[0]


# ---- tables against definitions ----


@pytest.mark.parametrize(
    ("mode", "mn_major", "elem_bytes"),
    [*itertools.product(MODES, (False, True), (1, 2, 4)), ("128B_BASE32B", True, 4)],
)
def test_gather_tables_are_the_element_addresses(mode, mn_major, elem_bytes):
    rows, k = 64, 32 // elem_bytes
    for start in (0x2000, 0x2020, 0x2400):
        d = desc(start, 4096, 512 if mode == "128B_BASE32B" else 1024, mode)
        base, table = lay.operand_gather(d, rows, k, elem_bytes, mn_major)
        per_chunk = 16 // elem_bytes
        for mn, kk in itertools.product(range(0, rows, 3), range(k)):
            outer, inner = (kk, mn) if mn_major else (mn, kk)
            address = base + int(table.chunks[outer, inner // per_chunk]) * 16
            address += inner % per_chunk * elem_bytes
            assert address == lay.element_offset(d, mn, kk, elem_bytes, mn_major)
            assert base + table.first <= address < base + table.end


@pytest.mark.parametrize(("mn_major", "step"), [(False, 32), (True, 2048)])
def test_tables_of_several_k_steps_are_the_single_ones_side_by_side(mn_major, step):
    steps = tuple(desc(0x4000 + i * step, 16384, 1024, "128B") for i in range(4))
    base, together = lay.operand_gather(steps, 128, 16, 2, mn_major)
    parts = []
    for d in steps:
        at, table = lay.operand_gather(d, 128, 16, 2, mn_major)
        parts.append(table.chunks + (at - base) // 16)
    assert np.array_equal(together.chunks, np.concatenate(parts, axis=0 if mn_major else 1))


@pytest.mark.parametrize(("mode", "width"), [("32B", 32), ("64B", 64), ("128B", 128)])
def test_a_tile_that_tma_wrote_is_the_operand_that_a_descriptor_reads(mode, width):
    rows, elems = 64, width // 2
    table = tile_chunks(rows * width, mode, 0)
    k_major = desc(0x4000, 16, 8 * width, mode)
    mn_major = desc(0x4000, 0, 8 * width, mode)
    for row, elem in itertools.product(range(0, rows, 5), range(elems)):
        linear = row * width + elem * 2
        written = 0x4000 + int(table[linear // 16]) * 16 + linear % 16
        step, kk = divmod(elem, 16)
        at = desc(0x4000 + step * 32, 16, 8 * width, mode)
        assert lay.element_offset(at, row, kk, 2, False) == written
        assert lay.element_offset(mn_major, elem, row, 2, True) == written
    assert k_major.swizzle == mode
    assert sorted(table) == list(range(rows * width // 16))


@pytest.mark.parametrize(
    ("m", "n", "cta_group", "ws"),
    [
        (128, 96, 1, False),
        (64, 64, 1, False),
        (64, 64, 1, True),
        (32, 64, 1, True),
        (256, 64, 2, False),
        (128, 64, 2, False),
    ],
)
def test_accumulator_layouts_place_every_element_once(m, n, cta_group, ws):
    places = {_place(m, n, cta_group, r, c, ws) for r in range(m) for c in range(0, n, 5)}
    assert len(places) == m * len(range(0, n, 5))
    assert all(lane < 128 for _, lane, _ in places)


def test_register_maps():
    lane, col = lay.tmem_map("16x256b", 2)
    assert (lane[6, 13], col[6, 13]) == (11, 10)
    for shape, width in (("32x32b", 1), ("16x64b", 2), ("16x128b", 4), ("16x256b", 8)):
        lane, col = lay.tmem_map(shape, 4)
        cells = set(zip(lane.ravel().tolist(), col.ravel().tolist(), strict=True))
        assert len(cells) == lane.size
        assert lane.max() == (31 if shape == "32x32b" else 15)
        assert col.max() == 4 * width - 1
    lane, col = lay.tmem_map("16x32bx2", 2, 64)
    assert (lane[1, 20], col[1, 20]) == (4, 65)


def test_wgmma_accumulators_are_where_the_rule_says():
    d = np.arange(64 * 24, dtype=np.uint32).reshape(64, 24)
    regs = lay.d_to_fragment(d)
    for t, r in itertools.product(range(128), range(12)):
        j, h, i = r // 4, r // 2 % 2, r % 2
        row = 16 * (t // 32) + t % 32 // 4 + 8 * h
        assert regs[t // 32, r, t % 32] == d[row, 8 * j + 2 * (t % 4) + i]
    assert regs[77 // 32, 9, 77 % 32] == d[35, 19]
    assert np.array_equal(lay.fragment_to_d(regs), d)


@pytest.mark.parametrize("elem_bytes", [1, 2, 4])
def test_a_fragments_hold_the_rows_and_k_of_the_rule(elem_bytes):
    per = 4 // elem_bytes
    raw = {1: np.uint8, 2: np.uint16, 4: np.uint32}[elem_bytes]
    regs = np.random.default_rng(0).integers(0, 2**32, (4, 4, 32), dtype=np.uint32)
    a = lay.fragment_to_a(regs, elem_bytes)
    cells = regs.view(raw).reshape(4, 4, 32, per)
    for t, reg, i in itertools.product(range(0, 128, 3), range(4), range(per)):
        g, h = divmod(reg, 2)
        row = 16 * (t // 32) + t % 32 // 4 + 8 * h
        k = 4 * per * g + per * (t % 4) + i
        assert a[row, k] == cells[t // 32, reg, t % 32, i]


def test_halves_pack_and_unpack():
    values = np.random.default_rng(1).integers(0, 2**16, (6, 32), dtype=np.uint16)
    packed = lay.pack_halves(values)
    assert packed[1, 7] == int(values[2, 7]) | int(values[3, 7]) << 16
    assert np.array_equal(lay.unpack_halves(packed), values)


def test_small_floats_against_torch():
    import torch

    codes = torch.arange(256, dtype=torch.uint8)
    for name, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        want = codes.view(dtype).float().numpy()
        np.testing.assert_array_equal(lay.to_float32(codes.numpy(), name), want)
    raw = np.random.default_rng(2).integers(0, 2**16, 4096, dtype=np.uint16)
    for name, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        want = torch.from_numpy(raw.view(np.int16)).view(dtype).float().numpy()
        np.testing.assert_array_equal(lay.to_float32(raw, name), want)
    assert lay.SMALL_FLOATS["e2m1"][:8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
