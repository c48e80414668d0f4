"""The list of tiles of packed sequences, on ints: every tile once, in an order that is fast and
that a deterministic backward can follow.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_cute.ops import seqlen
from fa_cute.ops.mask import Band, kv_blocks, q_blocks
from fa_cute.sched import Tile, TileSpace, make, snake, varlen
from fa_cute.sched.lpt import L2_BYTES
from fa_cute.sched.spt import descends
from fa_cute.sched.varlen import Varlen, VarlenOnce, Work

from .test_spt import Stuck, masks, run, turns

checked = settings(max_examples=100, deadline=None)
lengths = st.integers(0, 200)
batches = st.lists(st.tuples(lengths, lengths), min_size=1, max_size=12)
tiles = st.sampled_from((16, 32, 64))
owners = st.sampled_from("qk")


def records(batch: list[tuple[int, int]]) -> list[tuple[int, int, int, int]]:
    """(offset_q, len_q, offset_k, len_k) of sequences one after the other."""
    found, at_q, at_k = [], 0, 0
    for len_q, len_k in batch:
        found.append((at_q, len_q, at_k, len_k))
        at_q, at_k = at_q + len_q, at_k + len_k
    return found


def order_of(work: Work, batch, heads, per, mask: Band, once: bool = False, num_sms=None):
    """(order, lists) of a batch."""
    made = varlen.lists(work, records(batch), heads, per, mask, num_sms)
    total = sum(n[0 if work.owner == "q" else 1] for n in batch)
    capacity = work.tiles(work.owner, total, len(batch)) * heads
    return (VarlenOnce if once else Varlen)(made.header, made.entries, heads, capacity), made


def walk_all(order, num_sms: int) -> list[Tile]:
    """The tiles of all CTAs, one CTA after the other."""
    ctas, found = order.grid(num_sms)[0], []
    for cta in range(ctas):
        walk = order.start(cta, ctas)
        tile = walk.tile()
        while tile.valid:
            found.append(tile)
            walk = walk.next()
            tile = walk.tile()
    return found


def every_tile(work: Work, batch, heads: int) -> Counter:
    """What a walk must visit, each once."""
    owner = 0 if work.owner == "q" else 1
    size = work.tile_q if owner == 0 else work.tile_k
    return Counter(
        (s, b, h)
        for s, n in enumerate(batch)
        for b in range(-(-n[owner] // size))
        for h in range(heads)
    )


def check(work: Work, batch, heads: int, per: int, mask: Band, num_sms: int) -> None:
    """Every tile once, by a few CTAs or by one CTA for each; room for what there is."""
    for once, dealt in ((False, num_sms), (False, None), (True, None)):
        order, made = order_of(work, batch, heads, per, mask, once, dealt)
        seen = walk_all(order, num_sms)
        assert Counter((t.batch, t.m_block, t.head) for t in seen) == every_tile(work, batch, heads)
        assert order.grid(num_sms)[0] >= 1
    totals = (sum(n[0] for n in batch), sum(n[1] for n in batch))
    at = work.workspace(len(batch), *totals, heads // per)
    assert len(made.entries) <= at.num_entries and len(seen) <= order.capacity
    assert len(made.owner_q) <= work.tiles("q", totals[0], len(batch))
    assert len(made.owner_k) <= work.tiles("k", totals[1], len(batch))


@checked
@given(owners, tiles, tiles, batches, masks, st.sampled_from(((1, 1), (6, 2), (5, 1), (8, 4))),
       st.sampled_from((1, 5, 132)),
       st.tuples(st.sampled_from((1, 2**19, 2**23)), st.booleans()))  # fmt: skip
def test_every_tile_once(owner, tile_q, tile_k, batch, mask, heads, num_sms, rows) -> None:
    row_bytes, alone = rows
    work = Work(owner, tile_q, tile_k, row_bytes, descending=True, alone=alone)
    check(work, batch, heads[0], heads[1], mask, num_sms)


@pytest.mark.parametrize("owner", ["q", "k"])
def test_batches_of_every_kind(owner: str) -> None:
    work = Work(owner, 128, 128, 512, descending=False)
    for batch in ([(0, 0)], [(0, 0)] * 50, [(1, 1)], [(4096, 4096)], [(0, 77), (77, 0), (3, 3)]):
        check(work, batch, 4, 2, Band(right=0), 132)


def test_thousands_of_sequences_cost_what_they_are() -> None:
    """Linear: twice the sequences take at most three times as long (a quadratic scan: four)."""
    work, seconds = Work("q", 128, 128, 512, descending=True), []
    for count in (8192, 16384):
        batch, tries = [(34, 34)] * count, []
        for _ in range(3):  # what else the machine does comes on top
            start = time.process_time()
            order, made = order_of(work, batch, 16, 1, Band())
            tries.append(time.process_time() - start)
        seconds.append(min(tries))
        assert made.header[0][:2] == (count, 16)
        assert order.at(16 * 5000 + 3) == Tile(0, 3, 5000, True)
    assert seconds[1] < 3 * seconds[0]


def test_longest_first_and_equal_ones_in_the_order_of_the_batch() -> None:
    work = Work("q", 64, 64, 512, descending=True)
    batch = [(64, 64), (640, 640), (0, 0), (64, 50), (300, 300)]
    _, made = order_of(work, batch, 2, 1, Band(right=0))
    assert [e[0] for e in made.entries] == [1] * 10 + [4] * 5 + [0, 3]
    assert [e[1] for e in made.entries] == [*reversed(range(10)), *reversed(range(5)), 0, 0]


def loads(batch, heads: int, num_sms: int) -> list[int]:
    """Causal work of each CTA that takes tiles in turn, in blocks."""
    work, mask = Work("q", 128, 128, 512, descending=True), Band(right=0)
    order, _ = order_of(work, batch, heads, 1, mask, num_sms=num_sms)
    ctas, found = order.grid(num_sms)[0], []
    for cta in range(ctas):
        walk, mine = order.start(cta, ctas), 0
        while (tile := walk.tile()).valid:
            mine += work.visited(mask, tile.m_block, *batch[tile.batch])
            walk = walk.next()
        found.append(mine)
    return found


@pytest.mark.parametrize(
    ("lengths", "heads"),
    [
        ([1024] * 16, 16),
        ([2048] * 16, 16),
        ([1024] * 40, 12),
        ([512] * 64, 32),
        ([4096] * 8, 32),
        ([128 * (1 + 7 * s % 24) for s in range(48)], 16),
    ],
)
def test_every_cta_gets_nearly_the_same(lengths: list[int], heads: int) -> None:
    """All but what is left over at the end of the list."""
    found = loads([(n, n) for n in lengths], heads, 132)
    assert max(found) * len(found) <= 1.08 * sum(found)


def test_without_dealing_some_get_far_more() -> None:
    """The check can fail: the same tiles, sequence after sequence."""
    batch = [(1024, 1024)] * 16
    work, mask = Work("q", 128, 128, 512, descending=True), Band(right=0)
    order, _ = order_of(work, batch, 16, 1, mask)
    size = order.header[0][0] * 16
    work_of = [
        sum(work.visited(mask, order.at(i).m_block, 1024, 1024) for i in range(cta, size, 132))
        for cta in range(132)
    ]
    assert max(work_of) > 1.3 * sum(work_of) / 132


SMS, ENDS = 132, 1.5  # what a tile costs beside its blocks, in blocks


@dataclass(frozen=True)
class Walked:
    """What becomes of an order of tiles."""

    busiest: float  # CTA, over the mean
    together: float  # (sequence, head) that tiles that run together read, on average


def walked(order, size: int, heads: int, cost, free: bool) -> Walked:
    """``free``: the next tile goes to whoever is free, else in turn."""
    loads = [0.0] * SMS
    if free:
        for i in range(size):
            heapq.heappush(loads, heapq.heappop(loads) + cost(order.at(i)))
    else:
        for cta in range(SMS):
            walk = order.start(cta, SMS)
            while (tile := walk.tile()).valid:
                loads[cta] += cost(tile)
                walk = walk.next()
    where = [(t.batch * heads + t.head) for t in map(order.at, range(size))]
    parts = [len(set(where[i : i + SMS])) for i in range(0, size, SMS // 2)]
    return Walked(max(loads) * SMS / sum(loads), sum(parts) / len(parts))


def beside_dense(causal: bool, length: int) -> tuple[Walked, Walked]:
    """A batch of equal lengths: (dense, listed)."""
    count, heads, mask = 32768 // length, 16, Band(right=0 if causal else None)
    work = Work("q", 192, 64 if causal else 80, 512, descending=True)
    batch, free = [(length, length)] * count, length > 6144

    def cost(tile: Tile) -> float:
        return work.visited(mask, tile.m_block, length, length) + ENDS

    space = TileSpace(work.tiles_q(length), heads, count)
    dense = make("persistent", space)
    if causal:
        dense, _ = snake.dealt(space, SMS, seqlen_k=length, kv_bytes_per_row=512)
    listed, _ = order_of(work, batch, heads, 1, mask, num_sms=0 if free else SMS)
    return tuple(walked(order, space.size, heads, cost, free) for order in (dense, listed))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1024, 2048, 4096, 16384])
def test_equal_lengths_are_as_even_as_a_dense_batch(causal: bool, length: int) -> None:
    """And what runs together reads hardly more."""
    dense, listed = beside_dense(causal, length)
    assert listed.busiest <= dense.busiest + 1e-9
    assert listed.together <= 1.01 * dense.together


def test_wide_sections_read_more_at_a_time(monkeypatch) -> None:
    """The check can fail: with sections that fill L2, twice as much as in a dense batch."""
    monkeypatch.setattr(Work, "section", lambda *_: 16)
    dense, listed = beside_dense(True, 4096)
    assert listed.together > 1.9 * dense.together


def test_heads_of_a_section_fit_in_l2() -> None:
    work = Work("q", 128, 128, 512, descending=True)
    for longest, heads, per, want in (
        (34, 16, 1, 16),
        (4096, 64, 1, 16),
        (16384, 32, 1, 4),
        (16384, 32, 4, 16),
        (16384, 12, 1, 4),
        (4096, 40, 1, 8),
        (200_000, 8, 1, 1),
        (34, 7, 1, 7),
        (16384, 7, 1, 1),
    ):
        mask = Band(right=0)
        assert work.section(mask, work.seen(mask, longest), heads // per, per) == want
        assert heads % want == 0
    for longest, heads, per, num_sms, want in (
        (192, 16, 1, 132, 16),  # a tile per head: nothing is shared
        (1024, 16, 1, 132, 4),  # 66 entries are two rounds
        (1024, 16, 1, 131, 2),
        (1024, 6, 1, 132, 2),
        (1024, 32, 4, 132, 4),
        (1024, 12, 6, 132, 6),
        (1024, 3, 1, 132, 3),
        (10_000, 16, 1, 132, 1),
        (16384, 16, 1, 132, 1),
        (16384, 16, 1, 0, 2),
        (1024, 16, 1, 0, 4),
    ):
        dealt = Work("q", 192, 64, 512, descending=True)
        width = dealt.section(mask, longest, heads // per, per, num_sms)
        assert width == want and heads % width == 0
        if num_sms and longest > 192:
            assert dealt.chunk(width, num_sms) * width % (2 * num_sms) == 0
        full = dealt.section(Band(), longest, heads // per, per, num_sms)
        assert full == (want if longest <= 192 else per)  # one kv head at a time
    alone = Work("k", 64, 128, 1024, descending=False, alone=True)
    for longest, want in ((16384, 1), (4096, 1), (2048, 16), (34, 24)):
        for mask in (Band(), Band(right=0)):
            assert alone.section(mask, longest, 48 if longest > 34 else 24, 1) == want
    band = Band(left=1024, right=0)
    window = work.seen(band, 16384)
    assert window == 1024 + 128 and work.section(band, window, 32, 1) == 32


def test_a_window_leaves_room_for_what_the_tiles_under_way_have() -> None:
    """132 tiles of 128 rows of 1 KB beside what 16 heads see, not 32."""
    work = Work("k", 64, 128, 1024, descending=True)
    window, own = Band(left=1024, right=0), Own(left=0, right=0)
    seen = work.seen(window, 16384)
    assert work.l2_bytes(window) == L2_BYTES - 132 * 128 * 1024
    assert work.section(window, seen, 32, 1) == 16
    assert work.l2_bytes(Band(right=0)) == L2_BYTES
    # Limits of a mask of one's own are not numbers.
    assert work.l2_bytes(own) == L2_BYTES and work.seen(own, 16384) == 16384
    # Wide tiles: never less than a quarter.
    assert Work("k", 64, 256, 2048, descending=True).l2_bytes(window) == L2_BYTES // 4


class Own(Band):
    """A mask of one's own."""

    def q_bounds(self, k, seqlen_q, seqlen_k):
        return super().q_bounds(k, seqlen_q, seqlen_k)


def test_classes_keep_the_order_of_very_long_sequences() -> None:
    assert [varlen.shift_of(n) for n in (0, 255, 256, 511, 512, 8192)] == [0, 0, 1, 1, 2, 6]
    assert varlen.class_of(300, 200) == 0  # the middle of a window with two sides
    work = Work("q", 64, 64, 512, descending=True)
    batch = [(64 * n, 64 * n) for n in (10, 893, 895, 1500)]
    _, made = order_of(work, batch, 1, 1, Band())
    assert list(dict.fromkeys(e[0] for e in made.entries)) == [3, 1, 2, 0]


@checked
@given(batches, masks, tiles, tiles, st.sampled_from(((1, 1), (2, 2), (6, 3))),
       st.sampled_from((1, 2, 3, 7, 1000)), st.sampled_from((1, 2**19)))  # fmt: skip
def test_nobody_waits_for_a_cta_that_cannot_have_started(
    batch, mask, tile_q, tile_k, heads, resident, row_bytes
) -> None:
    """The deterministic backward: any number of resident CTAs, launched in order, comes to its end,
    where the blocks of a sequence go in the direction of `spt.lock_value`.
    """
    num_heads, ratio = heads
    work = Work("k", tile_q, tile_k, row_bytes, descends(mask))
    order, _ = order_of(work, batch, num_heads, 1, mask, once=True)
    run(order, resident, sequence_turns(batch, mask, work, ratio))


def sequence_turns(batch, mask: Band, work: Work, ratio: int):
    """What the CTA of a tile waits for, in its order."""

    def adds(tile: Tile):
        if not tile.valid:
            return []
        len_q, len_k = batch[tile.batch]
        return turns(mask, work.tile_q, work.tile_k, len_q, len_k, ratio)(tile)

    return adds


@pytest.mark.parametrize("resident", [1, 2, 3])
def test_the_other_direction_hangs(resident: int) -> None:
    """The check can fail."""
    mask, batch = Band(right=0), [(16, 16), (64, 64)]
    work = Work("k", 16, 16, 512, descending=False)
    order, _ = order_of(work, batch, 1, 1, mask, once=True)
    with pytest.raises(Stuck):
        run(order, resident, sequence_turns(batch, mask, work, 1))


@checked
@given(batches, tiles, tiles)
def test_numbers_of_tiles_are_dense(batch, tile_q: int, tile_k: int) -> None:
    """Tiles of the workspace: each (sequence, block, head) its own, none left out."""
    work = Work("k", tile_q, 2 * tile_k, 512, descending=False, owners=True)
    made = varlen.lists(work, records(batch), 3, 1, Band())
    policy, found_q, found_k = seqlen.Varlen(made.records), [], []
    for s, (len_q, len_k) in enumerate(batch):
        at = policy.at(Tile(0, 0, s, True))
        assert (at.q, at.k) == (len_q, len_k)
        for h in range(3):
            found_q += [at.tile_q(b, h, 3, tile_q) for b in range(work.tiles_q(len_q))]
            found_k += [at.tile_k(b, h, 3, tile_k, 2) for b in range(2 * work.tiles_k(len_k))]
        assert made.owner_q[at.first_q : at.first_q + work.tiles_q(len_q)].count(s) == (
            work.tiles_q(len_q)
        )
    assert sorted(found_q) == list(range(3 * len(made.owner_q)))
    assert sorted(found_k) == list(range(3 * 2 * len(made.owner_k)))


@checked
@given(st.integers(1, 4), st.integers(1, 300), st.integers(1, 300), tiles)
def test_dense_numbers_of_tiles(batch: int, seqlen_q: int, seqlen_k: int, tile: int) -> None:
    dense, found = seqlen.Dense(seqlen_q, seqlen_k), []
    for b in range(batch):
        at = dense.at(Tile(0, 0, b, True))
        found += [at.tile_k(n, h, 2, tile) for h in range(2) for n in range(-(-seqlen_k // tile))]
    assert found == list(range(len(found)))


@checked
@given(owners, lengths, lengths, masks, tiles, tiles)
def test_blocks_are_those_of_the_longest_tile_at_an_end(
    owner, len_q, len_k, mask, tile_q, tile_k
) -> None:
    """What sequences are sorted by: exact for full and causal, where the longest tile is an end."""
    work = Work(owner, tile_q, tile_k, 512, descending=True)
    if owner == "q":
        counts = [
            kv_blocks(mask, m, tile_q, tile_k, len_q, len_k).count
            for m in range(-(-len_q // tile_q))
        ]
    else:
        counts = [
            q_blocks(mask, n, tile_q, tile_k, len_q, len_k).count
            for n in range(-(-len_k // tile_k))
        ]
    found = work.longest(mask, len_q, len_k)
    assert 0 <= found <= max(counts, default=0)
    if mask.left is None or mask.right is None:
        assert found == max(counts, default=0)
