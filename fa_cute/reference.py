"""Attention and its gradient in plain torch: what every kernel is compared with.

``attention`` is also the backend "reference": it runs anywhere, needs no DSL and differentiates.
Scores are materialised, so memory grows with seqlen_q * seqlen_k.
"""

from __future__ import annotations

import torch

Window = tuple[int | None, int | None]
NO_WINDOW: Window = (None, None)


def keep_mask(seqlen_q: int, seqlen_k: int, causal: bool, window: Window, device=None):
    """(seqlen_q, seqlen_k) bool, True where query i may see key j; None when it may see all.

    Aligned bottom-right: the last query stands at the last key.
    """
    left, right = window
    if causal:
        right = 0 if right is None else min(right, 0)
    if left is None and right is None:
        return None
    diagonal = torch.arange(seqlen_q, device=device)[:, None] + (seqlen_k - seqlen_q)
    key = torch.arange(seqlen_k, device=device)[None, :]
    keep = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if left is not None:
        keep &= key >= diagonal - left
    if right is not None:
        keep &= key <= diagonal + right
    return keep


def _scores(q, k, scale: float, causal: bool, window: Window, softcap: float):
    """Masked scores (batch, heads_kv, qhead_per_kvhead, seqlen_q, seqlen_k) and the keep mask."""
    seqlen_q, heads = q.shape[1:3]
    seqlen_k, heads_kv = k.shape[1:3]
    grouped = q.unflatten(2, (heads_kv, heads // heads_kv))
    s = torch.einsum("bqhrd,bkhd->bhrqk", grouped * scale, k)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    keep = keep_mask(seqlen_q, seqlen_k, causal, window, q.device)
    if keep is not None:
        s = s.masked_fill(~keep, float("-inf"))
    return s, keep


def attention(
    q,
    k,
    v,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    window: Window = NO_WINDOW,
    softcap: float = 0.0,
    sink=None,
    dtype: torch.dtype | None = torch.float32,
):
    """``softmax(q k^T * softmax_scale) v`` and its log-sum-exp, differentiable by autograd.

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        k, v: (batch, seqlen_k, heads_kv, head_dim / head_dim_v).
        sink: (heads,) a logit per head that takes part in the sum only, or None.
        dtype: all products and the probabilities are computed and rounded in it; None for q's own.
            The row statistics use float32, or float64 if that is what ``dtype`` says.

    Returns:
        out (batch, seqlen_q, heads, head_dim_v) in ``dtype``; lse (batch, heads, seqlen_q), natural
        log, float32 (float64). Rows that see no key are 0, their lse -inf (or the sink's logit).
    """
    dtype = q.dtype if dtype is None else dtype
    stats = torch.float64 if dtype == torch.float64 else torch.float32
    batch, seqlen_q, heads, head_dim = q.shape
    heads_kv = k.shape[2]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    s, _ = _scores(q.to(dtype), k.to(dtype), scale, causal, window, softcap)
    s = s.to(stats)
    logit = None
    if sink is not None:
        logit = sink.to(stats).view(1, heads_kv, heads // heads_kv, 1, 1)
    row_max = _row_max(s, logit)
    p = torch.exp(s - row_max)
    row_sum = p.sum(-1, keepdim=True)
    if logit is not None:
        row_sum = row_sum + torch.exp(logit - row_max)
    empty = row_sum == 0
    row_sum = row_sum.masked_fill(empty, 1.0)  # keeps NaN out of the gradient of rows without keys
    p = (p / row_sum).to(dtype)
    out = torch.einsum("bhrqk,bkhd->bqhrd", p, v.to(dtype)).flatten(2, 3)
    lse = (row_max + torch.log(row_sum)).masked_fill(empty, float("-inf"))
    return out, lse.reshape(batch, heads, seqlen_q)


def _row_max(s, logit):
    """The largest score of each row (0 where there is none), without gradient."""
    s = s.detach()
    m = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), float("-inf"))
    if logit is not None:
        m = torch.maximum(m, logit.detach())
    return m.masked_fill(m == float("-inf"), 0.0)


def gradients(
    dout,
    q,
    k,
    v,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    dlse=None,
    window: Window = NO_WINDOW,
    softcap: float = 0.0,
    dtype: torch.dtype = torch.float64,
):
    """(dq, dk, dv) by the formulas that the backward kernels follow, not by autograd.

    With P = exp(S - lse) and D = rowsum(dout * out) - dlse:  dV = P^T dO,  dS = P * (dO V^T - D),
    dQ = scale * dS K,  dK = scale * dS^T Q. Softcap multiplies dS by 1 - (S / softcap)^2.
    """
    out, lse = attention(
        q, k, v, softmax_scale, causal, window=window, softcap=softcap, dtype=dtype
    )
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    q, k, v, dout = (x.to(dtype) for x in (q, k, v, dout))
    heads, heads_kv = q.shape[2], k.shape[2]
    groups = (heads_kv, heads // heads_kv)
    s, keep = _scores(q, k, scale, causal, window, softcap)
    lse = lse.to(dtype).unflatten(1, groups)[..., None]
    p = torch.exp(s - lse.masked_fill(lse == float("-inf"), 0.0))
    do = dout.unflatten(2, groups)
    delta = (do * out.unflatten(2, groups)).sum(-1).permute(0, 2, 3, 1)[..., None]
    if dlse is not None:
        delta = delta - dlse.to(dtype).unflatten(1, groups)[..., None]
    dv = torch.einsum("bhrqk,bqhrd->bkhd", p, do)
    ds = p * (torch.einsum("bqhrd,bkhd->bhrqk", do, v) - delta)
    if softcap:
        cap = 1 - (s / softcap) ** 2
        ds = ds * (cap if keep is None else cap.masked_fill(~keep, 0.0))
    dq = torch.einsum("bhrqk,bkhd->bqhrd", ds, k).flatten(2, 3) * scale
    dk = torch.einsum("bhrqk,bqhrd->bkhd", ds, q.unflatten(2, groups)) * scale
    return dq, dk, dv


def attention_of_sequences(q, k, v, sequences, *args, dtype=torch.float32, **options):
    """`attention` of each sequence by itself, rows of all of them one after the other.

    Args:
        q, k, v: (rows, heads, head_dim), (rows, heads_kv, head_dim / head_dim_v).
        sequences: (offset_q, len_q, offset_k, len_k) of each.
        args, dtype, options: as in `attention`.

    Returns:
        out (rows, heads, head_dim_v), lse (heads, rows); 0 and -inf in rows of no sequence.
    """
    dtype = q.dtype if dtype is None else dtype
    out = q.new_zeros((*q.shape[:2], v.shape[2]), dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    lse = q.new_full((q.shape[1], q.shape[0]), float("-inf"), dtype=wide)
    for rows_q, rows_k in _rows(sequences):
        own = (q[rows_q][None], k[rows_k][None], v[rows_k][None])
        part, part_lse = attention(*own, *args, dtype=dtype, **options)
        out[rows_q], lse[:, rows_q] = part[0], part_lse[0]
    return out, lse


def gradients_of_sequences(dout, q, k, v, sequences, *args, dlse=None, **options):
    """`gradients` of each sequence by itself, ``dlse`` (heads, rows); 0 in rows of no sequence."""
    dtype = options.get("dtype", torch.float64)
    found = tuple(t.new_zeros(t.shape, dtype=dtype) for t in (q, k, v))
    for rows_q, rows_k in _rows(sequences):
        own = (dout[rows_q][None], q[rows_q][None], k[rows_k][None], v[rows_k][None])
        of_lse = None if dlse is None else dlse[None, :, rows_q]
        parts = gradients(*own, *args, dlse=of_lse, **options)
        for whole, rows, part in zip(found, (rows_q, rows_k, rows_k), parts, strict=True):
            whole[rows] = part[0]
    return found


def _rows(sequences):
    """Rows of q and of k of each sequence; at least of an empty one, which autograd sees too."""
    for offset_q, len_q, offset_k, len_k in sequences or [(0, 0, 0, 0)]:
        yield slice(offset_q, offset_q + len_q), slice(offset_k, offset_k + len_k)
