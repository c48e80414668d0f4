"""The small kernel that lists the tiles of sequences (see `varlen`), by one CTA, at a cost linear
in sequences and tiles; the others fill the rows of no sequence meanwhile.

The main kernel waits for it, so what counts is how long it takes from the first load to the last
store. What it lists comes from a table of the sequences in shared memory, longest first: thread e
finds the e-th entry by a search for the last sequence that starts at or before it.

    up to 32 sequences     one warp makes the table, without a barrier
    up to 1024             all threads make it (`records`, `rank`, `tables`)
    more                   likewise, the table for 1024 of them at a time, whose entries go to
                           global memory before they are sorted

Sequences are sorted by counting: each warp counts the classes of its part of the batch, a scan over
(class, warp) gives every warp its places, and each warp fills them in the order of the batch, so
the result is the same in every run. Entries of a chunk likewise, by one warp.
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
from ..ops.seqlen import RECORD_INTS, int_row, set_int_row
from .varlen import (
    CLASSES,
    ENTRY_INTS,
    HEADER_INTS,
    Lists,
    Varlen,
    VarlenOnce,
    Work,
    class_of,
)
from .varlen_cta import (
    ENTRIES,
    MOST,
    NUM_FACTS,
    THREADS,
    TILES_K,
    TILES_Q,
    WARPS,
    WIDTH,
    Shared,
    alike,
    fill,
    largest,
    last_upto,
    neighbours,
    own,
    places,
    scan,
    shared,
    sort,
    sum_of,
    sum_up,
    warp_scan,
)
from .varlen_sides import WARP, Side

FILLERS = 128  # CTAs that fill rows of no sequence, at most
ROWS_PER_FILLER = 256


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
            use_pdl=True,
        )
        return made

    @cute.kernel
    def kernel(self, a: Inputs):
        # A main kernel may set itself up now; it waits for the end of this one before it reads. So
        # does this one for the kernel before it, which may let it be launched ahead.
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        cta = cute.arch.block_idx()[0]
        m = shared(a.sms is not None)
        if cta == 0:
            self.list_tiles(a, m)
        else:
            batch = a.lists.records.shape[0]
            part = (cta - 1) * WARPS + cute.arch.thread_idx()[0] // WARP
            parts = (cute.arch.grid_dim()[0] - 1) * WARPS
            a.q.fill(batch, part, parts)
            a.k.fill(batch, part, parts)

    @cute.jit
    def list_tiles(self, a: Inputs, m: Shared):
        """All of the lists, by one CTA."""
        batch, t = a.lists.records.shape[0], cute.arch.thread_idx()[0]
        if batch <= WARP:
            if t < WARP:
                self.few(a, m)
            cute.arch.sync_threads()
            self.owners(a, m, (m.facts[TILES_Q], m.facts[TILES_K]), True)
        else:
            own_blocks, own_lengths = self.records(a, m)
            self.rank(a, m, own_blocks, own_lengths)
            self.tables(a, m)
        num_entries = lo(m.facts[ENTRIES], a.lists.entries.shape[0])
        if const_expr(a.sms is None):
            if batch <= THREADS:
                self.write(a, m, a.lists.entries, 0, num_entries)
        else:
            if self.dealt(a, m):
                self.deal(a, m, num_entries)
            else:
                if batch <= THREADS:
                    self.write(a, m, a.lists.entries, 0, num_entries)
        if t == THREADS - 1:  # of the warp that has the least to do
            width = m.facts[WIDTH]
            tiles = num_entries // (a.heads // width)
            header = (tiles, width, m.facts[TILES_Q], m.facts[TILES_K])
            set_int_row(a.lists.header, 0, 0, header)
            if tiles == 0:  # somebody may look, though nobody uses it
                set_int_row(a.lists.entries, 0, 0, (Int32(0),) * ENTRY_INTS)

    def dealt(self, a: Inputs, m: Shared):
        """Whether tiles are sorted: not where every one visits one block or none, nor where `few`
        has found all of them alike.
        """
        return (m.facts[MOST] > 1) & (a.sms > 0)

    # ---- what the sequences are ----
    def sequence(self, a: Inputs, s):
        """(offsets, lengths) of a sequence."""
        batch = a.lists.records.shape[0]
        given_q, given_k = a.q.given(s), a.k.given(s)  # all loads before one is waited for
        offset_q, len_q = a.q.span(s, batch, given_q)
        offset_k, len_k = a.k.span(s, batch, given_k)
        return (offset_q, offset_k), (len_q, len_k)

    def read_rows(self, lengths):
        """Of the side that tiles read."""
        return lengths[1 if self.work.owner == "q" else 0]

    def width(self, a: Inputs, longest):
        """Heads of a section, if tiles read so many rows at most."""
        seen = self.work.seen(a.mask, longest)
        units = a.heads // a.heads_per_unit
        return self.work.section(a.mask, seen, units, a.heads_per_unit, a.sms)

    @cute.jit
    def record(self, a: Inputs, s, offsets, lengths, first, tiles):
        """Write the record of a sequence, if there is one; returns its lengths, 0 where ``tiles``
        of numbers that decrease are more than there is room for: not one past the end.
        """
        batch, work = a.lists.records.shape[0], self.work
        fits_q = first[0] + tiles[0] <= work.tiles("q", a.q.total, batch)
        fits_k = first[1] + tiles[1] <= work.tiles("k", a.k.total, batch)
        fits = fits_q and fits_k
        len_q = lengths[0] if fits else Int32(0)
        len_k = lengths[1] if fits else Int32(0)
        if s < batch:
            set_int_row(a.lists.records, s, 0, (offsets[0], len_q, offsets[1], len_k))
            a.lists.records[s, 4] = first[0]
            a.lists.records[s, 5] = first[1]
        return len_q, len_k

    @cute.jit
    def few(self, a: Inputs, m: Shared):
        """Up to a warp of sequences, by one warp: records, facts, the table."""
        work, batch = self.work, a.lists.records.shape[0]
        s = cute.arch.lane_idx()
        inside = s < batch
        offsets, lengths = self.sequence(a, lo(s, batch - 1))
        tiles_q = work.tiles_q(lengths[0]) if inside else Int32(0)
        tiles_k = work.tiles_k(lengths[1]) if inside else Int32(0)
        upto_q, upto_k = warp_scan((tiles_q, tiles_k))
        first = upto_q - tiles_q, upto_k - tiles_k
        if const_expr(work.owners):
            m.first_q[s], m.first_k[s] = first
        visited = work.longest(a.mask, *lengths)
        most = cute.arch.warp_redux_sync(visited, "max")
        lower, same = alike(class_of(visited, most), inside)
        rank = cute.arch.popc(lower) + cute.arch.popc(same & cute.arch.lanemask_lt())
        width = self.width(a, cute.arch.warp_redux_sync(self.read_rows(lengths), "max"))
        len_q, len_k = self.record(a, s, offsets, lengths, first, (tiles_q, tiles_k))
        if inside:
            set_int_row(m.table, rank, 0, (s, len_q, len_k, work.tiles_of(len_q, len_k)))
        cute.arch.sync_warp()
        num = m.table[lo(s, batch - 1), 3] * (a.heads // width) if inside else Int32(0)
        upto = warp_scan((num,))[0]
        m.starts[s] = upto - num
        if const_expr(a.sms is not None and a.mask.unlimited):
            alike_all = same == cute.arch.vote_ballot_sync(inside)
            most = Int32(0) if alike_all else most  # nothing to sort
        if s == WARP - 1:
            self.note(m, (upto_q, upto_k, width, upto, most))

    @cute.jit
    def note(self, m: Shared, facts):
        """Write the facts."""
        for i in cutlass.range_constexpr(NUM_FACTS):
            m.facts[i] = facts[i]

    @cute.jit
    def owners(self, a: Inputs, m: Shared, tiles, is_few: cutlass.Constexpr):
        """The lists of owners, if they are wanted, of sequences that are all in the table."""
        if const_expr(self.work.owners):
            own(a.lists.owner_q, m.first_q, tiles[0], is_few)
            own(a.lists.owner_k, m.first_k, tiles[1], is_few)

    @cute.jit
    def records(self, a: Inputs, m: Shared):
        """Records, owners and facts, but for the number of entries; returns the blocks and the
        lengths of a thread's last sequence.
        """
        work, batch = self.work, a.lists.records.shape[0]
        t = cute.arch.thread_idx()[0]
        mine, zero = neighbours(m.counts.iterator, t)
        zero.fill(0)
        cute.autovec_copy(zero, mine)  # for `rank`
        all_q, all_k, most, longest = Int32(0), Int32(0), Int32(0), Int32(0)
        visited, len_q, len_k = Int32(0), Int32(0), Int32(0)
        for i in cutlass.range(ceil_div(batch, THREADS), unroll=1):
            s = i * THREADS + t
            offsets, lengths = self.sequence(a, lo(s, batch - 1))
            tiles_q = work.tiles_q(lengths[0]) if s < batch else Int32(0)
            tiles_k = work.tiles_k(lengths[1]) if s < batch else Int32(0)
            visited = work.longest(a.mask, *lengths)
            most = hi(most, visited)
            longest = hi(longest, self.read_rows(lengths))
            before, total = scan((tiles_q, tiles_k), m.sums[i % 2, None, None])
            first = all_q + before[0], all_k + before[1]
            len_q, len_k = self.record(a, s, offsets, lengths, first, (tiles_q, tiles_k))
            if s < batch and batch > THREADS:
                a.blocks[s] = visited
            if const_expr(work.owners):
                if batch <= THREADS:
                    m.first_q[t], m.first_k[t] = first
                else:
                    fill(a.lists.owner_q, s, first[0], tiles_q)
                    fill(a.lists.owner_k, s, first[1], tiles_k)
            all_q += total[0]
            all_k += total[1]
        most, longest = largest((most, longest), m.sums[2, None, None])
        if batch <= THREADS:
            self.owners(a, m, (all_q, all_k), False)
        if t < WARP:
            width = self.width(a, longest)
            if t == 0:
                self.note(m, (all_q, all_k, width, Int32(0), most))
        cute.arch.sync_threads()
        return visited, (len_q, len_k)

    @cute.jit
    def rank(self, a: Inputs, m: Shared, own_blocks, own_lengths):
        """Sequences by descending class, those of a class in the order of the batch: where they fit
        right into the table, of what each thread has in registers.
        """
        batch = a.blocks.shape[0]
        t = cute.arch.thread_idx()[0]
        warp, lane = t // WARP, t % WARP
        most, counts = m.facts[MOST], m.counts.iterator + warp  # (class, warp)
        steps = ceil_div(batch, THREADS)
        start = warp * steps * WARP + lane
        for i in cutlass.range(steps, unroll=1):
            s = start + i * WARP
            if s < batch:
                kind = class_of(self.blocks_of(a, s, own_blocks), most)
                cute.arch.atomic_add(counts + kind * WARPS, Int32(1))
        cute.arch.sync_threads()
        # The counts of (class, warp) in order, some neighbours a thread.
        mine, values = neighbours(m.counts.iterator, t)
        cute.autovec_copy(mine, values)
        before, _ = scan((sum_of(values),), m.sums[0, None, None])
        sum_up(values, before[0])
        cute.autovec_copy(values, mine)
        cute.arch.sync_threads()
        for i in cutlass.range(steps, unroll=1):
            s = start + i * WARP
            kind = class_of(self.blocks_of(a, lo(s, batch - 1), own_blocks), most)
            place = places(kind, s < batch, counts, WARPS)
            if s < batch:
                if batch <= THREADS:
                    set_int_row(
                        m.table, place, 0, (s, *own_lengths, self.work.tiles_of(*own_lengths))
                    )
                else:
                    a.ranked[place] = s
        cute.arch.sync_threads()

    @cute.jit
    def blocks_of(self, a: Inputs, s, own_blocks):
        """What the longest tile of a sequence visits: known, if a thread has but one sequence."""
        found = own_blocks
        if a.blocks.shape[0] > THREADS:
            found = a.blocks[s]
        return found

    # ---- what their tiles are ----
    @cute.jit
    def tables(self, a: Inputs, m: Shared):
        """The table of the sequences, as many at a time as there are threads; where that is not
        once, also their tiles.
        """
        batch, sections = a.ranked.shape[0], a.heads // m.facts[WIDTH]
        t = cute.arch.thread_idx()[0]
        first = Int32(0)
        for i in cutlass.range(ceil_div(batch, THREADS), unroll=1):
            r = i * THREADS + t
            if batch > THREADS:
                s = a.ranked[lo(r, batch - 1)]
                _, len_q, _, len_k = int_row(a.lists.records, s, 0, 4)
                set_int_row(m.table, t, 0, (s, len_q, len_k, self.work.tiles_of(len_q, len_k)))
            tiles = m.table[lo(t, batch - 1 - i * THREADS), 3] if r < batch else Int32(0)
            before, total = scan((tiles * sections,), m.sums[1, None, None])
            m.starts[t] = before[0]
            cute.arch.sync_threads()
            if batch > THREADS:
                count = lo(total[0], a.lists.entries.shape[0] - first)
                if const_expr(a.sms is None):
                    self.write(a, m, a.lists.entries, first, count)
                else:
                    if self.dealt(a, m):
                        self.write(a, m, a.unsorted, first, count)
                    else:
                        self.write(a, m, a.lists.entries, first, count)
                cute.arch.sync_threads()  # before the table is written again
            first += total[0]
        if t == 0:
            m.facts[ENTRIES] = first
        cute.arch.sync_threads()

    @cute.jit
    def entry(self, a: Inputs, m: Shared, index):
        """An entry of the sequences of the table."""
        r = last_upto(m.starts, index, a.lists.records.shape[0] <= WARP)
        sequence, len_q, len_k, tiles = int_row(m.table, r, 0, 4)
        e = index - m.starts[r]
        section = e // hi(tiles, 1)
        block = e - section * tiles
        if const_expr(self.work.descending):
            block = tiles - 1 - block
        visited = self.work.visited(a.mask, block, len_q, len_k)
        return sequence, block, section * m.facts[WIDTH], visited

    @cute.jit
    def write(self, a: Inputs, m: Shared, entries, first, count):
        """Entries of the sequences of the table, in their order."""
        for e in cutlass.range(cute.arch.thread_idx()[0], count, THREADS, unroll=1):
            set_int_row(entries, first + e, 0, self.entry(a, m, e))

    @cute.jit
    def deal(self, a: Inputs, m: Shared, num_entries):
        """Each chunk longest first, equal ones in their order; a warp for each chunk, as many at a
        time as there are warps.
        """
        batch, t = a.ranked.shape[0], cute.arch.thread_idx()[0]
        warp = t // WARP
        most, size = m.facts[MOST], self.work.chunk(m.facts[WIDTH], a.sms)
        counts, start = m.counts.iterator + warp * CLASSES, warp * size
        chunk = cute.domain_offset((start, 0), m.chunks)
        for first in cutlass.range(0, num_entries, WARPS * size, unroll=1):
            there = lo(num_entries - first, WARPS * size)
            for e in cutlass.range(t, there, THREADS, unroll=1):
                if batch <= THREADS:
                    set_int_row(m.chunks, e, 0, self.entry(a, m, first + e))
                else:
                    set_int_row(m.chunks, e, 0, int_row(a.unsorted, first + e, 0, ENTRY_INTS))
            cute.arch.sync_threads()
            if start < there:
                target = cute.domain_offset((first + start, 0), a.lists.entries)
                sort(chunk, counts, target, lo(there - start, size), most)
            cute.arch.sync_threads()  # before the chunks are written again


def order_of(work: Work, made: Lists, total, heads, once: bool = False) -> Varlen:
    """The order of the listed tiles, for a kernel's arguments; ``total`` are the rows of the side
    that is cut into tiles.
    """
    kind = VarlenOnce if once else Varlen
    capacity = work.tiles(work.owner, total, made.records.shape[0]) * heads
    return kind(made.header, made.entries, heads, capacity)
