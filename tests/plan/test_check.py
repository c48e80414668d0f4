"""The protocol check: right scripts pass under every schedule, each kind of mistake is reported."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_cute.plan import (
    Arrive,
    Barrier,
    Edge,
    Role,
    SmemField,
    SmemPlan,
    TmemPlan,
    TmemRegion,
    Topology,
    Via,
    WarpPlan,
)
from fa_cute.plan.check import check
from fa_cute.plan.events import (
    Event,
    ProtocolError,
    acquire,
    arrive,
    commit,
    read,
    release,
    sync,
    tail,
    use,
    wait,
    write,
)

checked = settings(max_examples=60, deadline=None)


def plan(stages: int, barriers: tuple[Barrier, ...] = ()) -> SimpleNamespace:
    """load -> mma -> compute -> mma, as in an attention kernel in the small."""
    return SimpleNamespace(
        warps=WarpPlan(
            (Role("compute", 0, 4, 128), Role("mma", 4, 5, 128), Role("load", 5, 6, 128)), 128
        ),
        topology=Topology(
            (
                Edge("load_k", Via.TMA_UMMA, "load", "mma", stages, tx=("sK",)),
                Edge("mma_s", Via.UMMA_ASYNC, "mma", "compute", ordered_by="compute_p"),
                Edge("compute_p", Via.ASYNC_UMMA, "compute", "mma", ordered_by="mma_s"),
                Edge("mma_o", Via.UMMA_ASYNC, "mma", "compute"),
            ),
            barriers,
        ),
        smem=SmemPlan((SmemField("sK", 1024, stages),)),
        tmem=TmemPlan(
            (TmemRegion("S", 0, 64), TmemRegion("P", 32, 32, over="S"), TmemRegion("O", 64, 64))
        ),
    )


def scripts(stages: int, blocks: int) -> dict[str, list[Event]]:
    """What the three roles do for ``blocks`` blocks."""
    load, mma, compute = [], [], []
    for i in range(blocks):
        slot = i % stages
        load += [acquire("load_k"), write("sK", slot), commit("load_k")]
        mma += [
            wait("load_k"),
            use("load_k"),
            read("sK", slot),
            write("S"),
            commit("mma_s", 0),
            release("load_k"),
            wait("compute_p", 0),
            *([acquire("mma_o")] if i == 0 else []),
            read("P"),
            write("O"),
        ]
        compute += [wait("mma_s", 0), read("S"), write("P"), commit("compute_p", 0)]
    load += tail("load_k", range(stages))
    mma += [commit("mma_o"), *tail("mma_o", range(1))]
    compute += [wait("mma_o"), read("O"), release("mma_o")]
    return {"load": load, "mma": mma, "compute": compute}


@checked
@given(st.integers(1, 4), st.integers(1, 7))
def test_a_right_protocol_passes(stages: int, blocks: int) -> None:
    report = check(plan(stages), scripts(stages, blocks), seeds=3)
    assert report.schedules == 10 and report.events > 15


ESSENTIAL = {"acquire", "commit", "wait", "release"}


@pytest.mark.parametrize("blocks", [3])
@pytest.mark.parametrize("stages", [1, 2])
def test_every_missing_event_is_reported(stages: int, blocks: int) -> None:
    """One by one: without an acquire, commit, wait or release, something is wrong."""
    right = scripts(stages, blocks)
    missed, dropped = [], 0
    for agent, script in right.items():
        for at, event in enumerate(script):
            if event.verb not in ESSENTIAL:
                continue
            dropped += 1
            broken = {**right, agent: [*script[:at], *script[at + 1 :]]}
            try:
                check(plan(stages), broken, seeds=1)
            except ProtocolError:
                continue
            missed.append(f"{agent} without event {at}: {event}")
    assert dropped > 20
    assert not missed, missed


@pytest.mark.parametrize("stages", [1, 2])
def test_every_doubled_event_is_reported(stages: int) -> None:
    right = scripts(stages, 3)
    missed = []
    for agent, script in right.items():
        for at, event in enumerate(script):
            if event.verb not in ESSENTIAL:
                continue
            broken = {**right, agent: [*script[:at], event, *script[at:]]}
            try:
                check(plan(stages), broken, seeds=1)
            except ProtocolError:
                continue
            missed.append(f"{agent} twice event {at}: {event}")
    assert not missed, missed


def kinds(broken: dict[str, list[Event]], stages: int = 2) -> str:
    with pytest.raises(ProtocolError) as caught:
        check(plan(stages), broken, seeds=2)
    return f"{caught.value}"


def swapped(script: list[Event], first: Event, second: Event) -> list[Event]:
    """The script with the first occurrence of two events exchanged."""
    a, b = script.index(first), script.index(second)
    out = list(script)
    out[a], out[b] = out[b], out[a]
    return out


def test_deadlock_names_who_waits_for_whom() -> None:
    s = scripts(2, 2)
    s["compute"] = [e for e in s["compute"] if e.verb != "commit"]
    text = kinds(s)
    assert text.startswith("deadlock: every role waits")
    assert "wait compute_p.full[0] phase 0; 0 complete, missing compute.a, compute.b" in text
    assert "  compute: event 3 of 9: wait mma_s.full[0] phase 1" in text


def test_release_before_use() -> None:
    s = scripts(2, 2)
    s["mma"] = swapped(s["mma"], use("load_k"), release("load_k"))
    assert "event 5: use load_k; slot 1 is not held" in kinds(s)


def test_release_before_the_read_is_a_race() -> None:
    s = scripts(1, 2)
    mma = [e for e in s["mma"] if e.verb != "use"]
    s["mma"] = swapped(mma, read("sK", 0), release("load_k"))
    text = kinds(s, 1)
    assert text.startswith("race: SMEM sK [0, 1024): ") and "not ordered" in text


def test_p_before_s_is_read_is_not_a_race_but_s_before_p_is_read_is() -> None:
    """P lies over S: the producer of S must wait until P has been consumed."""
    s = scripts(2, 3)
    mma = s["mma"]
    at = mma.index(wait("compute_p", 0))
    del mma[at]
    assert "overrun" in kinds(s) or "race" in kinds(s)


def test_arrival_that_could_count_for_the_phase_before() -> None:
    """A one-way edge whose way back nothing orders: warps of the producer can lap each other."""
    s = scripts(2, 3)
    s["compute"] = [e for e in s["compute"] if e != wait("mma_s", 0)]
    s = {agent: [e for e in done if e.verb not in ("read", "write")] for agent, done in s.items()}
    assert "nothing orders that after the arrival of" in kinds(s)


def test_a_phase_that_completes_before_the_waiter_looked() -> None:
    warps = WarpPlan((Role("a", 0, 1, 128), Role("b", 1, 2, 128)), 128)
    topology = Topology(
        (
            Edge("there", Via.ASYNC, "a", "b", ordered_by="back"),
            Edge("back", Via.ASYNC, "b", "a", ordered_by="there"),
        )
    )
    p = SimpleNamespace(warps=warps, topology=topology, smem=SmemPlan(()), tmem=None)
    good = {
        "a": [commit("there", 0), wait("back", 0)] * 3,
        "b": [wait("there", 0), commit("back", 0)] * 3,
    }
    assert check(p, good).events == 12
    bad = {"a": [commit("there", 0)] * 2, "b": [wait("there", 0)] * 2}
    with pytest.raises(ProtocolError, match="can complete phase 1 before b has looked at 0"):
        check(p, bad)


def test_verbs_of_the_wrong_role() -> None:
    s = scripts(1, 1)
    assert "only ('load',) may" in kinds({**s, "mma": [acquire("load_k"), *s["mma"]]}, 1)
    assert "is one-way" in kinds({**s, "mma": [acquire("mma_s", 0), *s["mma"]]}, 1)
    assert "slot 0 is not held" in kinds({**s, "mma": [release("load_k"), *s["mma"]]}, 1)


def test_named_barriers_count_threads() -> None:
    b = (Barrier("all", ("compute", "mma", "load")), Barrier("half", ("compute", "mma"), 160))
    p = plan(1, b)
    meet = {"compute": [sync("all")], "mma": [sync("all")], "load": [sync("all")]}
    check(p, meet)
    with pytest.raises(ProtocolError, match="sync all; arrived: "):
        check(p, {**meet, "load": []})
    check(p, {"compute": [sync("half")] * 3, "mma": [sync("half"), sync("half"), arrive("half")]})
    with pytest.raises(ProtocolError, match="overrun: mma arrives twice at barrier half"):
        check(p, {"compute": [sync("half")] * 2, "mma": [arrive("half"), sync("half")]})
    with pytest.raises(ProtocolError, match=r"only \('compute', 'mma'\) may"):
        check(p, {"load": [sync("half")]})
    few = plan(1, (Barrier("few", ("compute",), 32),))
    with pytest.raises(ProtocolError, match=r"64 threads of .* arrive, it counts 32"):
        check(few, {"compute": [sync("few")]})


def test_a_barrier_orders_memory() -> None:
    p = plan(1, (Barrier("b", ("compute", "mma")),))
    check(p, {"compute": [write("S"), sync("b")], "mma": [sync("b"), read("S")]})
    with pytest.raises(ProtocolError, match=r"race: TMEM S, P \[32, 64\): "):
        check(p, {"compute": [write("S"), sync("b")], "mma": [read("P"), sync("b")]})


def test_spans_that_do_not_meet_do_not_race() -> None:
    p = plan(1)
    check(p, {"compute": [write("S", span=(0, 32))], "mma": [write("S", span=(32, 64))]})
    with pytest.raises(ProtocolError, match="race"):
        check(p, {"compute": [write("S", span=(0, 33))], "mma": [write("S", span=(32, 64))]})


def test_one_arrival_for_a_role_orders_only_its_warp() -> None:
    """With Arrive.ONE the others of the role must have met that warp before."""
    warps = WarpPlan((Role("a", 0, 4, 128), Role("b", 4, 5, 128)), 128)
    topology = Topology(
        (Edge("there", Via.ASYNC, "a", "b", src_by=Arrive.ONE),), (Barrier("meet", ("a",)),)
    )
    p = SimpleNamespace(
        warps=warps, topology=topology, smem=SmemPlan((SmemField("x", 16),)), tmem=None
    )
    b = [wait("there"), read("x"), release("there")]
    check(p, {"a": [acquire("there"), write("x"), sync("meet"), commit("there")], "b": b})
    with pytest.raises(ProtocolError, match="race: SMEM x"):
        check(p, {"a": [acquire("there"), write("x"), commit("there")], "b": b})


def test_teams_need_a_script_each() -> None:
    warps = WarpPlan((Role("a", 0, 4, 128, teams=2),), 128)
    p = SimpleNamespace(warps=warps, topology=Topology(()), smem=SmemPlan(()), tmem=None)
    with pytest.raises(ValueError, match="has 2 teams; a script for each"):
        check(p, {"a": []})
    with pytest.raises(ValueError, match=r"'a\[2\]': role 'a' has 2 teams"):
        check(p, {"a[2]": []})
