"""The public functions: attention on CUDA tensors, and on CPU tensors through the simulator."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import arch as archs
from . import dispatch, operators, operators_varlen, tune
from .arch import Arch
from .dispatch import (
    Call,
    arch_of,
    default_arch,
    refusal,
    resolve_backend,
    wants_determinism,
    wants_grad,
)
from .errors import ArgumentError, DeterminismError, UnsupportedError
from .lengths import Lengths, check_longest
from .problem import AttnProblem, autocast_hint, check_layout, check_tensors


@dataclass(frozen=True)
class Support:
    """The answer of `supports` and `can_use`: true when the call would run."""

    ok: bool
    reasons: tuple[str, ...]  # why not; empty when ok
    arch: str | None  # None for the reference
    kernel: str | None  # the class of the forward kernel
    deterministic: bool  # the same input gives the same bits, whatever else runs

    def __bool__(self) -> bool:
        return self.ok


def flash_attn_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    learnable_sink=None,
    deterministic=None,
    *,
    return_lse=False,
    backend="auto",
):
    """Exact attention ``softmax(q k^T * softmax_scale) v`` without materialising the scores.

    Args:
        q: (batch, seqlen_q, heads, head_dim) bf16 or fp16, last dimension contiguous, every row and
            the first element at a multiple of 16 bytes; any other strides.
        k, v: (batch, seqlen_k, heads_kv, head_dim / head_dim_v), same dtype, device and alignment;
            ``heads`` is a multiple of ``heads_kv`` (GQA, MQA).
        softmax_scale: factor on the scores, default ``head_dim ** -0.5``; any sign, and 0.
        causal: query i sees keys j <= i + seqlen_k - seqlen_q (bottom-right aligned).
        window_size: (left, right) keys seen on each side of that diagonal, -1 or None for no limit;
            ``causal`` sets the right side to 0, and a right side of 0 is ``causal``. Other sizes do
            not compile another kernel.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 for none.
        learnable_sink: (heads,) a further logit per head that has no value, or None.
        deterministic: bitwise repeatable gradients: dq is added up in a fixed order. None follows
            ``torch.are_deterministic_algorithms_enabled()``, FA_CUTE_DETERMINISTIC=1 and
            FLASH_ATTENTION_DETERMINISTIC=1. The forward always is.
        return_lse: also return the natural log of each row's sum of exponentials; differentiable.
        backend: "auto" (CUDA tensors: "cuda"; CPU tensors: "sim", the simulator; overridden by
            FA_CUTE_BACKEND), or one of "cuda", "sim", "reference" (plain torch, any dtype).

    Returns:
        out (batch, seqlen_q, heads, head_dim_v) in the dtype of q, or (out, lse) with lse
        (batch, heads, seqlen_q) float32. Rows that see no key are 0, their lse -inf.

    Raises:
        ArgumentError: tensors or scalars that do not fit together; a ValueError.
        UnsupportedError: valid, but no kernel here does it; the message says what and what does.
        DeterminismError: determinism asked for where it cannot be given.

    Source: Dao et al., FlashAttention 1 to 4; tile shapes and register budgets from ``tune.py``.
    """
    if type(softcap) is float and softcap == 0.0 and learnable_sink is None:
        if torch.compiler.is_compiling():
            left, right = (-1 if side is None else side for side in window_size)
            out, lse = operators.traced(
                q, k, v, (softmax_scale, causal, left, right, deterministic, backend)
            )
            return (out, lse) if return_lse else out
        if _is_usual(q, softmax_scale, causal, window_size, deterministic, backend, return_lse):
            left, right = window_size
            options = (softmax_scale, causal, left, right, backend)
            out, lse = operators.attention(q, k, v, options, deterministic)
            return (out, lse) if return_lse else out
    problem = AttnProblem.of(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        sink=learnable_sink,
    )
    if not isinstance(return_lse, bool):
        raise ArgumentError(f"return_lse is {return_lse!r}; it must be True or False")
    deterministic = wants_determinism(deterministic)
    left, right = (-1 if side is None else side for side in problem.window)
    options = (problem.softmax_scale, causal, left, right, backend)
    if operators.stands_in(q) and backend != "reference":  # plain torch finds its own way
        out, lse = operators.attention(q, k, v, options, deterministic)
        return (out, lse) if return_lse else out
    chosen = resolve_backend(backend, problem, q)
    if chosen == "reference":
        out, lse = Call(problem, None, chosen).reference(q, k, v, learnable_sink)
        out, lse = out.to(q.dtype), lse.float()
    else:
        _require_kernels(problem, q, wants_grad(q, k, v, learnable_sink), deterministic)
        check_layout(q=q, k=k, v=v)
        out, lse = operators.attention(q, k, v, options, deterministic)
    return (out, lse) if return_lse else out


def _is_usual(q, softmax_scale, causal, window_size, deterministic, backend, return_lse) -> bool:
    """Whether the operator, which validates tensors but not the types of options, can be called.

    Only where it remembers what it validated: elsewhere an error should come from here.
    """
    return (
        type(q) in dispatch._PLAIN
        and getattr(q, dispatch._REPEATED)
        and type(window_size) is tuple
        and len(window_size) == 2
        and operators.plain_options((softmax_scale, causal, *window_size, deterministic, backend))
        and (backend == "auto" or backend == "cuda")
        and (return_lse is True or return_lse is False)
    )


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    learnable_sink=None,
    deterministic=None,
    *,
    return_lse=False,
    backend="auto",
):
    """Attention within each of many sequences of different lengths, in one call.

    Args:
        q: (total_q, heads, head_dim), the rows of all sequences one after the other, with
            ``cu_seqlens_q``; or (batch, seqlen_q, heads, head_dim), a padded batch, without.
            Strides as in `flash_attn_func`, but all rows of a padded batch lie at one distance.
        k, v: likewise with or without ``cu_seqlens_k``; q may be padded and k packed.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 on the device of q: sequence i has the rows
            from ``cu_seqlens[i]`` to before ``cu_seqlens[i + 1]``. Rows before the first and behind
            the last belong to no sequence.
        max_seqlen_q, max_seqlen_k: taken for compatibility (int, tensor of one number, or None) and
            not needed: the schedule is made on the device, from the lengths themselves.
        seqused_q, seqused_k: (batch,) int32: only the first so many rows of a sequence count.
        softmax_scale, causal, window_size, softcap, learnable_sink, deterministic, return_lse,
            backend: as in `flash_attn_func`; masks are aligned at the end of each sequence.

    Returns:
        out like q with head_dim_v, or (out, lse); lse is (heads, total_q) for packed q, (batch,
        heads, seqlen_q) for padded q, float32. Rows of q that see no key, or belong to no sequence,
        are 0 and their lse -inf; gradients of rows that nothing depends on are 0.

    The numbers in cu_seqlens and seqused are read on the device only (with backend="reference" and
    for CPU tensors on the host, which checks them). On CUDA it is the caller's part that cu_seqlens
    do not decrease, are not beyond the tensors, and that seqused is not more than a sequence has.

    Raises: as `flash_attn_func`.
    """
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    check_longest(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    plain = type(softcap) is float and softcap == 0.0 and learnable_sink is None
    how = (deterministic, backend, return_lse)
    if plain and torch.compiler.is_compiling():
        left, right = (-1 if side is None else side for side in window_size)
        options = (softmax_scale, causal, left, right, deterministic, backend)
        tensors = lengths.rows(q, k, v)
        out, lse = torch.ops.fa_cute.varlen_fwd(*tensors, *lengths, *options)
    elif plain and _is_usual(q, softmax_scale, causal, window_size, *how):
        options, tensors = (softmax_scale, causal, *window_size, backend), lengths.rows(q, k, v)
        out, lse = operators_varlen.attention(*tensors, lengths, options, deterministic)
    else:
        lengths.require_any()
        check_tensors(q, k, v, learnable_sink, lengths.packed)
        options = (softmax_scale, causal, window_size, softcap)
        out, lse = _any_varlen(lengths.rows(q, k, v), lengths, options, learnable_sink, how)
    if not lengths.packed[0]:
        batch, seqlen = q.shape[:2]
        out = out.view(batch, seqlen, *out.shape[1:])
        lse = lse.view(lse.shape[0], batch, seqlen).transpose(0, 1)
    return (out, lse) if return_lse else out


def _any_varlen(tensors, lengths: Lengths, options, sink, how):
    """The call whose arguments may be anything, for packed tensors."""
    deterministic, backend, return_lse = how
    q, k, v = tensors
    problem = AttnProblem.of_sequences(q, k, v, lengths, options, sink)
    if not isinstance(return_lse, bool):
        raise ArgumentError(f"return_lse is {return_lse!r}; it must be True or False")
    deterministic = wants_determinism(deterministic)
    left, right = (-1 if side is None else side for side in problem.window)
    options = (problem.softmax_scale, problem.causal, left, right, backend)
    if operators.stands_in(q) and backend != "reference":  # plain torch finds its own way
        return operators_varlen.attention(q, k, v, lengths, options, deterministic)
    chosen = resolve_backend(backend, problem, q)
    if chosen == "reference":
        out, lse = Call(problem, None, chosen).reference(q, k, v, sink, lengths)
        return out.to(q.dtype), lse.float()
    _require_kernels(problem, q, wants_grad(q, k, v, sink), deterministic)
    check_layout(q=q, k=k, v=v)
    return operators_varlen.attention(q, k, v, lengths, options, deterministic)


def _require_kernels(problem: AttnProblem, q, grad: bool, deterministic: bool) -> None:
    """Raise UnsupportedError, or DeterminismError, where there are none."""
    arch = arch_of(q.device)
    reasons = tune.missing_forward(problem, arch)
    without = tune.missing_backward(problem, arch, deterministic) if grad else ()
    if without and not reasons:
        raise dispatch.no_gradient(problem, arch, deterministic, without)
    if reasons:
        raise UnsupportedError(refusal(arch, reasons + without) + autocast_hint(q))


def can_use(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    learnable_sink=None,
    deterministic=None,
    *,
    backend="auto",
) -> Support:
    """Whether `flash_attn_func` would run this call, and if not, every reason; raises nothing.

    Takes the arguments of `flash_attn_func`; never reads the data.
    """
    try:
        problem = AttnProblem.of(
            q,
            k,
            v,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            sink=learnable_sink,
        )
        deterministic = wants_determinism(deterministic)
        backend = resolve_backend(backend, problem, q)
        if backend == "reference":
            return Support(True, (), None, None, True)
        arch = arch_of(q.device)
    except (ArgumentError, UnsupportedError, DeterminismError) as error:
        return Support(False, (str(error),), None, None, False)
    reasons = tune.missing_forward(problem, arch)
    if wants_grad(q, k, v, learnable_sink):
        reasons += tune.missing_backward(problem, arch, deterministic)
    try:
        check_layout(q=q, k=k, v=v)
    except (ArgumentError, UnsupportedError) as error:
        reasons += (str(error),)
    return _support(reasons, problem, arch)


def supports(
    *,
    arch=None,
    dtype="bf16",
    head_dim=128,
    head_dim_v=None,
    causal=False,
    qhead_per_kvhead=1,
    backward=False,
    deterministic=False,
    **options,
) -> Support:
    """The same answer without tensors: is there a kernel for this kind of problem?

    Args:
        arch: "sm_100a", "sm_90a", ...; None for what `flash_attn_func` simulates CPU tensors on.
        dtype: "bf16", "fp16" or a torch dtype.
        head_dim, head_dim_v: sizes of a head of q and k, and of v (None: the same).
        qhead_per_kvhead: heads / heads_kv.
        backward: also ask for the gradient; ``deterministic`` for a repeatable one.
        options: softmax_scale, window_size, softcap, sink (bool) as in `flash_attn_func`; varlen
            (bool) for `flash_attn_varlen_func`.
    """
    target = default_arch() if arch is None else archs.get(arch)
    problem = AttnProblem.typical(
        dtype,
        (head_dim, head_dim if head_dim_v is None else head_dim_v),
        causal=causal,
        qhead_per_kvhead=qhead_per_kvhead,
        **options,
    )
    reasons = tune.missing_forward(problem, target)
    if backward:
        reasons += tune.missing_backward(problem, target, deterministic)
    return _support(reasons, problem, target)


def _support(reasons: tuple[str, ...], problem: AttnProblem, arch: Arch) -> Support:
    kernel = tune.kernel_name(problem, arch) if not reasons else None
    return Support(not reasons, reasons, arch.name, kernel, not reasons)


__all__ = ["Support", "can_use", "flash_attn_func", "flash_attn_varlen_func", "supports"]
