"""AttnProblem: one call of attention, validated and normalised.

Everything that is wrong with a caller's input is found here, before a kernel is looked for; whether
a kernel exists for a valid problem is `tune.py`'s question.
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass, replace

import torch

from .errors import ArgumentError, UnsupportedError

DTYPE_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
LARGEST = 3.4028234663852886e38  # of float32
ALIGN_BYTES = 16  # of pointers and rows: what TMA and the vector copies need
SINK_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class AttnProblem:
    """A validated problem; everything but the data. Hashable."""

    dtype: str  # "bf16", "fp16", "fp32", "fp64"
    device: str  # "cpu", "cuda"
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    softmax_scale: float
    causal: bool  # window[1] == 0
    window: tuple[int | None, int | None]  # keys seen left and right of the diagonal, None: all
    softcap: float
    has_sink: bool
    varlen: bool = False  # sequences one after the other: seqlens are those of all together

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of q, k, v and out."""
        return _DTYPES[self.dtype]

    @property
    def qhead_per_kvhead(self) -> int:
        """Query heads that share one key and value head."""
        return self.heads // self.heads_kv

    @property
    def has_work(self) -> bool:
        """False when the answer needs no kernel: nothing to compute, or nothing to attend to."""
        return min(self.batch, self.seqlen_q, self.seqlen_k) > 0

    @property
    def limited(self) -> tuple[bool, bool]:
        """Whether kernels are told a limit on the left, on the right (``causal`` needs none)."""
        return self.window[0] is not None, self.window[1] is not None and not self.causal

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """These limits; larger ones than the lengths, which 32 bits may not hold, are the same as
        the lengths.
        """
        longest = (self.seqlen_k, self.seqlen_q)
        sides = zip(self.window, longest, self.limited, strict=True)
        return tuple(min(side, most) if limited else None for side, most, limited in sides)

    @classmethod
    def typical(cls, dtype, head_dims, *, qhead_per_kvhead=1, **options) -> AttnProblem:
        """A small problem of one kind, for questions that have no tensors."""
        if dtype not in DTYPE_NAMES and dtype not in _DTYPES:
            raise ArgumentError(
                f"dtype is {dtype!r}; allowed: {', '.join(_DTYPES)} or torch dtypes"
            )
        dtype = _DTYPES.get(dtype, dtype)
        for name, value in (("head_dim", head_dims[0]), ("head_dim_v", head_dims[1])):
            check_count(name, value)
        check_count("qhead_per_kvhead", qhead_per_kvhead)
        q = torch.empty(1, 1, qhead_per_kvhead, head_dims[0], dtype=dtype, device="meta")
        k = torch.empty(1, 1, 1, head_dims[0], dtype=dtype, device="meta")
        v = torch.empty(1, 1, 1, head_dims[1], dtype=dtype, device="meta")
        if options.pop("sink", False):
            options["sink"] = torch.empty(qhead_per_kvhead, device="meta")
        varlen = options.pop("varlen", False)
        return replace(cls.of(q, k, v, **options), varlen=bool(varlen))

    @classmethod
    def of(
        cls,
        q,
        k,
        v,
        *,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        sink=None,
    ) -> AttnProblem:
        """Validate one call; raises ArgumentError with every tensor described."""
        check_tensors(q, k, v, sink)
        options = (softmax_scale, causal, window_size, softcap)
        return cls._of(q, k, v, q.shape[0], options, sink is not None)

    @classmethod
    def of_sequences(cls, q, k, v, lengths, options=(None, False, (-1, -1), 0.0), sink=None):
        """The same for sequences that lie one after the other, q (total_q, heads, head_dim).

        ``options``: (softmax_scale, causal, window_size, softcap).
        """
        check_tensors(q, k, v, sink, packed=(True, True))
        lengths.check(q, k)
        problem = cls._of(q, k, v, lengths.batch, options, sink is not None)
        return replace(problem, varlen=True)

    @classmethod
    def _of(cls, q, k, v, batch: int, options: tuple, has_sink: bool) -> AttnProblem:
        softmax_scale, causal, window_size, softcap = options
        if not isinstance(causal, bool):
            raise ArgumentError(f"causal is {causal!r}; it must be True or False")
        scale = check_number("softmax_scale", softmax_scale, q.shape[-1] ** -0.5)
        cap = check_number("softcap", softcap, 0.0)
        if cap < 0:
            raise ArgumentError(f"softcap is {cap}; it must be positive, or 0 for none")
        window = normalise_window(window_size, causal)
        return cls(
            dtype=DTYPE_NAMES[q.dtype],
            device=q.device.type,
            batch=batch,
            seqlen_q=q.shape[-3],
            seqlen_k=k.shape[-3],
            heads=q.shape[-2],
            heads_kv=k.shape[-2],
            head_dim=q.shape[-1],
            head_dim_v=v.shape[-1],
            softmax_scale=scale,
            causal=window[1] == 0,
            window=window,
            softcap=cap,
            has_sink=has_sink,
        )


def describe(**tensors) -> str:
    """One line per tensor: shape, dtype, device, strides."""
    width = max(map(len, tensors))
    lines = []
    for name, t in tensors.items():
        if isinstance(t, torch.Tensor):
            text = f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')} on {t.device}"
            if t.layout == torch.strided and not t.is_nested:
                text += f", strides {tuple(t.stride())}"
        else:
            text = f"{type(t).__name__} (not a tensor)"
        lines.append(f"  {name:{width}}: {text}")
    return "\n".join(lines)


def check_number(name: str, value, default: float) -> float:
    """A finite Python number, or the default for None."""
    if value is None:
        return float(default)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        hint = "; call .item() first" if isinstance(value, torch.Tensor) else ""
        raise ArgumentError(f"{name} is a {type(value).__name__}; it must be a real number{hint}")
    if not abs(value) <= LARGEST:  # also for NaN; kernels take it in float32
        raise ArgumentError(f"{name} is {value}; it must be finite (in float32)")
    return float(value)


def check_count(name: str, value) -> None:
    """A positive int."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ArgumentError(f"{name} is {value!r}; it must be a positive int")


def normalise_window(window_size, causal: bool) -> tuple[int | None, int | None]:
    """(left, right) with None for no limit; ``causal`` limits the right side to 0."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ArgumentError(f"window_size is {window_size!r}; it must be a pair (left, right)")
    sides = []
    for name, side in zip(("left", "right"), window_size, strict=True):
        if side is not None and (isinstance(side, bool) or not isinstance(side, numbers.Integral)):
            raise ArgumentError(
                f"window_size {name} is {side!r}; it must be an int, -1 or None for no limit"
            )
        if side is not None and side < -1:
            raise ArgumentError(
                f"window_size {name} is {side}; it must be >= 0, or -1 or None for no limit"
            )
        sides.append(None if side is None or side == -1 else int(side))
    if causal:
        sides[1] = 0
    return sides[0], sides[1]


_PADDED, _PACKED = "4 dimensions (batch, seqlen, heads, head_dim)", "3 (rows, heads, head_dim)"
_DIMENSIONS = {
    (False, False): f"q, k, v must have {_PADDED}",
    (True, True): f"q, k, v must have {_PACKED}, with cu_seqlens_q and cu_seqlens_k",
    (True, False): f"q must have {_PACKED}, with cu_seqlens_q; k and v {_PADDED}, without",
    (False, True): f"q must have {_PADDED}, without cu_seqlens_q; k and v {_PACKED}, with",
}


def check_tensors(q, k, v, sink=None, packed=(False, False)) -> None:
    """Types, layouts, devices, dtypes and shapes; the message shows all tensors.

    ``packed``: whether q, whether k and v have no dimension for the batch.
    """
    named = {"q": q, "k": k, "v": v}
    shown = named if sink is None else {**named, "learnable_sink": sink}

    def fail(what: str):
        raise ArgumentError(f"{what}\n{describe(**shown)}")

    if not all(isinstance(t, torch.Tensor) for t in shown.values()):
        fail("q, k, v (and learnable_sink) must be torch tensors")
    for name, t in shown.items():
        if t.is_nested or t.layout != torch.strided:
            fail(
                f"{name} must be a dense strided tensor; nested and sparse tensors are not accepted"
            )
        if t.is_conj() or t.is_neg():
            fail(f"{name} is a lazy conjugate or negative view; call .resolve_neg() first")
    if len({t.device for t in shown.values()}) > 1:
        fail("all tensors must be on one device")
    if q.dtype not in DTYPE_NAMES or len({t.dtype for t in named.values()}) > 1:
        fail("q, k, v must have one dtype out of " + _dtypes(DTYPE_NAMES) + autocast_hint(q))
    _check_shapes(q, k, v, packed, fail)
    if sink is not None and (sink.shape != (q.shape[-2],) or sink.dtype not in SINK_DTYPES):
        fail(
            f"learnable_sink must be ({q.shape[-2]},), one logit per query head, "
            + _dtypes(SINK_DTYPES)
        )


def check_dimensions(q, k, v, packed, fail=None) -> None:
    """How many dimensions there must be, for ``packed`` as in `check_tensors`."""
    if (q.ndim, k.ndim, v.ndim) != (4 - packed[0], 4 - packed[1], 4 - packed[1]):
        if fail is not None:
            fail(_DIMENSIONS[packed])
        raise ArgumentError(f"{_DIMENSIONS[packed]}\n{describe(q=q, k=k, v=v)}")


def _check_shapes(q, k, v, packed, fail) -> None:
    check_dimensions(q, k, v, packed, fail)
    if packed == (False, False) and not q.shape[0] == k.shape[0] == v.shape[0]:
        fail("q, k, v must have the same batch")
    if k.shape[:-1] != v.shape[:-1]:
        fail("k and v must have the same seqlen and heads")
    if q.shape[-1] != k.shape[-1]:
        fail("q and k must have the same head_dim")
    if min(q.shape[-2], k.shape[-2]) == 0:
        fail("heads and heads_kv must be at least 1")
    if min(q.shape[-1], v.shape[-1]) == 0:
        fail("head_dim and head_dim_v must be at least 1")
    if q.shape[-2] % k.shape[-2]:
        fail(f"heads ({q.shape[-2]}) must be a multiple of heads_kv ({k.shape[-2]})")


def check_plain(**tensors) -> None:
    """Kernels read memory: no subclass that stands for something else."""
    for name, t in tensors.items():
        if type(t) not in (torch.Tensor, torch.nn.Parameter):
            raise UnsupportedError(
                f"{name} is a {type(t).__module__}.{type(t).__qualname__}; kernels take "
                "plain torch tensors only; use backend='reference'"
            )


def check_layout(**tensors) -> None:
    """What kernels need beyond a valid problem: plain tensors, unit last stride, 16-byte rows."""
    check_plain(**tensors)
    faults = [fault for name, t in tensors.items() for fault in _layout_faults(name, t)]
    if faults:
        raise ArgumentError(
            "; ".join(faults) + "; call .contiguous() or .clone()\n" + describe(**tensors)
        )


def check_filled(**tensors) -> None:
    """The same for tensors that kernels write: also no two elements in one place."""
    check_layout(**tensors)
    for name, t in tensors.items():
        if torch._debug_has_internal_overlap(t) == 1:
            raise ArgumentError(
                f"{name}: elements share memory, so they cannot all be written; call .clone()\n"
                + describe(**tensors)
            )


def packed(*shape: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of a tensor without gaps."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return shape, tuple(reversed(strides))


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


def in_memory(t):
    """The tensor, or a copy where its memory does not hold its values: torch hands over negative
    views and zeros without memory.
    """
    return t.clone() if t.is_neg() or t._is_zerotensor() else t


def as_kernels_read(t):
    """The tensor where kernels can read it, else a packed copy: a gradient has any strides."""
    t = in_memory(t)
    return t.clone(memory_format=torch.contiguous_format) if _layout_faults("", t) else t


def plain_strides(t: torch.Tensor) -> torch.Tensor:
    """The same elements with the strides of dimensions of size 1 replaced.

    torch leaves those strides arbitrary, while the kernels declare every stride a multiple of 16
    bytes.
    """
    shape = t.shape
    if 1 not in shape:
        return t
    for n, s in zip(shape, t.stride()):
        if n == 1 and (s % 8 or s <= 0):
            break
    else:
        return t  # as good as packed: most tensors
    strides, packed = list(t.stride()), 1
    for dim in reversed(range(t.ndim)):
        if t.shape[dim] == 1:
            strides[dim] = packed
        packed = max(packed, strides[dim] * t.shape[dim])
    return t if strides == list(t.stride()) else t.as_strided(t.shape, strides)


def _layout_faults(name: str, t) -> list[str]:
    faults = []
    if t.stride(-1) != 1 and t.shape[-1] > 1:
        faults.append(f"{name}: the last stride must be 1")
    for dim in range(t.ndim - 1):
        if t.shape[dim] > 1 and t.stride(dim) * t.element_size() % ALIGN_BYTES:
            faults.append(f"{name}: stride {t.stride(dim)} of dim {dim} is no multiple of 16 bytes")
    if t.numel() and t.data_ptr() % ALIGN_BYTES:
        faults.append(f"{name}: the data do not start at a multiple of {ALIGN_BYTES} bytes")
    return faults


def _dtypes(allowed) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in allowed)


def autocast_hint(q) -> str:
    """What to add to an error about dtypes where autocast is on."""
    kind = q.device.type
    if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
        wanted = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
        return f" (torch.autocast does not convert them here: call .to(torch.{wanted}))"
    return ""
