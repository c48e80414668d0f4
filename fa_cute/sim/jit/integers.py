"""Integer and bit instructions."""

from __future__ import annotations

from fa_cute.sim.jit.ir import WIDTHS, Fn, Val
from fa_cute.sim.jit.registry import Form, Spec, Unsupported, int_type, op


def _simple(form: Form, arity: int, body, *mods: str) -> Spec:
    form.rest(form.type, *mods)
    elem, _ = int_type(form.type)

    def emit(f: Fn) -> None:
        f.out(0, body(*f.args(*range(1, arity + 1))))
        f.done()

    return Spec((f"={elem}", *[elem] * arity), emit)


def shift(kind: str, value: Val, count: Val) -> Val:
    """PTX shifts clamp the count at the width; `count` is i32 in every lane."""
    width = value.width
    count = count.call("umin", width - 1 if kind == "ashr" else width)
    inside = count.cmp("ult", width)
    wide = count.int(value.elem)
    safe = wide & (width - 1) if kind != "ashr" else wide
    result = value.binary(kind, safe)
    return result if kind == "ashr" else inside.select(result, 0)


@op("addc", "subc")
def with_carry(form: Form) -> Spec:
    """add.cc, addc{.cc} and their kin: a carry (or borrow) bit per lane lives in the context."""
    form.rest("cc", form.type)
    elem, _ = int_type(form.type)
    adds, takes = form.op.startswith("add"), form.op.endswith("c")
    if WIDTHS[elem] < 32:
        raise Unsupported(form.key)

    def emit(f: Fn) -> None:
        a, b = f.args(1, 2)
        carry = f.to_lanes(f.field("carry")).cast("zext", elem) if takes else None
        total = a + b if adds else a - b
        over = total.cmp("ult", a) if adds else a.cmp("ult", b)
        if takes:
            again = total + carry if adds else total - carry
            over = over | (again.cmp("ult", total) if adds else total.cmp("ult", carry))
            total = again
        f.out(0, total)
        if form.has("cc"):
            bits = f.to_mask(over)
            f.set_field("carry", (bits & f.mask) | (f.field("carry") & ~f.mask))
        f.done()

    return Spec((f"={elem}", elem, elem), emit)


def add_sub(form: Form) -> Spec:
    if form.has("cc"):
        return with_carry(form)
    signed = form.type[0] == "s"
    if form.has("sat"):
        if form.type not in ("s32", "u32", "s16x2", "u16x2"):
            raise Unsupported(".sat")
        name = f"{form.type[0]}{form.op}.sat"
        return _simple(form, 2, lambda a, b: a.call(name, b), "sat")
    if form.type in ("s16x2", "u16x2"):
        form.rest(form.type)
        return _packed(form, lambda a, b: a + b if form.op == "add" else a - b)
    del signed
    return _simple(form, 2, lambda a, b: a + b if form.op == "add" else a - b)


def _packed(form: Form, body) -> Spec:
    def emit(f: Fn) -> None:
        f.out(0, body(*f.args(1, 2)))
        f.done()

    return Spec(("=i16x2", "i16x2", "i16x2"), emit)


@op("mul24", "mad24")
def mul24(form: Form) -> Spec:
    elem, signed = int_type(form.type)
    form.rest("lo", "hi", form.type)
    addend = form.op == "mad24"

    def emit(f: Fn) -> None:
        a, b = (x.shl(8).ashr(8) if signed else x & 0xFFFFFF for x in f.args(1, 2))
        wide = a.int("i64", signed) * b.int("i64", signed)
        product = (wide.lshr(16) if form.has("hi") else wide).int("i32")
        f.out(0, product + f.arg(3) if addend else product)
        f.done()

    return Spec((f"={elem}", elem, elem, *([elem] if addend else [])), emit)


def mul_mad(form: Form) -> Spec:
    """mul/mad .lo .hi .wide of integers."""
    form.rest("lo", "hi", "wide", form.type)
    elem, signed = int_type(form.type)
    addend = form.op == "mad"
    width = WIDTHS[elem]
    if form.has("wide") and width == 64:
        raise Unsupported(".wide")
    double = f"i{2 * width}"
    dest = double if form.has("wide") else elem

    def emit(f: Fn) -> None:
        a, b = f.args(1, 2)
        if form.has("lo"):
            result = a * b
        elif form.has("wide"):
            result = a.int(double, signed) * b.int(double, signed)
        elif width == 64:
            result = mul_hi64(a, b, signed)
        else:
            product = a.int(double, signed) * b.int(double, signed)
            result = product.lshr(width).int(elem)
        f.out(0, result + f.arg(3) if addend else result)
        f.done()

    return Spec((f"={dest}", elem, elem, *([dest] if addend else [])), emit)


def mul_hi64(a: Val, b: Val, signed: bool) -> Val:
    """Upper 64 bits of a product, from 32-bit halves (no 128-bit vectors in the back ends)."""
    mask = 0xFFFFFFFF
    a0, a1, b0, b1 = a & mask, a.lshr(32), b & mask, b.lshr(32)
    low, mid1, mid2, high = a0 * b0, a1 * b0, a0 * b1, a1 * b1
    carry = (low.lshr(32) + (mid1 & mask) + (mid2 & mask)).lshr(32)
    result = high + mid1.lshr(32) + mid2.lshr(32) + carry
    if signed:
        result = result - (a.ashr(63) & b) - (b.ashr(63) & a)
    return result


def div_rem(form: Form) -> Spec:
    form.rest(form.type)
    elem, signed = int_type(form.type)

    def emit(f: Fn) -> None:
        a, b = f.args(1, 2)
        zero = b.eq(0)
        b = zero.select(1, b)
        if signed:  # the one overflowing quotient would trap: divide by 1 and negate instead
            minus = b.eq(-1)
            quotient = minus.select(-a, a.binary("sdiv", minus.select(1, b)))
        else:
            quotient = a.binary("udiv", b)
        if form.op == "div":
            f.out(0, zero.select(-1, quotient))
        else:
            f.out(0, zero.select(a, a - quotient * b))
        f.done()

    return Spec((f"={elem}", elem, elem), emit)


@op("and", "or", "xor")
def logic(form: Form) -> Spec:
    if form.type == "pred":
        form.rest("pred")

        def emit(f: Fn) -> None:
            a, b = f.args(1, 2)
            f.out(0, a.binary(form.op, b))
            f.done()

        return Spec(("=pred", "pred", "pred"), emit)
    return _simple(form, 2, lambda a, b: a.binary(form.op, b))


@op("not")
def not_(form: Form) -> Spec:
    if form.type == "pred":
        form.rest("pred")

        def emit(f: Fn) -> None:
            f.out(0, ~f.arg(1))
            f.done()

        return Spec(("=pred", "pred"), emit)
    return _simple(form, 1, lambda a: ~a)


@op("cnot")
def cnot(form: Form) -> Spec:
    return _simple(form, 1, lambda a: a.eq(0).select(1, a.f.lift(0, a.ty)))


@op("shl", "shr")
def shifts(form: Form) -> Spec:
    form.rest(form.type)
    elem, signed = int_type(form.type)
    kind = "shl" if form.op == "shl" else "ashr" if signed else "lshr"

    def emit(f: Fn) -> None:
        value, count = f.args(1, 2)
        f.out(0, shift(kind, value, count))
        f.done()

    return Spec((f"={elem}", elem, "i32"), emit)


@op("shf")
def funnel(form: Form) -> Spec:
    form.rest("l", "r", "clamp", "wrap", "b32")
    left = form.has("l")

    def emit(f: Fn) -> None:
        low, high, count = f.args(1, 2, 3)
        count = count & 31 if form.has("wrap") else count.call("umin", 32)
        both = high.int("i64").shl(32) | low.int("i64")
        count = count.int("i64")
        f.out(0, (both.shl(count).lshr(32) if left else both.lshr(count)).int("i32"))
        f.done()

    return Spec(("=i32", "i32", "i32", "i32"), emit)


@op("lop3")
def lop3(form: Form) -> Spec:
    form.rest("b32")

    def emit(f: Fn) -> None:
        a, b, c = f.args(1, 2, 3)
        table = f.splat(f.slot(4))
        result = None
        for index in range(8):  # minterm `index` of (a, b, c) is in the result if its bit is set
            term = (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
            term = term & table.shl(31 - index).ashr(31)
            result = term if result is None else result | term
        f.out(0, result)
        f.done()

    return Spec(("=i32", "i32", "i32", "i32", "imm"), emit)


@op("bfe")
def bfe(form: Form) -> Spec:
    form.rest(form.type)
    elem, signed = int_type(form.type)
    width = WIDTHS[elem]

    def emit(f: Fn) -> None:
        value, pos, length = f.arg(1), f.arg(2) & 0xFF, f.arg(3) & 0xFF
        shifted = shift("ashr" if signed else "lshr", value, pos)
        drop = length.call("umin", width)
        drop = f.const(width, drop.ty) - drop
        result = shift("ashr" if signed else "lshr", shift("shl", shifted, drop), drop)
        f.out(0, length.eq(0).select(0, result))
        f.done()

    return Spec((f"={elem}", elem, "i32", "i32"), emit)


@op("bfi")
def bfi(form: Form) -> Spec:
    form.rest("b32", "b64")
    elem, _ = int_type(form.type)

    def emit(f: Fn) -> None:
        insert, into, pos, length = f.arg(1), f.arg(2), f.arg(3) & 0xFF, f.arg(4) & 0xFF
        ones = ~shift("shl", f.const(-1, into.ty), length)
        mask = shift("shl", ones, pos)
        f.out(0, (shift("shl", insert, pos) & mask) | (into & ~mask))
        f.done()

    return Spec((f"={elem}", elem, elem, "i32", "i32"), emit)


@op("bmsk")
def bmsk(form: Form) -> Spec:
    form.rest("clamp", "wrap", "b32")

    def emit(f: Fn) -> None:
        pos, length = f.args(1, 2)
        if form.has("wrap"):
            pos, length = pos & 31, length & 31
        ones = ~shift("shl", f.const(-1, pos.ty), length)
        f.out(0, shift("shl", ones, pos))
        f.done()

    return Spec(("=i32", "i32", "i32"), emit)


@op("szext")
def szext(form: Form) -> Spec:
    form.rest("clamp", "wrap", form.type)
    _, signed = int_type(form.type)

    def emit(f: Fn) -> None:
        value, size = f.args(1, 2)
        if form.has("wrap"):
            size = size & 31
        drop = f.const(32, size.ty) - size.call("umin", 32)
        kept = shift("ashr" if signed else "lshr", shift("shl", value, drop), drop)
        f.out(0, size.eq(0).select(0, kept))
        f.done()

    return Spec(("=i32", "i32", "i32"), emit)


def permute(a: Val, b: Val, nibble: list[Val]) -> Val:
    """Bytes of (b, a) picked by selectors whose bit 3 replicates the byte's sign."""
    both = b.int("i64").shl(32) | a.int("i64")
    result = None
    for index, pick in enumerate(nibble):
        byte = both.lshr((pick & 7).shl(3).int("i64")).int("i32") & 0xFF
        sign = byte.shl(24).ashr(31) & 0xFF
        byte = (pick & 8).ne(0).select(sign, byte).shl(8 * index)
        result = byte if result is None else result | byte
    return result


_PRMT = {  # selectors of byte 0..3 for c & 3 = 0..3
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}


@op("prmt")
def prmt(form: Form) -> Spec:
    form.rest("b32", *_PRMT)
    mode = form.type if form.type in _PRMT else None

    def emit(f: Fn) -> None:
        a, b, c = f.args(1, 2, 3)
        if mode:
            which = c & 3
            pattern = f.const(_PRMT[mode][0], c.ty)
            for value in (1, 2, 3):
                pattern = which.eq(value).select(_PRMT[mode][value], pattern)
            c = pattern
        f.out(0, permute(a, b, [c.lshr(4 * i) & 15 for i in range(4)]))
        f.done()

    return Spec(("=i32", "i32", "i32", "i32"), emit)


@op("popc", "clz", "brev", "bfind")
def count_bits(form: Form) -> Spec:
    form.rest("shiftamt", form.type)
    elem, signed = int_type(form.type)
    dest = elem if form.op == "brev" else "i32"

    def emit(f: Fn) -> None:
        a = f.arg(1)
        flag = "<{is_zero_poison = false}>"
        if form.op == "popc":
            result = a.call("ctpop")
        elif form.op == "brev":
            result = a.call("bitreverse")
        else:
            if form.op == "bfind" and signed:
                a = a ^ a.ashr(a.width - 1)
            result = f.intrinsic("ctlz", [a], a.ty, flag)
        result = result.int(dest)
        if form.op == "bfind":
            missing = result.eq(a.width)
            if not form.has("shiftamt"):
                result = f.const(a.width - 1, result.ty) - result
            result = missing.select(-1, result)
        f.out(0, result)
        f.done()

    return Spec((f"={dest}", elem), emit)


def int_min_max(form: Form) -> Spec:
    form.rest(form.type, "relu")
    packed = form.type.endswith("x2")
    _, signed = int_type(form.type[:3] if packed else form.type)
    name = ("s" if signed else "u") + form.op

    def body(a: Val, b: Val) -> Val:
        result = a.call(name, b)
        return result.call("smax", 0) if form.has("relu") else result

    return _packed(form, body) if packed else _simple(form, 2, body, "relu")


def int_abs_neg(form: Form) -> Spec:
    if form.op == "neg":
        return _simple(form, 1, lambda a: -a)
    return _simple(form, 1, lambda a: a.cmp("slt", 0).select(-a, a))


@op("sad")
def sad(form: Form) -> Spec:
    _, signed = int_type(form.type)
    less = "slt" if signed else "ult"
    return _simple(form, 3, lambda a, b, c: c + a.cmp(less, b).select(b - a, a - b))


@op("dp4a")
def dp4a(form: Form) -> Spec:
    form.rest("u32", "s32")

    def emit(f: Fn) -> None:
        a, b, total = f.args(1, 2, 3)
        for index in range(4):
            x, y = a.shl(24 - 8 * index), b.shl(24 - 8 * index)
            x = x.ashr(24) if form.parts[1] == "s32" else x.lshr(24)
            y = y.ashr(24) if form.parts[2] == "s32" else y.lshr(24)
            total = total + x * y
        f.out(0, total)
        f.done()

    return Spec(("=i32", "i32", "i32", "i32"), emit)
