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
        p_head = tuple(umma.packed_columns(start, 0, head) for start in P)
        p_rest = tuple(umma.packed_columns(start, head, steps) for start in P)

        q, kv = cx.pipes.load_q.round_consumer(), cx.pipes.load_kv.make_consumer()
        p, p_tail = cx.pipes.softmax_p.round_consumer(), cx.pipes.softmax_p_tail.round_consumer()
        mma_s, mma_o = cx.pipes.mma_s, cx.pipes.mma_o  # one-way: signalled by slot
        sched = cx.scheduler()
        tile = sched.tile()
        while tile.valid:
            blocks = cx.kv_blocks(tile)
            if blocks.hi > blocks.lo:
                # S t is free: P t of the tile before was handed over, hence S t read.
                k_first = kv.wait_and_advance()
                for t in cutlass.range_constexpr(Q_TILES):
                    q.wait_and_advance()
                    umma.product_ss(S[t], opQ, t, opK, k_first.index, idesc_qk)
                    mma_s.signal(t)
                k_first.release()
                for i in cutlass.range(blocks.hi - 1 - blocks.lo, unroll=1):
                    v_full = kv.wait_and_advance()
                    adds = Int32(i != 0)
                    for t in cutlass.range_constexpr(Q_TILES):
                        # softmax t wrote P, and correction brought O to the new maximum
                        p.wait_and_advance()
                        umma.product_ts(O[t], p_head[t], opV, v_full.index, idesc_pv, adds)
                        p_tail.wait_and_advance()
                        umma.product_ts(O[t], p_rest[t], opV, v_full.index, idesc_pv, 1, head)
                        if const_expr(t == Q_TILES - 1):
                            v_full.release()
                        if const_expr(t == 0):
                            k_full = kv.wait_and_advance()
                        # In order behind the product that reads P t, which lies over S t.
                        umma.product_ss(S[t], opQ, t, opK, k_full.index, idesc_qk)
                        mma_s.signal(t)
                    k_full.release()
                for t in cutlass.range_constexpr(Q_TILES):
                    cx.pipes.load_q.release_slot(t)
                v_last = kv.wait_and_advance()
                adds = Int32(blocks.hi - blocks.lo > 1)
                for t in cutlass.range_constexpr(Q_TILES):
                    p.wait_and_advance()
                    umma.product_ts(O[t], p_head[t], opV, v_last.index, idesc_pv, adds)
                    p_tail.wait_and_advance()
                    umma.product_ts(O[t], p_rest[t], opV, v_last.index, idesc_pv, 1, head)
                    mma_o.signal(t)
                v_last.release()
            sched = sched.next()
            tile = sched.tile()
        cx.barriers.tmem.arrive_and_wait()  # the others' last accesses
        tmem.free(cx.smem.tmem_address, cols)
