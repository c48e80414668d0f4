"""Data movement between registers, comparisons and selection."""

from __future__ import annotations

from fa_cute.sim.jit import math
from fa_cute.sim.jit.context import SHARED_WINDOW
from fa_cute.sim.jit.ir import WIDTHS, Fn, Val
from fa_cute.sim.jit.registry import FLOAT_TYPES, INT_TYPES, Form, Spec, Unsupported, op


def _raw(name: str) -> str:
    """Integer element of the width of a type (packed pairs count as one register)."""
    if name in INT_TYPES:
        return INT_TYPES[name][0]
    width = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64, "f16x2": 32, "bf16x2": 32, "f32x2": 64}
    if name not in width:
        raise Unsupported(f".{name}")
    return f"i{width[name]}"


@op("mov", counted=True, sized=True)
def mov(form: Form) -> Spec:
    """Plain moves, and packing of 2 or 4 registers into one or out of one."""
    form.rest(form.type)
    if form.type == "pred":

        def copy_pred(f: Fn) -> None:
            f.out(0, f.arg(1))
            f.done()

        return Spec(("=pred", "pred"), copy_pred)
    if form.type == "b128":
        return _mov_b128(form)
    whole = _raw(form.type)
    if form.count == 2:

        def copy(f: Fn) -> None:
            f.out(0, f.arg(1))
            f.done()

        return Spec((f"={whole}", whole), copy)
    pieces = form.count - 1
    width = WIDTHS[whole] // pieces
    piece = f"i{width}"
    if WIDTHS[whole] % pieces or width not in (8, 16, 32):
        raise Unsupported(f"{pieces} pieces")
    if form.bits[0] == WIDTHS[whole] and form.bits[-1] != WIDTHS[whole]:

        def pack(f: Fn) -> None:
            result = None
            for index in range(pieces):
                part = f.arg(1 + index).int(whole).shl(width * index)
                result = part if result is None else result | part
            f.out(0, result)
            f.done()

        return Spec((f"={whole}", *[piece] * pieces), pack)

    def unpack(f: Fn) -> None:
        value = f.arg(pieces)
        for index in range(pieces):
            f.out(index, value.lshr(width * index).int(piece))
        f.done()

    return Spec((*[f"={piece}"] * pieces, whole), unpack)


def _mov_b128(form: Form) -> Spec:
    """A .b128 register is two consecutive rows, which the encoder passes as two operands."""
    if form.count != 4:
        raise Unsupported("b128")

    def copy(f: Fn) -> None:
        low, high = f.args(2, 3)
        f.out(0, low)
        f.out(1, high)
        f.done()

    return Spec(("=i64", "=i64", "i64", "i64"), copy)


@op("cvta")
def cvta(form: Form) -> Spec:
    form.rest(
        "to", "global", "shared", "shared::cta", "shared::cluster", "param", "local", "const", "u64"
    )
    space = form.mods[-2].split("::")[0]
    to = form.has("to")

    def emit(f: Fn) -> None:
        value = f.arg(1)
        if space == "shared":
            tag = SHARED_WINDOW << 60
            value = value & ~tag if to else value | tag
        elif space == "local":
            value = value & ~(2 << 60) if to else value | (2 << 60)
        elif space == "param":
            base = f.splat(f.field("params"))
            value = value - base if to else value + base
        f.out(0, value)
        f.done()

    if form.type != "u64":
        raise Unsupported(f".{form.type}")
    return Spec(("=i64", "i64"), emit)


@op("mapa", "getctarank")
def cluster_address(form: Form) -> Spec:
    form.rest("shared::cluster", "u32", "u64")
    elem = INT_TYPES[form.type][0]
    window = 0 if form.has("shared::cluster") else SHARED_WINDOW << 60

    def map_to(f: Fn) -> None:
        address, rank = f.args(1, 2)
        f.out(0, (address & 0xFFFFFF) | rank.int(elem).shl(24) | window)
        f.done()

    def rank_of(f: Fn) -> None:
        f.out(0, (f.arg(1).lshr(24) & 0xFF).int("i32"))
        f.done()

    if form.op == "mapa":
        return Spec((f"={elem}", elem, "i32"), map_to)
    return Spec(("=i32", elem), rank_of)


@op("isspacep")
def isspacep(form: Form) -> Spec:
    space = form.mods[0].split("::")[0]
    form.rest("shared", "shared::cta", "shared::cluster", "global", "local", "const", "param")

    def emit(f: Fn) -> None:
        window = f.arg(1).lshr(60)
        if space in ("const", "param"):
            f.out(0, f.const(0, "i32"))
        else:
            f.out(0, window.eq({"global": 0, "shared": 1, "local": 2}[space]))
        f.done()

    return Spec(("=pred", "i64"), emit)


_INT_TESTS = {"eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge"}
_INT_TESTS |= {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_FLOAT_TESTS = {"eq": "oeq", "ne": "one", "lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge"}
_FLOAT_TESTS |= {"equ": "ueq", "neu": "une", "ltu": "ult", "leu": "ule", "gtu": "ugt", "geu": "uge"}
_FLOAT_TESTS |= {"num": "ord", "nan": "uno"}


def compare(test: str, name: str, a: Val, b: Val, ftz: bool = False) -> Val:
    """Lanes where the comparison holds."""
    if name in INT_TYPES:
        kind = _INT_TESTS.get(test)
        if kind is None:
            raise Unsupported(f".{test}")
        if kind not in ("eq", "ne"):
            unsigned = name[0] != "s" or test in ("lo", "ls", "hi", "hs")
            kind = ("u" if unsigned else "s") + kind
        return a.cmp(kind, b)
    if test not in _FLOAT_TESTS:
        raise Unsupported(f".{test}")
    if ftz:
        a, b = math.flush(a), math.flush(b)
    if a.elem == "bf16":
        a, b = math.to_f32(a), math.to_f32(b)
    return a.cmp(_FLOAT_TESTS[test], b)


_BOOLEAN = ("and", "or", "xor")


@op("setp", counted=True)
def setp(form: Form) -> Spec:
    """setp.cmp[.bool][.ftz].type p, q, a, b[, c]; q (or a sink) holds the negated comparison."""
    test, name = form.mods[0], form.type
    form.rest(test, name, "ftz", *_BOOLEAN)
    if name in ("f16x2", "bf16x2"):
        return _setp_packed(form, test, name)
    kind = INT_TYPES[name][0] if name in INT_TYPES else name
    if name not in INT_TYPES and name not in FLOAT_TYPES:
        raise Unsupported(f".{name}")
    boolean = next((b for b in _BOOLEAN if form.has(b)), None)

    def emit(f: Fn) -> None:
        a, b = f.args(2, 3)
        holds = f.to_mask(compare(test, name, a, b, form.has("ftz")))
        other = ~holds
        if boolean:
            c = f.arg(4)
            holds, other = holds.binary(boolean, c), other.binary(boolean, c)
        f.out(0, holds)
        f.out(1, other)
        f.done()

    if form.count != (5 if boolean else 4):
        raise Unsupported(f"{form.count} operands")
    return Spec(("=pred", "=pred", kind, kind, *(["pred"] if boolean else [])), emit)


def _setp_packed(form: Form, test: str, name: str) -> Spec:
    elem = name[:-2]
    boolean = next((b for b in _BOOLEAN if form.has(b)), None)

    def emit(f: Fn) -> None:
        a, b = f.args(2, 3)
        for index, shift in enumerate((0, 16)):
            x, y = (v.lshr(shift).int("i16").bits(elem) for v in (a, b))
            holds = f.to_mask(compare(test, elem, x, y, form.has("ftz")))
            f.out(index, holds.binary(boolean, f.arg(4)) if boolean else holds)
        f.done()

    return Spec(("=pred", "=pred", "i32", "i32", *(["pred"] if boolean else [])), emit)


@op("set")
def set_(form: Form) -> Spec:
    test, dest, name = form.mods[0], form.parts[-2], form.type
    form.rest(test, dest, name, "ftz")
    kind = INT_TYPES[name][0] if name in INT_TYPES else name
    if dest not in ("u32", "s32", "f32") or (name not in INT_TYPES and name not in FLOAT_TYPES[:4]):
        raise Unsupported(form.key)

    def emit(f: Fn) -> None:
        holds = compare(test, name, *f.args(1, 2), form.has("ftz"))
        yes = f.const(0x3F800000 if dest == "f32" else -1, "vector<32xi32>")
        f.out(0, holds.select(yes, 0))
        f.done()

    return Spec(("=i32", kind, kind), emit)


@op("selp")
def selp(form: Form) -> Spec:
    form.rest(form.type)
    kind = _raw(form.type)

    def emit(f: Fn) -> None:
        a, b, p = f.args(1, 2, 3)
        f.out(0, f.to_lanes(p).select(a, b))
        f.done()

    return Spec((f"={kind}", kind, kind, "pred"), emit)


@op("slct")
def slct(form: Form) -> Spec:
    name, test = form.parts[-2], form.type
    form.rest("ftz", name, test)
    kind = _raw(name)

    def emit(f: Fn) -> None:
        a, b, c = f.args(1, 2, 3)
        f.out(0, c.cmp("sge" if test == "s32" else "oge", 0 if test == "s32" else 0.0).select(a, b))
        f.done()

    return Spec((f"={kind}", kind, kind, "i32" if test == "s32" else "f32"), emit)
