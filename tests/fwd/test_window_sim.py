"""Sliding windows in both forwards on the simulator, against float64."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from fa_cute import arch, compile, launch, tune
from fa_cute.fwd.args import FwdSpec
from fa_cute.plan import show
from fa_cute.sim import host
from tests import tolerance

pytest.importorskip("cutlass", reason="the kernel is compiled by NVIDIA's CuTe DSL")
HOPPER, BLACKWELL, ULTRA = "sm_90a", "sm_100a", "sm_103a"
TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16}
NUM_SMS = 2  # several tiles for each CTA
SCHEDULES = ("early", "late", *(f"random:{seed}" for seed in range(6)))


@cache
def kernel(arch_name: str, head_dim: int, window, causal: bool, dtype: str):
    """A compiled forward and its config; only which sides have a limit is part of it."""
    chip = arch.get(arch_name)
    spec = FwdSpec(dtype, head_dim, head_dim, causal, window=window)
    cfg = tune.forward(spec, chip)
    with host.compiling(chip):
        return host.function_of(compile.build_forward(cfg, spec, chip)), cfg


def run(arch_name, lengths, window, head_dim=64, heads=(1, 1), dtype="bf16", **how):
    """(inputs, out, lse) of one call; nothing that a call leaves unwritten is a number.

    ``how``: the simulator's ``schedule``, and ``change``, which edits q, k, v before.
    """
    left, right = window
    causal = right == 0
    sides = (left is not None, right is not None and not causal)
    fn, cfg = kernel(arch_name, head_dim, sides, causal, dtype)
    g = torch.Generator().manual_seed(sum(lengths))
    (sq, sk), (h, hk) = lengths, heads

    def draw(rows, heads):
        return torch.randn(1, rows, heads, head_dim, generator=g).to(TORCH[dtype])

    q, k, v = draw(sq, h), draw(sk, hk), draw(sk, hk)
    how.get("change", lambda *_: None)(q, k, v)
    out, lse = torch.full_like(q, float("nan")), torch.full((1, h, sq), float("nan"))
    limits = (left if sides[0] else None, right if sides[1] else None)
    chip, schedule = arch.get(arch_name), how.get("schedule", "early")
    with host.session(chip, dsl=False, schedule=schedule, plan=show.to_dict(cfg)):
        fn(q, k, v, out, lse, *launch.rest(head_dim**-0.5, NUM_SMS, limits))
    return (q, k, v), out, lse


def check(arch_name, lengths, window, *arguments, **keywords):
    inputs, out, lse = run(arch_name, lengths, window, *arguments, **keywords)
    tolerance.assert_close_to_reference(out, lse, *inputs, window=window)


WINDOWS = [(100, 0), (100, None), (100, 50), (None, 50), (0, 0), (0, None), (3, 7), (5000, 5000)]
ON_BOTH = pytest.mark.parametrize("arch_name", [HOPPER, BLACKWELL])


@ON_BOTH
@pytest.mark.parametrize("lengths", [(200, 333), (333, 130), (70, 600)], ids=str)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_against_float64(arch_name, lengths, window):
    check(arch_name, lengths, window)


@pytest.mark.parametrize(
    "arch_name,head_dim,dtype",
    [
        (HOPPER, 128, "bf16"),
        (HOPPER, 192, "bf16"),
        (HOPPER, 256, "fp16"),
        (BLACKWELL, 128, "fp16"),
        (ULTRA, 64, "bf16"),
    ],
)
@pytest.mark.parametrize("window", [(100, 0), (30, 20)], ids=str)
def test_other_head_dims_and_shared_keys(arch_name, head_dim, dtype, window):
    check(arch_name, (250, 220), window, head_dim, (2, 1), dtype)


@ON_BOTH
def test_same_bits_in_every_schedule(arch_name):
    _, want_out, want_lse = run(arch_name, (300, 400), (90, 40))
    for schedule in SCHEDULES[1:]:
        _, out, lse = run(arch_name, (300, 400), (90, 40), schedule=schedule)
        assert torch.equal(out, want_out) and torch.equal(lse, want_lse), schedule


@ON_BOTH
def test_keys_outside_the_band_are_not_visited(arch_name):
    _, want, want_lse = run(arch_name, (256, 1280), (64, 0))

    def change(q, k, v):
        k[:, :896] = v[:, :896] = float("nan")  # the band begins at key 1280 - 256 - 64 = 960

    _, out, lse = run(arch_name, (256, 1280), (64, 0), change=change)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
