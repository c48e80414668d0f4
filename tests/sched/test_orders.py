"""Every scheduler visits each tile exactly once, whatever the shape and the number of SMs."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_cute import sched
from fa_cute.errors import PlanError
from fa_cute.sched import Lpt, Tile, TileSpace
from fa_cute.sched.lpt import L2_BYTES, heads_in_l2

spaces = st.builds(TileSpace, st.integers(1, 9), st.integers(1, 8), st.integers(1, 4))
lengths = st.sampled_from((1, 128, 4096, 16384, 30_000, 100_000, 10_000_000))
checked = settings(max_examples=150, deadline=None)
Triple = tuple[int, int, int]


def key(tile: Tile) -> Triple:
    return tile.m_block, tile.head, tile.batch


def every(space: TileSpace) -> list[Triple]:
    return sorted(product(range(space.num_m), range(space.num_heads), range(space.num_batch)))


def walked(order, num_sms: int, cluster: int) -> list[list[Triple]]:
    """Tiles of each cluster, in its own order; all CTAs of a cluster must agree."""
    ctas, y, z = order.grid(num_sms, cluster)
    assert (y, z) == (1, 1) and ctas % cluster == 0 and ctas > 0
    per_cta = []
    for cta in range(ctas):
        walk, mine = order.start(cta, ctas, cluster), []
        while (tile := walk.tile()).valid:
            mine.append(key(tile))
            walk = walk.next()
        per_cta.append(mine)
    for first in range(0, ctas, cluster):
        assert all(per_cta[first + r] == per_cta[first] for r in range(cluster))
    return per_cta[::cluster]


@checked
@pytest.mark.parametrize("name", sched.NAMES)
@given(spaces, lengths, st.integers(1, 20), st.sampled_from((1, 2)), st.sampled_from((1, 2, 4)))
def test_each_tile_exactly_once(
    name: str, space: TileSpace, seqlen_k: int, num_sms: int, cluster: int, ratio: int
) -> None:
    order = sched.make(name, space, seqlen_k=seqlen_k, kv_bytes_per_row=512, qhead_per_kvhead=ratio)
    tiles = [t for mine in walked(order, max(num_sms, cluster), cluster) for t in mine]
    assert sorted(tiles) == every(space)


@checked
@pytest.mark.parametrize("name", sched.NAMES)
@given(spaces, st.integers(0, 50))
def test_nothing_is_valid_past_the_end(name: str, space: TileSpace, beyond: int) -> None:
    order = sched.make(name, space, seqlen_k=30_000, kv_bytes_per_row=512)
    assert not order.at(space.size + beyond).valid
    assert all(order.at(i).valid for i in range(space.size))


@checked
@given(spaces, st.integers(1, 12), st.randoms(use_true_random=False))
def test_a_counter_gives_each_tile_once(space: TileSpace, num_sms: int, random) -> None:
    """CTAs draw in any order; each ends with a draw that is not valid."""
    order = sched.make("dynamic", space, seqlen_k=30_000, kv_bytes_per_row=512)
    ctas = order.grid(num_sms)[0]
    walks = {cta: order.start(cta, ctas) for cta in range(ctas)}
    counter, tiles = 0, []
    while walks:
        cta = random.choice(sorted(walks))
        tile = walks[cta].tile()
        if tile.valid:
            tiles.append(key(tile))
            walks[cta] = walks[cta].take(order.drawn(counter, ctas))
            counter += 1
        else:
            del walks[cta]
    assert sorted(tiles) == every(space)
    assert counter == space.size


@checked
@given(spaces, lengths, st.sampled_from((1, 2, 4)))
def test_lpt_goes_from_long_to_short_in_each_section(
    space: TileSpace, seqlen_k: int, ratio: int
) -> None:
    order = sched.make(
        "lpt", space, seqlen_k=seqlen_k, kv_bytes_per_row=512, qhead_per_kvhead=ratio
    )
    heads = space.num_heads * space.num_batch
    for first in range(0, heads, order.section):
        width = min(order.section, heads - first)
        tiles = [order.at(first * space.num_m + i) for i in range(width * space.num_m)]
        assert [t.m_block for t in tiles] == sorted((t.m_block for t in tiles), reverse=True)
        found = {t.batch * space.num_heads + t.head for t in tiles}
        assert found == set(range(first, first + width))


@given(st.integers(1, 2**24), st.sampled_from((128, 256, 512, 768, 1024)), st.integers(1, 2**12))
def test_sections_fill_l2_but_not_more(rows: int, bytes_per_row: int, most: int) -> None:
    heads = heads_in_l2(rows, bytes_per_row, most)
    fits = L2_BYTES // (rows * bytes_per_row)
    power = 1 if fits == 0 else 2 ** (fits.bit_length() - 1)
    assert heads == min(power, most)


def test_lpt_example() -> None:
    """Two sections of two heads; the last one has the head that is left."""
    order = Lpt(TileSpace(2, 3, 1), section=2)
    got = [key(order.at(i)) for i in range(6)]
    assert got == [(1, 0, 0), (1, 1, 0), (0, 0, 0), (0, 1, 0), (1, 2, 0), (0, 2, 0)]


def test_shared_kv_heads_count_once() -> None:
    """Eight query heads on one kv head of 30 MB: one section, not eight."""
    space = TileSpace(4, 8, 1)
    order = sched.make("lpt", space, seqlen_k=60_000, kv_bytes_per_row=512, qhead_per_kvhead=8)
    assert order.section == 8
    assert sched.make("lpt", space, seqlen_k=60_000, kv_bytes_per_row=512).section == 1


def test_unknown_name() -> None:
    with pytest.raises(PlanError, match="no scheduler 'lifo'; schedulers: "):
        sched.by_name("lifo")
