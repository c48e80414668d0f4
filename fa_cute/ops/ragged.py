"""Packed sequences for the copy engine: a tensor map that ends where each sequence ends.

A map cuts boxes at the ends of the tensor, so with one sequence after the other in one tensor the
rows past the end of a sequence would be those of the next. Here the map has one dimension more,
``ends``, over the same row stride, and a base that lies all T rows before the tensor:

    base = start of the tensor - T rows
    row r of the sequence [offset, end), length = end - offset:
        rows coordinate  T - length + r   of size T
        ends coordinate  end              of size T + 1
        address          base + (T - length + r + end) rows = start + (offset + r) rows

``r >= length`` is a rows coordinate of T or more: outside, so a load brings zeros and a store
writes nothing. ``r < 0`` only meets other rows of the tensor or zeros, and whatever a length or an
end is, no address outside the tensor is ever formed: both coordinates are cut.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64

from .arith import hi

ALIGN_BYTES = 16  # of a row, by the contract of the API


def tma_view(tensor: cute.Tensor, turned: bool = False) -> cute.Tensor:
    """(total, heads, d) as (rows, d, heads, ends), or ``turned`` as (d, rows, heads, ends): what a
    tensor map is made of, in the host part of a kernel. The last dimension is dense.
    """
    width = tensor.element_type.width // 8
    units = ALIGN_BYTES // width
    total, heads, d = tensor.shape
    total = hi(Int32(total), 1)  # a map has no empty dimension; an empty sequence sees none of it
    row, head = (cute.assume(Int64(s), divby=units) for s in tensor.stride[:2])
    base = tensor.iterator.toint() - row * total * width
    pointer = cute.make_ptr(
        tensor.element_type, base, cute.AddressSpace.gmem, assumed_align=ALIGN_BYTES
    )
    shape, stride = (total, d, heads, total + 1), (row, 1, head, row)
    if turned:
        shape, stride = (d, total, heads, total + 1), (1, row, head, row)
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))
