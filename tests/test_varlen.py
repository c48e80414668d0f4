"""Sequences of different lengths in one call: what is computed, for which arguments, and what is
refused. In plain torch; the kernels' own tests compare them with the same reference."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fa_cute
from fa_cute import (
    ArgumentError,
    UnsupportedError,
    arch,
    compile,
    dispatch,
    flash_attn_varlen_func,
    launch,
    reference,
    tune,
)
from fa_cute.lengths import Lengths
from fa_cute.problem import AttnProblem

HEADS, HEADS_KV, DIM, DIM_V = 4, 2, 16, 8
REFERENCE = {"backend": "reference"}


def ints(*numbers) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def starts(lengths, first=0) -> torch.Tensor:
    """cu_seqlens of these lengths."""
    return ints(first, *(first + sum(lengths[: i + 1]) for i in range(len(lengths))))


def packed(rows_q: int, rows_k: int, grad=True, dtype=torch.float64):
    g = torch.Generator().manual_seed(rows_q * 100 + rows_k)
    shapes = ((rows_q, HEADS, DIM), (rows_k, HEADS_KV, DIM), (rows_k, HEADS_KV, DIM_V))
    made = [torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes]
    return [t.requires_grad_(grad) for t in made]


def gradients(out, lse, tensors):
    """Of a loss that reaches out and the finite lse."""
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    loss = (out * weights).sum() + lse[lse.isfinite()].square().sum()
    return torch.autograd.grad(loss, tensors)


side = st.lists(st.integers(0, 9), min_size=0, max_size=5)
limit = st.sampled_from([-1, 0, 3])


@settings(max_examples=60, deadline=None)
@given(data=st.data(), lens_q=side, causal=st.booleans(), window=st.tuples(limit, limit))
def test_each_sequence_as_if_alone(data, lens_q, causal, window):
    """Against a call per sequence; rows around and behind the used ones hold NaN."""
    same = {"min_size": len(lens_q), "max_size": len(lens_q)}
    lens_k = data.draw(st.lists(st.integers(0, 9), **same))
    before = data.draw(st.integers(0, 2))
    used = [
        ints(*(data.draw(st.integers(0, n)) for n in lens)) if data.draw(st.booleans()) else None
        for lens in (lens_q, lens_k)
    ]
    cu_q, cu_k = starts(lens_q, before), starts(lens_k)
    q, k, v = packed(sum(lens_q) + before + 1, sum(lens_k), grad=False)
    counts = [u.tolist() if u is not None else lens for u, lens in zip(used, (lens_q, lens_k))]
    rows = [
        [slice(a, a + n) for a, n in zip(cu.tolist(), count)]
        for cu, count in zip((cu_q, cu_k), counts)
    ]
    for t, side_rows in ((q, rows[0]), (k, rows[1]), (v, rows[1])):
        apart = torch.ones(t.shape[0], dtype=torch.bool)
        for r in side_rows:
            apart[r] = False
        t[apart] = math.nan
    tensors = [t.requires_grad_() for t in (q, k, v)]
    options = {"causal": causal, "window_size": window, "return_lse": True, **REFERENCE}
    out, lse = flash_attn_varlen_func(*tensors, cu_q, cu_k, None, None, *used, **options)
    want_out, want_lse = torch.zeros_like(out), torch.full_like(lse, -math.inf)
    for of_q, of_k in zip(*rows):
        parts = (q[of_q][None], k[of_k][None], v[of_k][None])
        alone, alone_lse = fa_cute.flash_attn_func(*parts, **options)
        want_out[of_q], want_lse[:, of_q] = alone[0], alone_lse[0]
    assert torch.equal(out, want_out) and torch.equal(lse, want_lse)
    if lens_q:
        got, want = gradients(out, lse, tensors), gradients(want_out, want_lse, tensors)
        assert all(torch.allclose(a, b) and a.isfinite().all() for a, b in zip(got, want))


def test_the_formulas_agree_with_autograd():
    lens_q, lens_k = [5, 0, 7, 3], [7, 4, 0, 9]
    tensors = packed(17, 21)
    lengths = (starts(lens_q), starts(lens_k), None, ints(6, 4, 0, 8))
    options = (0.3, True, 4, -1, None, "reference")
    by_operator = torch.ops.fa_cute.varlen_fwd(*tensors, *lengths, *options)
    by_autograd = flash_attn_varlen_func(
        *tensors, *lengths[:2], seqused_k=lengths[3], softmax_scale=0.3, causal=True,
        window_size=(4, -1), return_lse=True, **REFERENCE,
    )  # fmt: skip
    assert torch.allclose(by_operator[0], by_autograd[0])
    for a, b in zip(gradients(*by_operator, tensors), gradients(*by_autograd, tensors)):
        assert torch.allclose(a, b)


@pytest.mark.parametrize("padded_q", [True, False], ids=["padded q", "packed q"])
def test_padded_batches(padded_q):
    """A padded side is the packed one with the padding as unused rows."""
    batch, seqlen_q, seqlen_k, used_k = 3, 6, 8, ints(8, 0, 3)
    q, k, v = packed(batch * seqlen_q, batch * seqlen_k)
    cu_q, cu_k = starts([seqlen_q] * batch), starts([seqlen_k] * batch)
    how = {"seqused_k": used_k, "causal": True, "return_lse": True, **REFERENCE}
    want, want_lse = flash_attn_varlen_func(q, k, v, cu_q, cu_k, **how)
    shaped = [t.unflatten(0, (batch, -1)) for t in (q, k, v)]
    if padded_q:
        out, lse = flash_attn_varlen_func(*shaped, **how)
        assert lse.shape == (batch, HEADS, seqlen_q) and out.shape == (*shaped[0].shape[:3], DIM_V)
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    else:
        out, lse = flash_attn_varlen_func(q, *shaped[1:], cu_q, **how)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    for a, b in zip(gradients(out, lse, (q, k, v)), gradients(want, want_lse, (q, k, v))):
        assert torch.allclose(a, b)


@pytest.mark.parametrize(
    ("lens_q", "lens_k", "backend"),
    [
        *product(([],), ([],), ("reference", "auto")),
        *product(([0, 0],), ([0, 0], [3, 0]), ("reference", "auto")),
        *product(([2, 1],), ([0, 0],), ("reference", "auto")),
        ([4], [4], "reference"),
    ],
    ids=str,
)
def test_ends_of_the_range(lens_q, lens_k, backend):
    """No sequence, empty ones only: no kernel is needed; and a single one."""
    q = torch.randn(sum(lens_q), 2, 64).bfloat16()
    k = torch.randn(sum(lens_k), 2, 64).bfloat16()
    out, lse = flash_attn_varlen_func(
        q, k, k, starts(lens_q), starts(lens_k), return_lse=True, backend=backend
    )
    assert out.shape == q.shape and lse.shape == (2, q.shape[0])
    if not sum(lens_k):
        assert (out == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize(("batch", "seqlen_q"), [(0, 5), (2, 0)], ids=str)
def test_empty_padded_batches(batch, seqlen_q):
    q, k = torch.randn(batch, seqlen_q, 2, 64).bfloat16(), torch.randn(batch, 5, 2, 64).bfloat16()
    used = torch.full((batch,), 3, dtype=torch.int32)
    out, lse = flash_attn_varlen_func(q, k, k, seqused_k=used, return_lse=True, **REFERENCE)
    assert out.shape == q.shape and lse.shape == (batch, 2, seqlen_q)


@pytest.mark.parametrize("batch", [2**23, 2**21])
def test_more_sequences_than_kernels_count(batch):
    """Rows of all tiles, and the list of tiles, in 32 bits."""
    target = arch.get("sm_90a")
    problem = AttnProblem.typical("bf16", (128, 128), varlen=True)
    problem = replace(problem, batch=batch, seqlen_q=batch, seqlen_k=batch, heads=128, heads_kv=128)
    spec = tune.forward_spec(problem, target)
    with pytest.raises(fa_cute.UnsupportedError, match="in 32 bits; call with fewer"):
        launch.tile_ints(tune.forward(spec, target), spec, problem, problem.heads_kv)


def test_max_seqlen_is_not_needed():
    q, k, v = packed(5, 5, grad=False)
    cu = starts([2, 3])
    want = flash_attn_varlen_func(q, k, v, cu, cu, **REFERENCE)
    for most in (3, 1000, 0, torch.tensor(3), torch.tensor(3, dtype=torch.int32)):
        assert torch.equal(flash_attn_varlen_func(q, k, v, cu, cu, most, most, **REFERENCE), want)


def test_every_option_of_the_reference():
    q, k, v = packed(5, 5, grad=False)
    cu, sink = starts([2, 3]), torch.zeros(HEADS)
    options = {"softcap": 5.0, "learnable_sink": sink, "softmax_scale": -0.2, **REFERENCE}
    out = flash_attn_varlen_func(q, k, v, cu, cu, **options)
    first = fa_cute.flash_attn_func(q[None, :2], k[None, :2], v[None, :2], **options)
    assert torch.equal(out[:2], first[0])


Q, K, V = packed(6, 8, grad=False, dtype=torch.bfloat16)
CU_Q, CU_K = starts([2, 4]), starts([3, 5])
WIDE = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K}
PADDED = [t.unflatten(0, (2, -1)) for t in (Q, K, V)]
WRONG = {  # name -> tensors, options, words of the message
    "no lengths": ((Q, K, V), {}, ["all None"]),
    "no lengths, padded": (PADDED, {}, ["all None", "flash_attn_func"]),
    "no cu_seqlens_k": ((Q, K, V), {"cu_seqlens_q": CU_Q}, ["k and v 4", "without"]),
    "no cu_seqlens_q": ((Q, K, V), {"cu_seqlens_k": CU_K}, ["q must have 4", "k and v 3"]),
    "padded q, cu_seqlens_q": ((PADDED[0], K, V), WIDE, ["3 (rows", "cu_seqlens_q"]),
    "cu is a list": ((Q, K, V), {**WIDE, "cu_seqlens_q": [0, 2, 6]}, ["cu_seqlens_q", "list"]),
    "cu of int64": ((Q, K, V), {**WIDE, "cu_seqlens_q": CU_Q.long()}, ["int32", "cu_seqlens_q"]),
    "cu of floats": ((Q, K, V), {**WIDE, "cu_seqlens_k": CU_K.float()}, ["int32", "cu_seqlens_k"]),
    "cu of 2 dims": ((Q, K, V), {**WIDE, "cu_seqlens_q": CU_Q[None]}, ["one dimension"]),
    "cu with gaps": ((Q, K, V), {**WIDE, "cu_seqlens_q": ints(0, 9, 2, 9, 6)[::2]}, ["contiguous"]),
    "cu empty": ((Q, K, V), {**WIDE, "cu_seqlens_q": ints()}, ["at least one"]),
    "cu elsewhere": ((Q, K, V), {**WIDE, "cu_seqlens_q": CU_Q.to("meta")}, ["device of q, cpu"]),
    "counts differ": ((Q, K, V), {**WIDE, "cu_seqlens_k": ints(0, 8)}, ["differ", "_k': 1"]),
    "used for 3": ((Q, K, V), {**WIDE, "seqused_k": ints(1, 1, 1)}, ["differ", "'seqused_k': 3"]),
    "used of int64": ((Q, K, V), {**WIDE, "seqused_q": CU_Q[1:].long()}, ["int32", "seqused_q"]),
    "cu decreases": ((Q, K, V), {**WIDE, "cu_seqlens_q": ints(0, 7, 6)}, ["decrease", "[0, 7, 6]"]),
    "cu negative": ((Q, K, V), {**WIDE, "cu_seqlens_k": ints(-1, 3, 8)}, ["cu_seqlens_k", "-1"]),
    "cu too far": ((Q, K, V), {**WIDE, "cu_seqlens_k": ints(0, 3, 9)}, ["8 rows of k"]),
    "used too much": ((Q, K, V), {**WIDE, "seqused_q": ints(2, 5)}, ["seqused_q[1] is 5"]),
    "used negative": ((Q, K, V), {**WIDE, "seqused_k": ints(-1, 5)}, ["seqused_k[0] is -1"]),
    "padded too much": (PADDED, {"seqused_k": ints(5, 4)}, ["seqused_k[0] is 5", "4 rows"]),
    "padded for 3": (PADDED, {"seqused_k": ints(1, 1, 1)}, ["q has 2", "of 3"]),
    "padded k for 1": ((Q, *PADDED[1:]), {"cu_seqlens_q": ints(0, 6)}, ["k has 2", "of 1"]),
    "padding between rows": (
        (PADDED[0][:, :2], *PADDED[1:]),
        {"seqused_k": ints(1, 1)},
        ["q: all rows", "contiguous"],
    ),
    "max_seqlen float": ((Q, K, V), {**WIDE, "max_seqlen_q": 3.0}, ["max_seqlen_q is 3.0"]),
    "max_seqlen negative": ((Q, K, V), {**WIDE, "max_seqlen_k": -1}, ["max_seqlen_k is -1"]),
    "max_seqlen True": ((Q, K, V), {**WIDE, "max_seqlen_k": True}, ["max_seqlen_k is True"]),
    "max_seqlen of 2": ((Q, K, V), {**WIDE, "max_seqlen_q": ints(3, 4)}, ["a tensor (2,) int32"]),
    "max_seqlen of a float": (
        (Q, K, V),
        {**WIDE, "max_seqlen_q": torch.tensor(3.0)},
        ["a tensor () float32"],
    ),
    "heads": ((Q[:, :3], K, V), WIDE, ["heads (3)", "multiple"]),
    "rows of v": ((Q, K, V[:7]), WIDE, ["k and v must have the same seqlen"]),
    "dtype": ((Q, K.half(), V), WIDE, ["one dtype"]),
    "not a tensor": ((Q, K, None), WIDE, ["must be torch tensors"]),
    "window": ((Q, K, V), {**WIDE, "window_size": (-2, 0)}, ["window_size", "-2"]),
    "window of 3": ((Q, K, V), {**WIDE, "window_size": (1, 2, 3)}, ["pair"]),
    "causal": ((Q, K, V), {**WIDE, "causal": 1}, ["causal is 1"]),
    "deterministic": ((Q, K, V), {**WIDE, "deterministic": "yes"}, ["deterministic is 'yes'"]),
    "return_lse": ((Q, K, V), {**WIDE, "return_lse": 1}, ["return_lse is 1"]),
    "backend": ((Q, K, V), {**WIDE, "backend": "fast"}, ["backend is 'fast'"]),
    "sink": ((Q, K, V), {**WIDE, "learnable_sink": torch.zeros(3)}, ["must be (4,)"]),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_wrong_call(name, backend):
    tensors, options, words = WRONG[name]
    with pytest.raises(ArgumentError) as caught:
        flash_attn_varlen_func(*tensors, **{"backend": backend, **options})
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def test_there_are_at_least_25():
    assert len(WRONG) >= 25


@pytest.mark.parametrize("table", ["FORWARD_DOES", "BACKWARD_DOES"])
def test_without_a_kernel(table, monkeypatch):
    for name in ("FORWARD_DOES", "BACKWARD_DOES"):
        monkeypatch.setattr(tune, name, {"sm100": (tune.VARLEN,)})
    monkeypatch.setattr(tune, table, {"sm100": ()})
    x = torch.ones(6, 1, 64, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(UnsupportedError, match="variable lengths: not implemented"):
        flash_attn_varlen_func(x, x, x, CU_Q, CU_Q)
    answer = fa_cute.supports(arch="sm_100a", varlen=True, backward=True, head_dim=64)
    assert not answer and "variable lengths: not implemented" in answer.reasons[0]
    with pytest.raises(UnsupportedError, match="softcap"):
        flash_attn_varlen_func(x, x, x, CU_Q, CU_Q, softcap=3.0)


def test_the_key_has_no_number_of_the_lengths(monkeypatch):
    """What was validated for some lengths serves all others of the same shape."""
    monkeypatch.setattr(dispatch, "_REPEATED", "is_cpu")
    monkeypatch.setattr(dispatch, "_seen", dispatch.Seen())
    q, k, v = packed(6, 8, grad=False, dtype=torch.float32)
    for cu_q in (CU_Q, ints(0, 0, 6), ints(0, 6, 6)):
        options = (None, False, -1, -1, "reference")
        dispatch.call_of(q, k, v, options, Lengths(cu_q, CU_K))
    assert len(dispatch._seen) == 1
    dispatch.call_of(q, k, v, options, Lengths(starts([2, 2, 2]), ints(0, 1, 2, 3)))
    assert len(dispatch._seen) == 2


def test_reference_of_no_sequences():
    q, k, v = packed(3, 3, grad=False)
    out, lse = reference.attention_of_sequences(q, k, v, [])
    assert (out == 0).all() and (lse == -math.inf).all() and lse.shape == (HEADS, 3)


def test_one_compile_in_all(monkeypatch):
    """Lengths, totals, how many sequences, max_seqlen, window sizes: no part of a kernel."""
    asked = set()
    monkeypatch.setattr(tune, "FORWARD_DOES", {"sm90": (tune.VARLEN, tune.WINDOW)})
    monkeypatch.setattr(fa_cute.launch, "tile_ints", lambda *args: 64)
    monkeypatch.setattr(compile, "get", lambda request, target: asked.add(request) or print)
    monkeypatch.setattr(fa_cute.launch, "_run", lambda *args: None)
    monkeypatch.setenv("FA_CUTE_ARCH", "sm_90a")
    for lens, most, window, heads in (
        ((3, 5), 5, (4, 2), 2),
        ((3, 5), torch.tensor(5), (4, 2), 2),
        ((8,), None, (1, 1), 2),
        ((0, 7, 900), 900, (10**12, 77), 4),
    ):
        cu, x = starts(lens), torch.zeros(sum(lens), heads, 64, dtype=torch.bfloat16)
        flash_attn_varlen_func(x, x, x, cu, cu, most, most, window_size=window)
    assert len(asked) == 1
    flash_attn_varlen_func(x, x, x, cu, cu, seqused_q=cu[1:] - cu[:-1], window_size=window)
    assert len(asked) == 2, "a further input"
