"""What the roles of the SM90 forward kernel see."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ... import sched
from ...ops import seqlen
from ...ops.arith import at_most, hi
from ...ops.mask import Band, Blocks, kv_blocks, needs_mask
from ...ops.rows import Scale, pinned
from ..args import FwdSpec
from .plan import TEAM_ROWS, FwdConfig


@dataclass(frozen=True)
class FwdArgs:
    """Tensors and atoms that cross the kernel boundary; TMA views are (rows, head_dim, heads,
    batch), varlen as `ops.ragged` says.
    """

    load_q: cute.CopyAtom
    load_k: cute.CopyAtom
    load_v: cute.CopyAtom
    store_o: cute.CopyAtom
    mQ: cute.Tensor
    mK: cute.Tensor
    mV: cute.Tensor
    mO: cute.Tensor
    mLSE: cute.Tensor  # (batch, heads, seqlen_q), varlen (heads, total_q)
    qk: cute.TiledMma
    pv: cute.TiledMma
    scale_log2: Float32  # of the sign that the spec names
    window_left: Int32 | None  # keys seen before the diagonal
    window_right: Int32 | None  # and after it
    qhead_per_kvhead: Int32
    order: Any  # of tiles
    records: Any  # varlen: of the sequences; else None


@dataclass(frozen=True)
class Listed(sched.Tile):
    """A tile of a list, looked up."""

    at: Any  # lengths of its sequence, and where its rows lie


@dataclass(frozen=True)
class Handed:
    """A tile from the load warp: no more of it crosses the loops of a team than where its numbers
    lie.
    """

    slot: Any  # of Q, and of sTile
    valid: Any


@dataclass(frozen=True)
class FwdCtx:
    """Configuration, tensors, pipelines: read-only; what changes lives in the roles' own names."""

    cfg: cutlass.Constexpr[FwdConfig]
    spec: cutlass.Constexpr[FwdSpec]
    args: FwdArgs
    # sQ (64, d, slabs), sK (tile_n, d, stages), sV (tile_n, d_v, stages), sO (64, d_v, slabs);
    # listed: sTile (q_stages, TILE_INTS)
    smem: SimpleNamespace
    pipes: SimpleNamespace
    barriers: SimpleNamespace
    first_tile: Any = None  # of a list: where the walk begins

    def scheduler(self):
        """The walk of this CTA over the tiles."""
        return sched.here(self.args.order)

    def tile_of(self, walk) -> sched.Tile:
        """Where a walk stands; of a list three loads, one after the other."""
        tile = walk.tile()
        if not self.cfg.listed:
            return tile
        at = seqlen.Varlen(self.args.records).at(tile)
        return Listed(tile.m_block, tile.head, tile.batch, tile.valid, at)

    def numbers(self, tile: sched.Tile | Handed) -> sched.Tile:
        """A tile with its numbers."""
        return self.handed(tile.slot) if isinstance(tile, Handed) else tile

    def seqlens(self, tile: sched.Tile | Handed):
        """Lengths of the batch element or sequence of a tile, and where its rows lie."""
        if self.cfg.listed:
            return self.numbers(tile).at
        a = self.args
        return seqlen.Dense(a.mQ.shape[0], a.mK.shape[0]).at(tile)

    def hand(self, slot, tile: Listed):
        """Put a tile into a free slot of sTile; one thread does."""
        at = tile.at
        values = (tile.m_block, Int32(tile.valid), at.q, at.k, tile.head, at.offset_q, 0, 0)
        seqlen.set_int_row(self.smem.sTile, slot, 0, values[:4])
        seqlen.set_int_row(self.smem.sTile, slot, 4, values[4:])

    def handed(self, slot) -> Listed:
        """The tile of a slot, which must be full, with what a team needs of its lengths."""
        m_block, valid, q, k = seqlen.int_row(self.smem.sTile, slot, 0, 4)
        head, offset_q, _, _ = seqlen.int_row(self.smem.sTile, slot, 4, 4)
        at = seqlen.VarlenSeqlens(q, k, offset_q, None, None, None)
        return Listed(m_block, head, None, valid != 0, at)

    def slot_of(self, slab):
        """The slot of Q that a slab lies in."""
        return at_most(self.cfg.teams, slab) if self.cfg.q_stages > 1 else Int32(0)

    @property
    def mask(self) -> Band:
        """Which keys a query sees."""
        return self.spec.band(self.args.window_left, self.args.window_right)

    @property
    def scale(self) -> Scale:
        """From products to scores."""
        return Scale(self.args.scale_log2, self.spec.negative_scale)

    def rows_of(self, tile: sched.Tile, team) -> Int32:
        """First query row of a team."""
        return self.numbers(tile).m_block * self.cfg.tile_m + team * TEAM_ROWS

    def kv_blocks(self, tile: sched.Tile) -> Blocks:
        """KV blocks of a tile."""
        at, tile = self.seqlens(tile), self.numbers(tile)
        return self._at_least_one(
            kv_blocks(self.mask, tile.m_block, self.cfg.tile_m, self.cfg.tile_n, at.q, at.k)
        )

    def team_blocks(self, tile: sched.Tile, team) -> Blocks:
        """KV blocks that a team needs of its tile's; one if all its rows lie past seqlen_q."""
        m = self.numbers(tile).m_block * self.cfg.teams + team
        at = self.seqlens(tile)
        blocks = self._at_least_one(kv_blocks(self.mask, m, TEAM_ROWS, self.cfg.tile_n, at.q, at.k))
        has_rows = at_most(m * TEAM_ROWS + 1, at.q)
        return replace(blocks, hi=blocks.lo + 1 + (blocks.hi - blocks.lo - 1) * has_rows)

    def unseen(self, tile: sched.Tile, team) -> Int32:
        """Last KV blocks of a tile that a team does not need."""
        return self.kv_blocks(tile).hi - self.team_blocks(tile, team).hi

    def unseen_below(self, tile: sched.Tile, team) -> Int32 | int:
        """First KV blocks of a tile that a team does not need; 0 while tracing without a limit on
        the left.
        """
        if self.mask.left is None:
            return 0
        return self.team_blocks(tile, team).lo - self.kv_blocks(tile).lo

    @property
    def few_registers(self) -> bool:
        """Whether the loops over KV blocks have none to spare: the limits of a window are in some,
        and beside wide heads there is no room for where a sequence lies.
        """
        return any(self.spec.window) or (self.spec.varlen and self.cfg.head_dim > 192)

    @property
    def late_ids(self) -> bool:
        """Whether a team's barrier is computed where it is met."""
        return self.cfg.late_ids or self.few_registers

    def late(self, x: Int32) -> Int32:
        """``x``; what depends on it is computed where it is used, not kept in registers over the
        loops where these are few.
        """
        return pinned(x) if self.few_registers else x

    def late_team(self, index: Int32) -> Int32:
        """`late` of a team's number, of which addresses and barriers are made; kernels without a
        list have room for these.
        """
        return self.late(index) if self.cfg.listed else index

    def needs_mask(self, blocks: Blocks, n_block):
        """Whether some row of a team does not see all of one of its blocks."""
        return needs_mask(self.mask, blocks, n_block)

    def _at_least_one(self, blocks: Blocks) -> Blocks:
        """Rows that see no key still visit a block, all masked, and come out as 0 and -inf."""
        return replace(blocks, hi=hi(blocks.hi, blocks.lo + 1))

    def kv_head(self, tile: sched.Tile) -> Int32:
        """The kv head of a tile's query head."""
        return tile.head // self.args.qhead_per_kvhead
