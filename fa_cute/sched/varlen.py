"""Tiles of sequences of any lengths: a list, made once per call on the device.

Which tiles there are depends on lengths that only the device knows, and finding the i-th of them by
search would cost every CTA a walk over the sequences. So a small kernel (`varlen_prepare`) runs
first and writes into a workspace of int32:

    header    tiles, heads of a section, tiles of queries, tiles of keys
    records   per sequence: where it starts, how long it is, how many tiles lie before it
    entries   the tiles in the order in which they are to be done: (sequence, block, first head)
    owners    for kernels that go over all rows: the sequence of each tile of queries, of keys

Order: sequences by descending length (in blocks that a tile visits, `CLASSES` of them; equal ones
in the order of the batch), a sequence's tiles together, since they share K and V. Where what the
heads of the longest sequence read does not fit in L2 at once (of a window: what it sees, beside
what tiles under way have, `Work.l2_bytes`), sequences are done in sections of heads
(`Work.section`); an entry stands for all heads of a section, which are the fastest index.

Where a fixed set of CTAs gets the tiles in turn, every other round backwards (`Varlen`), entries
are sorted once more, longest first, within chunks that fill whole pairs of rounds: then all CTAs
have the same amount of work after each chunk, and what runs together still shares K and V. Tiles of
a chunk run together, whichever sections they are of: so these are narrow enough for a chunk of one
pair of rounds. Equal lengths then come in the order of a dense causal batch (`snake`).

Tile i costs three loads, whatever the batch is: the header, which stays in L1, the entry, and the
record of its sequence. Only the first role of a CTA that asks waits for L2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..ops.arith import at_most, ceil_div, hi, lo
from ..ops.mask import Band, kv_blocks, q_blocks
from ..ops.seqlen import RECORD_INTS, int_row
from .base import Once, Tile, capped, grid_of
from .lpt import L2_BYTES, heads_in_l2
from .snake import LONG_SECTION_BYTES, SnakeWalk

CLASSES = 256  # of lengths that the order tells apart
HEADER_INTS = 8
ENTRY_INTS = 4  # sequence, block, first head, blocks it visits: one load of 16 bytes
IN_FLIGHT = 132  # tiles that are done together
SHORT_ROWS = 2048  # of which the heads that fit in L2 may be side by side whatever the order
MOST_DEALT = 4  # heads of a section, where tiles are dealt
MOST_CHUNK = 320  # entries that are sorted together: two rounds of 160 CTAs


@dataclass(frozen=True)
class Work:
    """How a kernel cuts sequences into tiles; static."""

    owner: str  # "q": a tile is a block of queries (forward), "k": of keys (backward)
    tile_q: int  # rows of a block of queries
    tile_k: int  # of keys; what a cluster owns together
    bytes_per_row: int  # that a tile reads for each row of the other side: sizes L2 sections
    descending: bool  # blocks of a sequence from the last to the first
    owners: bool = False  # write the lists of owners
    alone: bool = False  # long sequences are done one unit at a time, see `section`

    def tiles_q(self, length: Any) -> Any:
        return ceil_div(length, self.tile_q)

    def tiles_k(self, length: Any) -> Any:
        return ceil_div(length, self.tile_k)

    def tiles_of(self, len_q: Any, len_k: Any) -> Any:
        """Tiles of a sequence, per head."""
        return self.tiles_q(len_q) if self.owner == "q" else self.tiles_k(len_k)

    def visited(self, mask: Band, block: Any, len_q: Any, len_k: Any) -> Any:
        """Blocks of the other side that a tile visits."""
        visits = kv_blocks if self.owner == "q" else q_blocks
        return visits(mask, block, self.tile_q, self.tile_k, len_q, len_k).count

    def longest(self, mask: Band, len_q: Any, len_k: Any) -> Any:
        """Blocks that the longest tile of a sequence visits; 0 for one without tiles.

        Of the two at its ends, one of which is the longest unless the band has two sides.
        """
        tiles = self.tiles_of(len_q, len_k)
        ends = [self.visited(mask, block, len_q, len_k) for block in (0, tiles - 1)]
        return hi(ends[0], ends[1]) * lo(tiles, 1)

    def seen(self, mask: Band, longest: Any) -> Any:
        """Rows of the other side that a tile reads at most, of ``longest`` that there are."""
        return mask.most_keys(self.tile_q if self.owner == "q" else self.tile_k, longest)

    def l2_bytes(self, mask: Band) -> int:
        """What heads side by side may read: all of L2, but of a window, whose rows slide, less by
        what the tiles under way have beside it.
        """
        if not mask.slides:
            return L2_BYTES
        own = self.tile_q if self.owner == "q" else self.tile_k
        return max(L2_BYTES - IN_FLIGHT * own * self.bytes_per_row, L2_BYTES // 4)

    def section(
        self, mask: Band, longest: Any, units: Any, heads_per_unit: Any, num_sms: Any = None
    ) -> Any:
        """Heads of a section: all, or a power of two of units that divides them and fits in L2;
        ``longest`` are the rows that a tile reads.

        A unit is what shares the rows of the other side: the query heads of a kv head (forward),
        one query head (backward). With ``num_sms`` (see `lists`) sections are small: tiles that are
        sorted together are of several, and these have to end where two rounds of CTAs do. Of a mask
        without limits they are one unit, since its tiles need no balance, and neighbours that read
        the same rows at once ask L2 for them once (measured: at 16k two heads ask 1.4 times as
        often); without ``num_sms`` that is so where ``alone``, if there are many rows.
        """
        if num_sms is None:
            fit = heads_in_l2(longest, self.bytes_per_row, units, self.l2_bytes(mask))
            if self.alone:
                fit = 1 + at_most(longest, SHORT_ROWS) * (fit - 1)
            all_fit = at_most(units, fit)
        else:
            fit, power, rows = 1, 2, LONG_SECTION_BYTES // self.bytes_per_row
            while power <= MOST_DEALT and not mask.unlimited:
                bytes_fit = at_most(longest + at_most(1, num_sms) * longest, rows // power)
                fit = fit + (power // 2) * bytes_fit
                power *= 2
            fit = lo(fit, hi(lowest_bit(2 * num_sms | MOST_DEALT) // heads_per_unit, 1))
            # Of one tile per head and sequence none shares anything with another.
            all_fit = hi(at_most(units, fit), at_most(longest, self.tile_q))
        found = lo(lowest_bit(units), fit)
        return (found + all_fit * (units - found)) * heads_per_unit

    def chunk(self, width: Any, num_sms: Any) -> Any:
        """Entries of ``width`` heads that fill whole pairs of rounds of ``num_sms`` CTAs."""
        return lo(2 * num_sms // lowest_bit(2 * num_sms | width), MOST_CHUNK)

    def tiles(self, side: str, total: Any, batch: Any) -> Any:
        """No more tiles than this, whatever the lengths."""
        tile = self.tile_q if side == "q" else self.tile_k
        return total // tile + batch

    def workspace(self, batch: Any, total_q: Any, total_k: Any, units: Any) -> Workspace:
        """Sections of the workspace; ``units`` as in `section`."""
        tiles_q, tiles_k = self.tiles("q", total_q, batch), self.tiles("k", total_k, batch)
        entries = (tiles_q if self.owner == "q" else tiles_k) * units
        records = HEADER_INTS
        listed = records + RECORD_INTS * batch
        unsorted = listed + ENTRY_INTS * entries
        owner_q = unsorted + (ENTRY_INTS * entries if self.owner == "q" else 0)
        owner_k = owner_q + (_four(tiles_q) if self.owners else 0)
        blocks = owner_k + (_four(tiles_k) if self.owners else 0)
        ranked = blocks + _four(batch)
        return Workspace(
            records,
            listed,
            unsorted,
            owner_q,
            owner_k,
            blocks,
            ranked,
            ranked + _four(batch),
            entries,
        )


def _four(ints: Any) -> Any:
    return ceil_div(ints, 4) * 4


def lowest_bit(x: Any) -> Any:
    """The largest power of two that divides ``x``; 0 of 0."""
    return x & -x


@dataclass(frozen=True)
class Workspace:
    """Where each part starts, in ints (a header comes first), from shapes alone."""

    records: Any  # (batch, RECORD_INTS)
    entries: Any  # (num_entries, ENTRY_INTS)
    unsorted: Any  # likewise: scratch of the prepare kernel where tiles are dealt in turn
    owner_q: Any  # (tiles of queries,)
    owner_k: Any  # (tiles of keys,)
    blocks: Any  # (batch,) scratch of the prepare kernel: blocks that a tile visits
    ranked: Any  # (batch,) scratch: sequences, longest first
    size: Any
    num_entries: Any  # that there is room for


def shift_of(most: Any) -> Any:
    """Bits that lengths up to ``most`` lose so that `CLASSES` hold them."""
    bits = CLASSES.bit_length() - 1
    if isinstance(most, int):
        return max(most.bit_length() - bits, 0)
    from cutlass import Int32, cute

    return hi(32 - bits - Int32(cute.arch.clz(most)), 0)


def class_of(visited: Any, most: Any) -> Any:
    """What tiles are sorted by, 0 for the longest; of a band with two sides some may visit more
    than the ``most`` of the tiles at the ends.
    """
    return hi(most - visited, 0) >> shift_of(most)


@dataclass(frozen=True)
class Lists:
    """What the prepare kernel leaves: tensors, or Python lists."""

    header: Any  # (1, HEADER_INTS)
    records: Any  # (batch, RECORD_INTS)
    entries: Any  # (num_entries, ENTRY_INTS)
    owner_q: Any
    owner_k: Any


def lists(
    work: Work,
    lengths: list,
    heads: int,
    heads_per_unit: int,
    mask: Band,
    num_sms: int | None = None,
) -> Lists:
    """The lists in Python: ``lengths`` are (offset_q, len_q, offset_k, len_k) of the sequences.

    What the kernel must leave, and all that tests of the order need. Tiles are dealt to
    ``num_sms`` CTAs in turn; 0: to whoever is free, None: sections fill L2 as well.
    """
    records, owner_q, owner_k = [], [], []
    for s, (offset_q, len_q, offset_k, len_k) in enumerate(lengths):
        records.append((offset_q, len_q, offset_k, len_k, len(owner_q), len(owner_k), 0, 0))
        owner_q += [s] * work.tiles_q(len_q)
        owner_k += [s] * work.tiles_k(len_k)
    blocks = [work.longest(mask, len_q, len_k) for _, len_q, _, len_k in lengths]
    most = max(blocks)
    ranked = sorted(range(len(lengths)), key=lambda s: class_of(blocks[s], most))  # stable
    longest = max(n[3 if work.owner == "q" else 1] for n in lengths)
    seen = work.seen(mask, longest)
    width = work.section(mask, seen, heads // heads_per_unit, heads_per_unit, num_sms)
    entries = []
    for s in ranked:
        _, len_q, _, len_k = lengths[s]
        order = range(work.tiles_of(len_q, len_k))
        listed = [
            (b, work.visited(mask, b, len_q, len_k))
            for b in (reversed(order) if work.descending else order)
        ]
        entries += [(s, b, first, n) for first in range(0, heads, width) for b, n in listed]
    if num_sms and most > 1:
        chunk = work.chunk(width, num_sms)
        parts = [entries[i : i + chunk] for i in range(0, len(entries), chunk)]
        entries = [e for part in parts for e in sorted(part, key=lambda e: class_of(e[3], most))]
    tiles = len(owner_q if work.owner == "q" else owner_k)
    header = (tiles, width, len(owner_q), len(owner_k), 0, 0, 0, 0)
    return Lists([header], records, entries or [(0, 0, 0, 0)], owner_q, owner_k)


@dataclass(frozen=True)
class Varlen:
    """The listed tiles, dealt to a fixed set of CTAs in turn, every other round backwards (or one
    to each, if there are so many CTAs).
    """

    header: Any
    entries: Any
    heads: Any
    capacity: Any  # no more tiles than this, heads counted

    def at(self, index: Any) -> Tile:
        """The i-th tile; past the end the last one, not valid.

        The header is read again each time: a walk keeps nothing of it in registers.
        """
        tiles, width, _, _ = int_row(self.header, 0, 0, 4)
        size = tiles * self.heads
        inside = lo(index, hi(size - 1, 0))
        entry = inside // width
        sequence, block, first, _ = int_row(self.entries, entry, 0, ENTRY_INTS)
        return Tile(block, first + inside - entry * width, sequence, index < size)

    def grid(self, num_sms: Any, cluster: int = 1) -> tuple[Any, int, int]:
        return grid_of(capped(self.capacity, num_sms, cluster), cluster)

    def start(self, block: Any, num_blocks: Any, cluster: int = 1) -> Any:
        return SnakeWalk(self, block // cluster, num_blocks // cluster, 0 * block)


@dataclass(frozen=True)
class VarlenOnce(Varlen):
    """The listed tiles, one per CTA (cluster), launched in their order; CTAs past the end have
    none.
    """

    def grid(self, num_sms: Any = None, cluster: int = 1) -> tuple[Any, int, int]:
        return grid_of(self.capacity, cluster)

    def start(self, block: Any, num_blocks: Any, cluster: int = 1) -> Any:
        return Once(self, block // cluster)
