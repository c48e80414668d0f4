"""``torch.ops.fa_cute.varlen_*``: opcheck, torch.compile, fake tensors, checkpoints, the low-level
pair. In plain torch: what surrounds a kernel does not depend on it.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import fa_cute
from fa_cute import compile, flash_attn_varlen_func, operators_varlen, ops

OPS = torch.ops.fa_cute
CU = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
USED = torch.tensor([2, 0, 5], dtype=torch.int32)
REFERENCE = {"backend": "reference"}


def leaves(rows=8, dtype=torch.float32, dim=16, grad=True):
    g = torch.Generator().manual_seed(rows)
    return [torch.randn(rows, 2, dim, generator=g).to(dtype).requires_grad_(grad) for _ in range(3)]


def both(q, k, v, cu=CU, **options):
    """out and lse, both of which reach the loss."""
    return OPS.varlen_fwd(q, k, v, cu, cu, causal=True, **{**REFERENCE, **options})


def public(q, k, v, cu, most=None, **options):
    """The function, which within torch.compile is the operator."""
    options = {"causal": True, "return_lse": True, **REFERENCE, **options}
    return flash_attn_varlen_func(q, k, v, cu, cu, most, most, **options)


def gradients(out, lse, tensors):
    dout = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
    return out, lse, *torch.autograd.grad((out, lse), tensors, (dout, torch.ones_like(lse)))


def same_bits(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def test_opcheck():
    q, k, v = leaves()
    torch.library.opcheck(OPS.varlen_fwd, (q, k, v, CU, CU, None, USED), REFERENCE)
    out, lse = (t.detach() for t in both(q, k, v))
    q, k, v = (t.detach() for t in (q, k, v))
    saved = (torch.ones_like(out), q, k, v, out, lse)
    torch.library.opcheck(OPS.varlen_bwd, (*saved, torch.ones_like(lse), CU, CU), REFERENCE)
    torch.library.opcheck(OPS.varlen_fwd_out, (q, k, v, out, lse, CU, CU), REFERENCE)
    grads = [torch.empty_like(t) for t in (q, k, v)]
    torch.library.opcheck(OPS.varlen_bwd_out, (*saved, None, *grads, CU, CU), REFERENCE)


def test_opcheck_without_cu_seqlens():
    q, k, v = leaves(9)
    torch.library.opcheck(OPS.varlen_fwd, (q, k, v, None, None, None, USED // 2), REFERENCE)


def test_compiled_equals_eager_bit_for_bit():
    """And other totals, other numbers of sequences and max_seqlen do not make another graph."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(public, fullgraph=True, dynamic=True, backend=backend)
    for cu, most in (((0, 3, 3, 8), 5), ((0, 9, 11, 16, 20), 9), ((0, 2, 7), 7)):
        cu = torch.tensor(cu, dtype=torch.int32)
        q, k, v = leaves(cu[-1].item())
        got = gradients(*compiled(q, k, v, cu, most), (q, k, v))
        assert same_bits(got, gradients(*both(q, k, v, cu), (q, k, v))), cu
    assert len(graphs) == 1


def test_compiled_through_aot_autograd():
    compiled = torch.compile(public, fullgraph=True, dynamic=True, backend="aot_eager")
    q, k, v = leaves()
    assert same_bits(
        gradients(*compiled(q, k, v, CU), (q, k, v)), gradients(*both(q, k, v), (q, k, v))
    )


def test_compiled_padded_batch():
    def padded(q, k, v, used):
        return flash_attn_varlen_func(q, k, v, seqused_k=used, return_lse=True, **REFERENCE)

    compiled = torch.compile(padded, fullgraph=True, dynamic=True, backend="aot_eager")
    tensors = [t.detach().unflatten(0, (3, 3)) for t in leaves(9)]
    got, want = compiled(*tensors, USED // 2), padded(*tensors, USED // 2)
    assert same_bits(got, want) and got[1].shape == (3, 2, 3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    q, k, v = leaves()
    out, lse = checkpoint(both, q, k, v, use_reentrant=reentrant)
    (out.sum() + lse[lse.isfinite()].sum()).backward()
    got = [t.grad for t in (q, k, v)]
    out, lse = both(q, k, v)
    want = torch.autograd.grad(out.sum() + lse[lse.isfinite()].sum(), (q, k, v))
    assert same_bits(got, want)


def test_fake_and_meta_tensors():
    for mode in (FakeTensorMode(), None):
        if mode is None:
            q, k, v = (t.detach().to("meta") for t in leaves(dtype=torch.bfloat16))
            out, lse = flash_attn_varlen_func(
                q, k, v, CU.to("meta"), CU.to("meta"), return_lse=True
            )
        else:
            with mode:
                q = torch.empty(8, 2, 64, dtype=torch.bfloat16)
                cu = torch.empty(4, dtype=torch.int32)
                out, lse = flash_attn_varlen_func(q, q, q, cu, cu, return_lse=True)
        assert out.shape == q.shape and out.dtype == torch.bfloat16
        assert lse.shape == (2, 8) and lse.dtype == torch.float32


def test_second_derivatives_and_tangents_are_errors():
    q, k, v = leaves()
    out, _ = both(q, k, v)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(fa_cute.UnsupportedError, match="twice"):
        dq.sum().backward()
    with forward_ad.dual_level(), pytest.raises(fa_cute.UnsupportedError, match="forward-mode"):
        dual = forward_ad.make_dual(q.detach(), torch.ones_like(q))
        both(dual, k.detach(), v.detach())


def test_functional_gradient():
    q, k, v = leaves()
    want = torch.autograd.grad(both(q, k, v)[0].sum(), q)[0]
    q, k, v = (t.detach() for t in (q, k, v))
    assert torch.equal(torch.func.grad(lambda q: both(q, k, v)[0].sum())(q), want)


def test_low_level_pair_fills_what_it_is_given():
    q, k, v = leaves(grad=False)
    lengths = {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "seqused_k": USED}
    out, lse = torch.full_like(q, math.nan), torch.full((2, 8), math.nan)
    got = ops.flash_varlen_fwd(q, k, v, **lengths, out=out, lse=lse, **REFERENCE)
    assert got[0] is out and got[1] is lse
    want = flash_attn_varlen_func(q, k, v, CU, CU, seqused_k=USED, return_lse=True, **REFERENCE)
    assert same_bits(got, want)
    assert same_bits(ops.flash_varlen_fwd(q, k, v, **lengths, **REFERENCE), want)
    dq = torch.full_like(q, math.nan)
    found = ops.flash_varlen_bwd(
        torch.ones_like(out), q, k, v, out, lse, **lengths, dq=dq, **REFERENCE
    )
    assert found[0] is dq and all(t.isfinite().all() for t in found)
    with pytest.raises(fa_cute.ArgumentError, match="lse must be"):
        ops.flash_varlen_fwd(q, k, v, **lengths, lse=torch.empty(8, 2), **REFERENCE)
    with pytest.raises(fa_cute.ArgumentError, match="dq must be"):
        ops.flash_varlen_bwd(out, q, k, v, out, lse, **lengths, dq=dq[:3], **REFERENCE)
    with pytest.raises(fa_cute.ArgumentError, match="out: elements share memory"):
        one_row = torch.empty(1, *q.shape[1:]).expand(q.shape)
        ops.flash_varlen_fwd(q, k, v, **lengths, out=one_row, **REFERENCE)


def test_gradient_of_one_result_alone():
    q, k, v = leaves()
    out, lse = both(q, k, v)
    for result in (out, lse):
        loss = result[result.isfinite()].sum()
        assert all(
            t.isfinite().all() for t in torch.autograd.grad(loss, (q, k, v), retain_graph=True)
        )


def test_the_operators_validate():
    q, k, v = leaves(grad=False)
    with pytest.raises(fa_cute.ArgumentError, match="all None"):
        OPS.varlen_fwd(q, k, v)
    with pytest.raises(fa_cute.ArgumentError, match="int32"):
        OPS.varlen_fwd(q, k, v, CU.long(), CU)
    with pytest.raises(fa_cute.ArgumentError, match="dout must be"):
        OPS.varlen_bwd(q[:3], q, k, v, q, torch.zeros(2, 8), None, CU, CU, **REFERENCE)


def test_schemas_are_the_documented_ones():
    for schema in operators_varlen.SCHEMAS:
        name = schema.partition("(")[0]
        assert f"fa_cute::{name}" in str(getattr(OPS, name).default._schema)


@pytest.fixture
def on_hopper(monkeypatch):
    """With kernels, simulated."""
    pytest.importorskip("cutlass", reason="the kernels are compiled by NVIDIA's CuTe DSL")
    monkeypatch.setenv("FA_CUTE_ARCH", "sm_90a")


WITH_KERNELS = {"backend": "auto", "causal": False}


def test_opcheck_of_kernels(on_hopper):
    q, k, v = leaves(dtype=torch.bfloat16, dim=64)
    torch.library.opcheck(OPS.varlen_fwd, (q, k, v, CU, CU))
    out, lse = (t.detach() for t in public(q, k, v, CU, **WITH_KERNELS))
    saved = (torch.ones_like(out), *(t.detach() for t in (q, k, v)), out, lse)
    torch.library.opcheck(OPS.varlen_bwd, (*saved, torch.ones_like(lse), CU, CU))


def test_kernels_compiled_equal_eager(on_hopper):
    """Whatever the lengths are, by the same two kernels."""
    compile.clear()

    def attend(q, k, v, cu, most):
        return public(q, k, v, cu, most, **WITH_KERNELS)

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for cu, most in (((0, 3, 3, 8), 5), ((0, 70), torch.tensor(70)), ((0, 9, 30), None)):
        cu = torch.tensor(cu, dtype=torch.int32)
        tensors = leaves(int(cu[-1]), torch.bfloat16, 64)
        eager = gradients(*attend(*tensors, cu, most), tensors)
        again = gradients(*attend(*tensors, cu, most), tensors)
        assert same_bits(eager, again) and all(t.isfinite().all() for t in eager)
        assert same_bits(gradients(*compiled(*tensors, cu, most), tensors), eager)
    assert len(compile._memory) == 2, "a forward and a backward"


def test_rows_of_no_sequence(on_hopper):
    """They are 0, -inf and without gradient, and NaN in them reaches nobody."""
    q, k, v = leaves(80, torch.bfloat16, 64)
    cu, apart = torch.tensor([4, 30, 70], dtype=torch.int32), torch.ones(80, dtype=torch.bool)
    apart[4:70] = False
    want = gradients(*public(q, k, v, cu, **WITH_KERNELS), (q, k, v))
    with torch.no_grad():
        for t in (q, k, v):
            t[apart] = math.nan
    out, lse, *grads = gradients(*public(q, k, v, cu, **WITH_KERNELS), (q, k, v))
    assert same_bits((out, lse, *grads), want)
    assert all((t[apart] == 0).all() for t in (out, *grads)) and (lse[:, apart] == -math.inf).all()


def test_padded_batch_on_kernels(on_hopper):
    q, k, v = (t.unflatten(0, (3, 3)) for t in leaves(9, torch.bfloat16, 64, False))
    how = {"seqused_q": USED // 2, "seqused_k": USED // 2, "return_lse": True}
    out, lse = flash_attn_varlen_func(q, k, v, **how)
    want, want_lse = flash_attn_varlen_func(q, k, v, **how, **REFERENCE)
    torch.testing.assert_close(out, want, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=1e-4)
    assert (out[1] == 0).all() and (lse[1] == -math.inf).all()
