"""dQ role: four warps bring a tile of dQ from tensor memory to its fp32 sum in global memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...ops import tmem
from ...ops.reduce import bulk_add_f32
from ...ops.semaphore import pass_turn, wait_turn
from ...ops.tmem import TmemMap
from ...sched.spt import lock_value
from .ctx import BwdCtx
from .plan import FLOAT_BYTES


@dataclass(frozen=True)
class AnyOrder:
    """Adds as soon as a piece is there: fast, and the sum depends on who comes first."""

    def begin(self, cx: BwdCtx, m_block):
        """Nothing to wait for."""

    def end(self, cx: BwdCtx, m_block):
        """Nobody waits for us."""


@dataclass(frozen=True)
class Turnstile:
    """Adds in the order of the KV blocks (`sched.spt.lock_value`): the same sum in every run."""

    @cute.jit
    def begin(self, cx: BwdCtx, m_block):
        """Wait for the KV blocks before this one."""
        rank = lock_value(cx.mask, cx.tile.n_block, cx.kv_blocks(m_block))
        wait_turn(self.counter(cx, m_block), rank)
        # what the turn before us added was written by its bulk engine and is read by ours
        cute.arch.fence_proxy("async.global")

    @cute.jit
    def end(self, cx: BwdCtx, m_block):
        """The additions must be complete, not just their source read, before the next turn."""
        cute.arch.cp_async_bulk_wait_group(0, read=False)
        cute.arch.fence_proxy("async.global")
        pass_turn(self.counter(cx, m_block))

    def counter(self, cx: BwdCtx, m_block) -> cute.Pointer:
        """CTAs of a pair add to different rows: each has its own."""
        return cx.g.dq_count + cx.dq_tile(m_block) * cx.cfg.ctas + cx.rank


@dataclass(frozen=True)
class ReduceDq:
    """Four warps, a thread owns a row.  Waits mma_dq; its release lets mma overwrite dQ.

    The row is read at once, so that the tensor core gets its columns back early; then it goes piece
    by piece through shared memory to a bulk addition, which one thread issues.
    """

    order: Any

    @cute.jit
    def run(self, cx: BwdCtx):
        c = cx.cfg
        cx.barriers.tmem.arrive_and_wait()  # mma allocated
        thread = cute.arch.thread_idx()[0]
        tQ = TmemMap(c.tmem).rows("dQ")  # (128, head_dim); in a pair (2 * 64, head_dim / 2)
        piece = c.dq_cols
        load, src = tmem.source(tmem.load_op(piece), tQ, thread)
        buffers, pieces = c.dq_buffers, c.tmem["dQ"].cols // piece
        sdQ = cx.smem.floats("sdQ")
        issuer = thread == 0
        dq = cx.pipes.mma_dq.lane_consumer(0)
        blocks = cx.q_blocks()
        for m_block in cutlass.range(blocks.lo, blocks.hi, unroll=1):
            dq_t2r, row = tmem.row_registers(load.partition_D, tQ)
            dq_full = dq.wait_and_advance()
            cute.copy(load, src, dq_t2r)
            cute.arch.fence_view_async_tmem_load()
            dq_full.release()
            tile = c.tile_m * c.head_dim
            to = cx.g.dq + cx.dq_tile(m_block) * tile + cx.rank * (tile // c.ctas)
            for i in cutlass.range_constexpr(pieces):
                slot = sdQ[None, i % buffers].iterator
                self.store(cute.local_tile(row, (piece,), (i,)), slot, thread, c.tile_m)
                cute.arch.fence_view_async_shared()  # our writes before the bulk engine's reads
                if issuer:
                    # The piece that used the next buffer has been read from it.
                    cute.arch.cp_async_bulk_wait_group(buffers - 2, read=True)
                cx.barriers.reduce.arrive_and_wait()
                if issuer:
                    if const_expr(i == 0):
                        self.order.begin(cx, m_block)
                    floats = piece * c.tile_m
                    bulk_add_f32(to + i * floats, slot, floats * FLOAT_BYTES)
                    cute.arch.cp_async_bulk_commit_group()
            if issuer:
                self.order.end(cx, m_block)
        if issuer:
            cute.arch.cp_async_bulk_wait_group(0, read=False)
        cx.barriers.tmem.arrive_and_wait()  # mma may free the tensor memory

    def store(self, row: cute.Tensor, slot: cute.Pointer, thread: Int32, rows: int):
        """This thread's part of a piece: vectors of four columns, neighbours side by side."""
        vectors = cute.size(row.shape) // 4
        layout = cute.make_layout((4, vectors), stride=(1, 4 * rows))
        to = cute.make_tensor((slot + thread * 4).align(16), layout)
        cute.autovec_copy(cute.make_tensor(row.iterator, cute.make_layout((4, vectors))), to)
