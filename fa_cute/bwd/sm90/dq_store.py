"""The dQ store warp, and the two orders in which CTAs may add to a dQ tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from fa_cute.bwd.sm90.ctx import BwdCtx
from fa_cute.bwd.sm90.plan import WARPGROUP_THREADS
from fa_cute.ops import mask
from fa_cute.ops.reduce import add_f32x4, bulk_add_f32
from fa_cute.ops.semaphore import pass_turn, wait_turn
from fa_cute.sched.spt import lock_value

STORE_THREADS = WARPGROUP_THREADS + 32


@dataclass(frozen=True)
class AnyOrder:
    """Adds as soon as a chunk is ready: fast, and the sum depends on who comes first."""

    def begin(self, cx: BwdCtx, m_block):
        """Nothing to wait for."""

    def end(self, cx: BwdCtx, m_block):
        """Nobody to tell."""


@dataclass(frozen=True)
class Turnstile:
    """Adds in the order of the KV blocks (`sched.spt.lock_value`): the same sum in every run."""

    @cute.jit
    def begin(self, cx: BwdCtx, m_block):
        """Wait for the KV blocks before this one."""
        c = cx.cfg
        blocks = mask.kv_blocks(cx.mask, m_block, c.tile_m, c.tile_n, cx.seqlen_q, cx.seqlen_k)
        wait_turn(cx.g.dq_count + cx.dq_tile(m_block), lock_value(cx.mask, cx.n_block, blocks))
        # what the turn before us added was written by its bulk engine and is read by ours
        cute.arch.fence_proxy("async.global")

    @cute.jit
    def end(self, cx: BwdCtx, m_block):
        """The additions themselves must be complete, not just the buffer read, before the next
        turn.
        """
        cute.arch.cp_async_bulk_wait_group(0, read=False)
        cute.arch.fence_proxy("async.global")
        pass_turn(cx.g.dq_count + cx.dq_tile(m_block))


@dataclass(frozen=True)
class Buffered:
    """dQ through shared memory: the store warp adds it in bulk, in an order."""

    order: Any

    @cute.jit
    def hand_over(self, cx: BwdCtx, dQ: cute.Tensor, m_block: Int32, lane, chunk):
        """A consumer warpgroup's chunk into its buffer, once the store warp has drained it."""
        vectors = cx.cfg.dq_chunks.vectors
        empty, full = cx.barrier_id("dq_empty_0") + lane.wg, cx.barrier_id("dq_full_0") + lane.wg
        cute.arch.barrier(barrier_id=empty, number_of_threads=STORE_THREADS)
        to = (cx.smem.sdQ[None, lane.wg % cx.cfg.dq_buffers].iterator + lane.t * 4).align(16)
        layout = cute.make_layout((4, vectors), stride=(1, 4 * WARPGROUP_THREADS))
        registers = cute.make_tensor(dQ.iterator, cute.make_layout((4, vectors)))
        cute.autovec_copy(registers, cute.make_tensor(to, layout))
        cute.arch.fence_proxy(
            "async.shared", space="cta"
        )  # the bulk engine reads by the async proxy
        cute.arch.barrier_arrive(barrier_id=full, number_of_threads=STORE_THREADS)


@dataclass(frozen=True)
class Direct:
    """dQ from the registers: no shared memory, no other warp, no order."""

    @cute.jit
    def hand_over(self, cx: BwdCtx, dQ: cute.Tensor, m_block: Int32, lane, chunk):
        """Add a consumer warpgroup's chunk to the accumulator, 512 bytes a warp and instruction."""
        c = cx.cfg
        to = cx.g.dq + cx.dq_tile(m_block) * (c.tile_m * c.head_dim)
        to += chunk * c.dq_chunks.chunk_floats + lane.t * 4
        r = cute.make_tensor(dQ.iterator, cute.make_layout((4, c.dq_chunks.vectors)))
        for j in cutlass.range_constexpr(c.dq_chunks.vectors):
            add_f32x4(to + j * 4 * WARPGROUP_THREADS, r[0, j], r[1, j], r[2, j], r[3, j])


@dataclass(frozen=True)
class DqStore:
    """One warp, of which one thread works. Waits dq_full_<w>, adds the chunk to the accumulator,
    signals dq_empty_<w>."""

    @cute.jit
    def run(self, cx: BwdCtx):
        c = cx.cfg
        chunks, shared = c.dq_chunks, c.dq_buffers == 1
        full = cx.barrier_id("dq_full_0")
        elected = cute.arch.lane_idx() == 0
        for w in cutlass.range_constexpr(c.dq_buffers):
            self.drained(cx, w)
        blocks = cx.q_blocks()
        for m_block in cutlass.range(blocks.lo, blocks.hi, unroll=1):
            to = cx.g.dq + cx.dq_tile(m_block) * (c.tile_m * c.head_dim)
            if elected:
                cx.writer.order.begin(cx, m_block)  # while the consumers still compute
            for chunk in cutlass.range_constexpr(chunks.num):  # each warpgroup writes one
                cute.arch.barrier(barrier_id=full + chunk, number_of_threads=STORE_THREADS)
                if elected:
                    source = cx.smem.sdQ[None, chunk % c.dq_buffers].iterator
                    bulk_add_f32(to + chunk * chunks.chunk_floats, source, chunks.chunk_floats * 4)
                    cute.arch.cp_async_bulk_commit_group()
                    if const_expr(shared or chunk == chunks.num - 1):
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.sync_warp()
                if const_expr(shared):
                    self.drained(cx, 1 - chunk)  # the other warpgroup is next
            if const_expr(not shared):
                for chunk in cutlass.range_constexpr(chunks.num):
                    self.drained(cx, chunk)
            if elected:
                cx.writer.order.end(cx, m_block)
        if elected:
            cute.arch.cp_async_bulk_wait_group(0, read=False)

    def drained(self, cx: BwdCtx, w):
        """Warpgroup w may write its buffer."""
        empty = cx.barrier_id("dq_empty_0") + w
        cute.arch.barrier_arrive(barrier_id=empty, number_of_threads=STORE_THREADS)
