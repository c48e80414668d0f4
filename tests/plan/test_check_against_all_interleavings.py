"""The protocol check runs a few schedules and claims to speak for all; here all are tried.

Small protocols, right ones and broken ones, are explored state by state by a model without clocks:
a barrier counts arrivals and knows its phase, a wait sees the parity. Whatever goes wrong in some
interleaving, `check` must report; what it reports must go wrong in some interleaving.
"""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from fa_cute.plan import Barrier, Edge, Role, SmemField, SmemPlan, Topology, Via, WarpPlan
from fa_cute.plan.check import check
from fa_cute.plan.events import (
    Event,
    ProtocolError,
    acquire,
    claim,
    commit,
    read,
    release,
    sync,
    wait,
    write,
)
from fa_cute.plan.script import Program

NAMES = ("a", "b", "c")
LIMIT = 40_000  # states


def plan(stages: int) -> SimpleNamespace:
    """a -ring-> b -one-way-> c -one-way-> a, and a named barrier of a and c."""
    return SimpleNamespace(
        warps=WarpPlan(tuple(Role(n, i, i + 1, 128) for i, n in enumerate(NAMES)), 128),
        topology=Topology(
            (
                Edge("ring", Via.ASYNC, "a", "b", stages),
                Edge("on", Via.ASYNC, "b", "c", ordered_by="back"),
                Edge("back", Via.ASYNC, "c", "a", ordered_by="on"),
                Edge("both", Via.ASYNC, ("a", "c"), "b", ordered_by="ring"),
            ),
            (Barrier("meet", ("a", "c")),),
        ),
        smem=SmemPlan((SmemField("x", 16, 2, align=16), SmemField("y", 16, align=16))),
        tmem=None,
    )


def right(rounds: int, stages: int) -> dict[str, list[Event]]:
    """A protocol that holds: x goes round the ring, y from c to a."""
    a, b, c = [], [], []
    for i in range(rounds):
        x = i % stages
        a += [acquire("ring"), write("x", x), commit("ring"), commit("both", 0)]
        a += [wait("back", 0), read("y"), sync("meet")]
        b += [wait("ring"), wait("both", 0), read("x", x), commit("on", 0), release("ring")]
        c += [commit("both", 0), wait("on", 0), write("y"), commit("back", 0), sync("meet")]
    return {"a": a, "b": b, "c": c}


def explored(program: Program) -> bool | None:
    """Whether some interleaving hangs, races, or gets a phase wrong; None: too many."""
    ends = tuple(len(a.ops) for a in program.agents)
    fresh = tuple((0, b.arrivers) for b in program.barriers)
    first = ((0,) * len(ends), fresh, (0, frozenset()), frozenset())
    seen, stack = {first}, [first]
    while stack:
        if len(seen) > LIMIT:
            return None
        state = stack.pop()
        after = []
        if races(program, state[0]):
            return True
        for agent in range(len(ends)):
            if state[0][agent] < ends[agent]:
                new = step(program, state, agent)
                if new == "wrong":
                    return True
                after += [new] if new is not None else []
        if not after and state[0] != ends:
            return True
        for new in after:
            if new not in seen:
                seen.add(new)
                stack.append(new)
    return False


def races(program: Program, at: tuple[int, ...]) -> bool:
    """Whether two agents are about to make conflicting accesses."""
    ready = [a.ops[i] for a, i in zip(program.agents, at) if i < len(a.ops)]
    places = [op.target for op in ready if op.kind == "access"]
    return any(b in program.conflicts[a] for a in places for b in places)


def step(program: Program, state, agent: int):
    """The state after an agent's next op; None if it has to wait; "wrong" if it must not happen."""
    at, barriers, (rounds, met), inside = state
    op = program.agents[agent].ops[at[agent]]
    if op.kind == "look":
        completed = barriers[op.target][0]
        if (completed - op.number) % 2 == 0:
            return None
        if completed != op.number + 1:
            return "wrong"
    elif op.kind == "arrive":
        completed, pending = barriers[op.target]
        if agent not in pending:
            return "wrong"
        pending = pending - {agent}
        if not pending:
            completed, pending = completed + 1, program.barriers[op.target].arrivers
        barriers = (*barriers[: op.target], (completed, pending), *barriers[op.target + 1 :])
    elif op.kind == "meet" and agent not in dict(inside):
        if agent in met:
            return "wrong"
        waits = rounds
        met = met | {agent}
        if len(met) == 2:
            rounds, met = rounds + 1, frozenset()
        if op.number and rounds == waits:  # arrived, not through
            return (at, barriers, (rounds, met), inside | {(agent, waits)})
    elif op.kind == "meet":
        if rounds <= dict(inside)[agent]:
            return None
        inside = frozenset(x for x in inside if x[0] != agent)
    at = (*at[:agent], at[agent] + 1, *at[agent + 1 :])
    return (at, barriers, (rounds, met), inside)


@st.composite
def protocols(draw: st.DrawFn) -> tuple[int, dict[str, list[Event]]]:
    """A right protocol with up to three events dropped, doubled, moved or no longer waited for."""
    stages = draw(st.integers(1, 2))
    scripts = right(draw(st.integers(1, 3)), stages)
    for _ in range(draw(st.integers(0, 3))):
        script = scripts[draw(st.sampled_from(NAMES))]
        if len(script) < 2:
            continue
        at = draw(st.integers(0, len(script) - 2))
        match draw(st.sampled_from(("drop", "double", "swap", "claim"))):
            case "drop":
                del script[at]
            case "double":
                script.insert(at, script[at])
            case "claim":
                taken = [i for i, e in enumerate(script) if e.verb == "acquire"]
                for i in taken[: at % (len(taken) + 1)]:
                    script[i] = claim("ring")
            case "swap":
                script[at], script[at + 1] = script[at + 1], script[at]
    return stages, scripts


@settings(max_examples=250, deadline=None)
@given(protocols())
def test_check_says_what_some_interleaving_does(protocol: tuple[int, dict]) -> None:
    stages, scripts = protocol
    try:
        program = Program(plan(stages), scripts)
    except ProtocolError:
        return  # wrong in one script alone
    wrong = explored(program)
    if wrong is None:
        return
    try:
        check(plan(stages), scripts, seeds=1)
    except ProtocolError as error:
        assert wrong, error
    else:
        assert not wrong
