"""The Hopper forward kernel on the simulator: its own configs, orders of events, and rescaling."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from fa_cute import arch, compile, launch
from fa_cute.fwd.args import FwdSpec
from fa_cute.fwd.sm90.plan import FwdConfig
from fa_cute.plan import show
from fa_cute.sim import host
from tests import tolerance

SM90 = arch.get("sm_90a")
NUM_SMS = 2  # several tiles for each CTA
TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Two CTAs, so that every one of them computes several tiles.
CONFIGS = {
    "joined": (
        FwdConfig(head_dim=64, head_dim_v=64, teams=4, tile_n=64, scheduler="snake"),
        True,
    ),
    "scores first": (
        FwdConfig(
            head_dim=64,
            head_dim_v=64,
            q_stages=1,
            tile_n=80,
            scheduler="snake",
            scores_first=True,
        ),
        True,
    ),
    "one team": (
        FwdConfig(head_dim=64, head_dim_v=32, teams=1, scheduler="persistent"),
        False,
    ),
}


@cache
def kernel(name: str, dtype: str):
    cfg, causal = CONFIGS[name]
    spec = FwdSpec(dtype, cfg.head_dim, cfg.head_dim_v, causal)
    with host.compiling(SM90):
        return host.function_of(compile.build_forward(cfg, spec, SM90)), cfg, spec


def run(name: str, lengths, heads, dtype="bf16", schedule="early", change=None):
    """Compare one call with fp64; ``change`` edits q, k, v before."""
    fn, cfg, spec = kernel(name, dtype)
    g = torch.Generator().manual_seed(sum(lengths))
    (sq, sk), (h, hk), t = lengths, heads, TORCH[dtype]
    q = torch.randn(1, sq, h, spec.head_dim, generator=g)
    k = torch.randn(1, sk, hk, spec.head_dim, generator=g)
    v = torch.randn(1, sk, hk, spec.head_dim_v, generator=g)
    if change:
        change(q, k, v)
    q, k, v = q.to(t), k.to(t), v.to(t)
    out = torch.full((1, sq, h, spec.head_dim_v), float("nan"), dtype=t)
    lse = torch.full((1, h, sq), float("nan"))
    with host.session(SM90, dsl=False, schedule=schedule, plan=show.to_dict(cfg)):
        fn(q, k, v, out, lse, *launch.rest(spec.head_dim**-0.5, NUM_SMS))
    return tolerance.measure(out, lse, q, k, v, None, spec.causal), lse


def good(*arguments, **keywords) -> None:
    """Run, and compare with the bar that all numeric tests use."""
    error, lse = run(*arguments, **keywords)
    largest = lse[lse.isfinite()].abs().max().item() if lse.isfinite().any() else 0.0
    # fp32 carries an LSE of some thousands only to four digits behind the point.
    assert error.out <= error.bar and error.lse <= tolerance.LSE_ATOL + 2e-7 * largest, str(error)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("schedule", ["late", "random:1"])
@pytest.mark.parametrize("lengths", [(300, 200), (150, 400)], ids=str)
def test_several_tiles_a_cta(name, schedule, lengths):
    good(name, lengths, (2, 1), schedule=schedule)


@pytest.mark.parametrize("lengths", [(1, 1), (1, 100), (130, 3)], ids=str)
def test_short(lengths):
    good("joined", lengths, (1, 1))


def larger(at: slice, factor: float):
    """Scores of some keys are larger than all that came before."""

    def change(q, k, v):
        q.abs_()
        k.abs_()
        k[:, at] *= factor

    return change


@pytest.mark.parametrize("name", ["joined", "scores first"])
def test_the_reference_is_replaced_when_it_no_longer_serves(name):
    # Blocks go from the last one to the first: the first keys come after all others. Scores
    # of some hundreds, where those before had some tens, exceed the limit on the sums.
    good(name, (256, 256), (1, 1), change=larger(slice(0, 16), 30.0))


def test_half_precision_keeps_its_range():
    good("joined", (256, 256), (1, 1), dtype="fp16", change=larger(slice(0, 16), 3.0))


def test_large_scores_everywhere():
    def change(q, k, v):
        q *= 60.0
        k *= 60.0

    good("joined", (130, 200), (1, 1), change=change)


def test_large_values_and_growing_scores():
    # V times the largest P that keeps a reference is a number: O is divided only at the end.
    def change(q, k, v):
        larger(slice(0, 16), 4.0)(q, k, v)
        v *= 1e32

    good("joined", (64, 256), (1, 1), change=change)
