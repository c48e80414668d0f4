"""Softmax role: two warpgroups, one per query tile; a thread owns a row."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...ops import exp2, ptx, softmax, tmem
from ...ops.tmem import TmemMap
from .ctx import FwdCtx


@dataclass(frozen=True)
class Row:
    """Where a thread stands: its query tile, its row in it, and the keys [k_lo, k_hi) that the row
    sees.
    """

    t: Int32
    thread: Int32
    k_lo: Int32 | None  # None: all from the first on
    k_hi: Int32


@dataclass(frozen=True)
class Softmax:
    """Two teams of four warps.  Waits mma_s; feeds softmax_p, softmax_p_tail, softmax_stats.

    Per KV block: read a row of S, find its maximum, publish the factor for O, replace S by P, and
    only then add the row up.  `Row` statistics stay in registers until the last block.
    """

    @cute.jit
    def run(self, cx: FwdCtx):
        cx.barriers.tmem.arrive_and_wait()  # mma allocated
        t = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4
        thread = cute.arch.thread_idx()[0] % cx.cfg.tile_m
        tm = TmemMap(cx.cfg.tmem)
        tS, tP = tm.rows("S0", "S1", t), tm.rows("P0", "P1", t)  # (128, 128), (128, 64)

        sStats = cx.smem.sStats[thread, None, t]  # factor or sum, maximum
        s = cx.pipes.mma_s.lane_consumer(t)
        stats = cx.pipes.softmax_stats.lane_producer(t)
        sched = cx.scheduler()
        tile = sched.tile()
        while tile.valid:
            blocks = cx.kv_blocks(tile)
            q = (tile.m_block * 2 + t) * cx.cfg.tile_m + thread
            at = cx.seqlens(tile)
            k_lo, k_hi = cx.mask.k_limits(q, at.q, at.k)
            row = Row(t, thread, k_lo, Int32(k_hi))
            if blocks.hi > blocks.lo:
                last = blocks.hi - 1
                maximum, total = -Float32.inf, Float32(0.0)
                s, stats, maximum, total = self.block(
                    cx, row, (tS, tP), last, (s, stats, maximum, total), True, True
                )
                for bottom, top, masked in cx.spans(tile, t):
                    for i in cutlass.range(top - bottom, unroll=1):
                        s, stats, maximum, total = self.block(
                            cx,
                            row,
                            (tS, tP),
                            top - 1 - i,
                            (s, stats, maximum, total),
                            masked,
                            False,
                        )
                stats_free = stats.acquire_and_advance()  # correction read the last factor
                sStats[0] = total
                sStats[1] = maximum
                stats_free.commit()
            sched = sched.next()
            tile = sched.tile()
        stats.tail()
        cx.barriers.tmem.arrive_and_wait()  # mma may free the tensor memory

    @cute.jit
    def block(
        self,
        cx: FwdCtx,
        row: Row,
        rows,
        n_block: Int32,
        state,
        masked: cutlass.Constexpr,
        first: cutlass.Constexpr,
    ):
        """One KV block: S -> P, and the row's running statistics."""
        s, stats, maximum, total = state
        tS, tP = rows
        n = cx.cfg.tile_n
        by_load = cx.cfg.max_by_load and not masked
        op = tmem.load_max_op(32) if by_load else tmem.load_op(32)
        load, src = tmem.source(op, tS, row.thread)
        store, dst = tmem.target(tmem.store_op(16), tP, row.thread)
        x_t2r, x = tmem.row_registers(load.partition_D, tS)  # the row: scores, then exponentials
        s.wait_and_advance()
        if const_expr(by_load):
            largest = cute.make_rmem_tensor(((1, 1), *x_t2r.shape[1:]), Float32)  # per load
            cute.copy(load, src, (x_t2r, largest))
            new = softmax.row_max(largest, maximum)
        else:
            cute.copy(load, src, x_t2r)
            if const_expr(masked):
                mask_outside(x, row.k_lo, row.k_hi, n_block * n)
            new = softmax.row_max(x, maximum)
        # Registers are ready as their values are used; this orders the reads before our signals.
        cute.arch.fence_view_async_tmem_load()
        factor = Float32(0.0)
        if const_expr(first):
            maximum = new
        else:
            maximum, factor = softmax.grow_max(
                maximum, new, cx.args.scale_log2, cx.cfg.rescale_log2
            )
            # Correction read what was here before it let mma accumulate the block before, and this
            # block's S came after that: no wait, only the next slot.
            stats_free = stats.current_handle()
            stats.advance()
            sStats = cx.smem.sStats[row.thread, None, row.t]
            sStats[0] = factor
            stats_free.commit()
        softmax.subtract_max(x, cx.args.scale_log2, softmax.finite_max(maximum))

        p_r2t, packed = tmem.row_registers(store.partition_S, tP)  # P, two elements in a register
        p = cute.make_tensor(
            cute.recast_ptr(packed.iterator, dtype=cx.spec.element), cute.make_layout(n)
        )
        for g in cutlass.range_constexpr(n // 32):
            exp2.exp2_group(x, cx.cfg.exp2, g * 32, n)
            group = cute.local_tile(x, (32,), (g,))
            cute.local_tile(p, (32,), (g,)).store(group.load().to(cx.spec.element))
            cute.copy(store, p_r2t[None, None, g], dst[None, None, g])
            if const_expr((g + 1) * 32 == cx.cfg.p_head):
                cute.arch.fence_view_async_tmem_store()
                cx.pipes.softmax_p.signal(row.t)  # mma may start P V
        cute.arch.fence_view_async_tmem_store()
        cx.pipes.softmax_p_tail.signal(row.t)
        if const_expr(first):
            total = softmax.row_sum(x, Float32(0.0))
        else:
            total = softmax.row_sum(x, total * factor)
        return s, stats, maximum, total


@cute.jit
def mask_outside(x: cute.Tensor, k_lo, k_hi: Int32, first: Int32):
    """Set the registers of `x`, keys from `first` on, to -inf outside keys [k_lo, k_hi), by one bit
    mask per 32 registers.
    """
    limit = k_hi - first
    for w in cutlass.range_constexpr(cute.size(x.shape) // 32):
        keep = ptx.low_ones(cutlass.max((w + 1) * 32 - limit, 0))
        if const_expr(k_lo is not None):
            keep = keep & ptx.high_ones(cutlass.max(k_lo - first - w * 32, 0))
        for j in cutlass.range_constexpr(32):
            seen = (keep & Int32(1 << j if j < 31 else -(1 << 31))) != 0
            x[w * 32 + j] = cutlass.select_(seen, x[w * 32 + j], -Float32.inf)
