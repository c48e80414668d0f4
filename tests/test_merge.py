"""`merge_attention` against attention over all keys at once."""

from __future__ import annotations

import math

import pytest
import torch

from fa_cute import ArgumentError, flash_attn_varlen_func, merge_attention, reference


def inputs(seqlen_q=5, seqlen_k=12, dtype=torch.float64):
    g = torch.Generator().manual_seed(7)
    shapes = ((2, seqlen_q, 4, 3), (2, seqlen_k, 2, 3), (2, seqlen_k, 2, 5))
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes]


def in_parts(q, k, v, cuts, softmax_scale=None):
    parts = [
        reference.attention(q, k[:, a:b], v[:, a:b], softmax_scale, dtype=q.dtype)
        for a, b in zip((0, *cuts), (*cuts, k.shape[1]))
    ]
    return merge_attention(*zip(*parts))


@pytest.mark.parametrize("cuts", [(), (5,), (1, 1, 4), (0, 11), (12,)], ids=str)
def test_equals_attention_over_all_keys(cuts):
    q, k, v = (t.requires_grad_() for t in inputs())
    out, lse = in_parts(q, k, v, cuts)
    want, want_lse = reference.attention(q, k, v, dtype=torch.float64)
    torch.testing.assert_close(out, want, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(lse, want_lse, rtol=1e-13, atol=1e-13)
    dout, dlse = torch.linspace(-1, 1, out.numel()).view(out.shape).double(), torch.ones_like(lse)
    got = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    expected = torch.autograd.grad((want, want_lse), (q, k, v), (dout, dlse))
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_packed_sequences():
    q, k, v = (t[0] for t in inputs())
    cu = torch.tensor([0, 2, 5], dtype=torch.int32)
    parts = [
        flash_attn_varlen_func(
            q, k[:n], v[:n], cu, torch.tensor([0, n // 2, n], dtype=torch.int32),
            return_lse=True, backend="reference",
        )
        for n in (6, 12)
    ]  # fmt: skip
    out, lse = merge_attention(*zip(*parts))
    assert out.shape == parts[0][0].shape and lse.shape == parts[0][1].shape == (4, 5)
    batched = merge_attention([o[None] for o, _ in parts], [s[None] for _, s in parts])
    assert torch.equal(out, batched[0][0]) and torch.equal(lse, batched[1][0])
    torch.testing.assert_close(lse.double(), torch.logaddexp(*(s.double() for _, s in parts)))


def test_gradcheck():
    g = torch.Generator().manual_seed(1)
    outs = [torch.randn(1, 2, 2, 3, generator=g, dtype=torch.float64) for _ in range(3)]
    lses = [torch.randn(1, 2, 2, generator=g, dtype=torch.float64) for _ in range(3)]
    hidden = torch.tensor([[[True, False], [False, False]]])

    def merged(*tensors):
        lses = [tensors[3].masked_fill(hidden, -math.inf), *tensors[4:]]
        return merge_attention(tensors[:3], lses)

    tensors = [t.requires_grad_() for t in (*outs, *lses)]
    assert torch.autograd.gradcheck(merged, tensors)
    assert torch.autograd.gradgradcheck(merged, tensors)


def test_rows_that_see_nothing_anywhere():
    outs = [torch.zeros(1, 2, 1, 4, requires_grad=True) for _ in range(2)]
    lses = [torch.tensor([[[-math.inf, 0.5]]], requires_grad=True) for _ in range(2)]
    out, lse = merge_attention(outs, lses)
    assert (out == 0).all() and lse[0, 0, 0] == -math.inf
    torch.testing.assert_close(lse[0, 0, 1], torch.tensor(0.5 + math.log(2)))
    (out.sum() + lse[..., 1].sum()).backward()
    for t in (*outs, *lses):
        assert t.grad.isfinite().all()
    assert lses[0].grad[0, 0, 0] == 0


def test_large_statistics_do_not_overflow():
    outs = [torch.ones(1, 1, 1, 1), 3 * torch.ones(1, 1, 1, 1)]
    for size in (1e4, -1e4):
        out, lse = merge_attention(outs, [torch.full((1, 1, 1), size)] * 2)
        assert out.item() == 2.0 and lse.item() == pytest.approx(size + math.log(2))


def test_dtypes():
    q, k, v = inputs(dtype=torch.bfloat16)
    parts = [reference.attention(q, t, v[:, :6], dtype=torch.float32) for t in (k[:, :6], k[:, 6:])]
    out, lse = merge_attention([p[0].bfloat16() for p in parts], [p[1] for p in parts])
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32


@pytest.mark.parametrize(
    ("outs", "lses"),
    [
        ([], []),
        ([torch.ones(1, 2, 1, 4)], []),
        ([torch.ones(1, 2, 1, 4)], [torch.ones(1, 2, 1)]),
        ([torch.ones(1, 2, 1, 4)], [torch.ones(1, 1, 2).half()]),
        ([torch.ones(2, 1, 4)], [torch.ones(2, 1)]),
        ([torch.ones(2, 4)], [torch.ones(2)]),
        ([torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 5)], [torch.ones(1, 1, 2)] * 2),
        ([torch.ones(1, 2, 1, 4)], [torch.ones(1, 1, 2, device="meta")]),
        ([1.0], [2.0]),
    ],
)
def test_parts_that_do_not_fit(outs, lses):
    with pytest.raises(ArgumentError, match="outs"):
        merge_attention(outs, lses)
