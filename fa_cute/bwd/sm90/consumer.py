"""The two consumer warpgroups: five products per query block, then dK and dV.

Order of one step, and what a warpgroup has in flight on the tensor core:

    S = K Q^T, dP = V dO^T   issued;   P = exp2 while dP runs;   dS = P (dP - delta)
    dV += P dO               issued;   dS to shared memory meanwhile
    dK += dS Q               issued;   the other warpgroup's dS arrives meanwhile
    dQ = dS K                issued;   the stages of dO and Q are released as dV and dK finish

Handing dS over costs nobody time as long as the warpgroups are less than dV and dK apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp, warpgroup

from fa_cute.bwd.sm90.ctx import BwdCtx, warpgroup_slice
from fa_cute.bwd.sm90.plan import CONSUMERS, WARPGROUP_THREADS

BOTH = CONSUMERS * WARPGROUP_THREADS


@dataclass(frozen=True)
class Lane:
    """Where a thread stands: its warpgroup, its index in it, and the row and column of its first accumulator."""

    wg: Int32
    t: Int32

    @property
    def row(self):
        return self.t // 32 * 16 + self.t % 32 // 4

    @property
    def col(self):
        return self.t % 4 * 2


def gemm(
    tiled: cute.TiledMma, acc: cute.Tensor, tA: cute.Tensor, tB: cute.Tensor, accumulate
) -> None:
    """Issue ``acc (+)= A B`` as one wgmma group; ``accumulate`` may be dynamic."""
    atom = cute.make_mma_atom(tiled.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    warpgroup.fence()
    for k in range(cute.size(tA.shape[2])):
        cute.gemm(atom, acc, tA[None, None, k], tB[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def transposed(tensor: cute.Tensor) -> cute.Tensor:
    """(rows, cols, ...) as (cols, rows, ...)."""
    order = [1, 0, *range(2, cute.rank(tensor))]
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=order))


def flat(fragment: cute.Tensor) -> cute.Tensor:
    """A register fragment as a vector in wgmma's order r = 4 j + 2 h + i."""
    return cute.make_tensor(fragment.iterator, cute.make_layout(cute.size(fragment)))


def accumulator(tiled: cute.TiledMma, rows: int, cols: int) -> cute.Tensor:
    """Registers of a (rows, cols) product."""
    return cute.make_rmem_tensor(tiled.partition_shape_C((rows, cols)), Float32)


def columns(vector: cute.Tensor, size: int, lane: Lane) -> cute.Tensor:
    """A thread's columns 8 j + col + i of a vector in shared memory, (2, size / 8) in registers."""
    start = (vector.iterator + lane.col).align(8)
    layout = cute.make_layout((2, size // 8), stride=(1, 8))
    values = cute.make_rmem_tensor(cute.make_layout((2, size // 8)), vector.element_type)
    cute.autovec_copy(cute.make_tensor(start, layout), values)
    return values


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
    store_ds: Any  # tiled copy registers -> sdS
    tdSsdS: Any  # its destination (CPY, ..., STAGE)


@dataclass(frozen=True)
class Consumer:
    """Eight warps. Waits load_*, ds_<other>, dq_empty_<own>; releases load_q, load_do, signals ds_<own>, dq_full_<own>."""

    epilogue: Any

    @cute.jit
    def run(self, cx: BwdCtx):
        c = cx.cfg
        thread = cute.arch.thread_idx()[0] - c.warps["consumer"].start * 32
        wg = cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)
        lane = Lane(wg, thread % WARPGROUP_THREADS)
        parts = self.parts(cx, thread, wg)
        dK = accumulator(cx.mmas.dk, c.tile_n, c.head_dim)
        dV = accumulator(cx.mmas.dv, c.tile_n, c.head_dim_v)

        k, v = cx.pipes.load_k.make_consumer(), cx.pipes.load_v.make_consumer()
        q, do = cx.pipes.load_q.make_consumer(), cx.pipes.load_do.make_consumer()
        blocks = cx.q_blocks()
        P, dP = (accumulator(cx.mmas.sdp, c.tile_n, c.tile_m) for _ in range(2))
        k.wait()
        q_full = q.wait_and_advance()
        self.scores(cx, parts, P, q_full.index)
        v.wait()
        do_full = do.wait_and_advance()
        self.head(cx, parts, (P, dP), (blocks.lo, q_full, do_full), lane)
        for m_block in cutlass.range(blocks.lo, blocks.hi - 1, unroll=1):
            dQ = self.tail(cx, parts, (P, dP, dK, dV), (m_block, q_full, do_full), lane)
            q_full = q.wait_and_advance()
            self.scores(cx, parts, P, q_full.index)  # runs while dQ is handed over
            warpgroup.wait_group(1)
            self.hand_over(cx, dQ, m_block, lane)
            do_full = do.wait_and_advance()
            self.head(cx, parts, (P, dP), (m_block + 1, q_full, do_full), lane)
        last = blocks.hi - 1
        dQ = self.tail(cx, parts, (P, dP, dK, dV), (last, q_full, do_full), lane)
        warpgroup.wait_group(0)
        self.hand_over(cx, dQ, last, lane)
        self.epilogue.run(cx, dK, dV, lane)

    def scores(self, cx: BwdCtx, parts: Parts, S: cute.Tensor, stage):
        """Issue S^T = K Q^T."""
        gemm(cx.mmas.sdp, S, parts.tSrK, parts.tSrQ[None, None, None, stage], False)

    @cute.jit
    def head(self, cx: BwdCtx, parts: Parts, accs, at, lane: Lane):
        """From S in flight to P and dP in registers, nothing in flight: the state between two steps."""
        P, dP = accs
        m_block, q_full, do_full = at
        gemm(cx.mmas.sdp, dP, parts.tdPrV, parts.tdPrdO[None, None, None, do_full.index], False)
        warpgroup.wait_group(1)  # S
        self.probabilities(cx, P, cx.smem.sLse[None, q_full.index], lane)
        blocks = cx.q_blocks()
        if m_block < blocks.full_lo or m_block >= blocks.full_hi:
            self.apply_mask(cx, P, m_block, lane)
        warpgroup.wait_group(0)  # dP

    @cute.jit
    def tail(self, cx: BwdCtx, parts: Parts, accs, at, lane: Lane):
        """From P and dP to dQ in flight; releases dO and Q. Returns dQ, the newest wgmma group."""
        P, dP, dK, dV = accs
        m_block, q_full, do_full = at
        lo = cx.q_blocks().lo
        first, turn = m_block == lo, (m_block - lo) % 2
        rP = self.operand(cx, P, cx.mmas.dv)
        if const_expr(cx.cfg.dv_first):
            gemm(cx.mmas.dv, dV, rP, parts.tdVrdO[None, None, None, do_full.index], not first)
        self.score_gradient(cx, P, dP, cx.smem.sDelta[None, do_full.index], lane)
        rdS = self.operand(cx, dP, cx.mmas.dk)
        if const_expr(not cx.cfg.dv_first):
            gemm(cx.mmas.dv, dV, rP, parts.tdVrdO[None, None, None, do_full.index], not first)
        # The stage was last read by both dQ of two steps ago; both were waited for before ds_* of the last step.
        self.share_ds(cx, parts, rdS, turn, lane.wg)
        gemm(cx.mmas.dk, dK, rdS, parts.tdKrQ[None, None, None, q_full.index], not first)
        other = cx.barrier_id("ds_00") + 2 * (1 - lane.wg) + turn
        cute.arch.barrier(barrier_id=other, number_of_threads=BOTH)
        warpgroup.wait_group(1)  # dV
        do_full.release()
        dQ = accumulator(cx.mmas.dq, cx.cfg.tile_m, cx.cfg.head_dim)
        if const_expr(cx.cfg.dq_split == "turns"):
            if turn == lane.wg:
                self.query_gradient(cx, parts, dQ, turn)
                warpgroup.wait_group(0)
                cx.writer.hand_over(cx, dQ, m_block, lane, 0)
            warpgroup.wait_group(0)  # dK
        else:
            self.query_gradient(cx, parts, dQ, turn)
            warpgroup.wait_group(1)  # dK
        q_full.release()
        return dQ

    def parts(self, cx: BwdCtx, thread, wg) -> Parts:
        """Descriptors of this warpgroup's operands, and where its dS goes."""
        s, m = cx.smem, cx.mmas
        sdp, dv, dk = (warpgroup_slice(x, wg) for x in (m.sdp, m.dv, m.dk))
        dq = warpgroup_slice(m.dq, 0 if cx.cfg.dq_split == "turns" else wg)
        atom = cute.make_copy_atom(
            warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), s.sdS.element_type
        )
        store_ds = cute.make_tiled_copy_C(atom, m.sdp)
        return Parts(
            tSrK=sdp.make_fragment_A(sdp.partition_A(s.sK)),
            tSrQ=sdp.make_fragment_B(sdp.partition_B(s.sQ)),
            tdPrV=sdp.make_fragment_A(sdp.partition_A(s.sV)),
            tdPrdO=sdp.make_fragment_B(sdp.partition_B(s.sdO)),
            tdVrdO=dv.make_fragment_B(dv.partition_B(transposed(s.sdO))),
            tdKrQ=dk.make_fragment_B(dk.partition_B(transposed(s.sQ))),
            tdQrdS=dq.make_fragment_A(dq.partition_A(s.sdS)),
            tdQrK=dq.make_fragment_B(dq.partition_B(transposed(s.sK))),
            store_ds=store_ds,
            tdSsdS=store_ds.get_slice(thread).partition_D(transposed(s.sdS)),
        )

    def operand(self, cx: BwdCtx, acc: cute.Tensor, tiled: cute.TiledMma) -> cute.Tensor:
        """An accumulator in 16 bits as a register operand A: wgmma holds both in the same order."""
        shape = tiled.partition_shape_A((cx.cfg.tile_n, cx.cfg.tile_m))
        fragment = cute.make_rmem_tensor(shape, cx.smem.sQ.element_type)
        flat(fragment).store(flat(acc).load().to(fragment.element_type))
        return fragment

    @cute.jit
    def probabilities(self, cx: BwdCtx, S: cute.Tensor, sLse: cute.Tensor, lane: Lane):
        """S <- exp2(S * scale - lse), in place; lse by column, two columns at a time."""
        rS, lse = flat(S), columns(sLse, cx.cfg.tile_m, lane)
        for j in cutlass.range_constexpr(cx.cfg.tile_m // 8):
            for i in cutlass.range_constexpr(2):
                for h in cutlass.range_constexpr(2):
                    r = 4 * j + 2 * h + i
                    rS[r] = cute.math.exp2(rS[r] * cx.scale_log2 - lse[i, j], fastmath=True)

    @cute.jit
    def apply_mask(self, cx: BwdCtx, P: cute.Tensor, m_block: Int32, lane: Lane):
        """Zero the pairs that the mask forbids and keys that do not exist (their P may be infinite)."""
        c, rP = cx.cfg, flat(P)
        for h in cutlass.range_constexpr(2):
            key = cx.n_block * c.tile_n + 64 * lane.wg + lane.row + 8 * h
            start = -m_block * c.tile_m - lane.col
            if const_expr(cx.spec.causal):
                start += key - (
                    cx.seqlen_k - cx.seqlen_q
                )  # first query that sees the key, by column of this thread
            if key >= cx.seqlen_k:
                start = Int32(c.tile_m)
            for j in cutlass.range_constexpr(c.tile_m // 8):
                for i in cutlass.range_constexpr(2):
                    r = 4 * j + 2 * h + i
                    rP[r] = rP[r] if 8 * j + i >= start else Float32(0.0)

    @cute.jit
    def score_gradient(
        self, cx: BwdCtx, P: cute.Tensor, dP: cute.Tensor, sDelta: cute.Tensor, lane: Lane
    ):
        """dP <- P * (dP - delta), in place."""
        rP, rdP, delta = flat(P), flat(dP), columns(sDelta, cx.cfg.tile_m, lane)
        for j in cutlass.range_constexpr(cx.cfg.tile_m // 8):
            for i in cutlass.range_constexpr(2):
                for h in cutlass.range_constexpr(2):
                    r = 4 * j + 2 * h + i
                    rdP[r] = rP[r] * (rdP[r] - delta[i, j])

    @cute.jit
    def share_ds(self, cx: BwdCtx, parts: Parts, rdS: cute.Tensor, turn: Int32, wg: Int32):
        """Write our keys' dS for the dQ product of both warpgroups, and say so."""
        shape = cx.mmas.sdp.partition_shape_C((cx.cfg.tile_n, cx.cfg.tile_m))
        source = cute.make_tensor(rdS.iterator, cute.make_layout(shape))
        copy = parts.store_ds
        cute.copy(copy, copy.retile(source), parts.tdSsdS[None, None, None, turn])
        cute.arch.fence_proxy("async.shared", space="cta")  # wgmma reads through the async proxy
        own = cx.barrier_id("ds_00") + 2 * wg + turn
        cute.arch.barrier_arrive(barrier_id=own, number_of_threads=BOTH)

    def query_gradient(self, cx: BwdCtx, parts: Parts, dQ: cute.Tensor, stage):
        """Issue dQ = dS K."""
        gemm(cx.mmas.dq, dQ, parts.tdQrdS[None, None, None, stage], parts.tdQrK, False)

    @cute.jit
    def hand_over(self, cx: BwdCtx, dQ: cute.Tensor, m_block: Int32, lane: Lane):
        """Give this warpgroup's part of the dQ tile to the writer; in turns that is done already."""
        if const_expr(cx.cfg.dq_split != "turns"):
            cx.writer.hand_over(cx, dQ, m_block, lane, lane.wg)
