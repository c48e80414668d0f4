"""Compute role: two warpgroups turn S into P and dP into dS; then they carry dV and dK out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...ops import ptx, tmem
from ...ops.tmem import TmemMap
from .ctx import BwdCtx
from .plan import TEAMS

GROUP = 32  # elements that are converted and stored together
NO_ROW = 1 << 30  # first row that sees a key which does not exist


@dataclass(frozen=True)
class Lane:
    """Where a thread stands: its team, its key's lane, and the first query that sees this key."""

    team: Int32
    thread: Int32
    q_lo: Int32


@dataclass(frozen=True)
class Compute:
    """Two teams of four warps, a thread owns a key and half of the rows of a block.

    Waits mma_s, mma_dp, load_lse, load_delta; feeds compute_p and compute_ds.  At the end waits
    mma_dkv: team 0 carries dV out, team 1 dK.
    """

    exchange: Any
    epilogue: Any

    @cute.jit
    def run(self, cx: BwdCtx):
        c, pipes = cx.cfg, cx.pipes
        cx.barriers.tmem.arrive_and_wait()  # mma allocated
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - c.warps["compute"].start
        team = warp // 4
        thread = cute.arch.thread_idx()[0] % c.tile_n
        key = cx.n_block * c.tile_n + thread
        q_lo, _ = cx.mask.q_bounds(key, cx.seqlen_q, cx.seqlen_k)
        lane = Lane(team, thread, cutlass.select_(key < cx.seqlen_k, Int32(q_lo), Int32(NO_ROW)))
        s, dp = pipes.mma_s.lane_consumer(0), pipes.mma_dp.lane_consumer(0)
        lse, delta = pipes.load_lse.make_consumer(), pipes.load_delta.make_consumer()
        spans = cx.spans()
        ends = (s, dp, lse, delta)
        for i in cutlass.range_constexpr(len(spans)):
            first, last, masked = spans[i]
            for m_block in cutlass.range(first, last, unroll=1):
                ends = self.block(cx, lane, m_block, ends, masked)
        self.epilogue.carry_out(cx.anew(), team, thread)
        cx.barriers.tmem.arrive_and_wait()  # mma may free the tensor memory

    @cute.jit
    def block(self, cx: BwdCtx, lane: Lane, m_block, ends, masked: cutlass.Constexpr):
        """One query block: S -> P, dP -> dS."""
        s, dp, lse, delta = ends
        rows = cx.cfg.tile_m // TEAMS
        tm = TmemMap(cx.cfg.tmem)
        tS, tP = tm.rows("S0", "S1", lane.team), tm.rows("P0", "P1", lane.team)
        tdP, tdS = tm.rows("dP0", "dP1", lane.team), tm.rows("dS0", "dS1", lane.team)
        load, src = tmem.source(tmem.load_op(GROUP), tS, lane.thread)
        x_t2r, x = tmem.row_registers(load.partition_D, tS)

        lse_full = lse.wait_and_advance()
        s.wait_and_advance()
        cute.copy(load, src, x_t2r)
        sLse = self.statistics(cx, "sLse", lse_full.index, lane.team)
        self.exponents(x, sLse, cx.g.scale_log2)
        cute.arch.fence_view_async_tmem_load()
        lse_full.release()
        if const_expr(masked):
            mask_below(x, lane.q_lo - m_block * cx.cfg.tile_m - lane.team * rows)
        for i in cutlass.range_constexpr(rows):
            x[i] = ptx.ex2_ftz(-x[i])  # P
        self.pack(cx, x, tP, lane.thread)
        cute.arch.fence_view_async_tmem_store()
        cx.pipes.compute_p.signal(0)

        delta_full = delta.wait_and_advance()
        dp.wait_and_advance()
        sDelta = self.statistics(cx, "sDelta", delta_full.index, lane.team)
        self.gradients(x, tdP, sDelta, lane.thread)
        delta_full.release()
        self.pack(cx, x, tdS, lane.thread)
        self.exchange.put(cx, x, lane.team, lane.thread)
        cute.arch.fence_view_async_tmem_store()
        cx.pipes.compute_ds.signal(0)
        return s, dp, lse, delta

    def statistics(self, cx: BwdCtx, field: str, slot, team) -> cute.Tensor:
        """Statistics of this team's rows, in vectors of four."""
        rows = cx.cfg.tile_m // TEAMS
        start = cx.smem.floats(field)[None, slot].iterator + team * rows
        return cute.make_tensor(start.align(16), cute.make_layout((4, rows // 4)))

    @cute.jit
    def exponents(self, x: cute.Tensor, sLse: cute.Tensor, scale_log2: Float32):
        """Replace every score by ``lse - score * scale_log2``: P is 2 to minus that."""
        for j in cutlass.range_constexpr(cute.size(x.shape) // 4):
            l = cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(sLse[None, j], l)
            for i in cutlass.range_constexpr(0, 4, 2):
                at = 4 * j + i
                x[at], x[at + 1] = cute.arch.fma_packed_f32x2(
                    (x[at], x[at + 1]), (-scale_log2, -scale_log2), (l[i], l[i + 1])
                )

    @cute.jit
    def gradients(self, x: cute.Tensor, tdP: cute.Tensor, sDelta: cute.Tensor, thread):
        """Replace every P by dS = P (dP - delta)."""
        load, src = tmem.source(tmem.load_op(GROUP), tdP, thread)
        coords = cute.make_identity_tensor(tdP.shape)
        shape = load.partition_D(coords)[None, None, 0].shape
        for g in cutlass.range_constexpr(tdP.shape[1] // GROUP):
            dp = cute.make_rmem_tensor(shape, Float32)
            cute.copy(load, src[None, None, g], dp)
            for j in cutlass.range_constexpr(GROUP // 4):
                d = cute.make_rmem_tensor(4, Float32)
                cute.autovec_copy(sDelta[None, g * (GROUP // 4) + j], d)
                for i in cutlass.range_constexpr(0, 4, 2):
                    at, to = 4 * j + i, g * GROUP + 4 * j + i
                    diff = cute.arch.sub_packed_f32x2((dp[at], dp[at + 1]), (d[i], d[i + 1]))
                    x[to], x[to + 1] = cute.arch.mul_packed_f32x2((x[to], x[to + 1]), diff)
        cute.arch.fence_view_async_tmem_load()

    @cute.jit
    def pack(self, cx: BwdCtx, x: cute.Tensor, to: cute.Tensor, thread):
        """Write a row in the operands' type to tensor memory, two elements a column."""
        store, dst = tmem.target(tmem.store_op(GROUP // 2), to, thread)
        r2t, packed = tmem.row_registers(store.partition_S, to)
        count = cute.size(x.shape)
        values = cute.make_tensor(
            cute.recast_ptr(packed.iterator, dtype=cx.products.element), cute.make_layout(count)
        )
        for g in cutlass.range_constexpr(count // GROUP):
            group = cute.local_tile(x, (GROUP,), (g,))
            cute.local_tile(values, (GROUP,), (g,)).store(group.load().to(cx.products.element))
            cute.copy(store, r2t[None, None, g], dst[None, None, g])


@cute.jit
def mask_below(x: cute.Tensor, limit: Int32):
    """Set the registers of `x` below index `limit` to +inf, by one bit mask per 32 registers."""
    for w in cutlass.range_constexpr(cute.size(x.shape) // 32):
        drop = ptx.low_ones(cutlass.max((w + 1) * 32 - limit, 0))
        for j in cutlass.range_constexpr(32):
            unseen = (drop & Int32(1 << j if j < 31 else -(1 << 31))) != 0
            x[w * 32 + j] = cutlass.select_(unseen, Float32.inf, x[w * 32 + j])
