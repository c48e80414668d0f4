"""The deterministic dQ order: ranks without gaps; nobody waits for a CTA that cannot have started.

The proof is a simulation of the launch: N CTAs resident, started in launch order, a new one only
when one ends; each walks its query blocks upwards and at each one waits for its turn. If the run
ends for N = 1, it ends for every N (more residents only add progress); larger N are run to show it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_cute import sched
from fa_cute.ops.mask import Band, kv_blocks, q_blocks
from fa_cute.sched import TileSpace
from fa_cute.sched.spt import dkv_lock, dq_lock, for_mask, lock_value

lengths = st.integers(1, 90)
tiles = st.sampled_from((8, 16, 32))
sides = st.one_of(st.none(), st.integers(0, 60))
masks = st.builds(Band, sides, sides)
checked = settings(max_examples=150, deadline=None)


@dataclass(frozen=True)
class Launch:
    """Heads, the length that sizes the L2 sections, and how many CTAs are resident."""

    ratio: int
    num_kv_heads: int
    l2_rows: int
    resident: int


launches = st.builds(
    Launch,
    st.sampled_from((1, 2, 4)),
    st.integers(1, 3),
    st.sampled_from((1, 40_000, 10**6)),
    st.sampled_from((1, 2, 3, 7, 1000)),
)


class Stuck(Exception):
    """Every resident CTA waits."""


def run(order, resident: int, work) -> int:
    """Launch all CTAs of ``order``, at most ``resident`` at a time; returns how often one waited.

    ``work(tile)`` gives [(counter, value it must have), ...] in the order in which the CTA adds.
    """
    ctas = order.grid(resident)[0]
    counters: Counter = Counter()
    waiting = [list(work(order.start(i, ctas).tile())) for i in range(ctas)]
    alive, launched, stalls = [], 0, 0
    while alive or launched < ctas:
        while len(alive) < resident and launched < ctas:
            alive.append(launched)
            launched += 1
        moved = False
        for cta in list(alive):
            if waiting[cta] and counters[waiting[cta][0][0]] != waiting[cta][0][1]:
                stalls += 1
                continue
            moved = True
            if waiting[cta]:
                counters[waiting[cta].pop(0)[0]] += 1
            else:
                alive.remove(cta)
        if not moved:
            raise Stuck(f"{alive} of {ctas}")
    return stalls


def turns(mask: Band, tile_m: int, tile_n: int, seqlen_q: int, seqlen_k: int, ratio: int):
    """What the CTA of a KV block adds to: dQ tiles upwards, then dK and dV of its kv head."""

    def work(tile):
        r = q_blocks(mask, tile.n_block, tile_m, tile_n, seqlen_q, seqlen_k)
        for m in range(r.lo, r.hi):
            value = dq_lock(mask, m, tile.n_block, tile_m, tile_n, seqlen_q, seqlen_k)
            yield ("dq", tile.batch, tile.head, m), value
        if ratio > 1:
            yield ("dkv", tile.batch, tile.head // ratio, tile.n_block), dkv_lock(tile.head, ratio)

    return work


@checked
@given(masks, lengths, lengths, tiles, tiles)
def test_ranks_of_a_dq_tile_count_from_zero(
    mask: Band, seqlen_q: int, seqlen_k: int, tile_m: int, tile_n: int
) -> None:
    for m in range(-(-seqlen_q // tile_m)):
        visitors = [
            n
            for n in range(-(-seqlen_k // tile_n))
            if m
            in range(
                *(lambda r: (r.lo, r.hi))(q_blocks(mask, n, tile_m, tile_n, seqlen_q, seqlen_k))
            )
        ]
        blocks = kv_blocks(mask, m, tile_m, tile_n, seqlen_q, seqlen_k)
        ranks = [lock_value(mask, n, blocks) for n in visitors]
        assert sorted(ranks) == list(range(len(visitors)))


@checked
@given(masks, lengths, lengths, tiles, tiles, launches)
def test_nobody_waits_for_a_cta_that_cannot_have_started(
    mask: Band, seqlen_q: int, seqlen_k: int, tile_m: int, tile_n: int, launch: Launch
) -> None:
    ratio = launch.ratio
    space = TileSpace(-(-seqlen_k // tile_n), ratio * launch.num_kv_heads, 2)
    order = sched.sectioned(for_mask(mask), space, launch.l2_rows, 512, ratio)
    run(order, launch.resident, turns(mask, tile_m, tile_n, seqlen_q, seqlen_k, ratio))


@pytest.mark.parametrize("resident", [1, 2, 3])
def test_the_other_direction_hangs(resident: int) -> None:
    """The check can fail: ascending launches of causal wait for a block that is never resident."""
    causal = Band(right=0)
    order = sched.Ascending(TileSpace(4, 1, 1), 1)
    with pytest.raises(Stuck):
        run(order, resident, turns(causal, 16, 16, 64, 64, 1))


def test_causal_ctas_that_run_together_do_not_wait_for_each_other() -> None:
    """All resident: each turn has come by the time a CTA asks for it."""
    causal = Band(right=0)
    spt = sched.Spt(TileSpace(8, 1, 1), 1)
    assert run(spt, 8, turns(causal, 16, 16, 128, 128, 1)) == 0


def test_values_of_the_reference_rule() -> None:
    """Full: n. Causal: n_max(m) - 1 - n with n_max(m) from the diagonal of the tile's last row."""
    assert [dq_lock(Band(), 2, n, 64, 128, 512, 512) for n in range(4)] == [0, 1, 2, 3]
    for m in range(8):
        n_max = min(4, -(-(m + 1) * 64 // 128))
        want = [n_max - 1 - n for n in range(n_max)]
        assert [dq_lock(Band(right=0), m, n, 64, 128, 512, 512) for n in range(n_max)] == want
