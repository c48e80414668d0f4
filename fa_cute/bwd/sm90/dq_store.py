"""The dQ store warps, and the orders in which CTAs may add to a dQ tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from fa_cute.bwd.sm90.ctx import BwdCtx
from fa_cute.bwd.sm90.plan import WARPGROUP_THREADS
from fa_cute.bwd.sm90.tiles import done, handed
from fa_cute.ops import mask
from fa_cute.ops.reduce import add_f32x4, bulk_add_f32, bulk_store
from fa_cute.ops.semaphore import first_of, pass_turn, wait_first, wait_turn
from fa_cute.sched.spt import lock_value

STORE_THREADS = WARPGROUP_THREADS + 32


@dataclass(frozen=True)
class AnyOrder:
    """Adds as soon as a chunk is ready: fast, and the sum depends on who comes first. Of sequences
    that are short most dQ tiles have one KV block alone: it stores, and nobody zeroes these.
    """

    def rank(self, cx: BwdCtx, m_block):
        """0 for who stores."""
        if not cx.cfg.stores_alone(cx.spec):
            return Int32(1)
        return adding(cx, m_block).count - 1

    def begin(self, cx: BwdCtx, m_block, rank):
        """Nothing to wait for."""

    def end(self, cx: BwdCtx, m_block, rank):
        """Nobody to tell."""


def adding(cx: BwdCtx, m_block) -> mask.Blocks:
    """The KV blocks that add to a dQ tile."""
    c = cx.cfg
    return mask.kv_blocks(cx.mask, m_block, c.tile_m, c.tile_n, cx.seqlen_q, cx.seqlen_k)


def rank_of(cx: BwdCtx, m_block):
    """How many KV blocks that add to a dQ tile are launched before this one."""
    return lock_value(cx.mask, cx.n_block, adding(cx, m_block))


@dataclass(frozen=True)
class FirstStores:
    """The KV block that is launched first stores, so that nobody zeroes the accumulator; the others
    add in any order, once that is done.

    Who waits does so for a CTA launched before it, so any number that fits at once will do.
    """

    def rank(self, cx: BwdCtx, m_block):
        """Its place in the order of launches."""
        return rank_of(cx, m_block)

    @cute.jit
    def begin(self, cx: BwdCtx, m_block, rank):
        """All but the first wait for the first."""
        if rank > 0:
            wait_first(self.first(cx, m_block))
            cute.arch.fence_proxy("async.global")

    @cute.jit
    def end(self, cx: BwdCtx, m_block, rank):
        """What was stored must be there before anybody adds to it."""
        if rank == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)
            cute.arch.fence_proxy("async.global")
            pass_turn(self.first(cx, m_block))

    def first(self, cx: BwdCtx, m_block):
        """Whether a dQ tile was begun."""
        return first_of(cx.g.firsts, cx.lengths, cx.tile.head, m_block * cx.cfg.tile_m)


@dataclass(frozen=True)
class Turnstile:
    """Adds in the order of the KV blocks (`sched.spt.lock_value`): the same sum in every run."""

    def rank(self, cx: BwdCtx, m_block):
        """How many KV blocks add to a dQ tile before this one."""
        return rank_of(cx, m_block)

    @cute.jit
    def begin(self, cx: BwdCtx, m_block, rank):
        """Wait for the KV blocks before this one."""
        wait_turn(cx.g.dq_count + cx.dq_tile(m_block), rank)
        # what the turn before us added was written by its bulk engine and is read by ours
        cute.arch.fence_proxy("async.global")

    @cute.jit
    def end(self, cx: BwdCtx, m_block, rank):
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

    def hand_over(self, cx: BwdCtx, dQ: cute.Tensor, m_block: Int32, lane, chunk):
        """A consumer warpgroup's chunk into its buffer, once the store warp has drained it."""
        vectors, num = cx.cfg.dq_chunks.vectors, cx.cfg.full_barriers
        empty = cx.barrier_id("dq_empty_0") + lane.wg
        full = cx.barrier_id("dq_full_00") + num * lane.wg + m_block % num
        cute.arch.barrier(barrier_id=empty, number_of_threads=STORE_THREADS)
        to = (cx.smem.sdQ[None, lane.wg % cx.cfg.dq_buffers].iterator + lane.t * 4).align(16)
        layout = cute.make_layout((4, vectors), stride=(1, 4 * WARPGROUP_THREADS))
        registers = cute.make_tensor(dQ.iterator, cute.make_layout((4, vectors)))
        cute.autovec_copy(registers, cute.make_tensor(to, layout))
        # The bulk engine reads by the async proxy. To wait for the stores takes some hundred
        # cycles; when the next step's products were issued first it took twice as long.
        cute.arch.fence_proxy("async.shared", space="cta")
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
    """Warps of which one thread works; warp s has the query blocks m with m % store_warps == s, or
    warpgroup s's half of all (`own_store`). Waits dq_full_<w><s>, adds the chunk to the
    accumulator or stores it there, signals dq_empty_<w>; persistent: waits load_tile and releases
    it."""

    @cute.jit
    def run(self, cx: BwdCtx):
        c = cx.cfg
        turn = Int32(0)
        if const_expr(c.store_warps > 1):
            turn = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - c.warps["dq_store"].start
        if const_expr(c.persistent):
            self.begin(cx, turn)
            count = Int32(0)
            tile = handed(cx, count)
            while tile.valid:
                self.of_tile(cx.of(tile, None), turn)
                done(cx, count)
                count += 1
                tile = handed(cx, count)
            done(cx, count)
        else:
            self.of_tile(cx, turn)
        if cute.arch.lane_idx() == 0:
            # Shared memory outlives its reads; the grid's end completes what was added.
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def begin(self, cx: BwdCtx, turn):
        """All buffers are empty, once for all."""
        if turn == 0:
            for w in cutlass.range_constexpr(cx.cfg.dq_buffers):
                self.drained(cx, w)

    def of_tile(self, cx: BwdCtx, turn):
        """This warp's part of a tile."""
        if cx.cfg.own_store:
            self.chunks(cx, turn)
        else:
            self.tile(cx, turn)

    @cute.jit
    def chunks(self, cx: BwdCtx, wg):
        """A warpgroup's half of all query blocks, in any order."""
        c, blocks = cx.cfg, cx.q_blocks()
        full = cx.barrier_id("dq_full_00") + wg
        if const_expr(not c.persistent):
            self.begin(cx, wg)
        for m_block in cutlass.range(blocks.lo, blocks.hi, unroll=1):
            to = cx.g.dq + cx.dq_tile(m_block) * (c.tile_m * c.head_dim)
            cute.arch.barrier(barrier_id=full, number_of_threads=STORE_THREADS)
            if cute.arch.lane_idx() == 0:
                rank = cx.writer.order.rank(cx, m_block)
                self.write(cx, to + wg * c.dq_chunks.chunk_floats, wg, rank)
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.sync_warp()
            self.drained(cx, wg)

    @cute.jit
    def tile(self, cx: BwdCtx, turn):
        """This warp's query blocks of a tile."""
        c = cx.cfg
        chunks, shared, blocks = c.dq_chunks, c.dq_buffers == 1, cx.q_blocks()
        first = blocks.lo
        if const_expr(c.store_warps > 1):
            first += (turn + (c.store_warps - 1) * blocks.lo) % c.store_warps
        full = cx.barrier_id("dq_full_00") + turn
        elected = cute.arch.lane_idx() == 0
        if const_expr(not c.persistent):
            self.begin(cx, turn)
        for m_block in cutlass.range(first, blocks.hi, c.store_warps, unroll=1):
            to = cx.g.dq + cx.dq_tile(m_block) * (c.tile_m * c.head_dim)
            rank = cx.writer.order.rank(cx, m_block)
            if elected:
                cx.writer.order.begin(cx, m_block, rank)  # while the consumers still compute
            for chunk in cutlass.range_constexpr(chunks.num):  # each warpgroup writes one
                ready = full + c.full_barriers * chunk
                cute.arch.barrier(barrier_id=ready, number_of_threads=STORE_THREADS)
                if elected:
                    self.write(cx, to + chunk * chunks.chunk_floats, chunk, rank)
                    if const_expr(shared or chunk == chunks.num - 1):
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.sync_warp()
                if const_expr(shared):
                    self.drained(cx, 1 - chunk)  # the other warpgroup is next
            if const_expr(not shared):
                for chunk in cutlass.range_constexpr(chunks.num):
                    self.drained(cx, chunk)
            if elected:
                cx.writer.order.end(cx, m_block, rank)

    @cute.jit
    def write(self, cx: BwdCtx, to: cute.Pointer, chunk, rank):
        """A chunk to its place, on its own or on top of what is there."""
        source = cx.smem.sdQ[None, chunk % cx.cfg.dq_buffers].iterator
        num_bytes = cx.cfg.dq_chunks.chunk_floats * 4
        if const_expr(cx.cfg.store_first or cx.cfg.stores_alone(cx.spec)):
            if rank == 0:
                bulk_store(to, source, num_bytes)
            else:
                bulk_add_f32(to, source, num_bytes)
        else:
            bulk_add_f32(to, source, num_bytes)
        cute.arch.cp_async_bulk_commit_group()

    def drained(self, cx: BwdCtx, w):
        """Warpgroup w may write its buffer."""
        empty = cx.barrier_id("dq_empty_0") + w
        cute.arch.barrier_arrive(barrier_id=empty, number_of_threads=STORE_THREADS)
