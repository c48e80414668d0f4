"""Images of matrix operands in shared or tensor memory, placed element by element."""

from __future__ import annotations

import numpy as np

from fa_cute.sim import layouts as lay

SMALL_KINDS = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}


def random_raw(rng, shape, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """(raw bits, exact float64 values) of small random numbers of an element type."""
    if dtype in ("s8", "u8"):
        low = -128 if dtype == "s8" else 0
        values = rng.integers(low, low + 256, shape)
        return values.astype(np.int8 if dtype == "s8" else np.uint8).view(np.uint8), values * 1.0
    if dtype in lay.SMALL_FLOATS:
        table = lay.SMALL_FLOATS[dtype]
        width = {"e4m3": 8, "e5m2": 8, "e2m3": 6, "e3m2": 6, "e2m1": 4}[dtype]
        codes = np.arange(1 << width)
        usable = codes[np.abs(table[: 1 << width]) <= 4]  # finite and small
        raw = usable[rng.integers(0, len(usable), shape)].astype(np.uint8)
        return raw, table[raw].astype(np.float64)
    x = rng.standard_normal(shape).astype(np.float32)
    if dtype == "f16":
        half = x.astype(np.float16)
        return half.view(np.uint16), half.astype(np.float64)
    bits = x.view(np.uint32)
    if dtype == "bf16":
        raw = (bits >> 16).astype(np.uint16)
        return raw, (raw.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return bits, (bits & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)  # tf32


class Image:
    """Shared memory as bytes from `base` on, filled by absolute addresses."""

    def __init__(self, nbytes: int, base: int):
        self.base = base
        self.bytes = np.full(nbytes, 0xFF, np.uint8)

    def place(self, desc_of_step, raw: np.ndarray, k_step: int, mn_major: bool) -> None:
        """Write the (rows x K) matrix: `desc_of_step(s)` reads its columns from s * k_step on."""
        size = raw.itemsize
        flat = np.ascontiguousarray(raw).view(np.uint8).reshape(*raw.shape, size)
        for row, k in np.ndindex(raw.shape):
            step, kk = divmod(k, k_step)
            at = lay.element_offset(desc_of_step(step), row, kk, size, mn_major) - self.base
            self.bytes[at : at + size] = flat[row, k]


def encode_desc(desc: lay.SmemDesc, family: str) -> int:
    """The 64-bit descriptor of a decoded one."""
    table = lay.SWIZZLE_SM100 if family == "sm100" else lay.SWIZZLE_SM90
    code = next(c for c, name in table.items() if name == desc.swizzle)
    bits = desc.start >> 4 | desc.lbo >> 4 << 16 | desc.sbo >> 4 << 32
    return bits | (1 << 46 | code << 61 if family == "sm100" else code << 62)


def pattern(rows: int, elem_bytes: int, swizzle: str, mn_major: bool) -> dict:
    """Leading and stride offsets, advance per K step and bytes of a dense operand."""
    atom = {"none": 16, "32B": 32, "64B": 64, "128B": 128, "128B_BASE32B": 128}[swizzle]
    if not mn_major:  # atoms of 8 rows, one below the other; K steps inside, then beside
        if swizzle == "none":
            return {"lbo": rows * 16, "sbo": 128, "steps": [rows * 32 * s for s in range(8)]}
        per_atom = atom // 32
        steps = [s // per_atom * rows * atom + s % per_atom * 32 for s in range(16)]
        return {"lbo": 16, "sbo": 8 * atom, "steps": steps}
    k = 32 // elem_bytes
    if swizzle == "none":  # chunk columns are SBO apart, groups of 8 k LBO apart
        sbo, groups = 128, k // 8
        lbo = rows * elem_bytes // 16 * 128
        return {"lbo": lbo, "sbo": sbo, "steps": [lbo * groups * s for s in range(8)]}
    group = 4 if swizzle == "128B_BASE32B" else 8
    depth = 8 * k  # all K of up to 8 steps
    sbo = atom * group
    return {"lbo": atom * depth, "sbo": sbo, "steps": [sbo * (k // group) * s for s in range(8)]}
