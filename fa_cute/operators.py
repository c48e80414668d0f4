"""``torch.ops.fa_cute``: attention as PyTorch operators, and their place in autograd.

    fwd, bwd          return new tensors; fwd differentiates once
    fwd_out, bwd_out  fill tensors that the caller holds; not recorded by autograd

Every operator validates its tensors, has a fake implementation (so that torch.compile, FakeTensor
and meta tensors work), and runs on the device and current stream of q. `flash_fwd` and `flash_bwd`
are the same with keyword arguments, stable from version to version.
"""

from __future__ import annotations

import sys

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from . import dispatch
from .dispatch import _PLAIN, Options, wants_determinism
from .errors import ArgumentError, UnsupportedError
from .problem import check_filled, check_tensors, describe, normalise_window

OPTIONS = (
    "float? softmax_scale=None, bool causal=False, SymInt window_left=-1, SymInt window_right=-1"
)
BWD_INPUTS = "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse"
SCHEMAS = (
    f"fwd(Tensor q, Tensor k, Tensor v, {OPTIONS}, bool? deterministic=None, "
    "str backend='auto') -> (Tensor out, Tensor lse)",
    f"fwd_out(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) lse, {OPTIONS}, "
    "str backend='auto') -> ()",
    f"bwd({BWD_INPUTS}=None, {OPTIONS}, bool deterministic=False, str backend='auto') "
    "-> (Tensor dq, Tensor dk, Tensor dv)",
    f"bwd_out({BWD_INPUTS}, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, {OPTIONS}, "
    "bool deterministic=False, str backend='auto') -> ()",
)
KEYS = ("CPU", "CUDA")
library = torch.library.Library("fa_cute", "FRAGMENT")
for _schema in SCHEMAS:
    library.define(_schema)
_fwd = torch.ops.fa_cute.fwd.default
_fwd_out = torch.ops.fa_cute.fwd_out.default
_bwd = torch.ops.fa_cute.bwd.default
_bwd_out = torch.ops.fa_cute.bwd_out.default
below_autograd = torch._C._AutoDispatchBelowAutograd
_modes, _functions = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
transforming = torch._C._are_functorch_transforms_active


def _run_fwd(q, k, v, scale=None, causal=False, left=-1, right=-1, deterministic=None, how="auto"):
    return dispatch.call_of(q, k, v, (scale, causal, left, right, how)).run(q, k, v)


def _run_fwd_out(q, k, v, out, lse, *options):
    call = dispatch.call_of(q, k, v, Options(*options))
    check_like(_results(call, q), q.device, out=out, lse=lse)
    check_filled(out=out)
    call.forward(q, k, v, out, lse)


def _run_bwd(dout, q, k, v, out, lse, dlse=None, *options):
    grads = tuple(t.new_empty(t.shape) for t in (q, k, v))  # torch.empty takes longer
    _differentiate((q, k, v, out, lse), dout, dlse, options, grads)
    return grads


def _run_bwd_out(dout, q, k, v, out, lse, dlse, dq, dk, dv, *options):
    check_like([(t.shape, t.dtype) for t in (q, k, v)], q.device, dq=dq, dk=dk, dv=dv)
    check_filled(dq=dq, dk=dk, dv=dv)
    _differentiate((q, k, v, out, lse), dout, dlse, options, (dq, dk, dv))


def _differentiate(saved, dout, dlse, options, grads) -> None:
    scale, causal, left, right, deterministic, how = (
        *options,
        *(None, False, -1, -1, False, "auto")[len(options) :],
    )
    q, k, v, out, lse = saved
    call = dispatch.call_of(q, k, v, (scale, causal, left, right, how))
    of_out, of_lse = _results(call, q)
    check_like((of_out, of_lse, of_out), q.device, out=out, lse=lse, dout=dout)
    check_dlse(dlse, lse)
    call.require_gradient(deterministic)
    call.backward(saved, dout, dlse, deterministic, grads)


def _results(call, q):
    """Shape and dtype of out and of lse."""
    p = call.problem
    out = (p.batch, p.seqlen_q, p.heads, p.head_dim_v)
    return (out, q.dtype), ((p.batch, p.heads, p.seqlen_q), torch.float32)


def check_dlse(dlse, lse) -> None:
    """A gradient of lse, if there is one; any dtype and strides."""
    if dlse is not None and (dlse.shape != lse.shape or dlse.device != lse.device):
        raise ArgumentError(
            f"dlse must have the shape and device of lse\n{describe(dlse=dlse, lse=lse)}"
        )


def check_like(wanted, device, **given) -> None:
    """Results and gradients that a caller hands in: shape, dtype and device, and lse contiguous."""
    for (shape, dtype), (name, t) in zip(wanted, given.items()):
        if t.device != device:
            raise ArgumentError(f"{name} must be on the device of q, {device}\n{describe(**given)}")
        if t.shape != shape or t.dtype != dtype:
            kind = str(dtype).removeprefix("torch.")
            raise ArgumentError(f"{name} must be {tuple(shape)} {kind}\n{describe(**given)}")
        if name == "lse" and not t.is_contiguous():
            raise ArgumentError(f"lse must be contiguous\n{describe(**given)}")


def _fake_fwd(q, k, v, *options, **named):
    check_tensors(q, k, v)
    batch, seqlen_q, heads, _ = q.shape
    out = q.new_empty((batch, seqlen_q, heads, v.shape[3]))
    return out, q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)


def _fake_bwd(dout, q, k, v, *rest, **named):
    check_tensors(q, k, v)
    return tuple(t.new_empty(t.shape) for t in (q, k, v))


def _fake_nothing(*args, **named):
    return None


class FlashAttn(torch.autograd.Function):
    """The kernels' place in autograd."""

    @staticmethod
    def forward(q, k, v, options, call):
        """``call``: the validated one where nobody watches; else the dispatcher is asked."""
        if call is not None:
            return call.run(q, k, v)
        with below_autograd():
            return _fwd(q, k, v, *options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, ctx.options, _ = inputs
        ctx.save_for_backward(q, k, v, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return None, None, None, None, None
        q, k, v, out, lse = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        return *_gradients(dout, q, k, v, out, lse, dlse, *ctx.options), None, None


class Gradients(torch.autograd.Function):
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
            "the gradients of flash_attn_func cannot be differentiated twice; "
            "backend='reference' can be, any number of times"
        )


def _gradients(*inputs):
    if torch.is_grad_enabled() and any(
        isinstance(t, torch.Tensor) and t.requires_grad for t in inputs[:7]
    ):
        return Gradients.apply(*inputs)
    if nobody_watches(*inputs[1:4]):
        return _run_bwd(*inputs)
    with below_autograd():
        return _bwd(*inputs)


def refuse_tangents(*tensors) -> None:
    """Forward-mode AD would take the results for constants: an error instead."""
    if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise UnsupportedError(
            "flash_attn_func has no forward-mode derivative (torch.func.jvp, dual tensors); "
            "backend='reference' has one"
        )


def _autograd_fwd(q, k, v, *options):
    if forward_ad._current_level >= 0:
        refuse_tangents(q, k, v)
    if dispatch.wants_grad(q, k, v):
        scale, causal, left, right, deterministic, how = (
            *options,
            *(None, False, -1, -1, None, "auto")[len(options) :],
        )
        options = (scale, causal, left, right, wants_determinism(deterministic), how)
        return below_transforms(FlashAttn, q, k, v, options, None)
    with below_autograd():
        return _fwd(q, k, v, *options)


def recorded(function):
    """How to apply an autograd function: without a look at signatures where nobody needs one."""
    return function.apply if transforming() else super(torch.autograd.Function, function).apply


def below_transforms(function, *inputs):
    """The same where the dispatcher is at autograd already: torch.func has done its part above."""
    apply = super(torch.autograd.Function, function).apply
    if not transforming():
        return apply(*inputs)
    with enable_single_level_autograd_function():
        return apply(*inputs)


def attention(q, k, v, options):
    """``torch.ops.fa_cute.fwd`` as the dispatcher would run it, in less host time.

    ``options``: (softmax_scale, causal, window_left, window_right, deterministic, backend).
    """
    if forward_ad._current_level >= 0:
        refuse_tangents(q, k, v)
    if not dispatch.wants_grad(q, k, v):
        if nobody_watches(q, k, v):
            return _run_fwd(q, k, v, *options)
        with below_autograd():
            return _fwd(q, k, v, *options)
    *rest, deterministic, how = options
    deterministic = wants_determinism(deterministic)
    options = (*rest, deterministic, how)
    call, alone = None, nobody_watches(q, k, v)
    if alone or not stands_in(q):
        call = dispatch.call_of(q, k, v, (*rest, how))
        call.require_gradient(deterministic)
    return recorded(FlashAttn)(q, k, v, options, call if alone else None)


def nobody_watches(q, k, v) -> bool:
    """Whether the dispatcher would only call the kernel: no mode, transform, tracer or profiler.

    It costs some 10 microseconds to be asked.
    """
    return (
        type(q) in _PLAIN
        and type(k) in _PLAIN
        and type(v) in _PLAIN
        and not (q.is_meta or k.is_meta or v.is_meta)
        and _modes() == 0
        and _functions() == 0
        and not transforming()
        and torch._C._get_tracing_state() is None
        and not torch.autograd._profiler_enabled()
    )


def traced(q, k, v, options):
    """The same inside torch.compile: one operator in the graph."""
    return torch.ops.fa_cute.fwd(q, k, v, *options)


def stands_in(t) -> bool:
    """Whether this is a meta, fake or torch.func tensor: torch finds out what to run on."""
    if isinstance(t, torch.Tensor) and (
        t.device.type == "meta" or torch._C._functorch.is_functorch_wrapped_tensor(t)
    ):
        return True
    for module, name in _TRACERS:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(t, kind):
            return True
    return False


_TRACERS = (
    ("torch._subclasses.fake_tensor", "FakeTensor"),
    ("torch._subclasses.functional_tensor", "FunctionalTensor"),
)


def flash_fwd(
    q,
    k,
    v,
    *,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    out=None,
    lse=None,
    backend="auto",
):
    """out and lse, in tensors of the caller where given; autograd records nothing.

    Args:
        q, k, v, softmax_scale, causal, window_size, backend: as in `fa_cute.flash_attn_func`.
        out: (batch, seqlen_q, heads, head_dim_v) like q, rows aligned to 16 bytes.
        lse: (batch, heads, seqlen_q) float32, contiguous; natural log, -inf where no key is seen.
    """
    left, right = window_sides(window_size)
    if out is None and lse is None:
        with torch.no_grad():
            return attention(q, k, v, (softmax_scale, causal, left, right, False, backend))
    if out is None or lse is None:
        new_out, new_lse = _fake_fwd(q, k, v)
        out, lse = new_out if out is None else out, new_lse if lse is None else lse
    with torch.no_grad():
        _fwd_out(q, k, v, out, lse, softmax_scale, causal, left, right, backend)
    return out, lse


def flash_bwd(
    dout,
    q,
    k,
    v,
    out,
    lse,
    *,
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
    """dq, dk, dv of `flash_fwd`, in tensors of the caller where given; autograd records nothing.

    Args:
        dout, dlse: gradients of out and (or None) of lse.
        q, k, v, out, lse: what `flash_fwd` was given and returned; out and lse may also belong to
            attention over more keys than k has (ring attention): each call then adds its keys'
            share.
        dq, dk, dv: like q, k, v, rows aligned to 16 bytes; overwritten.
        deterministic: as in `fa_cute.flash_attn_func`.
    """
    left, right = window_sides(window_size)
    grads = [
        t.new_empty(t.shape) if grad is None else grad for grad, t in zip((dq, dk, dv), (q, k, v))
    ]
    options = (softmax_scale, causal, left, right, wants_determinism(deterministic), backend)
    with torch.no_grad():
        _bwd_out(dout, q, k, v, out, lse, dlse, *grads, *options)
    return tuple(grads)


def window_sides(window_size) -> tuple[int, int]:
    left, right = normalise_window(window_size, False)
    return -1 if left is None else left, -1 if right is None else right


def _register() -> None:
    for name, run in (
        ("fwd", _run_fwd),
        ("fwd_out", _run_fwd_out),
        ("bwd", _run_bwd),
        ("bwd_out", _run_bwd_out),
    ):
        for key in KEYS:
            library.impl(name, run, key)
    library.impl("fwd", _autograd_fwd, "Autograd")
    library.impl("bwd", _gradients, "Autograd")
    for name, fake in (
        ("fwd", _fake_fwd),
        ("fwd_out", _fake_nothing),
        ("bwd", _fake_bwd),
        ("bwd_out", _fake_nothing),
    ):
        torch.library.register_fake(f"fa_cute::{name}", fake, lib=library)


_register()
