"""How Hopper's tensor core adds, bit for bit.

The documents leave it open. This form gives the outputs of an H200 in all bits
(tests/sim/test_sums.py), which no other that was tried does (see benchmarks/NOTES.md): a wgmma of
16-bit operands adds 16 products and the accumulator at once. Products are exact; all 17 are shifted
to the largest exponent among them (a product's is the sum of its factors', whether or not its
significand reaches 2) and cut off two bits below the last one of fp32; the sum is cut to fp32.

`session(sums="hopper")` asks for it. It is some five times slower than a product in fp32, which is
the default: that differs from it in last bits only.
"""

from __future__ import annotations

import numpy as np

STEP = 16  # products that are added at once
SIGNIFICAND = 24  # bits of fp32
EXTRA = 2  # bits below them that take part
ROWS = 16  # of D at a time: the products of more would not stay in the cache
NOTHING = -(10**4)  # exponent of a zero


def hopper(a: np.ndarray, b: np.ndarray, d: np.ndarray) -> np.ndarray:
    """d + a b^T in fp32: a (M, K), b (N, K) of 16-bit values, d (M, N)."""
    out = d.astype(np.float32)
    for row in range(0, len(a), ROWS):
        rows = slice(row, row + ROWS)
        for k in range(0, a.shape[1], STEP):
            part = slice(k, k + STEP)
            out[rows] = _step(a[rows, part], b[:, part], out[rows])
    return out


def _step(a: np.ndarray, b: np.ndarray, d: np.ndarray) -> np.ndarray:
    """One addition of STEP products to d."""
    products = a[:, None, :] * b[None]  # exact in fp32: 11 bits times 11
    with np.errstate(invalid="ignore"):
        exponents = (np.frexp(x)[1] for x in (a, b))
        of_a, of_b = exponents
        of_products = np.where(products != 0, of_a[:, None, :] + of_b[None] - 1, NOTHING)
        of_d = np.where(d != 0, np.frexp(d)[1], NOTHING)
    largest = np.maximum(of_products.max(axis=-1), of_d)
    shift = np.where(largest == NOTHING, 0, SIGNIFICAND + EXTRA - largest)
    # Below 2^27 each, and whole: the sum is exact in fp64.
    whole = np.trunc(np.ldexp(products.astype(np.float64), shift[..., None]))
    total = whole.sum(axis=-1) + np.trunc(np.ldexp(d.astype(np.float64), shift))
    result = toward_zero(np.ldexp(total, -shift))
    odd = ~np.isfinite(result) | ~np.isfinite(d) | ~np.isfinite(products).all(axis=-1)
    if odd.any():
        with np.errstate(invalid="ignore"):
            result = np.where(odd, products.sum(axis=-1) + d, result)
    return result.astype(np.float32)


def toward_zero(x: np.ndarray) -> np.ndarray:
    """fp64 to fp32 by cutting off."""
    with np.errstate(over="ignore"):
        near = x.astype(np.float32)
    over = np.abs(near.astype(np.float64)) > np.abs(x)
    return np.where(over, np.nextafter(near, np.float32(0)), near)
