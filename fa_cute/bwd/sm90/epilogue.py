"""How dK and dV leave the registers."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import const_expr
from cutlass.cute.nvgpu import cpasync, warp

from fa_cute.bwd.sm90.ctx import BwdCtx
from fa_cute.bwd.sm90.plan import CONSUMERS, WARPGROUP_THREADS
from fa_cute.ops.reduce import add_f32x4
from fa_cute.ops.semaphore import pass_turn, wait_turn
from fa_cute.sched.spt import dkv_lock

BOTH = CONSUMERS * WARPGROUP_THREADS


@dataclass(frozen=True)
class Store:
    """One query head per kv head: dK and dV in the tensor's dtype, through the shared memory of K and V, by TMA."""

    @cute.jit
    def run(self, cx: BwdCtx, dK: cute.Tensor, dV: cute.Tensor, lane):
        g, c, tile = cx.g, cx.cfg, cx.tile
        # the other warpgroup may still be reading K for its last dQ
        cute.arch.barrier(barrier_id=cx.barrier_id("epilogue"), number_of_threads=BOTH)
        dK.store(dK.load() * cx.scale)
        thread = lane.wg * WARPGROUP_THREADS + lane.t
        self.to_shared(cx.smem.sV, dV, cx.mmas.dv, thread)
        self.to_shared(cx.smem.sK, dK, cx.mmas.dk, thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=cx.barrier_id("epilogue"), number_of_threads=BOTH)
        if cute.arch.make_warp_uniform(thread // 32) == 0:
            gV = cute.local_tile(
                g.mdV[None, None, tile.head, tile.batch], (c.tile_n, c.head_dim_v), (cx.n_block, 0)
            )
            gK = cute.local_tile(
                g.mdK[None, None, tile.head, tile.batch], (c.tile_n, c.head_dim), (cx.n_block, 0)
            )
            self.to_global(g.store_dv, cx.smem.sV, gV)
            self.to_global(g.store_dk, cx.smem.sK, gK)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def to_shared(self, smem: cute.Tensor, acc: cute.Tensor, tiled: cute.TiledMma, thread):
        """Accumulator -> 16 bits -> shared memory in the operand's layout."""
        values = cute.make_rmem_tensor(acc.layout, smem.element_type)
        values.store(acc.load().to(smem.element_type))
        atom = cute.make_copy_atom(
            warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), smem.element_type
        )
        copy = cute.make_tiled_copy_C(atom, tiled)
        cute.copy(copy, copy.retile(values), copy.get_slice(thread).partition_D(smem))

    def to_global(self, atom: cute.CopyAtom, smem: cute.Tensor, tile: cute.Tensor):
        """One TMA store; rows past the end of the tensor are not written."""
        src, dst = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(tile, 0, 2)
        )
        cute.copy(atom, src, dst)


@dataclass(frozen=True)
class Add:
    """Several query heads per kv head: add to fp32 sums in fragment order, straight from the registers."""

    ordered: bool  # by query head, each after the one before

    @cute.jit
    def run(self, cx: BwdCtx, dK: cute.Tensor, dV: cute.Tensor, lane):
        c, tile = cx.cfg, cx.dkv_tile()
        counter = cx.g.dkv_count + tile
        thread = lane.wg * WARPGROUP_THREADS + lane.t
        if const_expr(self.ordered):
            if thread == 0:
                wait_turn(counter, dkv_lock(cx.tile.head, cx.spec.qhead_per_kvhead))
            cute.arch.barrier(barrier_id=cx.barrier_id("epilogue"), number_of_threads=BOTH)
        self.add(cx.g.mdV + tile * (c.tile_n * c.head_dim_v), c.dv_chunks, dV, lane)
        self.add(cx.g.mdK + tile * (c.tile_n * c.head_dim), c.dk_chunks, dK, lane)
        if const_expr(self.ordered):
            cute.arch.fence_acq_rel_gpu()  # each thread's additions before the turn is passed
            cute.arch.barrier(barrier_id=cx.barrier_id("epilogue"), number_of_threads=BOTH)
            if thread == 0:
                pass_turn(counter)

    @cute.jit
    def add(self, to: cute.Pointer, chunks, acc: cute.Tensor, lane):
        """This thread's vectors of its warpgroup's chunk."""
        to += lane.wg * chunks.chunk_floats + lane.t * 4
        r = cute.make_tensor(acc.iterator, cute.make_layout((4, chunks.vectors)))
        for j in cutlass.range_constexpr(chunks.vectors):
            add_f32x4(to + j * 4 * WARPGROUP_THREADS, r[0, j], r[1, j], r[2, j], r[3, j])
