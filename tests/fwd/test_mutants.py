"""Every broken synchronisation of the SM100 forward is noticed, or another wait implies it."""

from __future__ import annotations

import pytest

from fa_cute.sim import mutants
from fa_cute.sim.schedule import Schedule

# No mutant of these may be missed at all.
STRICT = (
    "no arrive",
    "no commit",
    "no bar.sync",
    "no wait::st",
    "expect_tx + 16",
    "expect_tx - 16",
)


@pytest.fixture(scope="module")
def result():
    pytest.importorskip("cutlass", reason="the kernel is compiled by NVIDIA's CuTe DSL")
    from benchmarks.mutants import SCHEDULES, forward_launch

    return mutants.campaign(forward_launch(), [Schedule.of(s) for s in SCHEDULES])


def test_the_launch_executes_every_synchronisation(result):
    assert len(result.executed) == len(result.outcomes) >= 100


def test_only_implied_waits_are_missed(result):
    from benchmarks.mutants import unexplained

    assert not unexplained(result)


def test_arrivals_barriers_bytes_and_stores_are_never_missed(result):
    assert not [str(m) for m in result.missed() if m.kind in STRICT]
