"""Load role: one warp brings K and V once, then query blocks in order."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import cpasync

from .ctx import BwdCtx


@dataclass(frozen=True)
class Load:
    """One warp, TMA.  Feeds load_k, load_v once and load_q, load_lse, load_do, load_delta per query
    block; waits until mma and compute free their slots.

    Order of the copies: K Q lse V dO delta, Q lse dO delta ...  Rows past the end of a sequence
    arrive as zeros; their statistics exist in the workspace.
    """

    @cute.jit
    def run(self, cx: BwdCtx):
        g, tile, pipes = cx.g, cx.tile, cx.pipes
        lse = cute.local_tile(g.mLse[None, tile.head, tile.batch], (cx.cfg.tile_m,), (None,))
        delta = cute.local_tile(g.mDelta[None, tile.head, tile.batch], (cx.cfg.tile_m,), (None,))
        sLse, sDelta = cx.smem.floats("sLse"), cx.smem.floats("sDelta")
        tKsK, tKgK = self.rows(cx, ("sK", "s", g.tma_k), g.mK, cx.head_kv)
        tVsV, tVgV = self.rows(cx, ("sV", "dp", g.tma_v), g.mV, cx.head_kv)
        tQsQ, tQgQ = self.rows(cx, ("sQ", "s", g.tma_q), g.mQ, tile.head)
        tOsO, tOgO = self.rows(cx, ("sdO", "dp", g.tma_do), g.mdO, tile.head)
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)

        k, v = pipes.load_k.lane_producer(0), pipes.load_v.lane_producer(0)
        q, do = pipes.load_q.make_producer(), pipes.load_do.make_producer()
        stat_q, stat_do = pipes.load_lse.make_producer(), pipes.load_delta.make_producer()
        k_free = k.acquire_and_advance()
        cute.copy(g.tma_k, tKgK[None, cx.n_block], tKsK[None, 0], tma_bar_ptr=k_free.barrier)
        blocks = cx.q_blocks()
        for m_block in cutlass.range(blocks.lo, blocks.hi, unroll=1):
            q_free = q.acquire_and_advance()
            cute.copy(
                g.tma_q, tQgQ[None, m_block], tQsQ[None, q_free.index], tma_bar_ptr=q_free.barrier
            )
            lse_free = stat_q.acquire_and_advance()
            with cute.arch.elect_one():
                cute.copy(
                    bulk, lse[None, m_block], sLse[None, lse_free.index], mbar_ptr=lse_free.barrier
                )
            if m_block == blocks.lo:
                # V is needed after the first S: behind K and Q
                v_free = v.acquire_and_advance()
                cute.copy(
                    g.tma_v, tVgV[None, cx.n_block], tVsV[None, 0], tma_bar_ptr=v_free.barrier
                )
            do_free = do.acquire_and_advance()
            cute.copy(
                g.tma_do,
                tOgO[None, m_block],
                tOsO[None, do_free.index],
                tma_bar_ptr=do_free.barrier,
            )
            delta_free = stat_do.acquire_and_advance()
            with cute.arch.elect_one():
                cute.copy(
                    bulk,
                    delta[None, m_block],
                    sDelta[None, delta_free.index],
                    mbar_ptr=delta_free.barrier,
                )
        # No copy may be in flight, and no release may land, after the CTA has left.
        q.tail()
        do.tail()
        stat_q.tail()
        stat_do.tail()

    def rows(self, cx: BwdCtx, what, tensor: cute.Tensor, head):
        """(shared (TMA, STAGE), global (TMA, BLOCK)) sides of a TMA copy of whole rows.

        what: field, the product whose operand it is, and the copy atom.  K and V are A operands.
        """
        field, product, atom = what
        thr = cx.products.mma(product).get_slice(0)
        m, n, k = cx.products.tile(product)
        is_a = field in ("sK", "sV")
        g = cute.local_tile(
            tensor[None, None, head, cx.tile.batch], (m if is_a else n, k), (None, 0)
        )
        operand = thr.partition_A(g) if is_a else thr.partition_B(g)
        shared = cx.smem.operand(field, f"{field[1:]} of {product}")
        return cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            cute.group_modes(shared, 0, 3),
            cute.group_modes(operand, 0, 3),
        )
