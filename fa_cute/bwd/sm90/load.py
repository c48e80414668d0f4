"""The load warp: K and V once a tile, then query blocks in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from fa_cute.bwd.sm90.ctx import BwdCtx
from fa_cute.bwd.sm90.tiles import Ring, Slot, drain, hand_out


@dataclass(frozen=True)
class Sides:
    """(shared, global) sides of the copies of a tile."""

    k: tuple  # (TMA,), (TMA,)
    v: tuple
    q: tuple  # (TMA, STAGE), (TMA, M_BLOCK)
    do: tuple
    gLse: cute.Tensor  # (row, M_BLOCK)
    gDelta: cute.Tensor

    @classmethod
    def of(cls, cx: BwdCtx, part=(0, 1)) -> Sides:
        """Those of the tile that ``cx`` sees; ``part`` of Q and dO as in `partition`."""
        c, g, s, head, of = cx.cfg, cx.g, cx.smem, cx.tile.head, cx.lengths
        keys, queries = (cx.n_block, 0), (None, 0)
        gK = cute.local_tile(of.rows(g.mK, "k", cx.head_kv), (c.tile_n, c.head_dim), keys)
        gV = cute.local_tile(of.rows(g.mV, "k", cx.head_kv), (c.tile_n, c.head_dim_v), keys)
        gQ = cute.local_tile(of.rows(g.mQ, "q", head), (c.tile_m, c.head_dim), queries)
        gdO = cute.local_tile(of.rows(g.mdO, "q", head), (c.tile_m, c.head_dim_v), queries)
        gLse = cute.local_tile(of.padded(g.mLse, head, c.tile_m), (c.tile_m,), (None,))
        gDelta = cute.local_tile(of.padded(g.mDelta, head, c.tile_m), (c.tile_m,), (None,))
        return cls(
            partition(g.load_k, s.sK, gK),
            partition(g.load_v, s.sV, gV),
            partition(g.load_q, s.sQ, gQ, part),
            partition(g.load_do, s.sdO, gdO, part),
            gLse,
            gDelta,
        )


@cute.jit
def load_rows(atom, sides, statistics, free, m_block, mask=None):
    """A query block of Q (or dO), and of the statistics beside it, into a free slot; ``mask``: of
    a multicast.
    """
    smem, gmem = sides
    source, to = statistics
    bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
    slot = smem[None, free.index]
    cute.copy(atom, gmem[None, m_block], slot, tma_bar_ptr=free.barrier, mcast_mask=mask)
    with cute.arch.elect_one():
        cute.copy(bulk, source[None, m_block], to[None, free.index], mbar_ptr=free.barrier)


@dataclass(frozen=True)
class Load:
    """One warp. Fills load_k, load_v once and load_q, load_do per query block; waits for the
    consumers' releases.
    """

    def part(self, cx: BwdCtx):
        """What this CTA loads of Q and dO: the first of one part."""
        return 0, 1

    def mask(self, cx: BwdCtx):
        """Who gets that, as the bits of a multicast."""

    def more(self, cx: BwdCtx):
        """What is needed after V."""

    @cute.jit
    def run(self, cx: BwdCtx):
        g, s, sides, mask = cx.g, cx.smem, Sides.of(cx, self.part(cx)), self.mask(cx)
        k, v = cx.pipes.load_k.make_producer(), cx.pipes.load_v.make_producer()
        q, do = cx.pipes.load_q.make_producer(), cx.pipes.load_do.make_producer()
        k_free = k.acquire_and_advance()
        cute.copy(g.load_k, sides.k[1], sides.k[0], tma_bar_ptr=k_free.barrier)
        blocks = cx.q_blocks()
        for m_block in cutlass.range(blocks.lo, blocks.hi, unroll=1):
            q_free = q.acquire_and_advance()
            load_rows(g.load_q, sides.q, (sides.gLse, s.sLse), q_free, m_block, mask)
            if m_block == blocks.lo:
                # V is needed after the first S: load it behind K and Q
                v_free = v.acquire_and_advance()
                cute.copy(g.load_v, sides.v[1], sides.v[0], tma_bar_ptr=v_free.barrier)
                self.more(cx)
            do_free = do.acquire_and_advance()
            load_rows(g.load_do, sides.do, (sides.gDelta, s.sDelta), do_free, m_block, mask)
        q.tail()
        do.tail()


@dataclass(frozen=True)
class LoadEveryTile:
    """The load warp of a persistent CTA: takes a tile when all of the one before is on its way, two
    query blocks before the consumers are done with that, and tells the others (load_tile).

    The first query block of a tile goes before its K and V: its slots are free while the consumers
    still write the results of the tile before over K and V. No more than the first one, since the
    slot of another may be free only when the consumers have K and V. These are asked for from
    memory before all that, if the tile is short (`prefetch_rows`).
    """

    @cute.jit
    def run(self, cx: BwdCtx):
        count, steps = Int32(0), Int32(0)  # tiles and query blocks before this tile
        tile = hand_out(cx, count)
        while tile.valid:
            steps = self.tile(cx.of(tile, None), count, steps)
            count += 1
            tile = hand_out(cx, count)
        pipes = cx.pipes
        for pipe in (pipes.load_k, pipes.load_v):
            drain(pipe, count)
        for pipe in (pipes.load_q, pipes.load_do):
            drain(pipe, steps)
        drain(pipes.load_tile, count + 1)

    @cute.jit
    def tile(self, cx: BwdCtx, count, steps):
        """All of a tile; returns the query blocks loaded so far."""
        g, sides, blocks = cx.g, Sides.of(cx), cx.q_blocks()
        first = steps - blocks.lo
        if const_expr(cx.cfg.prefetch_rows > 0):
            self.prefetch(cx, sides)
        if const_expr(cx.may_be_empty):
            if blocks.count > 0:
                self.block(cx, sides, first, blocks.lo)
        else:
            self.block(cx, sides, first, blocks.lo)
        k, v = Slot.of(cx.pipes.load_k, count), Slot.of(cx.pipes.load_v, count)
        k.until_free()
        cute.copy(g.load_k, sides.k[1], sides.k[0], tma_bar_ptr=k.barrier)
        v.until_free()
        cute.copy(g.load_v, sides.v[1], sides.v[0], tma_bar_ptr=v.barrier)
        for m_block in cutlass.range(blocks.lo + 1, blocks.hi, unroll=1):
            self.block(cx, sides, first, m_block)
        return first + blocks.hi

    @cute.jit
    def prefetch(self, cx: BwdCtx, sides: Sides):
        """K and V of a short tile, from memory into L2."""
        if cx.has_at_most(cx.cfg.prefetch_rows):
            cute.prefetch(cx.g.load_k, sides.k[1])
            cute.prefetch(cx.g.load_v, sides.v[1])

    @cute.jit
    def block(self, cx: BwdCtx, sides: Sides, first, m_block):
        """A query block of Q and dO; ``first``: as in `Ring`."""
        g, s = cx.g, cx.smem
        q, do = Ring(cx.pipes.load_q, first).at(m_block), Ring(cx.pipes.load_do, first).at(m_block)
        q.until_free()
        load_rows(g.load_q, sides.q, (sides.gLse, s.sLse), q, m_block)
        do.until_free()
        load_rows(g.load_do, sides.do, (sides.gDelta, s.sDelta), do, m_block)


def partition(atom, smem, tile, part=(0, 1)) -> tuple[Any, Any]:
    """(shared, global) sides of a TMA copy; the tile's first two modes are one box. ``part``: which
    of how many parts of it this CTA loads.
    """
    return cpasync.tma_partition(
        atom,
        part[0],
        cute.make_layout(part[1]),
        cute.group_modes(smem, 0, 2),
        cute.group_modes(tile, 0, 2),
    )
