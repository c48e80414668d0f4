"""The public functions: attention on CUDA tensors, and on CPU tensors through the simulator."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch.autograd.function import once_differentiable

from . import arch as archs
from . import launch, reference, tune
from .arch import Arch
from .errors import ArgumentError, DeterminismError, UnsupportedError
from .problem import ALIGN_BYTES, AttnProblem, as_kernels_read, check_layout

BACKENDS = ("auto", "cuda", "sim", "reference")
_PLAIN = (torch.Tensor, torch.nn.Parameter)


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
        softmax_scale: factor on the scores, default ``head_dim ** -0.5``.
        causal: query i sees keys j <= i + seqlen_k - seqlen_q (bottom-right aligned).
        window_size: (left, right) keys seen on each side of that diagonal, -1 or None for no limit;
            ``causal`` sets the right side to 0.
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
    key = None
    if learnable_sink is None and type(softcap) is float and softcap == 0.0:
        key = repeat_key(q, k, v, softmax_scale, causal, window_size, (deterministic, backend))
        if key in _seen and isinstance(return_lse, bool):
            out, lse = _seen[key].run(q, k, v)
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
    backend = resolve_backend(backend, problem, q)
    if backend == "reference":
        out, lse = _reference(q, k, v, learnable_sink, problem)
    else:
        arch = arch_of(q.device)
        grad = wants_grad(q, k, v, learnable_sink)
        reasons = tune.missing_forward(problem, arch)
        if grad:
            reasons += tune.missing_backward(problem, arch, deterministic)
        if reasons:
            raise UnsupportedError(refusal(arch, reasons))
        check_layout(q=q, k=k, v=v)
        call = Call(problem, arch, backend, deterministic)
        out, lse = call.run(q, k, v)
        if key is not None and problem.has_work:
            remember(key, call, q, k, v)
    return (out, lse) if return_lse else out


_seen: dict[tuple, Call] = {}  # problems that were validated, and how they run
_SEEN_LIMIT = 4096
_REPEATED = "cuda"  # on CPU tensors the environment and the open session decide


def repeat_key(q, k, v, softmax_scale, causal, window_size, how) -> tuple | None:
    """What tells this call from others that were validated; None where validation must look.

    Two equal keys give the same answers to all questions of `AttnProblem.of`, `tune` and
    `check_layout`. Types are part of it where Python takes unequal types for equal (1 and True).
    """
    deterministic, backend = how
    if not (
        type(q) in _PLAIN
        and type(k) in _PLAIN
        and type(v) in _PLAIN
        and q.device.type == _REPEATED
        and (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGN_BYTES == 0
        and (softmax_scale is None or type(softmax_scale) is float)
        and (causal is True or causal is False)
        and type(window_size) is tuple
        and window_size == (-1, -1)
        and (deterministic is None or type(deterministic) is bool)
        and (backend == "auto" or backend == "cuda")
    ):
        return None
    grad = wants_grad(q, k, v)
    return (
        (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride()),
        (q.dtype, k.dtype, v.dtype, q.device, k.device, v.device),
        (softmax_scale, causal, backend, backend == "auto" and os.environ.get("FA_CUTE_BACKEND")),
        wants_determinism(deterministic) if grad else None,
        grad,
    )


def remember(key: tuple, call: Call, *tensors) -> None:
    """The next call with this key needs no validation."""
    if len(_seen) >= _SEEN_LIMIT:
        _seen.clear()
    _seen[key] = replace(call, plain=all(launch.plain_strides(t) is t for t in tensors))


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
        options: softmax_scale, window_size, softcap, sink (bool) as in `flash_attn_func`.
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


def refusal(arch: Arch, reasons: tuple[str, ...]) -> str:
    """The text of an UnsupportedError: every reason, what there is, what to do."""
    lines = "\n".join(f"  {reason}" for reason in reasons)
    return (
        f"flash_attn_func has no kernel for this call on {arch.name}:\n{lines}\n"
        f"implemented on {arch.name}: {tune.summary(arch)}; backend='reference' runs everything"
    )


def wants_grad(*tensors) -> bool:
    """Whether autograd would record this call."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def wants_determinism(deterministic) -> bool:
    """The argument, or where it is None what torch and the environment ask for."""
    if deterministic is None:
        return torch.are_deterministic_algorithms_enabled() or any(
            os.environ.get(name, "") == "1"
            for name in ("FA_CUTE_DETERMINISTIC", "FLASH_ATTENTION_DETERMINISTIC")
        )
    if not isinstance(deterministic, bool):
        raise ArgumentError(f"deterministic is {deterministic!r}; it must be True, False or None")
    return deterministic


def resolve_backend(backend, problem: AttnProblem, q) -> str:
    """The backend that runs this call: never "auto"."""
    asked = backend
    if backend == "auto":
        backend = os.environ.get("FA_CUTE_BACKEND", "").strip().lower() or "auto"
        asked = f"{backend} (from FA_CUTE_BACKEND)"
    if backend not in BACKENDS:
        raise ArgumentError(f"backend is {asked!r}; allowed: {', '.join(BACKENDS)}")
    if backend == "auto":
        backend = {"cpu": "sim", "cuda": "cuda"}.get(problem.device)
        if backend is None:
            raise UnsupportedError(
                f"there are no kernels for tensors on {q.device}; "
                "use CUDA or CPU tensors, or backend='reference'"
            )
    needs = {"sim": "cpu", "cuda": "cuda"}.get(backend, problem.device)
    if problem.device != needs:
        raise ArgumentError(
            f"backend='{asked}' needs {needs.upper()} tensors; q is on {q.device}; "
            "use backend='auto' to follow the tensors"
        )
    return backend


def default_arch() -> Arch:
    """What CPU tensors are simulated on: the open session's, else FA_CUTE_ARCH, else sm_100a."""
    session = launch.simulated_arch()
    if session is not None:
        return session
    return archs.get(os.environ.get("FA_CUTE_ARCH", "").strip() or archs.DEFAULT)


def arch_of(device: torch.device) -> Arch:
    """The architecture that a device's tensors run on."""
    if device.type == "cpu":
        return default_arch()
    index = torch.cuda.current_device() if device.index is None else device.index
    return _cuda_arch(index)


@cache
def _cuda_arch(index: int) -> Arch:
    return archs.of_capability(*launch.capability(index))


def _reference(q, k, v, sink, problem: AttnProblem):
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out, lse = reference.attention(
        q,
        k,
        v,
        problem.softmax_scale,
        problem.causal,
        window=problem.window,
        softcap=problem.softcap,
        sink=sink,
        dtype=dtype,
    )
    return out.to(q.dtype), lse.float()


@dataclass(frozen=True)
class Call:
    """One call that a kernel runs: everything but the tensors."""

    problem: AttnProblem
    arch: Arch
    backend: str
    deterministic: bool
    plain: bool = False  # no stride of the inputs needs `plain_strides`

    @cached_property
    def resolved(self):
        """The compiled forward and its config."""
        return launch.resolve(self.problem, self.arch, self.backend)

    def run(self, q, k, v):
        """out and lse, recorded by autograd where an input asks for it."""
        return FlashAttn.apply(q, k, v, self) if wants_grad(q, k, v) else self.forward(q, k, v)

    def forward(self, q, k, v):
        """out and lse, new tensors."""
        p = self.problem
        out = torch.empty(
            (p.batch, p.seqlen_q, p.heads, p.head_dim_v), dtype=q.dtype, device=q.device
        )
        lse = torch.empty((p.batch, p.heads, p.seqlen_q), dtype=torch.float32, device=q.device)
        if p.has_work:
            if q.requires_grad or k.requires_grad or v.requires_grad:  # DLPack refuses them
                q, k, v = q.detach(), k.detach(), v.detach()
            if not self.plain:
                q, k, v = (launch.plain_strides(t) for t in (q, k, v))
            launch.forward((q, k, v, out, lse), self.resolved, p, self.arch)
        else:
            out.zero_()
            lse.fill_(float("-inf"))
        return out, lse

    def backward(self, saved, dout, dlse):
        """dq, dk, dv; at least one of the two gradients is there."""
        q, k, v, out, lse = (t.detach() for t in saved)
        if not self.problem.has_work:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        dout = torch.zeros_like(out) if dout is None else as_kernels_read(dout)
        if dlse is not None:
            dlse = dlse.float().contiguous()
        spec = tune.backward_spec(self.problem, self.deterministic)
        tensors = (q, k, v, out, lse, dout, dlse)
        return launch.backward(tensors, spec, self.problem, self.arch, self.backend)


class FlashAttn(torch.autograd.Function):
    """The kernels' place in autograd. Differentiable once."""

    @staticmethod
    def forward(ctx, q, k, v, call: Call):  # torch inspects a setup_context's signature every call
        out, lse = call.forward(q, k, v)
        ctx.call = call
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):
        if dout is None and dlse is None:
            return None, None, None, None
        return *ctx.call.backward(ctx.saved_tensors, dout, dlse), None


__all__ = ["Support", "can_use", "flash_attn_func", "supports"]
