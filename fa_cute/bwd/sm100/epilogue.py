"""How dV and dK leave the tensor memory: one compute team each."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, const_expr
from cutlass.cute.nvgpu import cpasync

from ...ops import epilogue, tmem
from ...ops.reduce import add_f32x4
from ...ops.semaphore import pass_turn, wait_turn
from ...ops.tmem import TmemMap
from ...sched.spt import dkv_lock
from .ctx import BwdCtx

ADD_COLS = 16  # columns of a row that are added at a time


@dataclass(frozen=True)
class Gradient:
    """One of the two results. ``name`` is "dV" or "dK"; its team and slot of mma_dkv are equal."""

    name: str

    @property
    def team(self) -> int:
        return 0 if self.name == "dV" else 1

    def target(self, cx: BwdCtx):
        """(store atom, tensor) for TMA; (None, pointer) where kv heads are shared."""
        g = cx.g
        return (g.tma_dv, g.mdV) if self.name == "dV" else (g.tma_dk, g.mdK)

    def cols(self, cx: BwdCtx) -> int:
        return cx.cfg.head_dim_v if self.name == "dV" else cx.cfg.head_dim

    def scale(self, cx: BwdCtx) -> Float32:
        return Float32(1.0) if self.name == "dV" else cx.g.scale


RESULTS = (Gradient("dV"), Gradient("dK"))


@dataclass(frozen=True)
class Store:
    """One query head per kv head: in the tensor's type, through K's and V's place, by TMA."""

    @cute.jit
    def carry_out(self, cx: BwdCtx, team, thread):
        for result in RESULTS:
            if team == result.team:
                self.one(cx, result, thread)

    @cute.jit
    def one(self, cx: BwdCtx, result: cutlass.Constexpr, thread):
        rows, use = TmemMap(cx.cfg.tmem).rows(result.name), f"{result.name} rows"
        shared = cx.smem.operand(use)
        out = epilogue.swizzled_row(shared, cx.smem.layouts[use], thread)
        done = cx.pipes.mma_dkv.lane_consumer(result.team)
        done.wait_and_advance()  # also: the products that read K or V are done
        epilogue.rows_to_smem(
            rows, out, 0, cx.products.element, thread, result.scale(cx), Boolean(True)
        )
        cute.arch.fence_view_async_shared()  # our writes before the copy
        barrier = cx.barriers.epilogue_0 if result.team == 0 else cx.barriers.epilogue_1
        barrier.arrive_and_wait()
        if cute.arch.make_warp_uniform(thread // 32) == 0:
            self.to_global(cx, result)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def to_global(self, cx: BwdCtx, result: Gradient):
        """One TMA store; rows past the end of the tensor, or of the sequence, are not written."""
        atom, tensor = result.target(cx)
        rows, box = cx.lengths.rows(tensor, "k", cx.tile.head), (cx.cfg.tile_n, result.cols(cx))
        g = cute.local_tile(rows, box, (cx.n_block, 0))
        src, dst = cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            cute.group_modes(cx.smem.operand(f"{result.name} rows"), 0, 2),
            cute.group_modes(g, 0, 2),
        )
        cute.copy(atom, src[None, 0], dst)

    @cute.jit
    def nothing(self, cx: BwdCtx, warp):
        """Zeros, of keys that no query sees; called by all warps of the CTA."""
        for result in RESULTS:
            plan = cx.cfg.smem
            field = f"s{result.name}"
            words = cute.recast_ptr(cx.smem.base + plan.offset(field), dtype=Float32)
            vectors, threads = plan.bytes(field) // 16, cx.cfg.warps.threads
            zero = cute.make_rmem_tensor(4, Float32)
            zero.fill(0.0)
            for i in cutlass.range(cute.arch.thread_idx()[0], vectors, threads):
                to = (words + i * 4).align(16)
                cute.autovec_copy(zero, cute.make_tensor(to, cute.make_layout(4)))
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        if warp == 0:
            for result in RESULTS:
                self.to_global(cx, result)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)


@dataclass(frozen=True)
class Add:
    """Several query heads per kv head: each adds to fp32 sums, from the registers."""

    ordered: bool  # by query head, each after the one before

    def nothing(self, cx: BwdCtx, warp):
        """No share of the sums, which start as zeros, and nobody of these keys waits."""

    @cute.jit
    def carry_out(self, cx: BwdCtx, team, thread):
        # The last block of a cluster may not exist: there is no place for its zeros, and no turn.
        if cx.n_block * cx.cfg.tile_n < cx.seqlen_k:
            self.in_turn(cx, team, thread)

    @cute.jit
    def in_turn(self, cx: BwdCtx, team, thread):
        """Both results, after those of the query heads before."""
        counter = cx.g.dkv_count + cx.dkv_tile()
        first = thread == 0 and team == 0
        if const_expr(self.ordered):
            if first:
                wait_turn(counter, dkv_lock(cx.tile.head, cx.spec.qhead_per_kvhead))
            cx.barriers.epilogue.arrive_and_wait()
        for result in RESULTS:
            if team == result.team:
                self.one(cx, result, thread)
        if const_expr(self.ordered):
            cute.arch.fence_acq_rel_gpu()  # each thread's additions before the turn is passed
            cx.barriers.epilogue.arrive_and_wait()
            if first:
                pass_turn(counter)

    @cute.jit
    def one(self, cx: BwdCtx, result: cutlass.Constexpr, thread):
        rows, cols, n = TmemMap(cx.cfg.tmem).rows(result.name), result.cols(cx), cx.cfg.tile_n
        to = result.target(cx)[1] + cx.dkv_tile() * (n * cols) + thread * 4
        load, src = tmem.source(tmem.load_op(ADD_COLS), rows, thread)
        coords = cute.make_identity_tensor(rows.shape)
        shape = load.partition_D(coords)[None, None, 0].shape
        done = cx.pipes.mma_dkv.lane_consumer(result.team)
        done.wait_and_advance()
        for i in cutlass.range_constexpr(cols // ADD_COLS):
            r = cute.make_rmem_tensor(shape, Float32)
            cute.copy(load, src[None, None, i], r)
            cute.arch.fence_view_async_tmem_load()
            for j in cutlass.range_constexpr(0, ADD_COLS, 4):
                at = to + (i * ADD_COLS + j) * n
                add_f32x4(at, r[j], r[j + 1], r[j + 2], r[j + 3])
