"""``torch.ops.fa_cute``: opcheck, torch.compile, fake tensors, checkpoints, second derivatives."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fa_cute
from fa_cute import arch, compile, dispatch, flash_attn_func, operators, ops, tune

pytest.importorskip("cutlass", reason="the kernels are compiled by NVIDIA's CuTe DSL")
OPS = torch.ops.fa_cute


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    monkeypatch.setenv("FA_CUTE_ARCH", "sm_90a")


def leaves(seqlen=64, dtype=torch.bfloat16, **kw):
    g = torch.Generator().manual_seed(seqlen)
    kw = {"requires_grad": True, **kw}
    return [
        torch.randn(1, seqlen, 1, 64, generator=g).to(dtype).requires_grad_(kw["requires_grad"])
        for _ in range(3)
    ]


def both(q, k, v):
    """out and lse, both of which reach the loss."""
    return flash_attn_func(q, k, v, causal=True, return_lse=True)


def gradients(fn, q, k, v):
    out, lse = fn(q, k, v)
    dout = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
    return out, lse, *torch.autograd.grad((out, lse), (q, k, v), (dout, torch.ones_like(lse)))


def same_bits(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def test_opcheck():
    q, k, v = leaves()
    torch.library.opcheck(OPS.fwd, (q, k, v), {"causal": True})
    out, lse = (t.detach() for t in both(q, k, v))
    given = (torch.ones_like(out), q.detach(), k.detach(), v.detach(), out, lse)
    torch.library.opcheck(OPS.bwd, given, {"causal": True})


def test_opcheck_of_the_forms_that_fill_tensors():
    """The schema, the fake and the functionalisation do not depend on the kernel."""
    q, k, v = leaves(requires_grad=False)
    how = {"backend": "reference"}
    out, lse = OPS.fwd(q, k, v, **how)
    torch.library.opcheck(OPS.fwd_out, (q, k, v, out, lse), how)
    grads = [torch.empty_like(t) for t in (q, k, v)]
    torch.library.opcheck(OPS.bwd_out, (torch.ones_like(out), q, k, v, out, lse, None, *grads), how)


def test_compiled_equals_eager_bit_for_bit():
    compiled = torch.compile(both, fullgraph=True, dynamic=True, backend="aot_eager")
    for seqlen in (64, 80):
        q, k, v = leaves(seqlen)
        assert same_bits(gradients(compiled, q, k, v), gradients(both, q, k, v)), seqlen
    with torch.no_grad():
        assert same_bits(compiled(q, k, v), both(q, k, v))


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor wants a C++ compiler")
def test_compiled_by_inductor():
    q, k, v = leaves(requires_grad=False)
    compiled = torch.compile(both, fullgraph=True, dynamic=True)
    assert same_bits(compiled(q, k, v), both(q, k, v))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    q, k, v = leaves()

    def checkpointed(*tensors):
        return checkpoint(both, *tensors, use_reentrant=reentrant)

    def backward(fn):
        out, lse = fn(q, k, v)
        (out.float().sum() + lse.sum()).backward()
        grads = [t.grad for t in (q, k, v)]
        q.grad = k.grad = v.grad = None
        return grads

    assert same_bits(backward(checkpointed), backward(both))


def test_selective_checkpointing_keeps_the_operators_results(monkeypatch):
    ran = []
    forward = dispatch.Call.forward
    monkeypatch.setattr(
        dispatch.Call, "forward", lambda self, *args: ran.append(1) or forward(self, *args)
    )

    def policy(ctx, op, *args, **kw):
        kept = op is OPS.fwd.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    q, k, v = leaves()
    for context_fn, runs in (
        (None, 2),
        (lambda: create_selective_checkpoint_contexts(policy), 1),
    ):
        options = {} if context_fn is None else {"context_fn": context_fn}
        ran.clear()
        out, _ = checkpoint(both, q, k, v, use_reentrant=False, **options)
        out.float().square().sum().backward()
        assert len(ran) == runs


def test_the_operator_differentiates_as_the_function_does():
    q, k, v = leaves()

    def operator(q, k, v):
        return OPS.fwd(q, k, v, causal=True)

    assert same_bits(gradients(operator, q, k, v), gradients(both, q, k, v))


def test_functional_gradient():
    q, k, v = leaves()
    want = torch.autograd.grad(both(q, k, v)[0].float().sum(), q)[0]
    q, k, v = (t.detach() for t in (q, k, v))
    for fn in (both, lambda *tensors: OPS.fwd(*tensors, causal=True)):
        got = torch.func.grad(lambda q, fn=fn: fn(q, k, v)[0].float().sum())(q)
        assert torch.equal(got, want)


def test_meta_and_fake_tensors():
    q, k, v = leaves(requires_grad=False)
    out, lse = both(*(t.to("meta") for t in (q, k, v)))
    assert out.device.type == "meta" and out.shape == q.shape and out.dtype == q.dtype
    assert lse.shape == (1, 1, 64) and lse.dtype == torch.float32
    with FakeTensorMode() as mode:
        tensors = [mode.from_tensor(t).requires_grad_() for t in (q, k, v)]
        both(*tensors)[0].sum().backward()
        assert tensors[1].grad.shape == k.shape
        cuda = [torch.empty(2, 9, 4, 64, dtype=torch.float16, device="cuda") for _ in range(3)]
        assert both(*cuda)[0].device.type == "cuda"


@pytest.mark.parametrize("seen", [True, False], ids=["its gradient", "the function alone"])
def test_a_second_derivative_is_an_error_and_not_silence(seen):
    q, k, v = leaves()
    out, _ = both(q, k, v)
    loss = out.float().square().sum() if seen else out.sum()  # the latter's dout has no history
    (dq,) = torch.autograd.grad(loss, q, create_graph=True)
    with pytest.raises(fa_cute.UnsupportedError, match="twice"):
        dq.float().square().sum().backward()


def test_a_forward_mode_derivative_is_an_error_and_not_silence():
    q, k, v = leaves(requires_grad=False)
    with pytest.raises(fa_cute.UnsupportedError, match="forward-mode"):
        torch.func.jvp(lambda q: flash_attn_func(q, k, v), (q,), (q,))
    with forward_ad.dual_level(), pytest.raises(fa_cute.UnsupportedError, match="forward-mode"):
        flash_attn_func(forward_ad.make_dual(q, q), k, v)
    _, tangent = torch.func.jvp(lambda q: flash_attn_func(q, k, v, backend="reference"), (q,), (q,))
    assert tangent.abs().max() > 0


def test_what_is_frozen_has_no_gradient():
    q, k, v = leaves()
    k.requires_grad_(False)
    out, _ = both(q, k, v)
    out.sum().backward()
    assert q.grad is not None and k.grad is None and v.grad is not None


def test_low_level_pair():
    q, k, v = leaves()
    out, lse, *grads = gradients(both, q, k, v)
    nan = math.nan
    mine = torch.full_like(out, nan), torch.full_like(lse, nan)
    got = ops.flash_fwd(q, k, v, causal=True, out=mine[0], lse=mine[1])
    assert got[0] is mine[0] and got[1] is mine[1] and same_bits(got, (out, lse))
    dout = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
    dk = torch.full((1, 64, 2, 64), nan, dtype=k.dtype)[:, :, :1]  # rows of a wider tensor
    options = {"dlse": torch.ones_like(lse), "causal": True, "dk": dk}
    found = ops.flash_bwd(dout, q, k, v, *got, **options)
    assert found[1] is dk and same_bits(found, grads)
    assert not any(t.requires_grad for t in (*got, *found))


@pytest.mark.parametrize(
    "wrong",
    [
        {"out": torch.empty(1, 64, 1, 32, dtype=torch.bfloat16)},
        {"out": torch.empty(1, 64, 1, 64)},
        {"lse": torch.empty(1, 64, 1).transpose(1, 2)[:, :, ::2]},
        {"out": torch.empty(1, 64, 1, 128, dtype=torch.bfloat16)[..., ::2]},
        {"window_size": 3},
    ],
    ids=["shape", "dtype", "lse", "strides", "window"],
)
def test_low_level_pair_checks_what_it_fills(wrong):
    with pytest.raises(fa_cute.ArgumentError):
        ops.flash_fwd(*leaves(requires_grad=False), **wrong)


@pytest.mark.parametrize("error", ["dtype", "grad", "window"])
def test_the_operators_validate(error, monkeypatch):
    q, k, v = leaves(requires_grad=False)
    out, lse = torch.empty_like(q), torch.empty(1, 1, 64)
    with pytest.raises(fa_cute.FaCuteError) as caught:
        if error == "dtype":
            OPS.fwd(q.float(), k.float(), v.float())
        elif error == "grad":
            OPS.bwd(out[:, :3], q, k, v, out, lse)
        else:
            OPS.fwd(q, k, v, None, False, -3, 0)
    assert {"dtype": "fp32", "grad": "dout", "window": "window_size"}[error] in str(caught.value)


def test_autocast_is_named():
    x = [t.float() for t in leaves(requires_grad=False)]
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(fa_cute.UnsupportedError, match=r"fp32.*\n.*autocast"),
    ):
        flash_attn_func(*x)


def no_repeatable_backward(problem, arch, deterministic):
    return ("this row adds dq up in any order",) if deterministic else ()


def test_determinism_is_never_dropped(monkeypatch):
    monkeypatch.setattr(dispatch.tune, "missing_backward", no_repeatable_backward)
    q, k, v = leaves()
    with pytest.raises(fa_cute.DeterminismError, match="any order"):
        flash_attn_func(q, k, v, deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        for warn_only in (False, True):
            torch.use_deterministic_algorithms(True, warn_only=warn_only)
            with pytest.raises(fa_cute.DeterminismError, match="deterministic=False"):
                flash_attn_func(q, k, v)
    finally:
        torch.use_deterministic_algorithms(False)
    given = [t.detach() for t in (q, q, k, v, q)]
    with pytest.raises(fa_cute.DeterminismError):
        ops.flash_bwd(*given, torch.zeros(1, 1, 64), deterministic=True)
    assert not fa_cute.can_use(q, k, v, deterministic=True)


def test_the_flag_of_the_forward_call_decides(monkeypatch):
    asked = []
    monkeypatch.setattr(
        dispatch.Call, "backward", lambda self, saved, dout, dlse, flag, *_: asked.append(flag)
    )
    q, k, v = leaves()
    for flag, given in ((True, None), (False, None), (True, False)):
        torch.use_deterministic_algorithms(flag)
        try:
            out, _ = flash_attn_func(q, k, v, deterministic=given, return_lse=True)
        finally:
            torch.use_deterministic_algorithms(False)
        out.sum().backward()
    assert asked == [True, False, False]


def test_a_sequence_gives_the_same_bits_alone_and_in_a_batch():
    g = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(3, 80, 2, 64, generator=g).bfloat16() for _ in range(3))
    out, lse = both(q, k, v)
    for i in range(3):
        one = both(*(t[i : i + 1] for t in (q, k, v)))
        assert torch.equal(one[0], out[i : i + 1]) and torch.equal(one[1], lse[i : i + 1])


def test_a_profile_shows_the_operators():
    q, k, v = leaves()
    with torch.profiler.profile() as profile:
        both(q, k, v)[0].sum().backward()
    names = {event.name for event in profile.events()}
    assert {"fa_cute::fwd", "fa_cute::bwd"} <= names


def test_results_on_another_device_are_an_error():
    """The dispatcher asks CUDA's kernel where any tensor is on a GPU; others may be elsewhere."""
    q = torch.zeros(1, 8, 1, 64, dtype=torch.bfloat16)
    lse, far = torch.zeros(1, 1, 8), {"device": "meta"}
    for out, of in ((q.to(**far), lse), (q, lse.to(**far))):
        with pytest.raises(fa_cute.ArgumentError, match="must be on the device of q, cpu"):
            operators._run_fwd_out(q, q, q, out, of)
    with pytest.raises(fa_cute.ArgumentError, match="device of lse"):
        operators._run_bwd(q, q, q, q, q, lse, lse.to(**far))


def test_no_operator_is_left_out():
    assert {schema.partition("(")[0] for schema in operators.SCHEMAS} == {
        "fwd",
        "fwd_out",
        "bwd",
        "bwd_out",
    }


def test_what_was_validated_says_nothing_about_a_lazy_negative(monkeypatch):
    monkeypatch.setattr(dispatch, "_REPEATED", "is_cpu")
    monkeypatch.setattr(dispatch, "_seen", dispatch.Seen())
    q, k, v = leaves(requires_grad=False)
    for _ in range(3):
        flash_attn_func(q, k, v)
    with pytest.raises(fa_cute.ArgumentError, match="negative"):
        flash_attn_func(torch._neg_view(q), k, v)


def test_a_warm_call_looks_nothing_up(monkeypatch):
    """The kernels and the scratch of a call are found once, forward and backward."""
    asked = []

    def kernel(*args):
        for t in args:
            if isinstance(t, torch.Tensor):
                t.zero_()

    monkeypatch.setattr(dispatch, "_REPEATED", "is_cpu")  # CUDA tensors are remembered
    monkeypatch.setattr(dispatch, "_seen", dispatch.Seen())
    monkeypatch.setattr(compile, "get", lambda request, target: asked.append(request) or kernel)
    for _ in range(3):
        q, k, v = leaves()
        gradients(both, q, k, v)
    assert [r.kind for r in asked] == ["forward", "backward"]
    spec = tune.BwdSpec("bf16", 64, 64, True)
    assert tune.backward(spec, arch.get("sm_90a")) is tune.backward(spec, arch.get("sm_90a"))


def test_a_warm_operator_asks_no_dispatcher(monkeypatch):
    """Called as others of torch's are, it has the same bits and the same place in autograd; anybody
    who watches, and any option that is not plain, finds the dispatcher.
    """
    monkeypatch.setattr(dispatch, "_REPEATED", "is_cpu")  # as for CUDA tensors
    q, k, v = leaves()
    first = OPS.fwd(q, k, v, None, True)
    monkeypatch.setattr(operators, "_fwd", None)  # what the dispatcher calls below autograd
    dispatched = []
    through = torch._ops.OpOverloadPacket.__call__
    monkeypatch.setattr(
        torch._ops.OpOverloadPacket,
        "__call__",
        lambda self, *args, **named: dispatched.append(args) or through(self, *args, **named),
    )
    for _ in range(3):
        again = OPS.fwd(q, k, v, None, True)
        assert same_bits(first, again) and again[0].grad_fn is not None and not dispatched
    assert same_bits(first, OPS.fwd(q, k, v, causal=True)) and not dispatched
    assert same_bits(first, OPS.fwd(q, k, v, None, causal=True, window_left=-1)) and not dispatched
    OPS.fwd(q, k, v, 1, True)  # a scale that the schema makes a float
    assert len(dispatched) == 1
    with torch.utils._python_dispatch.TorchDispatchMode(), pytest.raises(TypeError):
        OPS.fwd(q, k, v, None, True)
    assert len(dispatched) == 2
    for wrong in ((), {"dropout": 0.1}), ((None, True), {"causal": True}):
        with pytest.raises((RuntimeError, TypeError)):
            OPS.fwd(q, k, v, *wrong[0], **wrong[1])
    assert isinstance(OPS.fwd, torch._ops.OpOverloadPacket)


@pytest.fixture
def given(monkeypatch):
    """The tensors of each launch; kernels do nothing, and calls are remembered as on a GPU."""
    launches = []

    def kernel(*args):
        launches.append(args)

    monkeypatch.setattr(dispatch, "_REPEATED", "is_cpu")
    monkeypatch.setattr(dispatch, "_seen", dispatch.Seen())
    monkeypatch.setattr(compile, "get", lambda request, target: kernel)
    return launches


DOUT, DLSE = 5, 6  # places among the arguments of a backward


def test_a_warm_backward_takes_no_gradient_that_kernels_cannot_read(given):
    q, k, v = leaves()
    out, lse = both(q, k, v)
    whole = torch.ones(1, 64, 1, 128, dtype=out.dtype)
    odd = whole.view(-1)[1 : 1 + out.numel()].view(out.shape)
    fits = torch.ones_like(out)
    for dout in (fits, odd, whole[..., ::2], torch._neg_view(torch.ones_like(out))):
        for dlse in (None, torch.ones_like(lse), torch.ones(1).expand(lse.shape)):
            results, grads = ((out,), (dout,)) if dlse is None else ((out, lse), (dout, dlse))
            for _ in range(2):
                given.clear()
                torch.autograd.grad(results, (q, k, v), grads, retain_graph=True)
                taken = given[0][DOUT]
                assert taken.data_ptr() % 16 == 0 and taken.stride(-1) == 1 and not taken.is_neg()
                assert (taken is dout) == (dout is fits)
                assert dlse is None or given[0][DLSE].is_contiguous()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda dout, lse: (dout[:, :32], lse), "dout must be"),
        (lambda dout, lse: (dout.float(), lse), "dout must be"),
        (lambda dout, lse: (dout, lse.expand(2, 1, 64)[1:].mT.contiguous().mT), None),
        (lambda dout, lse: (dout, torch.zeros(1, 1, 128)[..., ::2]), "lse must be contiguous"),
    ],
)
def test_a_warm_backward_still_checks_what_it_is_given(given, change, message):
    q, k, v = leaves(requires_grad=False)
    out, lse = both(q, k, v)
    dout = torch.ones_like(out)
    for _ in range(2):
        OPS.bwd(dout, q, k, v, out, lse, None, None, True)
    dout, lse = change(dout, lse)
    if message is None:
        OPS.bwd(dout, q, k, v, out, lse, None, None, True)
        return
    with pytest.raises(fa_cute.ArgumentError, match=message):
        operators._run_bwd(dout, q, k, v, out, lse, None, None, True)


def test_a_warm_backward_follows_determinism(given, monkeypatch):
    found = []
    resolve = dispatch.Call._backward
    monkeypatch.setattr(
        dispatch.Call, "_backward", lambda call, *how: found.append(how[0]) or resolve(call, *how)
    )
    q, k, v = leaves()
    for deterministic in (False, True) * 3:
        out = flash_attn_func(q, k, v, causal=True, deterministic=deterministic)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert found == [False, True] * 2  # looked for until it was wanted twice


def test_results_are_packed_and_own_their_memory(given):
    x = torch.zeros(1, 64, 3, 192, dtype=torch.bfloat16)
    q, k, v = (x[:, :, i : i + 1, :64].requires_grad_() for i in range(3))
    for _ in range(2):
        out, lse = both(q, k, v)
        grads = torch.autograd.grad((out, lse), (q, k, v), (out.detach(), lse.detach()))
        results = (out, lse, *grads)
        assert all(t.is_contiguous() for t in results)
        assert len({t.untyped_storage().data_ptr() for t in results}) == len(results)
        assert [t.dtype for t in results] == [q.dtype, torch.float32] + [q.dtype] * 3


def test_memory_of_a_caller_may_have_any_stride_where_a_dimension_is_1(given):
    q, k, v = leaves(requires_grad=False)
    odd = [t.as_strided(t.shape, (7, 64, 3, 1)) for t in map(torch.empty_like, (q, q, k, v))]
    out, lse = both(q, k, v)
    for _ in range(2):
        ops.flash_fwd(q, k, v, out=odd[0], lse=lse)
        dq, dk, dv = odd[1:]
        ops.flash_bwd(out, q, k, v, out, lse, dq=dq, dk=dk, dv=dv)
    for args in given:
        strides = [
            s for t in args if isinstance(t, torch.Tensor) and t.ndim == 4 for s in t.stride()
        ]
        assert 7 not in strides and 3 not in strides


def test_padding_strides_are_replaced_only_where_they_must():
    from fa_cute.launch import plain_strides

    x = torch.empty(4, 1, 3, 64)
    assert plain_strides(x) is x and plain_strides(x[:1]) is not None
    for odd in (x.as_strided((4, 1, 3, 64), (192, 7, 64, 1)), x[:1].expand(1, 1, 3, 64)):
        plain = plain_strides(odd)
        assert plain.shape == odd.shape and all(s % 8 == 0 for s in plain.stride()[:3])
    zero = x.as_strided((1, 1, 3, 64), (0, 0, 64, 1))
    assert min(plain_strides(zero).stride()) > 0


@pytest.mark.parametrize("scale", [0.0, -0.0])
def test_a_scale_of_zero_weighs_all_keys_alike(scale):
    q, k, v = leaves()
    out, lse = flash_attn_func(q, k, v, scale, causal=True, return_lse=True)
    seen = torch.arange(1, 65)
    mean = v.detach().float().cumsum(1) / seen.view(1, -1, 1, 1)
    torch.testing.assert_close(out.float(), mean, rtol=2**-8, atol=2**-10)
    torch.testing.assert_close(lse[0, 0], seen.float().log(), rtol=1e-6, atol=1e-6)
    dq, dk = torch.autograd.grad(out.float().square().sum(), (q, k))
    assert (dq == 0).all() and (dk == 0).all()


def test_a_negative_scale_is_a_positive_one_of_the_negative_queries():
    q, k, v = leaves()
    minus = (-q).detach().requires_grad_()
    results = []
    for queries, scale in ((q, -0.3), (minus, 0.3)):
        out, lse = flash_attn_func(queries, k, v, scale, causal=True, return_lse=True)
        results.append((out, lse, *torch.autograd.grad(out.float().square().sum(), (queries, k))))
    (out, lse, dq, dk), (want, want_lse, of_minus, want_dk) = results
    assert same_bits((out, lse, -dq, dk), (want, want_lse, of_minus, want_dk))
