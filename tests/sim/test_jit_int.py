"""Native integer, bit, move and comparison instructions against Python integers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sim import jit_tools as t

COUNT = 512
REG = {16: "%rs", 32: "%r", 64: "%rd"}


def rng(name: str) -> np.random.Generator:
    return np.random.default_rng(list(name.encode()))


def signed(value: int, width: int) -> int:
    return value - (1 << width) if value >> (width - 1) else value


def run(line: str, widths: list[int], values: list[np.ndarray]) -> np.ndarray:
    """`line` has {0} for the destination and {1}.. for sources of the given widths."""
    names = [f"{REG[w]}{i}" for i, w in enumerate(widths)]
    inputs = dict(zip(names[1:], values, strict=True))
    return t.evaluate(line.format(*names), inputs, names[0])


def compare(op: str, found: np.ndarray, expected: list[int], values, width: int) -> None:
    mask = (1 << width) - 1
    bad = [i for i, e in enumerate(expected) if int(found[i]) != e & mask]
    show = [
        ([hex(int(v[i])) for v in values], hex(int(found[i])), hex(expected[i] & mask))
        for i in bad[:4]
    ]
    assert not bad, f"{op}: {len(bad)} differ, e.g. (inputs, found, expected) {show}"


_BINARY = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "min": min,
    "max": max,
}


_ARITHMETIC = [*_BINARY, "mul.hi", "mul.wide", "mad.lo", "mad.hi", "mad.wide", "div", "rem"]
_FORMS = [
    (op, kind, width)
    for op in (*_ARITHMETIC, "abs", "neg")
    for kind in "su"
    for width in (16, 32, 64)
    if not (width == 64 and op.endswith("wide")) and not (kind == "u" and op in ("abs", "neg"))
]


@pytest.mark.parametrize("op,kind,width", _FORMS)
def test_arithmetic(op, kind, width):
    gen = rng(op + kind + str(width))
    a, b = t.ints(gen, COUNT, width), t.ints(gen, COUNT, width)
    out = 2 * width if op.endswith("wide") else width
    c = t.ints(gen, COUNT, out)
    if op in ("div", "rem"):
        b[b == 0] = 3
    read = (lambda v: signed(int(v), width)) if kind == "s" else int
    rows = [(read(x), read(y), int(z)) for x, y, z in zip(a, b, c, strict=True)]

    def quotient(x: int, y: int) -> int:
        return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)

    rules = {
        **{k: (lambda x, y, z, f=f: f(x, y)) for k, f in _BINARY.items()},
        "mul.hi": lambda x, y, z: x * y >> width,
        "mul.wide": lambda x, y, z: x * y,
        "mad.lo": lambda x, y, z: x * y + z,
        "mad.hi": lambda x, y, z: (x * y >> width) + z,
        "mad.wide": lambda x, y, z: x * y + z,
        "div": lambda x, y, z: quotient(x, y),
        "rem": lambda x, y, z: x - quotient(x, y) * y,
        "abs": lambda x, y, z: abs(x),
        "neg": lambda x, y, z: -x,
    }
    expected = [rules[op](*row) for row in rows]
    name = f"{op}.{kind}{width}"
    if op in ("abs", "neg"):
        found = run(f"{name} {{0}}, {{1}};", [out, width], [a])
    elif op.startswith("mad"):
        found = run(f"{name} {{0}}, {{1}}, {{2}}, {{3}};", [out, width, width, out], [a, b, c])
    else:
        found = run(f"{name} {{0}}, {{1}}, {{2}};", [out, width, width], [a, b])
    compare(name, found, expected, (a, b, c), out)


@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize("op", ["and", "or", "xor", "not", "cnot"])
def test_logic(op, width):
    gen = rng(op + str(width))
    a, b = t.ints(gen, COUNT, width), t.ints(gen, COUNT, width)
    rules = {"and": lambda x, y: x & y, "or": lambda x, y: x | y, "xor": lambda x, y: x ^ y}
    rules |= {"not": lambda x, y: ~x, "cnot": lambda x, y: int(x == 0)}
    expected = [rules[op](int(x), int(y)) for x, y in zip(a, b, strict=True)]
    unary = op in ("not", "cnot")
    line = f"{op}.b{width} {{0}}, {{1}};" if unary else f"{op}.b{width} {{0}}, {{1}}, {{2}};"
    found = run(line, [width] * (2 if unary else 3), [a] if unary else [a, b])
    compare(op, found, expected, (a, b), width)


@pytest.mark.parametrize(
    "op,width",
    [(o + k, w) for w in (16, 32, 64) for o, k in (("shl.", "b"), ("shr.", "u"), ("shr.", "s"))],
)
def test_shifts_clamp(op, width):
    gen = rng(op + str(width))
    a = t.ints(gen, COUNT, width)
    count = gen.choice(
        np.array(
            [0, 1, 7, 15, 16, 31, 32, 33, 63, 64, 65, 255, 256, 1 << 31, 0xFFFFFFFF], np.uint32
        ),
        COUNT,
    )

    def rule(x: int, n: int) -> int:
        if op == "shl.b":
            return x << min(n, width)
        return (signed(x, width) if op == "shr.s" else x) >> min(n, width)

    found = run(f"{op}{width} {{0}}, {{1}}, {{2}};", [width, width, 32], [a, count])
    compare(
        op, found, [rule(int(x), int(n)) for x, n in zip(a, count, strict=True)], (a, count), width
    )


@pytest.mark.parametrize("side", ["l", "r"])
@pytest.mark.parametrize("mode", ["clamp", "wrap"])
def test_funnel_shift(side, mode):
    gen = rng(side + mode)
    a, b = t.ints(gen, COUNT, 32), t.ints(gen, COUNT, 32)
    count = gen.integers(0, 80, COUNT).astype(np.uint32)

    def rule(x: int, y: int, n: int) -> int:
        n = n & 31 if mode == "wrap" else min(n, 32)
        both = y << 32 | x
        return both << n >> 32 if side == "l" else both >> n

    found = run(f"shf.{side}.{mode}.b32 {{0}}, {{1}}, {{2}}, {{3}};", [32] * 4, [a, b, count])
    rows = zip(a, b, count, strict=True)
    compare("shf", found, [rule(*map(int, r)) for r in rows], (a, b, count), 32)


@pytest.mark.parametrize("table", [0xE2, 0x96, 0xCA, 0x00, 0xFF, 0x6A])
def test_lop3(table):
    gen = rng("lop3")
    values = [t.ints(gen, 64, 32) for _ in range(3)]

    def rule(x: int, y: int, z: int) -> int:
        return sum(
            (table >> ((x >> i & 1) << 2 | (y >> i & 1) << 1 | (z >> i & 1)) & 1) << i
            for i in range(32)
        )

    found = run(f"lop3.b32 {{0}}, {{1}}, {{2}}, {{3}}, {table:#x};", [32] * 4, values)
    compare("lop3", found, [rule(*map(int, r)) for r in zip(*values, strict=True)], values, 32)


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_field_extract(kind):
    width = int(kind[1:])
    gen = rng("bfe" + kind)
    a = t.ints(gen, COUNT, width)
    pos, length = (gen.integers(0, 80, COUNT).astype(np.uint32) for _ in range(2))

    def rule(x: int, p: int, n: int) -> int:
        top = x >> (width - 1) if p + n - 1 >= width else x >> (p + n - 1) & 1 if n else 0
        fill = top if kind[0] == "s" and n else 0
        return sum(
            (x >> (p + i) & 1 if i < n and p + i < width else fill) << i for i in range(width)
        )

    found = run(f"bfe.{kind} {{0}}, {{1}}, {{2}}, {{3}};", [width, width, 32, 32], [a, pos, length])
    rows = zip(a, pos, length, strict=True)
    compare(kind, found, [rule(*map(int, r)) for r in rows], (a, pos, length), width)


@pytest.mark.parametrize("width", [32, 64])
def test_bit_field_insert(width):
    gen = rng("bfi" + str(width))
    a, b = t.ints(gen, COUNT, width), t.ints(gen, COUNT, width)
    pos, length = (gen.integers(0, 80, COUNT).astype(np.uint32) for _ in range(2))

    def rule(x: int, y: int, p: int, n: int) -> int:
        for i in range(n):
            if p + i < width:
                y = y & ~(1 << (p + i)) | (x >> i & 1) << (p + i)
        return y

    line = f"bfi.b{width} {{0}}, {{1}}, {{2}}, {{3}}, {{4}};"
    found = run(line, [width, width, width, 32, 32], [a, b, pos, length])
    rows = zip(a, b, pos, length, strict=True)
    compare("bfi", found, [rule(*map(int, r)) for r in rows], (a, b, pos, length), width)


@pytest.mark.parametrize("mode", ["", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16"])
def test_byte_permute(mode):
    gen = rng("prmt" + mode)
    a, b, c = (t.ints(gen, COUNT, 32) for _ in range(3))
    c = gen.integers(0, 1 << 16, COUNT).astype(np.uint32) if not mode else c

    def rule(x: int, y: int, sel: int) -> int:
        data = [*x.to_bytes(4, "little"), *y.to_bytes(4, "little")]
        n = sel & 3
        picks = {
            ".f4e": [n, n + 1, n + 2, n + 3],
            ".b4e": [n, (n - 1) & 7, (n - 2) & 7, (n - 3) & 7],
            ".rc8": [n] * 4,
            ".ecl": [max(n, i) for i in range(4)],
            ".ecr": [min(n, i) for i in range(4)],
            ".rc16": [0, 1, 0, 1] if n & 1 == 0 else [2, 3, 2, 3],
        }.get(mode, [sel >> 4 * i & 15 for i in range(4)])
        out = [(255 if data[p & 7] & 128 else 0) if p & 8 else data[p & 7] for p in picks]
        return int.from_bytes(bytes(out), "little")

    found = run(f"prmt.b32{mode} {{0}}, {{1}}, {{2}}, {{3}};", [32] * 4, [a, b, c])
    compare(
        "prmt" + mode, found, [rule(*map(int, r)) for r in zip(a, b, c, strict=True)], (a, b, c), 32
    )


@pytest.mark.parametrize("width", [32, 64])
def test_bit_counts(width):
    gen = rng("bits" + str(width))
    a = t.ints(gen, COUNT, width)
    values = [int(x) for x in a]

    def find(x: int, sign: bool, shift: bool) -> int:
        if sign and x >> (width - 1):
            x = ~x & ((1 << width) - 1)
        top = x.bit_length() - 1
        return -1 if top < 0 else width - 1 - top if shift else top

    for op, rule, out in (
        (f"popc.b{width}", lambda x: x.bit_count(), 32),
        (f"clz.b{width}", lambda x: width - x.bit_length(), 32),
        (f"brev.b{width}", lambda x: int(f"{x:0{width}b}"[::-1], 2), width),
        (f"bfind.u{width}", lambda x: find(x, False, False), 32),
        (f"bfind.s{width}", lambda x: find(x, True, False), 32),
        (f"bfind.shiftamt.u{width}", lambda x: find(x, False, True), 32),
    ):
        compare(
            op, run(f"{op} {{0}}, {{1}};", [out, width], [a]), [rule(x) for x in values], (a,), out
        )


def test_other_integer_instructions():
    gen = rng("others")
    a, b, c = (t.ints(gen, COUNT, 32) for _ in range(3))
    rows = [tuple(map(int, r)) for r in zip(a, b, c, strict=True)]

    def clamp(v: int) -> int:
        return max(-(1 << 31), min((1 << 31) - 1, v))

    def dot(x: int, y: int, z: int) -> int:
        return z + sum(signed(x >> s & 255, 8) * signed(y >> s & 255, 8) for s in (0, 8, 16, 24))

    for op, count, rule in (
        ("add.sat.s32", 2, lambda x, y, z: clamp(signed(x, 32) + signed(y, 32))),
        ("sub.sat.s32", 2, lambda x, y, z: clamp(signed(x, 32) - signed(y, 32))),
        ("mul24.lo.u32", 2, lambda x, y, z: (x & 0xFFFFFF) * (y & 0xFFFFFF)),
        ("mad24.hi.u32", 3, lambda x, y, z: ((x & 0xFFFFFF) * (y & 0xFFFFFF) >> 16) + z),
        ("sad.u32", 3, lambda x, y, z: abs(x - y) + z),
        ("sad.s32", 3, lambda x, y, z: abs(signed(x, 32) - signed(y, 32)) + z),
        ("dp4a.s32.s32", 3, dot),
        ("bmsk.clamp.b32", 2, lambda x, y, z: ((1 << min(y, 64)) - 1) << min(x, 64)),
        ("add.u16x2", 2, lambda x, y, z: (x + y & 0xFFFF) | ((x >> 16) + (y >> 16) & 0xFFFF) << 16),
        ("max.u16x2", 2, lambda x, y, z: max(x & 0xFFFF, y & 0xFFFF) | max(x >> 16, y >> 16) << 16),
    ):
        line = f"{op} " + ", ".join(f"{{{i}}}" for i in range(count + 1)) + ";"
        found = run(line, [32] * (count + 1), [a, b, c][:count])
        compare(op, found, [rule(*r) for r in rows], (a, b, c), 32)


@pytest.mark.parametrize("width", [32, 64])
def test_carry_chains(width):
    gen = rng("carry" + str(width))
    a, b, c, d = (t.ints(gen, COUNT, width) for _ in range(4))
    reg, kind = REG[width], f"u{width}"
    inputs = dict(zip((f"{reg}{i}" for i in (1, 2, 3, 4)), (a, b, c, d), strict=True))
    for op, sign in (("add", 1), ("sub", -1)):
        body = f"{op}.cc.{kind} {reg}5, {reg}1, {reg}3; {op}c.cc.{kind} {reg}6, {reg}2, {reg}4; "
        body += f"{op}c.{kind} {reg}7, 0, 0;"
        low, high, top = t.evaluate(body, inputs, f"{reg}5", f"{reg}6", f"{reg}7")
        for i in range(COUNT):
            one, two = (int(x[i]) | int(y[i]) << width for x, y in ((a, b), (c, d)))
            want = (one + sign * two) & ((1 << 3 * width) - 1)
            assert int(low[i]) | int(high[i]) << width | int(top[i]) << 2 * width == want


# ---- moves ----


def test_packing_and_unpacking():
    gen = rng("mov")
    a, b = t.ints(gen, 64, 32), t.ints(gen, 64, 32)
    both = a | b.astype(np.uint64) << np.uint64(32)
    inputs = {"%r1": a, "%r2": b, "%rs1": (a & 0xFFFF), "%rs2": (b & 0xFFFF)}
    assert (t.evaluate("mov.b64 %rd0, {%r1, %r2};", inputs, "%rd0") == both).all()
    assert (t.evaluate("mov.b64 %rd0, {%r1, 7};", inputs, "%rd0") == a | np.uint64(7 << 32)).all()
    low, high = t.evaluate(
        "mov.b64 %rd0, {%r1, %r2}; mov.b64 {%r3, %r4}, %rd0;", inputs, "%r3", "%r4"
    )
    assert (low == a).all() and (high == b).all()
    assert (
        t.evaluate("mov.b64 %rd0, {%r1, %r2}; mov.b64 {_, %r4}, %rd0;", inputs, "%r4") == b
    ).all()
    assert (
        t.evaluate("mov.b32 %r0, {%rs1, %rs2};", inputs, "%r0")
        == ((a & 0xFFFF) | b << np.uint32(16))
    ).all()
    low, high = t.evaluate("mov.b32 {%rs3, %rs4}, %r1;", inputs, "%rs3", "%rs4")
    assert (low == a & 0xFFFF).all() and (high == a >> np.uint32(16)).all()
    body = "mov.b64 %rd0, {%rs1, %rs2, %rs1, %rs2}; mov.b64 {%rs5, %rs6, %rs7, %rs8}, %rd0;"
    parts = t.evaluate(body, inputs, "%rs5", "%rs6", "%rs7", "%rs8")
    assert all((p == q).all() for p, q in zip(parts, (a & 0xFFFF, b & 0xFFFF) * 2, strict=True))


def test_a_register_may_be_source_and_destination():
    a, b = np.arange(32, dtype=np.uint32), np.arange(32, dtype=np.uint32) * 3
    inputs = {"%r1": a, "%r2": b}
    body = "add.s32 %r1, %r1, %r2; mul.lo.s32 %r1, %r1, %r1; selp.b32 %r2, %r1, %r2, %p1;"
    r1, r2 = t.evaluate(f"setp.gt.u32 %p1, %r1, 5; {body}", inputs, "%r1", "%r2")
    assert (r1 == (a + b) ** 2).all() and (r2 == np.where(a > 5, (a + b) ** 2, b)).all()


# ---- comparisons ----

_TESTS = {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
}


@pytest.mark.parametrize("kind", ["s16", "u16", "b16", "s32", "u32", "b32", "s64", "u64", "b64"])
def test_integer_comparisons(kind):
    width = int(kind[1:])
    gen = rng(kind)
    a, b = t.ints(gen, 128, width), t.ints(gen, 128, width)
    b[:30] = a[:30]
    x, y = (v.view(f"i{width // 8}") if kind[0] == "s" else v for v in (a, b))
    names = {f"{REG[width]}1": a, f"{REG[width]}2": b}
    for test, rule in _TESTS.items():
        if kind[0] == "b" and test not in ("eq", "ne"):
            continue
        found = t.evaluate(f"setp.{test}.{kind} %p0, {REG[width]}1, {REG[width]}2;", names, "%p0")
        assert (found == rule(x, y)).all(), test


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_float_comparisons(kind):
    gen = rng(kind)
    a = t.floats32(gen, 256)
    b = np.where(gen.integers(0, 3, 256) == 0, a, t.floats32(gen, 256)).astype(np.uint32)
    if kind == "f32":
        regs, x, y = ("%r1", "%r2"), a.view("f4"), b.view("f4")
    else:
        a, b = a >> np.uint32(16), b >> np.uint32(16)
        regs = ("%rs1", "%rs2")
        if kind == "bf16":
            x, y = ((v << np.uint32(16)).view("f4") for v in (a, b))
        else:
            x, y = (v.astype(np.uint16).view(np.float16) for v in (a, b))
    unordered = np.isnan(x) | np.isnan(y)
    for test, rule in _TESTS.items():
        held = rule(x, y) & ~unordered
        inputs = dict(zip(regs, (a, b), strict=True))
        assert (
            t.evaluate(f"setp.{test}.{kind} %p0, {regs[0]}, {regs[1]};", inputs, "%p0") == held
        ).all()
        assert (
            t.evaluate(f"setp.{test}u.{kind} %p0, {regs[0]}, {regs[1]};", inputs, "%p0")
            == held | unordered
        ).all()
    for test, held in (("num", ~unordered), ("nan", unordered)):
        assert (
            t.evaluate(f"setp.{test}.{kind} %p0, {regs[0]}, {regs[1]};", inputs, "%p0") == held
        ).all()


@pytest.mark.parametrize("boolean", ["and", "or", "xor"])
def test_setp_combines_and_negates(boolean):
    gen = rng(boolean)
    a, b, c = t.ints(gen, 128, 32), t.ints(gen, 128, 32), gen.integers(0, 2, 128).astype(np.uint32)
    inputs = {"%r1": a, "%r2": b, "%p3": c}
    for negated in (False, True):
        third = "!%p3" if negated else "%p3"
        p, q = t.evaluate(
            f"setp.lt.{boolean}.u32 %p0|%p1, %r1, %r2, {third};", inputs, "%p0", "%p1"
        )
        held, other = a < b, (c == 0) if negated else (c != 0)
        combine = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[boolean]
        assert (p == combine(held, other)).all() and (q == combine(~held, other)).all()


def test_predicate_logic_and_selection():
    gen = rng("pred")
    a, b = (gen.integers(0, 2, 64).astype(np.uint32) for _ in range(2))
    inputs = {"%p1": a, "%p2": b, "%r1": a * 7 + 1, "%r2": b * 9 + 100}
    for op, want in (("and", a & b), ("or", a | b), ("xor", a ^ b)):
        assert (t.evaluate(f"{op}.pred %p0, %p1, %p2;", inputs, "%p0") == want).all()
    assert (t.evaluate("not.pred %p0, %p1;", inputs, "%p0") == 1 - a).all()
    assert (t.evaluate("mov.pred %p0, -1;", inputs, "%p0") == 1).all()
    assert (t.evaluate("mov.pred %p0, 0;", inputs, "%p0") == 0).all()
    want = np.where(a, a * 7 + 1, b * 9 + 100)
    assert (t.evaluate("selp.b32 %r0, %r1, %r2, %p1;", inputs, "%r0") == want).all()
    assert (t.evaluate("selp.u32 %r0, 1, 0, %p1;", inputs, "%r0") == a).all()
    assert (
        t.evaluate(
            "slct.u32.s32 %r0, %r1, %r2, %r3;",
            {**inputs, "%r3": np.where(a, 5, 0xFFFFFFFF).astype(np.uint32)},
            "%r0",
        )
        == want
    ).all()
    assert (
        t.evaluate("set.lt.u32.u32 %r0, %r1, %r2;", inputs, "%r0")
        == np.where(a * 7 + 1 < b * 9 + 100, 0xFFFFFFFF, 0)
    ).all()
