"""The 128-byte tensor map that the DSL's host code packs for the TMA unit, decoded.

Only the first 64 bytes carry meaning; the rest of the object is whatever the host's stack held.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass

from fa_cute.errors import MisuseError

BYTES = 64  # of the 128 that are defined
_SWIZZLES = ("none", "32B", "64B", "128B")
_SPAN = {"none": 1 << 30, "32B": 32, "64B": 64, "128B": 128}  # bytes of a swizzled row
# hardware code -> (element bytes, name for reductions)
_DTYPES = {
    0: (1, "u8"), 1: (2, "u16"), 2: (4, "u32"), 4: (8, "u64"),
    6: (2, "f16"), 7: (4, "f32"), 9: (8, "f64"), 10: (2, "bf16"),
}  # fmt: skip


@dataclass(frozen=True)
class TensorMap:
    """A strided tensor in global memory and the box that one copy moves; dimension 0 is the
    fastest.
    """

    address: int
    rank: int
    dtype: str
    elem_bytes: int
    swizzle: str
    dims: tuple[int, ...]  # elements
    strides: tuple[int, ...]  # bytes
    box: tuple[int, ...]  # elements

    @property
    def box_bytes(self) -> int:
        count = self.elem_bytes
        for n in self.box:
            count *= n
        return count


@functools.lru_cache(maxsize=1024)
def decode(blob: bytes) -> TensorMap:
    """The map in the first 64 bytes of `blob`."""
    words = struct.unpack_from("<8Q", blob)
    head = words[1] & 0xFFFFFFFF
    rank = (head >> 4 & 7) + 1
    code = head >> 7 & 0xF
    if head & 0xF != 2 or rank > 5 or code not in _DTYPES:
        raise MisuseError(
            f"not a tensor map: control word {head:#010x} (rank {rank}, element code {code})"
        )
    elem_bytes, dtype = _DTYPES[code]
    low = (words[1] >> 32, words[2] & 0xFFFFFFFF, words[2] >> 32, words[3] & 0xFFFFFFFF)
    strides = [elem_bytes]
    for i, part in enumerate(low):
        high = words[3] >> (32 + 4 * i) & 0xF
        strides.append((part << 4) | high << 36)
    sizes = (words[4], words[4] >> 32, words[5], words[5] >> 32, words[6])
    dims = [(size & 0xFFFFFFFF) + 1 for size in sizes]
    box = [(words[6] >> 56) + 1] + [(words[7] >> 8 * i & 0xFF) + 1 for i in range(4)]
    made = TensorMap(
        words[0], rank, dtype, elem_bytes, _SWIZZLES[head >> 13 & 3],
        tuple(dims[:rank]), tuple(strides[:rank]), tuple(box[:rank]),
    )  # fmt: skip
    _check(made)
    return made


def is_narrow(made: TensorMap) -> bool:
    """Are the box's rows shorter than the swizzled row? No text says where they lie then."""
    return made.swizzle != "none" and made.box[0] * made.elem_bytes < _SPAN[made.swizzle]


def _check(made: TensorMap) -> None:
    inner = made.box[0] * made.elem_bytes
    span = _SPAN[made.swizzle]
    if made.address % 16:
        raise MisuseError(f"tensor map: global address {made.address:#x} is not 16-byte aligned")
    if inner % 16 or inner > span:
        raise MisuseError(
            f"tensor map: the box is {inner} bytes wide; a multiple of 16, at most {span} "
            f"for swizzle {made.swizzle}"
        )
    if any(s % 16 for s in made.strides[1:]):
        raise MisuseError(f"tensor map: byte strides {made.strides[1:]} are not multiples of 16")


def encode(made: TensorMap) -> bytes:
    """The 128-byte object of a map (for tests and hand-written launches)."""
    code = next(c for c, (_, name) in _DTYPES.items() if name == made.dtype)
    head = 2 | (made.rank - 1) << 4 | code << 7 | _SWIZZLES.index(made.swizzle) << 13 | 1 << 18
    pad = 5 - made.rank
    strides = list(made.strides[1:]) + [0] * pad
    dims = [d - 1 for d in made.dims] + [0] * pad
    box = [b - 1 for b in made.box] + [0] * pad
    low = [(s >> 4) & 0xFFFFFFFF for s in strides]
    high = sum((s >> 36 & 0xF) << (32 + 4 * i) for i, s in enumerate(strides))
    words = (
        made.address,
        head | low[0] << 32,
        low[1] | low[2] << 32,
        low[3] | high,
        dims[0] | dims[1] << 32,
        dims[2] | dims[3] << 32,
        dims[4] | box[0] << 56,
        sum(b << 8 * i for i, b in enumerate(box[1:])),
    )
    return struct.pack("<8Q", *words) + bytes(64)
