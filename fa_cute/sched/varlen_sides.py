"""One side of a batch of sequences, as the user gives it: where they lie, and the rows between."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..ops.arith import ceil_div, hi, lo

WARP = 32
VECTOR_BYTES = 16


@dataclass(frozen=True)
class Side:
    """Queries or keys: lengths, and results whose rows of no sequence must be defined."""

    cu: Any  # (batch + 1,) int32 or None: sequences of equal room, one after the other
    used: Any  # (batch,) int32 or None: all of the room
    total: Any  # rows of the tensors
    zeros: tuple = ()  # (total, heads, d) results: such rows become 0
    lse: Any = None  # (heads, total) fp32 or None: such columns become -inf

    @property
    def outputs(self) -> bool:
        """Whether there is anything to fill."""
        return bool(self.zeros) or self.lse is not None

    def batch(self) -> Any:
        """Sequences, None if this side does not say."""
        if self.cu is not None:
            return self.cu.shape[0] - 1
        return None if self.used is None else self.used.shape[0]

    def given(self, s: Any) -> tuple[Any, Any, Any]:
        """What is given of sequence s: where it starts, ends, how much of it is used."""
        cu, used = self.cu, self.used
        ends = (None, None) if cu is None else (cu[s], cu[s + 1])
        return (*ends, None if used is None else used[s])

    def span(self, s: Any, batch: Any, given: tuple | None = None) -> tuple[Any, Any]:
        """(offset, length) of sequence s; whatever the numbers say, rows of the tensor."""
        start, end, used = self.given(s) if given is None else given
        if self.cu is None:
            room = self.total // batch
            offset = s * room
        else:
            offset = lo(hi(start, 0), self.total)
            room = end - offset
        room = hi(lo(room, self.total - offset), 0)
        if self.used is None:
            return offset, room
        return offset, hi(lo(used, room), 0)

    @cute.jit
    def fill(self, batch, part, parts):
        """What warp ``part`` of ``parts`` has to fill.

        Gap g lies before sequence g, the last one after all of them. A warp looks at as many gaps
        as it has lanes; where there are more warps than that takes, several share the rows.
        """
        lane = cute.arch.lane_idx()
        looks = ceil_div(batch + 1, WARP)
        sharing = hi(parts // looks, 1)
        share, step = part % sharing, parts // sharing
        for look in cutlass.range(part // sharing, looks, step, unroll=1):
            gap = look * WARP + lane
            offset, length = self.span(lo(hi(gap - 1, 0), batch - 1), batch)
            start = offset + length if gap > 0 else Int32(0)
            stop = self.span(lo(gap, batch - 1), batch)[0] if gap < batch else Int32(self.total)
            stop = stop if gap <= batch else Int32(0)
            for j in cutlass.range(WARP, unroll=1):
                first, end = cute.arch.shuffle_sync(start, j), cute.arch.shuffle_sync(stop, j)
                if first < end:
                    self.fill_rows(first, end, share, sharing)

    @cute.jit
    def fill_rows(self, start, stop, share, sharing):
        """Rows [start, stop), every ``sharing``-th of them; of the LSE every such head."""
        lane = cute.arch.lane_idx()
        for i in cutlass.range_constexpr(len(self.zeros)):
            tensor = self.zeros[i]
            vector = VECTOR_BYTES * 8 // tensor.element_type.width
            zero = cute.make_rmem_tensor(vector, tensor.element_type)
            zero.fill(0.0)
            per_head = tensor.shape[2] // vector
            for row in cutlass.range(start + share, stop, sharing, unroll=1):
                for v in cutlass.range(lane, tensor.shape[1] * per_head, WARP, unroll=1):
                    head = v // per_head
                    at = (row, head, (v - head * per_head) * vector)
                    place = cute.domain_offset(at, tensor).iterator.align(VECTOR_BYTES)
                    cute.autovec_copy(zero, cute.make_tensor(place, cute.make_layout(vector)))
        if cutlass.const_expr(self.lse is not None):
            for head in cutlass.range(share, self.lse.shape[0], sharing, unroll=1):
                for row in cutlass.range(start + lane, stop, WARP, unroll=1):
                    self.lse[head, row] = Float32(-math.inf)
