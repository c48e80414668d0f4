"""What the roles of the SM90 forward kernel see."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ... import sched
from ...ops.arith import at_most, hi
from ...ops.mask import Blocks, kv_blocks
from ..args import FwdSpec
from .plan import TEAM_ROWS, FwdConfig


@dataclass(frozen=True)
class FwdArgs:
    """Tensors and atoms that cross the kernel boundary; TMA views are (rows, head_dim, heads,
    batch).
    """

    load_q: cute.CopyAtom
    load_k: cute.CopyAtom
    load_v: cute.CopyAtom
    store_o: cute.CopyAtom
    mQ: cute.Tensor
    mK: cute.Tensor
    mV: cute.Tensor
    mO: cute.Tensor
    mLSE: cute.Tensor  # (batch, heads, seqlen_q)
    qk: cute.TiledMma
    pv: cute.TiledMma
    scale_log2: Float32
    qhead_per_kvhead: Int32
    order: Any  # of tiles


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

    @property
    def seqlens(self) -> tuple[Int32, Int32]:
        """(seqlen_q, seqlen_k)"""
        return self.args.mQ.shape[0], self.args.mK.shape[0]

    def rows_of(self, tile: sched.Tile, team) -> Int32:
        """First query row of a team."""
        return tile.m_block * self.cfg.tile_m + team * TEAM_ROWS

    def kv_blocks(self, tile: sched.Tile) -> Blocks:
        """KV blocks of a tile."""
        return self._at_least_one(
            kv_blocks(self.spec.mask, tile.m_block, self.cfg.tile_m, self.cfg.tile_n, *self.seqlens)
        )

    def team_blocks(self, tile: sched.Tile, team) -> Blocks:
        """KV blocks that a team needs of its tile's; one if all its rows lie past seqlen_q."""
        m = tile.m_block * self.cfg.teams + team
        blocks = self._at_least_one(
            kv_blocks(self.spec.mask, m, TEAM_ROWS, self.cfg.tile_n, *self.seqlens)
        )
        has_rows = at_most(m * TEAM_ROWS + 1, self.seqlens[0])
        return replace(blocks, hi=blocks.lo + 1 + (blocks.hi - blocks.lo - 1) * has_rows)

    def unseen(self, tile: sched.Tile, team) -> Int32:
        """Last KV blocks of a tile that a team does not need."""
        return self.kv_blocks(tile).hi - self.team_blocks(tile, team).hi

    def _at_least_one(self, blocks: Blocks) -> Blocks:
        """Rows that see no key still visit a block, all masked, and come out as 0 and -inf."""
        return replace(blocks, hi=hi(blocks.hi, blocks.lo + 1))

    def kv_head(self, tile: sched.Tile) -> Int32:
        """The kv head of a tile's query head."""
        return tile.head // self.args.qhead_per_kvhead
