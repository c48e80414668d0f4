"""Element operations of the bulk reductions, in memory order."""

from __future__ import annotations

import numpy as np

from fa_cute.errors import MisuseError
from fa_cute.sim.memory import place

_INTEGERS = {
    "u32": np.uint32,
    "s32": np.int32,
    "u64": np.uint64,
    "s64": np.int64,
    "b32": np.uint32,
    "b64": np.uint64,
}
_ALLOWED = {
    "add": ("u32", "s32", "u64", "f16", "bf16", "f32", "f64"),
    "min": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "max": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "inc": ("u32",),
    "dec": ("u32",),
    "and": ("u32", "u64", "b32", "b64"),
    "or": ("u32", "u64", "b32", "b64"),
    "xor": ("u32", "u64", "b32", "b64"),
}
_SMALLEST_NORMAL = np.float32(2.0**-126)


def flush(values: np.ndarray) -> np.ndarray:
    """float32 with subnormals replaced by zeros of their sign."""
    return np.where(np.abs(values) < _SMALLEST_NORMAL, np.copysign(np.float32(0), values), values)


def reduce_into(target: np.ndarray, values: np.ndarray, operation: str, dtype: str, ins) -> None:
    """`target[i] = target[i] op values[i]`; both hold the raw bits of `dtype`, target may be
    strided.
    """
    if dtype not in _ALLOWED[operation]:
        raise MisuseError(
            f"{place(ins)}{operation} of {dtype}; allowed: {', '.join(_ALLOWED[operation])}"
        )
    if dtype in _INTEGERS:
        target[...] = _integer(target, values, operation, _INTEGERS[dtype]).view(target.dtype)
    elif dtype == "f32":
        # The unit flushes subnormal inputs and results of this one type.
        with np.errstate(all="ignore"):
            total = flush(
                flush(np.ascontiguousarray(target).view(np.float32))
                + flush(values.view(np.float32))
            )
        target[...] = total.view(np.uint32)
    elif dtype == "f64":
        target[...] = (
            np.ascontiguousarray(target).view(np.float64) + values.view(np.float64)
        ).view(np.uint64)
    else:
        target[...] = _half(target, values, operation, dtype)


def _integer(target, values, operation, kind):
    a, b = np.ascontiguousarray(target).view(kind), values.view(kind)
    if operation == "add":
        return a + b
    if operation in ("min", "max"):
        return np.minimum(a, b) if operation == "min" else np.maximum(a, b)
    if operation == "inc":
        return np.where(a >= b, kind(0), a + kind(1))
    if operation == "dec":
        return np.where((a == 0) | (a > b), b, a - kind(1))
    return {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[operation](a, b)


def _half(target, values, operation, dtype):
    def widen(raw):
        raw = np.ascontiguousarray(raw)
        if dtype == "f16":
            return raw.view(np.float16).astype(np.float32)
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)

    a, b = widen(target), widen(values)
    with np.errstate(all="ignore"):
        result = (
            a + b
            if operation == "add"
            else (np.fmin(a, b) if operation == "min" else np.fmax(a, b))
        )
    if dtype == "f16":
        return result.astype(np.float16).view(np.uint16)
    bits = result.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(result), np.uint32(0x7FFF), rounded).astype(np.uint16)
