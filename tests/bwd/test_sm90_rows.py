"""Which row of the Hopper backward's tables a problem takes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from fa_cute import arch, tune
from fa_cute.bwd.args import BwdSpec
from fa_cute.bwd.sm90 import plan
from fa_cute.ops.mask import Band

HOPPER = arch.get("sm_90a")
LEFT, RIGHT, BOTH = (True, False), (False, True), (True, True)


@dataclass(frozen=True)
class Mine(Band):
    """A causal mask that says so by itself."""

    right: int = 0

    def q_bounds(self, k, seqlen_q, seqlen_k):
        return super().q_bounds(k, seqlen_q, seqlen_k)


def spec_of(head_dim: int, causal: bool = False, **options) -> BwdSpec:
    return BwdSpec("bf16", head_dim, head_dim, causal, **options)


@pytest.mark.parametrize(
    ("spec", "row"),
    [
        (spec_of(128, True), plan.REGULAR[128, False, True]),
        (spec_of(128, varlen=True), plan.LISTED[128, False, False]),
        (spec_of(96, varlen=True), plan.REGULAR[96, False, False]),
        (spec_of(64, window=LEFT), plan.WINDOWS[64, False]),
        (spec_of(128, window=BOTH, deterministic=True), plan.WINDOWS[128, True]),
        (spec_of(128, True, window=LEFT, varlen=True), plan.WINDOWS[128, False]),
        (
            spec_of(128, window=RIGHT, varlen=True, deterministic=True),
            plan.LISTED_WINDOWS[128, True],
        ),
        (spec_of(64, True, custom=Mine()), plan.OWN[64, False]),
        (spec_of(256, window=BOTH), {}),
    ],
)
def test_the_row_of_a_problem(spec: BwdSpec, row: dict) -> None:
    assert plan.tuned(spec, spec.head_dim) == row
    cfg = plan.config(spec)
    assert all(getattr(cfg, name) == value for name, value in row.items())


@pytest.mark.parametrize(
    ("spec", "in_order"),
    [
        (spec_of(128, True, varlen=True), True),
        (spec_of(128, True), False),
        (spec_of(128, varlen=True), False),
        (spec_of(64, True, varlen=True), False),
        (spec_of(128, True, varlen=True, qhead_per_kvhead=2), False),
        (spec_of(64, window=LEFT), True),
        (spec_of(128, window=BOTH, varlen=True), True),
        (spec_of(128, window=BOTH, qhead_per_kvhead=2), False),
        (spec_of(96, window=BOTH), False),
        (BwdSpec("bf16", 128, 64, False, window=BOTH), False),
        (spec_of(128, True, custom=Mine(), varlen=True), False),
    ],
)
def test_what_is_in_order_without_being_asked(spec: BwdSpec, in_order: bool) -> None:
    """Where that kernel is at least as fast (NOTES), gradients are repeatable all the same."""
    assert tune.preferred(spec, HOPPER).deterministic == in_order


@pytest.mark.parametrize(
    ("spec", "alone"),
    [
        (spec_of(128, varlen=True), True),
        (spec_of(64, varlen=True), True),
        (spec_of(96, True, varlen=True, window=LEFT), True),
        (spec_of(128), False),
        (spec_of(128, varlen=True, deterministic=True), False),
        (spec_of(64, True, varlen=True), False),  # the first stores
        (spec_of(256, varlen=True), False),  # from the registers
        (spec_of(128, True, custom=Mine(), varlen=True), False),
    ],
)
def test_where_the_only_kv_block_of_a_dq_tile_stores(spec: BwdSpec, alone: bool) -> None:
    assert plan.config(spec).stores_alone(spec) == alone
