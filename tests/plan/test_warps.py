"""Warp plans: what is accepted, and what is refused with which numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fa_cute.errors import PlanError
from fa_cute.plan import Role, WarpPlan

FORWARD = (
    Role("softmax", 0, 8, 192, teams=2),
    Role("correction", 8, 12, 72),
    Role("mma", 12, 13, 56),
    Role("load", 13, 14, 56),
    Role("idle", 14, 16, 56),
)


def test_a_forward_plan() -> None:
    plan = WarpPlan(FORWARD, launch_regs=128)
    assert (plan.num_warps, plan.threads, plan.budget) == (16, 512, 65536)
    assert plan["mma"].threads == 32 and plan["softmax"].warps == range(8)
    assert plan.of_warp(9).name == "correction" and plan.changes_regs
    assert hash(plan) == hash(WarpPlan(FORWARD, 128))


@pytest.mark.parametrize(
    ("roles", "launch", "words"),
    [
        ((), 128, "at least one role"),
        ((Role("a", 0, 4, 128), Role("a", 4, 8, 128)), 128, r"roles \['a'\] are declared twice"),
        ((Role("a", 0, 4, 128), Role("b", 5, 8, 128)), 128, r"'b' has warps \[5, 8\); .*warp 4"),
        ((Role("a", 0, 0, 128),), 128, "contiguous and not empty"),
        ((Role("a", 1, 4, 128),), 128, "starts at warp 0"),
        ((Role("a", 0, 33, 24),), 24, "33 warps; a CTA has at most 32"),
        ((Role("a", 0, 4, 20),), 128, r"role 'a': 20 registers; a multiple of 8 in \[24, 256\]"),
        ((Role("a", 0, 4, 130),), 136, "130 registers"),
        ((Role("a", 0, 4, 264),), 128, "264 registers"),
        ((Role("a", 0, 4, 128),), 132, "launch_regs: 132 registers"),
        (
            (Role("a", 0, 4, 128), Role("b", 4, 6, 72), Role("c", 6, 8, 80)),
            128,
            r"warpgroup 1 mixes register budgets \[72, 80\]; setmaxnreg is per warpgroup",
        ),
        ((Role("a", 0, 4, 136), Role("b", 4, 6, 24)), 128, "warpgroup 1 incomplete.*add 2 idle"),
        (
            (Role("a", 0, 4, 200), Role("b", 4, 8, 64)),
            128,
            r"33792 of the roles exceeds 32768 at launch \(256 threads x 128\)",
        ),
        ((Role("a", 0, 16, 136),), 136, "register budget 69632 exceeds 65536 per SM"),
        ((Role("a", 0, 3, 128, teams=2),), 128, "3 warps in 2 teams; equal teams"),
    ],
)
def test_refused(roles: tuple[Role, ...], launch: int, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        WarpPlan(roles, launch)


def test_warpgroups_do_not_matter_when_nobody_changes_registers() -> None:
    """setmaxnreg is not issued then, so an incomplete warpgroup is fine."""
    plan = WarpPlan((Role("a", 0, 4, 168), Role("b", 4, 5, 168)), 168)
    assert not plan.changes_regs


def test_two_ctas_share_the_registers() -> None:
    roles = (Role("a", 0, 8, 128),)
    WarpPlan(roles, 128, ctas_per_sm=2)
    with pytest.raises(PlanError, match="98304 exceeds 65536"):
        WarpPlan(roles, 128, ctas_per_sm=3)


def test_unknown_names() -> None:
    plan = WarpPlan(FORWARD, 128)
    with pytest.raises(PlanError, match=r"no role 'epilogue'; roles: \['softmax', 'correction'"):
        plan["epilogue"]
    with pytest.raises(PlanError, match=r"no role has warp 16; warps: \[0, 16\)"):
        plan.of_warp(16)


@given(st.lists(st.tuples(st.integers(1, 8), st.sampled_from(range(24, 257, 8))), max_size=6))
def test_accepted_plans_keep_the_rules(parts: list[tuple[int, int]]) -> None:
    roles, at = [], 0
    for i, (warps, regs) in enumerate(parts):
        roles.append(Role(f"r{i}", at, at + warps, regs))
        at += warps
    try:
        plan = WarpPlan(tuple(roles), 128)
    except PlanError:
        return
    assert plan.budget <= 128 * plan.threads <= 65536
    for first in range(0, plan.num_warps if plan.changes_regs else 0, 4):
        assert len({plan.of_warp(w).regs for w in range(first, first + 4)}) == 1
    assert [plan.of_warp(w).name for r in roles for w in r.warps] == [
        r.name for r in roles for _ in r.warps
    ]
