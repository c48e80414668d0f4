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

    def part(self, cx: BwdCtx):
        """What this CTA loads of Q and dO: the first of one part."""
        return 0, 1

    def mask(self, cx: BwdCtx):
        """Who gets that, as the bits of a multicast."""

    def more(self, cx: BwdCtx):
        """What is needed after V."""

    @cute.jit
    def run(self, cx: BwdCtx):
        c, g, s, head, of = cx.cfg, cx.g, cx.smem, cx.tile.head, cx.lengths
        keys, queries = (cx.n_block, 0), (None, 0)
        gK = cute.local_tile(of.rows(g.mK, "k", cx.head_kv), (c.tile_n, c.head_dim), keys)
        gV = cute.local_tile(of.rows(g.mV, "k", cx.head_kv), (c.tile_n, c.head_dim_v), keys)
        gQ = cute.local_tile(of.rows(g.mQ, "q", head), (c.tile_m, c.head_dim), queries)
        gdO = cute.local_tile(of.rows(g.mdO, "q", head), (c.tile_m, c.head_dim_v), queries)
        gLse = cute.local_tile(of.padded(g.mLse, head, c.tile_m), (c.tile_m,), (None,))
        gDelta = cute.local_tile(of.padded(g.mDelta, head, c.tile_m), (c.tile_m,), (None,))
        tKsK, tKgK = partition(g.load_k, s.sK, gK)
        tVsV, tVgV = partition(g.load_v, s.sV, gV)
        part, mask = self.part(cx), self.mask(cx)
        tQsQ, tQgQ = partition(g.load_q, s.sQ, gQ, part)  # (TMA, STAGE), (TMA, M_BLOCK)
        tOsO, tOgO = partition(g.load_do, s.sdO, gdO, part)
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)

        k, v = cx.pipes.load_k.make_producer(), cx.pipes.load_v.make_producer()
        q, do = cx.pipes.load_q.make_producer(), cx.pipes.load_do.make_producer()
        k_free = k.acquire_and_advance()
        cute.copy(g.load_k, tKgK, tKsK, tma_bar_ptr=k_free.barrier)
        blocks = cx.q_blocks()
        for m_block in cutlass.range(blocks.lo, blocks.hi, unroll=1):
            q_free = q.acquire_and_advance()
            cute.copy(
                g.load_q,
                tQgQ[None, m_block],
                tQsQ[None, q_free.index],
                tma_bar_ptr=q_free.barrier,
                mcast_mask=mask,
            )
            with cute.arch.elect_one():
                cute.copy(
                    bulk, gLse[None, m_block], s.sLse[None, q_free.index], mbar_ptr=q_free.barrier
                )
            if m_block == blocks.lo:
                # V is needed after the first S: load it behind K and Q
                v_free = v.acquire_and_advance()
                cute.copy(g.load_v, tVgV, tVsV, tma_bar_ptr=v_free.barrier)
                self.more(cx)
            do_free = do.acquire_and_advance()
            cute.copy(
                g.load_do,
                tOgO[None, m_block],
                tOsO[None, do_free.index],
                tma_bar_ptr=do_free.barrier,
                mcast_mask=mask,
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


def partition(atom, smem, tile, part=(0, 1)):
    """(shared, global) sides of a TMA copy; the tile's first two modes are one box. ``part``: which
    of how many parts of it this CTA loads.
    """
    return cpasync.tma_partition(
        atom,
        part[0],
        cute.make_layout(part[1]),
        cute.group_modes(smem, 0, 2),
        cute.group_modes(tile, 0, 2),
    )
