"""A fixed set of CTAs, dealt long tiles and short tiles alike: forth in one round, back in the next."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .base import Tile
from .lpt import LptPersistent


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
