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
from fa_cute.bwd.sm90.dq_store import STORE_THREADS
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


def gemm(tiled: cute.TiledMma, acc: cute.Tensor, tA: cute.Tensor, tB: cute.Tensor, accumulate) -> None:
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
        k.wait()
        for m_block in cutlass.range(blocks.lo, blocks.hi, unroll=1):
            first = m_block == blocks.lo
            turn = (m_block - blocks.lo) % 2
            q_full = q.wait_and_advance()
            S = accumulator(cx.mmas.sdp, c.tile_n, c.tile_m)
            gemm(cx.mmas.sdp, S, parts.tSrK, parts.tSrQ[None, None, None, q_full.index], False)
            if first:
                v.wait()
            do_full = do.wait_and_advance()
            dP = accumulator(cx.mmas.sdp, c.tile_n, c.tile_m)
            gemm(cx.mmas.sdp, dP, parts.tdPrV, parts.tdPrdO[None, None, None, do_full.index], False)
            warpgroup.wait_group(1)  # S

            self.probabilities(cx, S, cx.smem.sLse[None, q_full.index], lane)
            if m_block < blocks.full_lo or m_block >= blocks.full_hi:
                self.apply_mask(cx, S, m_block, lane)
            rP = self.operand(cx, S, cx.mmas.dv)
            warpgroup.wait_group(0)  # dP
            self.score_gradient(cx, S, dP, cx.smem.sDelta[None, do_full.index], lane)
            rdS = self.operand(cx, dP, cx.mmas.dk)

            gemm(cx.mmas.dv, dV, rP, parts.tdVrdO[None, None, None, do_full.index], not first)
            # The stage was last read by both dQ of two steps ago; both were waited for before ds_* of the last step.
            self.share_ds(cx, parts, rdS, turn, wg)
            gemm(cx.mmas.dk, dK, rdS, parts.tdKrQ[None, None, None, q_full.index], not first)
            other = cx.barrier_id("ds_00") + 2 * (1 - wg) + turn
            cute.arch.barrier(barrier_id=other, number_of_threads=BOTH)
            self.query_gradient(cx, parts, (turn, q_full, do_full), lane)
        self.epilogue.run(cx, dK, dV, lane)

    def parts(self, cx: BwdCtx, thread, wg) -> Parts:
        """Descriptors of this warpgroup's operands, and where its dS goes."""
        s, m = cx.smem, cx.mmas
        sdp, dv, dk = (warpgroup_slice(x, wg) for x in (m.sdp, m.dv, m.dk))
        dq = warpgroup_slice(m.dq, 0 if cx.cfg.dq_split == "turns" else wg)
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), s.sdS.element_type)
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
        rS = flat(S)
        for j in cutlass.range_constexpr(cx.cfg.tile_m // 8):
            for i in cutlass.range_constexpr(2):
                lse = sLse[8 * j + lane.col + i]
                for h in cutlass.range_constexpr(2):
                    r = 4 * j + 2 * h + i
                    rS[r] = cute.math.exp2(rS[r] * cx.scale_log2 - lse, fastmath=True)

    @cute.jit
    def apply_mask(self, cx: BwdCtx, P: cute.Tensor, m_block: Int32, lane: Lane):
        """Zero the pairs that the mask forbids and keys that do not exist (their P may be infinite)."""
        c, rP = cx.cfg, flat(P)
        for h in cutlass.range_constexpr(2):
            key = cx.n_block * c.tile_n + 64 * lane.wg + lane.row + 8 * h
            start = -m_block * c.tile_m - lane.col
            if const_expr(cx.spec.causal):
                start += key - (cx.seqlen_k - cx.seqlen_q)  # first query that sees the key, by column of this thread
            if key >= cx.seqlen_k:
                start = Int32(c.tile_m)
            for j in cutlass.range_constexpr(c.tile_m // 8):
                for i in cutlass.range_constexpr(2):
                    r = 4 * j + 2 * h + i
                    rP[r] = rP[r] if 8 * j + i >= start else Float32(0.0)

    @cute.jit
    def score_gradient(self, cx: BwdCtx, P: cute.Tensor, dP: cute.Tensor, sDelta: cute.Tensor, lane: Lane):
        """dP <- P * (dP - delta), in place."""
        rP, rdP = flat(P), flat(dP)
        for j in cutlass.range_constexpr(cx.cfg.tile_m // 8):
            for i in cutlass.range_constexpr(2):
                delta = sDelta[8 * j + lane.col + i]
                for h in cutlass.range_constexpr(2):
                    r = 4 * j + 2 * h + i
                    rdP[r] = rP[r] * (rdP[r] - delta)

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

    @cute.jit
    def query_gradient(self, cx: BwdCtx, parts: Parts, at, lane: Lane):
        """dQ of this step to dq_store; releases dO and Q on the way."""
        turn, q_full, do_full = at
        if const_expr(cx.cfg.dq_split == "turns"):
            warpgroup.wait_group(1)  # dV
            do_full.release()
            if turn == lane.wg:
                self.dq_tile(cx, parts, turn, lane)
            warpgroup.wait_group(0)  # dK
            q_full.release()
        else:
            dQ = accumulator(cx.mmas.dq, cx.cfg.tile_m, cx.cfg.head_dim)
            gemm(cx.mmas.dq, dQ, parts.tdQrdS[None, None, None, turn], parts.tdQrK, False)
            warpgroup.wait_group(2)  # dV
            do_full.release()
            warpgroup.wait_group(1)  # dK
            q_full.release()
            warpgroup.wait_group(0)
            self.hand_over(cx, dQ, lane)

    @cute.jit
    def dq_tile(self, cx: BwdCtx, parts: Parts, turn: Int32, lane: Lane):
        """All of a dQ tile by this warpgroup."""
        dQ = accumulator(cx.mmas.dq, cx.cfg.tile_m, cx.cfg.head_dim)
        gemm(cx.mmas.dq, dQ, parts.tdQrdS[None, None, None, turn], parts.tdQrK, False)
        warpgroup.wait_group(0)
        self.hand_over(cx, dQ, lane)

    @cute.jit
    def hand_over(self, cx: BwdCtx, dQ: cute.Tensor, lane: Lane):
        """dQ in fragment order into this warpgroup's buffer, once dq_store has drained it."""
        chunks = cx.cfg.dq_chunks
        empty, full = cx.barrier_id("dq_empty_0") + lane.wg, cx.barrier_id("dq_full_0") + lane.wg
        cute.arch.barrier(barrier_id=empty, number_of_threads=STORE_THREADS)
        to = (cx.smem.sdQ[None, lane.wg].iterator + lane.t * 4).align(16)
        vectors = cute.make_layout((4, chunks.vectors), stride=(1, 4 * WARPGROUP_THREADS))
        registers = cute.make_tensor(dQ.iterator, cute.make_layout((4, chunks.vectors)))
        cute.autovec_copy(registers, cute.make_tensor(to, vectors))
        cute.arch.fence_proxy("async.shared", space="cta")  # the bulk engine reads through the async proxy
        cute.arch.barrier_arrive(barrier_id=full, number_of_threads=STORE_THREADS)


