"""Epilogue role: one warp copies finished output tiles to global memory."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import const_expr
from cutlass.cute.nvgpu import cpasync

from .ctx import FwdCtx
from .plan import Q_TILES


@dataclass(frozen=True)
class Epilogue:
    """One warp, TMA store.  Waits correction_o; its release lets correction write the slot again,
    and where O lies over Q (load_q), load bring the next Q.

    The copy engine clips rows past the end: the tensor has the real extent of each head.
    """

    @cute.jit
    def run(self, cx: FwdCtx):
        a = cx.args
        o, q = cx.pipes.correction_o.round_consumer(), cx.pipes.load_q.round_consumer()
        sched = cx.scheduler()
        tile = sched.tile()
        while tile.valid:
            at = cx.seqlens(tile)
            mO = at.rows(a.mO, "q", tile.head)  # (seqlen_q, head_dim_v)
            gO = cute.local_tile(mO, (cx.cfg.tile_m, cx.cfg.head_dim_v), (None, 0))
            tOsO, tOgO = cpasync.tma_partition(
                a.tma_o,
                0,
                cute.make_layout(1),
                cute.group_modes(cx.smem.sO, 0, 2),
                cute.group_modes(gO, 0, 2),
            )
            for t in cutlass.range_constexpr(Q_TILES):
                if const_expr(cx.cfg.o_over_q):
                    q.wait_and_advance()  # long since there, or O would not be
                o.wait_and_advance()
                m_block = tile.m_block * Q_TILES + t
                if m_block * cx.cfg.tile_m < at.q:
                    cute.copy(a.tma_o, tOsO[None, t], tOgO[None, m_block])
                cute.arch.cp_async_bulk_commit_group()
            for t in cutlass.range_constexpr(Q_TILES):
                # Groups finish in order: all but the later tiles have been read from the slot.
                cute.arch.cp_async_bulk_wait_group(Q_TILES - 1 - t, read=True)
                cx.pipes.correction_o.release_slot(t)
                if const_expr(cx.cfg.o_over_q):
                    cx.pipes.load_q.release_slot(t)
            sched = sched.next()
            tile = sched.tile()


@dataclass(frozen=True)
class Idle:
    """Completes the last warpgroup: setmaxnreg is issued by all four of its warps."""

    @cute.jit
    def run(self, cx: FwdCtx):
        pass
