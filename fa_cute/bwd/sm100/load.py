"""Load role: one warp brings K and V once, then query blocks in order."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.cute.nvgpu import cpasync

from .ctx import A_OPERANDS, BwdCtx
from .plan import TURNED


def rows(cx: BwdCtx, use: str):
    """A function that copies block b of an operand to a slot; its bytes complete a barrier."""
    c, p = cx.cfg, cx.products
    tensor, product = use.split(" of ")
    atom, g = cx.g.loads[c.loads.index(use)]
    thr = p.mma(product).get_slice(cx.rank)
    m, n, k = p.tile(product)
    head = cx.head_kv if tensor in ("K", "V") else cx.tile.head
    is_a, turned = use in A_OPERANDS, use in TURNED
    at = (0, None) if turned else (None, 0)  # blocks of keys or queries
    g = cx.lengths.rows(g, "k" if tensor in ("K", "V") else "q", head, turned)
    g = cute.local_tile(g, (m if is_a else n, k), at)
    operand = thr.partition_A(g) if is_a else thr.partition_B(g)
    to, source = cpasync.tma_partition(
        atom,
        0,
        cute.make_layout(1),
        cute.group_modes(cx.smem.operand(use), 0, 3),
        cute.group_modes(operand, 0, 3),
    )

    def copy(block, slot, barrier):
        cute.copy(atom, source[None, block], to[None, slot], tma_bar_ptr=barrier)

    return copy


def stats(cx: BwdCtx, field: str):
    """The same for statistics of the rows of a block."""
    g = cx.g.mLse if field == "sLse" else cx.g.mDelta
    tile_m = cx.cfg.tile_m
    g = cute.local_tile(cx.lengths.padded(g, cx.tile.head, tile_m), (tile_m,), (None,))
    to = cx.smem.floats(field)
    bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)

    def copy(block, slot, barrier):
        with cute.arch.elect_one():
            cute.copy(bulk, g[None, block], to[None, slot], mbar_ptr=barrier)

    return copy


@dataclass(frozen=True)
class Load:
    """One warp, TMA.  Feeds load_k, load_v once and load_q, load_lse, load_do, load_delta per query
    block; waits until mma and compute free their slots.  In a pair also load_kt once and load_qt.

    Order of the copies: K Q lse V dO delta, Q lse dO delta ...  Rows past the end of a sequence
    arrive as zeros; their statistics exist in the workspace.
    """

    @cute.jit
    def run(self, cx: BwdCtx):
        tile, pipes, pair = cx.tile, cx.pipes, cx.cfg.pair
        block = tile.n_block
        copy_k, copy_v = rows(cx, "K of s"), rows(cx, "V of dp")
        copy_q, copy_do = rows(cx, "Q of s"), rows(cx, "dO of dp")
        copy_lse, copy_delta = stats(cx, "sLse"), stats(cx, "sDelta")
        k, v = pipes.load_k.lane_producer(0), pipes.load_v.lane_producer(0)
        q, do = pipes.load_q.make_producer(), pipes.load_do.make_producer()
        lse, delta = pipes.load_lse.make_producer(), pipes.load_delta.make_producer()
        if const_expr(pair):
            copy_kt, copy_qt = rows(cx, "K of dq"), rows(cx, "Q of dk")
            copy_dot = rows(cx, "dO of dv")
            kt, qt = pipes.load_kt.lane_producer(0), pipes.load_qt.lane_producer(0)
        k_free = k.acquire_and_advance()
        copy_k(block, 0, k_free.barrier)
        blocks = cx.q_blocks()
        for m_block in cutlass.range(blocks.lo, blocks.hi, unroll=1):
            q_free = q.acquire_and_advance()
            copy_q(m_block, q_free.index, q_free.barrier)
            lse_free = lse.acquire_and_advance()
            copy_lse(m_block, lse_free.index, lse_free.barrier)
            if m_block == blocks.lo:
                # V is needed after the first S: behind K and Q
                v_free = v.acquire_and_advance()
                copy_v(block, 0, v_free.barrier)
            do_free = do.acquire_and_advance()
            copy_do(m_block, do_free.index, do_free.barrier)
            if const_expr(pair):
                copy_dot(m_block, do_free.index, do_free.barrier)
            delta_free = delta.acquire_and_advance()
            copy_delta(m_block, delta_free.index, delta_free.barrier)
            if const_expr(pair):
                qt_free = qt.acquire_and_advance()
                copy_qt(m_block, 0, qt_free.barrier)
                if m_block == blocks.lo:
                    kt_free = kt.acquire_and_advance()
                    copy_kt(block, 0, kt_free.barrier)
        # No copy may be in flight, and no release may land, after the CTA has left.
        q.tail()
        do.tail()
        lse.tail()
        delta.tail()
        if const_expr(pair):
            qt.tail()
            kt.tail()


@dataclass(frozen=True)
class LoadInTurn:
    """The same where two operands share a place: dO^T follows Q, and Q^T follows dO.

    Order of the copies: K Q lse V { dO^T dO delta next Q, next lse, Q^T } with K^T once, in the
    order in which the products of `mma.Tight` need them and free their places.
    """

    @cute.jit
    def run(self, cx: BwdCtx):
        pipes, smem, ctas = cx.pipes, cx.cfg.smem, cx.cfg.ctas
        block = cx.tile.n_block
        copy_k, copy_v, copy_kt = rows(cx, "K of s"), rows(cx, "V of dp"), rows(cx, "K of dq")
        copy_q, copy_dot = rows(cx, "Q of s"), rows(cx, "dO of dv")
        copy_do, copy_qt = rows(cx, "dO of dp"), rows(cx, "Q of dk")
        copy_lse, copy_delta = stats(cx, "sLse"), stats(cx, "sDelta")
        k, v, kt = (e.lane_producer(0) for e in (pipes.load_k, pipes.load_v, pipes.load_kt))
        q, do = pipes.load_q.lane_producer(0), pipes.load_do.lane_producer(0)
        lse, delta = pipes.load_lse.make_producer(), pipes.load_delta.make_producer()
        k_free = k.acquire_and_advance()
        copy_k(block, 0, k_free.barrier)
        blocks = cx.q_blocks()
        last = blocks.hi - 1
        q_free = q.acquire_and_advance()
        copy_q(blocks.lo, 0, q_free.barrier)
        lse_free = lse.acquire_and_advance()
        copy_lse(blocks.lo, lse_free.index, lse_free.barrier)
        v_free = v.acquire_and_advance()
        copy_v(block, 0, v_free.barrier)
        for m_block in cutlass.range(blocks.lo, blocks.hi, unroll=1):
            dot_free = q.acquire_and_advance(tx_bytes=ctas * smem.bytes("sdOt"))
            copy_dot(m_block, 0, dot_free.barrier)
            do_free = do.acquire_and_advance()
            copy_do(m_block, 0, do_free.barrier)
            delta_free = delta.acquire_and_advance()
            copy_delta(m_block, delta_free.index, delta_free.barrier)
            if m_block == blocks.lo:
                kt_free = kt.acquire_and_advance()
                copy_kt(block, 0, kt_free.barrier)
            if m_block != last:
                next_free = q.acquire_and_advance()
                copy_q(m_block + 1, 0, next_free.barrier)
                next_lse = lse.acquire_and_advance()
                copy_lse(m_block + 1, next_lse.index, next_lse.barrier)
            qt_free = do.acquire_and_advance(tx_bytes=ctas * smem.bytes("sQt"))
            copy_qt(m_block, 0, qt_free.barrier)
        # No copy may be in flight, and no release may land, after the CTA has left.
        q.tail()
        do.tail()
        lse.tail()
        delta.tail()
        kt.tail()
