"""The polynomial that stands for exp2: as near as a cubic gets, and exact at 0."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("cutlass.cute", reason="ops are written in NVIDIA's CuTe DSL")

from fa_cute.ops.exp2 import POLY3

T = np.arange(0, 1, 2.0**-16)


def error(coefficients) -> np.ndarray:
    """Relative error on T, every step rounded to fp32 as a fused multiply-add does."""
    c = [float(np.float32(x)) for x in coefficients]
    p = np.full_like(T, c[3])
    for x in c[2::-1]:
        p = np.float32(p * T + x).astype(np.float64)
    return p * np.exp2(-T) - 1


def test_error():
    """It moves a row's LSE by no more: its bar is 1e-4."""
    e = error(POLY3)
    assert e[0] == 0
    assert np.abs(e).max() < 8.57e-5
    assert abs(e.mean()) < 7.6e-6


def test_no_other_cubic_through_1_has_a_smaller_largest_error():
    """Its error reaches the largest size with alternating signs, once more than it has
    coefficients to choose: any other one would have to cross it too often.
    """
    e = error(POLY3)
    near = [i for i in range(len(T)) if abs(e[i]) > 0.997 * np.abs(e).max()]
    signs = [np.sign(e[i]) for i in near]
    assert 1 + sum(a != b for a, b in pairwise(signs)) == len(POLY3)
