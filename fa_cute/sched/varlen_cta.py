"""What the threads of the CTA that lists tiles do together: its shared memory, sums, sorting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..ops.arith import ceil_div, hi, lo
from ..ops.seqlen import int_row, set_int_row
from .varlen import CLASSES, ENTRY_INTS, MOST_CHUNK, class_of
from .varlen_sides import WARP

WARPS = 32
THREADS = WARPS * WARP
COUNTS = CLASSES * WARPS // THREADS  # of classes that a thread scans
FEW = 8  # tiles that a lane writes alone; a warp writes more of them together
# Numbers that one thread finds and all need.
TILES_Q, TILES_K, WIDTH, ENTRIES, MOST, NUM_FACTS = range(6)


@dataclass(frozen=True)
class Shared:
    """Shared memory of the CTA."""

    facts: cute.Tensor  # (NUM_FACTS,)
    sums: cute.Tensor  # (3, WARPS, 2): of warps, in turn; the last ones are maxima
    table: cute.Tensor  # (THREADS, 4): sequence, lengths, tiles; longest first
    starts: cute.Tensor  # (THREADS,): entries before those of each row of the table
    first_q: cute.Tensor  # (THREADS,): tiles before those of each sequence
    first_k: cute.Tensor
    counts: cute.Tensor  # (CLASSES * WARPS,)
    chunks: Any  # (WARPS * MOST_CHUNK, ENTRY_INTS): entries before they are dealt, if they are


def shared(dealt: bool) -> Shared:
    """Allocate it; ``dealt``: whether entries are sorted for CTAs that take them in turn."""
    smem = cutlass.memory.SmemAllocator()

    def tensor(*shape):
        strides = [1]
        for extent in reversed(shape[1:]):
            strides.insert(0, strides[0] * extent)
        return smem.allocate_tensor(Int32, cute.make_layout(shape, stride=tuple(strides)), 16)

    return Shared(
        facts=tensor(NUM_FACTS),
        sums=tensor(3, WARPS, 2),
        table=tensor(THREADS, 4),
        starts=tensor(THREADS),
        first_q=tensor(THREADS),
        first_k=tensor(THREADS),
        counts=tensor(CLASSES * WARPS),
        chunks=tensor(WARPS * MOST_CHUNK, ENTRY_INTS) if dealt else None,
    )


@cute.jit
def scan(values, sums):
    """(sums over the threads before this one, over all) of each of a few values; called by all
    threads, with ``sums`` that nobody has read since the last barrier but one.
    """
    t = cute.arch.thread_idx()[0]
    warp, lane = t // WARP, t % WARP
    upto = warp_scan(values)
    if lane == WARP - 1:
        for i in cutlass.range_constexpr(len(values)):
            sums[warp, i] = upto[i]
    cute.arch.sync_threads()
    own = [sums[lane, i] for i in range(len(values))]
    parts = warp_scan(own)
    before, total = [], []
    for i in cutlass.range_constexpr(len(values)):
        before.append(cute.arch.shuffle_sync(parts[i] - own[i], warp) + upto[i] - values[i])
        total.append(cute.arch.shuffle_sync(parts[i], WARP - 1))
    return before, total


@cute.jit
def warp_scan(values):
    """Sums over the lanes up to this one, of each of a few values."""
    lane, upto = cute.arch.lane_idx(), list(values)
    for i in cutlass.range_constexpr(WARP.bit_length() - 1):
        others = [cute.arch.shuffle_sync_up(value, 1 << i) for value in upto]
        keep = Int32(lane >= 1 << i)
        upto = [value + keep * other for value, other in zip(upto, others, strict=True)]
    return upto


@cute.jit
def largest(values, sums):
    """The largest of all threads of each of a few values."""
    t = cute.arch.thread_idx()[0]
    of_warp = [cute.arch.warp_redux_sync(value, "max") for value in values]
    if t % WARP == 0:
        for i in cutlass.range_constexpr(len(values)):
            sums[t // WARP, i] = of_warp[i]
    cute.arch.sync_threads()
    return [cute.arch.warp_redux_sync(sums[t % WARP, i], "max") for i in range(len(values))]


@cute.jit
def alike(kind, inside):
    """Of the lanes that are inside, as masks: those of a lower class than this one, of the same."""
    bits = range(CLASSES.bit_length() - 2, -1, -1)
    mine = [(kind >> bit) & 1 for bit in bits]
    ones = [cute.arch.vote_ballot_sync(bit == 1) for bit in mine]
    lower, same = Int32(0), cute.arch.vote_ballot_sync(inside)
    for i in cutlass.range_constexpr(len(mine)):
        lower = lower | (same & (ones[i] ^ -1) & -mine[i])
        same = same & (ones[i] ^ (mine[i] - 1))
    return lower, same


@cute.jit
def places(kind, inside, counts, step):
    """Where each lane's item goes, in the order of lanes within a class; ``counts[kind * step]`` is
    where those of a class go, and moves on.
    """
    _, same = alike(kind, inside)
    ahead = cute.arch.popc(same & cute.arch.lanemask_lt())
    at = counts + kind * step
    place = cute.make_tensor(at, cute.make_layout(1))
    first = place[0]
    cute.arch.sync_warp()  # all have read before one writes
    if inside and ahead == 0:
        place[0] = first + cute.arch.popc(same)
    cute.arch.sync_warp()
    return first + ahead


@cute.jit
def neighbours(counts, index):
    """``COUNTS`` neighbouring counts: their place, and room for them in registers."""
    at = (counts + index * COUNTS).align(16)
    return cute.make_tensor(at, cute.make_layout(COUNTS)), cute.make_rmem_tensor(COUNTS, Int32)


def sum_of(values):
    """Of neighbouring counts."""
    return sum((values[i] for i in range(1, COUNTS)), values[0])


def sum_up(values, before):
    """Replace neighbouring counts by the sums of those before each."""
    for i in range(COUNTS):
        value = values[i]
        values[i] = before
        before = before + value


@cute.jit
def sort(chunk, counts, target, count, most):
    """A warp's ``chunk`` of entries to ``target``, longest first, equal ones in their order;
    ``counts`` is room for those of the classes.
    """
    lane = cute.arch.lane_idx()
    mine, values = neighbours(counts, lane)
    values.fill(0)
    cute.autovec_copy(values, mine)
    cute.arch.sync_warp()
    least, last = Int32(CLASSES), Int32(0)
    for e in cutlass.range(lane, count, WARP, unroll=1):
        kind = class_of(chunk[e, ENTRY_INTS - 1], most)
        cute.arch.atomic_add(counts + kind, Int32(1))
        least, last = lo(least, kind), hi(last, kind)
    least = cute.arch.warp_redux_sync(least, "min")
    if least < cute.arch.warp_redux_sync(last, "max"):
        cute.arch.sync_warp()
        cute.autovec_copy(mine, values)
        total = sum_of(values)
        sum_up(values, warp_scan((total,))[0] - total)
        cute.autovec_copy(values, mine)
        cute.arch.sync_warp()
        for i in cutlass.range(ceil_div(count, WARP), unroll=1):
            e = i * WARP + lane
            entry = int_row(chunk, lo(e, count - 1), 0, ENTRY_INTS)
            place = places(class_of(entry[3], most), e < count, counts, 1)
            if e < count:
                set_int_row(target, place, 0, entry)
    else:  # all alike
        for e in cutlass.range(lane, count, WARP, unroll=1):
            set_int_row(target, e, 0, int_row(chunk, e, 0, ENTRY_INTS))


@cute.jit
def own(owner: cute.Tensor, first: cute.Tensor, count, is_few: cutlass.Constexpr):
    """Write the sequence of each of ``count`` tiles; ``first`` are the tiles before each."""
    for tile in cutlass.range(cute.arch.thread_idx()[0], lo(count, owner.shape[0]), THREADS):
        owner[tile] = last_upto(first, tile, is_few)


@cute.jit
def last_upto(sorted_values: cute.Tensor, value, is_few):
    """Index of the last value that is at most this one, of a warp's if there are few, else of as
    many as there are threads; the first is.
    """
    found = Int32(0)
    if not is_few:
        found = halve(sorted_values, value, found, THREADS, WARP)
    return halve(sorted_values, value, found, WARP, 1)


@cute.jit
def halve(sorted_values, value, found, size: cutlass.Constexpr, until: cutlass.Constexpr):
    """`last_upto` from ``size`` candidates to ``until``."""
    for i in cutlass.range_constexpr((size // until).bit_length() - 1):
        next_one = found + (size >> (i + 1))
        found = next_one if sorted_values[next_one] <= value else found
    return found


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
