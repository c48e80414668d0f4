"""From tensors and options to the kernel that runs them: validated once, then looked up."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

import torch

from . import arch as archs
from . import launch, reference, tune
from .arch import Arch
from .compile import NO_LENGTHS
from .errors import ArgumentError, DeterminismError, FaCuteError, UnsupportedError
from .lengths import Lengths
from .problem import (
    ALIGN_BYTES,
    AttnProblem,
    as_kernels_read,
    autocast_hint,
    check_layout,
    check_plain,
    in_memory,
)

BACKENDS = ("auto", "cuda", "sim", "reference")
SWITCHES = ("FA_CUTE_DETERMINISTIC", "FLASH_ATTENTION_DETERMINISTIC")
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def wants_grad(*tensors) -> bool:
    """Whether autograd would record this call."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def wants_determinism(deterministic) -> bool:
    """The argument, or where it is None what torch and the environment ask for."""
    if deterministic is None:
        return torch.are_deterministic_algorithms_enabled() or any(
            os.environ.get(name) == "1" for name in SWITCHES
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


def refusal(arch: Arch, reasons: tuple[str, ...]) -> str:
    """The text of an UnsupportedError: every reason, what there is, what to do."""
    lines = "\n".join(f"  {reason}" for reason in reasons)
    return (
        f"flash_attn_func has no kernel for this call on {arch.name}:\n{lines}\n"
        f"implemented on {arch.name}: {tune.summary(arch)}; backend='reference' runs everything"
    )


def no_gradient(problem: AttnProblem, arch: Arch, deterministic: bool, reasons) -> FaCuteError:
    """What to raise where a call has no backward: whether it is for determinism alone."""
    if deterministic and not tune.missing_backward(problem, arch, False):
        return DeterminismError(
            "deterministic gradients were asked for (by the argument, by "
            f"torch.use_deterministic_algorithms or by {' or '.join(SWITCHES)}), which this call "
            f"cannot give on {arch.name}: {'; '.join(reasons)}; deterministic=False runs it"
        )
    return UnsupportedError(refusal(arch, reasons))


@dataclass(frozen=True)
class Options:
    """What an operator is told beside its tensors; -1 is a window without limit on that side."""

    softmax_scale: float | None = None
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    backend: str = "auto"


@dataclass(frozen=True)
class Call:
    """One validated call: everything but the tensors."""

    problem: AttnProblem
    arch: Arch | None  # None for the reference
    backend: str
    num_sms: int = 0  # of the tensors' device
    plain: bool = False  # no stride of the inputs needs `plain_strides`
    given: tuple[bool, bool, bool, bool] = NO_LENGTHS  # which lengths there are

    @cached_property
    def resolved(self):
        """The compiled forward and its config."""
        return launch.resolve(self.problem, self.arch, self.backend, self.given)

    @cached_property
    def _rest(self) -> tuple:
        p = self.problem
        return launch.rest(p.softmax_scale, self.num_sms, p.limits)

    def rest(self, q, lengths, ints: int) -> tuple:
        """What kernels take after their tensors; ``ints`` of scratch for a list of tiles."""
        return self._rest

    @property
    def forward_ints(self) -> int:
        """Scratch of the forward."""
        return 0

    def require_gradient(self, deterministic: bool) -> None:
        """Raise before the forward runs if the backward could not."""
        if self.backend == "reference" or deterministic in self._differentiable:
            return
        reasons = tune.missing_backward(self.problem, self.arch, deterministic)
        if reasons:
            raise no_gradient(self.problem, self.arch, deterministic, reasons)
        self._differentiable.add(deterministic)

    @cached_property
    def _differentiable(self) -> set[bool]:
        """The values of ``deterministic`` that were found to have a backward."""
        return set()

    def outputs(self, q):
        """out and lse, uninitialised."""
        p = self.problem
        out = q.new_empty((p.batch, p.seqlen_q, p.heads, p.head_dim_v))  # torch.empty takes longer
        return out, q.new_empty((p.batch, p.heads, p.seqlen_q), dtype=torch.float32)

    def run(self, q, k, v, lengths: Lengths | None = None):
        """out and lse."""
        out, lse = self.outputs(q)
        self.forward(q, k, v, out, lse, lengths)
        return out, lse

    def forward(self, q, k, v, out, lse, lengths: Lengths | None = None) -> None:
        """Fill out and lse."""
        p = self.problem
        if q.requires_grad or k.requires_grad or v.requires_grad:  # DLPack refuses them
            q, k, v = q.detach(), k.detach(), v.detach()
        if not p.has_work:
            out.zero_()
            lse.fill_(float("-inf"))
        elif self.backend == "reference":
            found = self.reference(q, k, v, lengths=lengths)
            out.copy_(found[0])
            lse.copy_(found[1])
        else:
            if not self.plain:
                q, k, v, out = (launch.plain_strides(t) for t in (q, k, v, out))
            rest = self.rest(q, lengths, self.forward_ints)
            launch.forward((q, k, v, out, lse), self.resolved, rest, self.arch)

    def reference(self, q, k, v, sink=None, lengths: Lengths | None = None):
        """The same in plain torch, in float32 or float64."""
        p = self.problem
        options = {"window": p.window, "softcap": p.softcap, "sink": sink, "dtype": _wide(q)}
        if lengths is None:
            return reference.attention(q, k, v, p.softmax_scale, p.causal, **options)
        if q.device.type != "cpu":  # there they have been looked at
            lengths.check_values(q, k)
        args = (lengths.sequences(q, k), p.softmax_scale, p.causal)
        return reference.attention_of_sequences(q, k, v, *args, **options)

    def backward(self, saved, dout, dlse, deterministic: bool, grads, lengths=None) -> None:
        """Fill ``grads`` = (dq, dk, dv) from ``saved`` = (q, k, v, out, lse)."""
        saved = tuple(t.detach() for t in saved)
        p = self.problem
        if not p.has_work:
            for grad in grads:
                grad.zero_()
            return
        dout = as_kernels_read(dout.detach())
        if dlse is not None:
            dlse = in_memory(dlse.detach()).float().contiguous()
        if self.backend == "reference":
            options = {"dlse": dlse, "window": p.window, "dtype": _wide(dout)}
            args, find = (p.softmax_scale, p.causal), reference.gradients
            if lengths is not None:
                args = (lengths.sequences(*saved[:2]), *args)
                find = reference.gradients_of_sequences
            for grad, value in zip(grads, find(dout, *saved[:3], *args, **options)):
                grad.copy_(value)
            return
        found = self._backward(deterministic, dlse is not None)
        rest = self.rest(saved[0], lengths, found.ints)
        launch.run_backward((*saved, dout, dlse), grads, found, rest, self.arch)

    def _backward(self, deterministic: bool, has_dlse: bool) -> launch.Backward:
        """The compiled backward: looked for once, since its config checks its whole plan."""
        key = deterministic, has_dlse
        if key not in self._backwards:
            p = self.problem
            how = (self.arch, self.backend, has_dlse, self.given)
            spec = tune.backward_spec(p, deterministic)
            self._backwards[key] = launch.resolve_backward(spec, p, *how)
        return self._backwards[key]

    @cached_property
    def _backwards(self) -> dict[tuple[bool, bool], launch.Backward]:
        return {}


@dataclass(frozen=True)
class VarlenCall(Call):
    """The same for sequences one after the other; their lengths are tensors, and no part of it."""

    @cached_property
    def forward_ints(self) -> int:
        """Scratch of the forward."""
        p = self.problem
        spec = tune.forward_spec(p, self.arch)
        return launch.tile_ints(self.resolved[1], spec, p, p.heads_kv)

    def rest(self, q, lengths, ints: int) -> tuple:
        """What kernels take after their tensors; ``ints`` of scratch for a list of tiles."""
        p, tiles = self.problem, launch.scratch(q, ints)
        return launch.rest(p.softmax_scale, self.num_sms, p.limits, lengths.tensors, tiles)

    def outputs(self, q):
        """out and lse, uninitialised."""
        p = self.problem
        out = q.new_empty((p.seqlen_q, p.heads, p.head_dim_v))
        return out, q.new_empty((p.heads, p.seqlen_q), dtype=torch.float32)


def _wide(t) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32


_seen: dict[tuple, Call] = {}  # calls that were validated
_SEEN_LIMIT = 4096
_REPEATED = "cuda"  # on CPU tensors the environment and the open session decide


def call_of(q, k, v, options: Options | tuple, lengths: Lengths | None = None) -> Call:
    """The call of the operators for these tensors; raises what is wrong with it.

    ``options`` are the fields of `Options`, in a tuple where that is quicker.
    """
    key = repeat_key(q, k, v, options)
    if key is not None and lengths is not None:
        key = (*key, lengths.key)
    call = _seen.get(key)
    if call is None:
        options = options if isinstance(options, Options) else Options(*options)
        call = _validated(q, k, v, options, lengths)
        if key is not None and call.problem.has_work:
            if len(_seen) >= _SEEN_LIMIT:
                _seen.clear()
            plain = all(launch.plain_strides(t) is t for t in (q, k, v))
            call = _seen[key] = replace(call, plain=plain)
    return call


def repeat_key(q, k, v, options) -> tuple | None:
    """What tells this call from others that were validated; None where validation must look.

    Two equal keys give the same answers to all questions of `AttnProblem.of`, `tune` and
    `check_layout`; the operators' schemas have fixed the types of the options.
    """
    if (
        type(q) not in _PLAIN
        or type(k) not in _PLAIN
        or type(v) not in _PLAIN
        or q.device.type != _REPEATED
        or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGN_BYTES
        or q.is_neg()
        or k.is_neg()
        or v.is_neg()
    ):
        return None
    return (
        (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride()),
        (q.dtype, k.dtype, v.dtype, q.device, k.device, v.device),
        options,
        os.environ.get("FA_CUTE_BACKEND"),
    )


def _validated(q, k, v, options: Options, lengths: Lengths | None) -> Call:
    window = (options.window_left, options.window_right)
    if lengths is None:
        kind, how = Call, {"softmax_scale": options.softmax_scale, "causal": options.causal}
        problem = AttnProblem.of(q, k, v, window_size=window, **how)
    else:
        kind = partial(VarlenCall, given=lengths.given)
        how = (options.softmax_scale, options.causal, window, 0.0)
        problem = AttnProblem.of_sequences(q, k, v, lengths, how)
    backend = resolve_backend(options.backend, problem, q)
    if backend == "reference":
        return kind(problem, None, backend)
    arch = arch_of(q.device)
    reasons = tune.missing_forward(problem, arch)
    if reasons:
        raise UnsupportedError(refusal(arch, reasons) + autocast_hint(q))
    check_layout(q=q, k=k, v=v)
    if lengths is not None:
        check_plain(**lengths.named)
    return kind(problem, arch, backend, launch.num_sms(q.device, arch))
