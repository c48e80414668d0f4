"""A fixed set of CTAs, one per SM, walks all tiles in linear order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .base import Linear, Walk, capped, grid_of


@dataclass(frozen=True)
class Persistent(Linear):
    """Linear order; CTA i takes tiles i, i + grid, i + 2 grid, ..."""

    def grid(self, num_sms: Any, cluster: int = 1) -> tuple[Any, int, int]:
        return grid_of(capped(self.space.size, num_sms, cluster), cluster)

    def start(self, block: Any, num_blocks: Any, cluster: int = 1) -> Walk:
        return Walk(self, block // cluster, num_blocks // cluster)
