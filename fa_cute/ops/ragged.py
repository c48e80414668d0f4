"""Packed sequences for the copy engine: a tensor map that ends where each sequence ends.

A map cuts boxes at the ends of the tensor, so with one sequence after the other in one tensor the
rows past the end of a sequence would be those of the next. Here the map of T rows has two
dimensions more: ``ends``, over the same row stride, and ``back``, whose one coordinate takes
2^30 rows away again, since addresses have 64 bits (2^30 times 2^34 bytes is nothing):

    row r of the sequence [offset, end), length = end - offset:
        rows coordinate  T - length + r     of size T
        ends coordinate  2^30 - T + end
        back coordinate  2^30               stride 2^34 bytes - a row
        address          start + (T - length + r + 2^30 - T + end - 2^30) rows
                         = start + (offset + r) rows

``r >= length`` is a rows coordinate of T or more: outside, so a load brings zeros and a store
writes nothing. Offsets and ends are rows of the tensor, by `sched.varlen_sides.Side.span`.

`seqlen.VarlenSeqlens.rows` makes the coordinates. The base stays the tensor's own: with one that
lies T rows before the tensor one dimension would do, but the H200 reads the base of a map when all
of a load's box is outside, an illegal address where nothing is mapped there.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64

from .arith import hi
from .seqlen import BACK_ROWS

ALIGN_BYTES = 16  # of a row, by the contract of the API
TURN_BYTES = 2**64 // BACK_ROWS


def tma_view(tensor: cute.Tensor, turned: bool = False) -> cute.Tensor:
    """(total, heads, d) as (rows, d, heads, ends, back), or ``turned`` as (d, rows, ...): what a
    tensor map is made of, in the host part of a kernel. The last dimension is dense.
    """
    width = tensor.element_type.width // 8
    units = ALIGN_BYTES // width
    total, heads, d = tensor.shape
    total = hi(Int32(total), 1)  # a map has no empty dimension; an empty sequence sees none of it
    row, head = (cute.assume(Int64(s), divby=units) for s in tensor.stride[:2])
    back = cute.assume(TURN_BYTES // width - row, divby=units)
    pointer = cute.make_ptr(
        tensor.element_type,
        tensor.iterator.toint(),
        cute.AddressSpace.gmem,
        assumed_align=ALIGN_BYTES,
    )
    shape, stride = (total, d, heads), (row, 1, head)
    if turned:
        shape, stride = (d, total, heads), (1, row, head)
    layout = cute.make_layout((*shape, BACK_ROWS + 1, BACK_ROWS + 1), stride=(*stride, row, back))
    return cute.make_tensor(pointer, layout)
