"""What the roles share: read-only, made once per CTA."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...ops import mask
from ...ops.arith import hi
from ...sched import Tile, here
from ..args import FwdSpec
from .plan import Q_TILES, FwdConfig


@dataclass(frozen=True)
class KernelArgs:
    """Everything that crosses the kernel boundary and is not known while tracing."""

    tma_q: cute.CopyAtom
    tma_k: cute.CopyAtom
    tma_v: cute.CopyAtom
    tma_o: cute.CopyAtom
    mQ: cute.Tensor  # (seqlen_q, head_dim, heads, batch); varlen as ops.ragged says
    mK: cute.Tensor  # (seqlen_k, head_dim, heads_kv, batch)
    mV: cute.Tensor  # (head_dim_v, seqlen_k, heads_kv, batch)
    mO: cute.Tensor  # (seqlen_q, head_dim_v, heads, batch)
    mLSE: cute.Tensor  # (batch, heads, seqlen_q); varlen (heads, total_q)
    tiled_mma_qk: cute.TiledMma
    tiled_mma_pv: cute.TiledMma
    order: Any  # of the tiles
    scale_log2: Float32  # magnitude of the factor on a score, in log2 units
    negate: Boolean  # its sign: applied to Q by the tensor core
    seqlens: Any  # ops.seqlen policy: lengths and places of a tile's rows
    qhead_per_kvhead: Int32
    window_left: Int32 | None  # keys seen before the diagonal
    window_right: Int32 | None  # and after it


@dataclass(frozen=True)
class Smem:
    """Operands in shared memory; sK and sV are the same ring."""

    sQ: cute.Tensor  # (MMA, MMA_M, MMA_K, TILE)
    sK: cute.Tensor  # (MMA, MMA_N, MMA_K, SLOT)
    sV: cute.Tensor  # (MMA, MMA_N, MMA_K, SLOT)
    sO: cute.Tensor  # (tile_m, head_dim_v, TILE)
    sStats: cute.Tensor  # (tile_m, 2, TILE): factor or sum, maximum
    tmem_address: cute.Pointer


@dataclass(frozen=True)
class FwdCtx:
    """The one argument of a role."""

    cfg: FwdConfig
    spec: FwdSpec
    args: KernelArgs
    smem: Smem
    layouts: Any  # composed SMEM layouts by field name
    pipes: Any  # ops.pipes.EdgePipe by edge name
    barriers: Any  # NamedBarrier by name

    def scheduler(self):
        """This CTA's walk over the tiles."""
        return here(self.args.order)

    @property
    def mask(self) -> mask.Band:
        """Which keys a query sees."""
        return self.spec.band(self.args.window_left, self.args.window_right)

    def seqlens(self, tile: Tile):
        """Lengths of the batch element or sequence of a tile, and where its rows lie."""
        return self.args.seqlens.at(tile)

    def kv_blocks(self, tile: Tile) -> mask.Blocks:
        """KV blocks that the two query tiles of `tile` visit, together.

        Where O lies over Q, Q is brought for every tile: one that sees no key visits a block, all
        masked.
        """
        blocks = self._blocks(tile, tile.m_block, Q_TILES * self.cfg.tile_m)
        if self.cfg.o_over_q:
            return replace(blocks, hi=hi(blocks.hi, blocks.lo + 1))
        return blocks

    def kv_blocks_of(self, tile: Tile, t) -> mask.Blocks:
        """The same for query tile `t` alone."""
        return self._blocks(tile, tile.m_block * Q_TILES + t, self.cfg.tile_m)

    def spans(self, tile: Tile, t):
        """How the blocks below the last one are gone through: `ops.mask.kv_spans` of tile `t`."""
        return mask.kv_spans(self.mask, self.kv_blocks(tile), self.kv_blocks_of(tile, t))

    def _blocks(self, tile: Tile, m_block, rows: int) -> mask.Blocks:
        at = self.seqlens(tile)
        return mask.kv_blocks(self.mask, m_block, rows, self.cfg.tile_n, at.q, at.k)

    def head_kv(self, tile: Tile):
        """The kv head that the query head of `tile` reads."""
        return tile.head // self.args.qhead_per_kvhead
