"""TMEM and SMEM plans: offsets, aliases, overlaps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cute.errors import PlanError
from fa_cute.plan import SmemField, SmemPlan, TmemPlan, TmemRegion

BACKWARD = (
    TmemRegion("S", 0, 128),
    TmemRegion("P", 0, 64, over="S"),
    TmemRegion("dV", 128, 128),
    TmemRegion("dP", 256, 128),
    TmemRegion("dS", 256, 64, over="dP"),
    TmemRegion("dQ", 256, 128, over="dP"),
    TmemRegion("dK", 384, 128),
)


def test_backward_columns() -> None:
    plan = TmemPlan(BACKWARD)
    assert plan.used_cols == plan.alloc_cols == 512
    assert plan["dS"].stop == 320 and plan.aliases("dP") == ("dS", "dQ")
    assert plan.may_overlap("dS", "dQ") and not plan.may_overlap("S", "dV")


@pytest.mark.parametrize(("cols", "alloc"), [(1, 32), (32, 32), (33, 64), (320, 512)])
def test_allocation_is_a_power_of_two(cols: int, alloc: int) -> None:
    assert TmemPlan((TmemRegion("S", 0, cols),)).alloc_cols == alloc


@pytest.mark.parametrize(
    ("regions", "words"),
    [
        (
            (TmemRegion("S", 0, 128), TmemRegion("P", 64, 64)),
            r"'S' \[0, 128\) and 'P' \[64, 128\) overlap; declare over='S'",
        ),
        ((TmemRegion("S", 0, 128), TmemRegion("S", 128, 8)), "declared twice"),
        ((TmemRegion("S", 448, 128),), r"'S' \[448, 576\) is outside columns \[0, 512\)"),
        ((TmemRegion("S", 0, 0),), "outside columns"),
        ((TmemRegion("S", -8, 8),), "outside columns"),
        ((TmemRegion("P", 0, 64, over="S"),), "'P'.* is over 'S'; other regions"),
        ((TmemRegion("P", 0, 64, over="P"),), "is over 'P'"),
        (
            (TmemRegion("S", 0, 64), TmemRegion("P", 64, 64, over="S")),
            "share no column",
        ),
        (
            (
                TmemRegion("S", 0, 64),
                TmemRegion("T", 64, 64),
                TmemRegion("P", 32, 64, over="S"),
            ),
            "'T'.* and 'P'.* overlap",
        ),
    ],
)
def test_columns_refused(regions: tuple[TmemRegion, ...], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        TmemPlan(regions)


def test_a_region_over_two() -> None:
    plan = TmemPlan(
        (
            TmemRegion("S", 0, 64),
            TmemRegion("T", 64, 64),
            TmemRegion("P", 32, 64, over=("S", "T")),
        )
    )
    assert plan.aliases("P") == ("S", "T")


@given(st.lists(st.tuples(st.integers(0, 511), st.integers(1, 64)), min_size=1, max_size=8))
def test_accepted_regions_are_disjoint(spans: list[tuple[int, int]]) -> None:
    regions = tuple(TmemRegion(f"r{i}", a, n) for i, (a, n) in enumerate(spans))
    used = [c for r in regions for c in range(r.start, r.stop)]
    right = len(used) == len(set(used)) and max(used) < 512
    try:
        TmemPlan(regions)
    except PlanError:
        assert not right
    else:
        assert right


def test_bytes_in_order() -> None:
    plan = SmemPlan(
        (
            SmemField("sStats", 512, align=128),
            SmemField("sQ", 16384, 2),
            SmemField("sKV", 32768, 3),
            SmemField("sO", 16384, 2, over="sQ"),
        ),
        reserved_bytes=256,
    )
    assert plan.offsets == {"sStats": 0, "sQ": 1024, "sKV": 33792, "sO": 1024}
    assert plan.field_bytes == 33792 + 3 * 32768 and plan.total == plan.field_bytes + 256
    assert plan.bytes("sKV") == 32768 and plan.aliases("sQ") == ("sO",)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ((SmemField("a", 16), SmemField("a", 16)), "declared twice"),
        ((SmemField("a", 0),), "0 bytes; both are positive"),
        ((SmemField("a", 16, 0),), "0 stages"),
        ((SmemField("a", 16, align=24),), "align 24; a power of two"),
        ((SmemField("a", 1000, 2),), "1000 bytes a stage are no multiple of its align 1024"),
        ((SmemField("a", 16, over="b"),), "no SMEM field 'b'"),
        ((SmemField("a", 16), SmemField("b", 17, over="a")), "'b' needs 17 bytes, 'a' .* has 16"),
        (
            (SmemField("a", 16), SmemField("b", 16, over="a"), SmemField("c", 8, over="b")),
            "itself over 'a'; name that one",
        ),
        (
            (
                SmemField("x", 16, align=16),
                SmemField("a", 16, align=16),
                SmemField("b", 8, over="a"),
            ),
            "'b' has align 1024, 'a' that it reuses starts at 16",
        ),
    ],
)
def test_bytes_refused(fields: tuple[SmemField, ...], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        SmemPlan(fields)


sizes = st.tuples(st.integers(1, 5), st.integers(1, 4), st.sampled_from((16, 128, 1024)))


@given(st.lists(sizes, min_size=1, max_size=6))
def test_fields_are_aligned_and_disjoint(parts: list[tuple[int, int, int]]) -> None:
    plan = SmemPlan(tuple(SmemField(f"f{i}", n * a, s, a) for i, (n, s, a) in enumerate(parts)))
    end = 0
    for f in plan.fields:
        at = plan.offset(f.name)
        assert at % f.align == 0 and end <= at < end + f.align
        end = at + f.size
    assert plan.field_bytes == end
