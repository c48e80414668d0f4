"""The loading warp of the SM90 forward kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import const_expr
from cutlass.cute.nvgpu import cpasync

from .ctx import FwdCtx
from .plan import TEAM_ROWS


def _sides(atom, smem: cute.Tensor, view: cute.Tensor, tiler: tuple[int, int]):
    """SMEM (bytes, slot) and global (bytes, block) sides of the copies of an operand's rows."""
    blocks = cute.local_tile(view, tiler, (None, 0))
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(blocks, 0, 2)
    )


@cute.jit
def _load_q(cx: FwdCtx, q, tile):
    """Q of all teams of a tile."""
    c = cx.cfg
    mQ = cx.seqlens(tile).rows(cx.args.mQ, "q", tile.head)
    tQsQ, tQgQ = _sides(cx.args.load_q, cx.smem.sQ, mQ, (TEAM_ROWS, c.head_dim))
    free = q.acquire_and_advance()
    for team in cutlass.range_constexpr(c.teams):
        cute.copy(
            cx.args.load_q,
            tQgQ[None, tile.m_block * c.teams + team],
            tQsQ[None, free.index * c.teams + team],
            tma_bar_ptr=free.barrier,
        )
    return q


@cute.jit
def _load_k(cx: FwdCtx, free, tile, at, n_block):
    """K of a block into a slot; ``at`` are the lengths of the tile."""
    mK = at.rows(cx.args.mK, "k", cx.kv_head(tile))
    tKsK, tKgK = _sides(cx.args.load_k, cx.smem.sK, mK, (cx.cfg.tile_n, cx.cfg.head_dim))
    source = tKgK[None, n_block]
    cute.copy(cx.args.load_k, source, tKsK[None, free.index], tma_bar_ptr=free.barrier)


@cute.jit
def _load_v(cx: FwdCtx, free, tile, at, n_block):
    """V of a block into a slot."""
    mV = at.rows(cx.args.mV, "k", cx.kv_head(tile))
    tVsV, tVgV = _sides(cx.args.load_v, cx.smem.sV, mV, (cx.cfg.tile_n, cx.cfg.head_dim_v))
    source = tVgV[None, n_block]
    cute.copy(cx.args.load_v, source, tVsV[None, free.index], tma_bar_ptr=free.barrier)


@cute.jit
def _first(cx: FwdCtx, q, kv, tile):
    """A tile's Q, and its first K without a V: the slot waits for the bytes of K alone."""
    free = kv.acquire_and_advance(tx_bytes=cx.cfg.smem.bytes("sK"))
    _load_k(cx, free, tile, cx.seqlens(tile), cx.kv_blocks(tile).hi - 1)
    q = _load_q(cx, q, tile)
    return q, kv


@cute.jit
def _either(after, n_after, tile, n_tile):
    """(tile, block) of ``after`` if there is such a tile, else of ``tile``."""
    head = after.head if after.valid else tile.head
    batch = after.batch if after.valid else tile.batch
    block = n_after if after.valid else n_tile
    return replace(tile, head=head, batch=batch), block


@dataclass(frozen=True)
class Load:
    """One warp: Q, K and V by TMA, in the order in which the consumers need them. Waits for
    nothing but free slots; feeds load_q and load_kv.
    """

    @cute.jit
    def run(self, cx: FwdCtx):
        c = cx.cfg
        q, kv = cx.pipes.load_q.make_producer(), cx.pipes.load_kv.make_producer()
        sched = cx.scheduler()
        tile = sched.tile()
        if const_expr(c.joined):
            q, kv = _first(cx, q, kv, tile)
        while tile.valid:
            blocks, at = cx.kv_blocks(tile), cx.seqlens(tile)
            if const_expr(not c.joined):
                q, kv = _first(cx, q, kv, tile)
            for i in cutlass.range(blocks.hi - 1 - blocks.lo, unroll=1):
                n_block = blocks.hi - 1 - i
                free = kv.acquire_and_advance()
                _load_v(cx, free, tile, at, n_block)
                _load_k(cx, free, tile, at, n_block - 1)
            sched = sched.next()
            after = sched.tile()
            if const_expr(c.joined):
                if after.valid:
                    q = _load_q(cx, q, after)
                free = kv.acquire_and_advance()
                _load_v(cx, free, tile, at, blocks.lo)
                # After the last tile nobody looks at the K of this slot, but it has to come.
                source, n_block = _either(after, cx.kv_blocks(after).hi - 1, tile, blocks.lo)
                _load_k(cx, free, source, cx.seqlens(source), n_block)
            else:
                free = kv.acquire_and_advance(tx_bytes=c.smem.bytes("sV"))
                _load_v(cx, free, tile, at, blocks.lo)
            tile = after
        # Leaving while copies into this CTA's memory are on their way is an error, so wait for
        # every slot to come back.
        q.tail()
        kv.tail()
