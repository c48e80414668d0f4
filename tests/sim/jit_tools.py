"""Run a few PTX instructions natively on chosen lane values; exact arithmetic to compare with."""

from __future__ import annotations

from fractions import Fraction
from functools import cache

import numpy as np

from fa_cute.sim import jit, ptx

FULL = 0xFFFFFFFF
_HEADER = """.version 8.8
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 p0, .param .align 16 .b8 p1[48])
{
.reg .pred %p<16>;
.reg .b16 %rs<32>;
.reg .b32 %r<64>;
.reg .b64 %rd<64>;
"""


def kernel_of(body: str) -> ptx.Kernel:
    return next(iter(ptx.parse(f"{_HEADER}{body}\nret;\n}}\n").kernels.values()))


@cache
def program(body: str) -> jit.Program:
    return jit.build(kernel_of(body))


def rows_of(warp: jit.WarpState, name: str) -> np.ndarray:
    """The 32 lanes of a register (a predicate as 0/1 per lane)."""
    return rows_in(warp.program.kernel, warp, name)


def rows_in(kernel: ptx.Kernel, warp, name: str) -> np.ndarray:
    """`rows_of` for a warp of any engine."""
    reg = kernel.regs[name]
    if reg.bank is ptx.Bank.PRED:
        return np.array([int(warp.pred[reg.index]) >> i & 1 for i in range(32)], np.uint32)
    return (warp.r64 if reg.bank is ptx.Bank.R64 else warp.r32)[reg.index]


def set_rows(warp: jit.WarpState, name: str, values) -> None:
    set_rows_of(warp.program.kernel, warp, name, values)


def set_rows_of(kernel: ptx.Kernel, warp, name: str, values) -> None:
    """`set_rows` for a warp of any engine."""
    reg = kernel.regs[name]
    if reg.bank is ptx.Bank.PRED:
        bits = sum(int(v != 0) << i for i, v in enumerate(np.broadcast_to(values, 32)))
        warp.pred[reg.index] = bits
    else:
        (warp.r64 if reg.bank is ptx.Bank.R64 else warp.r32)[reg.index] = values


def evaluate(body: str, inputs: dict[str, np.ndarray], *outputs: str):
    """Run `body` on 32 values at a time; inputs are integer patterns of any equal length."""
    code = program(body)
    warp = code.warp()
    count = max(len(v) for v in inputs.values())
    padded = -(-count // 32) * 32
    regs = {
        n: np.resize(np.asarray(v).view(f"u{np.asarray(v).itemsize}"), padded)
        for n, v in inputs.items()
    }
    results = {n: [] for n in outputs}
    known = code.kernel.regs
    for at in range(0, padded, 32):
        for name, values in regs.items():
            if name in known:
                set_rows(warp, name, values[at : at + 32])
        warp.start()
        stop = warp.run()
        assert stop >> 60 == jit.KIND_EXIT, warp.error()
        for name in outputs:
            results[name].append(rows_of(warp, name).copy())
    found = [np.concatenate(results[n])[:count] for n in outputs]
    return found[0] if len(found) == 1 else found


# ---- values ----

SPECIAL32 = np.array(
    [
        *(0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00800000),
        *(0x80800000, 0x3F800000, 0xBF800000, 0x3F800001, 0x3F7FFFFF, 0x7F7FFFFF, 0xFF7FFFFF),
        *(0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0x4B000001, 0xCB000001),
        *(0x33800000, 0x34000001, 0x42FE0000, 0xC2FC0000, 0x3EAAAAAB, 0x47800000, 0x477FE000),
    ],
    np.uint32,
)


def floats32(rng: np.random.Generator, count: int) -> np.ndarray:
    """Patterns of fp32: random bits, moderate numbers, special values."""
    bits = rng.integers(0, 1 << 32, count, np.uint64).astype(np.uint32)
    moderate = (rng.standard_normal(count) * 8).astype(np.float32).view(np.uint32)
    special = rng.choice(SPECIAL32, count)
    pick = rng.integers(0, 4, count)
    return np.where(pick == 0, bits, np.where(pick == 3, special, moderate)).astype(np.uint32)


def ints(rng: np.random.Generator, count: int, width: int) -> np.ndarray:
    """Integer patterns: random, small, at the ends of the range."""
    dtype = {16: np.uint16, 32: np.uint32, 64: np.uint64}[width]
    raw = rng.integers(0, 1 << 63, count, np.uint64) ^ (rng.integers(0, 2, count, np.uint64) << 63)
    ends = np.array([0, 1, 2, (1 << width) - 1, (1 << width) - 2, 1 << (width - 1)], np.uint64)
    ends = np.append(ends, np.uint64((1 << (width - 1)) - 1))
    small = rng.integers(0, 70, count).astype(np.uint64)
    pick = rng.integers(0, 4, count)
    chosen = np.where(pick == 0, rng.choice(ends, count), np.where(pick == 1, small, raw))
    return chosen.astype(dtype)


# ---- exact arithmetic ----

FORMATS = {  # exponent bits, mantissa bits
    "f16": (5, 10),
    "bf16": (8, 7),
    "f32": (8, 23),
    "f64": (11, 52),
}
NAN, INF = "nan", "inf"


def decode(bits: int, name: str):
    """(sign, value): the value is a Fraction, INF or NAN."""
    exp_bits, man_bits = FORMATS[name]
    bias = (1 << (exp_bits - 1)) - 1
    sign = bits >> (exp_bits + man_bits) & 1
    exponent, mantissa = bits >> man_bits & ((1 << exp_bits) - 1), bits & ((1 << man_bits) - 1)
    if exponent == (1 << exp_bits) - 1:
        return sign, NAN if mantissa else INF
    if exponent == 0:
        value = Fraction(mantissa) * Fraction(2) ** (1 - bias - man_bits)
    else:
        value = Fraction(mantissa + (1 << man_bits)) * Fraction(2) ** (exponent - bias - man_bits)
    return sign, -value if sign else value


def encode(value: Fraction, name: str, mode: str = "rn", zero_sign: int = 0) -> int:
    """Bits of an exact value rounded once."""
    exp_bits, man_bits = FORMATS[name]
    bias = (1 << (exp_bits - 1)) - 1
    sign = int(value < 0) if value else zero_sign
    size = abs(value)
    top = sign << (exp_bits + man_bits)
    if not size:
        return top
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < Fraction(2) ** exponent:
        exponent -= 1
    exponent = max(exponent, 1 - bias)
    units = size / Fraction(2) ** (exponent - man_bits)
    whole = units.numerator // units.denominator
    rest = units - whole
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole & 1),
        "rz": False,
        "rm": bool(rest) and sign,
        "rp": bool(rest) and not sign,
    }[mode]
    whole += int(up)
    code = whole + ((exponent - 1 + bias) << man_bits) if whole >= 1 << man_bits else whole
    if whole >= 1 << man_bits and exponent == 1 - bias:
        code = whole
    largest = ((1 << exp_bits) - 1) << man_bits
    if code >= largest:
        away = mode == "rn" or (mode == "rm" and sign) or (mode == "rp" and not sign)
        code = largest if away else largest - 1
    return top | code


def exact_fma(a: int, b: int, c: int, name: str, mode: str = "rn", c_name: str | None = None):
    """Bits of a*b+c in the format `c_name` or `name`; None for NaN."""
    out = c_name or name
    (sa, va), (sb, vb), (sc, vc) = decode(a, name), decode(b, name), decode(c, out)
    if NAN in (va, vb, vc) or (INF in (va, vb) and 0 in (va, vb)):
        return None
    sign = sa ^ sb
    exp_bits, man_bits = FORMATS[out]
    infinity = ((1 << exp_bits) - 1) << man_bits
    if INF in (va, vb):
        if vc == INF and sc != sign:
            return None
        return infinity | sign << (exp_bits + man_bits)
    if vc == INF:
        return infinity | sc << (exp_bits + man_bits)
    product = va * vb
    if product == 0 and vc == 0:
        zero = sign if sign == sc else int(mode == "rm")
        return zero << (exp_bits + man_bits)
    total = product + vc
    return encode(total, out, mode, int(mode == "rm"))


def exact_add(a: int, b: int, name: str, mode: str = "rn"):
    one = encode(Fraction(1), name)
    return exact_fma(a, one, b, name, mode)


def exact_mul(a: int, b: int, name: str, mode: str = "rn"):
    (sa, va), (sb, vb) = decode(a, name), decode(b, name)
    if NAN in (va, vb) or (INF in (va, vb) and 0 in (va, vb)):
        return None
    exp_bits, man_bits = FORMATS[name]
    if INF in (va, vb):
        return ((1 << exp_bits) - 1) << man_bits | (sa ^ sb) << (exp_bits + man_bits)
    return encode(va * vb, name, mode, sa ^ sb)


def is_nan(bits, name: str):
    exp_bits, man_bits = FORMATS[name]
    infinity = ((1 << exp_bits) - 1) << man_bits
    return (
        np.asarray(bits).astype(np.uint64) & np.uint64((1 << (exp_bits + man_bits)) - 1)
    ) > infinity


def same_floats(found, expected: list, name: str) -> list[int]:
    """Indices where patterns differ; None expects any NaN."""
    nan = is_nan(found, name)
    return [i for i, e in enumerate(expected) if (not nan[i] if e is None else int(found[i]) != e)]


def flushed(bits: np.ndarray) -> np.ndarray:
    """fp32 subnormals to signed zeros."""
    return np.where(bits & 0x7F800000, bits, bits & 0x80000000).astype(np.uint32)
