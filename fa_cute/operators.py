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
from .dispatch import _PLAIN, wants_determinism
from .errors import UnsupportedError
from .problem import check_filled, check_like, check_tensors, normalise_window, plain_strides

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
_FWD_DEFAULTS = {x.name: x.default_value for x in _fwd._schema.arguments if x.has_default_value()}
_FWD_VALUES = tuple(_FWD_DEFAULTS.values())
_BWD_DEFAULTS = (None, False, -1, -1, False, "auto")  # of its options
below_autograd = torch._C._AutoDispatchBelowAutograd
_modes, _functions = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
transforming = torch._C._are_functorch_transforms_active
_tracing, _profiling = torch._C._get_tracing_state, torch.autograd._profiler_enabled


def _run_fwd(q, k, v, scale=None, causal=False, left=-1, right=-1, deterministic=None, how="auto"):
    return dispatch.call_of(q, k, v, (scale, causal, left, right, how)).run(q, k, v)


def _run_fwd_out(q, k, v, out, lse, *options):
    dispatch.call_of(q, k, v, options).fill(q, k, v, out, lse)


def _run_bwd(dout, q, k, v, out, lse, dlse=None, *options):
    options, deterministic = _of_backward(options)
    call = dispatch.call_of(q, k, v, options)
    return call.gradients((q, k, v, out, lse), dout, dlse, deterministic)


def _run_bwd_out(dout, q, k, v, out, lse, dlse, dq, dk, dv, *options):
    grads = check_gradients((q, k, v), dq=dq, dk=dk, dv=dv)
    options, deterministic = _of_backward(options)
    call = dispatch.call_of(q, k, v, options)
    call.backward((q, k, v, out, lse), dout, dlse, deterministic, grads)


def _of_backward(options: tuple) -> tuple[tuple, bool]:
    """The fields of `dispatch.Options`, and ``deterministic``; the dispatcher drops defaults."""
    scale, causal, left, right, deterministic, how = (*options, *_BWD_DEFAULTS[len(options) :])
    return (scale, causal, left, right, how), deterministic


def check_gradients(inputs, **given) -> tuple:
    """Gradients that a caller hands in, as kernels write them."""
    check_like([(t.shape, t.dtype) for t in inputs], inputs[0].device, **given)
    check_filled(**given)
    return tuple(map(plain_strides, given.values()))


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


def _gradients(dout, q, k, v, out, lse, dlse=None, *options):
    if dispatch.wants_grad(dout, q, k, v, out, lse, dlse):
        return Gradients.apply(dout, q, k, v, out, lse, dlse, *options)
    of_call, deterministic = _of_backward(options)
    call = known(q, k, v, of_call)
    if call is not None:
        return call.gradients((q, k, v, out, lse), dout, dlse, deterministic)
    with below_autograd():
        return _bwd(dout, q, k, v, out, lse, dlse, *options)


def refuse_tangents(*tensors) -> None:
    """Forward-mode AD would take the results for constants: an error instead."""
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(t).tangent is not None for t in tensors
    ):
        raise UnsupportedError(
            "flash_attn_func has no forward-mode derivative (torch.func.jvp, dual tensors); "
            "backend='reference' has one"
        )


def undisturbed() -> bool:
    """Whether there is no mode, transform, dual level, tracer or profiler."""
    return (
        _modes() == 0
        and _functions() == 0
        and forward_ad._current_level < 0
        and not transforming()
        and _tracing() is None
        and not _profiling()
    )


def known(q, k, v, options: tuple, lengths=None):
    """The validated call where the dispatcher would only call the kernel, or None: being asked
    costs it some microseconds.
    """
    if not undisturbed():
        return None
    call = dispatch.seen(q, k, v, options, lengths)
    if call is None and all(type(t) in _PLAIN and not t.is_meta for t in (q, k, v)):
        call = dispatch.call_of(q, k, v, options, lengths)
    return call


def without_signatures(function):
    """How to apply an autograd function where torch.func, which looks at them, does nothing."""
    return super(torch.autograd.Function, function).apply


_attend = without_signatures(FlashAttn)


def recorded(function, *inputs):
    """Apply an autograd function."""
    return (function.apply if transforming() else without_signatures(function))(*inputs)


def below_transforms(function, *inputs):
    """The same where the dispatcher is at autograd already: torch.func has done its part above."""
    apply = without_signatures(function)
    if not transforming():
        return apply(*inputs)
    with enable_single_level_autograd_function():
        return apply(*inputs)


def _autograd_fwd(
    q, k, v, scale=None, causal=False, left=-1, right=-1, deterministic=None, how="auto"
):
    options = (scale, causal, left, right, how)
    call = known(q, k, v, options)
    if call is not None:
        return _run_known(call, q, k, v, options, deterministic)
    return _dispatched(below_transforms, q, k, v, options, deterministic)


def attention(q, k, v, options: tuple, deterministic):
    """``torch.ops.fa_cute.fwd`` as the dispatcher would run it, in less host time.

    ``options``: the fields of `dispatch.Options`.
    """
    call = known(q, k, v, options)
    if call is not None:
        return _run_known(call, q, k, v, options, deterministic)
    require_gradient(q, k, v, options, deterministic)
    return _dispatched(recorded, q, k, v, options, deterministic)


def _run_known(call, q, k, v, options: tuple, deterministic):
    """`attention` where the dispatcher has nothing to do."""
    if not dispatch.wants_grad(q, k, v):
        return call.run(q, k, v)
    deterministic = wants_determinism(deterministic)
    call.require_gradient(deterministic)
    scale, causal, left, right, how = options
    return _attend(q, k, v, (scale, causal, left, right, deterministic, how), call)


def _dispatched(apply, q, k, v, options: tuple, deterministic):
    """`attention` through the dispatcher; ``apply`` records the autograd function."""
    refuse_tangents(q, k, v)
    scale, causal, left, right, how = options
    if dispatch.wants_grad(q, k, v):
        options = (scale, causal, left, right, wants_determinism(deterministic), how)
        return apply(FlashAttn, q, k, v, options, None)
    with below_autograd():
        return _fwd(q, k, v, scale, causal, left, right, deterministic, how)


def require_gradient(q, k, v, options: tuple, deterministic, lengths=None) -> None:
    """Raise before the forward runs if the backward could not, unless torch is to find out."""
    if dispatch.wants_grad(q, k, v) and not any(map(stands_in, (q, k, v))):
        call = dispatch.call_of(q, k, v, options, lengths)
        call.require_gradient(wants_determinism(deterministic))


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
        options = (softmax_scale, causal, left, right, backend)
        call = known(q, k, v, options)
        if call is not None:
            return call.run(q, k, v)
        with torch.no_grad():
            return attention(q, k, v, options, False)
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
    """The limits as operators take them."""
    if window_size == (-1, -1):
        return -1, -1
    left, right = normalise_window(window_size, False)
    return -1 if left is None else left, -1 if right is None else right


class Packet(torch._ops.OpOverloadPacket):
    """``torch.ops.fa_cute.fwd``: a call like one that was validated, with nobody watching, goes to
    the kernel at once, as `attention` sends it. Every other one goes to the dispatcher, which takes
    2 to 4 us longer.
    """

    def __call__(self, *args, **named):
        given = args[3:]
        if undisturbed() and len(args) >= 3:
            options = (*given, *_FWD_VALUES[len(given) :])
            if named:
                asked = dict(zip(_FWD_DEFAULTS, given))
                twice = asked.keys() & named.keys()
                options = () if twice else tuple({**_FWD_DEFAULTS, **asked, **named}.values())
            if plain_options(options):
                scale, causal, left, right, deterministic, how = options
                options = scale, causal, left, right, how
                call = dispatch.seen(*args[:3], options)
                if call is not None:
                    return _run_known(call, *args[:3], options, deterministic)
        return super().__call__(*args, **named)


def plain_options(options: tuple) -> bool:
    """Whether these are the operator's, of the types that its schema has."""
    if len(options) != len(_FWD_VALUES):  # too many, or a name that it does not know
        return False
    scale, causal, left, right, deterministic, backend = options
    return (
        (scale is None or type(scale) is float)
        and (causal is True or causal is False)
        and type(left) is type(right) is int
        and (deterministic is None or deterministic is True or deterministic is False)
        and type(backend) is str
    )


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
    torch.ops.fa_cute.fwd.__class__ = Packet


_register()
