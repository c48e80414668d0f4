"""Each inline instruction, and what is built from them, in the simulator against numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fa_cute.fwd.args import Exp2Split

pytest.importorskip("cutlass", reason="kernels are compiled by NVIDIA's CuTe DSL")

SPECIAL = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-40, -126.5, -127.0, -300.0, 7.9]
EX2_ULP = 2  # PTX ISA, ex2.approx.ftz
POLY_ERROR = 9e-5  # relative, the degree 3 minimax polynomial
MAGIC = 12582912.0  # 1.5 * 2**23


def run(name, *tensors):
    """Compile a kernel of `ptx_kernels` and run it once on the simulator; returns its PTX."""
    import cutlass.cute as cute

    from fa_cute.sim import host
    from tests.ops import ptx_kernels

    with host.session("sm_100a"):
        compiled = cute.compile(
            getattr(ptx_kernels, name),
            *map(_stand_in, tensors),
            options="--enable-tvm-ffi --gpu-arch sm_100a",
        )
        compiled(*tensors)
        return host.function_of(compiled).ptx


def _stand_in(x):
    """What the kernel is traced with in place of an argument."""
    import cutlass
    from cutlass.cute.runtime import make_fake_compact_tensor

    if isinstance(x, float):
        return cutlass.Float32(x)
    dtype = {torch.float32: cutlass.Float32, torch.int32: cutlass.Int32}[x.dtype]
    order = tuple(reversed(range(x.ndim)))
    return make_fake_compact_tensor(dtype, tuple(x.shape), stride_order=order, assumed_align=4)


@pytest.fixture(scope="module")
def values():
    """Inputs a, b, c and what every function made of them."""
    g = np.random.default_rng(0)
    n = 512
    a = (g.standard_normal(n) * 20).astype(np.float32)
    b = (g.standard_normal(n) * 20).astype(np.float32)
    c = (g.standard_normal(n) * 20).astype(np.float32)
    for i, (x, y) in enumerate((x, y) for x in SPECIAL for y in SPECIAL):
        a[i], b[i] = x, y
    # add_exponent wants a fraction and a float whose low bits are the exponent
    a[256:] = 1 + g.random(n - 256, dtype=np.float32)
    b[256:] = MAGIC + np.round(g.uniform(-100, 100, n - 256)).astype(np.float32)
    out = torch.full((6, n), math.nan)
    bits = torch.full((3, n), -1, dtype=torch.int32)
    ptx = run("functions", *(torch.from_numpy(x) for x in (a, b, c)), out, bits)
    names = ("max3", "add_exponent", "ex2_ftz", "lg2_ftz", "exp2_x", "exp2_y")
    made = dict(zip(names, out.numpy(), strict=True)) | {
        "low_ones": bits[0].numpy(),
        "high_ones": bits[1].numpy(),
        "unknown_zero": bits[2].numpy(),
    }
    return {"a": a, "b": b, "c": c, "ptx": ptx} | made


def test_max3_ignores_nan(values):
    want = np.fmax(np.fmax(values["a"], values["b"]), values["c"])
    np.testing.assert_array_equal(values["max3"], want)
    assert np.isnan(values["a"]).any()


def test_ex2_is_within_its_documented_error_and_flushes(values):
    with np.errstate(over="ignore"):
        want = np.exp2(values["a"].astype(np.float64))
    want[want < 2.0**-126] = 0
    got = values["ex2_ftz"].astype(np.float64)
    finite = np.isfinite(want) & (want > 0) & (want < 2.0**128)
    assert np.abs(got / np.where(finite, want, 1) - 1)[finite].max() <= EX2_ULP * 2.0**-23
    np.testing.assert_array_equal(got[want == 0], 0)
    assert np.isnan(got[np.isnan(values["a"])]).all()


def test_lg2(values):
    with np.errstate(divide="ignore", invalid="ignore"):
        want = np.log2(np.where(np.abs(values["a"]) < 2.0**-126, 0, values["a"]).astype(np.float64))
    got = values["lg2_ftz"].astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=0, atol=2.0**-21 * 8)


def test_add_exponent_scales_by_the_low_bits(values):
    part = slice(256, None)
    exponent = values["b"][part].astype(np.float64) - MAGIC
    want = values["a"][part] * np.exp2(exponent)
    np.testing.assert_array_equal(values["add_exponent"][part].astype(np.float64), want)


def test_words_of_ones(values):
    n = np.arange(512) - 8
    # The instruction reads the count as unsigned and stops at 32.
    want = [0xFFFFFFFF >> k if 0 <= k < 32 else 0 for k in n]
    np.testing.assert_array_equal(values["low_ones"].view(np.uint32), want)
    want = [0xFFFFFFFF << k & 0xFFFFFFFF if 0 <= k < 32 else 0 for k in n]
    np.testing.assert_array_equal(values["high_ones"].view(np.uint32), want)


def test_the_unknown_zero_is_zero(values):
    assert not values["unknown_zero"].any()


def test_fences_are_emitted_once(values):
    for which in ("before", "after"):
        assert values["ptx"].count(f"tcgen05.fence::{which}_thread_sync") == 1


@pytest.mark.parametrize("name, argument", [("exp2_x", "a"), ("exp2_y", "b")])
def test_polynomial_exponential(values, name, argument):
    x = values[argument][:256].astype(np.float64)
    got = values[name][:256].astype(np.float64)
    usual = (x > -126) & (x < 100)
    assert np.abs(got / np.exp2(x, where=usual, out=np.ones_like(x)) - 1)[usual].max() < POLY_ERROR
    assert (got[x <= -127] == 0).all()  # a masked score weighs exactly nothing
    assert (got[np.isnan(x)] > 3e38).all()  # too large for a sum or 16 bits: it shows


@pytest.mark.parametrize("period, emulated, start", [(0, 4, 0), (10, 4, 1), (16, 4, 1), (8, 4, 0)])
def test_split_takes_whole_pairs_and_never_the_last_group(period, emulated, start):
    split = Exp2Split(period, emulated, start)
    taken = [i for i in range(128) if split.polynomial(i, 128)]
    assert bool(taken) == bool(period)
    assert all(32 * start <= i < 96 for i in taken)
    assert all(split.polynomial(i, 128) == split.polynomial(i ^ 1, 128) for i in range(128))


@pytest.fixture(scope="module", params=[0.125 * math.log2(math.e), 2.0**-120])
def row_values(request):
    """Rows of scores, their running maxima, and what the row functions made of them."""
    g = np.random.default_rng(1)
    x = (g.standard_normal((128, 128)) * 30).astype(np.float32)
    old = (g.standard_normal(128) * 60).astype(np.float32)
    x[:8] = -math.inf  # rows without a key in this block
    x[8:16, 3::7] = -math.inf
    old[:4] = old[8:12] = -math.inf  # and without one before
    stats = torch.full((5, 128), math.nan)
    scaled = torch.full((128, 128), math.nan)
    scale = np.float32(request.param)
    run("rows", torch.from_numpy(x), torch.from_numpy(old), stats, scaled, float(scale))
    return x, old, scale, stats.numpy(), scaled.numpy()


def test_row_statistics(row_values):
    x, old, scale, (new, total, maximum, factor, lse), scaled = row_values
    want_new = np.maximum(x.max(1), old)
    np.testing.assert_array_equal(new, want_new)
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(total, x.sum(1, dtype=np.float64) + old, rtol=1e-4, atol=1e-3)
        shift = np.where(np.isinf(want_new), -np.inf, (old - want_new) * scale)
    kept = shift >= -8
    np.testing.assert_array_equal(maximum, np.where(kept, old, want_new))
    np.testing.assert_allclose(factor, np.where(kept, 1, np.exp2(shift)), rtol=1e-6)
    reference = np.where(np.isinf(maximum), 0, maximum)[:, None]
    want = x.astype(np.float64) * scale - reference.astype(np.float64) * scale
    np.testing.assert_allclose(scaled, want, rtol=1e-5, atol=1e-5 * scale)
    assert not np.isnan(scaled).any()
    total_in = np.maximum(old, 0).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        want_lse = np.where(
            total_in > 0, (want_new * float(scale) + np.log2(total_in)) * math.log(2), -np.inf
        )
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)
