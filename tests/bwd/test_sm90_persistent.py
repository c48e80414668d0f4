"""The persistent Hopper backward: the same bits in order, the same accuracy without one, whatever
number of CTAs takes the tiles and whichever comes first."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from fa_cute import compile, launch, tune
from fa_cute.bwd.args import BwdSpec
from fa_cute.bwd.sm90 import plan
from fa_cute.errors import PlanError
from fa_cute.ops.mask import Band
from fa_cute.sim import host

from .test_sm90_sim import HOPPER, Case, poisoned_outputs  # noqa: F401

pytest.importorskip("cutlass", reason="the kernels are compiled by NVIDIA's CuTe DSL")

SCHEDULES = ("early", "late", "random:3", "priority:1")


@pytest.fixture
def persistent(monkeypatch):
    """persistent(ctas): calls from now on take the persistent kernel, of so many CTAs at most;
    before that, one with a tile per CTA. The grids of launches are appended to
    ``persistent.grids``.
    """

    def take(stay: bool):
        def row(spec, *_):
            plain = {"pair": False, "prefetch_rows": 0}
            return dataclasses.replace(plan.config(spec), persistent=stay, **plain)

        monkeypatch.setattr(tune, "backward", row)

    def switch(ctas: int):
        take(True)
        monkeypatch.setattr(launch, "num_sms", lambda *_: ctas)

    take(False)

    def recorded(session, *args, **options):
        switch.grids.append(args[1])
        return original(session, *args, **options)

    switch.grids, original = [], host.Session.launch
    monkeypatch.setattr(host.Session, "launch", recorded)
    return switch


# Keys before all that the queries see, queries before all that see keys, and neither.
SIZES = ((200, 500), (500, 200), (300, 300))


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def ordered(head_dim: int, causal: bool, ratio: int = 1) -> BwdSpec:
    return BwdSpec("bf16", head_dim, head_dim, causal, ratio, deterministic=True)


@pytest.mark.parametrize(
    ("head_dim", "causal"), [(96, False), *itertools.product((64, 128, 256), (False, True))]
)
def test_in_order_the_bits_are_those_of_one_tile_per_cta(head_dim, causal, persistent):
    """Six or ten tiles of two or three query blocks for two CTAs."""
    case = Case(ordered(head_dim, causal), 140, 270, heads_kv=2)
    first = case.run()
    persistent(2)
    assert same(first, case.run())
    assert persistent.grids[-2][0] == 2


@pytest.mark.parametrize("head_dim", [64, 256])
def test_more_ctas_than_tiles_and_a_single_one(head_dim, persistent):
    case = Case(ordered(head_dim, True), 50, 260)
    first = case.run()
    for ctas in (7, 1):
        persistent(ctas)
        assert same(first, case.run())
        assert persistent.grids[-2][0] == min(ctas, -(-260 // plan.config(case.spec).tile_n))


@pytest.mark.parametrize(
    ("head_dim", "causal", "ratio"), [(64, False, 3), (128, True, 1), (256, True, 2)]
)
def test_without_an_order_against_float64(head_dim, causal, ratio, persistent, monkeypatch):
    """Where kv heads are shared, nobody meets in the epilogue but for the next tile's sake."""
    persistent(2)
    spec = BwdSpec("bf16", head_dim, head_dim, causal, ratio)
    Case(spec, 140, 270, heads_kv=2).check()
    case = Case(spec, 70, 140)
    for schedule in ("late", "random:1", "priority:2"):
        monkeypatch.setenv("FA_CUTE_SIM_SCHEDULE", schedule)
        case.check()


@pytest.mark.parametrize("ratio", [1, 2], ids=["mha", "gqa"])
@pytest.mark.parametrize(("head_dim", "causal"), [(64, True), (128, False), (256, True)])
def test_deterministic_bits_under_any_schedule(head_dim, causal, ratio, persistent, monkeypatch):
    case = Case(ordered(head_dim, causal, ratio), 130, 200)
    first = case.run()
    persistent(2)
    for schedule in SCHEDULES:
        monkeypatch.setenv("FA_CUTE_SIM_SCHEDULE", schedule)
        assert same(first, case.run()), schedule


@pytest.mark.parametrize(("head_dim", "causal"), [(64, True), (128, False)])
def test_no_deadlock_with_few_ctas_at_a_time(head_dim, causal, persistent):
    """A CTA that has not started has taken no tile, so nobody waits for it."""
    case = Case(ordered(head_dim, causal, 2), 130, 400)
    first = case.run()
    persistent(4)
    for resident in (1, 2, 3):
        with host.session(HOPPER, dsl=False, resident=resident):
            assert same(first, case.run()), resident


@pytest.mark.parametrize(
    "spec",
    [ordered(128, True), ordered(64, True, 2), BwdSpec("bf16", 256, 256, True, 2)],
    ids=lambda spec: f"{spec.head_dim}-{spec.qhead_per_kvhead}",
)
def test_no_races(spec, persistent):
    """Every two accesses of shared memory of which one writes are ordered by a barrier: those of
    one tile and of the next, too."""
    persistent(1)
    with host.session(HOPPER, dsl=False, races=True) as session:
        Case(spec, 130, 270).run()
    assert persistent.grids[-2][0] == 1 or spec.shares_kv
    assert not [race for launch in session.launches for race in launch.races]


LEFT, BOTH = {"window": (True, False)}, {"window": (True, True), "deterministic": True}
SHARED = {"window": (False, True), "qhead_per_kvhead": 2}


@pytest.mark.parametrize(
    ("head_dim", "options"),
    [(64, LEFT), (96, LEFT), (128, LEFT), (64, BOTH), (128, BOTH), (64, SHARED), (128, SHARED)],
)
def test_windows_and_keys_that_no_query_sees(head_dim, options, monkeypatch):
    """Tiles without queries before, between and after others: zeros, and the walk goes on."""
    monkeypatch.setattr(launch, "num_sms", lambda *_: 2)
    spec = BwdSpec("bf16", head_dim, head_dim, False, **options)
    assert plan.config(spec).persistent
    limits = [limit if given else None for limit, given in zip((60, 20), spec.window, strict=True)]
    for schedule, (sq, sk) in zip(("early", "late", "random:2"), SIZES, strict=True):
        monkeypatch.setenv("FA_CUTE_SIM_SCHEDULE", schedule)
        case = Case(spec, sq, sk, heads_kv=2, window=limits)
        case.check()


def test_windows_in_order_have_the_same_bits_for_any_number_of_ctas(monkeypatch):
    spec = BwdSpec("bf16", 128, 128, True, window=(True, False), deterministic=True)
    case, found = Case(spec, 300, 420, heads_kv=2, window=(150, 0)), []
    for ctas, schedule in ((1, "early"), (3, "late"), (7, "priority:1")):
        monkeypatch.setattr(launch, "num_sms", lambda *_, ctas=ctas: ctas)
        monkeypatch.setenv("FA_CUTE_SIM_SCHEDULE", schedule)
        found.append(case.run())
    assert same(found[0], found[1])
    assert same(found[0], found[2])


@pytest.mark.parametrize(
    ("head_dim", "causal", "name"),
    [(64, True, "stagger_rows"), (128, False, "stagger_rows"), (128, True, "prefetch_rows")],
)
def test_bits_do_not_depend_on_when_a_tile_begins(head_dim, causal, name, monkeypatch):
    """Staggered warpgroups and K and V that are asked for early; and no access of shared memory is
    out of order for it.
    """
    monkeypatch.setattr(launch, "num_sms", lambda *_: 2)
    spec, none = ordered(head_dim, causal), {"stagger_rows": 0, "prefetch_rows": 0}
    case, row = Case(spec, 140, 270, heads_kv=2), dataclasses.replace(plan.config(spec), **none)
    monkeypatch.setattr(tune, "backward", lambda *_: row)
    want = case.run()
    # Of every tile, and of those of one query block, so that some are and some are not.
    for rows in (plan.EVERY, row.tile_m) if name == "stagger_rows" else (row.tile_m,):
        changed = dataclasses.replace(row, **{name: rows})
        monkeypatch.setattr(tune, "backward", lambda *_, cfg=changed: cfg)
        for schedule in ("late", "random:3"):
            monkeypatch.setenv("FA_CUTE_SIM_SCHEDULE", schedule)
            assert same(want, case.run()), (rows, schedule)
        with host.session(HOPPER, dsl=False, races=True) as session:
            case.run()
        assert not [race for launch in session.launches for race in launch.races]


@pytest.mark.parametrize(("rows", "count"), [(0, 0), (128, 4)])
def test_k_and_v_are_asked_for_early(rows, count, tmp_path):
    """Each in two boxes of 64 columns."""
    spec = ordered(128, True)
    row = dataclasses.replace(plan.config(spec), prefetch_rows=rows)
    request = compile.Request("backward", row, spec, HOPPER)
    ptx = compile.build(request, f"--keep-ptx --dump-dir {tmp_path}").artifacts.PTX
    assert ptx.count("cp.async.bulk.prefetch.tensor") == count


@pytest.mark.parametrize(
    "options", [{"varlen": True}, {"window": (True, False)}, {"custom": Band(left=3)}]
)
def test_where_a_tile_may_have_no_queries(options):
    """Roles by warpgroup and lockstep do not expect one."""
    spec = BwdSpec("bf16", 256, 256, False, **options)
    cfg = dataclasses.replace(plan.config(spec), persistent=True, pair=False)
    with pytest.raises(PlanError, match="without queries"):
        cfg.work(spec)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"prefetch_rows": 64, "persistent": False}, "no next tile"),
        ({"stagger_rows": 64, "schedule": "lockstep"}, "stagger_rows"),
    ],
)
def test_what_does_not_go_together(change, match):
    row = dataclasses.replace(plan.config(BwdSpec("bf16", 128, 128, False)), by_parts=False)
    with pytest.raises(PlanError, match=match):
        dataclasses.replace(row, **change)
