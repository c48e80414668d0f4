"""Does a kernel's protocol hold? Scripts of what its roles do, run against the plan's edges.

A script is the list of events of one *agent*: a role, one team of it (``"softmax[1]"``, serves slot
1), or one part of it (``"consumer/1"``, all parts serve all slots). The run models what the
hardware has: an mbarrier per slot and side that counts one phase at a time, waits that see only a
parity, named barriers that count threads. Agents of several warps run as two halves, since nothing
but the protocol keeps warps together.

Besides the run itself, vector clocks tell what is *ordered* rather than what happened to come
first, so one run speaks for all interleavings:

* deadlock: everybody waits; the report says who, on which slot and phase, and who is missing;
* overrun: an arrival that nothing orders after the phase before (it could land in that phase), or a
  phase that could complete before a waiter has looked at the one before (the parity would tell it
  to wait on);
* order: commit without acquire, release without wait, use of a slot that is not held, an end left
  holding, a verb that is not the role's;
* race: two accesses to the same columns or bytes, one a write, that nothing orders. Accesses of one
  agent do not race: its threads have rows of their own.

Where no overrun is possible, agents are deterministic and waiting is monotone: whether they get
stuck does not depend on the schedule. Several schedules are run all the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import PlanError
from .events import Event, ProtocolError
from .topology import Arrive, Edge
from .warps import WARP_THREADS


@dataclass(frozen=True)
class Report:
    """What was run: schedules, and events of one run."""

    schedules: int
    events: int


def check(plan: Any, scripts: Mapping[str, Sequence[Event]], seeds: int = 8) -> Report:
    """Run the scripts under several schedules; raises ProtocolError with a readable report.

    Schedules: in turns; each agent as late and as early as possible; ``seeds`` at random. Agents
        are roles of ``plan.warps`` or teams of them; what has no script does nothing.
    """
    parts: dict[str, int] = {}
    for name in scripts:
        parts[name.partition("/")[0]] = parts.get(name.partition("/")[0], 0) + 1
    agents = {
        agent.name: agent
        for name, script in scripts.items()
        for agent in _halves(plan, name, tuple(script), parts[name.partition("/")[0]])
    }
    names = list(agents)
    orders: list[Any] = [None]
    for name in names:
        others = [n for n in names if n != name]
        orders += [[*others, name], [name, *others]]
    orders += [random.Random(seed) for seed in range(seeds)]
    for order in orders:
        _Run(plan, agents).finish(order)
    return Report(len(orders), sum(len(script) for script in scripts.values()))


@dataclass(frozen=True)
class _Agent:
    """Warps that do the same."""

    name: str
    role: str
    team: int | None
    threads: int
    script: tuple[Event, ...]


def _halves(plan: Any, name: str, script: tuple[Event, ...], parts: int) -> Iterator[_Agent]:
    """The agent, or both its halves if it has more than one warp."""
    base = name.partition("/")[0]
    role_name, bracket, rest = base.partition("[")
    role = plan.warps[role_name]
    team = int(rest.rstrip("]")) if bracket else None
    if team is None and role.teams > 1 and parts == 1:
        raise PlanError(
            f"agent {name!r}: role {role_name!r} has {role.teams} teams; a script for each"
        )
    if team is not None and not 0 <= team < role.teams:
        raise PlanError(f"agent {name!r}: role {role_name!r} has {role.teams} teams")
    threads = role.threads // (role.teams if bracket else 1) // parts
    if threads <= WARP_THREADS:
        yield _Agent(name, role_name, team, threads, script)
    else:
        for half in "ab":
            yield _Agent(f"{name}.{half}", role_name, team, threads // 2, script)


class _Phases:
    """One mbarrier: who arrives in each phase, who has arrived in this one, and what is ordered
    before it.
    """

    def __init__(self, label: str, arrivers: frozenset[str]) -> None:
        self.label = label
        self.arrivers = arrivers
        self.completed = 0
        self.pending: set[str] = set(arrivers)
        self.clock: dict[str, int] = {}  # of the phase that is filling
        self.done: dict[str, int] = {}  # of the last complete phase
        self.marks: dict[str, int] = {}  # arriver -> its clock, of the phase that is filling
        self.done_marks: dict[str, int] = {}
        self.looked: dict[str, dict[int, int]] = {}  # waiter -> phase -> its clock then

    def arrive(self, agent: str, clock: dict[str, int], waiters: frozenset[str]) -> None:
        if agent not in self.arrivers:
            raise ProtocolError(
                "order", f"{agent} arrives on {self.label}; only {sorted(self.arrivers)} may"
            )
        phase = self.completed
        if agent not in self.pending:
            missing = ", ".join(sorted(self.pending))
            raise ProtocolError(
                "overrun",
                f"{agent} arrives twice in phase {phase} of {self.label}; {missing} did not yet",
            )
        if late := sorted(a for a, at in self.done_marks.items() if clock.get(a, 0) < at):
            raise ProtocolError(
                "overrun",
                f"{agent} arrives for phase {phase} of {self.label}, but nothing orders that "
                "after the arrival of "
                f"{', '.join(late)} for phase {phase - 1}: it could count for that phase",
            )
        self.pending.discard(agent)
        self.marks[agent] = clock[agent]
        _join(self.clock, clock)
        if self.pending:
            return
        for waiter in sorted(waiters):
            looked = self.looked.get(waiter, {}).get(phase - 1)
            if phase > 0 and (looked is None or self.clock.get(waiter, 0) < looked):
                raise ProtocolError(
                    "overrun",
                    f"{self.label} can complete phases {phase - 1} and {phase} before {waiter} "
                    "has looked at "
                    f"{phase - 1}: the parity would tell it to wait on",
                )
        self.completed += 1
        self.done, self.clock, self.pending = self.clock, {}, set(self.arrivers)
        self.done_marks, self.marks = self.marks, {}

    def ready(self, phase: int) -> bool:
        """What ``try_wait.parity`` answers: true of the phase before the first, too."""
        return (self.completed - phase) % 2 == 1


class _Run:
    """One run of all scripts."""

    def __init__(self, plan: Any, agents: Mapping[str, _Agent]) -> None:
        self.plan, self.agents = plan, agents
        self.at = dict.fromkeys(agents, 0)
        self.clock: dict[str, dict[str, int]] = {a: {} for a in agents}
        self.counts: dict[tuple[str, str, str, int | None], int] = {}
        self.phases: dict[tuple[str, str, int], _Phases] = {}
        self.accesses: dict[tuple[str, str, tuple[str, int, int]], tuple[int, str]] = {}
        self.met: dict[str, dict[str, dict[str, int]]] = {}  # named barrier -> arrived -> clock
        self.rounds: dict[str, int] = {}
        self.left: dict[tuple[str, int], dict[str, int]] = {}
        self.entered: dict[str, int] = {}
        self.waiters = self._find_waiters()

    def _find_waiters(self) -> dict[tuple[str, str, int], frozenset[str]]:
        """(edge, side, slot) -> agents whose scripts wait there."""
        found: dict[tuple[str, str, int], set[str]] = {}
        sides = {"acquire": "empty", "tail": "empty", "wait": "full"}
        for agent in self.agents.values():
            counts: dict[str, int] = {}
            for event in agent.script:
                if side := sides.get(event.verb):
                    slot = event.slot
                    if slot is None:
                        key = f"{event.verb} {event.name}"
                        slot = counts.get(key, 0) % self.plan.topology[event.name].stages
                        counts[key] = counts.get(key, 0) + 1
                    found.setdefault((event.name, side, slot), set()).add(agent.name)
        return {key: frozenset(who) for key, who in found.items()}

    def finish(self, order: Sequence[str] | random.Random | None) -> None:
        """Step until every script has ended."""
        names = list(self.agents)
        while any(self.at[n] < len(self.agents[n].script) for n in names):
            if isinstance(order, random.Random):
                order.shuffle(names)
            elif order is not None:
                names = list(order)
            moved = False
            for name in names:
                if self._step(name):
                    moved = True
                    if order is not None:
                        break  # the most urgent one again
            if not moved:
                raise ProtocolError("deadlock", self._blocked())
        self._check_ends()

    def _step(self, name: str) -> bool:
        """Run the next event of an agent unless it has to wait."""
        agent = self.agents[name]
        if self.at[name] == len(agent.script):
            return False
        event = agent.script[self.at[name]]
        if not self._run(agent, event):
            return False
        self.at[name] += 1
        return True

    def _run(self, agent: _Agent, event: Event) -> bool:
        clock = self.clock[agent.name]
        clock[agent.name] = self.at[agent.name] + 1
        if event.verb in ("read", "write"):
            self._access(agent, event)
        elif event.verb in ("sync", "arrive"):
            return self._meet(agent, event)
        else:
            return self._edge_event(agent, event)
        return True

    # Edges

    def _slot(self, agent: _Agent, event: Event, edge: Edge) -> int:
        if event.slot is not None:
            if not 0 <= event.slot < edge.stages:
                raise PlanError(f"{agent.name}: {event}; {edge.name} has {edge.stages} stages")
            return event.slot
        verb = "release" if event.verb == "use" else event.verb  # the oldest that is held
        return self.counts.get((agent.name, edge.name, verb, None), 0) % edge.stages

    def _count(self, agent: _Agent, edge: Edge, verb: str, slot: int) -> int:
        return self.counts.get((agent.name, edge.name, verb, slot), 0)

    def _edge_event(self, agent: _Agent, event: Event) -> bool:
        edge = self.plan.topology[event.name]
        slot = self._slot(agent, event, edge)
        side = edge.sources if event.verb in ("acquire", "commit", "tail") else edge.sinks
        if agent.role not in side:
            raise ProtocolError("order", f"{agent.name}: {event}; only {side} may")
        if edge.one_way and event.verb in ("acquire", "tail", "release"):
            raise ProtocolError("order", f"{agent.name}: {event}; {edge.name} is one-way")
        n = {v: self._count(agent, edge, v, slot) for v in ("acquire", "commit", "wait", "release")}
        where = f"{agent.name}, event {self.at[agent.name]}: {event.verb} {edge.name}[{slot}]"
        if event.verb in ("acquire", "tail"):
            if not self._look(agent, self._barrier(edge, "empty", slot), n["acquire"] - 1):
                return False
        elif event.verb == "wait":
            if not self._look(agent, self._barrier(edge, "full", slot), n["wait"]):
                return False
        elif event.verb == "commit":
            if not edge.one_way and self._acquires(agent, edge) and n["acquire"] <= n["commit"]:
                raise ProtocolError("order", f"{where} without acquire")
            self._signal(agent, edge, "full", slot)
        elif event.verb == "release":
            if n["wait"] <= n["release"]:
                raise ProtocolError("order", f"{where} without wait")
            self._signal(agent, edge, "empty", slot)
        elif event.verb == "use":
            if n["wait"] <= n["release"]:
                raise ProtocolError("order", f"{where}, which is not held")
            return True
        else:
            raise PlanError(f"{agent.name}: unknown event {event}")
        if event.verb != "tail":
            for key in (slot, None):
                at = (agent.name, edge.name, event.verb, key)
                self.counts[at] = self.counts.get(at, 0) + 1
        return True

    def _acquires(self, agent: _Agent, edge: Edge) -> bool:
        """Whether the agent acquires this edge at all: a second producer may rely on the first."""
        return any(e.verb == "acquire" and e.name == edge.name for e in agent.script)

    def _barrier(self, edge: Edge, side: str, slot: int) -> _Phases:
        key = (edge.name, side, slot)
        if key not in self.phases:
            roles, by = edge.sources, edge.src_by
            if side == "empty":
                roles, by = edge.sinks, edge.dst_by
            arrivers: set[str] = set()
            for role in roles:
                mine = [
                    a.name
                    for a in self.agents.values()
                    if a.role == role and a.team in (None, slot)
                ]
                arrivers.update(mine[:1] if by is Arrive.ONE else mine or [role])
            self.phases[key] = _Phases(f"{edge.name}.{side}[{slot}]", frozenset(arrivers))
        return self.phases[key]

    def _signal(self, agent: _Agent, edge: Edge, side: str, slot: int) -> None:
        waiters = self.waiters.get((edge.name, side, slot), frozenset())
        barrier = self._barrier(edge, side, slot)
        by = edge.src_by if side == "full" else edge.dst_by
        if by is not Arrive.ONE or agent.name in barrier.arrivers:
            barrier.arrive(agent.name, self.clock[agent.name], waiters)

    def _look(self, agent: _Agent, barrier: _Phases, phase: int) -> bool:
        if not barrier.ready(phase):
            return False
        if barrier.completed < phase + 1:
            raise ProtocolError(
                "overrun",
                f"{agent.name} passes {barrier.label} phase {phase} early: {barrier.completed} "
                "are complete",
            )
        if phase >= 0:
            _join(self.clock[agent.name], barrier.done)
        barrier.looked.setdefault(agent.name, {})[phase] = self.clock[agent.name][agent.name]
        return True

    # Named barriers

    def _meet(self, agent: _Agent, event: Event) -> bool:
        barrier = self.plan.topology.barrier(event.name)
        if agent.role not in barrier.roles:
            raise ProtocolError("order", f"{agent.name}: {event}; only {barrier.roles} may")
        met = self.met.setdefault(event.name, {})
        now = self.rounds.get(event.name, 0)
        if agent.name not in self.entered:
            if agent.name in met:
                raise ProtocolError(
                    "overrun", f"{agent.name} arrives twice at barrier {event.name}"
                )
            met[agent.name] = dict(self.clock[agent.name])
            self.entered[agent.name] = now
            threads = sum(self.agents[a].threads for a in met)
            need = barrier.num_threads(self.plan.warps)
            if threads > need:
                raise ProtocolError(
                    "overrun",
                    f"barrier {event.name}: {threads} threads of {sorted(met)} "
                    f"arrive, it counts {need}",
                )
            if threads == need:
                joined: dict[str, int] = {}
                for clock in met.values():
                    _join(joined, clock)
                self.left[event.name, now] = joined
                self.rounds[event.name] = now + 1
                self.met[event.name] = {}
        if event.verb == "sync":
            if self.rounds.get(event.name, 0) <= self.entered[agent.name]:
                return False
            _join(self.clock[agent.name], self.left[event.name, self.entered[agent.name]])
        del self.entered[agent.name]
        return True

    # Memory

    def _place(self, event: Event) -> tuple[str, int, int]:
        """(space, first, end) of an access."""
        tmem = getattr(self.plan, "tmem", None)
        if tmem is not None and any(r.name == event.name for r in tmem.regions):
            region = tmem[event.name]
            first, end = event.span or (0, region.cols)
            return "TMEM", region.start + first, region.start + end
        field, first = self.plan.smem[event.name], self.plan.smem.offset(event.name)
        end = first + field.size
        if event.slot is not None:
            first += event.slot * field.bytes
            end = first + field.bytes
        if event.span is not None:
            first, end = first + event.span[0], first + event.span[1]
        return "SMEM", first, end

    def _access(self, agent: _Agent, event: Event) -> None:
        place = self._place(event)
        clock = self.clock[agent.name]
        for (other, verb, where), (at, name) in self.accesses.items():
            meet = where[0] == place[0] and where[1] < place[2] and place[1] < where[2]
            if _base(other) == _base(agent.name) or not meet:
                continue
            if "write" not in (verb, event.verb):
                continue
            if clock.get(other, 0) < at:
                first, end = max(where[1], place[1]), min(where[2], place[2])
                names = name if name == event.name else f"{name}, {event.name}"
                raise ProtocolError(
                    "race",
                    f"{place[0]} {names} [{first}, {end}): {other} {verb}s, {agent.name} "
                    f"{event.verb}s "
                    f"(event {self.at[agent.name]}), not ordered",
                )
        self.accesses[agent.name, event.verb, place] = (clock[agent.name], event.name)

    # Reports

    def _check_ends(self) -> None:
        for agent in self.agents.values():
            for edge in self.plan.topology.edges:
                for slot in range(edge.stages):
                    n = {
                        v: self._count(agent, edge, v, slot)
                        for v in ("acquire", "commit", "wait", "release")
                    }
                    if n["acquire"] > n["commit"]:
                        raise ProtocolError(
                            "order", f"{agent.name} ends without commit of {edge.name}[{slot}]"
                        )
                    if not edge.one_way and n["wait"] > n["release"]:
                        raise ProtocolError(
                            "order", f"{agent.name} ends without release of {edge.name}[{slot}]"
                        )

    def _blocked(self) -> str:
        """A line for each agent that waits."""
        lines = ["every role waits"]
        for agent in self.agents.values():
            at = self.at[agent.name]
            if at == len(agent.script):
                what = "done"
            else:
                event = agent.script[at]
                what = f"event {at} of {len(agent.script)}: {self._waits_for(agent, event)}"
            line = f"  {agent.name.removesuffix('.a')}: {what}"
            if not (agent.name.endswith(".b") and lines[-1].partition(": ")[2] == what):
                lines.append(line)
        return "\n".join(lines)

    def _waits_for(self, agent: _Agent, event: Event) -> str:
        if event.verb == "sync":
            return f"{event}; arrived: {sorted(self.met.get(event.name, {}))}"
        edge = self.plan.topology[event.name]
        slot = self._slot(agent, event, edge)
        side = "full" if event.verb == "wait" else "empty"
        barrier = self._barrier(edge, side, slot)
        count = self._count(agent, edge, "wait" if side == "full" else "acquire", slot)
        phase = count if side == "full" else count - 1
        return (
            f"{event.verb} {barrier.label} phase {phase}; {barrier.completed} complete, "
            f"missing {', '.join(sorted(barrier.pending))}"
        )


def _base(name: str) -> str:
    """The agent of a half."""
    return name.removesuffix(".a").removesuffix(".b")


def _join(into: dict[str, int], other: Mapping[str, int]) -> None:
    for agent, at in other.items():
        if into.get(agent, 0) < at:
            into[agent] = at
