"""``torch.ops.fa_cute.varlen_*``: the operators for sequences that lie one after the other.

    varlen_fwd, varlen_bwd          return new tensors; varlen_fwd differentiates once
    varlen_fwd_out, varlen_bwd_out  fill tensors that the caller holds; not recorded by autograd

q, out and their gradients are (total_q, heads, head_dim), k and v (total_k, heads_kv, head_dim),
lse (heads, total_q). Where the sequences lie is in four int32 tensors, which nobody on the host
reads, so neither a synchronisation nor a compile depends on them (`lengths.Lengths`).
"""

from __future__ import annotations

import torch

from . import dispatch
from .dispatch import wants_determinism
from .errors import UnsupportedError
from .lengths import Lengths
from .operators import (
    BWD_INPUTS,
    KEYS,
    OPTIONS,
    below_autograd,
    below_transforms,
    check_gradients,
    known,
    library,
    recorded,
    refuse_tangents,
    require_gradient,
    window_sides,
    without_signatures,
)
from .problem import check_tensors

_LENGTHS = (
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None"
)
SCHEMAS = (
    f"varlen_fwd(Tensor q, Tensor k, Tensor v, {_LENGTHS}, {OPTIONS}, "
    "bool? deterministic=None, str backend='auto') -> (Tensor out, Tensor lse)",
    f"varlen_fwd_out(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) lse, {_LENGTHS}, "
    f"{OPTIONS}, str backend='auto') -> ()",
    f"varlen_bwd({BWD_INPUTS}=None, {_LENGTHS}, {OPTIONS}, bool deterministic=False, "
    "str backend='auto') -> (Tensor dq, Tensor dk, Tensor dv)",
    f"varlen_bwd_out({BWD_INPUTS}, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, {_LENGTHS}, "
    f"{OPTIONS}, bool deterministic=False, str backend='auto') -> ()",
)
for _schema in SCHEMAS:
    library.define(_schema)
_fwd = torch.ops.fa_cute.varlen_fwd.default
_fwd_out = torch.ops.fa_cute.varlen_fwd_out.default
_bwd = torch.ops.fa_cute.varlen_bwd.default
_bwd_out = torch.ops.fa_cute.varlen_bwd_out.default
_DEFAULTS = (None, None, None, None, None, False, -1, -1)  # of lengths and options


def _given(args: tuple, *last) -> tuple:
    """Lengths, options (the fields of `dispatch.Options`) and ``deterministic`` with their
    defaults; ``last``: those of deterministic and backend.
    """
    given = (*args, *(*_DEFAULTS, *last)[len(args) :])
    cu_q, cu_k, used_q, used_k, scale, causal, left, right, deterministic, how = given
    lengths = Lengths(cu_q, cu_k, used_q, used_k)
    return lengths, (scale, causal, left, right, how), deterministic


def _run_fwd(q, k, v, *args):
    lengths, options, _ = _given(args, None, "auto")
    return dispatch.call_of(q, k, v, options, lengths).run(q, k, v, lengths)


def _run_fwd_out(q, k, v, out, lse, *args):
    lengths = Lengths(*args[:4])
    dispatch.call_of(q, k, v, args[4:], lengths).fill(q, k, v, out, lse, lengths)


def _run_bwd(dout, q, k, v, out, lse, dlse=None, *args):
    lengths, options, deterministic = _given(args, False, "auto")
    call = dispatch.call_of(q, k, v, options, lengths)
    return call.gradients((q, k, v, out, lse), dout, dlse, deterministic, lengths)


def _run_bwd_out(dout, q, k, v, out, lse, dlse, dq, dk, dv, *args):
    grads = check_gradients((q, k, v), dq=dq, dk=dk, dv=dv)
    lengths, options, deterministic = _given(args, False, "auto")
    call = dispatch.call_of(q, k, v, options, lengths)
    call.backward((q, k, v, out, lse), dout, dlse, deterministic, grads, lengths)


def _fake_fwd(q, k, v, *args, **named):
    check_tensors(q, k, v, packed=(True, True))
    out = q.new_empty((q.shape[0], q.shape[1], v.shape[2]))
    return out, q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def _fake_bwd(dout, q, k, v, *rest, **named):
    check_tensors(q, k, v, packed=(True, True))
    return tuple(t.new_empty(t.shape) for t in (q, k, v))


def _fake_nothing(*args, **named):
    return None


class VarlenAttn(torch.autograd.Function):
    """The kernels' place in autograd."""

    @staticmethod
    def forward(q, k, v, *rest):
        """``rest``: the lengths, options, and the validated call where nobody watches; else None,
        and the dispatcher is asked.
        """
        *lengths, options, call = rest
        if call is not None:
            return call.run(q, k, v, Lengths(*lengths))
        with below_autograd():
            return _fwd(q, k, v, *lengths, *options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, *lengths, ctx.options, _ = inputs
        ctx.save_for_backward(q, k, v, *output, *lengths)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return (None,) * 9
        q, k, v, out, lse, *lengths = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        grads = _gradients(dout, q, k, v, out, lse, dlse, *lengths, *ctx.options)
        return *grads, None, None, None, None, None, None


class VarlenGradients(torch.autograd.Function):
    """The backward as a node of a graph: it has no derivative, and says so."""

    @staticmethod
    def forward(*inputs):
        with below_autograd():
            return _bwd(*inputs)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise UnsupportedError(
            "the gradients of flash_attn_varlen_func cannot be differentiated twice; "
            "backend='reference' can be, any number of times"
        )


def _gradients(dout, q, k, v, out, lse, dlse=None, *args):
    if dispatch.wants_grad(dout, q, k, v, out, lse, dlse):
        return VarlenGradients.apply(dout, q, k, v, out, lse, dlse, *args)
    lengths, options, deterministic = _given(args, False, "auto")
    call = known(q, k, v, options, lengths)
    if call is not None:
        return call.gradients((q, k, v, out, lse), dout, dlse, deterministic, lengths)
    with below_autograd():
        return _bwd(dout, q, k, v, out, lse, dlse, *args)


_attend = without_signatures(VarlenAttn)


def _autograd_fwd(q, k, v, *args):
    lengths, options, deterministic = _given(args, None, "auto")
    call = known(q, k, v, options, lengths)
    if call is not None:
        return _run_known(call, (q, k, v), lengths, options, deterministic)
    return _dispatched(below_transforms, (q, k, v), lengths, options, deterministic)


def attention(q, k, v, lengths: Lengths, options: tuple, deterministic):
    """``torch.ops.fa_cute.varlen_fwd`` as the dispatcher would run it, in less host time.

    ``options``: the fields of `dispatch.Options`.
    """
    call = known(q, k, v, options, lengths)
    if call is not None:
        return _run_known(call, (q, k, v), lengths, options, deterministic)
    require_gradient(q, k, v, options, deterministic, lengths)
    return _dispatched(recorded, (q, k, v), lengths, options, deterministic)


def _run_known(call, tensors, lengths: Lengths, options: tuple, deterministic):
    if not dispatch.wants_grad(*tensors):
        return call.run(*tensors, lengths)
    deterministic = wants_determinism(deterministic)
    call.require_gradient(deterministic)
    scale, causal, left, right, how = options
    return _attend(*tensors, *lengths, (scale, causal, left, right, deterministic, how), call)


def _dispatched(apply, tensors, lengths: Lengths, options: tuple, deterministic):
    refuse_tangents(*tensors)
    scale, causal, left, right, how = options
    if dispatch.wants_grad(*tensors):
        options = (scale, causal, left, right, wants_determinism(deterministic), how)
        return apply(VarlenAttn, *tensors, *lengths, options, None)
    with below_autograd():
        return _fwd(*tensors, *lengths, scale, causal, left, right, deterministic, how)


def flash_varlen_fwd(
    q,
    k,
    v,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    *,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    out=None,
    lse=None,
    backend="auto",
):
    """out and lse, in tensors of the caller where given; autograd records nothing.

    Args:
        q, k, v: (total_q, heads, head_dim), (total_k, heads_kv, head_dim / head_dim_v).
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k: as in `fa_cute.flash_attn_varlen_func`;
            without cu_seqlens the rows are those of a padded batch, batch * seqlen of them.
        softmax_scale, causal, window_size, backend: as in `fa_cute.flash_attn_func`.
        out: (total_q, heads, head_dim_v) like q, rows aligned to 16 bytes.
        lse: (heads, total_q) float32, contiguous.
    """
    left, right = window_sides(window_size)
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    if out is None and lse is None:
        options, lengths = (softmax_scale, causal, left, right, backend), Lengths(*lengths)
        call = known(q, k, v, options, lengths)
        if call is not None:
            return call.run(q, k, v, lengths)
        with torch.no_grad():
            return attention(q, k, v, lengths, options, False)
    if out is None or lse is None:
        new_out, new_lse = _fake_fwd(q, k, v)
        out, lse = new_out if out is None else out, new_lse if lse is None else lse
    with torch.no_grad():
        _fwd_out(q, k, v, out, lse, *lengths, softmax_scale, causal, left, right, backend)
    return out, lse


def flash_varlen_bwd(
    dout,
    q,
    k,
    v,
    out,
    lse,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    *,
    seqused_q=None,
    seqused_k=None,
    dlse=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    dq=None,
    dk=None,
    dv=None,
    deterministic=None,
    backend="auto",
):
    """dq, dk, dv of `flash_varlen_fwd`, in tensors of the caller where given.

    Arguments as in `flash_bwd` and `flash_varlen_fwd`; rows of no sequence get 0.
    """
    left, right = window_sides(window_size)
    grads = [
        t.new_empty(t.shape) if grad is None else grad for grad, t in zip((dq, dk, dv), (q, k, v))
    ]
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    options = (softmax_scale, causal, left, right, wants_determinism(deterministic), backend)
    with torch.no_grad():
        _bwd_out(dout, q, k, v, out, lse, dlse, *grads, *lengths, *options)
    return tuple(grads)


def _register() -> None:
    for name, run, fake in (
        ("varlen_fwd", _run_fwd, _fake_fwd),
        ("varlen_fwd_out", _run_fwd_out, _fake_nothing),
        ("varlen_bwd", _run_bwd, _fake_bwd),
        ("varlen_bwd_out", _run_bwd_out, _fake_nothing),
    ):
        for key in KEYS:
            library.impl(name, run, key)
        torch.library.register_fake(f"fa_cute::{name}", fake, lib=library)
    library.impl("varlen_fwd", _autograd_fwd, "Autograd")
    library.impl("varlen_bwd", _gradients, "Autograd")


_register()
