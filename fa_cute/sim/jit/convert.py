"""cvt: between integers and floats, roundings, packs of two, 8-, 6- and 4-bit floats."""

from __future__ import annotations

from dataclasses import dataclass

from fa_cute.sim.jit import math
from fa_cute.sim.jit.floats import ROUNDINGS, narrow
from fa_cute.sim.jit.ir import Bits, Fn, Val
from fa_cute.sim.jit.registry import INT_TYPES, Form, Spec, Unsupported, op

FLOATS = ("f16", "bf16", "f32", "f64")
_INT_ROUNDINGS = ("rni", "rzi", "rmi", "rpi")


@dataclass(frozen=True)
class SmallFloat:
    """A format below 16 bits: `max_code` is its largest finite value without the sign."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_code: int
    nan_code: int | None
    has_inf: bool

    @property
    def width(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits


SMALL_FLOATS = {
    "e4m3": SmallFloat(4, 3, 7, 0x7E, 0x7F, False),
    "e5m2": SmallFloat(5, 2, 15, 0x7B, 0x7F, True),
    "e2m3": SmallFloat(2, 3, 1, 0x1F, None, False),
    "e3m2": SmallFloat(3, 2, 3, 0x1F, None, False),
    "e2m1": SmallFloat(2, 1, 1, 0x07, None, False),
}


def encode_small(x: Val, fmt: SmallFloat, relu: bool) -> Val:
    """fp32 to a small float with saturation, round to nearest even; the code in i32."""
    f = x.f
    bits = x.bits("i32")
    sign = bits.lshr(31).shl(fmt.width - 1)
    size = bits & 0x7FFFFFFF
    # Normal results: drop mantissa bits with round-to-even on the pattern, then rebias.
    drop = 23 - fmt.mantissa_bits
    rounded = size + ((size.lshr(drop) & 1) + ((1 << (drop - 1)) - 1))
    normal = rounded.lshr(drop) - ((127 - fmt.bias) << fmt.mantissa_bits)
    # Subnormal results: adding 2^k aligns the last mantissa bit of fp32 with the format's.
    smallest = 1 - fmt.bias  # exponent of the least normal number
    aligner = float(2.0 ** (23 + smallest - fmt.mantissa_bits))
    aligned = size.bits("f32") + aligner
    subnormal = aligned.bits("i32") - f.const(aligner, x.ty).bits("i32")
    is_small = size.cmp("ult", (smallest + 127) << 23)
    code = is_small.select(subnormal, normal)
    code = code.call("smin", fmt.max_code)
    code = size.cmp("uge", 0x7F800000).select(fmt.max_code, code) | sign
    nan = fmt.nan_code if fmt.nan_code is not None else fmt.max_code
    if relu:
        code = bits.cmp("slt", 0).select(0, code)
    return x.isnan().select(nan, code)


def decode_small(code: Val, fmt: SmallFloat) -> Val:
    """A small float's code in i32 to fp32."""
    mantissa = fmt.mantissa_bits
    sign = code.lshr(fmt.width - 1).shl(31)
    size = code & ((1 << (fmt.width - 1)) - 1)
    normal = size.shl(23 - mantissa) + ((127 - fmt.bias) << 23)
    tiny = size.cast("uitofp", "f32") * float(2.0 ** (1 - fmt.bias - mantissa))
    value = size.cmp("ult", 1 << mantissa).select(tiny.bits("i32"), normal)
    if fmt.has_inf:
        top = ((1 << fmt.exponent_bits) - 1) << mantissa
        value = size.eq(top).select(0x7F800000, value)
        value = size.cmp("ugt", top).select(0x7FFFFFFF, value)
    elif fmt.nan_code is not None:
        value = size.eq(fmt.nan_code).select(0x7FFFFFFF, value)
    return (value | sign).bits("f32")


def pack_half(x: Val, name: str, form: Form) -> Val:
    """fp32 to the bits of f16/bf16 in i32, with .rz, .relu and .satfinite."""
    mode = "rz" if form.has("rz") else "rn"
    bits = math.to_bf16(x, mode) if name == "bf16" else math.to_f16(x, mode)
    if form.has("satfinite"):
        infinity = 0x7F80 if name == "bf16" else 0x7C00
        bits = (bits & 0x7FFF).eq(infinity).select(bits - 1, bits)
    if form.has("relu"):
        bits = (bits & 0x8000).ne(0).select(0, bits)
    return bits


def _stochastic(x: Val, noise: Val, name: str, form: Form) -> Val:
    """.rs: add random bits below the kept mantissa, then truncate."""
    drop = 16 if name == "bf16" else 13
    bits = x.bits("i32")
    finite = (bits & 0x7FFFFFFF).cmp("ult", 0x7F800000)
    bits = finite.select((bits + (noise & ((1 << drop) - 1))) & -(1 << drop), bits)
    return pack_half(bits.bits("f32"), name, Form((*form.parts, "rz"), 0))


def _pack(form: Form, name: str) -> Spec:
    """cvt.rn.{bf16x2,f16x2}.f32 d, a, b: a to the upper half."""
    form.rest("rn", "rz", "rs", "relu", "satfinite", f"{name}x2", "f32")
    noisy = form.has("rs")

    def emit(f: Fn) -> None:
        a, b = f.args(1, 2)
        if noisy:
            noise = f.arg(3)
            high, low = (
                _stochastic(a, noise.lshr(16), name, form),
                _stochastic(b, noise, name, form),
            )
        else:
            high, low = pack_half(a, name, form), pack_half(b, name, form)
        f.out(0, high.shl(16) | low)
        f.done()

    return Spec(("=i32", "f32", "f32", *(["i32"] if noisy else [])), emit)


def _pack_small(form: Form, name: str, source: str) -> Spec:
    """Two fp32 (or one packed pair) to a pair of small floats; a to the upper element."""
    form.rest("rn", "rz", "rp", "relu", "satfinite", f"{name}x2", source)
    if name == "ue8m0":
        return _pack_scale(form, source)
    fmt = SMALL_FLOATS[name]
    relu = form.has("relu")
    step = 4 if fmt.width == 4 else 8
    dest = "i8" if fmt.width == 4 else "i16"

    def emit(f: Fn) -> None:
        if source == "f32":
            high, low = f.args(1, 2)
        else:
            high, low = _unpair(f.arg(1), source[:-2])
        code = encode_small(high, fmt, relu).shl(step) | encode_small(low, fmt, relu)
        f.out(0, code)
        f.done()

    return Spec((f"={dest}", *(["f32", "f32"] if source == "f32" else ["i32"])), emit)


def _unpair(both: Val, name: str) -> tuple[Val, Val]:
    """(upper, lower) element of a packed pair as fp32."""
    return tuple(math.to_f32(both.lshr(s).int("i16").bits(name)) for s in (16, 0))


def _pack_scale(form: Form, source: str) -> Spec:
    """ue8m0x2: powers of two, rounded to zero or up; NaN is 0xFF."""

    def one(x: Val) -> Val:
        bits = x.bits("i32") & 0x7FFFFFFF
        if form.has("rp"):
            bits = bits + 0x7FFFFF
        code = bits.lshr(23)
        code = code.call("umin", 0xFE)
        return x.isnan().select(0xFF, code)

    def emit(f: Fn) -> None:
        high, low = f.args(1, 2) if source == "f32" else _unpair(f.arg(1), source[:-2])
        f.out(0, one(high).shl(8) | one(low))
        f.done()

    return Spec(("=i16", *(["f32", "f32"] if source == "f32" else ["i32"])), emit)


def _unpack_small(form: Form, dest: str, name: str) -> Spec:
    """cvt.rn.f16x2.e4m3x2 and its kin; cvt.rn.bf16x2.ue8m0x2."""
    form.rest("rn", "relu", dest, f"{name}x2")
    width = 4 if name == "e2m1" else 8
    source = "i8" if width == 4 else "i16"

    def one(f: Fn, code: Val) -> Val:
        if name == "ue8m0":
            value = code.eq(0xFF).select(0x7FFFFFFF, code.eq(0).select(0x400000, code.shl(23)))
            value = value.bits("f32")
        else:
            value = decode_small(code, SMALL_FLOATS[name])
        half = Form((*form.parts, "rn"), 0)
        return pack_half(value, dest[:-2], half)

    def emit(f: Fn) -> None:
        both = f.arg(1).int("i32")
        mask = (1 << width) - 1
        f.out(0, one(f, both & mask) | one(f, both.lshr(width) & mask).shl(16))
        f.done()

    return Spec(("=i32", source), emit)


@op("cvt", sized=True)
def cvt(form: Form) -> Spec:
    dest, source = form.parts[-2], form.parts[-1]
    small = {n + "x2": n for n in (*SMALL_FLOATS, "ue8m0")}
    if dest in ("f16x2", "bf16x2") and source == "f32":
        return _pack(form, dest[:-2])
    if dest in small:
        return _pack_small(form, small[dest], source)
    if source in small:
        return _unpack_small(form, dest, small[source])
    if dest == "tf32":
        return _to_tf32(form)
    known = (*INT_TYPES, *FLOATS)
    if dest not in known or source not in known:
        raise Unsupported(form.key)
    form.rest(*ROUNDINGS, *_INT_ROUNDINGS, "ftz", "sat", "relu", "satfinite", dest, source)
    return _plain(form, dest, source)


def _to_tf32(form: Form) -> Spec:
    form.rest("rna", "rn", "rz", "relu", "satfinite", "tf32", "f32")

    def emit(f: Fn) -> None:
        x = f.arg(1)
        bits = x.bits("i32")
        if form.has("rna"):
            rounded = bits + 0x1000
        elif form.has("rn"):
            rounded = bits + ((bits.lshr(13) & 1) + 0xFFF)
        else:
            rounded = bits
        rounded = rounded & ~0x1FFF
        if form.has("satfinite"):
            rounded = (rounded & 0x7FFFFFFF).eq(0x7F800000).select(rounded - 0x2000, rounded)
        if form.has("relu"):
            rounded = bits.cmp("slt", 0).select(0, rounded)
        f.out(0, x.isnan().select(0x7FFFFFFF, rounded))
        f.done()

    return Spec(("=i32", "f32"), emit)


def _int_range(name: str) -> tuple[int, int]:
    width = int(name[1:])
    return (
        (-(1 << (width - 1)), (1 << (width - 1)) - 1) if name[0] == "s" else (0, (1 << width) - 1)
    )


def _container(form: Form, dest: str) -> str:
    """The destination register may be wider than the type; then the value is extended."""
    width = form.bits[0] if form.bits and form.bits[0] else int(dest[1:])
    return f"=i{max(width, int(dest[1:]), 16)}"


def _plain(form: Form, dest: str, source: str) -> Spec:
    to_int, from_int = dest in INT_TYPES, source in INT_TYPES
    source_kind = INT_TYPES[source][0] if from_int else source
    if to_int:
        kind = _container(form, dest)

        def emit(f: Fn) -> None:
            x = f.arg(1)
            value = _int_to_int(form, x, dest, source) if from_int else _float_to_int(form, x, dest)
            signed = dest[0] == "s"
            f.out(0, value.int(INT_TYPES[dest][0]).int(kind[1:], signed))
            f.done()

        return Spec((kind, source_kind), emit)

    def emit_float(f: Fn) -> None:
        x = f.arg(1)
        value = _int_to_float(form, x, dest, source) if from_int else _float_to_float(form, x, dest)
        f.out(0, value)
        f.done()

    return Spec((f"={dest}", source_kind), emit_float)


def _int_to_int(form: Form, x: Val, dest: str, source: str) -> Val:
    signed = source[0] == "s"
    if not form.has("sat"):
        return x.int(INT_TYPES[dest][0], signed) if int(dest[1:]) >= x.width else x
    wide = x.int("i64", signed)
    low, high = _int_range(dest)
    if signed or source != "u64":
        return wide.call("smax", max(low, -(1 << 63))).call("smin", min(high, (1 << 63) - 1))
    return wide.call("umin", high)


def _float_to_int(form: Form, x: Val, dest: str) -> Val:
    mode = next((m for m in _INT_ROUNDINGS if form.has(m)), None)
    if mode is None:
        raise Unsupported("cvt to an integer without rounding")
    source = x.elem
    wide = x if source == "f64" else math.to_f32(x)
    if form.has("ftz"):
        wide = math.flush(wide)
    wide = wide if source == "f64" else wide.cast("fpext", "f64")
    nan = wide.isnan()
    low, high = _int_range(dest)
    value = math.round_int(wide, mode)
    under, over = value.cmp("ole", float(low)), value.cmp("oge", float(high))
    inside = nan.select(0.0, under.select(0.0, over.select(0.0, value)))
    signed = dest[0] == "s"
    if int(dest[1:]) < 64:  # fits in i64, but i32 conversions are the vector ones
        elem = "i32" if dest != "u32" else "i64"
        result = inside.cast("fptosi", elem)
    else:
        result = inside.cast("fptosi" if signed else "fptoui", "i64")
    result = over.select(high, under.select(low, result))
    # NaN gives 0; conversions that involve 64 bits give the pattern 1000...0 instead.
    if source == "f64" or int(dest[1:]) == 64:
        pattern = 1 << (int(dest[1:]) - 1)
        result = nan.select(pattern, result)
    return result


def _int_to_float(form: Form, x: Val, dest: str, source: str) -> Val:
    signed = source[0] == "s"
    kind = "sitofp" if signed else "uitofp"
    mode = next((m for m in ROUNDINGS if form.has(m)), "rn")
    if dest == "f64":
        if x.width == 64 and mode != "rn":
            raise Unsupported(form.key)
        return x.cast(kind, "f64")
    if x.width <= 32:
        exact = x.int("i32", signed).cast(kind, "f64")
        if dest == "f32":
            return math.nearest_of(exact, mode)
        if mode != "rn":
            raise Unsupported(form.key)
        return narrow(x.f, math.nearest_of(exact, "odd"), dest)
    if mode != "rn" or dest != "f32":
        raise Unsupported(form.key)
    return x.cast(kind, "f32")


def _float_to_float(form: Form, x: Val, dest: str) -> Val:
    source = x.elem
    mode = next((m for m in ROUNDINGS if form.has(m)), "rn")
    to_integral = next((m for m in _INT_ROUNDINGS if form.has(m)), None)
    if form.has("ftz") and source == "f32":
        x = math.flush(x)
    if to_integral:
        x = math.round_int(math.to_f32(x) if source == "bf16" else x, to_integral)
    if dest == "f64":
        result = x if x.elem == "f64" else math.to_f32(x).cast("fpext", "f64")
    elif dest == "f32":
        result = math.nearest_of(x, mode) if x.elem == "f64" else math.to_f32(x)
        if source in ("f16", "f64"):  # bf16 is a shift: the bits of a NaN stay
            result = math.quiet(result)
    else:
        single = math.nearest_of(x, "odd") if x.elem == "f64" else math.to_f32(x)
        if mode not in ("rn", "rz"):
            raise Unsupported(f".{mode}")
        return pack_half(single, dest, form).int("i16").bits(dest)
    f = x.f
    if form.has("sat"):
        zero, one = f.const(0.0, result.ty), f.const(1.0, result.ty)
        result = result.cmp("ogt", zero).select(result, zero)
        result = result.cmp("olt", one).select(result, one)
    if form.has("relu"):
        result = result.isnan().select(Bits(0x7FFFFFFF), result.cmp("ogt", 0.0).select(result, 0.0))
    if form.has("ftz") and dest == "f32":
        result = math.flush(result)
    return result
