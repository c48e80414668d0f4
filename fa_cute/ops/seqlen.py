"""The lengths of one batch element, and where its rows lie: dense batches and packed sequences.

Two policies with one interface. A kernel holds one of them, chosen while it is traced; a role asks
``cx.seqlens(tile)`` and never knows which it is:

    seqlens.q, seqlens.k               lengths in rows
    seqlens.rows(view, side, head)     rows of a TMA view, (rows, d); ``turned``: (d, rows)
    seqlens.plain(tensor, side, head)  rows of a tensor as the user holds it, (rows, d)
    seqlens.values(tensor, head)       one number per query as the user holds it (LSE): (rows,)
    seqlens.set_value(tensor, head, row, value)    writes one of them
    seqlens.padded(view, head, tile)   the same in the backward's workspace: whole tiles of rows
    seqlens.tile_q, seqlens.tile_k     number of a tile in the workspace, counted over everything

``side`` is "q" (q, out, dout, dq) or "k" (k, v, dk, dv). Rows past the end of a sequence: a TMA
load brings zeros, a TMA store writes nothing; with ``plain`` and ``values`` the caller looks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .arith import ceil_div

SIDES = ("q", "k")
RECORD_INTS = 8  # offset_q, len_q, offset_k, len_k; first tile_q, first tile_k, two unused
BACK_ROWS = 2**30  # of packed tensors at most; see `ragged`


def int_row(table: Any, row: Any, first: int, count: int) -> tuple:
    """``count`` aligned ints of a row of a table, one load: a tensor, or rows of Python ints."""
    if not hasattr(table, "iterator"):
        return tuple(table[row][first : first + count])
    import cutlass.cute as cute

    part = cute.domain_offset((row, first), table)[0, None]
    source = cute.make_tensor(part.iterator.align(4 * count), cute.make_layout(count))
    values = cute.make_rmem_tensor(count, table.element_type)
    cute.autovec_copy(source, values)
    return tuple(values[i] for i in range(count))


def set_int_row(table: Any, row: Any, first: int, values: tuple) -> None:
    """Write aligned ints of a row of a table, one store; see `int_row`."""
    import cutlass.cute as cute

    count = len(values)
    part = cute.domain_offset((row, first), table)[0, None]
    target = cute.make_tensor(part.iterator.align(4 * count), cute.make_layout(count))
    source = cute.make_rmem_tensor(count, table.element_type)
    for i in range(count):
        source[i] = table.element_type(values[i])
    cute.autovec_copy(source, target)


def _wide(x: Any) -> Any:
    """64 bits where traced: an accumulator has more elements than 32 bits can count."""
    if isinstance(x, int):
        return x
    import cutlass

    return cutlass.Int64(x)


@dataclass(frozen=True)
class Dense:
    """Every element of a batch has the same lengths."""

    q: Any
    k: Any

    def at(self, tile: Any) -> DenseSeqlens:
        return DenseSeqlens(self.q, self.k, tile.batch)


@dataclass(frozen=True)
class DenseSeqlens:
    """A batch element; tensors are (batch, rows, heads, d), views (rows, d, heads, batch)."""

    q: Any
    k: Any
    batch: Any

    def rows(self, view: Any, side: str, head: Any, turned: bool = False) -> Any:
        return view[None, None, head, self.batch]

    def plain(self, tensor: Any, side: str, head: Any) -> Any:
        return tensor[self.batch, None, head, None]

    def values(self, tensor: Any, head: Any) -> Any:
        return tensor[self.batch, head, None]

    def set_value(self, tensor: Any, head: Any, row: Any, value: Any) -> None:
        tensor[self.batch, head, row] = value

    def padded(self, view: Any, head: Any, tile: int) -> Any:
        """``view`` is (rows, heads, batch)."""
        return view[None, head, self.batch]

    def tile_q(self, block: Any, head: Any, heads: Any, tile: int) -> Any:
        return (_wide(self.batch) * heads + head) * ceil_div(self.q, tile) + block

    def tile_k(self, block: Any, head: Any, heads: Any, tile: int, ctas: int = 1) -> Any:
        return (_wide(self.batch) * heads + head) * ceil_div(self.k, tile) + block


@dataclass(frozen=True)
class Varlen:
    """Sequences one after the other; ``records`` (batch, RECORD_INTS) are made by the prepare
    kernel. ``at`` loads one: a role calls it once per tile and keeps what it gives.
    """

    records: Any

    def at(self, tile: Any) -> VarlenSeqlens:
        lengths = int_row(self.records, tile.batch, 0, 4)
        first = int_row(self.records, tile.batch, 4, 4)
        offset_q, q, offset_k, k = lengths
        return VarlenSeqlens(q, k, offset_q, offset_k, first[0], first[1])


@dataclass(frozen=True)
class VarlenSeqlens:
    """A sequence; tensors are (total, heads, d), views as `ragged.tma_view` makes them."""

    q: Any
    k: Any
    offset_q: Any
    offset_k: Any
    first_q: Any  # tiles of queries before this sequence
    first_k: Any  # tiles of keys (of a cluster) before it

    def _side(self, side: str) -> tuple[Any, Any]:
        return {"q": (self.offset_q, self.q), "k": (self.offset_k, self.k)}[side]

    def rows(self, view: Any, side: str, head: Any, turned: bool = False) -> Any:
        import cutlass.cute as cute

        offset, length = self._side(side)
        total = view.shape[int(turned)]
        start, end = total - length, BACK_ROWS - total + offset + length
        first = (0, start) if turned else (start, 0)
        where = (*first, 0, end, BACK_ROWS)  # see `ragged`
        return cute.domain_offset(where, view)[None, None, head, 0, 0]

    def plain(self, tensor: Any, side: str, head: Any) -> Any:
        import cutlass.cute as cute

        return cute.domain_offset((self._side(side)[0], 0, 0), tensor)[None, head, None]

    def values(self, tensor: Any, head: Any) -> Any:
        import cutlass.cute as cute

        return cute.domain_offset((0, self.offset_q), tensor)[head, None]

    def set_value(self, tensor: Any, head: Any, row: Any, value: Any) -> None:
        tensor[head, self.offset_q + row] = value

    def padded(self, view: Any, head: Any, tile: int) -> Any:
        """``view`` is (rows, heads): the tiles of all sequences one after the other."""
        import cutlass.cute as cute

        return cute.domain_offset((self.first_q * tile, 0), view)[None, head]

    def tile_q(self, block: Any, head: Any, heads: Any, tile: int) -> Any:
        return _wide(self.first_q + block) * heads + head

    def tile_k(self, block: Any, head: Any, heads: Any, tile: int, ctas: int = 1) -> Any:
        """``block`` counts tiles of one CTA, ``first_k`` those of a cluster of ``ctas``."""
        return _wide(self.first_k * ctas + block) * heads + head
