"""Sections that deal the same amount of work to every CTA."""

from __future__ import annotations

from math import gcd

from hypothesis import given
from hypothesis import strategies as st

from fa_cute.sched import TileSpace, snake


@given(num_m=st.integers(1, 500), width=st.integers(1, 160))
def test_period_is_the_fewest_heads_that_fill_pairs_of_rounds(num_m: int, width: int) -> None:
    assert snake.period(num_m, width) == 2 * width // gcd(num_m, 2 * width)


def loads(num_m: int, heads: int, num_sms: int, seqlen_k: int, row_bytes: int):
    """Causal work of each CTA, and how many CTAs there are."""
    space = TileSpace(num_m, heads, 1)
    order, ctas = snake.dealt(space, num_sms, seqlen_k=seqlen_k, kv_bytes_per_row=row_bytes)
    grid = order.grid(ctas)[0]
    work = []
    for block in range(grid):
        walk, mine = order.start(block, grid), 0
        while walk.tile().valid:
            mine += walk.tile().m_block + 1
            walk = walk.next()
        work.append(mine)
    return work, ctas


def test_every_cta_gets_nearly_the_same() -> None:
    for num_m, heads, seqlen_k, row_bytes in ((4, 1024, 1024, 256), (6, 512, 1024, 512)):
        work, ctas = loads(num_m, heads, 132, seqlen_k, row_bytes)
        assert ctas == 132 and max(work) * 132 <= 1.06 * sum(work)


def test_long_heads_go_one_tile_to_a_cta() -> None:
    work, ctas = loads(86, 32, 132, 16384, 512)
    assert ctas == len(work) == 86 * 32
