"""Consumers with half of the keys each: dQ lags one step behind.

    A(j): S = K Q^T, dP = V dO^T
          P, dS, to shared memory
    B(j): dQ(j - 1) = dS K, dV += P dO, dK += dS Q

dQ of a step needs the dS of both warpgroups. A whole step later it is there without anybody
waiting, so the warpgroups may be up to a step apart, and one computes exp2 while the other has the
tensor core. With two stages of dS it is waited for before our own is written: three quarters of a
step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import const_expr
from cutlass.cute.nvgpu import warpgroup

from fa_cute.bwd.sm90.ctx import BwdCtx
from fa_cute.bwd.sm90.epilogue import DK, DV
from fa_cute.bwd.sm90.operands import Parts, prepare
from fa_cute.bwd.sm90.products import (
    Lane,
    accumulator,
    columns,
    follow,
    gemm,
    lead,
    operand,
    probabilities,
    score_gradient,
    share_ds,
    share_score_gradient,
    signal_ds,
    spans,
    wait_ds,
)
from fa_cute.bwd.sm90.tiles import filled, finish, let_go


@dataclass(frozen=True)
class Lagged:
    """Eight warps in two groups. Waits load_*, ds_<other>, dq_empty_<own>; releases load_q,
    load_do, signals ds_<own>, dq_full_<own>; persistent: releases load_k, load_v. Where tiles are
    staggered, warpgroup 0 signals lead, and warpgroup 1 waits for it."""

    epilogue: Any

    def prepare(self, cx: BwdCtx):
        """What it has for all tiles."""
        return prepare(cx)

    @cute.jit
    def tile(self, cx: BwdCtx, own, ends):
        """One tile; returns the ends."""
        thread, lane, _, (dK, dV) = own
        k, v, q, do = ends
        if const_expr(cx.cfg.persistent and cx.may_be_empty):
            if cx.q_blocks().count > 0:
                self.walk(cx, own, ends)
            else:  # zeros of keys without queries
                k.wait()
                v.wait()
                dK.fill(0.0)
                dV.fill(0.0)
                let_go(cx, self.epilogue, (k, v), True)
        else:
            q, do = self.walk(cx, own, ends)
        results = ((DV, dV), (DK, dK))
        finish(cx, self.epilogue, results, (lane, thread), (k, v))
        return k, v, q, do

    @cute.jit
    def walk(self, cx: BwdCtx, own, ends):
        """All query blocks of a tile; returns the ends of Q and dO."""
        _, lane, parts, (dK, dV) = own
        k, v, q, do = ends
        blocks = cx.q_blocks()
        k.wait()
        q, q_full = filled(cx, q, blocks.lo)
        if const_expr(cx.cfg.stagger_rows > 0):
            follow(cx, lane.wg)
        S = self.scores(cx, parts, q_full)
        v.wait()
        do, do_full = filled(cx, do, blocks.lo)
        self.step(cx, parts, (S, dK, dV), (blocks.lo, q_full, do_full), lane, (True, True))
        for span in cutlass.range_constexpr(3):
            start, end, masked = spans(blocks, blocks.lo + 1)[span]
            for m_block in cutlass.range(start, end, unroll=1):
                q, q_full = filled(cx, q, m_block)
                if const_expr(cx.cfg.late_do):
                    S = self.scores(cx, parts, q_full)
                    do, do_full = filled(cx, do, m_block)
                else:
                    do, do_full = filled(cx, do, m_block)
                    S = self.scores(cx, parts, q_full)
                at = (m_block, q_full, do_full)
                self.step(cx, parts, (S, dK, dV), at, lane, (False, masked))
        wait_ds(cx, lane.wg, blocks.hi - 1)
        dQ = self.query_gradient(cx, parts, blocks.hi - 1)
        warpgroup.wait_group(0)
        let_go(cx, self.epilogue, (k, v), True)
        cx.writer.hand_over(cx, dQ, blocks.hi - 1, lane, lane.wg)
        return q, do

    def scores(self, cx: BwdCtx, parts: Parts, q_full) -> cute.Tensor:
        """S = K Q^T issued; its registers."""
        S = accumulator(cx.mmas.sdp, cx.cfg.tile_n, cx.cfg.tile_m)
        gemm(cx.mmas.sdp, S, parts.tSrK, parts.tSrQ[None, None, None, q_full.index], False)
        return S

    @cute.jit
    def step(self, cx: BwdCtx, parts: Parts, accs, at, lane: Lane, kind: cutlass.Constexpr):
        """One query block whose S is issued, and dQ of the one before; nothing is in flight between
        steps.

        ``kind``: (whether it is the first block, whether it needs the element mask).
        """
        c, (S, dK, dV), (first, masked) = cx.cfg, accs, kind
        m_block, q_full, do_full = at
        fences = not c.few_fences
        dP, tdPrdO = accumulator(cx.mmas.sdp, c.tile_n, c.tile_m), parts.tdPrdO
        gemm(cx.mmas.sdp, dP, parts.tdPrV, tdPrdO[None, None, None, do_full.index], False, fences)
        if const_expr(not c.late_stats):
            lse = columns(cx.smem.sLse[None, q_full.index], c.tile_m, lane)
        warpgroup.wait_group(1)  # S
        if const_expr(c.late_stats):
            lse = columns(cx.smem.sLse[None, q_full.index], c.tile_m, lane)
        probabilities(cx, S, lse, m_block, lane, masked)
        if const_expr(first and c.stagger_rows > 0):
            lead(cx, lane.wg)
        rP = operand(cx, S, cx.mmas.dv)
        delta = columns(cx.smem.sDelta[None, do_full.index], c.tile_m, lane)
        warpgroup.wait_group(0)  # dP
        # A stage of three was last read by dQ(m - 3): ours was waited for, and the other warpgroup
        # had waited for its own when it signalled dS(m - 2), which we have waited for. Of two by
        # dQ(m - 2), and it has signalled dS(m - 1) since.
        to = parts.tdSsdS[None, None, None, m_block % c.ds_stages]
        if const_expr(not c.by_parts):
            score_gradient(cx, S, dP, delta)
            rdS = operand(cx, dP, cx.mmas.dk)
        if const_expr(not first and c.waits_early):
            wait_ds(cx, lane.wg, m_block - 1)
        if const_expr(c.by_parts):
            rdS = share_score_gradient(cx, (S, dP), delta, parts.ds_copy, to)
        else:
            share_ds(cx, parts.ds_copy, to, rdS)

        if const_expr(not first):
            if const_expr(not c.waits_early):
                wait_ds(cx, lane.wg, m_block - 1)
            dQ = self.query_gradient(cx, parts, m_block - 1)
        tdVrdO, tdKrQ = parts.tdVrdO, parts.tdKrQ
        at_first = first or fences
        gemm(cx.mmas.dv, dV, rP, tdVrdO[None, None, None, do_full.index], not first, at_first)
        gemm(cx.mmas.dk, dK, rdS, tdKrQ[None, None, None, q_full.index], not first, fences)
        if const_expr(not first):
            warpgroup.wait_group(2)  # dQ
        signal_ds(cx, lane.wg, m_block)
        if const_expr(not first):
            cx.writer.hand_over(cx, dQ, m_block - 1, lane, lane.wg)
        warpgroup.wait_group(1)  # dV
        do_full.release()
        warpgroup.wait_group(0)  # dK
        q_full.release()

    def query_gradient(self, cx: BwdCtx, parts: Parts, m_block) -> cute.Tensor:
        """dQ = dS K issued, the other warpgroup's dS being there; its registers."""
        dQ = accumulator(cx.mmas.dq, cx.cfg.tile_m, cx.cfg.head_dim)
        stage = m_block % cx.cfg.ds_stages
        gemm(cx.mmas.dq, dQ, parts.tdQrdS[None, None, None, stage], parts.tdQrK, False)
        return dQ
