"""Native floating-point instructions against exact rational arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sim import jit_tools as t

COUNT = 512


def rng(name: str) -> np.random.Generator:
    return np.random.default_rng(list(name.encode()))


def halves(gen: np.random.Generator, name: str, count: int = COUNT) -> np.ndarray:
    """Patterns of a 16-bit float: any bits, and moderate numbers."""
    any_bits = gen.integers(0, 1 << 16, count).astype(np.uint32)
    exp_bits, man_bits = t.FORMATS[name]
    middle = ((1 << (exp_bits - 1)) - 1) << man_bits
    near = (middle + gen.integers(-(3 << man_bits), 3 << man_bits, count)).astype(np.uint32)
    near |= gen.integers(0, 2, count).astype(np.uint32) << 15
    return np.where(gen.integers(0, 3, count) == 0, any_bits, near).astype(np.uint32)


def check(found, expected, name, *inputs):
    bad = t.same_floats(found, expected, name)
    show = [
        (*[hex(int(x[i])) for x in inputs], hex(int(found[i])), expected[i] and hex(expected[i]))
        for i in bad[:4]
    ]
    assert not bad, f"{len(bad)} of {len(expected)} differ, e.g. (inputs, found, expected) {show}"


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma"])
def test_f32_rounds_exactly(op, mode):
    gen = rng(op + mode)
    a, b, c = (t.floats32(gen, COUNT) for _ in range(3))
    b[:40] = a[:40] ^ 0x80000000  # sums that cancel
    with np.errstate(all="ignore"):
        c[40:80] = (a[40:80].view("f4") * b[40:80].view("f4")).view("u4") ^ 0x80000000
    operands = "%r1, %r2, %r3" if op == "fma" else "%r1, %r2"
    found = t.evaluate(f"{op}.{mode}.f32 %r0, {operands};", {"%r1": a, "%r2": b, "%r3": c}, "%r0")
    exact = {
        "add": lambda x, y, z: t.exact_add(x, y, "f32", mode),
        "sub": lambda x, y, z: t.exact_add(x, y ^ 0x80000000, "f32", mode),
        "mul": lambda x, y, z: t.exact_mul(x, y, "f32", mode),
        "fma": lambda x, y, z: t.exact_fma(x, y, z, "f32", mode),
    }[op]
    expected = [exact(int(x), int(y), int(z)) for x, y, z in zip(a, b, c, strict=True)]
    check(found, expected, "f32", a, b, c)


@pytest.mark.parametrize(
    "op", ["add.f32x2", "add.rm.f32x2", "sub.rn.f32x2", "mul.rn.f32x2", "fma.rn.f32x2"]
)
def test_f32x2_is_two_f32(op):
    gen = rng(op)
    lows = [t.floats32(gen, COUNT) for _ in range(3)]
    highs = [t.floats32(gen, COUNT) for _ in range(3)]
    packed = {
        f"%rd{i + 1}": lo | hi.astype(np.uint64) << np.uint64(32)
        for i, (lo, hi) in enumerate(zip(lows, highs, strict=True))
    }
    count = 3 if op.startswith("fma") else 2
    names = ", ".join(f"%rd{i + 1}" for i in range(count))
    found = t.evaluate(f"{op} %rd0, {names};", packed, "%rd0")
    scalar = op.replace("f32x2", "f32")
    names = names.replace("rd", "r")
    for shift, values in ((0, lows), (32, highs)):
        want = t.evaluate(
            f"{scalar} %r0, {names};", {f"%r{i + 1}": v for i, v in enumerate(values)}, "%r0"
        )
        half = (found >> np.uint64(shift)).astype(np.uint32)
        nan = t.is_nan(want, "f32")
        assert (t.is_nan(half, "f32") == nan).all()
        assert (half[~nan] == want[~nan]).all()


@pytest.mark.parametrize("name", ["f16", "bf16"])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma.rn"])
def test_small_floats_round_once(op, name):
    gen = rng(op + name)
    a, b, c = (halves(gen, name) for _ in range(3))
    operands = "%rs1, %rs2, %rs3" if op == "fma.rn" else "%rs1, %rs2"
    found = t.evaluate(f"{op}.{name} %rs0, {operands};", {"%rs1": a, "%rs2": b, "%rs3": c}, "%rs0")
    exact = {
        "add": lambda x, y, z: t.exact_add(x, y, name),
        "sub": lambda x, y, z: t.exact_add(x, y ^ 0x8000, name),
        "mul": lambda x, y, z: t.exact_mul(x, y, name),
        "fma.rn": lambda x, y, z: t.exact_fma(x, y, z, name),
    }[op]
    expected = [exact(int(x), int(y), int(z)) for x, y, z in zip(a, b, c, strict=True)]
    check(found, expected, name, a, b, c)


@pytest.mark.parametrize("op", ["add", "mul", "sub", "max", "min", "fma.rn"])
@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_packed_halves_are_two_halves(op, name):
    gen = rng(op + name)
    low, high = ([halves(gen, name) for _ in range(3)] for _ in range(2))
    count = 3 if op == "fma.rn" else 2
    names = ", ".join(f"%r{i + 1}" for i in range(count))
    packed = {
        f"%r{i + 1}": lo | hi << np.uint32(16)
        for i, (lo, hi) in enumerate(zip(low, high, strict=True))
    }
    found = t.evaluate(f"{op}.{name}x2 %r0, {names};", packed, "%r0")
    for shift, values in ((0, low), (16, high)):
        single = {f"%rs{i + 1}": v for i, v in enumerate(values)}
        want = t.evaluate(f"{op}.{name} %rs0, {names.replace('r', 'rs')};", single, "%rs0")
        half = found >> np.uint32(shift) & np.uint32(0xFFFF)
        nan = t.is_nan(want, name)
        assert (t.is_nan(half, name) == nan).all()
        assert (half[~nan] == want[~nan]).all()


def test_mixed_precision_widens_exactly():
    gen = rng("mixed")
    a, b, c = halves(gen, "bf16"), halves(gen, "bf16"), t.floats32(gen, COUNT)
    found = t.evaluate(
        "fma.rn.f32.bf16 %r0, %rs1, %rs2, %r3;", {"%rs1": a, "%rs2": b, "%r3": c}, "%r0"
    )
    expected = [
        t.exact_fma(int(x), int(y), int(z), "bf16", "rn", "f32")
        for x, y, z in zip(a, b, c, strict=True)
    ]
    check(found, expected, "f32", a, b, c)
    found = t.evaluate("add.f32.bf16 %r0, %rs1, %r3;", {"%rs1": a, "%r3": c}, "%r0")
    wide = a << np.uint32(16)
    check(
        found,
        [t.exact_add(int(x), int(z), "f32") for x, z in zip(wide, c, strict=True)],
        "f32",
        a,
        c,
    )


@pytest.mark.parametrize("op", ["add.ftz", "mul.ftz", "fma.rn.ftz"])
def test_ftz_flushes_operands_and_results(op):
    gen = rng(op)
    a, b, c = (t.floats32(gen, COUNT) for _ in range(3))
    a[:100] = gen.integers(0, 1 << 24, 100).astype(np.uint32)
    b[:50] = gen.integers(0, 1 << 24, 50).astype(np.uint32) | np.uint32(0x80000000)
    operands = "%r1, %r2, %r3" if op.startswith("fma") else "%r1, %r2"
    found = t.evaluate(f"{op}.f32 %r0, {operands};", {"%r1": a, "%r2": b, "%r3": c}, "%r0")
    a, b, c = t.flushed(a), t.flushed(b), t.flushed(c)
    plain = t.evaluate(
        f"{op.replace('.ftz', '')}.f32 %r0, {operands};", {"%r1": a, "%r2": b, "%r3": c}, "%r0"
    )
    nan = t.is_nan(plain, "f32")
    assert (found[~nan] == t.flushed(plain)[~nan]).all()
    assert t.is_nan(found[nan], "f32").all()


@pytest.mark.parametrize("op", ["max", "min", "max.NaN", "min.NaN", "max.ftz"])
@pytest.mark.parametrize("operands", [2, 3])
def test_min_max(op, operands):
    gen = rng(op)
    values = [t.floats32(gen, COUNT) for _ in range(operands)]
    values[1][:30] = values[0][:30] ^ 0x80000000
    zeros = np.array([0, 0x80000000], np.uint32)
    values[0][:8], values[1][:8] = np.resize(zeros, 8), np.repeat(zeros, 4)
    names = ", ".join(f"%r{i + 1}" for i in range(operands))
    found = t.evaluate(
        f"{op}.f32 %r0, {names};", {f"%r{i + 1}": v for i, v in enumerate(values)}, "%r0"
    )

    def order(bits: int) -> int:  # -0 < +0
        return bits ^ 0x7FFFFFFF if bits >> 31 else bits | 1 << 31

    def signed(bits: int) -> int:
        return -(bits & 0x7FFFFFFF) - 1 if bits >> 31 else bits

    expected = []
    for row in zip(*values, strict=True):
        row = [int(v) for v in row]
        if "ftz" in op:
            row = [int(v) for v in t.flushed(np.array(row, np.uint32))]
        numbers = [v for v in row if not t.is_nan(v, "f32")]
        if not numbers or (len(numbers) < len(row) and "NaN" in op):
            expected.append(0x7FFFFFFF)
        else:
            expected.append((max if "max" in op else min)(numbers, key=signed))
    del order
    assert [hex(int(f)) for f in found] == [hex(e) for e in expected]


_FUNCTIONS = {
    "ex2.approx": np.exp2,
    "lg2.approx": np.log2,
    "rcp.approx": lambda x: 1 / x,
    "rcp.rn": lambda x: 1 / x,
    "sqrt.rn": np.sqrt,
    "rsqrt.approx": lambda x: 1 / np.sqrt(x),
    "tanh.approx": np.tanh,
    "sin.approx": np.sin,
    "cos.approx": np.cos,
}


def _ulps(found: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Distance from the exact value in units of the last place of the nearest fp32."""
    with np.errstate(all="ignore"):
        near = exact.astype(np.float32)
        size = np.spacing(np.abs(near)).astype(np.longdouble)
        distance = np.abs(found.astype(np.longdouble) - exact) / size
    same = (found == near) | (np.isnan(found) & np.isnan(near))
    return np.where(same, np.minimum(np.nan_to_num(distance, nan=0.0), 0.5), distance)


@pytest.mark.parametrize("op", sorted(_FUNCTIONS))
def test_functions_are_within_one_ulp(op):
    gen = rng(op)
    x = t.floats32(gen, 4096)
    x[: len(t.SPECIAL32)] = t.SPECIAL32
    if op.split(".")[0] in ("sin", "cos"):  # the hardware's range reduction ends there
        x = np.where(np.abs(x.view("f4")) < 1e5, x, np.float32(0.5).view("u4")).astype(np.uint32)
    if op.startswith("ex2"):
        x[2000:3000] = gen.uniform(-150, 130, 1000).astype(np.float32).view(np.uint32)
    if op.startswith("tanh"):
        x[2000:3000] = gen.uniform(-0.05, 0.05, 1000).astype(np.float32).view(np.uint32)
    found = t.evaluate(f"{op}.f32 %r0, %r1;", {"%r1": x}, "%r0").view(np.float32)
    with np.errstate(all="ignore"):
        exact = _FUNCTIONS[op](x.view(np.float32).astype(np.longdouble))
    error = _ulps(found, exact)
    worst = int(error.argmax())
    assert error.max() < 0.51, (hex(int(x[worst])), found[worst], exact[worst])


def test_ex2_and_lg2_flush():
    tiny = np.array(
        [0x00000001, 0x007FFFFF, 0x807FFFFF, 0xFF800000, 0x7F800000, 0, 0x80000000], np.uint32
    )
    lg2 = t.evaluate("lg2.approx.ftz.f32 %r0, %r1;", {"%r1": tiny}, "%r0").view("f4")
    assert (lg2[[0, 1, 2, 5, 6]] == -np.inf).all() and np.isnan(lg2[3]) and lg2[4] == np.inf
    x = np.array([-126.0, -126.5, -149.0, -np.inf, 0.0, 128.0, 127.5], np.float32)
    ftz = t.evaluate("ex2.approx.ftz.f32 %r0, %r1;", {"%r1": x}, "%r0").view("f4")
    assert (ftz[:6] == np.array([2.0**-126, 0, 0, 0, 1, np.inf], np.float32)).all()
    kept = t.evaluate("ex2.approx.f32 %r0, %r1;", {"%r1": x}, "%r0").view("f4")
    assert kept[1] > 0 and kept[2] == np.float32(2.0**-149)
    assert (
        t.evaluate(
            "ex2.approx.ftz.f32 %r0, %r1;", {"%r1": np.array([0x7FC12345], np.uint32)}, "%r0"
        )
        == 0x7FFFFFFF
    ).all()


@pytest.mark.parametrize(
    "op,name", [("ex2.approx", "f16"), ("tanh.approx", "bf16"), ("ex2.approx.ftz", "bf16")]
)
def test_half_functions_match_their_packed_form(op, name):
    gen = rng(op + name)
    low, high = halves(gen, name), halves(gen, name)
    packed = t.evaluate(f"{op}.{name}x2 %r0, %r1;", {"%r1": low | high << np.uint32(16)}, "%r0")
    one = t.evaluate(f"{op}.{name} %rs0, %rs1;", {"%rs1": low}, "%rs0")
    two = t.evaluate(f"{op}.{name} %rs0, %rs1;", {"%rs1": high}, "%rs0")
    assert (packed == (one | two << np.uint32(16))).all()


def test_division_and_signs():
    gen = rng("div")
    a, b = t.floats32(gen, COUNT), t.floats32(gen, COUNT)
    with np.errstate(all="ignore"):
        want = (a.view("f4") / b.view("f4")).view("u4")
    found = t.evaluate("div.rn.f32 %r0, %r1, %r2;", {"%r1": a, "%r2": b}, "%r0")
    nan = t.is_nan(want, "f32")
    assert (found[~nan] == want[~nan]).all() and t.is_nan(found[nan], "f32").all()
    assert (t.evaluate("neg.f32 %r0, %r1;", {"%r1": a}, "%r0") == a ^ 0x80000000).all()
    assert (t.evaluate("abs.f32 %r0, %r1;", {"%r1": a}, "%r0") == a & 0x7FFFFFFF).all()
    assert (t.evaluate("neg.bf16x2 %r0, %r1;", {"%r1": a}, "%r0") == a ^ 0x80008000).all()
    assert (t.evaluate("abs.f16x2 %r0, %r1;", {"%r1": a}, "%r0") == a & 0x7FFF7FFF).all()
    want = (a & 0x80000000) | (b & 0x7FFFFFFF)
    assert (t.evaluate("copysign.f32 %r0, %r1, %r2;", {"%r1": a, "%r2": b}, "%r0") == want).all()


def test_saturation():
    x = np.array([-1.0, -0.0, 0.25, 1.0, 7.0, np.inf, -np.inf, np.nan], np.float32)
    found = t.evaluate("add.sat.f32 %r0, %r1, 0f00000000;", {"%r1": x}, "%r0")
    assert (found.view("f4") == np.array([0, 0, 0.25, 1, 1, 1, 0, 0], np.float32)).all()
