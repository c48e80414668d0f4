"""The plain-torch reference against torch's own attention and against autograd."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from fa_cute.reference import attention, gradients, keep_mask


def qkv(seqlen_q, seqlen_k, heads=4, heads_kv=2, head_dim=16, head_dim_v=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = ((seqlen_q, heads, head_dim), (seqlen_k, heads_kv, head_dim))
    q, k = (torch.randn(2, *s, generator=g, dtype=torch.float64) for s in shapes)
    v = torch.randn(2, seqlen_k, heads_kv, head_dim_v, generator=g, dtype=torch.float64)
    return q, k, v


SEQLENS = [(1, 1), (5, 5), (3, 7), (7, 3), (1, 9), (9, 1)]


@pytest.mark.parametrize("seqlen_q,seqlen_k", SEQLENS)
@pytest.mark.parametrize(
    "causal,window", [(False, (None, None)), (True, (None, None)), (False, (2, 1))]
)
def test_attention_matches_sdpa(seqlen_q, seqlen_k, causal, window):
    q, k, v = qkv(seqlen_q, seqlen_k)
    out, lse = attention(q, k, v, 0.3, causal, window=window, dtype=torch.float64)
    keep = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    for i in range(seqlen_q):
        for j in range(seqlen_k):
            d = j - (i + seqlen_k - seqlen_q)
            keep[i, j] = (not causal or d <= 0) and (
                window[0] is None or -window[0] <= d <= window[1]
            )
    want = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=keep, scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    seen = keep.any(1)
    torch.testing.assert_close(out[:, seen], want[:, seen], rtol=1e-12, atol=1e-12)
    assert (out[:, ~seen] == 0).all()
    assert (lse[..., ~seen] == -math.inf).all()
    s = torch.einsum("bqhd,bkhd->bhqk", q * 0.3, k.repeat_interleave(2, 2)).masked_fill(
        ~keep, -math.inf
    )
    torch.testing.assert_close(lse, torch.logsumexp(s, -1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seqlen_q,seqlen_k", SEQLENS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_gradients_match_autograd(seqlen_q, seqlen_k, causal, softcap):
    q, k, v = (x.requires_grad_() for x in qkv(seqlen_q, seqlen_k))
    out, lse = attention(q, k, v, 0.7, causal, softcap=softcap, dtype=torch.float64)
    g = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=g, dtype=out.dtype)
    dlse = torch.randn(lse.shape, generator=g, dtype=lse.dtype).masked_fill(lse == -math.inf, 0)
    loss = (out * dout).sum() + (lse.masked_fill(lse == -math.inf, 0) * dlse).sum()
    want = torch.autograd.grad(loss, (q, k, v))
    got = gradients(dout, q, k, v, 0.7, causal, dlse=dlse, softcap=softcap)
    for name, a, b in zip("qkv", got, want):
        assert not b.isnan().any(), f"autograd d{name}"
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"d{n}: {m}")


def test_sink_is_one_more_logit_without_a_value():
    q, k, v = qkv(5, 6)
    sink = torch.tensor([0.5, -1.0, 2.0, -math.inf], dtype=torch.float32)
    out, lse = attention(q, k, v, 0.3, causal=True, sink=sink, dtype=torch.float64)
    s = torch.einsum("bqhd,bkhd->bhqk", q * 0.3, k.repeat_interleave(2, 2))
    s = s.masked_fill(~keep_mask(5, 6, True, (None, None)), -math.inf)
    s = torch.cat([s, sink.double().view(1, 4, 1, 1).expand(2, 4, 5, 1)], -1)
    want = torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1)[..., :-1], v.repeat_interleave(2, 2))
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, torch.logsumexp(s, -1), rtol=1e-12, atol=1e-12)


def test_no_keys_at_all():
    q, k, v = qkv(3, 0)
    out, lse = attention(q, k, v)
    assert out.shape == (2, 3, 4, 8) and (out == 0).all()
    assert (lse == -math.inf).all()
    _, lse = attention(q, k, v, sink=torch.arange(4.0))
    assert (lse == torch.arange(4.0)[:, None]).all()


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_scales_of_any_sign(scale):
    q, k, v = qkv(4, 4)
    out, _ = attention(q, k, v, scale, causal=True, dtype=torch.float64)
    want = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, scale=scale, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
