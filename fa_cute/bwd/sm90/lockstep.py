"""Consumers with half of the keys each: both hand over dS and compute dQ in the same step.

S = K Q^T, dP = V dO^T     P while dP runs
dS, to shared memory
dV += P dO                 the other warpgroup's dS arrives meanwhile
dQ = dS K, dK += dS Q      dQ is handed over while dK runs
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from fa_cute.bwd.sm90.ctx import BwdCtx
from fa_cute.bwd.sm90.epilogue import DK, DV
from fa_cute.bwd.sm90.operands import Parts, prepare
from fa_cute.bwd.sm90.products import (
    Lane,
    accumulator,
    columns,
    gemm,
    operand,
    probabilities,
    score_gradient,
    share_ds,
    signal_ds,
    spans,
    wait_ds,
)
from fa_cute.bwd.sm90.tiles import filled, finish, let_go


@dataclass(frozen=True)
class Lockstep:
    """Eight warps in two groups. Waits load_*, ds_<other>, dq_empty_<own>; releases load_q,
    load_do, signals ds_<own>, dq_full_<own>; persistent: releases load_k, load_v."""

    epilogue: Any

    def prepare(self, cx: BwdCtx):
        """What it has for all tiles."""
        return prepare(cx)

    @cute.jit
    def tile(self, cx: BwdCtx, own, ends):
        """One tile; returns the ends."""
        c = cx.cfg
        thread, lane, parts, (dK, dV) = own
        k, v, q, do = ends
        blocks = cx.q_blocks()
        k.wait()
        P, dP = (accumulator(cx.mmas.sdp, c.tile_n, c.tile_m) for _ in range(2))
        v.wait()
        for span in cutlass.range_constexpr(3):
            start, end, masked = spans(blocks, blocks.lo)[span]
            for m_block in cutlass.range(start, end, unroll=1):
                q, q_full = filled(cx, q, m_block)
                do, do_full = filled(cx, do, m_block)
                self.issue_scores(cx, parts, (P, dP), q_full, do_full)
                lse = columns(cx.smem.sLse[None, q_full.index], c.tile_m, lane)
                warpgroup.wait_group(1)  # S
                probabilities(cx, P, lse, m_block, lane, masked)
                self.gradients(cx, parts, (P, dP, dK, dV), (m_block, q_full, do_full), lane)
                warpgroup.wait_group(0)  # dK
                q_full.release()
        let_go(cx, self.epilogue, (k, v), True)
        results = ((DV, dV), (DK, dK))
        finish(cx, self.epilogue, results, (lane, thread), (k, v))
        return k, v, q, do

    def issue_scores(self, cx: BwdCtx, parts: Parts, accs, q_full, do_full):
        """Issue S and dP."""
        S, dP = accs
        gemm(cx.mmas.sdp, S, parts.tSrK, parts.tSrQ[None, None, None, q_full.index], False)
        gemm(cx.mmas.sdp, dP, parts.tdPrV, parts.tdPrdO[None, None, None, do_full.index], False)

    @cute.jit
    def gradients(self, cx: BwdCtx, parts: Parts, accs, at, lane: Lane):
        """From P to dK in flight: dS shared, dV, dQ; dQ is handed over while dK runs."""
        P, dP, dK, dV = accs
        m_block, q_full, do_full = at
        more = m_block != cx.q_blocks().lo
        rP = operand(cx, P, cx.mmas.dv)
        delta = columns(cx.smem.sDelta[None, do_full.index], cx.cfg.tile_m, lane)
        warpgroup.wait_group(0)  # dP
        score_gradient(cx, P, dP, delta)
        rdS = operand(cx, dP, cx.mmas.dk)
        # Stage m % 2 was last read by dQ(m - 2): the other warpgroup was done with its own before
        # it signalled dS(m - 1), and that we have waited for.
        share_ds(cx, parts.ds_copy, parts.tdSsdS[None, None, None, m_block % 2], rdS)
        signal_ds(cx, lane.wg, m_block)
        gemm(cx.mmas.dv, dV, rP, parts.tdVrdO[None, None, None, do_full.index], more)
        dQ = accumulator(cx.mmas.dq, cx.cfg.tile_m, cx.cfg.head_dim)
        wait_ds(cx, lane.wg, m_block)
        gemm(cx.mmas.dq, dQ, parts.tdQrdS[None, None, None, m_block % 2], parts.tdQrK, False)
        gemm(cx.mmas.dk, dK, rdS, parts.tdKrQ[None, None, None, q_full.index], more)
        warpgroup.wait_group(2)  # dV
        do_full.release()
        warpgroup.wait_group(1)  # dQ
        cx.writer.hand_over(cx, dQ, m_block, lane, lane.wg)
