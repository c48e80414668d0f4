"""Windows in the Hopper backward: the limits come at run time, so one kernel per kind of band."""

from __future__ import annotations

import math

import pytest
import torch

from fa_cute.bwd.args import BwdSpec
from fa_cute.sim import host

from .test_sm90_sim import HOPPER, SCHEDULES, Case, poisoned_outputs  # noqa: F401  (a fixture)

pytest.importorskip("cutlass", reason="the kernels are compiled by NVIDIA's CuTe DSL")

# Lengths and limits: one row; cut ends; keys that no query sees, and queries that see no key; bands
# narrower than a block, and wide enough for blocks without an element mask.
PROBLEMS = (
    (1, 1, 0, 1),
    (70, 300, 20, 9),
    (300, 70, 9, 20),
    (330, 410, 260, 150),
)


def spec_of(head_dim, kind, dtype="bf16", causal=False, **options):
    """``kind``: which sides have a limit, of "lr"."""
    return BwdSpec(dtype, head_dim, head_dim, causal, window=("l" in kind, "r" in kind), **options)


def case_of(spec, sq, sk, left, right, **options):
    right = 0 if spec.causal else right if spec.window[1] else None
    return Case(spec, sq, sk, window=(left if spec.window[0] else None, right), **options)


@pytest.mark.parametrize(
    ("head_dim", "kind", "options"),
    [
        (64, "lr", {}),
        (64, "r", {"qhead_per_kvhead": 2, "dtype": "fp16"}),
        (128, "lr", {"dtype": "fp16", "qhead_per_kvhead": 2}),
        (128, "l", {"causal": True}),
        (256, "lr", {}),
    ],
)
def test_against_float64(head_dim, kind, options):
    spec = spec_of(head_dim, kind, **options)
    for problem in PROBLEMS:
        case_of(spec, *problem, heads_kv=2 if problem[0] == 70 else 1).check()


@pytest.mark.parametrize(
    ("head_dim", "kind", "options"),
    [
        (64, "lr", {"qhead_per_kvhead": 2}),
        (64, "l", {}),
        (128, "lr", {}),
        (256, "l", {"causal": True}),
    ],
)
def test_deterministic_bits_under_any_schedule(head_dim, kind, options, monkeypatch):
    case = case_of(spec_of(head_dim, kind, deterministic=True, **options), 250, 420, 150, 40)
    case.check()
    first = case.run()
    for schedule in SCHEDULES:
        monkeypatch.setenv("FA_CUTE_SIM_SCHEDULE", schedule)
        for a, b in zip(first, case.run(), strict=True):
            assert torch.equal(a, b), schedule


@pytest.mark.parametrize("resident", [1, 2])
def test_no_deadlock_with_few_ctas_at_a_time(resident):
    """A limit on the right: turns are taken, and CTAs launched, from the last keys down."""
    case = case_of(spec_of(64, "lr", deterministic=True, qhead_per_kvhead=2), 250, 420, 150, 40)
    with host.session(HOPPER, dsl=False, resident=resident):
        limited = case.run()
    for a, b in zip(limited, case.run(), strict=True):
        assert torch.equal(a, b)


def test_blocks_outside_the_band_are_not_visited():
    """NaN in dout spreads over whole blocks (0 * NaN in dS), but not to blocks out of sight."""
    case = case_of(spec_of(64, "lr"), 512, 512, 40, 20)
    case.dout[:, 384:] = math.nan
    for gradient in case.run()[1:]:
        assert gradient[:, :256].isfinite().all()
        assert gradient[:, 384:].isnan().any()
