"""Longest tiles first, within sections of heads whose K and V fit in L2 together.

Causal rows see more keys the later they are: handing out late query blocks first leaves short tiles
for the end, so no SM is alone with a long one. Heads of a section run side by side, block by block;
without sections all heads would stream K and V through L2 at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..ops.arith import at_most, hi, lo
from .base import Once, Tile, TileSpace, Walk, capped, grid_of

# What a section may fill. The L2 of H100 and H200; on larger ones more sections than needed cost
# nothing measurable.
L2_BYTES = 50 * 1024 * 1024


def heads_in_l2(rows: Any, bytes_per_row: int, most: Any, l2_bytes: int = L2_BYTES) -> Any:
    """How many heads of ``rows * bytes_per_row`` fit in L2: a power of two, or ``most``.

    Counted in rows, since the bytes of a long head exceed 32 bits.
    """
    rows_in_l2 = l2_bytes // bytes_per_row
    heads = 1
    power = 2
    while power <= rows_in_l2:
        heads = heads + (power // 2) * at_most(rows, rows_in_l2 // power)
        power *= 2
    return lo(heads, hi(most, 1))


@dataclass(frozen=True)
class Sections:
    """Tiles in sections of ``section`` heads: block by block, and in a block head by head.

    The last section has the heads that are left.
    """

    space: TileSpace
    section: Any

    def split(self, index: Any) -> tuple[Any, Any]:
        """(position of the block, head counted over the batch) of the i-th tile."""
        num_m = self.space.num_m
        group = index // (self.section * num_m)
        first_head = group * self.section
        rest = index - first_head * num_m
        # Past the end no heads are left; the width only has to be a divisor then.
        width = hi(lo(self.section, self.space.num_heads * self.space.num_batch - first_head), 1)
        block = rest // width
        return block, first_head + rest - block * width


@dataclass(frozen=True)
class Lpt(Sections):
    """Later blocks first, one tile per CTA: the hardware gives the next tile to whoever is free."""

    def at(self, index: Any) -> Tile:
        block, head_batch = self.split(index)
        return self.space.tile(self.space.num_m - 1 - block, head_batch, index)

    def grid(self, num_sms: Any = None, cluster: int = 1) -> tuple[Any, int, int]:
        return grid_of(self.space.size, cluster)

    def start(self, block: Any, num_blocks: Any, cluster: int = 1) -> Once:
        return Once(self, block // cluster)


@dataclass(frozen=True)
class LptPersistent(Lpt):
    """Later blocks first, dealt to a fixed set of CTAs in turn."""

    def grid(self, num_sms: Any, cluster: int = 1) -> tuple[Any, int, int]:
        return grid_of(capped(self.space.size, num_sms, cluster), cluster)

    def start(self, block: Any, num_blocks: Any, cluster: int = 1) -> Walk:
        return Walk(self, block // cluster, num_blocks // cluster)


def sectioned(
    cls: type,
    space: TileSpace,
    seqlen_k: Any,
    kv_bytes_per_row: int,
    qhead_per_kvhead: Any = 1,
    l2_bytes: int = L2_BYTES,
) -> Any:
    """An order whose sections hold the query heads of as many kv heads as fit in ``l2_bytes``.

    ``kv_bytes_per_row`` is a row of K and V, ``(head_dim + head_dim_v) * element size``.
    """
    heads = space.num_heads * space.num_batch
    kv_heads = heads_in_l2(seqlen_k, kv_bytes_per_row, heads, l2_bytes)
    return replace(cls(space, 1), section=lo(kv_heads * qhead_per_kvhead, heads))
