"""Elementary functions, roundings and small floats on rows, as builders and prelude functions.

The approximate instructions of the hardware are modelled by the correctly rounded result as far as
fp64 arithmetic gives it (wrong in the last bit about once in 10^4), with the hardware's flushing.
"""

from __future__ import annotations

from collections.abc import Callable

from fa_cute.sim.jit.ir import Bits, Fn, Val, vec

NAN32, INF32 = 0x7FFFFFFF, 0x7F800000
_MAGIC = 6755399441055744.0  # 1.5 * 2^52: adding it rounds to an integer in the low bits

PRELUDE: dict[str, Callable[[], str]] = {}


def prelude(ty: str = vec("f32"), arity: int = 1):
    """Register a vector function `@name` that modules include when they call it."""

    def register(make: Callable[..., Val]):
        def text() -> str:
            args = ", ".join(f"%a{i}: {ty}" for i in range(arity))
            f = Fn(f"fx_{make.__name__}", args=args, ret=ty)
            f.give(make(f, *(Val(f, f"%a{i}", ty) for i in range(arity))))
            return f.text("internal ")

        PRELUDE[make.__name__] = text
        return make

    return register


def flush(x: Val) -> Val:
    """Subnormals of f32 or f16 to zeros of their sign."""
    exponent, sign = (0x7F800000, 0x80000000) if x.elem == "f32" else (0x7C00, 0x8000)
    bits = x.bits(f"i{x.width}")
    return (bits & exponent).eq(0).select(bits & sign, bits).bits(x.elem)


def quiet(result: Val, *inputs: Val) -> Val:
    """The hardware's one NaN where an input (or the result) is a NaN."""
    pattern = {"f32": 0x7FFFFFFF, "f16": 0x7FFF, "f64": 0x7FF8000000000000}[result.elem]
    for value in inputs or (result,):
        result = value.isnan().select(result.f.lift(Bits(pattern), result.ty), result)
    return result


# ---- rounding ----


def nearest_of(value: Val, mode: str) -> Val:
    """fp64 -> fp32 rounded `rn`, `rz`, `rm`, `rp` or to `odd` (sticky, for a second rounding)."""
    near = value.cast("fptrunc", "f32")
    if mode == "rn":
        return near
    back = near.cast("fpext", "f64")
    bits = near.bits("i32")
    negative = bits.cmp("slt", 0)
    too_big = back.call("fabs").cmp("ogt", value.call("fabs"))
    too_small = back.call("fabs").cmp("olt", value.call("fabs"))
    if mode == "odd":
        even = (bits & 1).eq(0)
        up, down = even & too_small, even & too_big
    elif mode == "rz":
        up, down = None, too_big
    else:
        grows = negative if mode == "rm" else ~negative
        up, down = too_small & grows, too_big & ~grows
    fixed = down.select(bits - 1, bits)
    if up is not None:
        fixed = up.select(bits + 1, fixed)
    return fixed.bits("f32")


def sum_odd(a: Val, b: Val) -> Val:
    """a + b in the type of its operands, rounded to odd; exact error by the two-sum."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    wide = f"i{a.width}"
    bits = total.bits(wide)
    even = (bits & 1).eq(0)
    toward = (error.bits(wide) ^ bits).cmp("slt", 0)  # the exact sum is nearer to zero
    step = toward.select(bits - 1, bits + 1)
    inexact = error.cmp("one", 0.0)  # false for NaN: infinities and NaN stay
    return (even & inexact).select(step, bits).bits(a.elem)


def add_rounded(a: Val, b: Val, mode: str) -> Val:
    """a + b of fp32 rounded `rz`, `rm` or `rp`: the nearest sum, moved by the sign of its error."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    bits = total.bits("i32")
    negative = bits.cmp("slt", 0)
    low, high = error.cmp("olt", 0.0), error.cmp("ogt", 0.0)  # neither for NaN and infinities
    sign = bits.ashr(31) | 1  # one step up in value is +1 on positive patterns, -1 on negative
    if mode == "rm":
        bits = low.select(bits - sign, bits)
    elif mode == "rp":
        bits = high.select(bits + sign, bits)
    else:
        bits = ((low & ~negative) | (high & negative)).select(bits - 1, bits)
    # A finite sum beyond the range becomes the largest number where that is the rounding's way.
    infinity = Bits(INF32)
    over = total.call("fabs").eq(infinity) & (
        a.call("fabs").cmp("olt", infinity) & b.call("fabs").cmp("olt", infinity)
    )
    over = over & ~negative if mode == "rm" else over & negative if mode == "rp" else over
    result = over.select(bits - 1, bits)
    if mode == "rm":  # an exact zero of operands of different signs is -0 there
        cancels = total.eq(0.0) & (a.bits("i32") ^ b.bits("i32")).cmp("slt", 0)
        result = cancels.select(-0x80000000, result)
    return result.bits("f32")


def fma_rounded(a: Val, b: Val, c: Val, mode: str) -> Val:
    """a * b + c of fp32 in any rounding, by fp64 rounded to odd."""
    product, c64 = a.cast("fpext", "f64") * b.cast("fpext", "f64"), c.cast("fpext", "f64")
    result = nearest_of(sum_odd(product, c64), mode)
    # An exact zero of operands of different signs is -0 in rm, +0 otherwise; fp64 gave +0.
    if mode == "rm":
        total = product + c64
        cancels = total.eq(0.0) & (product.bits("i64") ^ c64.bits("i64")).cmp("slt", 0)
        result = cancels.select(Bits(0x80000000), result)
    return result


def to_f32(x: Val) -> Val:
    if x.elem == "f32":
        return x
    if x.elem == "bf16":
        return x.bits("i16").int("i32").shl(16).bits("f32")
    return x.cast("fptrunc" if x.elem == "f64" else "fpext", "f32")


def to_bf16(x: Val, mode: str = "rn") -> Val:
    """fp32 -> bf16 bits in i32 (low half)."""
    bits = x.bits("i32")
    if mode == "rn":
        bits = bits + ((bits.lshr(16) & 1) + 0x7FFF)
    return x.isnan().select(0x7FFF, bits.lshr(16))


def to_f16(x: Val, mode: str = "rn") -> Val:
    """fp32 -> f16 bits in i32."""
    half = x.cast("fptrunc", "f16")
    bits = half.bits("i16")
    if mode == "rz":
        bits = (
            half.cast("fpext", "f32").call("fabs").cmp("ogt", x.call("fabs")).select(bits - 1, bits)
        )
    return x.isnan().select(0x7FFF, bits.int("i32"))


def round_int(x: Val, mode: str) -> Val:
    """To an integral value; `rni`, `rzi`, `rmi`, `rpi` (or the names without i)."""
    name = {"rn": "roundeven", "rz": "trunc", "rm": "floor", "rp": "ceil"}[mode[:2]]
    return x.call(name)


# ---- minimum and maximum ----


def min_max(a: Val, b: Val, kind: str, nan: bool = False) -> Val:
    """PTX min/max: -0 < +0, one NaN is ignored unless `nan`."""
    bits = f"i{a.width}"
    best = a.cmp("ogt" if kind == "max" else "olt", b)
    merged = a.bits(bits) & b.bits(bits) if kind == "max" else a.bits(bits) | b.bits(bits)
    result = best.select(a, a.eq(b).select(merged.bits(a.elem), b))
    if nan:
        return quiet(result, a, b)
    return quiet(b.isnan().select(a, result))


# ---- functions in fp64 ----

# 2^x on [-1/2, 1/2], interpolated at Chebyshev points: 1.1e-12 relative
_EXP2 = (
    1.0000000000000004,
    0.6931471805459332,
    0.24022650695814518,
    0.055504109412108156,
    0.009618129159053034,
    0.0013333450563173552,
    0.00015403456082633648,
    1.5310080611926545e-05,
    1.3255179556479267e-06,
)


def _horner(x: Val, coefficients) -> Val:
    result = x.f.lift(coefficients[-1], x.ty)
    for c in reversed(coefficients[:-1]):
        result = result.call("fma", x, x.f.lift(c, x.ty))
    return result


@prelude(vec("f64"))
def exp2_wide(f: Fn, x: Val) -> Val:
    """2^x to 1e-11 for any finite x that is no NaN; saturates far outside fp32."""
    x = x.cmp("ogt", 300.0).select(300.0, x)
    x = x.cmp("olt", -300.0).select(-300.0, x)
    shifted = x + _MAGIC
    whole = shifted - _MAGIC
    poly = _horner(x - whole, _EXP2)
    scale = (shifted.bits("i64") + 1023).shl(52).bits("f64")
    return poly * scale


@prelude()
def exp2(f: Fn, x: Val) -> Val:
    wide = f.call("exp2_wide", [x.cast("fpext", "f64")], vec("f64"))
    return x.isnan().select(Bits(NAN32), wide.cast("fptrunc", "f32"))


@prelude()
def log2(f: Fn, x: Val) -> Val:
    wide = x.cast("fpext", "f64").bits("i64")
    # x = 2^e * m with m in [sqrt(1/2), sqrt(2))
    shifted = wide - 0x3FE6A09E667F3BCD
    exponent = shifted.ashr(52)
    m = (wide - exponent.shl(52)).bits("f64")
    s = (m - 1.0) / (m + 1.0)
    square = s * s
    series = _horner(square, [2.8853900817779268 / (2 * k + 1) for k in range(9)])
    result = series.call("fma", s, exponent.int("i32").cast("sitofp", "f64")).cast("fptrunc", "f32")
    result = x.eq(Bits(INF32)).select(x, result)
    result = x.cmp("olt", 0.0).select(Bits(NAN32), result)
    result = x.eq(0.0).select(Bits(0xFF800000), result)
    return x.isnan().select(Bits(NAN32), result)


@prelude()
def reciprocal(f: Fn, x: Val) -> Val:
    return quiet(f.const(1.0, x.ty) / x)


@prelude()
def square_root(f: Fn, x: Val) -> Val:
    return quiet(x.call("sqrt"))


@prelude()
def reciprocal_root(f: Fn, x: Val) -> Val:
    root = x.cast("fpext", "f64").call("sqrt")
    return quiet((f.const(1.0, root.ty) / root).cast("fptrunc", "f32"))


@prelude()
def tanh(f: Fn, x: Val) -> Val:
    wide = x.cast("fpext", "f64")
    small = wide * _horner(wide * wide, (1.0, -1 / 3, 2 / 15, -17 / 315, 62 / 2835))
    clamped = wide.cmp("ogt", 20.0).select(20.0, wide)
    clamped = clamped.cmp("olt", -20.0).select(-20.0, clamped)
    power = f.call("exp2_wide", [clamped * 2.8853900817779268], vec("f64"))
    large = (power - 1.0) / (power + 1.0)
    result = wide.call("fabs").cmp("olt", 0.04).select(small, large).cast("fptrunc", "f32")
    return x.isnan().select(Bits(NAN32), result)


def _sin_cos(f: Fn, x: Val, shift: int) -> Val:
    wide = x.cast("fpext", "f64")
    turned = wide.call("fma", 0.6366197723675814, _MAGIC)
    whole = turned - _MAGIC
    r = whole.call("fma", -1.5707963267948966, wide)
    r = whole.call("fma", -6.123233995736766e-17, r)
    square = r * r
    sine = r * _horner(square, (1.0, -1 / 6, 1 / 120, -1 / 5040, 1 / 362880, -1 / 39916800))
    cosine = _horner(
        square, (1.0, -1 / 2, 1 / 24, -1 / 720, 1 / 40320, -1 / 3628800, 1 / 479001600)
    )
    quadrant = turned.bits("i64") + shift
    result = (quadrant & 1).ne(0).select(cosine, sine)
    result = (quadrant & 2).ne(0).select(-result, result).cast("fptrunc", "f32")
    return x.call("fabs").cmp("ult", Bits(INF32)).select(quiet(result), Bits(NAN32))


@prelude()
def sin(f: Fn, x: Val) -> Val:
    return _sin_cos(f, x, 0)


@prelude()
def cos(f: Fn, x: Val) -> Val:
    return _sin_cos(f, x, 1)


def apply(f: Fn, name: str, x: Val) -> Val:
    return f.call(name, [x], vec("f32"))
