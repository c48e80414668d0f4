"""Arithmetic of PTX in numpy: the independent reference for the native engine.

`bind(ins, env)` returns `fn(core, mask)` for a plain instruction, or None when it knows none.
"""

from __future__ import annotations

import operator

import numpy as np

from fa_cute.sim import operands as ops
from fa_cute.sim.ptx import Bank, Imm, Instr, Not, Reg, Special, Sym, Vec

FULL = ops.FULL
LANES = np.arange(32)
DTYPES = {
    "b8": np.uint8,
    "u8": np.uint8,
    "s8": np.int8,
    "b16": np.uint16,
    "u16": np.uint16,
    "s16": np.int16,
    "f16": np.float16,
    "b32": np.uint32,
    "u32": np.uint32,
    "s32": np.int32,
    "f32": np.float32,
    "b64": np.uint64,
    "u64": np.uint64,
    "s64": np.int64,
    "f64": np.float64,
}


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """Round to nearest even; the 16 bits of each."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def as_bits32(values: np.ndarray) -> np.ndarray:
    """Any 8-, 16- or 32-bit array as uint32 with zero upper bits."""
    size = values.dtype.itemsize
    return np.ascontiguousarray(values).view(f"u{size}").astype(np.uint32)


class Env:
    """Names that instructions use as values."""

    def __init__(self, kernel, symbols: dict[str, int]):
        self.kernel, self.symbols = kernel, symbols
        self.shared = {v.name for v in kernel.shared.values()}
        self.local: dict[str, int] = {}  # offsets in a lane's local memory
        self.local_bytes = 0
        for var in kernel.local.values():
            self.local_bytes += -self.local_bytes % var.align
            self.local[var.name] = self.local_bytes
            self.local_bytes += var.size


# ---- operands ----


def bits32(operand, env: Env):
    if isinstance(operand, Reg):
        if operand.bank is Bank.R64:
            return lambda c: c.r64[operand.index].astype(np.uint32)
        if operand.bank is Bank.PRED:
            return lambda c: ops.lane_mask(int(c.pred[operand.index])).astype(np.uint32)
        row = operand.index
        return lambda c: c.r32[row]
    if isinstance(operand, Imm):
        value = np.full(32, operand.bits & FULL, np.uint32)
        return lambda c: value
    if isinstance(operand, Special):
        return special(operand)
    if isinstance(operand, Sym):
        inner = bits64(operand, env)
        return lambda c: inner(c).astype(np.uint32)
    if isinstance(operand, Vec):
        parts = [bits32(item, env) for item in operand.items]
        width = 32 // len(parts)
        return lambda c: sum(
            ((p(c) & ((1 << width) - 1)) << (width * i) for i, p in enumerate(parts)),
            np.zeros(32, np.uint32),
        )
    raise TypeError(f"operand {operand!r}")


def special(operand: Special):
    name = operand.name
    if name in ("%clock", "%clock_lo", "%clock64", "%globaltimer", "%globaltimer_lo"):
        return lambda c: np.full(32, c.ctx.count & FULL, np.uint32)
    if name in ("%clock_hi", "%globaltimer_hi"):
        return lambda c: np.full(32, c.ctx.count >> 32, np.uint32)
    return lambda c: c.specials[name]


def bits64(operand, env: Env):
    if isinstance(operand, Reg) and operand.bank is Bank.R64:
        row = operand.index
        return lambda c: c.r64[row]
    if isinstance(operand, Imm):
        value = np.full(32, operand.bits, np.uint64)
        return lambda c: value
    if isinstance(operand, Sym):
        return _symbol64(operand, env)
    if isinstance(operand, Vec):
        parts = [bits32(item, env) for item in operand.items]
        width = 64 // len(parts)
        keep = np.uint64((1 << width) - 1)
        return lambda c: sum(
            ((p(c).astype(np.uint64) & keep) << np.uint64(width * i) for i, p in enumerate(parts)),
            np.zeros(32, np.uint64),
        )
    inner = bits32(operand, env)
    return lambda c: inner(c).astype(np.uint64)


def _symbol64(operand: Sym, env: Env):
    name, offset = operand.name, operand.offset
    if name in env.kernel.param:
        at = env.kernel.param[name].offset + offset
        return lambda c: np.full(32, c.param_address + at, np.uint64)
    if name in env.local:
        return lambda c: np.full(32, env.local[name] + offset, np.uint64)
    value = env.symbols[name] + offset
    if name in env.shared:
        return lambda c: np.full(32, c.rank << 24 | value, np.uint64)
    return lambda c: np.full(32, value, np.uint64)


def read(operand, kind: str, env: Env):
    """`fn(core) -> array[32]` of a PTX type; float constants keep their pattern."""
    if kind == "pred":
        if isinstance(operand, Reg):
            return lambda c: ops.lane_mask(int(c.pred[operand.index]))
        if isinstance(operand, Not):
            return lambda c: ~ops.lane_mask(int(c.pred[operand.reg.index]))
        constant = np.full(32, bool(operand.bits))
        return lambda c: constant
    if kind in ("f32x2", "b128"):
        inner64 = bits64(operand, env)
        return lambda c: np.ascontiguousarray(inner64(c)).view(np.float32).reshape(32, 2)
    if kind in ("bf16x2", "f16x2"):
        inner = bits32(operand, env)
        halves = lambda c: np.ascontiguousarray(inner(c)).view(np.uint16).reshape(32, 2)  # noqa: E731
        if kind == "bf16x2":
            return lambda c: bf16_to_f32(halves(c))
        return lambda c: halves(c).view(np.float16)
    if kind == "bf16":
        inner = bits32(operand, env)
        return lambda c: bf16_to_f32(inner(c).astype(np.uint16))
    dtype = np.dtype(DTYPES[kind])
    if dtype.itemsize == 8:
        inner64 = bits64(operand, env)
        if kind == "f64" and isinstance(operand, Imm) and not operand.is_float:
            raise TypeError(f"integer constant {operand.text} for f64")
        return lambda c: inner64(c).view(dtype)
    inner = bits32(operand, env)
    if dtype.itemsize == 4:
        return lambda c: inner(c).view(dtype)
    narrow = np.dtype(f"u{dtype.itemsize}")
    return lambda c: inner(c).astype(narrow).view(dtype)


def put(target: np.ndarray, mask: int, value) -> None:
    if mask == FULL:
        target[:] = value
    else:
        np.copyto(target, value, where=ops.lane_mask(mask), casting="unsafe")


def write(operand, kind: str, env: Env):
    """`fn(core, mask, array)`."""
    if isinstance(operand, Sym) and operand.is_sink:
        return lambda c, mask, value: None
    if kind == "pred":
        index = operand.index

        def write_pred(c, mask, value):
            old = int(c.pred[index])
            c.pred[index] = (old & ~mask) | (ops.bits_of(value) & mask)

        return write_pred
    if isinstance(operand, Vec):
        raise TypeError("vector destination")
    row, wide = operand.index, operand.bank is Bank.R64
    if kind in ("f32x2", "b128"):
        return lambda c, mask, v: put(
            c.r64[row], mask, np.ascontiguousarray(v, np.float32).reshape(-1).view(np.uint64)
        )
    if kind == "bf16x2":
        return lambda c, mask, v: put(
            c.r32[row], mask, np.ascontiguousarray(f32_to_bf16(v)).reshape(-1).view(np.uint32)
        )
    if kind == "f16x2":
        return lambda c, mask, v: put(
            c.r32[row], mask, np.ascontiguousarray(v, np.float16).reshape(-1).view(np.uint32)
        )
    if kind == "bf16":
        return lambda c, mask, v: put(c.r32[row], mask, f32_to_bf16(v).astype(np.uint32))
    dtype = np.dtype(DTYPES[kind])
    signed_wide = kind[0] == "s"

    def store(c, mask, value):
        value = np.asarray(value)
        if wide:
            if value.dtype.itemsize != 8:
                value = value.astype(np.int64 if signed_wide else np.uint64)
            put(c.r64[row], mask, value.view(np.uint64))
        else:
            if value.dtype != dtype:
                value = value.astype(dtype)
            put(c.r32[row], mask, as_bits32(value))

    return store


# ---- rounding ----


def round_f32(exact: np.ndarray, error: np.ndarray, how: str) -> np.ndarray:
    """float64 `exact` (+ a tiny exact `error`) to float32 by rounding mode."""
    near = exact.astype(np.float32)
    if how in ("rn", ""):
        return near
    wide = near.astype(np.float64)
    above = (wide > exact) | ((wide == exact) & (error < 0))
    below = (wide < exact) | ((wide == exact) & (error > 0))
    down = np.where(above, np.nextafter(near, np.float32(-np.inf)), near)
    up = np.where(below, np.nextafter(near, np.float32(np.inf)), near)
    if how == "rm":
        return down
    if how == "rp":
        return up
    return np.where(exact >= 0, down, up)


def flush(x: np.ndarray) -> np.ndarray:
    """Subnormals to zero of the same sign."""
    tiny = np.abs(x) < np.float32(2.0**-126)
    return np.where(tiny, np.copysign(np.float32(0), x), x).astype(np.float32)


def mode_of(ins: Instr) -> str:
    return next((p for p in ins.parts if p in ("rn", "rz", "rm", "rp")), "rn")


def add_f32(a, b, how):
    a, b = a.astype(np.float64), b.astype(np.float64)
    s = a + b
    back = s - a
    if how == "rm":  # an exact zero from unlike signs is negative
        s = np.where((s == 0) & (np.signbit(a) != np.signbit(b)), -0.0, s)
    return round_f32(s, (a - (s - back)) + (b - back), how)


def mul_f32(a, b, how):
    return round_f32(a.astype(np.float64) * b.astype(np.float64), np.zeros(a.shape), how)


def fma_f32(a, b, c, how):
    exact = a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)
    if how == "rn":
        return exact.astype(np.float32)
    near = exact.astype(np.float64)
    error = (exact - near).astype(np.float64)
    return round_f32(near, np.nan_to_num(error), how)


def float_max(a, b, nan: bool, smallest: bool = False):
    pick = np.minimum if smallest else np.maximum
    loose = np.fmin if smallest else np.fmax
    zero_first = np.signbit(a) == smallest  # +0 > -0
    out = pick(a, b) if nan else loose(a, b)
    both_zero = (a == 0) & (b == 0)
    out = np.where(both_zero, np.where(zero_first, a, b), out)
    if out.dtype == np.float32:
        canonical = np.array(0x7FFFFFFF, np.uint32).view(np.float32)
        out = np.where(np.isnan(out), canonical, out)
    return out


# ---- instruction families ----


def int_op(name: str, kind: str, parts):
    dtype = np.dtype(DTYPES[kind])
    width = dtype.itemsize * 8
    if name in ("add", "sub"):
        return operator.add if name == "add" else operator.sub
    if name in ("min", "max"):
        return np.minimum if name == "min" else np.maximum
    if name in ("and", "or", "xor"):
        return {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[name]
    if name == "div":
        return lambda a, b: _divide(a, b, dtype)
    if name == "rem":
        return lambda a, b: (a - _divide(a, b, dtype) * b).astype(dtype)
    if name == "mul" and "lo" in parts:
        return operator.mul
    if name == "mul" and "hi" in parts:
        if width == 64:
            return lambda a, b: np.array(
                [(int(x) * int(y) >> 64) & (2**64 - 1) for x, y in zip(a, b)], np.uint64
            ).view(dtype)
        big = np.int64 if kind[0] == "s" else np.uint64
        return lambda a, b: ((a.astype(big) * b.astype(big)) >> big(width)).astype(dtype)
    return None


def _divide(a, b, dtype):
    safe = np.where(b == 0, 1, b).astype(dtype)
    if dtype.kind == "u":
        return np.where(b == 0, np.iinfo(dtype).max, a // safe).astype(dtype)
    quotient = [int(abs(int(x)) // abs(int(y))) for x, y in zip(a, safe)]
    sign = np.where((a < 0) ^ (safe < 0), -1, 1)
    return (
        (np.array(quotient, object) * sign & (2 ** (8 * dtype.itemsize) - 1))
        .astype(f"u{dtype.itemsize}")
        .view(dtype)
    )


def shift(name: str, kind: str, a, n):
    width = np.dtype(DTYPES[kind]).itemsize * 8
    count = n.astype(np.uint64)
    if name == "shl":
        shifted = a.view(f"u{width // 8}").astype(np.uint64) << np.minimum(count, 63)
        return np.where(count >= width, 0, shifted).astype(f"u{width // 8}")
    if kind[0] == "s":
        return a >> np.minimum(count, width - 1).astype(a.dtype)
    shifted = a.astype(np.uint64) >> np.minimum(count, 63)
    return np.where(count >= width, 0, shifted).astype(a.dtype)


COMPARE = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "lo": operator.lt,
    "ls": operator.le,
    "hi": operator.gt,
    "hs": operator.ge,
}


def compare(ins: Instr, env: Env):
    how, kind = ins.parts[1], ins.parts[-1]
    combine = ins.parts[2] if ins.parts[2] in ("and", "or", "xor") else None
    unordered = how.endswith("u") and how not in ("equ",) and how[:-1] in COMPARE
    is_float = kind in ("f16", "bf16", "f32", "f64")
    if how in ("num", "nan"):
        base = None
    elif how == "equ":
        base, unordered = operator.eq, True
    else:
        base = COMPARE[how[:-1] if unordered and is_float else how]
    first, second = ops.pair(ins.operands[0])
    a, b = read(ins.operands[1], kind, env), read(ins.operands[2], kind, env)
    extra = read(ins.operands[3], "pred", env) if combine else None
    to_first, to_second = write(first, "pred", env), write(second, "pred", env)

    def run(c, mask):
        x, y = a(c), b(c)
        if is_float:
            nan = np.isnan(x) | np.isnan(y)
            if base is None:
                out = nan if how == "nan" else ~nan
            elif unordered:
                out = base(x, y) | nan
            else:
                out = base(x, y) & ~nan
        else:
            out = base(x, y)
        other = ~out
        if extra is not None:
            e = extra(c)
            join = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[combine]
            out, other = join(out, e), join(other, e)
        to_first(c, mask, out)
        to_second(c, mask, other)

    return run


def simple(ins: Instr, env: Env, kind: str, fn, sources=None, to_kind=None):
    """d = fn(a, b, ...) with all operands of one type."""
    operands = ins.operands[1:]
    kinds = sources or [kind] * len(operands)
    readers = [read(o, k, env) for o, k in zip(operands, kinds)]
    out = write(ins.operands[0], to_kind or kind, env)
    if len(readers) == 1:
        a = readers[0]
        return lambda c, mask: out(c, mask, fn(a(c)))
    if len(readers) == 2:
        a, b = readers
        return lambda c, mask: out(c, mask, fn(a(c), b(c)))
    return lambda c, mask: out(c, mask, fn(*[r(c) for r in readers]))


def float_family(ins: Instr, env: Env, kind: str):
    name, how, ftz = ins.parts[0], mode_of(ins), ins.has("ftz")
    if ins.op.startswith(("fma.rn.f32.bf16", "fma.rn.f32.f16")):
        narrow = ins.parts[-1]
        wide = lambda a, b, c: fma_f32(a.astype(np.float32), b.astype(np.float32), c, how)  # noqa: E731
        return simple(ins, env, "f32", wide, [narrow, narrow, "f32"], "f32")
    if ins.parts[-2:] in (("f32", "bf16"), ("f32", "f16")) and name in ("add", "sub"):
        sign = 1 if name == "add" else -1
        fn = lambda a, b: add_f32(a.astype(np.float32), sign * b, how)  # noqa: E731
        return simple(ins, env, "f32", fn, [ins.parts[-1], "f32"], "f32")
    if kind == "f64":
        table = {
            "add": operator.add,
            "sub": operator.sub,
            "mul": operator.mul,
            "div": operator.truediv,
        }
        fn = table.get(name) or {
            "fma": lambda a, b, c: (np.longdouble(a) * b + c).astype(np.float64),
            "neg": np.negative,
            "abs": np.abs,
            "max": lambda a, b: float_max(a, b, False),
            "min": lambda a, b: float_max(a, b, False, True),
            "sqrt": np.sqrt,
        }.get(name)
        return simple(ins, env, kind, fn) if fn else None
    clean = (lambda fn: lambda *xs: flush(fn(*map(flush, xs)))) if ftz else (lambda fn: fn)
    wide = lambda *xs: [np.asarray(x, np.float32) for x in xs]  # noqa: E731
    nan = ins.has("NaN")
    fn = {
        "add": lambda a, b: add_f32(*wide(a, b), how),
        "sub": lambda a, b: add_f32(*wide(a, np.negative(b)), how),
        "mul": lambda a, b: mul_f32(*wide(a, b), how),
        "fma": lambda a, b, c: fma_f32(*wide(a, b, c), how),
        "mad": lambda a, b, c: fma_f32(*wide(a, b, c), how),
        "neg": np.negative,
        "abs": np.abs,
        "max": lambda a, b, *c: _fold(lambda x, y: float_max(x, y, nan), a, b, *c),
        "min": lambda a, b, *c: _fold(lambda x, y: float_max(x, y, nan, True), a, b, *c),
        "div": lambda a, b: (a.astype(np.float64) / b.astype(np.float64)).astype(np.float32),
        "ex2": lambda a: np.exp2(a.astype(np.float64)).astype(np.float32),
        "lg2": lambda a: np.log2(a.astype(np.float64)).astype(np.float32),
        "rcp": lambda a: (1.0 / a.astype(np.float64)).astype(np.float32),
        "sqrt": lambda a: np.sqrt(a.astype(np.float64)).astype(np.float32),
        "rsqrt": lambda a: (1.0 / np.sqrt(a.astype(np.float64))).astype(np.float32),
        "tanh": lambda a: np.tanh(a.astype(np.float64)).astype(np.float32),
        "sin": lambda a: np.sin(a.astype(np.float64)).astype(np.float32),
        "cos": lambda a: np.cos(a.astype(np.float64)).astype(np.float32),
    }.get(name)
    return simple(ins, env, kind, clean(fn)) if fn else None


def _fold(fn, *values):
    out = values[0]
    for value in values[1:]:
        out = fn(out, value)
    return out
