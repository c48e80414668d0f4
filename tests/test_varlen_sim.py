"""Sequences of any lengths in one call, on the simulator: against float64, bit for bit what each
sequence gives by itself, and nothing of what lies beside them.
"""

from __future__ import annotations

import math

import pytest
import torch

from .test_forward_sim import poisoned_outputs  # noqa: F401  (a fixture)
from .varlen_cases import (
    BF16,
    FP16,
    NAMES,
    Call,
    Case,
    Side,
    check_each_by_itself,
    check_numbers,
    make,
)

pytest.importorskip("cutlass", reason="the kernels are compiled by NVIDIA's CuTe DSL")
SCHEDULES = ("late", *(f"random:{seed}" for seed in range(3)), *(f"priority:{s}" for s in range(4)))
LENGTHS_Q, LENGTHS_K = (0, 1, 65, 200, 0, 5, 128), (3, 0, 129, 70, 0, 5, 128)
CASES = {
    "packed": Case(Side(LENGTHS_Q, before=3, after=2), Side(LENGTHS_K, after=7)),
    "used": Case(
        Side((150, 4, 0, 70), used=(131, 0, 0, 70), before=1),
        Side((90, 9, 3, 140), used=(65, 9, 0, 129)),
        heads=(4, 2),
        dtype=FP16,
        causal=True,
    ),
    "padded": Case(
        Side((140,) * 3, used=(140, 0, 77), packed=False),
        Side((200,) * 3, used=(190, 20, 64), packed=False),
        heads=(2, 1),
        window=(50, 20),
    ),
    "cache": Case(  # a few new queries against caches of keys
        Side((1, 3, 0, 2)),
        Side((160,) * 4, used=(160, 5, 9, 0), packed=False),
        heads=(4, 1),
        causal=True,
    ),
    "unequal": Case(  # some rows and a whole sequence see no key; O takes Q's place
        Side((0, 150, 5, 129), before=1),
        Side((7, 140, 0, 40), after=3),
        heads=(2, 1),
        dims=(192, 128),
        causal=True,
    ),
}
ON = {"sm_90a": ("packed", "used", "padded"), "sm_100a": ("used", "cache", "unequal")}
EVERY = [(arch, name) for arch, names in ON.items() for name in names]


@pytest.fixture
def on(monkeypatch):
    """Run on an architecture: `on("sm_90a")`."""
    return lambda arch: monkeypatch.setenv("FA_CUTE_ARCH", arch)


@pytest.mark.parametrize(("arch", "name"), EVERY)
def test_against_float64_and_each_sequence_by_itself(arch: str, name: str, on) -> None:
    """NaN lies in every row of no sequence: results there are 0, and none gets anywhere else."""
    on(arch)
    call = make(CASES[name])
    got = call.run(gradients=name != "cache")
    check_numbers(call, got)
    if name == "used":  # tests/bwd/test_*_varlen.py do so for gradients
        check_each_by_itself(call, got[:2])


@pytest.mark.parametrize("arch", ON)
def test_the_same_bits_in_every_schedule(arch: str, on, monkeypatch) -> None:
    """Causal with shared kv heads: dq, dk and dv are all added in turn."""
    on(arch)
    call = make(CASES["used"])
    want = call.run()
    for schedule in SCHEDULES:
        monkeypatch.setenv("FA_CUTE_SIM_SCHEDULE", schedule)
        for label, a, b in zip(NAMES, call.run(), want, strict=True):
            assert torch.equal(a, b), (label, schedule)


@pytest.mark.parametrize("arch", ON)
def test_batches_without_anything_to_see(arch: str, on) -> None:
    """Every sequence is empty on one side: 0 and -inf, and gradients of 0."""
    on(arch)
    for lengths_q, lengths_k in (((5, 70), (0, 0)), ((0, 0), (5, 70)), ((0,), (0,))):
        q, k = Side(lengths_q, before=1), Side(lengths_k, before=1)
        case = Case(q, k)
        tensors = [torch.ones(side.rows, 2, 64, dtype=BF16) for side in (q, k, k)]
        dout, dlse = torch.ones(q.rows, 2, 64, dtype=BF16), torch.ones(2, q.rows)
        out, lse, *grads = Call(case, tuple(tensors), dout, dlse, "sim").run()
        assert (lse == -math.inf).all() and not any(t.any() for t in (out, *grads))
