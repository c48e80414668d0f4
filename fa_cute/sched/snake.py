"""Long and short tiles alike for a fixed set of CTAs: forth in one round, back in the next."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..ops.arith import at_most, ceil_div, hi, lo
from .base import Tile, TileSpace
from .lpt import LptPersistent, heads_in_l2

# What K and V of the heads that run together may take of an L2 of 50 MB, whose halves hold copies
# of what both use.
SECTION_BYTES = 34 << 20
LONG_SECTION_BYTES = 16 << 20
GCD_STEPS = 16  # of Euclid's algorithm, enough for numbers below 1597: twice the SMs of a device


@dataclass(frozen=True)
class SnakeWalk:
    """CTA ``lane`` of ``width``, in a round of one tile per CTA."""

    order: Any
    lane: Any
    width: Any
    round: Any

    def tile(self) -> Tile:
        back = self.round % 2
        lane = self.lane + back * (self.width - 1 - 2 * self.lane)
        return self.order.at(self.round * self.width + lane)

    def next(self) -> SnakeWalk:
        return replace(self, round=self.round + 1)


@dataclass(frozen=True)
class Snake(LptPersistent):
    """Longest first, dealt in turn, every other round backwards.

    Dealing forth only, the first CTA gets the longest tile of every round and the last one the
    shortest: over all rounds they differ by a whole longest tile.
    """

    def start(self, block: Any, num_blocks: Any, cluster: int = 1) -> SnakeWalk:
        return SnakeWalk(self, block // cluster, num_blocks // cluster, 0 * block)


def period(num_m: Any, width: Any) -> Any:
    """The fewest heads of ``num_m`` tiles that fill whole pairs of rounds of ``width`` CTAs.

    A pair of rounds, forth and back, gives every CTA as much as any other. A section that ends
    within one begins its long tiles at some CTA in the middle, the next section at the same one
    again, and so on: then some CTAs get far more (by half, for 64 heads of 4 tiles on 132).
    """
    common, rest = 2 * width, num_m % (2 * width)
    for _ in range(GCD_STEPS):
        more = at_most(1, rest)
        common, rest = common + more * (rest - common), more * (common % hi(rest, 1))
    return 2 * width // common


def dealt(
    space: TileSpace,
    num_sms: Any,
    *,
    seqlen_k: Any,
    kv_bytes_per_row: int,
    qhead_per_kvhead: Any = 1,
) -> tuple[Snake, Any]:
    """An order and the number of CTAs for it: one per SM, or one per tile where the heads that
    balance a section do not fit in L2 (then tiles are long, and the hardware balances better).
    """
    heads = space.num_heads * space.num_batch
    even = period(space.num_m, num_sms)
    fits = at_most(ceil_div(even, qhead_per_kvhead) * seqlen_k, SECTION_BYTES // kv_bytes_per_row)
    long = qhead_per_kvhead * heads_in_l2(seqlen_k, kv_bytes_per_row, heads, LONG_SECTION_BYTES)
    section = hi(lo(long + fits * (even - long), heads), 1)
    return Snake(space, section), num_sms + (1 - fits) * hi(space.size - num_sms, 0)
