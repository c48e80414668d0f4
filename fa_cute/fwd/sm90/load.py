"""The loading warp of the SM90 forward kernel."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from .ctx import FwdCtx
from .plan import TEAM_ROWS


def _partition(atom, smem: cute.Tensor, gmem: cute.Tensor):
    """SMEM (bytes, slot) and global (bytes, block) sides of a TMA copy."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 2), cute.group_modes(gmem, 0, 2)
    )


@dataclass(frozen=True)
class Load:
    """One warp: Q, K and V by TMA, in the order in which the consumers need them. Waits for nothing but
    free slots; feeds load_q, load_k, load_v.
    """

    @cute.jit
    def run(self, cx: FwdCtx):
        a, c = cx.args, cx.cfg
        q, k, v = (
            cx.pipes.load_q.make_producer(),
            cx.pipes.load_k.make_producer(),
            cx.pipes.load_v.make_producer(),
        )
        sched = cx.scheduler()
        tile = sched.tile()
        while tile.valid:
            blocks = cx.kv_blocks(tile)
            kv_head = cx.kv_head(tile)
            gQ = cute.local_tile(
                a.mQ[None, None, tile.head, tile.batch], (TEAM_ROWS, c.head_dim), (None, 0)
            )
            gK = cute.local_tile(
                a.mK[None, None, kv_head, tile.batch], (c.tile_n, c.head_dim), (None, 0)
            )
            gV = cute.local_tile(
                a.mV[None, None, kv_head, tile.batch], (c.tile_n, c.head_dim_v), (None, 0)
            )
            tQsQ, tQgQ = _partition(a.load_q, cx.smem.sQ, gQ)
            tKsK, tKgK = _partition(a.load_k, cx.smem.sK, gK)
            tVsV, tVgV = _partition(a.load_v, cx.smem.sV, gV)

            last = blocks.hi - 1
            k_free = k.acquire_and_advance()
            cute.copy(
                a.load_k, tKgK[None, last], tKsK[None, k_free.index], tma_bar_ptr=k_free.barrier
            )
            q_free = q.acquire_and_advance()
            for team in cutlass.range_constexpr(c.teams):
                cute.copy(
                    a.load_q,
                    tQgQ[None, tile.m_block * c.teams + team],
                    tQsQ[None, q_free.index * c.teams + team],
                    tma_bar_ptr=q_free.barrier,
                )
            for i in cutlass.range(last - blocks.lo, unroll=1):
                n_block = last - 1 - i
                k_free = k.acquire_and_advance()
                cute.copy(
                    a.load_k,
                    tKgK[None, n_block],
                    tKsK[None, k_free.index],
                    tma_bar_ptr=k_free.barrier,
                )
                v_free = v.acquire_and_advance()
                cute.copy(
                    a.load_v,
                    tVgV[None, n_block + 1],
                    tVsV[None, v_free.index],
                    tma_bar_ptr=v_free.barrier,
                )
            v_free = v.acquire_and_advance()
            cute.copy(
                a.load_v,
                tVgV[None, blocks.lo],
                tVsV[None, v_free.index],
                tma_bar_ptr=v_free.barrier,
            )
            sched = sched.next()
            tile = sched.tile()
        # Leaving while copies into this CTA's memory are on their way is an error, so wait for every
        # slot to come back.
        q.tail()
        k.tail()
        v.tail()
