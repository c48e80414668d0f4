"""The helpers that masks and schedulers are written with."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from fa_cute.ops.arith import at_most, ceil_div, hi, lo
from fa_cute.ops.score import LN_2, LOG2_E

ints = st.integers(-(2**31), 2**31 - 1)


@given(ints, ints)
def test_lo_hi_at_most(a: int, b: int) -> None:
    assert (lo(a, b), hi(a, b), at_most(a, b)) == (min(a, b), max(a, b), int(a <= b))


@given(st.integers(0, 10**6), st.integers(1, 1000))
def test_ceil_div(a: int, b: int) -> None:
    assert (ceil_div(a, b) - 1) * b < a <= ceil_div(a, b) * b


def test_units_of_the_exponent() -> None:
    assert abs(2 ** (LOG2_E * 3.0) - math.exp(3.0)) < 1e-12
    assert abs(LOG2_E * LN_2 - 1.0) < 1e-15
