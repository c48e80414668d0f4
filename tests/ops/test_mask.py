"""Masks against brute force: every block range is what counting elements one by one gives."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from fa_cute.ops.mask import (
    Band,
    Blocks,
    causal,
    full,
    kv_blocks,
    q_blocks,
    spans,
    visits,
    window,
)

lengths = st.integers(1, 60)
tiles = st.sampled_from((1, 3, 4, 8, 16))
sides = st.one_of(st.none(), st.integers(0, 70))
masks = st.builds(Band, sides, sides)
checked = settings(max_examples=300, deadline=None)


def sees(mask: Band, q: int, k: int, seqlen_q: int, seqlen_k: int) -> bool:
    """The definition, spelled out."""
    diagonal = q + seqlen_k - seqlen_q
    after = mask.left is None or k >= diagonal - mask.left
    before = mask.right is None or k <= diagonal + mask.right
    return after and before


def lines(block: int, tile: int, length: int) -> range:
    return range(block * tile, min((block + 1) * tile, length))


@checked
@given(masks, lengths, lengths)
def test_bounds_are_the_definition(mask: Band, seqlen_q: int, seqlen_k: int) -> None:
    kept = {
        (q, k)
        for q in range(seqlen_q)
        for k in range(seqlen_k)
        if sees(mask, q, k, seqlen_q, seqlen_k)
    }
    for q in range(seqlen_q):
        lo, hi = mask.k_bounds(q, seqlen_q, seqlen_k)
        assert 0 <= lo and 0 <= hi <= seqlen_k
        assert {k for q0, k in kept if q0 == q} == set(range(lo, hi))
    for k in range(seqlen_k):
        lo, hi = mask.q_bounds(k, seqlen_q, seqlen_k)
        assert 0 <= lo <= seqlen_q and 0 <= hi <= seqlen_q
        assert {q for q, k0 in kept if k0 == k} == set(range(lo, hi))
        for q in range(seqlen_q):
            assert mask.keep(q, k, seqlen_q, seqlen_k) == ((q, k) in kept)


@checked
@given(masks, lengths, lengths)
def test_bounds_never_decrease(mask: Band, seqlen_q: int, seqlen_k: int) -> None:
    of_q = [mask.k_bounds(q, seqlen_q, seqlen_k) for q in range(seqlen_q)]
    of_k = [mask.q_bounds(k, seqlen_q, seqlen_k) for k in range(seqlen_k)]
    for found in (of_q, of_k):
        for (lo0, hi0), (lo1, hi1) in pairwise(found):
            assert lo0 <= lo1 and hi0 <= hi1


def assert_ordered(blocks: Blocks, num_blocks: int) -> None:
    assert 0 <= blocks.lo <= blocks.full_lo <= blocks.full_hi <= blocks.hi
    assert blocks.hi <= num_blocks or blocks.count == 0


@checked
@given(masks, lengths, lengths, tiles, tiles, st.sampled_from((1, 2, 3, 4)))
def test_kv_blocks(
    mask: Band, seqlen_q: int, seqlen_k: int, tile_m: int, tile_n: int, pack: int
) -> None:
    for m in range(-(-seqlen_q * pack // tile_m)):
        blocks = kv_blocks(mask, m, tile_m, tile_n, seqlen_q, seqlen_k, pack)
        assert_ordered(blocks, -(-seqlen_k // tile_n))
        queries = {row // pack for row in lines(m, tile_m, seqlen_q * pack)}
        seen = {
            k // tile_n
            for q in queries
            for k in range(seqlen_k)
            if sees(mask, q, k, seqlen_q, seqlen_k)
        }
        assert seen == set(range(blocks.lo, blocks.hi))
        unmasked = {
            n
            for n in seen
            if (n + 1) * tile_n <= seqlen_k
            and all(
                sees(mask, q, k, seqlen_q, seqlen_k)
                for q in queries
                for k in lines(n, tile_n, seqlen_k)
            )
        }
        assert unmasked == set(range(blocks.full_lo, blocks.full_hi))


@checked
@given(masks, lengths, lengths, tiles, tiles, st.booleans())
def test_q_blocks(
    mask: Band, seqlen_q: int, seqlen_k: int, tile_m: int, tile_n: int, tail_rows: bool
) -> None:
    for n in range(-(-seqlen_k // tile_n)):
        blocks = q_blocks(mask, n, tile_m, tile_n, seqlen_q, seqlen_k, tail_rows)
        assert_ordered(blocks, -(-seqlen_q // tile_m))
        keys = lines(n, tile_n, seqlen_k)
        seen = {
            q // tile_m
            for q in range(seqlen_q)
            for k in keys
            if sees(mask, q, k, seqlen_q, seqlen_k)
        }
        assert seen == set(range(blocks.lo, blocks.hi))
        unmasked = {
            m
            for m in seen
            if all(
                sees(mask, q, k, seqlen_q, seqlen_k)
                for q in lines(m, tile_m, seqlen_q)
                for k in keys
            )
            and (n + 1) * tile_n <= seqlen_k
            and (not tail_rows or (m + 1) * tile_m <= seqlen_q)
        }
        assert unmasked == set(range(blocks.full_lo, blocks.full_hi))
        parts = spans(mask, blocks, tail_rows)
        assert [m for lo, hi, _ in parts for m in range(lo, hi)] == sorted(seen)
        assert {m for lo, hi, masked in parts if not masked for m in range(lo, hi)} == unmasked


@checked
@given(masks, lengths, lengths, tiles, tiles)
def test_both_sides_agree_on_who_meets_whom(
    mask: Band, seqlen_q: int, seqlen_k: int, tile_m: int, tile_n: int
) -> None:
    of_m, of_n = set(), set()
    for m in range(-(-seqlen_q // tile_m)):
        r = kv_blocks(mask, m, tile_m, tile_n, seqlen_q, seqlen_k)
        of_m |= {(m, n) for n in range(r.lo, r.hi)}
    for n in range(-(-seqlen_k // tile_n)):
        r = q_blocks(mask, n, tile_m, tile_n, seqlen_q, seqlen_k)
        of_n |= {(m, n) for m in range(r.lo, r.hi)}
    assert of_m == of_n


def test_named_masks() -> None:
    assert full() == Band(None, None)
    assert causal() == window(None, 0)
    # 5 queries, 8 keys: the last query sees all keys, the first sees 4.
    assert [causal().k_bounds(q, 5, 8) for q in range(5)] == [
        (0, 4),
        (0, 5),
        (0, 6),
        (0, 7),
        (0, 8),
    ]
    # More queries than keys: the first ones see nothing.
    assert [causal().k_bounds(q, 4, 2) for q in range(4)] == [(0, 0), (0, 0), (0, 1), (0, 2)]
    assert [window(1, 0).k_bounds(q, 4, 4) for q in range(4)] == [(0, 1), (0, 2), (1, 3), (2, 4)]


def test_visits_go_down_and_mask_only_the_edges() -> None:
    assert visits(causal(), 3, 64, 64, 256, 256) == [(3, True), (2, False), (1, False), (0, False)]
    assert visits(full(), 0, 64, 64, 64, 130) == [(2, True), (1, False), (0, False)]
    edges = [(3, True), (2, False), (1, True), (0, True)]
    assert visits(window(130, 0), 3, 64, 64, 256, 256) == edges
