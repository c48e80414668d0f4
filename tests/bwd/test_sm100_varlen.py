"""Sequences of different lengths in the SM100 backward: each as if it were alone, bit for bit."""

from __future__ import annotations

import pytest
import torch

from fa_cute import arch as archs
from fa_cute.bwd.args import BwdSpec
from fa_cute.sim import host

from . import test_sm90_varlen as hopper

pytest.importorskip("cutlass", reason="the kernels are compiled by NVIDIA's CuTe DSL")


class Batch(hopper.Batch):
    """The same packed tensors on Blackwell."""

    arch = archs.get("sm_100a")


def spec_of(head_dim, causal=False, ratio=1, det=False, window=(False, False), dtype="bf16"):
    return BwdSpec(dtype, head_dim, min(head_dim, 128), causal, ratio, det, window)


@pytest.mark.parametrize(
    ("spec", "window"),
    [
        (spec_of(64), (None, None)),
        (spec_of(96, causal=True, dtype="fp16"), (None, 0)),
        (spec_of(128, ratio=2, window=(True, True), det=True), (140, 30)),
        (spec_of(192, causal=True, ratio=2, det=True), (None, 0)),
    ],
    ids=str,
)
def test_against_float64(spec, window):
    batch = Batch(spec, window=window)
    batch.check(batch.run())


@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_each_sequence_has_the_bits_of_a_dense_call(head_dim):
    batch = Batch(spec_of(head_dim, causal=True, det=True))
    grads = batch.run()
    for rows_q, rows_k in batch.sequences():
        if 0 in (rows_q.stop - rows_q.start, rows_k.stop - rows_k.start):
            continue
        for got, rows, want in zip(
            grads, (rows_q, rows_k, rows_k), batch.alone(rows_q, rows_k), strict=True
        ):
            assert torch.equal(got[rows], want)


def test_used_lengths():
    """Rows that have room but do not count hold NaN, and their gradients are 0."""
    used = ([0, 33, 1, 0, 200, 0, 64, 0], [3, 0, 0, 0, 129, 260, 100, 0])
    batch = Batch(spec_of(128, causal=True, det=True), used=used)
    batch.check(batch.run())


@pytest.mark.parametrize("lengths", [([0, 0], [0, 0]), ([0, 0], [5, 0]), ([5], [0]), ([300], [7])])
def test_all_empty_and_one_sequence(lengths):
    batch = Batch(spec_of(64), lengths)
    batch.check(batch.run())


@pytest.mark.parametrize("resident", [1, 3])
def test_no_deadlock_with_few_clusters_at_a_time(resident):
    """And the same bits, under any schedule."""
    lengths = ([130, 0, 300], [300, 10, 400])
    batch = Batch(spec_of(128, ratio=2, det=True, window=(True, True)), lengths, window=(250, 100))
    options = {"resident": resident, "schedule": f"random:{resident}"}
    with host.session(batch.arch, dsl=False, **options):
        limited = batch.run()
    for a, b in zip(limited, batch.run(), strict=True):
        assert torch.equal(a, b)
