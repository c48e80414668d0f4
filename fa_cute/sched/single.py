"""One tile per CTA (or cluster), in linear order; the hardware hands out the next one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .base import Linear, Once, grid_of


@dataclass(frozen=True)
class Single(Linear):
    """Linear order, one tile each."""

    def grid(self, num_sms: Any = None, cluster: int = 1) -> tuple[Any, int, int]:
        return grid_of(self.space.size, cluster)

    def start(self, block: Any, num_blocks: Any, cluster: int = 1) -> Once:
        """The walk of CTA ``block``: its tile, then an index past the end."""
        return Once(self, block // cluster)
