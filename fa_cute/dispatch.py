"""From tensors and options to the kernel that runs them: validated once, then looked up."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from operator import is_

import torch

from . import arch as archs
from . import launch, reference, tune
from .alike import Alike
from .arch import Arch
from .compile import NO_LENGTHS
from .errors import ArgumentError, DeterminismError, FaCuteError, UnsupportedError
from .lengths import Lengths
from .problem import (
    ALIGN_BYTES,
    AttnProblem,
    as_kernels_read,
    autocast_hint,
    check_dlse,
    check_filled,
    check_layout,
    check_like,
    check_plain,
    in_memory,
    packed,
)

BACKENDS = ("auto", "cuda", "sim", "reference")
SWITCHES = ("FA_CUTE_DETERMINISTIC", "FLASH_ATTENTION_DETERMINISTIC")
_ENVIRON = os.environ._data  # what os.environ looks into; its own methods take 0.7 us
_BACKEND, *_SWITCHES = (os.fsencode(name) for name in ("FA_CUTE_BACKEND", *SWITCHES))
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def wants_grad(*tensors) -> bool:
    """Whether autograd would record this call."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


def wants_determinism(deterministic) -> bool:
    """The argument, or where it is None what torch and the environment ask for."""
    if deterministic is None:
        return torch.are_deterministic_algorithms_enabled() or b"1" in map(_ENVIRON.get, _SWITCHES)
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

    forward_ints = 0  # scratch of the forward, in a varlen call

    @cached_property
    def launches(self) -> bool:
        """Whether a kernel runs: there is something to compute, and plain torch is not to do it."""
        return self.backend != "reference" and self.problem.has_work

    @cached_property
    def resolved(self):
        """The compiled forward and its config."""
        return launch.resolve(self.problem, self.arch, self.backend, self.given)

    @cached_property
    def _numbers(self) -> tuple:
        p = self.problem
        return p.softmax_scale, self.num_sms, p.limits

    @cached_property
    def _rest(self) -> tuple:
        return launch.rest(*self._numbers)

    def rest(self, q, lengths, ints: int) -> tuple:
        """What kernels take after their tensors; ``ints`` of scratch for a list of tiles."""
        return self._rest

    def require_gradient(self, deterministic: bool) -> None:
        """Raise before the forward runs if the backward could not."""
        if deterministic in self._differentiable or self.backend == "reference":
            return
        reasons = tune.missing_backward(self.problem, self.arch, deterministic)
        if reasons:
            raise no_gradient(self.problem, self.arch, deterministic, reasons)
        self._differentiable.add(deterministic)

    @cached_property
    def _differentiable(self) -> set[bool]:
        """The values of ``deterministic`` that were found to have a backward."""
        return set()

    @cached_property
    def _results(self) -> tuple:
        """Shape, strides and dtype of out and of lse."""
        p = self.problem
        batch = () if p.varlen else (p.batch,)
        out = packed(*batch, p.seqlen_q, p.heads, p.head_dim_v)
        return (*out, p.torch_dtype), (*packed(*batch, p.heads, p.seqlen_q), torch.float32)

    @cached_property
    def _inputs(self) -> tuple:
        """Those of q, k and v without gaps, which their gradients have."""
        p = self.problem
        batch = () if p.varlen else (p.batch,)
        rows_q, rows_k = (*batch, p.seqlen_q, p.heads), (*batch, p.seqlen_k, p.heads_kv)
        found = (packed(*rows_q, p.head_dim), packed(*rows_k, p.head_dim))
        return tuple((*at, p.torch_dtype) for at in (*found, packed(*rows_k, p.head_dim_v)))

    def outputs(self, q):
        """out and lse, uninitialised."""
        empty, (out, lse) = launch.allocator(q), self._results
        return empty(*out), empty(*lse)

    def new_gradients(self, q):
        """dq, dk and dv, uninitialised."""
        empty, (dq, dk, dv) = launch.allocator(q), self._inputs
        return empty(*dq), empty(*dk), empty(*dv)

    def check_results(self, q, **given) -> None:
        """out, lse and dout, as far as given: what this call returns."""
        (out, _, dtype), (lse, _, of_lse) = self._results
        check_like(((out, dtype), (lse, of_lse), (out, dtype)), q.device, **given)

    def run(self, q, k, v, lengths: Lengths | None = None):
        """out and lse."""
        out, lse = self.outputs(q)
        self.forward(q, k, v, out, lse, lengths)
        return out, lse

    def forward(self, q, k, v, out, lse, lengths: Lengths | None = None) -> None:
        """Fill out and lse, whose strides are those of `outputs` or `launch.plain_strides`."""
        if not self.launches:
            self._without_kernel(q, k, v, out, lse, lengths)
            return
        if not self.plain:
            q, k, v = (launch.plain_strides(t) for t in (q, k, v))
        rest = self.rest(q, lengths, self.forward_ints)
        launch.forward((q, k, v, out, lse), self.resolved, rest, self.arch)

    def fill(self, q, k, v, out, lse, lengths: Lengths | None = None) -> None:
        """The same for out and lse of the caller's."""
        self.check_results(q, out=out, lse=lse)
        check_filled(out=out)
        self.forward(q, k, v, launch.plain_strides(out), lse, lengths)

    def _without_kernel(self, q, k, v, out, lse, lengths: Lengths | None) -> None:
        if self.problem.has_work:
            found = self.reference(q.detach(), k.detach(), v.detach(), lengths=lengths)
            out.copy_(found[0])
            lse.copy_(found[1])
        else:
            out.zero_()
            lse.fill_(float("-inf"))

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

    def gradients(self, saved, dout, dlse, deterministic: bool, lengths=None):
        """dq, dk and dv for ``saved`` = (q, k, v, out, lse)."""
        grads = self.new_gradients(saved[0])
        self.backward(saved, dout, dlse, deterministic, grads, lengths)
        return grads

    def backward(self, saved, dout, dlse, deterministic: bool, grads, lengths=None) -> None:
        """Fill ``grads`` = (dq, dk, dv) from ``saved`` = (q, k, v, out, lse)."""
        tensors = (*saved, dout, dlse)
        results = tensors[3:6] if dlse is None else tensors[3:]
        what = deterministic, len(results)
        found = self._seen.find(what, *results)
        if found is None or (saved[3].data_ptr() | dout.data_ptr()) % ALIGN_BYTES:
            self.check_results(saved[0], out=saved[3], lse=saved[4], dout=dout)
            check_dlse(dlse, saved[4])
            self.require_gradient(deterministic)
            if not self.launches:
                self._gradients_without_kernel(tensors, grads, lengths)
                return
            given, tensors = tensors, _readable(*tensors)
            found = self._backward(deterministic, dlse is not None)
            if self.plain and all(map(is_, given, tensors)):
                self._seen.add(what, found, *results)
        rest = self.rest(tensors[0], lengths, found.ints)
        launch.run_backward(tensors, grads, found, rest, self.arch)

    def _gradients_without_kernel(self, tensors, grads, lengths: Lengths | None) -> None:
        p = self.problem
        if not p.has_work:
            for grad in grads:
                grad.zero_()
            return
        q, k, v, _, _, dout, dlse = (None if t is None else in_memory(t.detach()) for t in tensors)
        options = {"dlse": dlse, "window": p.window, "dtype": _wide(dout)}
        args, find = (p.softmax_scale, p.causal), reference.gradients
        if lengths is not None:
            args = (lengths.sequences(q, k), *args)
            find = reference.gradients_of_sequences
        for grad, value in zip(grads, find(dout, q, k, v, *args, **options)):
            grad.copy_(value)

    def _backward(self, deterministic: bool, has_dlse: bool) -> launch.Backward:
        """The compiled backward: looked for once, since its config checks its whole plan."""
        key = deterministic, has_dlse
        if key not in self._backwards:
            p = self.problem
            how = (self.arch, self.backend, has_dlse, self.given)
            spec = tune.backward_spec(p, deterministic, self.arch)
            self._backwards[key] = launch.resolve_backward(spec, p, *how)
        return self._backwards[key]

    @cached_property
    def _backwards(self) -> dict[tuple[bool, bool], launch.Backward]:
        return {}

    @cached_property
    def _seen(self) -> Alike:
        """The same for results and gradients that were checked and can be read as they are."""
        return Alike()


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
        return launch.rest(*self._numbers, lengths, launch.scratch(q, ints))


def _readable(q, k, v, out, lse, dout, dlse) -> tuple:
    """The same values where kernels can read them: these tensors, or others."""
    q, k, v, out, dout = (launch.plain_strides(t) for t in (q, k, v, out, as_kernels_read(dout)))
    if dlse is not None:
        dlse = in_memory(dlse).float().contiguous()
    return q, k, v, out, lse, dout, dlse


def _wide(t) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32


class Seen(dict):
    """Calls that were validated, by `repeat_key`; some of them also where they are found sooner."""

    def __init__(self):
        super().__init__()
        self.alike = Alike()

    def clear(self) -> None:
        super().clear()
        self.alike.clear()


_seen = Seen()
_SEEN_LIMIT = 4096
_REPEATED = "is_cuda"  # on CPU tensors the environment and the open session decide


def call_of(q, k, v, options: tuple, lengths: Lengths | None = None) -> Call:
    """The call of the operators for these tensors; raises what is wrong with it.

    ``options`` are the fields of `Options`.
    """
    call = seen(q, k, v, options, lengths)
    if call is None:
        call = _validated(q, k, v, Options(*options), lengths)
        key = repeat_key(q, k, v, _key_of(options, lengths))
        if key is not None and call.problem.has_work:
            if len(_seen) >= _SEEN_LIMIT:
                _seen.clear()
            plain = all(launch.plain_strides(t) is t for t in (q, k, v))
            call = _seen[key] = replace(call, plain=plain)
    return call


def seen(q, k, v, options: tuple, lengths: Lengths | None = None) -> Call | None:
    """The same if it was validated before, for plain tensors; else None."""
    if type(q) not in _PLAIN or not getattr(q, _REPEATED):
        return None
    how = _key_of(options, lengths)
    call = _seen.alike.find(how, q, k, v)
    if call is None or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGN_BYTES:
        call = _seen.get(repeat_key(q, k, v, how))
        if call is not None:
            _seen.alike.add(how, call, q, k, v)
    return call


def repeat_key(q, k, v, how: tuple | None) -> tuple | None:
    """What tells this call from others that were validated; None where validation must look.

    Two equal keys give the same answers to all questions of `AttnProblem.of`, `tune` and
    `check_layout`; the operators' schemas have fixed the types of the options.
    """
    if (
        how is None
        or type(q) not in _PLAIN
        or type(k) not in _PLAIN
        or type(v) not in _PLAIN
        or not getattr(q, _REPEATED)
        or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGN_BYTES
        or q.is_neg()
        or k.is_neg()
        or v.is_neg()
    ):
        return None
    return (
        (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride()),
        (q.dtype, k.dtype, v.dtype, q.get_device(), k.get_device(), v.get_device()),
        how,
    )


def _key_of(options: tuple, lengths: Lengths | None) -> tuple | None:
    """The part of the options, the lengths (no number in them) and the environment."""
    if lengths is None:
        return options, _ENVIRON.get(_BACKEND)
    found = tuple([_key_of_length(t) for t in lengths])
    return None if False in found else (options, _ENVIRON.get(_BACKEND), found)


def _key_of_length(t) -> tuple | bool | None:
    if t is None:
        return None
    return type(t) in _PLAIN and (t.dtype, t.get_device(), t.shape, t.stride())


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
