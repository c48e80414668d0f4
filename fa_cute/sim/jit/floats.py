"""Floating-point arithmetic."""

from __future__ import annotations

from fa_cute.sim.jit import integers, math
from fa_cute.sim.jit.ir import PACKED, Bits, Fn, Val, vec
from fa_cute.sim.jit.registry import INT_TYPES, Form, Spec, Unsupported, float_type, op

ROUNDINGS = ("rn", "rz", "rm", "rp")
SMALL = ("f16", "bf16")


def base_elem(name: str) -> str:
    return PACKED[name][0] if name in PACKED else name


def rounding(form: Form) -> str:
    for mode in ROUNDINGS:
        if form.has(mode):
            return mode
    return "rn"


def clean(form: Form, result: Val) -> Val:
    """.relu, .sat and .ftz of a result."""
    if form.has("relu"):
        result = result.isnan().select(
            Bits({"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF}[result.elem]),
            result.cmp("ogt", 0.0).select(result, 0.0),
        )
    if form.has("sat"):
        zero, one = (result.f.const(v, result.ty) for v in (0.0, 1.0))
        result = result.cmp("ogt", zero).select(result, zero)  # NaN becomes +0
        result = result.cmp("olt", one).select(result, one)
    if form.has("ftz") and result.elem in ("f32", "f16"):
        result = math.flush(result)
    return result


def narrow(f: Fn, value: Val, elem: str) -> Val:
    """fp32 to the element of a small type, as a value of that element."""
    if elem == "f32":
        return value
    bits = math.to_bf16(value) if elem == "bf16" else math.to_f16(value)
    return bits.int("i16").bits(elem)


def _fma_small(a: Val, b: Val, c: Val) -> Val:
    """One rounding of a*b+c for f16/bf16: to odd in a wider type first."""
    if a.elem == "f16":  # the product is exact in fp32
        wide = [math.to_f32(x) for x in (a, b, c)]
        return math.sum_odd(wide[0] * wide[1], wide[2])
    wide = [math.to_f32(x).cast("fpext", "f64") for x in (a, b, c)]
    return math.nearest_of(math.sum_odd(wide[0] * wide[1], wide[2]), "odd")


def combine(form: Form, kind: str, args: list[Val]) -> Val:
    """add, sub, mul, fma of one element type."""
    mode, elem = rounding(form), args[0].elem
    f = args[0].f
    if form.has("ftz"):
        args = [math.flush(a) for a in args]
    if elem in SMALL:
        if mode != "rn":
            raise Unsupported(f".{mode}")
        if kind == "fma":
            wide = _fma_small(*args)
        else:
            a, b = (math.to_f32(x) for x in args)
            wide = a + b if kind == "add" else a - b if kind == "sub" else a * b
        return clean(form, narrow(f, wide, elem))
    if elem == "f64" and mode != "rn":
        raise Unsupported(f".{mode}.f64")
    if mode == "rn":
        if kind == "fma":
            result = args[0].call("fma", args[1], args[2])
        else:
            a, b = args
            result = a + b if kind == "add" else a - b if kind == "sub" else a * b
    elif kind == "fma":
        result = math.fma_rounded(*args, mode)
    elif kind == "mul":
        a, b = (x.cast("fpext", "f64") for x in args)
        result = math.nearest_of(a * b, mode)
    else:
        a, b = args
        result = math.add_rounded(a, b if kind == "add" else -b, mode)
    return clean(form, result)


def _mixed(form: Form, kind: str) -> Spec:
    """fma.rn.f32.bf16 d32, a16, b16, c32 and add.f32.bf16 d32, a16, c32."""
    small = form.type
    form.rest(*ROUNDINGS, "ftz", "sat", "f32", small)
    kinds = {"fma": (small, small, "f32"), "add": (small, "f32"), "sub": (small, "f32")}[kind]

    def emit(f: Fn) -> None:
        args = [math.to_f32(a) for a in f.args(*range(1, len(kinds) + 1))]
        f.out(0, combine(form, kind, args))
        f.done()

    return Spec(("=f32", *kinds), emit)


@op("add", "sub", "mul", "fma", "mad")
def arithmetic(form: Form) -> Spec:
    kind = form.op
    if form.type in INT_TYPES or form.type in ("s16x2", "u16x2"):
        if kind in ("add", "sub"):
            return integers.add_sub(form)
        if kind == "fma":
            raise Unsupported("integer fma")
        return integers.mul_mad(form)
    if kind == "mad":
        kind = "fma"
    name = float_type(form.type)
    if name in SMALL and len(form.parts) > 2 and form.parts[-2] == "f32":
        return _mixed(form, kind)
    form.rest(*ROUNDINGS, "ftz", "sat", "relu", name)
    arity = 3 if kind == "fma" else 2

    def emit(f: Fn) -> None:
        f.out(0, combine(form, kind, f.args(*range(1, arity + 1))))
        f.done()

    return Spec((f"={name}", *[name] * arity), emit)


@op("div", "rem")
def divide(form: Form) -> Spec:
    if form.type in INT_TYPES:
        return integers.div_rem(form)
    form.rest("rn", "full", "approx", "ftz", form.type)
    name = float_type(form.type)
    if form.op == "rem" or name not in ("f32", "f64"):
        raise Unsupported(form.op)

    def emit(f: Fn) -> None:
        a, b = f.args(1, 2)
        if form.has("ftz"):
            a, b = math.flush(a), math.flush(b)
        f.out(0, clean(form, a / b))
        f.done()

    return Spec((f"={name}", name, name), emit)


@op("min", "max", counted=True)
def minimum(form: Form) -> Spec:
    if form.type not in ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2"):
        return integers.int_min_max(form)
    name = form.type
    form.rest("ftz", "NaN", "xorsign", "abs", name)
    arity = form.count - 1
    elem = base_elem(name)

    def pick(a: Val, b: Val) -> Val:
        if form.has("xorsign"):
            bits = f"i{a.width}"
            sign = (a.bits(bits) ^ b.bits(bits)) & (1 << (a.width - 1))
            best = math.min_max(a.call("fabs"), b.call("fabs"), form.op, form.has("NaN"))
            return (best.bits(bits) | sign).bits(a.elem)
        if form.has("abs"):
            a, b = a.call("fabs"), b.call("fabs")
        return math.min_max(a, b, form.op, form.has("NaN"))

    def emit(f: Fn) -> None:
        args = f.args(*range(1, arity + 1))
        if form.has("ftz"):
            args = [math.flush(a) for a in args]
        if elem in SMALL:
            args = [math.to_f32(a) for a in args]
        result = args[0]
        for other in args[1:]:
            result = pick(result, other)
        f.out(0, narrow(f, result, elem))
        f.done()

    return Spec((f"={name}", *[name] * arity), emit)


@op("abs", "neg")
def sign(form: Form) -> Spec:
    if form.type in INT_TYPES:
        return integers.int_abs_neg(form)
    name = float_type(form.type)
    form.rest("ftz", name)
    bits_name = {"f16": "i16", "bf16": "i16", "f16x2": "i16x2", "bf16x2": "i16x2"}.get(name)

    def emit(f: Fn) -> None:
        a = f.arg(1)
        if bits_name:
            a = a & 0x7FFF if form.op == "abs" else a ^ 0x8000
        else:
            if form.has("ftz"):
                a = math.flush(a)
            a = a.call("fabs") if form.op == "abs" else -a
        f.out(0, a)
        f.done()

    kind = bits_name or name
    return Spec((f"={kind}", kind), emit)


_UNARY = {
    "ex2": "exp2",
    "lg2": "log2",
    "rcp": "reciprocal",
    "rsqrt": "reciprocal_root",
    "sqrt": "square_root",
    "tanh": "tanh",
    "sin": "sin",
    "cos": "cos",
}


@op(*_UNARY)
def unary(form: Form) -> Spec:
    name = form.type
    if name not in ("f32", "f16", "bf16", "f16x2", "bf16x2", "f64"):
        raise Unsupported(f".{name}")
    form.rest("approx", "rn", "ftz", name)
    function = _UNARY[form.op]
    elem = base_elem(name)
    if name == "f64":
        return _unary_f64(form)

    def one(f: Fn, x: Val) -> Val:
        x = math.to_f32(x)
        if form.has("ftz"):
            x = math.flush(x)
        result = f.call(function, [x], vec("f32"))
        if form.has("ftz"):
            result = math.flush(result)
        return narrow(f, result, elem)

    def emit(f: Fn) -> None:
        if name in PACKED:
            both = f.arg(1)
            low, high = (one(f, (both.lshr(s)).int("i16").bits(elem)) for s in (0, 16))
            low, high = (x.bits("i16").int("i32") for x in (low, high))
            f.out(0, low | high.shl(16))
        else:
            f.out(0, one(f, f.arg(1)))
        f.done()

    kind = "i32" if name in PACKED else name
    return Spec((f"={kind}", kind), emit)


def _unary_f64(form: Form) -> Spec:
    if form.op not in ("rcp", "sqrt", "rsqrt"):
        raise Unsupported(".f64")

    def emit(f: Fn) -> None:
        x = f.arg(1)
        if form.op != "rcp":
            x = x.call("sqrt")
        f.out(0, x if form.op == "sqrt" else f.const(1.0, x.ty) / x)
        f.done()

    return Spec(("=f64", "f64"), emit)


@op("copysign")
def copysign(form: Form) -> Spec:
    name = float_type(form.type)
    form.rest(name)

    def emit(f: Fn) -> None:
        a, b = f.args(1, 2)
        f.out(0, b.call("copysign", a))  # PTX takes the sign of its first operand
        f.done()

    return Spec((f"={name}", name, name), emit)


@op("testp")
def testp(form: Form) -> Spec:
    name = float_type(form.type)
    form.rest("finite", "infinite", "number", "notanumber", "normal", "subnormal", name)

    def emit(f: Fn) -> None:
        x = f.arg(1)
        size = x.call("fabs")
        infinity, tiny = {
            "f32": (Bits(0x7F800000), Bits(0x00800000)),
            "f64": (Bits(0x7FF << 52), Bits(1 << 52)),
        }[name]
        finite = size.cmp("olt", infinity)
        f.out(
            0,
            {
                "finite": lambda: finite,
                "infinite": lambda: size.eq(infinity),
                "number": lambda: x.cmp("ord", x),
                "notanumber": lambda: x.isnan(),
                "normal": lambda: finite & size.cmp("oge", tiny),
                "subnormal": lambda: size.cmp("olt", tiny) & size.cmp("ogt", 0.0),
            }[form.mods[0]](),
        )
        f.done()

    return Spec(("=pred", name), emit)
