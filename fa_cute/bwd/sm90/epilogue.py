"""How dK and dV leave the registers."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import const_expr
from cutlass.cute.nvgpu import cpasync, warp

from fa_cute.bwd.sm90.ctx import BwdCtx, Layouts
from fa_cute.bwd.sm90.plan import CONSUMERS, WARPGROUP_THREADS, WGMMA_ROWS
from fa_cute.ops.reduce import add_f32x4
from fa_cute.ops.semaphore import pass_turn, wait_turn
from fa_cute.sched.spt import dkv_lock

BOTH = CONSUMERS * WARPGROUP_THREADS
VECTOR = 8  # 16-bit elements of a 16-byte access


@dataclass(frozen=True)
class Gradient:
    """One of the two results: where it lies and how it leaves. ``name`` is "dk" or "dv"."""

    name: str

    def smem(self, cx: BwdCtx) -> cute.Tensor:
        """Where it waits for its store, in the layout of K or V."""
        if self.name == "dk" and cx.cfg.dk_over_ds:
            dtype = cx.smem.sdS.element_type
            layout = Layouts(cx.cfg, dtype).of("sK")
            start = cute.recast_ptr(cx.smem.sdS.iterator, layout.inner, dtype=dtype)
            return cute.make_tensor(start, layout.outer)
        return cx.smem.sK if self.name == "dk" else cx.smem.sV

    def mma(self, cx: BwdCtx) -> cute.TiledMma:
        return cx.mmas.dk if self.name == "dk" else cx.mmas.dv

    def target(self, cx: BwdCtx):
        """(store atom, tensor) for TMA; (None, pointer) where kv heads are shared."""
        g = cx.g
        return (g.store_dk, g.mdK) if self.name == "dk" else (g.store_dv, g.mdV)

    def chunks(self, cx: BwdCtx):
        return cx.cfg.dk_chunks if self.name == "dk" else cx.cfg.dv_chunks

    def to_shared(self, cx: BwdCtx, acc: cute.Tensor, thread):
        """Accumulator -> 16 bits -> the operand's place and layout."""
        smem = self.smem(cx)
        values = cute.make_rmem_tensor(acc.layout, smem.element_type)
        values.store(acc.load().to(smem.element_type))
        op = warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4)
        copy = cute.make_tiled_copy_C(cute.make_copy_atom(op, smem.element_type), self.mma(cx))
        cute.copy(copy, copy.retile(values), copy.get_slice(thread).partition_D(smem))

    def to_global(self, cx: BwdCtx):
        """One TMA store; rows past the end of the tensor are not written."""
        (atom, tensor), chunks = self.target(cx), self.chunks(cx)
        rows, box = cx.lengths.rows(tensor, "k", cx.tile.head), (chunks.rows, chunks.cols)
        g = cute.local_tile(rows, box, (cx.n_block, 0))
        src, dst = cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            cute.group_modes(self.smem(cx), 0, 2),
            cute.group_modes(g, 0, 2),
        )
        cute.copy(atom, src, dst)

    @cute.jit
    def add(self, cx: BwdCtx, acc: cute.Tensor, chunk, t):
        """This thread's vectors of its warpgroup's chunk, added to the fp32 sums."""
        chunks, to = self.chunks(cx), self.target(cx)[1]
        to += cx.dkv_tile() * (chunks.rows * chunks.cols) + chunk * chunks.chunk_floats + t * 4
        r = cute.make_tensor(acc.iterator, cute.make_layout((4, chunks.vectors)))
        for j in cutlass.range_constexpr(chunks.vectors):
            add_f32x4(to + j * 4 * WARPGROUP_THREADS, r[0, j], r[1, j], r[2, j], r[3, j])


DK, DV = Gradient("dk"), Gradient("dv")


def meet(cx: BwdCtx):
    """Both warpgroups are here."""
    cute.arch.barrier(barrier_id=cx.barrier_id("epilogue"), number_of_threads=BOTH)


@dataclass(frozen=True)
class Store:
    """One query head per kv head: in the tensor's dtype, through the shared memory of K and V, by
    TMA.

    ``write(cx, ((gradient, registers), ...), lane, thread)`` with what the caller has of both.
    """

    def frees_first(self, cx: BwdCtx):
        """Whether K, whether V is free for the next tile before `write`."""
        return cx.cfg.dk_over_ds, False

    @cute.jit
    def write(self, cx: BwdCtx, results, lane, thread):
        meet(cx)  # the other warpgroup may still be reading K for its last dQ
        for i in cutlass.range_constexpr(len(results)):
            gradient, acc = results[i]
            if const_expr(gradient.name == "dk"):
                acc.store(acc.load() * cx.scale)
            gradient.to_shared(cx, acc, thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        meet(cx)
        if cute.arch.make_warp_uniform(thread // 32) == 0:
            for i in cutlass.range_constexpr(len(results)):
                results[i][0].to_global(cx)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def nothing(self, cx: BwdCtx, warp):
        """Zeros, of keys that no query sees; called by all warps of the CTA."""
        tidx, threads = cute.arch.thread_idx()[0], cx.cfg.warps.threads
        for smem in (cx.smem.sK, cx.smem.sV):
            zero = cute.make_rmem_tensor(VECTOR, smem.element_type)
            zero.fill(0.0)
            for i in cutlass.range(tidx, cute.size(smem) // VECTOR, threads):
                to = (smem.iterator + i * VECTOR).align(16)
                cute.autovec_copy(zero, cute.make_tensor(to, cute.make_layout(VECTOR)))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        if warp == 0:
            for gradient in (DK, DV):
                gradient.to_global(cx)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)


@dataclass(frozen=True)
class Add:
    """Several query heads per kv head: add to fp32 sums in fragment order, from the registers."""

    ordered: bool  # by query head, each after the one before

    def frees_first(self, cx: BwdCtx):
        """Whether K, whether V is free for the next tile before `write`."""
        return True, True

    def nothing(self, cx: BwdCtx, warp):
        """No share of the sums, which start as zeros, and nobody of these keys waits."""

    @cute.jit
    def write(self, cx: BwdCtx, results, lane, thread):
        counter = cx.g.dkv_count + cx.dkv_tile()
        first = thread == 0 and lane.wg == 0
        if const_expr(cx.cfg.persistent and not self.ordered and not cx.cfg.by_role):
            meet(
                cx
            )  # neither is a tile ahead in signals ds, and in writing dS; turns say that, too
        if const_expr(self.ordered):
            if first:
                wait_turn(counter, dkv_lock(cx.tile.head, cx.spec.qhead_per_kvhead))
            meet(cx)
        for i in cutlass.range_constexpr(len(results)):
            gradient, acc = results[i]
            gradient.add(cx, acc, lane.key // WGMMA_ROWS, lane.t)
        if const_expr(self.ordered):
            cute.arch.fence_acq_rel_gpu()  # each thread's additions before the turn is passed
            meet(cx)
            if first:
                pass_turn(counter)
