"""Sliding windows through the public function, forward and backward, on simulated Hopper."""

from __future__ import annotations

import math

import pytest
import torch

from fa_cute import compile, flash_attn_func

from . import tolerance

pytest.importorskip("cutlass", reason="the kernels are compiled by NVIDIA's CuTe DSL")


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    monkeypatch.setenv("FA_CUTE_ARCH", "sm_90a")


def leaves(seqlen_k=200):
    """q of 70 rows; the last one stands at the last key."""
    g = torch.Generator().manual_seed(3)
    shapes = [(1, 70, 2, 64), *[(1, seqlen_k, 1, 64)] * 2]
    return [torch.randn(s, generator=g).bfloat16().requires_grad_() for s in shapes]


def gradients(tensors, window, **options):
    """out, lse, dq, dk, dv."""
    out, lse = flash_attn_func(*tensors, window_size=window, return_lse=True, **options)
    dout = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
    return out, lse, *torch.autograd.grad((out, lse), tensors, (dout, torch.ones_like(lse)))


def same_bits(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def test_one_kernel_for_all_sizes(monkeypatch):
    """Another size is no compile; the numbers are those of plain torch."""
    built, build = [], compile.build
    monkeypatch.setattr(compile, "build", lambda *a, **kw: built.append(a) or build(*a, **kw))
    compile.clear()
    monkeypatch.setenv("FA_CUTE_CACHE", "off")
    q, k, v = leaves()
    for left in (40, 0, 10**12):
        out, lse, *grads = gradients((q, k, v), (left, -1), causal=True)
        inputs = (t.detach() for t in (q, k, v))
        tolerance.assert_close_to_reference(
            out.detach(), lse.detach(), *inputs, causal=True, window=(left, 0)
        )
        assert all(t.isfinite().all() for t in grads)  # their numbers: tests/bwd
    assert len(built) == 2, "a forward and a backward"


def test_no_limit_that_binds_is_causal_attention():
    q, k, v = leaves()
    unlimited = flash_attn_func(q, k, v, causal=True)
    assert torch.equal(flash_attn_func(q, k, v, window_size=(-1, 0)), unlimited)
    assert torch.equal(flash_attn_func(q, k, v, window_size=(None, 0)), unlimited)
    wide = flash_attn_func(q, k, v, causal=True, window_size=(2**40, -1))
    assert torch.equal(wide, unlimited), "the same blocks in the same order"


def test_blocks_outside_are_not_visited():
    """NaN and infinities there reach neither results nor gradients."""
    q, k, v = leaves(330)
    want = gradients((q, k, v), (40, -1), causal=True)
    outside = 128  # 220 keys are before the first that somebody sees: a block of the backward
    with torch.no_grad():
        for t in (k, v):
            t[:, :outside] = math.nan
            t[:, 3] = math.inf
    got = gradients((q, k, v), (40, -1), causal=True)
    assert same_bits(got[:3], want[:3])
    for a, b in zip(got[3:], want[3:]):
        assert torch.equal(a[:, outside:], b[:, outside:]) and (a[:, :outside] == 0).all()


def test_compiled_equals_eager_for_any_size():
    def attend(q, k, v, left):
        return flash_attn_func(q, k, v, causal=True, window_size=(left, -1), return_lse=True)

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    tensors = leaves()
    for left in (40, 17):
        out, lse = compiled(*tensors, left)
        dout = torch.ones_like(out)
        grads = torch.autograd.grad((out, lse), tensors, (dout, torch.ones_like(lse)))
        want, want_lse = attend(*tensors, left)
        expected = torch.autograd.grad((want, want_lse), tensors, (dout, torch.ones_like(lse)))
        assert same_bits((out, lse, *grads), (want, want_lse, *expected))


def test_opcheck():
    q, k, v = leaves()
    options = {"window_left": 40, "causal": True}
    torch.library.opcheck(torch.ops.fa_cute.fwd, (q, k, v), options)
