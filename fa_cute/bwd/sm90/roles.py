"""The two consumer warpgroups of wide head dims, one job each, over the same 64 keys.

    values   A(j): S = K Q^T    | P = exp2(S)         | B(j): dQ(j - 1) left,  dV += P dO  | ...
    keys     A(j): dP = V dO^T  | dS = P (dP - delta) | B(j): dQ(j - 1) right, dK += dS Q  | ...

dK and dV of 64 keys and 256 columns fill half the registers of a warpgroup each, so one has dV and
the other dK, both with their left operand in registers. P goes from `values` to `keys` in 16 bits
(what dV uses too), fragment for fragment, through shared memory.

Turns on the tensor core go values, keys, values, keys; they order all there is to order about sdS
and sP: dS(j - 1) is written before keys' B(j - 1), which is before both B(j); stage j % 2 is
written again after keys' A(j + 2), and values' dQ(j) was complete before it passed the turn of
keys' B(j + 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import const_expr
from cutlass.cute.nvgpu import warpgroup

from fa_cute.bwd.sm90.ctx import BwdCtx, warpgroup_slice
from fa_cute.bwd.sm90.epilogue import DK, DV
from fa_cute.bwd.sm90.plan import WARPGROUP_THREADS
from fa_cute.bwd.sm90.products import (
    BOTH,
    Lane,
    accumulator,
    columns,
    ds_copy,
    flat,
    gemm,
    operand,
    pass_turn,
    probabilities,
    score_gradient,
    share_ds,
    spans,
    take_turn,
    transposed,
)
from fa_cute.bwd.sm90.tiles import filled, finish, let_go

VALUES, KEYS = 0, 1


@dataclass(frozen=True)
class DqHalf:
    """One warpgroup's columns of dQ."""

    tdQrdS: Any
    tdQrK: Any

    @classmethod
    def of(cls, cx: BwdCtx, wg: int) -> DqHalf:
        """Descriptors."""
        dq = warpgroup_slice(cx.mmas.dq, wg)
        return cls(
            dq.make_fragment_A(dq.partition_A(cx.smem.sdS)),
            dq.make_fragment_B(dq.partition_B(transposed(cx.smem.sK))),
        )

    def share(self, cx: BwdCtx, copy, to: cute.Tensor, rdS: cute.Tensor, m_block):
        """dS of a step from keys to all who need it for dQ."""
        share_ds(cx, copy, to, rdS)

    def begin(self, cx: BwdCtx):
        """Before the first turn with a sum: K is there."""

    def ready(self, cx: BwdCtx, m_block):
        """Before dQ of a step: turns tell that dS is there."""

    def done(self, cx: BwdCtx, m_block):
        """After dQ of a step: turns tell that dS was read."""

    def chunk(self, cx: BwdCtx, lane: Lane):
        """Which chunk of a dQ tile is ours."""
        return lane.wg

    def issue(self, cx: BwdCtx, m_block) -> cute.Tensor:
        """dQ = dS K of a step, issued; its registers."""
        dQ = accumulator(cx.mmas.dq, cx.cfg.tile_m, cx.cfg.head_dim)
        gemm(cx.mmas.dq, dQ, self.tdQrdS[None, None, None, m_block % 2], self.tdQrK, False)
        return dQ

    @cute.jit
    def turn(self, cx: BwdCtx, own, m_block, lane: Lane, first: cutlass.Constexpr[bool]):
        """A turn with dQ of the step before and ``own``, (product, registers, A, B) of this
        warpgroup's sum; done when both are.
        """
        product, registers, tA, tB = own
        if const_expr(first):
            self.begin(cx)
        else:
            self.ready(cx, m_block - 1)
        take_turn(cx, lane.wg)
        if const_expr(not first):
            dQ = self.issue(cx, m_block - 1)
        gemm(product, registers, tA, tB, not first)
        if const_expr(not first):
            warpgroup.wait_group(1)  # dQ
        pass_turn(cx, lane.wg)
        if const_expr(not first):
            self.done(cx, m_block - 1)
            cx.writer.hand_over(cx, dQ, m_block - 1, lane, self.chunk(cx, lane))
        warpgroup.wait_group(0)  # the sum

    @cute.jit
    def last(self, cx: BwdCtx, m_block, lane: Lane):
        """dQ of the last query block. Nobody takes a turn after keys'."""
        self.ready(cx, m_block)
        take_turn(cx, lane.wg)
        if const_expr(lane.wg == VALUES):
            pass_turn(cx, lane.wg)
        dQ = self.issue(cx, m_block)
        warpgroup.wait_group(0)
        self.done(cx, m_block)
        cx.writer.hand_over(cx, dQ, m_block, lane, self.chunk(cx, lane))


def exchange(cx: BwdCtx, lane: Lane) -> cute.Tensor:
    """A thread's P in sP: 16-byte vectors, threads side by side."""
    num = cx.cfg.tile_m // 2
    start = (cx.smem.sP[None, 0].iterator + lane.t * 8).align(16)
    return cute.make_tensor(
        start, cute.make_layout((8, num // 8), stride=(1, 8 * WARPGROUP_THREADS))
    )


def vectors(fragment: cute.Tensor) -> cute.Tensor:
    """Registers in the shape of `exchange`."""
    return cute.make_tensor(fragment.iterator, cute.make_layout((8, cute.size(fragment) // 8)))


@dataclass(frozen=True)
class Values:
    """Warpgroup 0: P and dV. Waits load_k, load_q, load_do, turn_0, dq_empty_0; signals p_full,
    turn_1, dq_full_0, releases load_q, load_do; persistent: load_k, load_v too. Of a pair: waits
    load_kx, peer_ds, releases it."""

    epilogue: Any
    part: Any = DqHalf

    def prepare(self, cx: BwdCtx):
        """What it has for all tiles: thread, lane, operands, the registers of dV."""
        c, m = cx.cfg, cx.mmas
        t = cute.arch.thread_idx()[0] - c.warps["values"].start * 32
        lane = Lane(VALUES, t, 0)
        sdp, dv = warpgroup_slice(m.sdp, 0), warpgroup_slice(m.dv, 0)
        tSrK = sdp.make_fragment_A(sdp.partition_A(cx.smem.sK))
        tSrQ = sdp.make_fragment_B(sdp.partition_B(cx.smem.sQ))
        tdVrdO = dv.make_fragment_B(dv.partition_B(transposed(cx.smem.sdO)))
        half = self.part.of(cx, VALUES)
        dV = accumulator(m.dv, c.tile_n, c.head_dim_v)
        return t, lane, (tSrK, tSrQ, tdVrdO, half), dV

    @cute.jit
    def tile(self, cx: BwdCtx, own, ends):
        """One tile; returns the ends."""
        t, lane, operands, dV = own
        half = operands[3]
        k, v, q, do = ends
        k.wait()
        blocks = cx.q_blocks()
        q, q_full = filled(cx, q, blocks.lo)
        rP = self.probabilities(cx, operands, (blocks.lo, q_full), lane, True)
        do, do_full = filled(cx, do, blocks.lo)
        self.sum(cx, operands, (dV, rP), (blocks.lo, do_full), lane, True)
        for span in cutlass.range_constexpr(3):
            start, end, masked = spans(blocks, blocks.lo + 1)[span]
            for m_block in cutlass.range(start, end, unroll=1):
                q, q_full = filled(cx, q, m_block)
                rP = self.probabilities(cx, operands, (m_block, q_full), lane, masked)
                do, do_full = filled(cx, do, m_block)
                self.sum(cx, operands, (dV, rP), (m_block, do_full), lane, False)
        half.last(cx, blocks.hi - 1, lane)
        if const_expr(cx.cfg.persistent):
            v.wait()  # long there, but nobody lets go of what it has not waited for
        let_go(cx, self.epilogue, (k, v), True)
        finish(cx, self.epilogue, ((DV, dV),), (lane, t), (k, v))
        return k, v, q, do

    @cute.jit
    def probabilities(self, cx: BwdCtx, operands, at, lane: Lane, masked: cutlass.Constexpr[bool]):
        """P of one query block, handed to keys; returns it as an operand."""
        tSrK, tSrQ, _, _ = operands
        m_block, q_full = at
        S = accumulator(cx.mmas.sdp, cx.cfg.tile_n, cx.cfg.tile_m)
        take_turn(cx, VALUES)
        gemm(cx.mmas.sdp, S, tSrK, tSrQ[None, None, None, q_full.index], False)
        pass_turn(cx, VALUES)
        lse = columns(cx.smem.sLse[None, q_full.index], cx.cfg.tile_m, lane)
        warpgroup.wait_group(0)
        probabilities(cx, S, lse, m_block, lane, masked)
        q_full.release()
        rP = operand(cx, S, cx.mmas.dv)
        cute.autovec_copy(vectors(rP), exchange(cx, lane))
        p_full = cx.barrier_id("p_full")
        cute.arch.barrier_arrive(barrier_id=p_full, number_of_threads=BOTH)
        return rP

    @cute.jit
    def sum(self, cx: BwdCtx, operands, accs, at, lane: Lane, first: cutlass.Constexpr[bool]):
        """dV of one query block, and the left half of dQ of the one before."""
        _, _, tdVrdO, half = operands
        dV, rP = accs
        m_block, do_full = at
        own = (cx.mmas.dv, dV, rP, tdVrdO[None, None, None, do_full.index])
        half.turn(cx, own, m_block, lane, first)
        do_full.release()


@dataclass(frozen=True)
class Keys:
    """Warpgroup 1: dS and dK. Waits load_v, load_q, load_do, p_full, turn_1, dq_empty_1; signals
    turn_0, dq_full_1, releases load_q, load_do; persistent: load_k, load_v too. Of a pair: waits
    load_kx, peer_ds, releases it; sends peer_ds."""

    epilogue: Any
    part: Any = DqHalf

    def prepare(self, cx: BwdCtx):
        """What it has for all tiles: thread, lane, operands, the registers of dK."""
        c, m = cx.cfg, cx.mmas
        t = cute.arch.thread_idx()[0] - c.warps["keys"].start * 32
        lane = Lane(KEYS, t, 0)
        sdp, dk = warpgroup_slice(m.sdp, 0), warpgroup_slice(m.dk, 0)
        tdPrV = sdp.make_fragment_A(sdp.partition_A(cx.smem.sV))
        tdPrdO = sdp.make_fragment_B(sdp.partition_B(cx.smem.sdO))
        tdKrQ = dk.make_fragment_B(dk.partition_B(transposed(cx.smem.sQ)))
        half, copy = self.part.of(cx, KEYS), ds_copy(cx)
        tdSsdS = copy.get_slice(t).partition_D(transposed(cx.smem.sdS))
        dK = accumulator(m.dk, c.tile_n, c.head_dim)
        return t, lane, (tdPrV, tdPrdO, tdKrQ, half, copy, tdSsdS), dK

    @cute.jit
    def tile(self, cx: BwdCtx, own, ends):
        """One tile; returns the ends."""
        t, lane, operands, dK = own
        half = operands[3]
        k, v, q, do = ends
        pass_turn(cx, KEYS)  # the first turn is values'
        k.wait()
        v.wait()
        blocks = cx.q_blocks()
        do, do_full = filled(cx, do, blocks.lo)
        rdS = self.score_gradient(cx, operands, (blocks.lo, do_full), lane)
        q, q_full = filled(cx, q, blocks.lo)
        self.sum(cx, operands, (dK, rdS), (blocks.lo, q_full), lane, True)
        for m_block in cutlass.range(blocks.lo + 1, blocks.hi, unroll=1):
            do, do_full = filled(cx, do, m_block)
            rdS = self.score_gradient(cx, operands, (m_block, do_full), lane)
            q, q_full = filled(cx, q, m_block)
            self.sum(cx, operands, (dK, rdS), (m_block, q_full), lane, False)
        half.last(cx, blocks.hi - 1, lane)
        let_go(cx, self.epilogue, (k, v), True)
        finish(cx, self.epilogue, ((DK, dK),), (lane, t), (k, v))
        return k, v, q, do

    @cute.jit
    def score_gradient(self, cx: BwdCtx, operands, at, lane: Lane):
        """dS of one query block, in shared memory; returns it as an operand."""
        tdPrV, tdPrdO, _, half, copy, tdSsdS = operands
        m_block, do_full = at
        dP = accumulator(cx.mmas.sdp, cx.cfg.tile_n, cx.cfg.tile_m)
        take_turn(cx, KEYS)
        gemm(cx.mmas.sdp, dP, tdPrV, tdPrdO[None, None, None, do_full.index], False)
        pass_turn(cx, KEYS)
        delta = columns(cx.smem.sDelta[None, do_full.index], cx.cfg.tile_m, lane)
        P = self.probabilities(cx, lane)
        warpgroup.wait_group(0)
        score_gradient(cx, P, dP, delta)
        do_full.release()
        rdS = operand(cx, dP, cx.mmas.dk)
        half.share(cx, copy, tdSsdS[None, None, None, m_block % 2], rdS, m_block)
        return rdS

    @cute.jit
    def sum(self, cx: BwdCtx, operands, accs, at, lane: Lane, first: cutlass.Constexpr[bool]):
        """dK of one query block, and the right half of dQ of the one before."""
        _, _, tdKrQ, half, _, _ = operands
        dK, rdS = accs
        m_block, q_full = at
        own = (cx.mmas.dk, dK, rdS, tdKrQ[None, None, None, q_full.index])
        half.turn(cx, own, m_block, lane, first)
        q_full.release()

    @cute.jit
    def probabilities(self, cx: BwdCtx, lane: Lane):
        """P from values, widened; values writes the next one only after our B of this step."""
        p_full = cx.barrier_id("p_full")
        cute.arch.barrier(barrier_id=p_full, number_of_threads=BOTH)
        rP = cute.make_rmem_tensor(cx.cfg.tile_m // 2, cx.smem.sP.element_type)
        cute.autovec_copy(exchange(cx, lane), vectors(rP))
        P = accumulator(cx.mmas.sdp, cx.cfg.tile_n, cx.cfg.tile_m)
        flat(P).store(rP.load().to(P.element_type))
        return P
