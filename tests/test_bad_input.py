"""Wrong calls: each gives the documented result or an error that says what is wrong."""

from __future__ import annotations

import math

import pytest
import torch

import fa_cute
from fa_cute import ArgumentError, UnsupportedError, flash_attn_func, tune


def make(batch=2, seqlen_q=8, seqlen_k=8, heads=4, heads_kv=2, head_dim=64, head_dim_v=None, **kw):
    kw = {"dtype": torch.bfloat16, **kw}
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    q = torch.ones(batch, seqlen_q, heads, head_dim, **kw)
    k = torch.ones(batch, seqlen_k, heads_kv, head_dim, **kw)
    v = torch.ones(batch, seqlen_k, heads_kv, head_dim_v, **kw)
    return q, k, v


def misaligned(t: torch.Tensor) -> torch.Tensor:
    """The same values, one element after a 16-byte boundary."""
    flat = torch.zeros(t.numel() + 8, dtype=t.dtype)
    return flat[1 : t.numel() + 1].view(t.shape)


def odd_rows(t: torch.Tensor) -> torch.Tensor:
    """The same values in rows that are not a multiple of 16 bytes apart."""
    wide = torch.zeros(*t.shape[:-1], t.shape[-1] + 1, dtype=t.dtype)
    return wide[..., :-1]


class Subclass(torch.Tensor):
    """What a wrapper tensor of another library looks like."""


q, k, v = make()
NAN = float("nan")

# name -> (tensors, arguments, error, words that the message must have)
WRONG = {
    "q is a list": (([1.0], k, v), {}, ArgumentError, ["list", "k: (2, 8, 2, 64)"]),
    "q is numpy": ((q.float().numpy(), k, v), {}, ArgumentError, ["ndarray"]),
    "v is None": ((q, k, None), {}, ArgumentError, ["NoneType"]),
    "q has 3 dims": ((q[0], k, v), {}, ArgumentError, ["4 dimensions", "(8, 4, 64)"]),
    "q has 5 dims": ((q[None], k, v), {}, ArgumentError, ["4 dimensions"]),
    "v has 2 dims": ((q, k, v[0, 0]), {}, ArgumentError, ["4 dimensions"]),
    "all are scalars": ((q.sum(), k.sum(), v.sum()), {}, ArgumentError, ["4 dimensions"]),
    "batches differ": ((q[:1], k, v), {}, ArgumentError, ["same batch", "(1, 8, 4, 64)"]),
    "k and v lengths differ": ((q, k, v[:, :5]), {}, ArgumentError, ["seqlen", "(2, 5, 2, 64)"]),
    "k and v heads differ": ((q, k, v[:, :, :1]), {}, ArgumentError, ["heads"]),
    "q and k head_dim differ": ((q, k[..., :32], v), {}, ArgumentError, ["head_dim"]),
    "heads not divisible": ((q[:, :, :3], k, v), {}, ArgumentError, ["multiple", "3", "2"]),
    "fewer heads than heads_kv": ((q[:, :, :1], k, v), {}, ArgumentError, ["multiple"]),
    "0 heads": (make(heads=0), {}, ArgumentError, ["at least 1"]),
    "0 heads_kv": (make(heads_kv=0), {}, ArgumentError, ["at least 1"]),
    "head_dim 0": (make(head_dim=0), {}, ArgumentError, ["at least 1"]),
    "head_dim_v 0": (make(head_dim_v=0), {}, ArgumentError, ["at least 1"]),
    "mixed dtypes": ((q, k.half(), v), {}, ArgumentError, ["one dtype", "float16", "bfloat16"]),
    "int": (make(dtype=torch.int32), {}, ArgumentError, ["dtype", "int32"]),
    "bool": (make(dtype=torch.bool), {}, ArgumentError, ["dtype"]),
    "complex": (make(dtype=torch.complex64), {}, ArgumentError, ["dtype"]),
    "fp8": (make(dtype=torch.float8_e4m3fn), {}, ArgumentError, ["dtype", "float8"]),
    "fp32": (make(dtype=torch.float32), {}, UnsupportedError, ["fp32", "bf16", "reference"]),
    "fp64": (make(dtype=torch.float64), {}, UnsupportedError, ["fp64"]),
    "k on meta": ((q, k.to("meta"), v), {}, ArgumentError, ["one device", "meta"]),
    "fp8 on meta": (
        make(device="meta", dtype=torch.float8_e4m3fn),
        {},
        ArgumentError,
        ["dtype", "meta"],
    ),
    "sparse": ((q.to_sparse(), k, v), {}, ArgumentError, ["strided"]),
    "head_dim 7": (make(head_dim=7), {}, UnsupportedError, ["head_dim 7", "64", "pad"]),
    "head_dim 8192": (make(head_dim=8192), {}, UnsupportedError, ["head_dim 8192"]),
    "head_dim_v differs": (make(head_dim_v=32), {}, UnsupportedError, ["head_dim_v 32"]),
    "scale NaN": ((q, k, v), {"softmax_scale": NAN}, ArgumentError, ["softmax_scale", "finite"]),
    "scale beyond float32": ((q, k, v), {"softmax_scale": 1e39}, ArgumentError, ["finite"]),
    "scale beyond float64": ((q, k, v), {"softmax_scale": 10**400}, ArgumentError, ["finite"]),
    "scale inf": ((q, k, v), {"softmax_scale": math.inf}, ArgumentError, ["finite"]),
    "scale is a string": (
        (q, k, v),
        {"softmax_scale": "1"},
        ArgumentError,
        ["softmax_scale", "str"],
    ),
    "scale is a tensor": ((q, k, v), {"softmax_scale": torch.ones(())}, ArgumentError, ["item"]),
    "scale is True": ((q, k, v), {"softmax_scale": True}, ArgumentError, ["bool"]),
    "causal is 2": ((q, k, v), {"causal": 2}, ArgumentError, ["causal", "2"]),
    "causal is None": ((q, k, v), {"causal": None}, ArgumentError, ["causal"]),
    "window is an int": ((q, k, v), {"window_size": 5}, ArgumentError, ["window_size", "pair"]),
    "window of 3": ((q, k, v), {"window_size": (1, 2, 3)}, ArgumentError, ["pair"]),
    "window of floats": ((q, k, v), {"window_size": (1.5, 0)}, ArgumentError, ["1.5", "int"]),
    "window -2": ((q, k, v), {"window_size": (-2, 0)}, ArgumentError, ["-2"]),
    "window of a string": ((q, k, v), {"window_size": ("4", 0)}, ArgumentError, ["'4'", "int"]),
    "window of True": ((q, k, v), {"window_size": (True, 0)}, ArgumentError, ["True", "int"]),
    "softcap negative": ((q, k, v), {"softcap": -1.0}, ArgumentError, ["softcap"]),
    "softcap NaN": ((q, k, v), {"softcap": NAN}, ArgumentError, ["softcap"]),
    "softcap": ((q, k, v), {"softcap": 30.0}, UnsupportedError, ["softcap=30.0"]),
    "sink": ((q, k, v), {"learnable_sink": torch.zeros(4)}, UnsupportedError, ["learnable_sink"]),
    "sink of 3": ((q, k, v), {"learnable_sink": torch.zeros(3)}, ArgumentError, ["(4,)", "(3,)"]),
    "sink is a list": ((q, k, v), {"learnable_sink": [0.0]}, ArgumentError, ["list"]),
    "sink is int": (
        (q, k, v),
        {"learnable_sink": torch.zeros(4, dtype=torch.int32)},
        ArgumentError,
        ["learnable_sink"],
    ),
    "deterministic is 1": ((q, k, v), {"deterministic": 1}, ArgumentError, ["deterministic"]),
    "return_lse is 1": ((q, k, v), {"return_lse": 1}, ArgumentError, ["return_lse"]),
    "backend unknown": ((q, k, v), {"backend": "triton"}, ArgumentError, ["triton", "reference"]),
    "backend None": ((q, k, v), {"backend": None}, ArgumentError, ["backend"]),
    "cuda backend, CPU tensors": ((q, k, v), {"backend": "cuda"}, ArgumentError, ["CUDA", "cpu"]),
    "last stride 2": ((q, make(head_dim=128)[1][..., ::2], v), {}, ArgumentError, ["last stride"]),
    "transposed head_dim": (
        (q, k.transpose(1, 3).contiguous().transpose(1, 3), v),
        {},
        ArgumentError,
        ["k: the last stride", "contiguous"],
    ),
    "rows of 130 bytes": ((q, odd_rows(k), v), {}, ArgumentError, ["k: stride", "16 bytes"]),
    "misaligned start": ((q, k, misaligned(v)), {}, ArgumentError, ["v: the data", "16 bytes"]),
    "a tensor subclass": (
        (q.as_subclass(type("T", (torch.Tensor,), {})), k, v),
        {},
        UnsupportedError,
        ["T"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_call(name):
    tensors, options, error, words = WRONG[name]
    with pytest.raises(error) as caught:
        flash_attn_func(*tensors, **options)
    message = str(caught.value)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"
    answer = fa_cute.can_use(*tensors, **{k: v for k, v in options.items() if k != "return_lse"})
    assert name == "return_lse is 1" or (not answer and answer.reasons)


def test_no_gradient(monkeypatch):
    monkeypatch.setattr(tune, "BACKWARD_KERNELS", {})
    with pytest.raises(UnsupportedError, match=r"requires_grad.*backward"):
        flash_attn_func(*make(requires_grad=True))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window_size": (4, 0)}, r"window_size=\(4, 0\): not implemented"),
        ({"window_size": (None, 3)}, r"window_size=\(None, 3\): not implemented"),
        ({"softmax_scale": -0.5}, r"negative softmax_scale -0\.5: not implemented"),
    ],
)
@pytest.mark.parametrize("table", ["FORWARD_DOES", "BACKWARD_DOES"])
def test_what_kernels_do_not_do_yet(table, options, words, monkeypatch):
    every = ("window_size", "variable lengths", "negative softmax_scale")
    monkeypatch.setattr(tune, "FORWARD_DOES", {"sm100": every})
    monkeypatch.setattr(tune, "BACKWARD_DOES", {"sm100": every})
    monkeypatch.setattr(tune, table, {"sm100": ()})
    with pytest.raises(UnsupportedError, match=words):
        flash_attn_func(*make(requires_grad=True), **options)


def test_there_are_at_least_40():
    assert len(WRONG) >= 40


def test_argument_errors_show_every_tensor():
    with pytest.raises(ArgumentError) as caught:
        flash_attn_func(q, k.half(), v)
    for text in (
        "q: (2, 8, 4, 64) bfloat16 on cpu, strides (2048, 256, 64, 1)",
        "k: (2, 8, 2, 64) float16 on cpu, strides (1024, 128, 64, 1)",
        "v: (2, 8, 2, 64) bfloat16 on cpu",
    ):
        assert text in str(caught.value)


def test_unknown_keyword_is_a_type_error():
    with pytest.raises(TypeError, match="dropout_p"):
        flash_attn_func(q, k, v, dropout_p=0.1)


def test_autocast_is_named():
    x = make(dtype=torch.float32)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ArgumentError, match="autocast"),
    ):
        flash_attn_func(*x[:2], x[2].bfloat16())


@pytest.mark.parametrize("empty", ["batch", "seqlen_q"])
def test_nothing_to_compute(empty):
    x = make(**{empty: 0})
    out, lse = flash_attn_func(*x, return_lse=True)
    assert out.shape == x[0].shape and out.dtype == torch.bfloat16
    assert lse.shape == (x[0].shape[0], 4, x[0].shape[1]) and lse.dtype == torch.float32


def test_nothing_to_attend_to():
    out, lse = flash_attn_func(*make(seqlen_k=0), return_lse=True)
    assert out.shape == (2, 8, 4, 64) and (out == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("name", ["FA_CUTE_BACKEND", "FA_CUTE_ARCH"])
def test_wrong_environment(name, monkeypatch):
    monkeypatch.setenv(name, "nonsense")
    with pytest.raises(fa_cute.FaCuteError, match="nonsense"):
        flash_attn_func(q, k, v)


def test_errors_are_builtin_errors_too():
    with pytest.raises(ValueError):
        flash_attn_func(q, k, v[:, :5])
    with pytest.raises(NotImplementedError):
        flash_attn_func(q, k, v, softcap=30.0)
