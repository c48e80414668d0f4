"""The loading warp of the SM90 forward kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from .ctx import FwdCtx, Listed
from .plan import TEAM_ROWS


def _sides(atom, smem: cute.Tensor, view: cute.Tensor, tiler: tuple[int, int]):
    """SMEM (bytes, slot) and global (bytes, block) sides of the copies of an operand's rows."""
    blocks = cute.local_tile(view, tiler, (None, 0))
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(blocks, 0, 2)
    )


@cute.jit
def _hand(cx: FwdCtx, slot, tile):
    """Put a tile's numbers into a slot of sTile."""
    if cute.arch.lane_idx() == 0:
        cx.hand(slot, tile)


@cute.jit
def _load_q(cx: FwdCtx, q, tile):
    """Q of all teams of a tile. With a list also its numbers: a tile that is not valid is a slot of
    these alone.
    """
    c = cx.cfg
    mQ = cx.seqlens(tile).rows(cx.args.mQ, "q", tile.head)
    sides = _sides(cx.args.load_q, cx.smem.sQ, mQ, (TEAM_ROWS, c.head_dim))
    if const_expr(c.listed):
        free = q.acquire_and_advance(
            tx_bytes=Int32(tile.valid) * c.smem.bytes("sQ"),
            fill=lambda slot: _hand(cx, slot, tile),
        )
        if tile.valid:
            _copy_q(cx, free, tile, sides)
    else:
        free = q.acquire_and_advance()
        _copy_q(cx, free, tile, sides)
    return q


@cute.jit
def _copy_q(cx: FwdCtx, free, tile, sides):
    """Q of all teams of a tile into a slot."""
    c = cx.cfg
    tQsQ, tQgQ = sides
    for team in cutlass.range_constexpr(c.teams):
        cute.copy(
            cx.args.load_q,
            tQgQ[None, tile.m_block * c.teams + team],
            tQsQ[None, free.index * c.teams + team],
            tma_bar_ptr=free.barrier,
        )


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
    source = replace(tile, head=head, batch=batch)
    if const_expr(isinstance(tile, Listed)):
        k = after.at.k if after.valid else tile.at.k
        offset_k = after.at.offset_k if after.valid else tile.at.offset_k
        source = replace(source, at=replace(tile.at, k=k, offset_k=offset_k))
    return source, block


@dataclass(frozen=True)
class Load:
    """One warp: Q, K and V by TMA, in the order in which the consumers need them; of a list it
    alone looks tiles up. Waits for nothing but free slots; feeds load_q and load_kv.
    """

    @cute.jit
    def run(self, cx: FwdCtx):
        c = cx.cfg
        q, kv = cx.pipes.load_q.make_producer(), cx.pipes.load_kv.make_producer()
        sched = cx.scheduler()
        tile = cx.first_tile if const_expr(c.listed) else sched.tile()
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
            after = cx.tile_of(sched)
            if const_expr(c.joined):
                if const_expr(not c.listed):
                    if after.valid:
                        q = _load_q(cx, q, after)
                else:
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
        if const_expr(c.listed and not c.joined):
            q = _load_q(cx, q, tile)  # that there is none
        # Leaving while copies into this CTA's memory are on their way is an error, so wait for
        # every slot to come back.
        q.tail()
        kv.tail()
