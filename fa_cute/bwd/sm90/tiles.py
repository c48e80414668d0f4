"""How the CTAs of a persistent kernel come by their tiles, and how its roles walk over them.

The load warp takes the next number from a counter in global memory, when it has loaded all of the
tile before, and hands what it stands for to all other roles by the edge load_tile. Numbers are
taken one after the other, the first ones too, in the launch order of the kernel with one tile per
CTA.

No deadlock, whatever number of CTAs is resident: who has taken a tile has it after all tiles before
it have been taken, and does its own in ascending order. The turnstiles make a tile wait for earlier
ones only. So of the tiles that are not done the first is always at work in some resident CTA, and
waits for nobody. (With the first tiles given by the CTA's number, a CTA that started could wait for
one that has not.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from fa_cute.bwd.sm90.ctx import BwdCtx
from fa_cute.bwd.sm90.plan import TILE_STAGES
from fa_cute.ops.rows import pinned


@dataclass(frozen=True)
class Slot:
    """A slot of an edge in one of its phases: what a pipeline of the DSL takes for its state. Roles
    of a persistent kernel make it of what they count, tiles and query blocks: two registers for the
    ends of all edges.
    """

    pipe: Any
    index: Any
    phase: Any  # of the consumers' wait

    @classmethod
    def of(cls, pipe, count) -> Slot:
        """Where the ``count``-th piece of an edge goes."""
        stages = pipe.num_stages
        bits = stages.bit_length() - 1
        if stages == 1 << bits:  # division of what might be negative takes longer
            return cls(pipe, count & (stages - 1), (count >> bits) & 1)
        return cls(pipe, count % stages, count // stages % 2)

    @property
    def barrier(self):
        """What a load into it completes."""
        return self.pipe.producer_get_barrier(self)

    def wait(self):
        """Consumer: until it is full."""
        self.pipe.consumer_wait(self)

    def release(self):
        """Consumer: it is free again."""
        self.pipe.consumer_release(self)

    def until_free(self):
        """Producer: wait until it is free; of a load, announce its bytes."""
        self.pipe.producer_acquire(Slot(self.pipe, self.index, self.phase ^ 1))

    def commit(self):
        """Producer of no load: it is full."""
        self.pipe.producer_commit(self)

    def drain(self):
        """Producer, at last: wait until it is free."""
        self.pipe.sync_object_empty.wait(self.index, self.phase ^ 1)


@dataclass(frozen=True)
class Ring:
    """An edge of which a tile takes a slot per query block; ``first`` is what block 0 would have
    as its count."""

    pipe: Any
    first: Any

    def at(self, m_block) -> Slot:
        """The slot of a query block."""
        return Slot.of(self.pipe, self.first + m_block)

    # A loop carries the number alone: the pipe's own are known while tracing.
    def __extract_mlir_values__(self):
        return [self.first.ir_value()]

    def __new_from_mlir_values__(self, values) -> Ring:
        return Ring(self.pipe, Int32(values[0]))


def drain(pipe, count):
    """Wait until all slots of an edge are free, of which ``count`` were filled."""
    for i in range(pipe.num_stages):
        Slot.of(pipe, count + i).drain()


@cute.jit
def filled(cx: BwdCtx, end, m_block):
    """The next slot of Q or dO, which is that of a query block, once it is full; (end, slot)."""
    if const_expr(cx.cfg.persistent):
        slot = end.at(m_block)
        slot.wait()
    else:
        slot = end.wait_and_advance()
    return end, slot


@cute.jit
def hand_out(cx: BwdCtx, count):
    """Take a tile from the counter, the ``count``-th of this CTA, and tell all other roles; signals
    load_tile.
    """
    number = Int32(0)
    if cute.arch.lane_idx() == 0:
        number = cute.arch.atomic_add(cx.g.tile_count, Int32(1), sem="relaxed", scope="gpu")
    tile = cx.order.at(cute.arch.shuffle_sync(number, 0))
    slot = Slot.of(cx.pipes.load_tile, count)
    slot.until_free()
    if cute.arch.lane_idx() == 0:
        values = cute.make_rmem_tensor(4, Int32)
        values[0], values[1], values[2] = tile.n_block, tile.head, tile.batch
        values[3] = Int32(tile.valid)
        to = cx.smem.sTile[None, slot.index].iterator
        cute.autovec_copy(values, cute.make_tensor(to, cute.make_layout(4)))
    slot.commit()
    return tile


def handed(cx: BwdCtx, count):
    """The ``count``-th tile of this CTA, once it is known."""
    slot = Slot.of(cx.pipes.load_tile, count)
    slot.wait()
    return cx.shared_tile(slot.index)


def done(cx: BwdCtx, count):
    """Nobody of this warp looks up the number of the ``count``-th tile any more."""
    Slot.of(cx.pipes.load_tile, count).release()


@dataclass(frozen=True)
class OnlyTile:
    """A consumer role that has one tile: what its body does with it."""

    body: Any

    @cute.jit
    def run(self, cx: BwdCtx):
        own = self.body.prepare(cx)
        k, v = cx.pipes.load_k.make_consumer(), cx.pipes.load_v.make_consumer()
        q, do = cx.pipes.load_q.make_consumer(), cx.pipes.load_do.make_consumer()
        k, v, q, do = self.body.tile(cx, own, (k, v, q, do))


@dataclass(frozen=True)
class EveryTile:
    """A consumer role of a persistent CTA. Waits load_tile, and releases it when the tile is done;
    the rest is its body's.
    """

    body: Any

    @cute.jit
    def run(self, cx: BwdCtx):
        own = self.body.prepare(cx)
        count, steps = Int32(0), Int32(0)  # tiles and query blocks before this tile
        tile = handed(cx, count)
        while tile.valid:
            at = cx.of(tile, count % TILE_STAGES)
            blocks = at.q_blocks()
            first = steps - blocks.lo
            k, v = Slot.of(cx.pipes.load_k, count), Slot.of(cx.pipes.load_v, count)
            q, do = Ring(cx.pipes.load_q, first), Ring(cx.pipes.load_do, first)
            self.body.tile(at, own, (k, v, q, do))
            done(cx, count)
            count, steps = count + 1, first + blocks.hi
            tile = handed(cx, count)
        done(cx, count)


@cute.jit
def let_go(cx: BwdCtx, epilogue, operands, first: cutlass.Constexpr[bool]):
    """Release the slots of K and V, which this warpgroup has read for good: before the epilogue
    (``first``) or after it, as that says.
    """
    if const_expr(cx.cfg.persistent):
        for i in cutlass.range_constexpr(len(operands)):
            if const_expr(epilogue.frees_first(cx)[i] == first):
                operands[i].release()


@cute.jit
def finish(cx: BwdCtx, epilogue, results, at, operands):
    """The end of a tile, ``at`` = (lane, thread): dK and dV out, and what they were put over, of
    ``operands`` = (K, V), is released once they have been read.
    """
    lane, thread = at
    if const_expr(cx.cfg.persistent):
        # Addresses made of these are computed here, not kept in registers over all tiles.
        lane, thread = replace(lane, t=pinned(lane.t)), pinned(thread)
    epilogue.write(cx.anew(), results, lane, thread)
    let_go(cx, epilogue, operands, False)
