"""The SM90 forward, executed from its PTX, against float64."""

from __future__ import annotations

import pytest
import torch

from fa_cute import flash_attn_func

from . import tolerance
from .test_forward_sim import poisoned_outputs, qkv  # noqa: F401  (a fixture)

pytest.importorskip("cutlass", reason="the kernel is compiled by NVIDIA's CuTe DSL")
BF16, FP16 = torch.bfloat16, torch.float16

# (seqlens, heads, (head_dim, head_dim_v), dtype, causal)
CASES = [
    ((1, 1), (2, 2), (64, 64), BF16, False),
    ((3, 513), (2, 1), (64, 64), BF16, True),
    ((239, 1), (2, 2), (64, 64), FP16, False),
    ((113, 203), (8, 2), (64, 64), BF16, True),
    ((799, 3), (1, 1), (64, 64), BF16, True),
    ((640, 128), (1, 1), (64, 64), BF16, False),
    ((64, 800), (3, 1), (64, 64), BF16, True),
    ((1023, 1024), (1, 1), (64, 64), BF16, True),
    ((255, 256), (3, 1), (128, 128), BF16, True),
    ((128, 217), (4, 1), (128, 128), FP16, False),
    ((512, 256), (2, 2), (128, 128), BF16, True),
    ((1, 339), (2, 2), (128, 128), BF16, True),
    ((108, 256), (2, 1), (96, 96), BF16, True),
    ((130, 150), (1, 1), (72, 40), BF16, True),
    ((200, 300), (2, 1), (192, 128), BF16, True),
    ((140, 210), (1, 1), (192, 192), FP16, False),
    ((130, 200), (1, 1), (256, 256), BF16, True),
]


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    monkeypatch.setenv("FA_CUTE_ARCH", "sm_90a")


def inputs(seqlens, heads, head_dims, dtype):
    q, k, v = qkv(seqlens, heads, max(head_dims), dtype)
    return [t[..., :d].contiguous() for t, d in zip((q, k, v), (*head_dims[:1] * 2, head_dims[1]))]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case):
    seqlens, heads, head_dims, dtype, causal = case
    q, k, v = inputs(seqlens, heads, head_dims, dtype)
    out, lse = flash_attn_func(q, k, v, causal=causal, return_lse=True, backend="sim")
    tolerance.assert_close_to_reference(out, lse, q, k, v, causal=causal)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_same_bits_in_every_schedule(causal, monkeypatch):
    q, k, v = inputs((300, 400), (2, 1), (64, 64), BF16)
    want = None
    for schedule in ("early", "late", *(f"random:{seed}" for seed in range(8))):
        monkeypatch.setenv("FA_CUTE_SIM_SCHEDULE", schedule)
        got = flash_attn_func(q, k, v, causal=causal, return_lse=True, backend="sim")
        want = want or got
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]), schedule


@pytest.mark.parametrize("scale", [-0.3, -3.0, 0.0])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_scales_that_are_not_positive(scale, causal):
    q, k, v = inputs((140, 260), (2, 1), (64, 64), BF16)
    out, lse = flash_attn_func(q, k, v, scale, causal, return_lse=True, backend="sim")
    tolerance.assert_close_to_reference(out, lse, q, k, v, scale, causal=causal)


def test_a_negative_scale_and_growing_scores():
    # Scores of the block that comes last exceed what those before left as reference.
    q, k, v = inputs((200, 256), (1, 1), (64, 64), BF16)
    q.abs_()
    k = -k.abs()
    k[:, :16] *= 8
    out, lse = flash_attn_func(q, k, v, -1.0, return_lse=True, backend="sim")
    error = tolerance.measure(out, lse, q, k, v, -1.0)
    # fp32 carries an LSE of some hundreds only to four digits behind the point.
    assert error.out <= error.bar
    assert error.lse <= tolerance.LSE_ATOL + 2e-7 * lse.abs().max().item(), str(error)


def test_rows_without_keys_are_zero_whatever_v_holds():
    q, k, v = inputs((200, 100), (1, 1), (64, 64), BF16)
    v[0, 0, 0, 3], v[0, 90, 0, 4] = float("nan"), float("inf")
    out = flash_attn_func(q, k, v, causal=True, backend="sim")
    assert (out[:, :100] == 0).all()
    assert out[0, 100:, 0, 3].isnan().all()
