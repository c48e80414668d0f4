"""Hopper's additions: against whole numbers, and against what an H200 gave."""

from __future__ import annotations

import hashlib
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from fa_cute import ArgumentError, flash_attn_func, sim
from fa_cute.sim import sums
from fa_cute.sim.machine import Options
from tests.gpu.against_sim import CASES, inputs

# SHA-256 of the bits of `out` that an H200 computed (kernels of commit 3b1f1fd, driver 580.159,
# CUDA 13.0). Of the other three cases some bits differ: exp2 is not the chip's. A kernel that adds
# in another order has other bits: then they are to be recorded anew.
H200 = {
    2: "0801dbaeafdd5e044ccae5b721431f450a59fdd0dfb41f79b8f757015f0bfbc8",
    4: "5bdd471eb4b3bade987b884d6fc8b4360c537d6731959794a66ae0de6cda4342",
    5: "3437b1fadadc1278ca4465f25f20831bb4181d288adb64224b72e7c7b0f249c3",
}


@pytest.mark.parametrize("i", H200, ids=lambda i: str(CASES[i]))
def test_outputs_have_the_bits_of_an_h200(i):
    pytest.importorskip("cutlass", reason="the kernel is compiled by NVIDIA's CuTe DSL")
    q, k, v, _ = inputs(CASES[i], i)
    with sim.session("sm_90a", dsl=False, sums="hopper"):
        out = flash_attn_func(q, k, v, causal=CASES[i][-1])
    bits = out.view(torch.int16).numpy().tobytes()
    assert hashlib.sha256(bits).hexdigest() == H200[i]


def exponent(x: Fraction) -> int:
    """e of x = m 2^e with m in [0.5, 1)."""
    return math.frexp(float(x))[1]


def cut(x: Fraction, bits: int) -> Fraction:
    """Multiples of 2^bits, toward zero."""
    return Fraction(math.trunc(x / Fraction(2) ** bits)) * Fraction(2) ** bits


def one_sum(a, b, d) -> float:
    """The same addition in whole numbers, as the module says it."""
    pairs = [(Fraction(float(x)), Fraction(float(y))) for x, y in zip(a, b, strict=True)]
    seen = [exponent(x) + exponent(y) - 1 for x, y in pairs if x * y]
    seen += [exponent(Fraction(float(d)))] if d else []
    if not seen:
        return 0.0
    last = max(seen) - sums.SIGNIFICAND - sums.EXTRA
    total = sum(cut(x * y, last) for x, y in pairs) + cut(Fraction(float(d)), last)
    return float(cut(total, exponent(total) - sums.SIGNIFICAND)) if total else 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spread", [0, 6, 12])
def test_against_whole_numbers(dtype, spread):
    g = torch.Generator().manual_seed(spread)
    a, b = (
        (torch.randn(3, 32, generator=g) * 2.0 ** torch.randint(-spread, 1, (3, 32), generator=g))
        .to(dtype)
        .float()
        .numpy()
        for _ in range(2)
    )
    a[0, 3] = b[1, 5] = 0.0
    d = torch.randn(3, 3, generator=g).numpy()
    d[1, 1] = 0.0
    want = d.copy()
    for start in (0, sums.STEP):
        part = slice(start, start + sums.STEP)
        for i in range(3):
            for j in range(3):
                want[i, j] = one_sum(a[i, part], b[j, part], want[i, j])
    np.testing.assert_array_equal(sums.hopper(a, b, d), want)


def test_what_lies_below_is_cut_off():
    """Two bits below fp32's last take part, three do not, and nothing is rounded up."""
    a, b = np.zeros((1, 16), np.float32), np.ones((1, 16), np.float32)
    a[0, 0] = 1.0
    for below, want in ((24, 1.0), (25, 1.0), (26, 1.0)):
        a[0, 1:9] = 2.0**-below
        exact = 1.0 + 8 * 2.0**-below
        found = float(sums.hopper(a, b, np.zeros((1, 1), np.float32))[0, 0])
        assert found == (exact if below <= 25 else want)
    a[0, 1:] = 0.0
    assert sums.hopper(a, b, np.full((1, 1), -1.0, np.float32)) == 0.0
    assert np.isinf(sums.hopper(a, b, np.full((1, 1), np.inf, np.float32)))
    assert np.isnan(sums.hopper(a, b, np.full((1, 1), np.nan, np.float32)))


def test_no_other_name():
    with pytest.raises(ArgumentError, match="allowed: fast, hopper"):
        Options(sums="volta")
