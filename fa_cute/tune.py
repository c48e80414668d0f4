"""Which kernel runs a problem, and how it is configured: support matrix and compile key at once.

A row says for which architectures, head dims and masks a frozen config is used. A config checks its
plan against the architecture when it is made, so a row that does not fit fails on import.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from .arch import ARCHS, Arch
from .bwd.args import BwdSpec
from .bwd.sm90 import plan as bwd_sm90
from .bwd.sm100 import plan as bwd_sm100
from .errors import UnsupportedError
from .fwd.args import Exp2Split, FwdSpec
from .fwd.sm90.plan import FwdConfig as FwdSm90Config
from .fwd.sm100.plan import FwdConfig as FwdSm100Config

if TYPE_CHECKING:
    from .problem import AttnProblem

DTYPES = ("bf16", "fp16")
KERNELS = {  # family -> module and class of the forward kernel; imported when a kernel is compiled
    "sm90": ("fa_cute.fwd.sm90.kernel", "FwdSm90"),
    "sm100": ("fa_cute.fwd.sm100.kernel", "FwdSm100"),
}
BACKWARD_KERNELS = {
    "sm90": ("fa_cute.bwd.sm90.kernel", "BwdSm90"),
    "sm100": ("fa_cute.bwd.sm100.kernel", "BwdSm100"),
}
RATIO_AT_RUN_TIME = ("sm90", "sm100")  # one kernel for MHA, GQA and MQA

# What kernels do beyond full and causal attention of dense batches with a softmax_scale that is not
# negative. A kernel that learns something says so in its line.
WINDOW, VARLEN, NEGATIVE_SCALE = "window_size", "variable lengths", "negative softmax_scale"
FORWARD_DOES = {
    "sm90": (WINDOW, VARLEN, NEGATIVE_SCALE),
    "sm100": (WINDOW, VARLEN, NEGATIVE_SCALE),
}
BACKWARD_DOES = {
    "sm90": (WINDOW, VARLEN, NEGATIVE_SCALE),
    "sm100": (WINDOW, VARLEN, NEGATIVE_SCALE),
}
STATIC_SIGN = ("sm90",)  # the forward is another kernel where the scale is negative


@dataclass(frozen=True)
class Row:
    """One line of a table: where it applies, and the config of the kernel."""

    arches: tuple[str, ...]
    head_dim: int
    head_dim_v: int
    causal: bool | None  # None: both
    cfg: Any
    step: int = 0  # smaller head dims that are multiples of it are padded to this row's; 0: none
    window: bool | None = None  # whether a side of the mask has a limit of the call's; None: both

    def covers(
        self, arch: Arch, head_dim: int, head_dim_v: int, causal: bool, window: bool = False
    ) -> bool:
        """Whether this row configures such a problem."""
        if arch.name not in self.arches or self.causal not in (None, causal):
            return False
        if self.window not in (None, window):
            return False
        if self.step == 0:
            return (head_dim, head_dim_v) == (self.head_dim, self.head_dim_v)
        fits = head_dim <= self.head_dim and head_dim_v <= self.head_dim_v
        return fits and head_dim % self.step == head_dim_v % self.step == 0

    def __str__(self) -> str:
        mask = {None: "any", True: "causal", False: "full"}[self.causal]
        dims = f"{self.head_dim}" + (
            f"_{self.head_dim_v}" if self.head_dim_v != self.head_dim else ""
        )
        mask = "window" if self.window else mask
        return f"{'+'.join(self.arches)}-d{dims}-{mask}"


def _sm100_forward() -> tuple[Row, ...]:
    """The share of exp2 that the multiply-add units take, per head dim and mask.

    sm_103a has twice the exponential units of sm_100a and computes all of them there. Head dim 64
    has half the tensor work per exponential, so it moves more. Registers: the MMA warp needs 56
    (below that its descriptors spill), correction 72. Which split is free of spills follows no rule
    in persistent walks; these are, in both dtypes, and the compile matrix says so.
    """
    splits = {  # (arch, head_dim) of the full mask -> scheduler, softmax and correction registers
        ("sm_100a", 64): ("lpt_persistent", 184, 80),
        ("sm_100a", 128): ("persistent", 184, 72),
        ("sm_103a", 64): ("persistent", 184, 72),
        ("sm_103a", 128): ("persistent", 184, 72),
    }
    emulated = {64: (8, 8), 96: (10, 16), 128: (10, 16), 192: (16, 16)}  # period: full, causal
    rows = []
    for arch in ("sm_100a", "sm_103a"):
        for head_dim, head_dim_v, more in (
            (64, 64, {}),
            (96, 96, {}),
            (128, 128, {}),
            (192, 128, {"kv_parts": (3, 2), "o_over_q": True}),
        ):
            for causal in (True, False):
                period = emulated[head_dim][causal] if arch == "sm_100a" else 0
                order, softmax, correction = ("lpt" if causal else "persistent", 192, 72)
                if not causal and (arch, head_dim) in splits:
                    order, softmax, correction = splits[arch, head_dim]
                cfg = FwdSm100Config(
                    arch=arch,
                    head_dim=head_dim,
                    head_dim_v=head_dim_v,
                    softmax_regs=softmax,
                    correction_regs=correction,
                    exp2=Exp2Split(period, emulated=4, start=1),
                    max_by_load=arch == "sm_103a",
                    scheduler=order,
                    **more,
                )
                rows.append(Row((arch,), head_dim, head_dim_v, causal, cfg))
    return tuple(rows)


def _sm90_forward() -> tuple[Row, ...]:
    """Tiles by padded head dims; TMA fills what a head dim lacks with zeros."""
    many = {"early_pass": 0}
    two = {"teams": 2, "early_pass": 0, "q_stages": 1, "scores_first": True}
    rows = []
    for causal in (True, False):
        scheduler = {"scheduler": "snake" if causal else "persistent"}
        # Smaller blocks throw less away at the diagonal (NOTES has the figures).
        blocks = {"tile_n": 64, "kv_stages": 4} if causal else {"tile_n": 80, "kv_stages": 3}
        for head_dim, head_dim_v, tile in (
            (64, 64, {"teams": 4, "tile_n": 64, "kv_stages": 4, **many}),
            (96, 96, {"teams": 3, "tile_n": 112, "kv_stages": 2, **many}),
            (128, 128, {"teams": 3, **blocks, **many}),
            (192, 128, {"teams": 3, "tile_n": 80, "q_stages": 1, **many}),
            (192, 192, {"tile_n": 80, **two, "q_stages": 2}),
            # The CUDA 13 assembler spills the causal loops' last register.
            (256, 256, {"tile_n": 80, **two, "late_ids": causal}),
        ):
            cfg = FwdSm90Config(head_dim=head_dim, head_dim_v=head_dim_v, **tile, **scheduler)
            if causal and head_dim == 256:
                # 80 keys and the limits of a window do not fit in the registers.
                smaller = replace(cfg, tile_n=64)
                rows.append(Row(("sm_90a",), 256, 256, True, smaller, step=8, window=True))
            rows.append(Row(("sm_90a",), head_dim, head_dim_v, causal, cfg, step=8))
    return tuple(rows)


FWD: tuple[Row, ...] = (*_sm90_forward(), *_sm100_forward())


def row_forward(
    arch: Arch, head_dim: int, head_dim_v: int, causal: bool, window: bool = False
) -> Row | None:
    """The first row that covers a problem."""
    for row in FWD:
        if row.covers(arch, head_dim, head_dim_v, causal, window):
            return row
    return None


def forward(spec: FwdSpec, arch: Arch):
    """The config of the forward kernel for a spec."""
    banded = spec.causal or any(spec.window)
    row = row_forward(arch, spec.head_dim, spec.head_dim_v, banded, any(spec.window))
    if row is None:
        raise UnsupportedError(
            f"{_dims(spec.head_dim, spec.head_dim_v)} is not implemented on {arch.name}; "
            f"implemented: {summary(arch)}"
        )
    if spec.varlen and arch.family == "sm100" and (banded or spec.head_dim != 96):
        # With tiles from a list the split of a row spills in some; these in none, whichever library
        # set assembles.
        softmax, correction = 184, 80
        if arch.name == "sm_100a" and spec.head_dim == 128 and not banded:
            softmax, correction = (184, 64) if spec.dtype == "bf16" else (192, 72)
        return replace(row.cfg, softmax_regs=softmax, correction_regs=correction)
    if spec.varlen and arch.family == "sm90":
        return replace(row.cfg, listed=True)
    return row.cfg


def forward_spec(problem: AttnProblem, arch: Arch) -> FwdSpec:
    """The static part of a problem: what the forward kernel is traced with."""
    ratio = 1 if arch.family in RATIO_AT_RUN_TIME else problem.qhead_per_kvhead
    return FwdSpec(
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        causal=problem.causal,
        qhead_per_kvhead=ratio,
        window=problem.limited,
        varlen=problem.varlen,
        negative_scale=problem.softmax_scale < 0 and arch.family in STATIC_SIGN,
    )


def kernel_name(problem: AttnProblem, arch: Arch) -> str:
    """The class of the forward kernel that runs a problem."""
    return KERNELS[arch.family][1]


def missing_forward(problem: AttnProblem, arch: Arch) -> tuple[str, ...]:
    """Why the forward of a valid problem has no kernel here; empty when it has one."""
    head_dims = sorted({(r.head_dim, r.head_dim_v) for r in FWD if arch.name in r.arches})
    if not head_dims:
        ready = [a.name for a in ARCHS.values() if any(a.name in r.arches for r in FWD)]
        return (f"{arch.name} has no forward kernel; architectures that have: {', '.join(ready)}",)
    reasons = []
    if problem.dtype not in DTYPES:
        reasons.append(f"dtype {problem.dtype}: implemented: {', '.join(DTYPES)}")
    dims = (problem.head_dim, problem.head_dim_v)
    if row_forward(arch, *dims, problem.causal) is None:
        larger = [d for d in head_dims if d[0] >= dims[0] and d[1] >= dims[1]]
        hint = f"; pad to {_dims(*min(larger))}" if larger else ""
        reasons.append(f"{_dims(*dims)}: implemented: {_all_dims(arch)}{hint}")
    if problem.softcap:
        reasons.append(f"softcap={problem.softcap}: only 0 is implemented")
    if problem.has_sink:
        reasons.append("learnable_sink: only None is implemented")
    return (*reasons, *_beyond("forward", problem, arch))


def beyond(kind: str, arch: Arch, window: bool, varlen: bool, negative: bool) -> tuple[str, ...]:
    """Which of these the kernel of an architecture does not do."""
    asked = {WINDOW: window, VARLEN: varlen, NEGATIVE_SCALE: negative}
    does = (FORWARD_DOES if kind == "forward" else BACKWARD_DOES).get(arch.family, ())
    return tuple(what for what, wanted in asked.items() if wanted and what not in does)


def _beyond(kind: str, problem: AttnProblem, arch: Arch) -> tuple[str, ...]:
    """The same for a problem, as reasons."""
    scale = problem.softmax_scale
    missing = beyond(kind, arch, any(problem.limited), problem.varlen, scale < 0)
    given = {WINDOW: f"={problem.window}", NEGATIVE_SCALE: f" {scale}"}
    return tuple(f"{what}{given.get(what, '')}: not implemented" for what in missing)


def backward_spec(problem: AttnProblem, deterministic: bool, arch: Arch) -> BwdSpec:
    """The static part of a problem's gradient."""
    spec = BwdSpec(
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        causal=problem.causal,
        qhead_per_kvhead=problem.qhead_per_kvhead,
        deterministic=deterministic,
        window=problem.limited,
        varlen=problem.varlen,
    )
    return preferred(spec, arch)


def preferred(spec: BwdSpec, arch: Arch) -> BwdSpec:
    """What runs a backward: a gradient that need not be deterministic is so all the same where that
    kernel is as fast.
    """
    if arch.family == "sm90" and bwd_sm90.faster_in_order(spec):
        return replace(spec, deterministic=True)
    return spec


@cache
def backward(spec: BwdSpec, arch: Arch):
    """The config of the backward for a spec; raises UnsupportedError where there is none."""
    if arch.family == "sm90":
        return bwd_sm90.config(spec)
    if arch.family == "sm100":
        return bwd_sm100.config(spec, arch)
    raise UnsupportedError(_no_backward(arch))


def missing_backward(problem: AttnProblem, arch: Arch, deterministic: bool) -> tuple[str, ...]:
    """Why a problem has no gradient on this architecture; empty when it has one."""
    if arch.family not in BACKWARD_KERNELS:
        return (_no_backward(arch),)
    if problem.dtype not in DTYPES:
        return ()  # the forward says so already
    missing = _beyond("backward", problem, arch)
    if missing:
        return tuple(f"requires_grad: {reason}" for reason in missing)
    try:
        backward(backward_spec(problem, deterministic, arch), arch)
    except UnsupportedError as error:
        return (str(error),)
    return ()


def _no_backward(arch: Arch) -> str:
    return (
        f"requires_grad: {arch.name} has no backward kernel; use torch.no_grad() or .detach() for "
        "the forward alone"
    )


def summary(arch: Arch) -> str:
    """What the forward of an architecture covers, in one line."""
    rows = [r for r in FWD if arch.name in r.arches]
    if not rows:
        return "nothing"
    masks = "full, causal and windows" if WINDOW in FORWARD_DOES[arch.family] else "full and causal"
    return f"{'/'.join(DTYPES)}, {_all_dims(arch)}, {masks}, MHA/GQA/MQA, any seqlens"


def _all_dims(arch: Arch) -> str:
    """The head dims of an architecture in words."""
    rows = [r for r in FWD if arch.name in r.arches]
    words = dict.fromkeys(_dims(r.head_dim, r.head_dim_v) for r in rows if not r.step)
    for step in dict.fromkeys(r.step for r in rows if r.step):
        most = max((r.head_dim, r.head_dim_v) for r in rows if r.step == step)
        words[f"multiples of {step} up to {_dims(*most)}"] = None
    return ", ".join(words)


def _dims(head_dim: int, head_dim_v: int) -> str:
    return f"head_dim {head_dim}" + (
        f" with head_dim_v {head_dim_v}" if head_dim_v != head_dim else ""
    )
