"""The small kernel that lists the tiles of sequences (see `varlen`), by one CTA, at a cost linear
in sequences and tiles; the others fill the rows of no sequence meanwhile.

Sequences are sorted by counting: each warp counts the classes of its part of the batch, a scan over
(class, warp) gives every warp its places, and each warp fills them in the order of the batch, so
the result is the same in every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ..errors import PlanError
from ..ops.arith import ceil_div, hi, lo
from ..ops.mask import Band
from ..ops.seqlen import RECORD_INTS, int_row
from .varlen import (
    CLASSES,
    ENTRY_INTS,
    HEADER_INTS,
    MOST_CHUNK,
    Lists,
    Varlen,
    VarlenOnce,
    Work,
    shift_of,
)
from .varlen_sides import WARP, Side

WARPS = 32
THREADS = WARPS * WARP
COUNTS = CLASSES * WARPS // THREADS  # of classes that a thread scans
FILLERS = 128  # CTAs that fill rows of no sequence, at most
ROWS_PER_FILLER = 256
FEW = 8  # tiles that a lane writes alone; a warp writes more of them together


@dataclass(frozen=True)
class Inputs:
    """What crosses the boundary of the prepare kernel."""

    q: Side
    k: Side
    mask: Band
    lists: Lists
    unsorted: Any  # entries before they are dealt; None where they stay as they are
    sms: Any  # how many CTAs they are dealt to
    blocks: cute.Tensor
    ranked: cute.Tensor
    heads: Int32
    heads_per_unit: Int32


@dataclass(frozen=True)
class Prepare:
    """Lists the tiles of one call. With ``sms``, sorted for as many CTAs that take them in turn."""

    work: Work
    sms: Any = None

    def __call__(
        self, q: Side, k: Side, heads, heads_per_unit, mask: Band, mWork: cute.Tensor, stream
    ) -> Lists:
        """Launch; in the host part of a kernel. ``heads`` are query heads, ``mWork`` int32.

        The tensors of a side need not be set: rows of no sequence are filled.
        """
        if self.sms is not None and self.work.owner != "q":
            raise PlanError(f"owner {self.work.owner!r}; only tiles of queries are dealt in turn")
        batch = q.batch()
        batch = k.batch() if batch is None else batch
        at = self.work.workspace(batch, q.total, k.total, heads // heads_per_unit)

        def table(offset, rows, cols):
            return cute.make_tensor(
                (mWork.iterator + offset).align(16),
                cute.make_layout((rows, cols), stride=(cols, 1)),
            )

        def vector(offset, count):
            return cute.make_tensor(mWork.iterator + offset, cute.make_layout((count,)))

        tiles_q = self.work.tiles("q", q.total, batch)
        tiles_k = self.work.tiles("k", k.total, batch)
        owners = self.work.owners
        made = Lists(
            header=table(0, 1, HEADER_INTS),
            records=table(at.records, batch, RECORD_INTS),
            entries=table(at.entries, at.num_entries, ENTRY_INTS),
            owner_q=vector(at.owner_q, tiles_q) if owners else None,
            owner_k=vector(at.owner_k, tiles_k) if owners else None,
        )
        blocks, ranked = vector(at.blocks, batch), vector(at.ranked, batch)
        limits = [None if side is None else Int32(side) for side in (mask.left, mask.right)]
        mask = Band(*limits)
        unsorted = None
        if self.sms is not None:
            unsorted = table(at.unsorted, at.num_entries, ENTRY_INTS)
        sms = None if self.sms is None else Int32(self.sms)
        inputs = Inputs(
            q, k, mask, made, unsorted, sms, blocks, ranked, Int32(heads), Int32(heads_per_unit)
        )
        fillers = 0
        for side in (q, k):
            if side.outputs:
                fillers = fillers + ceil_div(side.total, ROWS_PER_FILLER)
        Prepare(self.work).kernel(inputs).launch(
            grid=(1 + lo(fillers, FILLERS), 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )
        return made

    @cute.kernel
    def kernel(self, a: Inputs):
        cta = cute.arch.block_idx()[0]
        if cta == 0:
            self.list_tiles(a)
        else:
            batch = a.lists.records.shape[0]
            part = (cta - 1) * WARPS + cute.arch.thread_idx()[0] // WARP
            parts = (cute.arch.grid_dim()[0] - 1) * WARPS
            a.q.fill(batch, part, parts)
            a.k.fill(batch, part, parts)

    @cute.jit
    def list_tiles(self, a: Inputs):
        """All of the lists, by one CTA."""
        smem = cutlass.memory.SmemAllocator()
        sums = smem.allocate_tensor(Int32, cute.make_layout((WARPS, 2)), 16)
        places = smem.allocate_tensor(
            Int32, cute.make_layout((CLASSES, WARPS), stride=(WARPS, 1)), 16
        )
        t = cute.arch.thread_idx()[0]
        tiles_q, tiles_k, most, longest = self.records(a, sums)
        shift = shift_of(most)
        self.rank(a, sums, places, most, shift)
        units = a.heads // a.heads_per_unit
        seen = self.work.seen(a.mask, longest)
        width = self.work.section(seen, units, a.heads_per_unit)
        alike = most <= 1  # every tile visits one block or none: not worth sorting
        num_entries = self.entries(a, sums, width, alike)
        if const_expr(a.sms is not None):
            costs = smem.allocate_tensor(
                Int32, cute.make_layout((MOST_CHUNK, WARPS), stride=(1, MOST_CHUNK)), 16
            )
            cute.arch.sync_threads()
            if not alike:
                self.deal(a, costs, self.work.chunk(width, a.sms), num_entries)
        if t == 0:
            tiles = num_entries // (a.heads // width)
            header = a.lists.header
            header[0, 0] = tiles
            header[0, 1] = width
            header[0, 2] = tiles_q
            header[0, 3] = tiles_k
            if tiles == 0:  # somebody may look, though nobody uses it
                for i in cutlass.range_constexpr(ENTRY_INTS):
                    a.lists.entries[0, i] = Int32(0)

    @cute.jit
    def records(self, a: Inputs, sums):
        """Where each sequence lies; returns the tiles of both sides, the most blocks that a tile
        visits, the most rows of the side that tiles read.
        """
        work, batch = self.work, a.lists.records.shape[0]
        t = cute.arch.thread_idx()[0]
        first_q, first_k, most, longest = Int32(0), Int32(0), Int32(0), Int32(0)
        for i in cutlass.range(ceil_div(batch, THREADS), unroll=1):
            s = i * THREADS + t
            inside = s < batch
            row = lo(s, batch - 1)
            offset_q, len_q = a.q.span(row, batch)
            offset_k, len_k = a.k.span(row, batch)
            tiles_q, tiles_k = work.tiles_q(len_q), work.tiles_k(len_k)
            visited = work.longest(a.mask, len_q, len_k)
            most = hi(most, visited)
            longest = hi(longest, len_k if const_expr(work.owner == "q") else len_q)
            tiles_q = tiles_q if inside else Int32(0)
            tiles_k = tiles_k if inside else Int32(0)
            before_q, all_q = scan(tiles_q, sums, 0)
            before_k, all_k = scan(tiles_k, sums, 1)
            # Numbers that decrease make more tiles than there is room for: not one past the end.
            fits_q = first_q + before_q + tiles_q <= work.tiles("q", a.q.total, batch)
            fits_k = first_k + before_k + tiles_k <= work.tiles("k", a.k.total, batch)
            if inside:
                record = (
                    offset_q,
                    len_q if fits_q and fits_k else Int32(0),
                    offset_k,
                    len_k if fits_q and fits_k else Int32(0),
                    first_q + before_q,
                    first_k + before_k,
                )
                for j in cutlass.range_constexpr(len(record)):
                    a.lists.records[s, j] = record[j]
                a.blocks[s] = visited
            if const_expr(work.owners):
                fill(a.lists.owner_q, s, first_q + before_q, tiles_q)
                fill(a.lists.owner_k, s, first_k + before_k, tiles_k)
            first_q += all_q
            first_k += all_k
            cute.arch.sync_threads()  # before `sums` is written again
        return first_q, first_k, largest(most, sums, 0), largest(longest, sums, 1)

    @cute.jit
    def rank(self, a: Inputs, sums, places, most, shift):
        """Sequences by descending class, those of a class in the order of the batch."""
        batch = a.blocks.shape[0]
        t = cute.arch.thread_idx()[0]
        warp, lane = t // WARP, t % WARP
        # The counts of (class, warp) in order, some neighbours a thread.
        mine = cute.local_tile(
            cute.make_tensor(places.iterator, cute.make_layout(CLASSES * WARPS)), (COUNTS,), (t,)
        )
        counts = cute.make_rmem_tensor(COUNTS, Int32)
        counts.fill(0)
        cute.autovec_copy(counts, mine)
        cute.arch.sync_threads()
        steps = ceil_div(batch, THREADS)
        start = warp * steps * WARP
        for i in cutlass.range(steps, unroll=1):
            s = start + i * WARP + lane
            kind = (most - a.blocks[lo(s, batch - 1)]) >> shift
            peers = same(kind, s < batch)
            if s < batch and peers & (cute.arch.lanemask_lt()) == 0:
                places[kind, warp] = places[kind, warp] + cute.arch.popc(peers)
            cute.arch.sync_warp()
        cute.arch.sync_threads()
        cute.autovec_copy(mine, counts)
        own = Int32(0)
        for i in cutlass.range_constexpr(COUNTS):
            own += counts[i]
        at, _ = scan(own, sums, 0)
        for i in cutlass.range_constexpr(COUNTS):
            count = counts[i]
            counts[i] = at
            at += count
        cute.autovec_copy(counts, mine)
        cute.arch.sync_threads()
        for i in cutlass.range(steps, unroll=1):
            s = start + i * WARP + lane
            kind = (most - a.blocks[lo(s, batch - 1)]) >> shift
            peers = same(kind, s < batch)
            ahead = cute.arch.popc(peers & cute.arch.lanemask_lt())
            place = places[kind, warp]
            cute.arch.sync_warp()  # all have read before one writes
            if s < batch:
                a.ranked[place + ahead] = s
                if ahead == 0:
                    places[kind, warp] = place + cute.arch.popc(peers)
            cute.arch.sync_warp()
        cute.arch.sync_threads()

    @cute.jit
    def entries(self, a: Inputs, sums, width, alike):
        """The tiles of all sequences in their order; returns how many entries."""
        batch, sections = a.ranked.shape[0], a.heads // width
        t = cute.arch.thread_idx()[0]
        first = Int32(0)
        for i in cutlass.range(ceil_div(batch, THREADS), unroll=1):
            r = i * THREADS + t
            s = a.ranked[lo(r, batch - 1)]
            _, len_q, _, len_k = int_row(a.lists.records, s, 0, 4)
            tiles = self.work.tiles_of(len_q, len_k) if r < batch else Int32(0)
            before, total = scan(tiles * sections, sums, 0)
            place, num = first + before, tiles * sections
            if cute.arch.vote_all_sync(num <= FEW):
                self.write(a, (s, len_q, len_k, num, place), (0, 1), width, alike)
            else:
                for j in cutlass.range(WARP, unroll=1):
                    of = [cute.arch.shuffle_sync(x, j) for x in (s, len_q, len_k, num, place)]
                    self.write(a, of, (t % WARP, WARP), width, alike)
            first += total
            cute.arch.sync_threads()  # before `sums` is written again
        return lo(first, a.lists.entries.shape[0])

    @cute.jit
    def write(self, a: Inputs, of, lanes, width, alike):
        """Every ``lanes[1]``-th entry of a sequence ``of`` = (number, lengths, entries, place)."""
        sequence, len_q, len_k, num, place = of
        tiles = hi(self.work.tiles_of(len_q, len_k), 1)
        count = lo(num, a.lists.entries.shape[0] - place)
        for e in cutlass.range(lanes[0], count, lanes[1], unroll=1):
            section = e // tiles
            block = e - section * tiles
            if const_expr(self.work.descending):
                block = tiles - 1 - block
            visited = self.work.visited(a.mask, block, len_q, len_k)
            entry = (sequence, block, section * width, visited)
            if const_expr(a.sms is None):
                put(a.lists.entries, place + e, entry)
            else:
                if alike:
                    put(a.lists.entries, place + e, entry)
                else:
                    put(a.unsorted, place + e, entry)

    @cute.jit
    def deal(self, a: Inputs, costs, chunk, num_entries):
        """Each chunk longest first, equal ones in their order; a warp for each chunk in turn."""
        t = cute.arch.thread_idx()[0]
        warp, lane = t // WARP, t % WARP
        for c in cutlass.range(warp, ceil_div(num_entries, chunk), WARPS, unroll=1):
            start = c * chunk
            count = lo(chunk, num_entries - start)
            for e in cutlass.range(lane, count, WARP, unroll=1):
                costs[e, warp] = a.unsorted[start + e, ENTRY_INTS - 1]
            cute.arch.sync_warp()
            for e in cutlass.range(lane, count, WARP, unroll=1):
                entry = int_row(a.unsorted, start + e, 0, ENTRY_INTS)
                ahead = Int32(0)
                for other in cutlass.range(count, unroll=1):
                    # One of the same cost is ahead if it comes before.
                    ahead += Int32(costs[other, warp] >= entry[3] + Int32(other >= e))
                put(a.lists.entries, start + ahead, entry)
            cute.arch.sync_warp()  # before `costs` is written again


@cute.jit
def put(entries: cute.Tensor, row, values):
    """Write an entry as a whole."""
    entry = cute.make_rmem_tensor(ENTRY_INTS, Int32)
    for i in cutlass.range_constexpr(ENTRY_INTS):
        entry[i] = values[i]
    cute.autovec_copy(entry, entries[row, None])


@cute.jit
def scan(value, sums, slot: cutlass.Constexpr):
    """(sum over the threads before this one, over all): called by all threads; `sums` of the slot
    may be written again after the next barrier.
    """
    t = cute.arch.thread_idx()[0]
    warp, lane = t // WARP, t % WARP
    upto = warp_scan(value)
    if lane == WARP - 1:
        sums[warp, slot] = upto
    cute.arch.sync_threads()
    part = sums[lane, slot]
    parts = warp_scan(part)
    before = cute.arch.shuffle_sync(parts - part, warp)
    return before + upto - value, cute.arch.shuffle_sync(parts, WARP - 1)


@cute.jit
def warp_scan(value):
    """Sum over the lanes up to this one."""
    lane = cute.arch.lane_idx()
    for i in cutlass.range_constexpr(WARP.bit_length() - 1):
        other = cute.arch.shuffle_sync_up(value, 1 << i)
        value = value + (other if lane >= 1 << i else Int32(0))
    return value


@cute.jit
def largest(value, sums, slot: cutlass.Constexpr):
    """The largest value of all threads."""
    t = cute.arch.thread_idx()[0]
    for i in cutlass.range_constexpr(WARP.bit_length() - 1):
        value = hi(value, cute.arch.shuffle_sync_bfly(value, 1 << i))
    if t % WARP == 0:
        sums[t // WARP, slot] = value
    cute.arch.sync_threads()
    value = sums[t % WARP, slot]
    for i in cutlass.range_constexpr(WARP.bit_length() - 1):
        value = hi(value, cute.arch.shuffle_sync_bfly(value, 1 << i))
    return value


@cute.jit
def same(kind, inside):
    """The lanes that are inside and have the same class as this one, as a mask."""
    peers = cute.arch.vote_ballot_sync(inside)
    for bit in cutlass.range_constexpr(CLASSES.bit_length() - 1):
        mine = (kind >> bit) & 1
        ones = cute.arch.vote_ballot_sync(mine == 1)
        peers = peers & (ones ^ (mine - 1))
    return peers


@cute.jit
def fill(owner: cute.Tensor, sequence, first, tiles):
    """Write each lane's sequence number for its tiles."""
    if cute.arch.vote_all_sync(tiles <= FEW):
        fill_one(owner, (sequence, first, tiles), (0, 1))
    else:
        for j in cutlass.range(WARP, unroll=1):
            of = [cute.arch.shuffle_sync(x, j) for x in (sequence, first, tiles)]
            fill_one(owner, (of[0], of[1], of[2]), (cute.arch.lane_idx(), WARP))


@cute.jit
def fill_one(owner: cute.Tensor, of, lanes):
    """The same for one sequence ``of`` = (number, first tile, tiles)."""
    sequence, first, tiles = of
    count = lo(tiles, owner.shape[0] - first)
    for e in cutlass.range(lanes[0], count, lanes[1], unroll=1):
        owner[first + e] = sequence


def order_of(work: Work, made: Lists, total, heads, once: bool = False) -> Varlen:
    """The order of the listed tiles, for a kernel's arguments; ``total`` are the rows of the side
    that is cut into tiles.
    """
    kind = VarlenOnce if once else Varlen
    capacity = work.tiles(work.owner, total, made.records.shape[0]) * heads
    return kind(made.header, made.entries, heads, capacity)
