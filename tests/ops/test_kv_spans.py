"""How a forward goes through its KV blocks, against brute force."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fa_cute.ops.mask import Band, kv_blocks, kv_spans, needs_mask

from .test_mask import lengths, masks, tiles

checked = settings(max_examples=300, deadline=None)


@checked
@given(masks, lengths, lengths, tiles, tiles)
def test_only_blocks_that_a_limit_cuts_need_a_mask(
    mask: Band, seqlen_q: int, seqlen_k: int, tile_m: int, tile_n: int
) -> None:
    for m in range(-(-seqlen_q // tile_m)):
        blocks = kv_blocks(mask, m, tile_m, tile_n, seqlen_q, seqlen_k)
        queries = range(m * tile_m, min((m + 1) * tile_m, seqlen_q))
        for n in range(blocks.lo, blocks.hi):
            keys = range(n * tile_n, (n + 1) * tile_n)
            cut = not all(mask.keep(q, k, seqlen_q, seqlen_k) for q in queries for k in keys)
            assert bool(needs_mask(mask, blocks, n)) == cut


@checked
@given(masks, lengths, lengths, tiles, tiles, st.integers(1, 3))
def test_spans_of_query_blocks_that_go_together(
    mask: Band, seqlen_q: int, seqlen_k: int, tile_m: int, tile_n: int, together: int
) -> None:
    for m in range(-(-seqlen_q // (tile_m * together))):
        visited = kv_blocks(mask, m, tile_m * together, tile_n, seqlen_q, seqlen_k)
        if visited.count == 0:
            continue
        for t in range(together):  # also those whose rows all lie past the end
            own = kv_blocks(mask, m * together + t, tile_m, tile_n, seqlen_q, seqlen_k)
            parts = kv_spans(mask, visited, own)
            found = [n for lo, hi, _ in parts for n in reversed(range(lo, hi))]
            assert found == list(reversed(range(visited.lo, visited.hi - 1)))
            row = (m * together + t) * tile_m
            for q in range(row, min(row + tile_m, seqlen_q)):
                for lo, hi, masked in parts:
                    keys = range(lo * tile_n, hi * tile_n)
                    assert masked or all(mask.keep(q, k, seqlen_q, seqlen_k) for k in keys)


@checked
@given(masks, lengths, lengths, tiles)
def test_most_keys(mask: Band, seqlen_q: int, seqlen_k: int, rows: int) -> None:
    most = mask.most_keys(rows, seqlen_k)
    for first in range(0, seqlen_q, rows):
        lo = mask.k_bounds(first, seqlen_q, seqlen_k)[0]
        hi = mask.k_bounds(min(first + rows, seqlen_q) - 1, seqlen_q, seqlen_k)[1]
        assert hi - lo <= most <= seqlen_k


@checked
@given(masks, lengths, lengths, st.integers(0, 200))
def test_rows_past_the_end_stay_inside(mask: Band, seqlen_q: int, seqlen_k: int, past: int) -> None:
    lo, hi = mask.k_bounds(seqlen_q + past, seqlen_q, seqlen_k)
    assert 0 <= lo < hi == seqlen_k
