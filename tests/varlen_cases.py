"""Calls with sequences of any lengths, what they give and what they must: on the simulator and on
a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fa_cute import flash_attn_func, flash_attn_varlen_func, reference

from . import tolerance

BF16, FP16, NAN = torch.bfloat16, torch.float16, math.nan
NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class Side:
    """Queries or keys of a batch: what room sequences have, and how much of it they use."""

    rooms: tuple[int, ...]
    used: tuple[int, ...] | None = None
    packed: bool = True  # else a padded batch
    before: int = 0  # rows of no sequence
    after: int = 0

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(offset, length) of each sequence in rows of all of them."""
        lengths = self.rooms if self.used is None else self.used
        at = [self.before + sum(self.rooms[:s]) for s in range(len(self.rooms))]
        return list(zip(at, lengths, strict=True))

    @property
    def cu(self):
        """Cumulative lengths, None for a padded batch."""
        ends = [self.before + sum(self.rooms[:s]) for s in range(len(self.rooms) + 1)]
        return torch.tensor(ends, dtype=torch.int32) if self.packed else None

    @property
    def rows(self) -> int:
        return self.before + sum(self.rooms) + self.after

    def shaped(self, tensor: torch.Tensor) -> torch.Tensor:
        """(rows, ...) as the caller holds it."""
        if self.packed:
            return tensor
        return tensor.unflatten(0, (len(self.rooms), self.rooms[0]))


@dataclass(frozen=True)
class Case:
    """One call."""

    q: Side
    k: Side
    heads: tuple[int, int] = (2, 2)
    dims: tuple[int, int] = (64, 64)
    dtype: torch.dtype = BF16
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    deterministic: bool = True

    @property
    def options(self) -> dict:
        return {"causal": self.causal, "window_size": self.window}

    @property
    def spans(self) -> list[tuple[int, int, int, int]]:
        return [(*q, *k) for q, k in zip(self.q.spans, self.k.spans, strict=True)]


@dataclass(frozen=True)
class Call:
    """Tensors of a case; every row of no sequence is NaN, and so is what lies between rows."""

    case: Case
    tensors: tuple[torch.Tensor, ...]  # q, k, v
    dout: torch.Tensor
    dlse: torch.Tensor  # (heads, rows of q)
    backend: str = "auto"

    def leaves(self, gradients: bool):
        """q, k, v to take gradients of, as the caller holds them."""
        case = self.case
        sides = (case.q, case.k, case.k)
        return [
            side.shaped(t).detach().requires_grad_(gradients)
            for side, t in zip(sides, self.tensors, strict=True)
        ]

    def run(self, gradients: bool = True):
        """out, lse, dq, dk, dv of our kernels: rows of all sequences in one dimension.

        Without ``gradients`` the first two.
        """
        case, leaves = self.case, self.leaves(gradients)
        device, side_q, side_k = self.dout.device, case.q, case.k
        used = [
            None if side.used is None else torch.tensor(side.used, dtype=torch.int32).to(device)
            for side in (side_q, side_k)
        ]
        out, lse = flash_attn_varlen_func(
            *leaves,
            cu_seqlens_q=None if side_q.cu is None else side_q.cu.to(device),
            cu_seqlens_k=None if side_k.cu is None else side_k.cu.to(device),
            seqused_q=used[0],
            seqused_k=used[1],
            **case.options,
            deterministic=case.deterministic,
            return_lse=True,
            backend=self.backend,
        )
        grads = ()
        if gradients:
            dlse = self.dlse if side_q.packed else side_q.shaped(self.dlse.T).transpose(1, 2)
            grads = torch.autograd.grad((out, lse), leaves, (side_q.shaped(self.dout), dlse))
        if not side_q.packed:
            lse = lse.transpose(0, 1).flatten(1)
        rows = [t.flatten(0, 1) if t.dim() == 4 else t for t in (out, *grads)]
        return rows[0].detach(), lse.detach(), *rows[1:]

    def dense(self, span: tuple[int, int, int, int], gradients: bool):
        """The same of one sequence, by the call for dense batches."""
        at_q, len_q, at_k, len_k = span
        rows = (slice(at_q, at_q + len_q), *[slice(at_k, at_k + len_k)] * 2)
        leaves = [
            t[r][None].detach().requires_grad_(gradients)
            for t, r in zip(self.tensors, rows, strict=True)
        ]
        out, lse = flash_attn_func(
            *leaves, **self.case.options, deterministic=True, return_lse=True, backend=self.backend
        )
        grads = ()
        if gradients:
            given = self.dout[rows[0]][None], self.dlse[None, :, rows[0]]
            grads = torch.autograd.grad((out, lse), leaves, given)
        return out[0].detach(), lse[0].detach(), *(t[0] for t in grads)


def make(case: Case, device: str = "cpu", backend: str = "sim") -> Call:
    """Random numbers in the rows of sequences, NaN everywhere else."""
    g = torch.Generator().manual_seed(0)
    (heads, heads_kv), (d, dv) = case.heads, case.dims

    def rows(side: Side, num_heads: int, dim: int) -> torch.Tensor:
        wide = torch.full((side.rows, num_heads, dim + 8), NAN, dtype=case.dtype)
        for offset, length in side.spans:
            part = torch.randn(length, num_heads, dim, generator=g)
            wide[offset : offset + length, :, :dim] = part.to(case.dtype)
        return wide.to(device)[..., :dim]

    tensors = rows(case.q, heads, d), rows(case.k, heads_kv, d), rows(case.k, heads_kv, dv)
    dlse = torch.full((heads, case.q.rows), NAN)
    for offset, length in case.q.spans:
        dlse[:, offset : offset + length] = torch.randn(heads, length, generator=g)
    return Call(case, tensors, rows(case.q, heads, dv), dlse.to(device), backend)


def exact(call: Call, dtype):
    """out, lse, dq, dk, dv in plain torch, sequence by sequence."""
    case, tensors = call.case, [t.detach().clone() for t in call.tensors]
    window = tuple(None if side < 0 else side for side in case.window)
    wide = {"dtype": torch.float64, "device": call.dout.device}
    found = [torch.zeros(t.shape, **wide) for t in (call.dout, *tensors)]
    lse = torch.full((case.heads[0], case.q.rows), -math.inf, **wide)
    for at_q, len_q, at_k, len_k in case.spans:
        rows_q, rows_k = slice(at_q, at_q + len_q), slice(at_k, at_k + len_k)
        if len_q == 0 or len_k == 0:
            continue
        leaves = [
            t[r][None].to(dtype).requires_grad_()
            for t, r in zip(tensors, (rows_q, rows_k, rows_k), strict=True)
        ]
        out, own = reference.attention(*leaves, causal=case.causal, window=window, dtype=dtype)
        seen = own > -math.inf
        given = [call.dout[rows_q][None].to(dtype), call.dlse[None, :, rows_q][seen].to(own.dtype)]
        grads = torch.autograd.grad((out, own[seen]), leaves, given)
        for to, part, r in zip(found, (out, *grads), (rows_q, rows_q, rows_k, rows_k), strict=True):
            to[r] = part[0].double()
        lse[:, rows_q] = own[0].double()
    return found[0].detach(), lse.detach(), *found[1:]


def check_numbers(call: Call, got) -> dict[str, float]:
    """Against float64, at most twice as wrong as torch in the same dtype; 0 and -inf in rows of no
    sequence. Returns errors as shares of the bar.
    """
    want, low = exact(call, torch.float64), exact(call, call.case.dtype)
    found = {}
    for label, ours, right, theirs in zip(NAMES, got, want, low, strict=False):
        bar = 2 * tolerance.worst(theirs, right) + tolerance.rounding(right, call.case.dtype) + 1e-5
        if label == "lse":
            bar = tolerance.LSE_ATOL
        error = tolerance.worst(ours, right)
        assert error <= bar, f"{label}: error {error:.3e}, bar {bar:.3e}"
        found[label] = error / bar
    for side, tensors in ((call.case.q, (got[0], *got[2:3])), (call.case.k, got[3:])):
        outside = torch.ones(side.rows, dtype=torch.bool)
        for offset, length in side.spans:
            outside[offset : offset + length] = False
        for t in tensors:
            assert (t[outside] == 0).all()
        if side is call.case.q:
            assert (got[1][:, outside] == -math.inf).all()
    return found


def check_each_by_itself(call: Call, got) -> None:
    """Bit for bit what the dense call gives for each sequence."""
    for span in call.case.spans:
        at_q, len_q, at_k, len_k = span
        if len_q == 0 or len_k == 0:
            continue
        rows_q, rows_k = slice(at_q, at_q + len_q), slice(at_k, at_k + len_k)
        places = (rows_q, (slice(None), rows_q), rows_q, rows_k, rows_k)
        own = [t[place] for t, place in zip(got, places, strict=False)]
        dense_call = call.dense(span, gradients=len(got) > 2)
        for label, ours, dense in zip(NAMES, own, dense_call, strict=False):
            assert torch.equal(ours, dense), (label, span)
