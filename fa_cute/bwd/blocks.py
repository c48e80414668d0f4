"""Which rows a CTA of the kernels before and after the main one has.

Two policies with one interface, as in `ops.seqlen`: the blocks of a dense batch are counted, those
of sequences are looked up in the list of owners that `sched.varlen` makes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fa_cute.ops.arith import ceil_div
from fa_cute.sched import Tile


@dataclass(frozen=True)
class Cut:
    """How one side is cut, static: tiles of the main kernel's grid into blocks of ``rows``."""

    side: str  # "q" or "k"
    tile: int  # what the main kernel counts: a block of queries, the keys of a cluster
    rows: int  # of a CTA here; divides ``tile``

    @property
    def per_tile(self) -> int:
        return self.tile // self.rows


@dataclass(frozen=True)
class Block:
    """Rows ``[number * rows, ...)`` of a batch element."""

    number: Any
    lengths: Any  # as `ops.seqlen` gives them
    valid: Any  # False for CTAs past the last block


@dataclass(frozen=True)
class Grid:
    """The CTAs of a kernel before or after the main one: a block of one head each.

    All heads of the last block come first. The main kernel goes through a batch from its start: so
    what the kernel before reads last is in L2 when it begins, and what it writes last is there for
    the kernel after (measured: 1 % of a backward of 32 x 1024). Rows of neighbouring heads lie side
    by side.
    """

    blocks: Any  # Counted or Listed
    num_blocks: Any
    heads: Any

    @property
    def launch(self) -> tuple[Any, int, int]:
        """The launch grid; only its first dimension has room for many batches."""
        return self.num_blocks * self.heads, 1, 1

    def here(self, cut: Cut) -> tuple[Block, Any]:
        """(block, head) of this CTA, in a kernel."""
        import cutlass.cute as cute

        index = cute.arch.block_idx()[0]
        after = index // self.heads
        return self.blocks.at(self.num_blocks - 1 - after, cut), index - after * self.heads


def _length(lengths: Any, side: str) -> Any:
    return lengths.q if side == "q" else lengths.k


@dataclass(frozen=True)
class Counted:
    """Blocks of a dense batch, all of one element after the other."""

    seqlens: Any

    def count(self, cut: Cut, batch: Any) -> Any:
        """How many there are."""
        return ceil_div(_length(self.seqlens, cut.side), cut.tile) * cut.per_tile * batch

    def at(self, index: Any, cut: Cut) -> Block:
        blocks = ceil_div(_length(self.seqlens, cut.side), cut.tile) * cut.per_tile
        batch = index // blocks
        return Block(index - batch * blocks, self.seqlens.at(Tile(0, 0, batch, True)), True)


@dataclass(frozen=True)
class Listed:
    """Blocks of sequences: ``owner`` says whose each tile of one side is, ``header`` how many."""

    seqlens: Any
    header: Any
    owner: Any

    def count(self, cut: Cut, batch: Any) -> Any:
        """No more than this; how many there are, only the device knows."""
        return self.owner.shape[0] * cut.per_tile

    def at(self, index: Any, cut: Cut) -> Block:
        import cutlass

        tile = index // cut.per_tile
        valid = tile < self.header[0, 2 if cut.side == "q" else 3]
        # Nobody wrote owners past the last tile.
        sequence = cutlass.select_(valid, self.owner[tile], cutlass.Int32(0))
        lengths = self.seqlens.at(Tile(0, 0, sequence, True))
        first = lengths.first_q if cut.side == "q" else lengths.first_k
        return Block(index - first * cut.per_tile, lengths, valid)
