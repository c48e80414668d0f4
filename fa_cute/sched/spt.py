"""KV blocks for the backward, in an order that a deterministic dQ can follow.

A CTA owns one KV block and adds its share to every dQ tile that sees the block. Deterministic means
that the CTAs of a dQ tile add in one fixed order: a turnstile per tile, an int32 counter that
starts at 0; CTA ``n`` waits until it equals ``lock_value``, adds, and increments. Nobody may wait
for a CTA that cannot have started, so the turnstile order is the launch order: descending KV blocks
where the band is bounded on the right (the last block has the fewest query blocks and is done
first), else ascending.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..ops.mask import Band, Blocks, kv_blocks
from .base import Once, Tile, grid_of
from .lpt import Sections


def descends(mask: Band) -> bool:
    """Whether KV blocks are launched, and add to dQ, from the last down."""
    return mask.right is not None


def lock_value(mask: Band, n_block: Any, blocks: Blocks) -> Any:
    """Value of the counter of a dQ tile at which KV block ``n_block`` may add.

    ``blocks`` are the tile's ``kv_blocks``: exactly the CTAs that add to it, so ranks count from 0
    without gaps and a CTA that never visits the tile owes it nothing.
    """
    return blocks.hi - 1 - n_block if descends(mask) else n_block - blocks.lo


def dq_lock(
    mask: Band, m_block: Any, n_block: Any, tile_m: int, tile_n: int, seqlen_q: Any, seqlen_k: Any
) -> Any:
    """``lock_value`` from block numbers; ``tile_n`` is what one owner covers (a pair: both)."""
    return lock_value(mask, n_block, kv_blocks(mask, m_block, tile_m, tile_n, seqlen_q, seqlen_k))


def dkv_lock(head: Any, qhead_per_kvhead: Any) -> Any:
    """Value of a KV block's counter at which query head ``head`` may add to dK and dV."""
    return head % qhead_per_kvhead


@dataclass(frozen=True)
class Ascending(Sections):
    """KV blocks first to last, one per CTA (cluster); heads of a section side by side."""

    def at(self, index: Any) -> Tile:
        block, head_batch = self.split(index)
        return self.space.tile(block, head_batch, index)

    def grid(self, num_sms: Any = None, cluster: int = 1) -> tuple[Any, int, int]:
        return grid_of(self.space.size, cluster)

    def start(self, block: Any, num_blocks: Any, cluster: int = 1) -> Once:
        return Once(self, block // cluster)


@dataclass(frozen=True)
class Spt(Ascending):
    """Shortest first: KV blocks last to first."""

    def at(self, index: Any) -> Tile:
        block, head_batch = self.split(index)
        return self.space.tile(self.space.num_m - 1 - block, head_batch, index)


def for_mask(mask: Band) -> type[Ascending]:
    """The order whose launches agree with ``lock_value``."""
    return Spt if descends(mask) else Ascending
