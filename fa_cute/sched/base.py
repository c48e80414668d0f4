"""Tiles, the space they come from, and what a scheduler is.

An *order* says which tile is the i-th; a *scheduler* walks an order. Both are frozen values: a
kernel rebinds ``sched = sched.next()`` in its tile loop, which is how the DSL carries state (never
an attribute, never a list).

On the host (traced or not) ``order.grid(...)`` gives the launch grid; the order crosses the kernel
boundary as a field of the kernel's arguments; in the kernel ``here(order)`` gives the scheduler of
this CTA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ..ops.arith import lo

PAST_EVERY_END = 2**31 - 1  # no index, since a space has fewer tiles


@dataclass(frozen=True)
class Tile:
    """One unit of work: a block of query rows (forward) or of keys (backward) of one query head."""

    m_block: Any
    head: Any
    batch: Any
    valid: Any

    @property
    def n_block(self) -> Any:
        """The same number where tiles are KV blocks (backward)."""
        return self.m_block


@dataclass(frozen=True)
class TileSpace:
    """``num_m`` blocks x ``num_heads`` query heads x ``num_batch``; below 2^30 tiles in all."""

    num_m: Any
    num_heads: Any
    num_batch: Any

    @property
    def size(self) -> Any:
        return self.num_m * self.num_heads * self.num_batch

    def tile(self, m_block: Any, head_batch: Any, index: Any) -> Tile:
        """The tile of a block and a head counted over the batch, valid if ``index`` is."""
        batch = head_batch // self.num_heads
        return Tile(m_block, head_batch - batch * self.num_heads, batch, index < self.size)


class Order(Protocol):
    """A permutation of the tiles: index -> tile; past the end ``valid`` is false."""

    space: TileSpace

    def at(self, index: Any) -> Tile: ...


class Scheduler(Protocol):
    """Where a CTA is in its walk."""

    def tile(self) -> Tile: ...

    def next(self) -> Scheduler: ...


@dataclass(frozen=True)
class Linear:
    """Block after block, head after head: CTAs that run together share K and V in L2."""

    space: TileSpace

    def at(self, index: Any) -> Tile:
        head_batch = index // self.space.num_m
        return self.space.tile(index - head_batch * self.space.num_m, head_batch, index)


@dataclass(frozen=True)
class Walk:
    """A position in an order; each step adds ``step``."""

    order: Any
    index: Any
    step: Any

    def tile(self) -> Tile:
        return self.order.at(self.index)

    def next(self) -> Walk:
        return Walk(self.order, self.index + self.step, self.step)

    def take(self, index: Any) -> Walk:
        """The same walk at a position that somebody else chose (a counter, a hardware queue)."""
        return Walk(self.order, index, self.step)


@dataclass(frozen=True)
class Once:
    """A walk of one tile: the next index is past every end, a constant.

    A tile loop over it is known to run once, so a kernel carries no position and never computes a
    second tile (registers and divisions, where a role has none to spare).
    """

    order: Any
    index: Any

    def tile(self) -> Tile:
        return self.order.at(self.index)

    def next(self) -> Once:
        kind = type(self.index)
        return Once(self.order, kind(PAST_EVERY_END))


def grid_of(num_clusters: Any, cluster: int) -> tuple[Any, int, int]:
    """A one-dimensional launch grid: 2^31 - 1 CTAs in x, but only 65535 in y and z."""
    return num_clusters * cluster, 1, 1


def capped(num_clusters: Any, num_sms: Any, cluster: int) -> Any:
    """As many clusters as fit at once, one CTA per SM."""
    return lo(num_clusters, num_sms // cluster)


def here(order: Any, cluster: int = 1) -> Any:
    """The scheduler of this CTA, in a kernel; CTAs of a cluster get the same tiles."""
    import cutlass.cute as cute

    return order.start(cute.arch.block_idx()[0], cute.arch.grid_dim()[0], cluster)
