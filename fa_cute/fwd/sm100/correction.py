"""Correction role: keeps O on the current maximum, and finishes it."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from ...ops import epilogue, softmax, tmem
from ...sched import Tile
from .ctx import FwdCtx
from .plan import Q_TILES


@dataclass(frozen=True)
class Correction:
    """Four warps, a thread owns a row of both tiles.  Waits softmax_stats and mma_o; feeds
    softmax_p ("O t may be accumulated into") and correction_o.

    O t may be rescaled as soon as the factor of block i is there: softmax t had waited for S t of
    block i, whose commit also covers the P V of block i - 1.
    """

    @cute.jit
    def run(self, cx: FwdCtx):
        cx.barriers.tmem.arrive_and_wait()  # mma allocated
        thread = cute.arch.thread_idx()[0] % cx.cfg.tile_m
        tm = tmem.TmemMap(cx.cfg.tmem, tmem.address(cx.smem.tmem_address))
        tO = tuple(tm.rows(f"O{t}") for t in range(Q_TILES))  # (128, head_dim_v)

        element, o_bytes = cx.spec.element, cx.cfg.smem.bytes("sO")
        out = epilogue.swizzled_row(cx.smem.sO, cx.layouts["sO"], thread)

        stats = cx.pipes.softmax_stats.round_consumer()
        o_acc, o = cx.pipes.mma_o.round_consumer(), cx.pipes.correction_o.round_producer()
        for t in cutlass.range_constexpr(Q_TILES):
            cx.pipes.softmax_p.signal(t)  # nobody uses O yet
        sched = cx.scheduler()
        tile = sched.tile()
        while tile.valid:
            blocks = cx.kv_blocks(tile)
            visited = blocks.hi > blocks.lo
            for _ in cutlass.range(blocks.hi - 1 - blocks.lo, unroll=1):
                for t in cutlass.range_constexpr(Q_TILES):
                    stat = stats.wait_and_advance()
                    factor = cx.smem.sStats[thread, 0, t]
                    stat.release()
                    if cute.arch.vote_any_sync(factor < 1.0):
                        epilogue.scale_rows(tO[t], thread, factor)
                    cx.pipes.softmax_p.signal(t)
            if visited:
                for t in cutlass.range_constexpr(Q_TILES):
                    stat = stats.wait_and_advance()
                    total, maximum = cx.smem.sStats[thread, 0, t], cx.smem.sStats[thread, 1, t]
                    stat.release()
                    o_acc.wait_and_advance()
                    o_free = o.acquire_and_advance()  # epilogue's copy has read the slot
                    keys = softmax.has_keys(total)
                    epilogue.rows_to_smem(
                        tO[t], out, t * o_bytes, element, thread, cute.arch.rcp_approx(total), keys
                    )
                    cx.pipes.softmax_p.signal(t)  # O t was read: the next tile may begin
                    cute.arch.fence_view_async_shared()  # our writes before epilogue's copy
                    o_free.commit()
                    lse = softmax.log_sum_exp(total, maximum, cx.args.scale_log2)
                    store_lse(cx, tile, t, thread, lse)
            else:
                for t in cutlass.range_constexpr(Q_TILES):
                    o_free = o.acquire_and_advance()
                    epilogue.zeros_to_smem(cx.cfg.head_dim_v, out, t * o_bytes, element)
                    cute.arch.fence_view_async_shared()
                    o_free.commit()
                    store_lse(cx, tile, t, thread, -Float32.inf)
            sched = sched.next()
            tile = sched.tile()
        o.tail()
        cx.barriers.tmem.arrive_and_wait()  # mma may free the tensor memory


@cute.jit
def store_lse(cx: FwdCtx, tile: Tile, t: cutlass.Constexpr, thread, lse):
    """Write this thread's LSE unless its row lies past the end."""
    q = (tile.m_block * Q_TILES + t) * cx.cfg.tile_m + thread
    at = cx.seqlens(tile)
    if q < at.q:
        at.set_value(cx.args.mLSE, tile.head, q, lse)
