"""Windows in the SM100 backward: the limits come at run time, so one kernel per kind of band."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from .test_sm100 import Case, check, run

pytest.importorskip("cutlass", reason="the kernels are compiled by NVIDIA's CuTe DSL")

# Lengths and limits: one row; cut ends; keys that no query sees, and queries that see no key; bands
# narrower than a block, and wide enough for blocks without an element mask.
PROBLEMS = (((1, 1), 0, 1), ((70, 300), 20, 9), ((300, 70), 9, 20), ((330, 410), 260, 150))
KINDS = [
    ("lr", Case((1, 1), head_dim=64)),
    ("r", Case((1, 1), (2, 1), head_dim=96, dtype="fp16")),
    ("lr", Case((1, 1), (2, 1), head_dim=128, dtype="fp16", deterministic=True)),
    ("l", Case((1, 1), head_dim=128, causal=True)),
    ("lr", Case((1, 1), head_dim=192)),
]


def limits(kind: str, left: int, right: int) -> tuple[int | None, int | None]:
    return left if "l" in kind else None, right if "r" in kind else None


@pytest.mark.parametrize(("kind", "case"), KINDS, ids=str)
def test_against_float64(kind: str, case: Case) -> None:
    for seqlens, left, right in PROBLEMS:
        at = replace(case, seqlens=seqlens, window=limits(kind, left, right))
        got, session = run(at)
        check(at, got)
        assert not any(launch.warnings for launch in session.launches)


@pytest.mark.parametrize("head_dim", [64, 192])
def test_the_same_bits_in_every_schedule(head_dim: int) -> None:
    case = Case((250, 420), head_dim=head_dim, deterministic=True, window=(150, 40))
    want, _ = run(case)
    check(case, want)
    for seed, resident in enumerate((1, 2, None)):
        got, _ = run(case, f"random:{seed}", resident=resident)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_blocks_outside_the_band_are_not_visited(monkeypatch) -> None:
    """NaN in dout spreads over whole blocks (0 * NaN in dS), but not to blocks out of sight."""
    case = Case((512, 512), head_dim=64, window=(40, 20))
    q, k, v, dout = case.tensors()
    dout[:, 384:] = math.nan
    monkeypatch.setattr(Case, "tensors", lambda _: [q, k, v, dout])
    (_, *gradients), _ = run(case)
    for gradient in gradients:
        assert gradient[:, :256].isfinite().all()
        assert gradient[:, 384:].isnan().any()
