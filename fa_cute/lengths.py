"""Where the sequences of a varlen call lie, and how long they are: validated, and for plain torch.

All sequences of q lie one after the other in one dimension, (total_q, heads, head_dim), those of k
and v likewise. Per side, q and k:

    cu_seqlens  (batch + 1,)  sequence i has the rows [cu[i], cu[i + 1]); without it the rows are
                              those of a padded batch, total // batch for each sequence
    seqused     (batch,)      only the first so many of a sequence's rows count; without it all do

The numbers stay on the device: nothing here waits for it, but `sequences` and `check_values`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from .errors import ArgumentError
from .problem import check_dimensions, describe

NAMES = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
MOST_ROWS = 2**30  # of all sequences together: kernels count rows and tiles in 32 bits


class Sequence(NamedTuple):
    """Rows of one sequence."""

    offset_q: int
    len_q: int
    offset_k: int
    len_k: int


class Lengths(NamedTuple):
    """int32 tensors in the order of `NAMES`, None where not given; not all are None."""

    cu_q: torch.Tensor | None = None
    cu_k: torch.Tensor | None = None
    used_q: torch.Tensor | None = None
    used_k: torch.Tensor | None = None

    @property
    def given(self) -> tuple[bool, bool, bool, bool]:
        """Which of them there are."""
        return tuple(t is not None for t in self)

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """Those that there are, by the names that callers know."""
        return {name: t for name, t in zip(NAMES, self, strict=True) if t is not None}

    @property
    def packed(self) -> tuple[bool, bool]:
        """Whether q, whether k and v come without a dimension for the batch."""
        return self.cu_q is not None, self.cu_k is not None

    def rows(self, q, k, v) -> tuple:
        """q, k, v with all rows in one dimension: views."""
        packed_q, packed_k = self.packed
        if packed_q and packed_k:
            return q, k, v
        self.require_any()
        check_dimensions(q, k, v, self.packed)
        for name, t, packed in (("q", q, packed_q), ("k", k, packed_k), ("v", v, packed_k)):
            if not packed and t.shape[0] != self.batch:
                raise ArgumentError(
                    f"{name} has {t.shape[0]} sequences, the lengths are of {self.batch}\n"
                    f"{describe(q=q, k=k, v=v, **self.named)}"
                )
        if not packed_q:
            q = _in_one_row("q", q)
        return (q, k, v) if packed_k else (q, _in_one_row("k", k), _in_one_row("v", v))

    @property
    def batch(self) -> int:
        """How many sequences there are."""
        cu = self.cu_q if self.cu_q is not None else self.cu_k
        if cu is not None:
            return cu.shape[0] - 1
        return (self.used_q if self.used_q is not None else self.used_k).shape[0]

    def require_any(self) -> None:
        """Raise where there is no length at all."""
        if not any(self.given):
            raise ArgumentError(
                f"{', '.join(NAMES)} are all None: flash_attn_func takes batches of one length"
            )

    def check(self, q, k) -> None:
        """Types, devices and shapes, and on the CPU the numbers; raises ArgumentError.

        q and k are packed.
        """

        def fail(what: str):
            raise ArgumentError(f"{what}\n{describe(q=q, k=k, **self.named)}")

        self.require_any()
        for name, t in self.named.items():
            if not isinstance(t, torch.Tensor):
                fail(f"{name} must be a torch tensor or None; it is a {type(t).__name__}")
            if t.dtype != torch.int32:
                fail(f"{name} must be int32; call .to(torch.int32)")
            if t.ndim != 1 or not t.is_contiguous():
                fail(f"{name} must have one dimension and be contiguous")
            if t.device != q.device:
                fail(f"{name} must be on the device of q, {q.device}")
            if name.startswith("cu") and t.shape[0] < 1:
                fail(f"{name} must have batch + 1 elements, so at least one")
        counts = {name: t.shape[0] - name.startswith("cu") for name, t in self.named.items()}
        if any(count != self.batch for count in counts.values()):
            fail(f"the numbers of sequences differ: {counts}; cu_seqlens have one element more")
        for side, t, cu in (("q", q, self.cu_q), ("k", k, self.cu_k)):
            if t.shape[0] > MOST_ROWS:
                fail(f"{side} has {t.shape[0]} rows; at most {MOST_ROWS}")
            if cu is None and (t.shape[0] % self.batch if self.batch else t.shape[0]):
                fail(f"without cu_seqlens_{side} the rows of {side} must divide by {self.batch}")
        if q.device.type == "cpu" and all(type(t) is torch.Tensor for t in self.named.values()):
            self.check_values(q, k)

    def check_values(self, q, k) -> None:
        """The numbers themselves; waits for their device."""
        for side, rows, cu, used in (
            ("q", q.shape[0], self.cu_q, self.used_q),
            ("k", k.shape[0], self.cu_k, self.used_k),
        ):
            room = [rows // self.batch] * self.batch if self.batch else []
            if cu is not None:
                at = cu.tolist()
                room = [b - a for a, b in pairwise(at)]
                if min(room, default=0) < 0 or at[0] < 0 or at[-1] > rows:
                    raise ArgumentError(
                        f"cu_seqlens_{side} must not decrease, and be within 0 and the {rows} rows "
                        f"of {side}; it is {_short(at)}"
                    )
            if used is not None:
                for i, (n, most) in enumerate(zip(used.tolist(), room, strict=True)):
                    if not 0 <= n <= most:
                        raise ArgumentError(
                            f"seqused_{side}[{i}] is {n}; the sequence has {most} rows"
                        )

    def sequences(self, q, k) -> list[Sequence]:
        """The numbers, in Python: waits for the device."""
        sides = (
            _side(q.shape[0], self.batch, self.cu_q, self.used_q),
            _side(k.shape[0], self.batch, self.cu_k, self.used_k),
        )
        return [Sequence(*of_q, *of_k) for of_q, of_k in zip(*sides, strict=True)]


def check_longest(**given) -> None:
    """max_seqlen_q, max_seqlen_k: whole numbers, or tensors of one; which does not matter."""
    for name, most in given.items():
        if most is None or (type(most) is int and most >= 0):
            continue
        if isinstance(most, torch.Tensor):
            if most.ndim == 0 and not (most.is_floating_point() or most.is_complex()):
                continue
            most = f"a tensor {tuple(most.shape)} {str(most.dtype).removeprefix('torch.')}"
        elif isinstance(most, (int, torch.SymInt)) and not isinstance(most, bool) and most >= 0:
            continue
        raise ArgumentError(
            f"{name} is {most}; it must be an int, an integer tensor of 0 dimensions, or None"
        )


def _in_one_row(name: str, t):
    """(batch * seqlen, heads, head_dim): a view of a padded batch."""
    batch, seqlen, heads, head_dim = t.shape
    if batch > 1 and seqlen > 1 and t.stride(0) != seqlen * t.stride(1):
        raise ArgumentError(
            f"{name}: all rows of a padded batch must lie at one distance, so the stride of dim 0 "
            f"must be {seqlen} * {t.stride(1)}; call .contiguous()\n{describe(**{name: t})}"
        )
    return t.view(batch * seqlen, heads, head_dim)


def _side(rows: int, batch: int, cu, used) -> list[tuple[int, int]]:
    """(offset, length) of each sequence."""
    if cu is not None:
        at = cu.tolist()
        found = [(a, b - a) for a, b in pairwise(at)]
    else:
        found = [(i * (rows // batch), rows // batch) for i in range(batch)]
    if used is not None:
        found = [(start, n) for (start, _), n in zip(found, used.tolist(), strict=True)]
    return found


def _short(numbers: list[int]) -> str:
    """A list that may be long."""
    shown = ", ".join(map(str, numbers[:8]))
    return f"[{shown}{', ...' if len(numbers) > 8 else ''}]"
