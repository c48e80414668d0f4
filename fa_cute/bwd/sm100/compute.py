"""Compute role: two warpgroups turn S into P and dP into dS; then they carry dV and dK out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...ops import ptx, tmem
from ...ops.tmem import TmemMap
from ..chunks import LANES
from .ctx import BwdCtx
from .plan import TEAMS, WORD

GROUP = 32  # elements that are converted and stored together
NO_ROW = 1 << 30  # first row that sees a key which does not exist


@dataclass(frozen=True)
class Lane:
    """Where a thread stands: its team, its key's lane, and the queries that see this key."""

    team: Int32
    thread: Int32
    first: Int32
    end: Any  # None where the band has no limit: rows past the last query have an LSE of +inf


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
        first, end = cx.mask.q_limits(key, cx.seqlen_q, cx.seqlen_k)
        first = Int32(0 if first is None else first)
        lane = Lane(team, thread, cutlass.select_(key < cx.seqlen_k, first, Int32(NO_ROW)), end)
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
        tP, tdS = tm.rows("P0", "P1", lane.team), tm.rows("dS0", "dS1", lane.team)
        x = cute.make_rmem_tensor(rows, Float32)

        lse_full = lse.wait_and_advance()
        s.wait_and_advance()
        for w in cutlass.range_constexpr(rows // WORD):
            load, src = tmem.source(tmem.load_op(WORD), self.word(cx, "S", lane, w), lane.thread)
            to = cute.local_tile(x, (WORD,), (w,))
            cute.copy(load, src, self.as_loaded(load, src, to))
        sLse = self.statistics(cx, "sLse", lse_full.index, lane.team)
        self.exponents(x, sLse, cx.g.scale_log2)
        cute.arch.fence_view_async_tmem_load()
        if const_expr(cx.cfg.tight):
            cx.pipes.compute_s.signal(0)
        lse_full.release()
        if const_expr(masked):
            self.mask(cx, x, lane, m_block)
        for i in cutlass.range_constexpr(rows):
            x[i] = ptx.ex2_ftz(-x[i])  # P
        self.pack(cx, x, tP, lane.thread)
        cute.arch.fence_view_async_tmem_store()
        cx.pipes.compute_p.signal(0)

        delta_full = delta.wait_and_advance()
        dp.wait_and_advance()
        sDelta = self.statistics(cx, "sDelta", delta_full.index, lane.team)
        self.gradients(cx, x, sDelta, lane)
        delta_full.release()
        self.pack(cx, x, tdS, lane.thread)
        self.exchange.put(cx, x, lane.team, lane.thread)
        cute.arch.fence_view_async_tmem_store()
        cx.pipes.compute_ds.signal(0)
        return s, dp, lse, delta

    def word(self, cx: BwdCtx, region: str, lane: Lane, index: int) -> cute.Tensor:
        """Columns of S or dP that are one word of this team's rows."""
        team, word = cx.cfg.team_rows
        start = TmemMap(cx.cfg.tmem).rows(region).iterator + (index * word + lane.team * team)
        return cute.make_tensor(start, cute.make_layout((LANES, WORD), stride=(1 << 16, 1)))

    def as_loaded(self, load, src: cute.Tensor, to: cute.Tensor) -> cute.Tensor:
        """Registers of a word as the copy sees them."""
        coords = cute.make_identity_tensor((LANES, WORD))
        return cute.make_tensor(to.iterator, cute.make_layout(load.partition_D(coords).shape))

    def statistics(self, cx: BwdCtx, field: str, slot, team) -> cute.Tensor:
        """Statistics of this team's rows, in vectors of four."""
        to_team, to_word = cx.cfg.team_rows
        start = cx.smem.floats(field)[None, slot].iterator + team * to_team
        vectors = (WORD // 4, cx.cfg.tile_m // TEAMS // WORD)
        layout = cute.make_layout((4, vectors), stride=(1, (4, to_word)))
        return cute.make_tensor(start.align(16), layout)

    def mask(self, cx: BwdCtx, x: cute.Tensor, lane: Lane, m_block):
        """Give rows that do not see this key an exponent of -inf."""
        to_team, to_word = cx.cfg.team_rows
        for w in range(cute.size(x.shape) // WORD):
            first = m_block * cx.cfg.tile_m + lane.team * to_team + w * to_word
            end = None if lane.end is None else lane.end - first
            mask_word(cute.local_tile(x, (WORD,), (w,)), lane.first - first, end)

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
    def gradients(self, cx: BwdCtx, x: cute.Tensor, sDelta: cute.Tensor, lane: Lane):
        """Replace every P by dS = P (dP - delta)."""
        for w in cutlass.range_constexpr(cute.size(x.shape) // WORD):
            load, src = tmem.source(tmem.load_op(WORD), self.word(cx, "dP", lane, w), lane.thread)
            dp = cute.make_rmem_tensor(WORD, Float32)
            cute.copy(load, src, self.as_loaded(load, src, dp))
            for j in cutlass.range_constexpr(WORD // 4):
                d = cute.make_rmem_tensor(4, Float32)
                cute.autovec_copy(sDelta[None, w * (WORD // 4) + j], d)
                for i in cutlass.range_constexpr(0, 4, 2):
                    at, to = 4 * j + i, w * WORD + 4 * j + i
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
def mask_word(x: cute.Tensor, first: Int32, end):
    """Set the registers of a word outside ``[first, end)`` to +inf, by one bit mask."""
    drop = ptx.low_ones(cutlass.max(WORD - first, 0))
    if const_expr(end is not None):
        drop = drop | ptx.high_ones(cutlass.max(end, 0))
    for j in cutlass.range_constexpr(WORD):
        unseen = (drop & Int32(1 << j if j < 31 else -(1 << 31))) != 0
        x[j] = cutlass.select_(unseen, Float32.inf, x[j])
