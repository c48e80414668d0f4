"""A fixed set of CTAs draws tiles from a counter in global memory.

Static persistent order loses on long sequences (CTAs drift apart and the last round is ragged); a
counter gives the next tile to whoever is free, as the hardware does for one tile per CTA, and still
lets the prologue of the next tile run under the epilogue of this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .base import Walk
from .lpt import LptPersistent


@dataclass(frozen=True)
class Dynamic(LptPersistent):
    """Longest first, by a counter that starts at 0 for each launch.

    CTA i starts with tile i; every further tile is ``drawn(counter_before)`` of an atomic increment
    by one warp, which passes the index on to the other roles; each then continues with ``sched =
    sched.take(index)``. A drawn index past
    the end is a tile that is not valid: that ends the loop, so every CTA draws exactly once too
        often and the counter ends at ``space.size`` (of clusters: one draw per cluster).
    """

    def drawn(self, counter_before: Any, num_blocks: Any, cluster: int = 1) -> Any:
        """The tile index of a draw: the first ``num_blocks / cluster`` tiles went without one."""
        return counter_before + num_blocks // cluster

    def start(self, block: Any, num_blocks: Any, cluster: int = 1) -> Walk:
        """``next()`` is for tests of the order only; a kernel draws."""
        return Walk(self, block // cluster, num_blocks // cluster)
