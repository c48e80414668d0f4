"""Put attention over parts of the keys together: ring attention, split keys, cached prefixes."""

from __future__ import annotations

import math

import torch

from .errors import ArgumentError

_WIDE = (torch.float32, torch.float64)


def merge_attention(outs, lses):
    """Attention over the union of disjoint sets of keys, from attention over each; differentiable.

    ``lse = log(sum_i exp(lse_i))`` and ``out = sum_i exp(lse_i - lse) out_i``, in float32 (float64
    where an input is). A row that sees no key in any part is 0 with lse -inf, as in every part.

    Args:
        outs: sequence of (batch, seqlen_q, heads, head_dim_v), or of packed sequences (total_q,
            heads, head_dim_v), one per part.
        lses: sequence of (batch, heads, seqlen_q), or (heads, total_q), float32 or float64, natural
            log.

    Returns:
        out in the dtype of the first part, lse in float32 (float64).

    Raises:
        ArgumentError: no parts, or parts that do not fit together; a ValueError.
    """
    outs, lses = list(outs), list(lses)
    _check(outs, lses)
    double = any(t.dtype == torch.float64 for t in (*outs, *lses))
    wide = torch.float64 if double else torch.float32
    parts = torch.stack([lse.to(wide) for lse in lses])  # (part, [batch,] heads, rows)
    largest = parts.detach().amax(0)
    blind = largest == -math.inf
    # Where nothing is seen, -inf - -inf would give NaN here and in the gradient.
    weights = torch.exp(parts - largest.masked_fill(blind, 0.0))
    total = weights.sum(0).masked_fill(blind, 1.0)
    lse = (largest.masked_fill(blind, 0.0) + torch.log(total)).masked_fill(blind, -math.inf)
    shares = (weights / total).transpose(-2, -1).unsqueeze(-1)  # (part, [batch,] rows, heads, 1)
    out = sum(share * out.to(wide) for share, out in zip(shares, outs))
    return out.to(outs[0].dtype), lse


def _check(outs, lses) -> None:
    def shown(tensors):
        return [
            tuple(t.shape) if isinstance(t, torch.Tensor) else type(t).__name__ for t in tensors
        ]

    def fail(what: str):
        raise ArgumentError(f"{what}; outs: {shown(outs)}, lses: {shown(lses)}")

    if not outs or len(outs) != len(lses):
        fail("merge_attention takes as many outs as lses, at least one")
    if not all(isinstance(t, torch.Tensor) for t in (*outs, *lses)):
        fail("outs and lses must be torch tensors")
    if outs[0].ndim not in (3, 4) or len({t.shape for t in outs}) > 1:
        fail("every out must be ([batch,] rows, heads, head_dim_v), the same for all parts")
    *batch, rows, heads, _ = outs[0].shape
    if any(t.shape != (*batch, heads, rows) for t in lses):
        fail("every lse must be ([batch,] heads, rows)")
    if any(t.dtype not in _WIDE for t in lses):
        fail("lses must be float32 or float64: those that flash_attn_func returns")
    if len({t.device for t in (*outs, *lses)}) > 1:
        fail("all parts must be on one device")
