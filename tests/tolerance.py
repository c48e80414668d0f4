"""The one bar that all numeric tests use.

An output may be wrong by at most twice what torch itself is wrong when it computes the same thing
in the same dtype, plus what rounding the exact result to that dtype already costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fa_cute import reference

LSE_ATOL = 1e-4
FACTOR = 2.0


@dataclass(frozen=True)
class Error:
    """Largest absolute errors of one comparison, and the bar."""

    out: float  # ours against float64
    torch_out: float  # torch in the same dtype against float64
    atol: float
    lse: float

    @property
    def bar(self) -> float:
        return FACTOR * self.torch_out + self.atol

    def __str__(self) -> str:
        return (
            f"out error {self.out:.3e}, bar {self.bar:.3e} (torch {self.torch_out:.3e}, "
            f"atol {self.atol:.1e}); lse error {self.lse:.3e}, bar {LSE_ATOL:.0e}"
        )


def rounding(exact: torch.Tensor, dtype: torch.dtype) -> float:
    """Twice the largest error that storing ``exact`` in ``dtype`` makes."""
    return 2 * worst(exact.to(dtype), exact)


def worst(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest absolute difference; infinite where exactly one side is not finite or is NaN."""
    got, want = got.double(), want.double()
    if got.numel() == 0:
        return 0.0
    same = got == want  # also equal infinities
    difference = (got - want).abs().masked_fill(same, 0.0)
    return math.inf if difference.isnan().any() else difference.max().item()


def measure(out, lse, q, k, v, softmax_scale=None, causal=False, window=(None, None)) -> Error:
    """Compare a forward with float64, and torch in the dtype of q with float64."""
    call = (q, k, v, softmax_scale, causal)
    exact, exact_lse = reference.attention(*call, window=window, dtype=torch.float64)
    ours_in_torch, _ = reference.attention(*call, window=window, dtype=None)
    return Error(
        out=worst(out, exact),
        torch_out=worst(ours_in_torch, exact),
        atol=rounding(exact, q.dtype),
        lse=worst(lse, exact_lse),
    )


def assert_close_to_reference(
    out, lse, q, k, v, softmax_scale=None, causal=False, window=(None, None)
) -> Error:
    """Fail unless output and LSE meet the bar; rows without keys must be exactly 0 and -inf."""
    error = measure(out, lse, q, k, v, softmax_scale, causal, window)
    assert error.out <= error.bar, f"out: {error}"
    assert error.lse <= LSE_ATOL, f"lse: {error}"
    right = 0 if causal else window[1]
    blind = 0 if right is None else q.shape[1] - k.shape[1] - right
    if blind > 0:
        assert (out[:, :blind] == 0).all(), "rows without keys must be 0"
        assert (lse[..., :blind] == -math.inf).all(), "the lse of rows without keys must be -inf"
    return error
