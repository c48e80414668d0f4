"""Pairs of CTAs on Hopper, which exchange dS: rows of the table, and with multicast a variant.
Executed from the PTX against float64, beside the same row without pairs, and assembled."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch

from fa_cute import compile, resources, tune
from fa_cute.bwd.args import BwdSpec
from fa_cute.bwd.sm90 import plan
from fa_cute.sim import host

from .test_sm90_sim import HOPPER, Case

pytest.importorskip("cutlass", reason="the kernels are compiled by NVIDIA's CuTe DSL")

PAIR = {"pair": True}
MULTICAST = {**PAIR, "multicast": True}
KINDS = pytest.mark.parametrize("kind", [PAIR, MULTICAST], ids=["alone", "multicast"])
# One block of keys, an odd number of them, more queries or keys, tails on both sides.
SHAPES = [(1, 1), (65, 129), (131, 70), (190, 333)]
SCHEDULES = ("late", "random:0", *(f"priority:{seed}" for seed in range(3)))


def config(spec: BwdSpec, kind: dict) -> plan.BwdSm90Config:
    """The row of the table in pairs: with dS of both CTAs there is no room for a second dO."""
    stages = {"do_stages": 1} if spec.head_dim == 256 else {}
    return dataclasses.replace(plan.config(spec), **kind, **stages)


def one_cta(spec: BwdSpec) -> plan.BwdSm90Config:
    """The row of the table without a pair."""
    return dataclasses.replace(plan.config(spec), pair=False)


@pytest.fixture
def paired(monkeypatch):
    """Calls are made in pairs from here on."""

    def start(kind: dict) -> None:
        monkeypatch.setattr(tune, "backward", lambda spec, _: config(spec, kind))

    return start


@KINDS
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_gradients_against_float64(kind, causal, paired):
    paired(kind)
    for sq, sk in SHAPES:
        Case(BwdSpec("bf16", 256, 256, causal), sq, sk).check()


@pytest.mark.parametrize(("head_dim_v", "kind"), [(128, PAIR), (192, MULTICAST)])
def test_head_dim_192(head_dim_v, kind, paired):
    paired(kind)
    for sq, sk in ((65, 129), (190, 333)):
        Case(BwdSpec("bf16", 192, head_dim_v, True), sq, sk).check()


@KINDS
def test_shared_kv_heads(kind, paired):
    """The block that an odd number leaves to a pair adds nothing to another head's sums."""
    paired(kind)
    Case(BwdSpec("fp16", 256, 256, False, qhead_per_kvhead=2), 70, 40, heads_kv=2).check()


@KINDS
def test_dk_and_dv_are_those_without_a_pair(kind, paired):
    """Bit by bit: only dQ is summed in another order."""
    spec = BwdSpec("bf16", 256, 256, True)
    case = Case(spec, 200, 250)
    with mock.patch.object(tune, "backward", lambda *_: one_cta(spec)):
        alone = case.run()
    paired(kind)
    pair = case.run()
    assert torch.equal(alone[1], pair[1])
    assert torch.equal(alone[2], pair[2])


@KINDS
def test_any_schedule_and_few_clusters_at_a_time(kind, paired, monkeypatch):
    paired(kind)
    case = Case(BwdSpec("bf16", 256, 256, False), 260, 190)
    case.check()
    for resident in (1, 2):
        with host.session(HOPPER, dsl=False, resident=resident):
            case.check()
    for schedule in SCHEDULES:
        monkeypatch.setenv("FA_CUTE_SIM_SCHEDULE", schedule)
        case.check()


@KINDS
def test_no_access_is_unordered(kind, paired):
    paired(kind)
    case = Case(BwdSpec("bf16", 256, 256, True), 260, 190)
    with host.session(HOPPER, dsl=False, schedule="random:3", races=True) as session:
        case.check()
    assert len(session.launches) == 3
    assert not any(launch.races for launch in session.launches)


@KINDS
@pytest.mark.parametrize(("dtype", "causal"), [("bf16", False), ("bf16", True), ("fp16", True)])
def test_nothing_is_spilled(kind, dtype, causal):
    from fa_cute.bwd import call

    spec = BwdSpec(dtype, 256, 256, causal)
    cfg = config(spec, kind)
    cfg.check(HOPPER)
    nothing = dict.fromkeys(("BwdPreprocess", "BwdPostprocess"), mock.DEFAULT)
    with mock.patch.multiple(call, **nothing):
        kernels = resources.of_cubin(compile.cubin(compile.Request("backward", cfg, spec, HOPPER)))
    (main,) = (k for k in kernels if k.threads == cfg.warps.threads)
    assert not main.spills, main
    assert main.regs <= cfg.warps.launch_regs
