"""Operands of a consumer warpgroup that has half of the keys and a part in all five products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute

from fa_cute.bwd.sm90.ctx import BwdCtx, warpgroup_slice
from fa_cute.bwd.sm90.plan import WARPGROUP_THREADS, WGMMA_ROWS
from fa_cute.bwd.sm90.products import Lane, accumulator, ds_copy, transposed


@dataclass(frozen=True)
class Parts:
    """One warpgroup's operands: descriptors with a stage mode where the field has one."""

    tSrK: Any
    tSrQ: Any
    tdPrV: Any
    tdPrdO: Any
    tdVrdO: Any
    tdKrQ: Any
    tdQrdS: Any
    tdQrK: Any
    ds_copy: Any  # tiled copy registers -> sdS
    tdSsdS: Any  # its destination (CPY, ..., STAGE)


def operands(cx: BwdCtx, thread, wg) -> Parts:
    """Descriptors of this warpgroup's operands, and where its dS goes."""
    s, m = cx.smem, cx.mmas
    sdp, dv, dk, dq = (warpgroup_slice(x, wg) for x in (m.sdp, m.dv, m.dk, m.dq))
    copy = ds_copy(cx)
    return Parts(
        tSrK=sdp.make_fragment_A(sdp.partition_A(s.sK)),
        tSrQ=sdp.make_fragment_B(sdp.partition_B(s.sQ)),
        tdPrV=sdp.make_fragment_A(sdp.partition_A(s.sV)),
        tdPrdO=sdp.make_fragment_B(sdp.partition_B(s.sdO)),
        tdVrdO=dv.make_fragment_B(dv.partition_B(transposed(s.sdO))),
        tdKrQ=dk.make_fragment_B(dk.partition_B(transposed(s.sQ))),
        tdQrdS=dq.make_fragment_A(dq.partition_A(s.sdS)),
        tdQrK=dq.make_fragment_B(dq.partition_B(transposed(s.sK))),
        ds_copy=copy,
        tdSsdS=copy.get_slice(thread).partition_D(transposed(s.sdS)),
    )


def prepare(cx: BwdCtx) -> tuple:
    """Where this thread stands among the consumers, its lane, its operands, the registers of dK and
    dV: all that is the same for every tile.
    """
    c, m = cx.cfg, cx.mmas
    thread = cute.arch.thread_idx()[0] - c.warps["consumer"].start * 32
    wg = cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)
    lane = Lane(wg, thread % WARPGROUP_THREADS, wg * WGMMA_ROWS)
    parts = operands(cx, thread, wg)
    sums = accumulator(m.dk, c.tile_n, c.head_dim), accumulator(m.dv, c.tile_n, c.head_dim_v)
    return thread, lane, parts, sums
