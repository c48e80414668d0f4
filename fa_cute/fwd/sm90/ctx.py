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
class FwdCtx:
    """Configuration, tensors, pipelines: read-only; what changes lives in the roles' own names."""

    cfg: cutlass.Constexpr[FwdConfig]
    spec: cutlass.Constexpr[FwdSpec]
    args: FwdArgs
    # sQ (64, d, slabs), sK (tile_n, d, stages), sV (tile_n, d_v, stages), sO (64, d_v, slabs)
    smem: SimpleNamespace
    pipes: SimpleNamespace
    barriers: SimpleNamespace

    def scheduler(self):
        """The walk of this CTA over the tiles."""
        return sched.here(self.args.order)

    def seqlens(self, tile: sched.Tile):
        """Lengths of the batch element or sequence of a tile, and where its rows lie."""
        a = self.args
        if self.spec.varlen:
            return seqlen.Varlen(a.records).at(tile)
        return seqlen.Dense(a.mQ.shape[0], a.mK.shape[0]).at(tile)

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
        return tile.m_block * self.cfg.tile_m + team * TEAM_ROWS

    def kv_blocks(self, tile: sched.Tile) -> Blocks:
        """KV blocks of a tile."""
        at = self.seqlens(tile)
        return self._at_least_one(
            kv_blocks(self.mask, tile.m_block, self.cfg.tile_m, self.cfg.tile_n, at.q, at.k)
        )

    def team_blocks(self, tile: sched.Tile, team) -> Blocks:
        """KV blocks that a team needs of its tile's; one if all its rows lie past seqlen_q."""
        m = tile.m_block * self.cfg.teams + team
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

    def needs_mask(self, blocks: Blocks, n_block):
        """Whether some row of a team does not see all of one of its blocks."""
        return needs_mask(self.mask, blocks, n_block)

    def _at_least_one(self, blocks: Blocks) -> Blocks:
        """Rows that see no key still visit a block, all masked, and come out as 0 and -inf."""
        return replace(blocks, hi=hi(blocks.hi, blocks.lo + 1))

    def kv_head(self, tile: sched.Tile) -> Int32:
        """The kv head of a tile's query head."""
        return tile.head // self.args.qhead_per_kvhead
