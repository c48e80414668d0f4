"""Load role: one warp brings Q, K and V to shared memory."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from .ctx import FwdCtx
from .plan import Q_TILES


@dataclass(frozen=True)
class Load:
    """One warp, TMA.  Waits until mma frees slots of load_q and load_kv; feeds both.

    Order of the copies: Q0 K Q1 V K V ..., KV blocks from the last to the first, as mma takes them;
    a block in as many parts as it takes ring slots.
    Rows past the end of a sequence arrive as zeros.
    """

    @cute.jit
    def run(self, cx: FwdCtx):
        a, s = cx.args, cx.smem
        tile_m, tile_n = cx.cfg.tile_m, cx.cfg.tile_n
        qk, pv = a.tiled_mma_qk.get_slice(0), a.tiled_mma_pv.get_slice(0)
        no_multicast = (0, cute.make_layout(1))

        q, kv = cx.pipes.load_q.round_producer(), cx.pipes.load_kv.make_producer()
        sched = cx.scheduler()
        tile = sched.tile()
        while tile.valid:
            blocks = cx.kv_blocks(tile)
            head_kv = cx.head_kv(tile)
            at = cx.seqlens(tile)
            mQ = at.rows(a.mQ, "q", tile.head)  # (seqlen_q, head_dim)
            mK = at.rows(a.mK, "k", head_kv)  # (seqlen_k, head_dim)
            mV = at.rows(a.mV, "k", head_kv, turned=True)  # (head_dim_v, seqlen_k)
            gQ = cute.local_tile(mQ, (tile_m, cx.cfg.head_dim), (None, 0))  # (tile_m, d, blocks)
            # (tile_n, k_cols, blocks, parts), (dv, v_keys, blocks * parts)
            gK = cute.local_tile(mK, (tile_n, cx.cfg.k_cols), (None, None))
            gV = cute.local_tile(mV, (cx.cfg.head_dim_v, cx.cfg.v_keys), (0, None))
            tQsQ, tQgQ = cpasync.tma_partition(
                a.tma_q, *no_multicast, cute.group_modes(s.sQ, 0, 3), _operand(qk.partition_A(gQ))
            )
            tKsK, tKgK = cpasync.tma_partition(
                a.tma_k, *no_multicast, cute.group_modes(s.sK, 0, 3), _operand(qk.partition_B(gK))
            )
            tVsV, tVgV = cpasync.tma_partition(
                a.tma_v, *no_multicast, cute.group_modes(s.sV, 0, 3), _operand(pv.partition_B(gV))
            )
            if blocks.hi > blocks.lo:
                n_block = blocks.hi - 1
                for t in cutlass.range_constexpr(Q_TILES):
                    q_free = q.acquire_and_advance()
                    m_block = tile.m_block * Q_TILES + t
                    cute.copy(
                        a.tma_q, tQgQ[None, m_block], tQsQ[None, t], tma_bar_ptr=q_free.barrier
                    )
                    if cutlass.const_expr(t == 0):
                        kv = _load_k(cx, kv, tKgK, tKsK, n_block)
                kv = _load_v(cx, kv, tVgV, tVsV, n_block)
                for i in cutlass.range(blocks.hi - 1 - blocks.lo, unroll=1):
                    kv = _load_k(cx, kv, tKgK, tKsK, n_block - 1 - i)
                    kv = _load_v(cx, kv, tVgV, tVsV, n_block - 1 - i)
            sched = sched.next()
            tile = sched.tile()
        # No copy may be in flight, and no release may land, after the CTA has left.
        q.tail()
        kv.tail()


@cute.jit
def _load_k(cx: FwdCtx, kv, tKgK, tKsK, n_block):
    """K of a block, a part to a ring slot."""
    for part in cutlass.range_constexpr(cx.cfg.kv_parts[0]):
        free = kv.acquire_and_advance()
        source, slot = tKgK[None, n_block, part], tKsK[None, free.index]
        cute.copy(cx.args.tma_k, source, slot, tma_bar_ptr=free.barrier)
    return kv


@cute.jit
def _load_v(cx: FwdCtx, kv, tVgV, tVsV, n_block):
    """V of a block, a part to a ring slot."""
    parts = cutlass.const_expr(cx.cfg.kv_parts[1])
    for part in cutlass.range_constexpr(parts):
        free = kv.acquire_and_advance()
        source, slot = tVgV[None, n_block * parts + part], tVsV[None, free.index]
        cute.copy(cx.args.tma_v, source, slot, tma_bar_ptr=free.barrier)
    return kv


def _operand(t: cute.Tensor) -> cute.Tensor:
    """The MMA modes of a partitioned operand as one, the block index last."""
    return cute.group_modes(t, 0, 3)
