"""What every forward kernel is traced with: the static part of a problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import PlanError
from ..ops import mask

ELEMENT_BYTES = 2
DTYPES = ("bf16", "fp16")


@dataclass(frozen=True)
class Exp2Split:
    """Which exponentials of a row are polynomials instead of work for the special function unit.

    `emulated` of every `period` elements, from group `start` on; groups are 32 elements.  The last
    group never takes it: the hand-over of P waits for it, and the unit's latency is the shorter
    one.
    """

    period: int = 0  # elements; 0: none
    emulated: int = 4
    start: int = 0

    def polynomial(self, i: int, count: int, group: int = 32) -> bool:
        """Whether element `i` of `count` is computed by the polynomial (pairs stay together)."""
        if self.period == 0 or not self.start <= i // group < count // group - 1:
            return False
        return (i % group) % self.period >= self.period - self.emulated


@dataclass(frozen=True)
class FwdSpec:
    """Static part of a forward problem.

    Tensors are as the user holds them: q (batch, seqlen_q, heads, head_dim), k and v (batch,
    seqlen_k, heads_kv, head_dim or head_dim_v), out like q, lse (batch, heads, seqlen_q) fp32.
    With ``varlen`` the rows of all sequences follow each other: q (total_q, heads, head_dim), k and
    v likewise, lse (heads, total_q). Lengths, strides and the size of a window are dynamic.
    """

    dtype: str  # of q, k, v and out
    head_dim: int
    head_dim_v: int
    causal: bool  # bottom-right aligned
    qhead_per_kvhead: int = 1
    window: tuple[bool, bool] = (False, False)  # whether a call limits the left, the right side
    varlen: bool = False
    negative_scale: bool = False  # only for a kernel that must know it while it is traced
    custom: mask.Band | None = None  # a mask of the caller's own

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise PlanError(f"dtype {self.dtype!r}; one of {DTYPES}")
        if self.qhead_per_kvhead < 1:
            raise PlanError(f"qhead_per_kvhead {self.qhead_per_kvhead}; at least 1")
        mask.check(self.causal, self.window, self.custom, backward=False)

    @property
    def element(self) -> Any:
        """The DSL's element type."""
        import cutlass

        return {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}[self.dtype]

    def band(self, left: Any = None, right: Any = None) -> mask.Band:
        """Which keys a query sees; ``left`` and ``right`` count where ``window`` says so."""
        return self.custom or mask.limited(self.causal, self.window, left, right)

    @property
    def kv_bytes_per_row(self) -> int:
        """Bytes of one key and its value."""
        return (self.head_dim + self.head_dim_v) * ELEMENT_BYTES
