"""MMA role: one warp issues S = Q K^T and O += P V for both query tiles."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...ops import tmem, umma
from .ctx import FwdCtx
from .plan import Q_TILES


@dataclass(frozen=True)
class Mma:
    """One warp.  Waits load_q, load_kv, softmax_p, softmax_p_tail; feeds mma_s and mma_o.

    Also owns the tensor memory: it allocates, and frees when everyone is through.
    """

    @cute.jit
    def run(self, cx: FwdCtx):
        qk, pv, cols = cx.args.tiled_mma_qk, cx.args.tiled_mma_pv, cx.cfg.tmem.alloc_cols
        c, element, lay = cx.cfg, cx.spec.element, cx.layouts
        tmem.allocate(cx.smem.tmem_address, cols)
        cx.barriers.tmem.arrive_and_wait()  # softmax and correction wait for the address

        sQ, sK, sV = cx.smem.sQ, cx.smem.sK, cx.smem.sV
        opQ = umma.smem_operand(sQ, qk.make_fragment_A(sQ), lay["sQ"])  # slot: query tile
        opK = umma.smem_operand(sK, qk.make_fragment_B(sK), lay["sK"])  # slot: of the ring
        opV = umma.smem_operand(sV, pv.make_fragment_B(sV), lay["sV"])
        S, P, O = (tuple(c.tmem[f"{name}{t}"].start for t in range(Q_TILES)) for name in "SPO")
        idesc_qk = umma.instruction_descriptor(element, c.tile_m, c.tile_n)
        idesc_qk = idesc_qk + Int32(cx.args.negate) * umma.NEGATE_A
        idesc_pv = umma.instruction_descriptor(element, c.tile_m, c.head_dim_v, b_mn_major=True)
        head, steps = c.p_head // 16, c.tile_n // 16  # one instruction takes 16 keys
        k_parts, v_parts = c.kv_parts

        q, kv = cx.pipes.load_q.round_consumer(), cx.pipes.load_kv.make_consumer()
        p, p_tail = cx.pipes.softmax_p.round_consumer(), cx.pipes.softmax_p_tail.round_consumer()
        mma_s, mma_o = cx.pipes.mma_s, cx.pipes.mma_o  # one-way: signalled by slot
        sched = cx.scheduler()
        tile = sched.tile()
        while tile.valid:
            blocks = cx.kv_blocks(tile)
            if blocks.hi > blocks.lo:
                # S t is free: P t of the tile before was handed over, hence S t read.
                k_first = tuple(kv.wait_and_advance() for _ in range(k_parts))
                for t in cutlass.range_constexpr(Q_TILES):
                    q.wait_and_advance()
                    scores(S[t], opQ, t, opK, k_first, idesc_qk)
                    mma_s.signal(t)
                release(k_first)
                for i in cutlass.range(blocks.hi - 1 - blocks.lo, unroll=1):
                    v_full = tuple(kv.wait_and_advance() for _ in range(v_parts))
                    adds = Int32(i != 0)
                    for t in cutlass.range_constexpr(Q_TILES):
                        # softmax t wrote P, and correction brought O to the new maximum
                        p.wait_and_advance()
                        output(O[t], P[t], opV, v_full, idesc_pv, adds, (0, head))
                        p_tail.wait_and_advance()
                        output(O[t], P[t], opV, v_full, idesc_pv, adds, (head, steps))
                        if const_expr(t == Q_TILES - 1):
                            release(v_full)
                        if const_expr(t == 0):
                            k_full = tuple(kv.wait_and_advance() for _ in range(k_parts))
                        # In order behind the product that reads P t, which lies over S t.
                        scores(S[t], opQ, t, opK, k_full, idesc_qk)
                        mma_s.signal(t)
                    release(k_full)
                for t in cutlass.range_constexpr(Q_TILES):
                    cx.pipes.load_q.release_slot(t)
                v_last = tuple(kv.wait_and_advance() for _ in range(v_parts))
                adds = Int32(blocks.hi - blocks.lo > 1)
                for t in cutlass.range_constexpr(Q_TILES):
                    p.wait_and_advance()
                    output(O[t], P[t], opV, v_last, idesc_pv, adds, (0, head))
                    p_tail.wait_and_advance()
                    output(O[t], P[t], opV, v_last, idesc_pv, adds, (head, steps))
                    mma_o.signal(t)
                release(v_last)
            sched = sched.next()
            tile = sched.tile()
        cx.barriers.tmem.arrive_and_wait()  # the others' last accesses
        tmem.free(cx.smem.tmem_address, cols)


def scores(S: int, q: umma.SmemOperand, t: int, k: umma.SmemOperand, held, idesc) -> None:
    """Issue S = Q t K^T, K in the ring slots `held`, part after part of its columns."""
    if len(held) > 1:  # more instructions than the warp has registers for their descriptors
        idesc = umma.anew(idesc)
    for part, slot in enumerate(held):
        columns = q.steps(part * len(k.k_steps), (part + 1) * len(k.k_steps))
        umma.product_ss(S, columns, t, k, slot.index, idesc, int(part > 0))


def output(O: int, P: int, v: umma.SmemOperand, held, idesc, adds, steps: tuple[int, int]) -> None:
    """Issue the K steps `steps` of O (+)= P V, V in the ring slots `held`, part after part of its
    keys.
    """
    each = len(v.k_steps)
    for part, slot in enumerate(held):
        first, last = max(steps[0], part * each), min(steps[1], (part + 1) * each)
        if first < last:
            keys = umma.packed_columns(P, first, last)
            also = adds if first == 0 else 1
            umma.product_ts(O, keys, v, slot.index, idesc, also, first - part * each)


def release(held) -> None:
    """Give ring slots back when the products issued so far are done with them."""
    for slot in held:
        slot.release()
