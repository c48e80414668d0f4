"""Gradients through `flash_attn_func`: the Hopper kernels in the simulator, against float64."""

from __future__ import annotations

import math

import pytest
import torch

from fa_cute import UnsupportedError, can_use, flash_attn_func, reference, tune

from . import tolerance

pytest.importorskip("cutlass", reason="the kernels are compiled by NVIDIA's CuTe DSL")


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    monkeypatch.setenv("FA_CUTE_ARCH", "sm_90a")


def leaves(seqlens, heads, head_dim, dtype=torch.bfloat16, batch=1):
    g = torch.Generator().manual_seed(seqlens[0] * 1000 + seqlens[1])
    shapes = [(seqlens[0], heads[0]), (seqlens[1], heads[1]), (seqlens[1], heads[1])]
    return [
        torch.randn(batch, s, h, head_dim, generator=g).to(dtype).requires_grad_()
        for s, h in shapes
    ]


def run(q, k, v, causal, dout, dlse=None, deterministic=None):
    out, lse = flash_attn_func(
        q, k, v, causal=causal, return_lse=True, deterministic=deterministic, backend="sim"
    )
    if dlse is None:
        return torch.autograd.grad(out, (q, k, v), dout)
    return torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))


def torch_gradients(q, k, v, causal, dout, dlse):
    """What torch computes in the dtype of q."""
    out, lse = reference.attention(q, k, v, causal=causal, dtype=None)
    seen = lse != -math.inf
    if dlse is None:
        return torch.autograd.grad(out, (q, k, v), dout)
    return torch.autograd.grad((out, lse[seen]), (q, k, v), (dout, dlse[seen]))


CASES = {
    "1x1": ((1, 1), (1, 1), 64, False, False),
    "causal": ((200, 200), (2, 2), 64, True, False),
    "gqa": ((130, 257), (4, 2), 64, True, False),
    "mqa full": ((113, 203), (3, 1), 64, False, True),
    "blind rows": ((203, 113), (2, 1), 64, True, False),
    "d128": ((150, 200), (1, 1), 128, True, True),
    "d96": ((70, 130), (2, 1), 96, False, False),
}


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name):
    seqlens, heads, head_dim, causal, with_lse = CASES[name]
    q, k, v = leaves(seqlens, heads, head_dim)
    g = torch.Generator().manual_seed(5)
    dout = torch.randn(q.shape, generator=g).bfloat16()
    dlse = torch.randn(1, heads[0], seqlens[0], generator=g) if with_lse else None
    got = run(q, k, v, causal, dout, dlse)
    detached = [t.detach() for t in (q, k, v)]
    exact = reference.gradients(dout, *detached, causal=causal, dlse=dlse)
    in_torch = torch_gradients(q, k, v, causal, dout, dlse)
    for which, ours, want, theirs in zip("qkv", got, exact, in_torch):
        bar = tolerance.FACTOR * tolerance.worst(theirs, want)
        bar += tolerance.rounding(want, ours.dtype)
        error = tolerance.worst(ours, want)
        assert error <= bar, f"d{which}: error {error:.2e}, bar {bar:.2e}"
        assert ours.dtype == q.dtype and ours.shape == want.shape
    if causal and seqlens[0] > seqlens[1]:
        assert (got[0][:, : seqlens[0] - seqlens[1]] == 0).all(), "no key, no gradient"


def test_the_same_bits_in_every_schedule_when_deterministic(monkeypatch):
    q, k, v = leaves((200, 300), (2, 1), 64)
    dout = torch.ones_like(q)
    want = None
    for schedule in ("early", "late", "random:1", "random:2", "random:3"):
        monkeypatch.setenv("FA_CUTE_SIM_SCHEDULE", schedule)
        got = run(q, k, v, True, dout, deterministic=True)
        want = want or got
        assert all(torch.equal(a, b) for a, b in zip(got, want)), schedule


def test_without_the_flag_the_order_shows(monkeypatch):
    """Two blocks of keys cancel in dq: what a third adds is rounded if it comes between them."""
    q, k, v = leaves((300, 300), (1, 1), 64)
    with torch.no_grad():
        k[:, 128:256] = k[:, :128]
        v[:, :128] *= 1e5
        v[:, 128:256] = -v[:, :128]
    dout = torch.randn_like(q)
    found = {True: set(), False: set()}
    for schedule in ("early", *(f"priority:{seed}" for seed in range(6))):
        monkeypatch.setenv("FA_CUTE_SIM_SCHEDULE", schedule)
        for deterministic, bits in found.items():
            dq = run(q, k, v, False, dout, deterministic=deterministic)[0]
            bits.add(dq.view(torch.int16).numpy().tobytes())
    assert len(found[True]) == 1 and len(found[False]) > 1


def test_any_gradient_strides():
    q, k, v = leaves((64, 64), (2, 1), 64)
    out = flash_attn_func(q, k, v, backend="sim")
    summed = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)  # stride 0 everywhere
    ones = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True)
    turned = torch.ones(2, 64, 64, 1).bfloat16().permute(3, 1, 0, 2)
    permuted = torch.autograd.grad(out, (q, k, v), turned)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(summed, ones, permuted))


def test_gradients_that_memory_does_not_hold():
    """Negative views and zeros without memory, which torch hands over as they are."""
    tensors, kept = leaves((64, 64), (1, 1), 64), {"retain_graph": True}
    out, lse = flash_attn_func(*tensors, return_lse=True, backend="sim")
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    none = torch._efficientzerotensor(out.shape, dtype=out.dtype)
    for lazy, plain in (
        ((torch._neg_view(-dout), torch._neg_view(-dlse)), (dout, dlse)),
        ((none, dlse), (torch.zeros_like(dout), dlse)),
    ):
        want = torch.autograd.grad((out, lse), tensors, plain, **kept)
        found = torch.autograd.grad((out, lse), tensors, lazy, **kept)
        assert all(torch.equal(a, b) for a, b in zip(found, want))


def test_lse_alone():
    q, k, v = leaves((64, 64), (1, 1), 64)
    _, lse = flash_attn_func(q, k, v, return_lse=True, backend="sim")
    dq, _, dv = torch.autograd.grad(lse.sum(), (q, k, v))
    assert dq.abs().max() > 0 and (dv == 0).all()


def test_only_some_inputs_need_gradients():
    q, k, v = leaves((64, 64), (1, 1), 64)
    out = flash_attn_func(q.detach(), k, v.detach(), backend="sim")
    (dk,) = torch.autograd.grad(out.sum(), k)
    assert dk.shape == k.shape


def test_twice_is_an_error():
    q, k, v = leaves((64, 64), (1, 1), 64)
    out = flash_attn_func(q, k, v, backend="sim")
    (dq,) = torch.autograd.grad(out.float().square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"twice|once_differentiable"):
        dq.sum().backward()


def test_nothing_to_attend_to_has_zero_gradients():
    q, k, v = leaves((5, 0), (2, 1), 64)
    out = flash_attn_func(q, k, v, backend="sim")
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert (dq == 0).all() and dk.shape == k.shape and dv.shape == v.shape


def test_support_says_where_there_is_no_gradient(monkeypatch):
    q, k, v = leaves((5, 5), (1, 1), 64)
    assert can_use(q, k, v)
    monkeypatch.setattr(tune, "BACKWARD_KERNELS", {})
    answer = can_use(q, k, v)
    assert not answer and "requires_grad" in answer.reasons[0]
    with pytest.raises(UnsupportedError, match="requires_grad"):
        flash_attn_func(q, k, v)
