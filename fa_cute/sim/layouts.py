"""Where each element of a tensor-core operand lies: shared memory, tensor memory, registers.

Pure functions on numpy arrays, cached by their arguments. A shared-memory operand is gathered in
16-byte chunks (a chunk is contiguous in every layout); tensor-memory accumulators are lists of
rectangles; register fragments are reshapes. The XOR swizzle acts on absolute addresses, whose
bits 0-9 decide it, so a table of offsets depends on the start address modulo 1024 only.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from fa_cute.errors import MisuseError

CHUNK = 16  # bytes
_PHASE = 1024  # the longest swizzle pattern, bytes

SWIZZLE_SM100 = {0: "none", 1: "128B_BASE32B", 2: "128B", 4: "64B", 6: "32B"}
SWIZZLE_SM90 = {0: "none", 1: "128B", 2: "64B", 3: "32B"}
_CHUNKS_PER_ATOM_ROW = {"none": 1, "32B": 2, "64B": 4, "128B": 8, "128B_BASE32B": 8}
# mode -> (mask of the source bits above bit 7, shift of the destination)
_XOR = {
    "none": (0, 4),
    "32B": (1, 4),
    "64B": (3, 4),
    "128B": (7, 4),
    "128B_BASE32B": (3, 5),
    "128B_ATOM_64B": (1, 6),
}


def swizzle(addresses, mode: str):
    """XOR of absolute shared addresses (an int or an array)."""
    mask, shift = _XOR[mode]
    return addresses ^ (((addresses >> 7) & mask) << shift)


# ---- shared-memory matrix descriptors ----


@dataclass(frozen=True)
class SmemDesc:
    """A decoded 64-bit matrix descriptor; all of `start`, `lbo`, `sbo` in bytes."""

    start: int
    lbo: int
    sbo: int
    swizzle: str
    base_offset: int
    lbo_is_absolute: bool = False


@functools.lru_cache(maxsize=4096)
def decode_desc(bits: int, family: str) -> SmemDesc:
    """`family` is "sm90" (wgmma) or "sm100" (tcgen05)."""
    start, lbo, sbo = ((bits >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    base_offset = bits >> 49 & 7
    if family == "sm100":
        if bits >> 46 & 7 != 1:
            raise MisuseError(
                f"matrix descriptor {bits:#018x}: bits 46-48 are {bits >> 46 & 7}, must be 1"
            )
        code, table = bits >> 61 & 7, SWIZZLE_SM100
    else:
        code, table = bits >> 62 & 3, SWIZZLE_SM90
    if code not in table:
        raise MisuseError(
            f"matrix descriptor {bits:#018x}: swizzle code {code}; valid: {sorted(table)}"
        )
    if base_offset:
        raise MisuseError(
            f"matrix descriptor {bits:#018x}: base offset {base_offset}; only 0 is modelled"
        )
    absolute = family == "sm100" and bool(bits >> 52 & 1)
    return SmemDesc(start, lbo, sbo, table[code], base_offset, absolute)


def element_offset(desc: SmemDesc, mn: int, k: int, elem_bytes: int, mn_major: bool) -> int:
    """Absolute shared address (without rank) of one element: the definition that the tables are
    tested against.
    """
    per_row, mode = _CHUNKS_PER_ATOM_ROW[desc.swizzle], desc.swizzle
    if not mn_major:
        chunk, byte = divmod(k * elem_bytes, CHUNK)
        linear = (mn // 8) * desc.sbo + (mn % 8) * CHUNK * per_row + byte
        linear += chunk * (desc.lbo if mode == "none" else CHUNK)
    else:
        chunk, byte = divmod(mn * elem_bytes, CHUNK)
        group = 4 if mode == "128B_BASE32B" else 8
        if mode == "none":
            linear = chunk * desc.sbo + (k // 8) * desc.lbo + (k % 8) * CHUNK + byte
        else:
            linear = (chunk // per_row) * desc.lbo + (chunk % per_row) * CHUNK + byte
            linear += (k // group) * desc.sbo + (k % group) * CHUNK * per_row
    return swizzle(desc.start + linear, mode)


@dataclass(frozen=True)
class Gather:
    """16-byte chunks of an operand, counted from `start - start % 1024`; (rows, chunks per row).

    Rows are MN rows for a K-major operand and K rows for an MN-major one.
    """

    chunks: np.ndarray
    first: int  # bytes from the phase base, of the first and behind the last byte
    end: int


@functools.lru_cache(maxsize=2048)
def _gather(
    rows: int, k_bytes_or_k: int, mn_major: bool, lbo: int, sbo: int, mode: str, phase: int
) -> Gather:
    per_row = _CHUNKS_PER_ATOM_ROW[mode]
    if not mn_major:
        mn = np.arange(rows)[:, None]
        chunk = np.arange(k_bytes_or_k // CHUNK)[None, :]
        linear = (
            (mn // 8) * sbo
            + (mn % 8) * CHUNK * per_row
            + chunk * (lbo if mode == "none" else CHUNK)
        )
    else:
        k = np.arange(k_bytes_or_k)[:, None]
        chunk = np.arange(rows // CHUNK)[None, :]  # `rows` is the MN extent in bytes here
        group = 4 if mode == "128B_BASE32B" else 8
        if mode == "none":
            linear = chunk * sbo + (k // 8) * lbo + (k % 8) * CHUNK
        else:
            linear = (chunk // per_row) * lbo + (chunk % per_row) * CHUNK
            linear = linear + (k // group) * sbo + (k % group) * CHUNK * per_row
    address = swizzle(phase + linear, mode)
    chunks = np.ascontiguousarray(address // CHUNK, dtype=np.intp)
    chunks.setflags(write=False)
    return Gather(chunks, int(address.min()), int(address.max()) + CHUNK)


@functools.lru_cache(maxsize=2048)
def _gather_steps(
    rows: int, k: int, mn_major: bool, lbo: int, sbo: int, mode: str, starts: tuple
) -> Gather:
    """Tables of several K steps side by side, all relative to the phase base of the first."""
    parts = []
    for start in starts:
        step = _gather(rows, k, mn_major, lbo, sbo, mode, start % _PHASE)
        parts.append(step.chunks + (start - start % _PHASE) // CHUNK)
    chunks = np.concatenate(parts, axis=0 if mn_major else 1)
    chunks.setflags(write=False)
    return Gather(chunks, int(chunks.min()) * CHUNK, (int(chunks.max()) + 1) * CHUNK)


def operand_gather(descs, rows: int, k: int, elem_bytes: int, mn_major: bool) -> tuple[int, Gather]:
    """(phase base address, table) of a (rows x k) operand, of one descriptor or several K steps.

    K-major tables are (rows, bytes of all K / 16); MN-major ones (all K, bytes of the rows / 16).
    """
    steps = (descs,) if isinstance(descs, SmemDesc) else descs
    head = steps[0]
    base = head.start & ~(_PHASE - 1)
    size = (rows * elem_bytes, k) if mn_major else (rows, k * elem_bytes)
    if len(steps) == 1:
        table = _gather(*size, mn_major, head.lbo, head.sbo, head.swizzle, head.start - base)
    else:
        starts = tuple(step.start - base for step in steps)
        table = _gather_steps(*size, mn_major, head.lbo, head.sbo, head.swizzle, starts)
    return base, table


# ---- instruction descriptor of tcgen05.mma ----

_A_TYPES = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"},
    "i8": {0: "u8", 1: "s8"},
}
ELEM_BYTES = {
    **dict.fromkeys(("f16", "bf16"), 2),
    "tf32": 4,
    **dict.fromkeys(("e4m3", "e5m2", "e2m3", "e3m2", "e2m1", "u8", "s8"), 1),
}
K_PER_KIND = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32}
_D_TYPES = {0: "f16", 1: "f32", 2: "s32"}


@dataclass(frozen=True)
class InstrDesc:
    m: int
    n: int
    k: int
    a_type: str
    b_type: str
    d_type: str
    a_mn_major: bool
    b_mn_major: bool
    negate_a: bool
    negate_b: bool
    saturate: bool


@functools.lru_cache(maxsize=512)
def decode_instr_desc(bits: int, kind: str, cta_group: int, ws: bool = False) -> InstrDesc:
    """The 32-bit idesc of a dense, unscaled tcgen05.mma; raises for what the tables don't allow."""
    if bits >> 2 & 1:
        raise MisuseError(f"instruction descriptor {bits:#010x}: sparse MMA is not modelled")
    types = _A_TYPES[kind]
    a_code, b_code, d_code = bits >> 7 & 7, bits >> 10 & 7, bits >> 4 & 3
    for what, code in (("A", a_code), ("B", b_code)):
        if code not in types:
            raise MisuseError(
                f"instruction descriptor {bits:#010x}: {what} type {code} of kind::{kind}"
            )
    allowed_d = {"f16": (0, 1), "tf32": (1,), "f8f6f4": (0, 1), "i8": (2,)}[kind]
    if d_code not in allowed_d or (kind == "f16" and d_code == 0 and (a_code, b_code) != (0, 0)):
        raise MisuseError(f"instruction descriptor {bits:#010x}: D type {d_code} of kind::{kind}")
    m, n = (bits >> 24 & 0x1F) << 4, (bits >> 17 & 0x3F) << 3
    ms = (32, 64, 128) if ws else {1: (64, 128), 2: (128, 256)}[cta_group]
    step = 8 * cta_group
    good_n = n in (64, 128, 256) if ws else 0 < n <= 256 and n % step == 0
    if m not in ms or not good_n:
        raise MisuseError(
            f"instruction descriptor {bits:#010x}: M {m}, N {n}; cta_group::{cta_group} "
            f"takes M of {ms} "
            f"and N a multiple of {step} up to 256"
        )
    return InstrDesc(
        m, n, K_PER_KIND[kind], types[a_code], types[b_code], _D_TYPES[d_code],
        bool(bits >> 15 & 1), bool(bits >> 16 & 1), bool(bits >> 13 & 1), bool(bits >> 14 & 1),
        bool(bits >> 3 & 1),
    )  # fmt: skip


# ---- accumulators in tensor memory ----


@dataclass(frozen=True)
class Block:
    """Rows [row, row + rows) and columns [col, col + cols) of D lie in one CTA from (lane,
    tmem_col) on.
    """

    cta: int
    row: int
    rows: int
    col: int
    cols: int
    lane: int
    tmem_col: int


@functools.lru_cache(maxsize=512)
def d_blocks(
    m: int, n: int, cta_group: int, ws: bool = False, lane_base: int = 0
) -> tuple[Block, ...]:
    """D (or A in tensor memory, with n its columns) of a dense MMA as rectangles."""
    if cta_group == 2 and m == 256:
        return tuple(Block(c, 128 * c, 128, 0, n, 0, 0) for c in range(2))
    if cta_group == 2:  # M = 128: two column halves one above the other
        half = n // 2
        return tuple(
            Block(c, 64 * c, 64, h * half, half, 64 * h, 0) for c in range(2) for h in range(2)
        )
    if m == 128:
        return (Block(0, 0, 128, 0, n, 0, 0),)
    if m == 64 and ws:
        return tuple(Block(0, 0, 64, h * n // 2, n // 2, 64 * h, 0) for h in range(2))
    if m == 64:
        return tuple(Block(0, 16 * i, 16, 0, n, 32 * i + lane_base, 0) for i in range(4))
    if m == 32 and ws:
        return tuple(Block(0, 0, 32, q * n // 4, n // 4, 32 * q, 0) for q in range(4))
    raise MisuseError(f"no accumulator layout for M {m}, cta_group::{cta_group}, ws {ws}")


def a_lanes(m: int, cta_group: int, lane_base: int = 0) -> tuple[tuple[int, int], ...]:
    """(first lane, lanes) runs that hold this CTA's rows of an A operand in tensor memory."""
    if m == 64:
        return tuple((32 * i + lane_base, 16) for i in range(4))
    if m == 128 and cta_group == 2:
        return ((0, 64),)  # and once more in lanes 64-127, for the other half of the columns
    return ((0, 128),)


# ---- tcgen05.ld / st ----

REGISTERS_PER_STEP = {"32x32b": 1, "16x64b": 1, "16x32bx2": 1, "16x128b": 2, "16x256b": 4}


@functools.lru_cache(maxsize=512)
def tmem_map(shape: str, num: int, second_half: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(lane, column) of each register and thread, both (registers, 32), in the warp's quarter.

    `second_half` is the column offset of threads 16-31 of shape 16x32bx2.
    """
    t = np.arange(32)[None, :]
    r = np.arange(num * REGISTERS_PER_STEP[shape])[:, None]
    if shape == "32x32b":
        lane, col = t + 0 * r, r + 0 * t
    elif shape == "16x64b":
        lane, col = 8 * (t % 2) + t // 4 + 0 * r, 2 * r + (t // 2) % 2
    elif shape == "16x128b":
        lane, col = t // 4 + 8 * (r % 2), 4 * (r // 2) + t % 4
    elif shape == "16x256b":
        lane, col = t // 4 + 8 * (r // 2 % 2), 8 * (r // 4) + 2 * (t % 4) + r % 2
    else:
        lane, col = t % 16 + 0 * r, r + second_half * (t >= 16)
    lane.setflags(write=False)
    col.setflags(write=False)
    return lane, col


# ---- register fragments (wgmma, mma.sync): regs are uint32 (..., registers, 32 lanes) ----


def fragment_to_a(regs: np.ndarray, elem_bytes: int) -> np.ndarray:
    """A fragment of 16 rows per warp: (warps, registers, 32) uint32 -> (16 * warps, K) of the
    element's raw bits.
    """
    warps, count, _ = regs.shape
    per, raw = 4 // elem_bytes, {1: np.uint8, 2: np.uint16, 4: np.uint32}[elem_bytes]
    cells = (
        np.ascontiguousarray(regs).view(raw).reshape(warps, count // 2, 2, 8, 4, per)
    )  # w g h l4 lm i
    return cells.transpose(0, 2, 3, 1, 4, 5).reshape(16 * warps, count // 2 * 4 * per)


def fragment_to_b(regs: np.ndarray, elem_bytes: int) -> np.ndarray:
    """B fragment of mma.sync (8 columns): (registers, 32) uint32 -> (K, 8) of raw bits."""
    per, raw = 4 // elem_bytes, {1: np.uint8, 2: np.uint16, 4: np.uint32}[elem_bytes]
    cells = np.ascontiguousarray(regs).view(raw).reshape(len(regs), 8, 4, per)  # g l4 lm i
    return cells.transpose(0, 2, 3, 1).reshape(len(regs) * 4 * per, 8)


def d_to_fragment(d: np.ndarray) -> np.ndarray:
    """(16 * warps, N) of 32-bit values -> (warps, N / 2, 32) accumulators, number 4j + 2h + i."""
    rows, n = d.shape
    cells = d.reshape(rows // 16, 2, 8, n // 8, 4, 2)  # w h l4 j lm i
    return cells.transpose(0, 3, 1, 5, 2, 4).reshape(rows // 16, n // 2, 32)


def fragment_to_d(regs: np.ndarray) -> np.ndarray:
    """Inverse of `d_to_fragment`."""
    warps, count, _ = regs.shape
    cells = regs.reshape(warps, count // 4, 2, 2, 8, 4)  # w j h i l4 lm
    return cells.transpose(0, 2, 4, 1, 5, 3).reshape(16 * warps, 2 * count)


def pack_halves(values: np.ndarray) -> np.ndarray:
    """(..., R, 32) uint16 -> (..., R / 2, 32) uint32: registers 2i and 2i + 1 become low and high
    half.
    """
    low, high = values[..., 0::2, :].astype(np.uint32), values[..., 1::2, :].astype(np.uint32)
    return low | high << np.uint32(16)


def unpack_halves(regs: np.ndarray) -> np.ndarray:
    """Inverse of `pack_halves`."""
    shape = (*regs.shape[:-2], regs.shape[-2] * 2, regs.shape[-1])
    out = np.empty(shape, np.uint16)
    out[..., 0::2, :] = regs & np.uint32(0xFFFF)
    out[..., 1::2, :] = regs >> np.uint32(16)
    return out


# ---- element types ----


def _decode_table(exponent_bits: int, mantissa_bits: int, finite: str) -> np.ndarray:
    """float32[256] of a small float: sign, exponent, mantissa; `finite` says which codes are inf
    or NaN.
    """
    width = 1 + exponent_bits + mantissa_bits
    codes = np.arange(256)
    sign = np.where(codes >> (width - 1) & 1, -1.0, 1.0)
    exponent = codes >> mantissa_bits & ((1 << exponent_bits) - 1)
    mantissa = codes & ((1 << mantissa_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    normal = (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)
    value = sign * np.where(exponent == 0, mantissa / 2**mantissa_bits * 2.0 ** (1 - bias), normal)
    top = exponent == (1 << exponent_bits) - 1
    if finite == "ieee":
        value = np.where(top, np.where(mantissa == 0, sign * np.inf, np.nan), value)
    elif finite == "one_nan":
        value = np.where(top & (mantissa == (1 << mantissa_bits) - 1), np.nan, value)
    return value.astype(np.float32)


SMALL_FLOATS = {
    "e4m3": _decode_table(4, 3, "one_nan"),
    "e5m2": _decode_table(5, 2, "ieee"),
    "e2m3": _decode_table(2, 3, "all"),
    "e3m2": _decode_table(3, 2, "all"),
    "e2m1": _decode_table(2, 1, "all"),
}


def to_float32(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Raw element bits (uint8, uint16, uint32) -> float32, exactly (tf32: the low 13 bits are
    ignored).
    """
    if dtype == "bf16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "f16":
        return raw.view(np.float16).astype(np.float32)
    if dtype == "tf32":
        return (raw & np.uint32(0xFFFFE000)).view(np.float32)
    if dtype in SMALL_FLOATS:
        return SMALL_FLOATS[dtype][raw]
    if dtype in ("s8", "u8"):
        return raw.view(np.int8 if dtype == "s8" else np.uint8).astype(np.float32)
    raise MisuseError(f"no decoder for element type {dtype}")
