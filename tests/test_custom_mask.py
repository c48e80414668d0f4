"""A mask of the caller's own: its ranges, what a spec refuses, how its kernel is named on disk."""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_cute import arch as archs
from fa_cute import cache, launch, tune
from fa_cute.bwd.args import BwdSpec
from fa_cute.errors import ArgumentError, PlanError
from fa_cute.fwd.args import FwdSpec
from fa_cute.ops.arith import hi, lo
from fa_cute.ops.mask import Band, kv_blocks, q_blocks
from fa_cute.problem import AttnProblem

from . import tolerance

EXAMPLE = Path(__file__).parent.parent / "examples" / "custom_mask.py"


def module_of(path: Path, name: str):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


example = module_of(EXAMPLE, "example_of_a_mask")
Prefix = example.Prefix
ARCHES = ("sm_90a", "sm_100a")
lengths, tiles = st.integers(1, 40), st.sampled_from((1, 4, 8))


@settings(max_examples=100, deadline=None)
@given(lengths, lengths, st.integers(0, 50), tiles, tiles)
def test_the_example_against_brute_force(seqlen_q, seqlen_k, prefix, tile_m, tile_n):
    mask, off = Prefix(prefix=prefix), seqlen_k - seqlen_q
    pairs = product(range(seqlen_q), range(seqlen_k))
    seen = {(q, k) for q, k in pairs if k <= q + off or k < prefix}
    for q, k in product(range(seqlen_q), range(seqlen_k)):
        q_lo, q_hi = mask.q_bounds(k, seqlen_q, seqlen_k)
        assert mask.keep(q, k, seqlen_q, seqlen_k) == ((q, k) in seen) == (q_lo <= q < q_hi)
    meet = {(q // tile_m, k // tile_n) for q, k in seen}
    of_m, of_n = set(), set()
    for m in range(-(-seqlen_q // tile_m)):
        blocks = kv_blocks(mask, m, tile_m, tile_n, seqlen_q, seqlen_k)
        of_m |= {(m, n) for n in range(blocks.lo, blocks.hi)}
        for q in range(m * tile_m, min((m + 1) * tile_m, seqlen_q)):
            unmasked = range(blocks.full_lo * tile_n, blocks.full_hi * tile_n)
            assert all((q, k) in seen for k in unmasked)
    for n in range(-(-seqlen_k // tile_n)):
        blocks = q_blocks(mask, n, tile_m, tile_n, seqlen_q, seqlen_k)
        of_n |= {(m, n) for m in range(blocks.lo, blocks.hi)}
    assert of_m == of_n == meet


@dataclass(frozen=True)
class Chunked(Band):
    """Keys of a query's own chunk, up to itself: a limit on both sides that is no window."""

    left: int = 0
    right: int = 0
    chunk: int = 128

    def k_bounds(self, q, seqlen_q, seqlen_k):
        k_lo, k_hi = super().k_bounds(q, seqlen_q, seqlen_k)
        return k_lo // self.chunk * self.chunk, k_hi

    def q_bounds(self, k, seqlen_q, seqlen_k):
        off, end = seqlen_k - seqlen_q, (k // self.chunk + 1) * self.chunk
        q_lo, _ = super().q_bounds(k, seqlen_q, seqlen_k)
        return q_lo, hi(lo(end - off, seqlen_q), 0)


@pytest.mark.parametrize("arch", ARCHES)
def test_kernels_against_torch(arch, monkeypatch):
    """Forward and gradients, on lengths that end within a tile, against float64."""
    pytest.importorskip("cutlass", reason="the kernels are compiled by NVIDIA's CuTe DSL")
    monkeypatch.setenv("FA_CUTE_ARCH", arch)
    target, g = archs.get(arch), torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 270, 2, 64, generator=g).bfloat16() for _ in range(4))
    mask = Chunked(chunk=96)
    out, lse = example.attention(q, k, v, mask)
    problem = AttnProblem.of(q, k, v, causal=True)
    spec = tune.backward_spec(problem, False, target)
    spec = replace(spec, custom=mask, deterministic=False)
    grads = tuple(torch.full_like(x, math.nan) for x in (q, k, v))
    launch.backward((q, k, v, out, lse, dout, None), spec, problem, target, "sim", grads)

    def in_torch(dtype):
        own = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        found = example.in_torch(*own, mask, dtype)
        return found, *torch.autograd.grad(found, own, dout.to(dtype))

    names, exact, theirs = ("out", "dq", "dk", "dv"), in_torch(torch.float64), in_torch(q.dtype)
    for name, ours, want, other in zip(names, (out, *grads), exact, theirs):
        bar = tolerance.FACTOR * tolerance.worst(other, want) + tolerance.rounding(want, q.dtype)
        assert tolerance.worst(ours, want) <= bar, name


@pytest.mark.parametrize("spec", [FwdSpec, BwdSpec])
def test_a_spec_refuses_what_does_not_fit(spec):
    mask = Prefix(prefix=3)
    assert spec("bf16", 64, 64, True, custom=mask).band() is mask
    assert spec("bf16", 64, 64, True, custom=mask) != spec("bf16", 64, 64, True)
    for causal, window in ((False, (False, False)), (True, (True, False))):
        with pytest.raises(PlanError, match="mask Prefix"):
            spec("bf16", 64, 64, causal, window=window, custom=mask)
    with pytest.raises(PlanError, match="mask Band"):
        spec("bf16", 64, 64, True, custom=Band())


def test_a_kernel_on_disk_is_named_after_the_mask_s_source(tmp_path):
    def name(text: str, prefix: int) -> str:
        path = tmp_path / "a_mask.py"
        path.write_text(text)
        mask = module_of(path, "a_mask").Prefix(prefix=prefix)
        return cache.entry("forward", "sim", FwdSpec("bf16", 64, 64, True, custom=mask)).name

    text = EXAMPLE.read_text()
    names = [name(text, 3), name(text, 4), name(text + "\n", 3), name(text, 3)]
    assert names[0] == names[3] and len(set(names)) == 3


@dataclass(frozen=True)
class Few(Band):
    """The first keys, without a word about a limit."""

    count: int = 30

    def k_bounds(self, q, seqlen_q, seqlen_k):
        return 0, lo(seqlen_k, self.count)


@dataclass(frozen=True)
class Late(Band):
    """Keys from the middle on, likewise."""

    def k_bounds(self, q, seqlen_q, seqlen_k):
        return seqlen_k // 2, seqlen_k


@dataclass(frozen=True)
class Behind(Chunked):
    """A chunk's keys at least 128 back: bounds of rows that see nothing meet inside a tile that
    nobody visits, or waits for.
    """

    chunk: int = 192

    def k_bounds(self, q, seqlen_q, seqlen_k):
        at = hi(q + seqlen_k - seqlen_q, 0)
        start = lo(at // self.chunk * self.chunk, seqlen_k)
        return start, hi(lo(at - 128, seqlen_k), start)

    def q_bounds(self, k, seqlen_q, seqlen_k):
        off, end = seqlen_k - seqlen_q, (k // self.chunk + 1) * self.chunk
        q_lo = lo(hi(k + 129 - off, 0), seqlen_q)
        return q_lo, hi(lo(end - off, seqlen_q), 0)


@dataclass(frozen=True)
class OneSided(Chunked):
    """Chunks whose backward would take them for a window."""

    q_bounds = Band.q_bounds


@dataclass(frozen=True)
class Falling(Prefix):
    """Later queries see less."""

    def k_bounds(self, q, seqlen_q, seqlen_k):
        return 0, seqlen_k - q * seqlen_k // seqlen_q


def test_a_mask_that_kernels_would_misread_is_an_error():
    """Else a kernel skips blocks that it waits for, or a gradient is that of another mask."""
    with pytest.raises(PlanError, match="below 30 only, so `right` may not be None"):
        FwdSpec("bf16", 64, 64, False, custom=Few())
    with pytest.raises(PlanError, match="may not decrease"):
        FwdSpec("bf16", 64, 64, True, custom=Falling())
    assert FwdSpec("bf16", 64, 64, True, custom=OneSided()).custom.right == 0
    with pytest.raises(PlanError, match="k_bounds and q_bounds do not agree"):
        BwdSpec("bf16", 64, 64, True, custom=OneSided())
    assert FwdSpec("bf16", 64, 64, True, custom=Behind()).custom.right == 0
    with pytest.raises(PlanError, match="meet by only one"):
        BwdSpec("bf16", 64, 64, True, custom=Behind())
    with pytest.raises(PlanError, match="`left` may not be None"):
        FwdSpec("bf16", 64, 64, False, custom=Late())


def test_a_kernel_on_disk_is_named_after_what_its_mask_inherits(tmp_path):
    """Another file's change makes another kernel; a function's variables are no part of a name."""

    def name(text: str) -> str:
        path = tmp_path / "a_mask.py"
        path.write_text(text)
        kind = type("Heir", (module_of(path, "a_mask").Prefix,), {"__module__": __name__})
        spec = FwdSpec("bf16", 64, 64, True, custom=kind(prefix=3))
        return cache.entry("forward", "sim", spec).name

    text = EXAMPLE.read_text()
    assert name(text) == name(text) != name(text + "\n")

    class Inner(Prefix):
        pass

    with pytest.raises(ArgumentError, match="made inside a function"):
        cache.entry("forward", "sim", FwdSpec("bf16", 64, 64, True, custom=Inner(prefix=3)))


def test_a_mask_with_more_than_fields_is_an_error():
    class Hidden(Band):
        def __init__(self, n: int) -> None:
            super().__init__()
            object.__setattr__(self, "n", n)

    for kind in (FwdSpec, BwdSpec):
        with pytest.raises(PlanError, match="keeps n beside its fields"):
            kind("bf16", 64, 64, False, custom=Hidden(3))


def test_a_mask_without_a_file_is_an_error():
    Mine = type("Mine", (Prefix,), {"__module__": "typed_at_a_prompt"})
    with pytest.raises(ArgumentError, match="define the class in a file"):
        cache.entry("forward", "sim", FwdSpec("bf16", 64, 64, True, custom=Mine(prefix=3)))
