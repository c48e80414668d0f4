"""Native conversions against ml_dtypes, numpy and exact rounding."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from tests.sim import jit_tools as t

COUNT = 1024
HALF = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}


def rng(name: str) -> np.random.Generator:
    return np.random.default_rng(list(name.encode()))


def half_bits(x: np.ndarray, name: str) -> np.ndarray:
    """fp32 to a half by an independent implementation; the hardware's NaN."""
    with np.errstate(all="ignore"):
        bits = x.astype(HALF[name]).view(np.uint16).astype(np.uint32)
    return np.where(np.isnan(x), 0x7FFF, bits)


def inputs(gen, count=COUNT) -> np.ndarray:
    x = t.floats32(gen, count)
    x[:200] = (gen.uniform(-70000, 70000, 200)).astype(np.float32).view("u4")
    x[200:400] = (gen.standard_normal(200) * 1e-6).astype(np.float32).view("u4")
    x[400:600] = gen.standard_normal(200).astype(np.float32).view("u4") & np.uint32(
        0xFFFF8000
    )  # ties
    return x


@pytest.mark.parametrize("name", ["f16", "bf16"])
@pytest.mark.parametrize("mods", ["", ".satfinite", ".relu", ".relu.satfinite"])
def test_packs_of_two_halves(name, mods):
    gen = rng(name + mods)
    a, b = inputs(gen), inputs(gen)
    found = t.evaluate(f"cvt.rn{mods}.{name}x2.f32 %r0, %r1, %r2;", {"%r1": a, "%r2": b}, "%r0")

    def rule(x):
        x = x.view(np.float32)
        bits = half_bits(x, name)
        infinity = 0x7C00 if name == "f16" else 0x7F80
        if "satfinite" in mods:
            bits = np.where((bits & 0x7FFF) == infinity, bits - 1, bits)
        if "relu" in mods:
            bits = np.where((bits & 0x8000) != 0, 0, bits)
        return bits.astype(np.uint32)

    assert (found == (rule(a) << np.uint32(16) | rule(b))).all()


@pytest.mark.parametrize("name", ["f16", "bf16"])
@pytest.mark.parametrize("mode", ["rn", "rz"])
def test_single_halves(name, mode):
    gen = rng(name + mode)
    x = inputs(gen)
    found = t.evaluate(f"cvt.{mode}.{name}.f32 %rs0, %r1;", {"%r1": x}, "%rs0")
    for bits, got in zip(x, found, strict=True):
        sign, value = t.decode(int(bits), "f32")
        infinity = 0x7C00 if name == "f16" else 0x7F80
        want = (
            0x7FFF
            if value == t.NAN
            else infinity | sign << 15
            if value == t.INF
            else t.encode(value, name, mode, sign)
        )
        assert int(got) == want, (hex(int(bits)), hex(int(got)), hex(want))


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_every_half_widens(name):
    bits = np.arange(1 << 16, dtype=np.uint32)
    found = t.evaluate(f"cvt.f32.{name} %r0, %rs1;", {"%rs1": bits}, "%r0")
    want = bits.astype(np.uint16).view(HALF[name]).astype(np.float32).view("u4")
    nan = t.is_nan(want, "f32")
    assert (found[~nan] == want[~nan]).all()
    assert (found[nan] == (bits[nan] << np.uint32(16) if name == "bf16" else 0x7FFFFFFF)).all()


_FP8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
_FP8 |= {
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
_LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m3": 7.5, "e3m2": 28.0, "e2m1": 6.0}
_NAN = {"e4m3": 0x7F, "e5m2": 0x7F, "e2m3": 0x1F, "e3m2": 0x1F, "e2m1": 0x7}


def small_bits(x: np.ndarray, name: str) -> np.ndarray:
    limit = np.float32(_LARGEST[name])
    with np.errstate(all="ignore"):
        code = np.clip(x, -limit, limit).astype(_FP8[name]).view(np.uint8).astype(np.uint32)
    return np.where(np.isnan(x), _NAN[name], code)


@pytest.mark.parametrize("name", sorted(_FP8))
def test_small_floats_from_f32(name):
    gen = rng(name)
    a, b = (inputs(gen) for _ in range(2))
    scale = _LARGEST[name] / 8
    a[600:], b[600:] = (
        (gen.standard_normal(COUNT - 600) * scale).astype(np.float32).view("u4") for _ in range(2)
    )
    ties = np.arange(256, dtype=np.uint8) & (
        0x3F if name in ("e2m3", "e3m2") else 0xFF if name != "e2m1" else 0xF
    )
    exact = ties.view(_FP8[name]).astype(np.float32)
    middle = (exact + np.roll(exact, 1)) / 2
    a[:256], b[:256] = middle.view("u4"), exact.view("u4")
    shift, reg = (4, "%rs") if name == "e2m1" else (8, "%rs")
    line = f"cvt.rn.satfinite.{name}x2.f32 {reg}0, %r1, %r2;"
    found = t.evaluate(line, {"%r1": a, "%r2": b}, f"{reg}0")
    want = small_bits(a.view("f4"), name) << np.uint32(shift) | small_bits(b.view("f4"), name)
    assert (found == want).all()
    relu = t.evaluate(line.replace("satfinite", "satfinite.relu"), {"%r1": a, "%r2": b}, f"{reg}0")
    top = 1 << (shift - 1 if name not in ("e2m3", "e3m2") else 5)
    clear = lambda v: np.where(v & top, 0, v)  # noqa: E731
    want = clear(small_bits(a.view("f4"), name)) << np.uint32(shift) | clear(
        small_bits(b.view("f4"), name)
    )
    assert (relu == want).all()


@pytest.mark.parametrize("name", sorted(_FP8))
def test_every_small_float_widens(name):
    width = {"e2m1": 4, "e2m3": 6, "e3m2": 6}.get(name, 8)
    step = 4 if width == 4 else 8
    code = np.arange(1 << width, dtype=np.uint32)
    pair = code | np.roll(code, 1) << np.uint32(step)
    found = t.evaluate(f"cvt.rn.f16x2.{name}x2 %r0, %rs1;", {"%rs1": pair}, "%r0")
    one = half_bits(code.astype(np.uint8).view(_FP8[name]).astype(np.float32), "f16").astype(
        np.uint32
    )
    assert (found == (one | np.roll(one, 1) << np.uint32(16))).all()


def test_small_floats_from_packed_halves():
    gen = rng("packed8")
    low, high = (half_bits(inputs(gen).view("f4"), "f16").astype(np.uint32) for _ in range(2))
    found = t.evaluate(
        "cvt.rn.satfinite.e4m3x2.f16x2 %rs0, %r1;", {"%r1": low | high << np.uint32(16)}, "%rs0"
    )
    wide = [v.astype(np.uint16).view(np.float16).astype(np.float32) for v in (low, high)]
    assert (
        found == small_bits(wide[0], "e4m3") | small_bits(wide[1], "e4m3") << np.uint32(8)
    ).all()


def test_scale_factors():
    x = np.array([1.0, 1.5, 2.0, 0.75, 2.0**-127, 3e38, np.inf, np.nan], np.float32)
    body = (
        "cvt.rp.satfinite.ue8m0x2.f32 %rs0, %r1, %r1; cvt.rz.satfinite.ue8m0x2.f32 %rs2, %r1, %r1;"
    )
    up, down = t.evaluate(body, {"%r1": x.view("u4")}, "%rs0", "%rs2")
    assert (up & 255).tolist() == [127, 128, 128, 127, 1, 254, 254, 255]
    assert (down & 255).tolist() == [127, 127, 128, 126, 0, 254, 254, 255]
    codes = np.array([0, 1, 127, 254, 255], np.uint32)
    wide = t.evaluate(
        "cvt.rn.bf16x2.ue8m0x2 %r0, %rs1;", {"%rs1": codes | codes << np.uint32(8)}, "%r0"
    )
    assert (wide & 0xFFFF).tolist() == [0x0040, 0x0080, 0x3F80, 0x7F00, 0x7FFF]


@pytest.mark.parametrize("mode", ["rna", "rn", "rz"])
def test_tf32(mode):
    gen = rng(mode)
    x = inputs(gen)
    x = x[(x & 0x7FFFFFFF) < 0x7F7FE000]
    found = t.evaluate(f"cvt.{mode}.tf32.f32 %r0, %r1;", {"%r1": x}, "%r0")
    for bits, got in zip(x, found, strict=True):
        size, sign = int(bits) & 0x7FFFFFFF, int(bits) & 0x80000000
        rest, base = size & 0x1FFF, size & ~0x1FFF
        up = {
            "rna": rest >= 0x1000,
            "rn": rest > 0x1000 or (rest == 0x1000 and base & 0x2000),
            "rz": False,
        }[mode]
        assert int(got) == sign | (base + (0x2000 if up else 0))


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
@pytest.mark.parametrize("dest", ["s32", "u32", "s16", "u16", "s64", "u64", "s8", "u8"])
def test_float_to_integer(mode, dest):
    gen = rng(mode + dest)
    x = inputs(gen)
    x[600:800] = (gen.uniform(-40, 40, 200).round(1)).astype(np.float32).view("u4")
    x[800:900] = (gen.integers(-20, 20, 100) + 0.5).astype(np.float32).view("u4")
    x[900:] = (
        (gen.uniform(-1.5, 1.5, COUNT - 900) * 2.0 ** gen.integers(7, 65, COUNT - 900))
        .astype(np.float32)
        .view("u4")
    )
    width = int(dest[1:])
    reg = {64: "%rd0", 32: "%r0"}.get(width, "%rs0")
    found = t.evaluate(f"cvt.{mode}.{dest}.f32 {reg}, %r1;", {"%r1": x}, reg)
    low, high = (
        (-(1 << (width - 1)), (1 << (width - 1)) - 1) if dest[0] == "s" else (0, (1 << width) - 1)
    )
    rule = {
        "rni": round,
        "rzi": int,
        "rmi": lambda v: v.__floor__(),
        "rpi": lambda v: v.__ceil__(),
    }[mode]
    keep = (1 << max(width, 16)) - 1
    for bits, got in zip(x, found, strict=True):
        sign, value = t.decode(int(bits), "f32")
        if value == t.NAN:
            want = 1 << 63 if width == 64 else 0
        elif value == t.INF:
            want = low if sign else high
        else:
            want = max(low, min(high, rule(value)))
        assert int(got) == want & keep, (hex(int(bits)), hex(int(got)), hex(want & keep))


_WIDTHS = (8, 16, 32)
_TO_FLOAT = [(f"{k}{w}", m) for k in "su" for w in _WIDTHS for m in ("rn", "rz", "rm", "rp")]


@pytest.mark.parametrize("source,mode", [*_TO_FLOAT, ("s64", "rn"), ("u64", "rn")])
def test_integer_to_float(source, mode):
    width = int(source[1:])
    gen = rng(source + mode)
    container = max(width, 16)
    x = t.ints(gen, 256, container)
    reg = {64: "%rd1", 32: "%r1"}.get(width, "%rs1")
    found = t.evaluate(f"cvt.{mode}.f32.{source} %r0, {reg};", {reg: x}, "%r0")
    for bits, got in zip(x, found, strict=True):
        value = int(bits) & ((1 << width) - 1)
        if source[0] == "s" and value >> (width - 1):
            value -= 1 << width
        assert int(got) == t.encode(Fraction(value), "f32", mode)


@pytest.mark.parametrize("dest", ["s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("source", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
def test_integer_to_integer(dest, source):
    gen = rng(dest + source)
    to, width = int(dest[1:]), int(source[1:])
    x = t.ints(gen, 256, max(width, 16))
    names = {64: "%rd", 32: "%r"}
    src, dst = names.get(width, "%rs") + "1", names.get(to, "%rs") + "0"
    found = t.evaluate(f"cvt.{dest}.{source} {dst}, {src};", {src: x}, dst)
    limited = t.evaluate(f"cvt.sat.{dest}.{source} {dst}, {src};", {src: x}, dst)
    low, high = (-(1 << (to - 1)), (1 << (to - 1)) - 1) if dest[0] == "s" else (0, (1 << to) - 1)
    for bits, got, sat in zip(x, found, limited, strict=True):
        value = int(bits) & ((1 << width) - 1)
        if source[0] == "s" and value >> (width - 1):
            value -= 1 << width
        assert int(got) == value & ((1 << to) - 1)
        assert int(sat) == max(low, min(high, value)) & ((1 << to) - 1)


def test_registers_wider_than_the_type_are_extended():
    x = np.array([0x80, 0x7F, 0xFF, 0x1FF], np.uint32)
    assert t.evaluate("cvt.s8.s32 %r0, %r1;", {"%r1": x}, "%r0").tolist() == [
        0xFFFFFF80,
        0x7F,
        0xFFFFFFFF,
        0xFFFFFFFF,
    ]
    assert t.evaluate("cvt.u8.u32 %r0, %r1;", {"%r1": x}, "%r0").tolist() == [
        0x80,
        0x7F,
        0xFF,
        0xFF,
    ]
    assert t.evaluate("cvt.s16.s8 %rs0, %rs1;", {"%rs1": x}, "%rs0").tolist() == [
        0xFF80,
        0x7F,
        0xFFFF,
        0xFFFF,
    ]


def test_rounding_to_integral_floats():
    x = np.array([0.5, 1.5, -0.5, -1.2, 2.7, 1e20, -0.0, np.inf], np.float32)
    for mode, rule in (("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)):
        found = t.evaluate(f"cvt.{mode}.f32.f32 %r0, %r1;", {"%r1": x.view("u4")}, "%r0")
        assert (found == rule(x).view("u4")).all()
    sat = t.evaluate("cvt.sat.f32.f32 %r0, %r1;", {"%r1": x.view("u4")}, "%r0").view("f4")
    assert sat.tolist() == [0.5, 1, 0, 0, 1, 1, 0, 1]


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_double_precision(mode):
    gen = rng("f64" + mode)
    x = (gen.standard_normal(256) * 2.0 ** gen.integers(-160, 140, 256)).astype(np.float64)
    found = t.evaluate(f"cvt.{mode}.f32.f64 %r0, %rd1;", {"%rd1": x.view("u8")}, "%r0")
    for value, got in zip(x, found, strict=True):
        want = t.encode(Fraction(float(value)), "f32", mode, int(np.signbit(value)))
        assert int(got) == want, (value, hex(int(got)), hex(want))
    single = t.floats32(gen, 256)
    back = t.evaluate("cvt.f64.f32 %rd0, %r1; cvt.rn.f32.f64 %r2, %rd0;", {"%r1": single}, "%r2")
    nan = t.is_nan(single, "f32")
    assert (back[~nan] == single[~nan]).all()


def test_stochastic_rounding_adds_the_noise():
    gen = rng("rs")
    a, b = inputs(gen), inputs(gen)
    noise = t.ints(gen, COUNT, 32)
    found = t.evaluate(
        "cvt.rs.bf16x2.f32 %r0, %r1, %r2, %r3;", {"%r1": a, "%r2": b, "%r3": noise}, "%r0"
    )

    def rule(x, random):
        finite = (x & 0x7FFFFFFF) < 0x7F800000
        bits = np.where(finite, x + random, x) >> np.uint32(16)
        return np.where(np.isnan(x.view("f4")), 0x7FFF, bits).astype(np.uint32)

    want = rule(a, noise >> np.uint32(16)) << np.uint32(16) | rule(b, noise & np.uint32(0xFFFF))
    assert (found == want).all()
