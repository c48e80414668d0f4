"""The two consumer warpgroups: five products per query block, then dK and dV.

A warp is held at a wgmma until the tensor core takes it, so one warpgroup alone overlaps next to nothing: what fills the
tensor core while a warpgroup computes exp2 is the other one. They take turns, block of products by block:

    warpgroup 0   A(0) | exp2, dS  | B(0) |  dQ   | A(1) | exp2, dS  | B(1) ...
    warpgroup 1        | A(0) | exp2, dS  | B(0) |  dQ   | A(1) | exp2, dS  | ...

    A(j): S = K Q^T, dP = V dO^T        B(j): dQ(j - 1) = dS K, dV += P dO, dK += dS Q

dQ lags by one step because it needs the dS of both; its turn comes after the other's dS is written, so the turns are
also the only synchronisation that sdS needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from fa_cute.bwd.sm90.ctx import BwdCtx, warpgroup_slice
from fa_cute.bwd.sm90.epilogue import DK, DV
from fa_cute.bwd.sm90.plan import WARPGROUP_THREADS, WGMMA_ROWS
from fa_cute.bwd.sm90.products import (
    Lane,
    accumulator,
    apply_mask,
    ds_copy,
    gemm,
    operand,
    pass_turn,
    probabilities,
    score_gradient,
    share_ds,
    signal_ds,
    take_turn,
    transposed,
    wait_ds,
)


@dataclass(frozen=True)
class Parts:
    """One warpgroup's operands: descriptors with a stage mode where the field has one."""

    tSrK: Any
    tSrQ: Any
    tdPrV: Any
    tdPrdO: Any
    tdVrdO: Any
    tdKrQ: Any
    tdQrdS: Any
    tdQrK: Any
    ds_copy: Any  # tiled copy registers -> sdS
    tdSsdS: Any  # its destination (CPY, ..., STAGE)


@dataclass(frozen=True)
class Consumer:
    """Eight warps in two groups. Waits load_*, turn_<own>, dq_empty_<own>; releases load_q, load_do, signals
    turn_<other>, dq_full_<own>."""

    epilogue: Any

    @cute.jit
    def run(self, cx: BwdCtx):
        c = cx.cfg
        thread = cute.arch.thread_idx()[0] - c.warps["consumer"].start * 32
        wg = cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)
        lane = Lane(wg, thread % WARPGROUP_THREADS, wg * WGMMA_ROWS)
        parts = self.parts(cx, thread, wg)
        dK = accumulator(cx.mmas.dk, c.tile_n, c.head_dim)
        dV = accumulator(cx.mmas.dv, c.tile_n, c.head_dim_v)

        k, v = cx.pipes.load_k.make_consumer(), cx.pipes.load_v.make_consumer()
        q, do = cx.pipes.load_q.make_consumer(), cx.pipes.load_do.make_consumer()
        blocks = cx.q_blocks()
        if const_expr(c.turns):
            if wg == 1:
                pass_turn(cx, wg)  # the first turn is warpgroup 0's
        k.wait()
        v.wait()
        q_full, do_full = q.wait_and_advance(), do.wait_and_advance()
        self.step(cx, parts, (dK, dV), (blocks.lo, q_full, do_full), lane, True)
        for m_block in cutlass.range(blocks.lo + 1, blocks.hi, unroll=1):
            q_full, do_full = q.wait_and_advance(), do.wait_and_advance()
            self.step(cx, parts, (dK, dV), (m_block, q_full, do_full), lane, False)
        self.last(cx, parts, blocks.hi - 1, lane)
        self.epilogue.run(cx, ((DV, dV), (DK, dK)), lane, thread)

    @cute.jit
    def step(self, cx: BwdCtx, parts: Parts, accs, at, lane: Lane, first: cutlass.Constexpr[bool]):
        """One query block, and dQ of the one before; nothing is in flight between steps."""
        c, (dK, dV) = cx.cfg, accs
        m_block, q_full, do_full = at
        S, dP = (accumulator(cx.mmas.sdp, c.tile_n, c.tile_m) for _ in range(2))
        if const_expr(c.turns):
            take_turn(cx, lane.wg)
        elif const_expr(first and c.offset):
            if lane.wg == 1:
                take_turn(cx, lane.wg)
        gemm(cx.mmas.sdp, S, parts.tSrK, parts.tSrQ[None, None, None, q_full.index], False)
        gemm(cx.mmas.sdp, dP, parts.tdPrV, parts.tdPrdO[None, None, None, do_full.index], False)
        if const_expr(c.turns):
            pass_turn(cx, lane.wg)
        elif const_expr(first and c.offset):
            if lane.wg == 0:
                pass_turn(cx, lane.wg)
        warpgroup.wait_group(1)  # S
        probabilities(cx, S, cx.smem.sLse[None, q_full.index], lane)
        blocks = cx.q_blocks()
        if m_block < blocks.full_lo or m_block >= blocks.full_hi:
            apply_mask(cx, S, m_block, lane)
        rP = operand(cx, S, cx.mmas.dv)
        warpgroup.wait_group(0)  # dP
        score_gradient(cx, S, dP, cx.smem.sDelta[None, do_full.index], lane)
        rdS = operand(cx, dP, cx.mmas.dk)
        # Stage m % 2 was last read by dQ(m - 2): ours was waited for, the other's before it passed the turn of A(m).
        share_ds(cx, parts.ds_copy, parts.tdSsdS[None, None, None, m_block % c.ds_stages], rdS)

        if const_expr(c.turns):
            take_turn(cx, lane.wg)
        elif const_expr(not first):
            wait_ds(cx, lane.wg, m_block - 1)
        in_turns = const_expr(c.dq_split == "turns")
        dQ = accumulator(cx.mmas.dq, c.tile_m, c.head_dim)
        if const_expr(not first and not in_turns):
            self.query_gradient(cx, parts, dQ, (m_block - 1) % c.ds_stages)
        gemm(cx.mmas.dv, dV, rP, parts.tdVrdO[None, None, None, do_full.index], not first)
        gemm(cx.mmas.dk, dK, rdS, parts.tdKrQ[None, None, None, q_full.index], not first)
        if const_expr(first):
            self.issued(cx, m_block, lane)
        elif const_expr(in_turns):
            self.dq_in_turns(cx, parts, dQ, m_block - 1, lane)
        else:
            warpgroup.wait_group(2)  # dQ
            self.issued(cx, m_block, lane)
            cx.writer.hand_over(cx, dQ, m_block - 1, lane, lane.wg)
        warpgroup.wait_group(1)  # dV
        do_full.release()
        warpgroup.wait_group(0)  # dK
        q_full.release()

    def issued(self, cx: BwdCtx, m_block, lane: Lane):
        """The products B of a step are in the queue, and dQ of the step before is complete."""
        if cx.cfg.turns:
            pass_turn(cx, lane.wg)
        else:
            signal_ds(cx, lane.wg, m_block)

    @cute.jit
    def dq_in_turns(self, cx: BwdCtx, parts: Parts, dQ: cute.Tensor, m_block: Int32, lane: Lane):
        """All of a dQ tile where it is this warpgroup's."""
        if m_block % 2 == lane.wg:
            self.query_gradient(cx, parts, dQ, m_block % cx.cfg.ds_stages)
            warpgroup.wait_group(0)
            self.issued(cx, m_block + 1, lane)
            cx.writer.hand_over(cx, dQ, m_block, lane, 0)
        else:
            self.issued(cx, m_block + 1, lane)

    @cute.jit
    def last(self, cx: BwdCtx, parts: Parts, m_block: Int32, lane: Lane):
        """dQ of the last query block. Nobody takes a turn after warpgroup 1's."""
        if const_expr(cx.cfg.turns):
            take_turn(cx, lane.wg)
            if lane.wg == 0:
                pass_turn(cx, lane.wg)
        else:
            wait_ds(cx, lane.wg, m_block)
        dQ = accumulator(cx.mmas.dq, cx.cfg.tile_m, cx.cfg.head_dim)
        if const_expr(cx.cfg.dq_split == "turns"):
            if m_block % 2 == lane.wg:
                self.query_gradient(cx, parts, dQ, m_block % cx.cfg.ds_stages)
                warpgroup.wait_group(0)
                cx.writer.hand_over(cx, dQ, m_block, lane, 0)
        else:
            self.query_gradient(cx, parts, dQ, m_block % cx.cfg.ds_stages)
            warpgroup.wait_group(0)
            cx.writer.hand_over(cx, dQ, m_block, lane, lane.wg)

    def parts(self, cx: BwdCtx, thread, wg) -> Parts:
        """Descriptors of this warpgroup's operands, and where its dS goes."""
        s, m = cx.smem, cx.mmas
        sdp, dv, dk = (warpgroup_slice(x, wg) for x in (m.sdp, m.dv, m.dk))
        dq = warpgroup_slice(m.dq, 0 if cx.cfg.dq_split == "turns" else wg)
        copy = ds_copy(cx)
        return Parts(
            tSrK=sdp.make_fragment_A(sdp.partition_A(s.sK)),
            tSrQ=sdp.make_fragment_B(sdp.partition_B(s.sQ)),
            tdPrV=sdp.make_fragment_A(sdp.partition_A(s.sV)),
            tdPrdO=sdp.make_fragment_B(sdp.partition_B(s.sdO)),
            tdVrdO=dv.make_fragment_B(dv.partition_B(transposed(s.sdO))),
            tdKrQ=dk.make_fragment_B(dk.partition_B(transposed(s.sQ))),
            tdQrdS=dq.make_fragment_A(dq.partition_A(s.sdS)),
            tdQrK=dq.make_fragment_B(dq.partition_B(transposed(s.sK))),
            ds_copy=copy,
            tdSsdS=copy.get_slice(thread).partition_D(transposed(s.sdS)),
        )

    def query_gradient(self, cx: BwdCtx, parts: Parts, dQ: cute.Tensor, stage):
        """Issue dQ = dS K."""
        gemm(cx.mmas.dq, dQ, parts.tdQrdS[None, None, None, stage], parts.tdQrK, False)
