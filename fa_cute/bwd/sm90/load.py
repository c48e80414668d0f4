"""The load warp: K and V once, then query blocks in order."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import cpasync

from fa_cute.bwd.sm90.ctx import BwdCtx


@dataclass(frozen=True)
class Load:
    """One warp. Fills load_k, load_v once and load_q, load_do per query block; waits for the
    consumers' releases.
    """

    @cute.jit
    def run(self, cx: BwdCtx):
        c, g, s, tile = cx.cfg, cx.g, cx.smem, cx.tile
        gK = cute.local_tile(
            g.mK[None, None, cx.head_kv, tile.batch], (c.tile_n, c.head_dim), (cx.n_block, 0)
        )
        gV = cute.local_tile(
            g.mV[None, None, cx.head_kv, tile.batch], (c.tile_n, c.head_dim_v), (cx.n_block, 0)
        )
        gQ = cute.local_tile(
            g.mQ[None, None, tile.head, tile.batch], (c.tile_m, c.head_dim), (None, 0)
        )
        gdO = cute.local_tile(
            g.mdO[None, None, tile.head, tile.batch], (c.tile_m, c.head_dim_v), (None, 0)
        )
        gLse = cute.local_tile(g.mLse[None, tile.head, tile.batch], (c.tile_m,), (None,))
        gDelta = cute.local_tile(g.mDelta[None, tile.head, tile.batch], (c.tile_m,), (None,))
        tKsK, tKgK = partition(g.load_k, s.sK, gK)
        tVsV, tVgV = partition(g.load_v, s.sV, gV)
        tQsQ, tQgQ = partition(g.load_q, s.sQ, gQ)  # (TMA, STAGE), (TMA, M_BLOCK)
        tOsO, tOgO = partition(g.load_do, s.sdO, gdO)
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)

        k, v = cx.pipes.load_k.make_producer(), cx.pipes.load_v.make_producer()
        q, do = cx.pipes.load_q.make_producer(), cx.pipes.load_do.make_producer()
        k_free = k.acquire_and_advance()
        cute.copy(g.load_k, tKgK, tKsK, tma_bar_ptr=k_free.barrier)
        blocks = cx.q_blocks()
        for m_block in cutlass.range(blocks.lo, blocks.hi, unroll=1):
            q_free = q.acquire_and_advance()
            cute.copy(
                g.load_q, tQgQ[None, m_block], tQsQ[None, q_free.index], tma_bar_ptr=q_free.barrier
            )
            with cute.arch.elect_one():
                cute.copy(
                    bulk, gLse[None, m_block], s.sLse[None, q_free.index], mbar_ptr=q_free.barrier
                )
            if m_block == blocks.lo:
                # V is needed after the first S: load it behind K and Q
                v_free = v.acquire_and_advance()
                cute.copy(g.load_v, tVgV, tVsV, tma_bar_ptr=v_free.barrier)
            do_free = do.acquire_and_advance()
            cute.copy(
                g.load_do,
                tOgO[None, m_block],
                tOsO[None, do_free.index],
                tma_bar_ptr=do_free.barrier,
            )
            with cute.arch.elect_one():
                cute.copy(
                    bulk,
                    gDelta[None, m_block],
                    s.sDelta[None, do_free.index],
                    mbar_ptr=do_free.barrier,
                )
        q.tail()
        do.tail()


def partition(atom, smem, tile):
    """(shared, global) sides of a TMA copy; the tile's first two modes are one box."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(tile, 0, 2)
    )
