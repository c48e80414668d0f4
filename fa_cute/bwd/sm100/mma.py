"""MMA role: one warp issues the five products of each query block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...ops import tmem, umma
from ...ops.pipes import LEADER
from .ctx import BwdCtx
from .plan import TEAMS, WORD

K_STEP = 16  # rows of P or dS that one instruction multiplies


@dataclass(frozen=True)
class Operands:
    """Descriptors of the operands in shared memory, and of the instructions, by product."""

    k_s: Any
    q_s: Any
    v_dp: Any
    do_dp: Any
    do_dv: Any
    q_dk: Any
    ds_dq: Any
    k_dq: Any
    idesc: Any


def operands(cx: BwdCtx) -> Operands:
    """All of them; slots of a ring differ by a step."""
    p = cx.products

    def a(use: str):
        s, mma = cx.smem.operand(use), p.mma(use.split(" of ")[1])
        return umma.smem_operand(s, mma.make_fragment_A(s), cx.smem.layouts[use])

    def b(use: str):
        s, mma = cx.smem.operand(use), p.mma(use.split(" of ")[1])
        return umma.smem_operand(s, mma.make_fragment_B(s), cx.smem.layouts[use])

    def idesc(product: str, a_mn_major: bool = False, b_mn_major: bool = False) -> int:
        m, n, _ = p.tile(product)
        return umma.instruction_descriptor(p.element, m, n, a_mn_major, b_mn_major)

    return Operands(
        k_s=a("K of s"),
        q_s=b("Q of s"),
        v_dp=a("V of dp"),
        do_dp=b("dO of dp"),
        do_dv=b("dO of dv"),
        q_dk=b("Q of dk"),
        ds_dq=a("dS of dq"),
        k_dq=b("K of dq"),
        idesc={
            "s": idesc("s"),
            "dp": idesc("dp"),
            "dv": idesc("dv", b_mn_major=True),
            "dk": idesc("dk", b_mn_major=True),
            "dq": idesc("dq", True, True),
        },
    )


def packed(cx: BwdCtx, name: str) -> tuple[int, ...]:
    """Columns of the K steps of P or dS, in the order of the rows."""
    c = cx.cfg
    to_team, to_word = c.team_rows
    rows = range(0, c.tile_m, K_STEP)
    teams = [row % (to_team * TEAMS) // to_team for row in rows]
    # A team's rows are packed side by side, word after word.
    words = [row // to_word % TEAMS for row in rows]
    return tuple(
        c.tmem[f"{name}{team}"].start + (word * WORD + row % WORD) // 2
        for row, team, word in zip(rows, teams, words)
    )


@dataclass(frozen=True)
class Mma:
    """One warp.  Waits load_*, compute_p, compute_ds and (through its slot of mma_dq) reduce; feeds
    mma_s, mma_dp, mma_dq and mma_dkv.

    Also owns the tensor memory: it allocates, and frees when everyone is through.  In a pair one
    warp of each CTA does that, and the leader's issues the products of both.
    """

    order: Any  # of the products

    @cute.jit
    def run(self, cx: BwdCtx):
        c = cx.cfg
        tmem.allocate(cx.smem.tmem_address, c.tmem.alloc_cols, c.ctas)
        cx.barriers.tmem.arrive_and_wait()  # compute and reduce wait for the allocation
        if const_expr(c.pair):
            if cx.rank == LEADER:
                self.order.products(cx)
        else:
            self.order.products(cx)
        cx.barriers.tmem.arrive_and_wait()  # the others' last accesses
        if const_expr(not c.pair):  # else both CTAs have to meet first
            tmem.free(cx.smem.tmem_address, c.tmem.alloc_cols)


@dataclass(frozen=True)
class Ahead:
    """S one block ahead: S_0 { dP_i, dV += P_i, S_i+1, dK += dS_i, dQ_i }."""

    @cute.jit
    def products(self, cx: BwdCtx):
        """All products of the CTA, or of the pair."""
        c, pipes, n = cx.cfg, cx.pipes, cx.cfg.ctas  # in loops cx.pipes: the DSL would carry pipes
        op = operands(cx)
        S, dP, dV, dK, dQ = (c.tmem[name].start for name in ("S", "dP", "dV", "dK", "dQ"))
        P = packed(cx, "P")
        dS = packed(cx, "dS")

        k, v = pipes.load_k.lane_consumer(0), pipes.load_v.lane_consumer(0)
        q, do = pipes.load_q.make_consumer(), pipes.load_do.make_consumer()
        p, ds = pipes.compute_p.lane_consumer(0), pipes.compute_ds.lane_consumer(0)
        dq = pipes.mma_dq.lane_producer(0)
        if const_expr(c.pair):
            kt, qt = pipes.load_kt.lane_consumer(0), pipes.load_qt.lane_consumer(0)
        blocks = cx.q_blocks()
        k.wait_and_advance()
        q_slot = q.wait_and_advance().index
        umma.product_ss(S, op.k_s, 0, op.q_s, q_slot, op.idesc["s"], ctas=n)
        pipes.mma_s.signal(0)
        if const_expr(c.pair):
            pipes.load_q.release_slot(q_slot)  # dK has its own copy
        v.wait_and_advance()
        last = blocks.hi - 1
        for m_block in cutlass.range(blocks.lo, blocks.hi, unroll=1):
            adds = Int32(m_block != blocks.lo)
            do_full = do.wait_and_advance()
            dq_free = dq.acquire_and_advance()  # reduce read the dQ that dP replaces
            umma.product_ss(dP, op.v_dp, 0, op.do_dp, do_full.index, op.idesc["dp"], ctas=n)
            cx.pipes.mma_dp.signal(0)
            p.wait_and_advance()
            umma.product_ts(dV, P, op.do_dv, do_full.index, op.idesc["dv"], adds, ctas=n)
            do_full.release()
            q_now = q_slot
            if m_block != last:
                # In order behind the product that reads P, which lies over S.
                q_slot = q.wait_and_advance().index
                umma.product_ss(S, op.k_s, 0, op.q_s, q_slot, op.idesc["s"], ctas=n)
                cx.pipes.mma_s.signal(0)
                if const_expr(c.pair):
                    cx.pipes.load_q.release_slot(q_slot)
            else:
                cx.pipes.mma_dkv.signal(0)  # dV
            if const_expr(c.pair):
                qt.wait_and_advance()
                if m_block == blocks.lo:
                    kt.wait_and_advance()
                ds.wait_and_advance()
                umma.product_ts(dK, dS, op.q_dk, 0, op.idesc["dk"], adds, ctas=n)
                cx.pipes.load_qt.release_slot(0)
            else:
                ds.wait_and_advance()
                umma.product_ts(dK, dS, op.q_dk, q_now, op.idesc["dk"], adds)
                cx.pipes.load_q.release_slot(q_now)
            # In order behind the product that reads dS, over which dQ lies.
            umma.product_ss(dQ, op.ds_dq, 0, op.k_dq, 0, op.idesc["dq"], ctas=n)
            dq_free.commit()
        cx.pipes.mma_dkv.signal(1)  # dK; also, nothing reads K any more
        if const_expr(c.pair):
            pipes.load_kt.release_slot(0)
        dq.tail()


@dataclass(frozen=True)
class Tight:
    """Where S, dP and dQ share columns (a pair): S_0 { dV += P_i, dP_i, S_i+1, dK += dS_i, dQ_i }.

    Waits compute_s besides. load_q brings Q and dO^T in turn, load_do dO and Q^T.
    """

    @cute.jit
    def products(self, cx: BwdCtx):
        """All products of the pair."""
        c, pipes, n = cx.cfg, cx.pipes, cx.cfg.ctas
        op = operands(cx)
        S, dP, dV, dK, dQ = (c.tmem[name].start for name in ("S", "dP", "dV", "dK", "dQ"))
        P, dS = packed(cx, "P"), packed(cx, "dS")
        k, v, kt = (e.lane_consumer(0) for e in (pipes.load_k, pipes.load_v, pipes.load_kt))
        q, do = pipes.load_q.lane_consumer(0), pipes.load_do.lane_consumer(0)
        read = pipes.compute_s.lane_consumer(0)
        p, ds = pipes.compute_p.lane_consumer(0), pipes.compute_ds.lane_consumer(0)
        dq = pipes.mma_dq.lane_producer(0)
        blocks = cx.q_blocks()
        k.wait_and_advance()
        q_full = q.wait_and_advance()
        umma.product_ss(S, op.k_s, 0, op.q_s, 0, op.idesc["s"], ctas=n)
        pipes.mma_s.signal(0)
        q_full.release()
        v.wait_and_advance()
        read.wait_and_advance()
        last = blocks.hi - 1
        for m_block in cutlass.range(blocks.lo, blocks.hi, unroll=1):
            adds = Int32(m_block != blocks.lo)
            p.wait_and_advance()
            dot_full = q.wait_and_advance()
            umma.product_ts(dV, P, op.do_dv, 0, op.idesc["dv"], adds, ctas=n)
            dot_full.release()
            dq_free = dq.acquire_and_advance()  # reduce read the dQ that dP replaces
            do_full = do.wait_and_advance()
            umma.product_ss(dP, op.v_dp, 0, op.do_dp, 0, op.idesc["dp"], ctas=n)
            cx.pipes.mma_dp.signal(0)
            do_full.release()
            ds.wait_and_advance()  # also, dP was read: the next S replaces half of it
            if m_block != last:
                next_full = q.wait_and_advance()
                umma.product_ss(S, op.k_s, 0, op.q_s, 0, op.idesc["s"], ctas=n)
                cx.pipes.mma_s.signal(0)
                next_full.release()
            else:
                cx.pipes.mma_dkv.signal(0)  # dV
            qt_full = do.wait_and_advance()
            umma.product_ts(dK, dS, op.q_dk, 0, op.idesc["dk"], adds, ctas=n)
            qt_full.release()
            if m_block == blocks.lo:
                kt.wait_and_advance()
            if m_block != last:
                read.wait_and_advance()  # of the next S, half of which dQ replaces
            # In order behind the product that reads dS, over which dQ lies.
            umma.product_ss(dQ, op.ds_dq, 0, op.k_dq, 0, op.idesc["dq"], ctas=n)
            dq_free.commit()
        cx.pipes.mma_dkv.signal(1)  # dK; also, nothing reads K any more
        pipes.load_kt.release_slot(0)
        dq.tail()
