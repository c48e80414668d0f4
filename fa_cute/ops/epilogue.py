"""From an accumulator row in tensor memory to a finished output tile in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from . import tmem

CHUNK = 16  # columns of a row that one thread holds at a time
PIECE_BYTES = 16  # what a swizzle moves as a whole, and one store writes


@dataclass(frozen=True)
class SwizzledRow:
    """This thread's row of a swizzled K-major tile in shared memory, by 16-byte pieces.

    A pattern row holds ``1 << bits`` pieces; piece j of row r lies at ``j ^ (r * row_bytes /
    128)``.  The pattern is anchored at the tile, so few distinct offsets serve all column groups
    and all tiles: the generic swizzled pointer needs one register for each address.
    """

    address: Int32  # of the row's first pattern row
    key: Int32  # xor for the piece index, in bytes
    bits: int
    group_bytes: int  # from one column group (a pattern row wide) to the next

    def piece(self, index: int) -> Int32:
        """Address of the row's 16-byte piece `index`."""
        group, j = divmod(index, 1 << self.bits)
        return self.address + ((j * PIECE_BYTES) ^ self.key) + group * self.group_bytes


def swizzled_row(sO: cute.Tensor, layout, row) -> SwizzledRow:
    """Row `row` of tile 0 of `sO`, whose composed layout is `layout`."""
    bits = layout.inner.num_bits
    row_bytes = PIECE_BYTES << bits
    key = ((row * row_bytes) >> 7) & ((1 << bits) - 1)
    rows = cute.size(layout.outer.shape[0])
    return SwizzledRow(
        sO.iterator.toint() + row * row_bytes, key * PIECE_BYTES, bits, rows * row_bytes
    )


@cute.jit
def scale_rows(rows: cute.Tensor, thread, factor: Float32, chunk: cutlass.Constexpr = 16):
    """Multiply this thread's row in tensor memory by `factor`; returns when it is stored."""
    load, src = tmem.source(tmem.load_op(chunk), rows, thread)
    store, dst = tmem.target(tmem.store_op(chunk), rows, thread)
    coords = cute.make_identity_tensor(rows.shape)
    shape = load.partition_D(coords)[None, None, 0].shape
    for i in cutlass.range_constexpr(rows.shape[1] // chunk):
        row = cute.make_rmem_tensor(shape, Float32)
        cute.copy(load, src[None, None, i], row)
        for j in cutlass.range_constexpr(0, chunk, 2):
            row[j], row[j + 1] = cute.arch.mul_packed_f32x2((row[j], row[j + 1]), (factor, factor))
        cute.copy(store, row, dst[None, None, i])
    cute.arch.fence_view_async_tmem_store()


@cute.jit
def rows_to_smem(
    rows: cute.Tensor,
    out: SwizzledRow,
    offset: cutlass.Constexpr,
    element: cutlass.Constexpr,
    thread,
    factor: Float32,
    has_keys: Boolean,
):
    """Write ``factor * row`` of this thread `offset` bytes past `out`; without keys, zeros.

    A row without keys is set rather than multiplied by 0: its products may have met a NaN in V.
    """
    load, src = tmem.source(tmem.load_op(CHUNK), rows, thread)
    coords = cute.make_identity_tensor(rows.shape)
    shape = load.partition_D(coords)[None, None, 0].shape
    for i in cutlass.range_constexpr(rows.shape[1] // CHUNK):
        row = cute.make_rmem_tensor(shape, Float32)
        cute.copy(load, src[None, None, i], row)
        # One chunk after the other: more of them in flight would not fit in the registers.
        cute.arch.fence_view_async_tmem_load()
        for j in cutlass.range_constexpr(0, CHUNK, 2):
            x, y = cute.arch.mul_packed_f32x2((row[j], row[j + 1]), (factor, factor))
            row[j] = cutlass.select_(has_keys, x, Float32(0.0))
            row[j + 1] = cutlass.select_(has_keys, y, Float32(0.0))
        plain = cute.make_tensor(row.iterator, cute.make_layout(CHUNK))
        _store_chunk(plain, out, offset, element, i)


@cute.jit
def zeros_to_smem(
    columns: cutlass.Constexpr,
    out: SwizzledRow,
    offset: cutlass.Constexpr,
    element: cutlass.Constexpr,
):
    """Write zeros to this thread's row, `offset` bytes past `out`."""
    row = cute.make_rmem_tensor((CHUNK,), Float32)
    row.fill(0.0)
    for i in cutlass.range_constexpr(columns // CHUNK):
        _store_chunk(row, out, offset, element, i)


def _store_chunk(row: cute.Tensor, out: SwizzledRow, offset: int, element, i: int) -> None:
    """Convert columns ``CHUNK * i`` on of a row and write them as 16-byte pieces."""
    vector = PIECE_BYTES * 8 // element.width
    store = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), element, num_bits_per_copy=128)
    converted = cute.make_rmem_tensor((CHUNK,), element)
    converted.store(row.load().to(element))
    for j in range(CHUNK // vector):
        address = out.piece(i * (CHUNK // vector) + j) + offset
        target = cute.make_ptr(element, address, cute.AddressSpace.smem, assumed_align=PIECE_BYTES)
        piece = cute.make_tensor(target, cute.make_layout(vector))
        cute.copy(store, cute.local_tile(converted, (vector,), (j,)), piece)


def row_to_smem(row: cute.Tensor, out: SwizzledRow, offset, element) -> None:
    """Convert this thread's registers and write them `offset` bytes past `out`."""
    for i in range(cute.size(row.shape) // CHUNK):
        _store_chunk(cute.local_tile(row, (CHUNK,), (i,)), out, offset, element, i)
