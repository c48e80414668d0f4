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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .events import Event, ProtocolError
from .script import MBarrier, Op, Program

Clock = list[int]


@dataclass(frozen=True)
class Report:
    """What was run: schedules, and events of one run."""

    schedules: int
    events: int


def check(plan: Any, scripts: Mapping[str, Sequence[Event]], seeds: int = 4) -> Report:
    """Run the scripts under several schedules; raises ProtocolError with a readable report.

    Schedules: in turns; each agent as late and as early as possible; ``seeds`` at random. A role
    without a script does nothing.
    """
    program = Program(plan, scripts)
    everybody = list(range(len(program.agents)))
    orders: list[list[int] | random.Random | None] = [None]
    for base in scripts:
        mine = [i for i in everybody if program.agents[i].base == base]
        others = [i for i in everybody if i not in mine]
        orders += [[*others, *mine], [*mine, *others]]
    orders += [random.Random(seed) for seed in range(seeds)]
    for order in orders:
        _Run(program).finish(order)
    return Report(len(orders), sum(len(script) for script in scripts.values()))


class _Phases:
    """One mbarrier: who arrived in this phase, and what is ordered before the last one."""

    def __init__(self, barrier: MBarrier, width: int) -> None:
        self.barrier = barrier
        self.completed = 0
        self.pending = set(barrier.arrivers)
        self.clock: Clock = [0] * width  # of the phase that is filling
        self.done: Clock = [0] * width  # of the last complete phase
        self.marks: dict[int, int] = {}  # arriver -> its clock, of the phase that is filling
        self.done_marks: dict[int, int] = {}  # of the last complete phase
        self.older_marks: dict[int, int] = {}  # of the one before
        self.looked: dict[int, tuple[int, int]] = {}  # waiter -> last phase seen, its clock then

    def ready(self, phase: int) -> bool:
        """What ``try_wait.parity`` answers: true of the phase before the first, too."""
        return (self.completed - phase) % 2 == 1


class _Run:
    """One run of all scripts."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.at = [0] * len(program.agents)
        self.clocks: list[Clock] = [[0] * program.width for _ in program.agents]
        self.phases = [_Phases(b, program.width) for b in program.barriers]
        self.issued = [0] * program.width  # accesses of each asynchronous engine so far
        self.accesses: dict[int, int] = {}  # place -> clock of the last access
        self.met: list[dict[int, Clock]] = [{} for _ in program.named]
        self.rounds = [0] * len(program.named)
        self.left: list[Clock] = [[] for _ in program.named]  # clock of the last round
        self.entered: dict[int, int] = {}  # agent -> round that it waits for

    def name(self, agent: int) -> str:
        return self.program.agents[agent].name

    def names(self, agents: Any) -> str:
        return ", ".join(sorted(self.name(a) for a in agents))

    def finish(self, order: list[int] | random.Random | None) -> None:
        """Step until every script has ended."""
        numbers = list(range(len(self.at)))
        if isinstance(order, list):
            numbers = order
        ends = [len(a.ops) for a in self.program.agents]
        while self.at != ends:
            if isinstance(order, random.Random):
                order.shuffle(numbers)
            moved = False
            for number in numbers:
                ops = self.program.agents[number].ops
                while self.at[number] < len(ops) and self.step(number, ops[self.at[number]]):
                    self.at[number] += 1
                    moved = True
                    if order is None:
                        break
                if moved and order is not None:
                    break  # the most urgent one again
            if not moved:
                raise ProtocolError("deadlock", self.blocked())

    def step(self, agent: int, op: Op) -> bool:
        """Run an op unless it has to wait."""
        self.clocks[agent][agent] = self.at[agent] + 1
        if op.kind == "look":
            return self.look(agent, op)
        if op.kind == "arrive":
            self.arrive(agent, op)
        elif op.kind == "access":
            self.access(agent, op.target)
        elif op.kind == "meet":
            return self.meet(agent, op)
        return True

    def look(self, agent: int, op: Op) -> bool:
        barrier, phase = self.phases[op.target], op.number
        if not barrier.ready(phase):
            return False
        if barrier.completed < phase + 1:
            raise ProtocolError(
                "overrun",
                f"{self.name(agent)} passes {barrier.barrier.label} phase {phase} early: "
                f"{barrier.completed} are complete",
            )
        clock = self.clocks[agent]
        skipped = barrier.looked.get(agent, (-1, 0))[0] < phase - 1
        if skipped and any(clock[a] < at for a, at in barrier.older_marks.items()):
            raise ProtocolError(
                "overrun",
                f"{self.name(agent)} can pass {barrier.barrier.label} phase {phase} early: nothing "
                f"tells it that phase {phase - 1} is complete",
            )
        if phase >= 0:
            _join(clock, barrier.done)
        barrier.looked[agent] = (phase, self.at[agent] + 1)
        return True

    def arrive(self, agent: int, op: Op) -> None:
        barrier, clock = self.phases[op.target], self.clocks[agent]
        phase, label = barrier.completed, barrier.barrier.label
        if agent not in barrier.pending:
            raise ProtocolError(
                "overrun",
                f"{self.name(agent)} arrives twice in phase {phase} of {label}; "
                f"{self.names(barrier.pending)} did not yet",
            )
        if late := [a for a, at in barrier.done_marks.items() if clock[a] < at]:
            raise ProtocolError(
                "overrun",
                f"{self.name(agent)} arrives for phase {phase} of {label}, but nothing orders that "
                f"after the arrival of {self.names(late)} for phase {phase - 1}: it could count "
                "for that phase",
            )
        barrier.pending.discard(agent)
        barrier.marks[agent] = clock[agent]
        _join(barrier.clock, clock)
        if op.number >= 0:
            barrier.clock[op.number] = max(barrier.clock[op.number], self.issued[op.number])
        if not barrier.pending:
            self.complete(barrier)

    def complete(self, barrier: _Phases) -> None:
        phase = barrier.completed
        for waiter in barrier.barrier.waiters if phase > 0 else ():
            due = barrier.barrier.last_look(waiter, phase - 1)
            seen, at = barrier.looked.get(waiter, (-2, 0))
            if due is not None and (seen < due or barrier.clock[waiter] < at):
                raise ProtocolError(
                    "overrun",
                    f"{barrier.barrier.label} can complete phase {phase} before "
                    f"{self.name(waiter)} has looked at {due}: the parity would tell it to wait on",
                )
        barrier.completed += 1
        barrier.done, barrier.clock = barrier.clock, [0] * self.program.width
        barrier.older_marks, barrier.done_marks = barrier.done_marks, barrier.marks
        barrier.marks = {}
        barrier.pending = set(barrier.barrier.arrivers)

    def meet(self, agent: int, op: Op) -> bool:
        """Named barrier: arrive; with ``op.number`` wait for the others."""
        number = op.target
        if agent not in self.entered:
            self.enter(agent, number)
        if op.number:
            if self.rounds[number] <= self.entered[agent]:
                return False
            _join(self.clocks[agent], self.left[number])
        del self.entered[agent]
        return True

    def enter(self, agent: int, number: int) -> None:
        met, name = self.met[number], self.program.named[number]
        barrier = self.program.plan.topology.barrier(name)
        if agent in met:
            raise ProtocolError("overrun", f"{self.name(agent)} arrives twice at barrier {name}")
        met[agent] = list(self.clocks[agent])
        self.entered[agent] = self.rounds[number]
        threads = sum(self.program.agents[a].threads for a in met)
        need = barrier.num_threads(self.program.plan.warps)
        if threads > need:
            raise ProtocolError(
                "overrun",
                f"barrier {name}: {threads} threads of {self.names(met)} arrive, it counts {need}",
            )
        if threads == need:
            joined = [0] * self.program.width
            for clock in met.values():
                _join(joined, clock)
            self.left[number] = joined
            self.rounds[number] += 1
            self.met[number] = {}

    def access(self, agent: int, number: int) -> None:
        clock, place = self.clocks[agent], self.program.places[number]
        for other in self.program.conflicts[number]:
            at = self.accesses.get(other)
            if at is not None and clock[self.program.places[other].engine] < at:
                raise ProtocolError("race", self.race(agent, number, other))
        at = clock[agent]
        if place.engine != agent:
            at = self.issued[place.engine] = self.issued[place.engine] + 1
        self.accesses[number] = at

    def race(self, agent: int, number: int, other: int) -> str:
        a, b = self.program.places[other], self.program.places[number]
        names = a.name if a.name == b.name else f"{a.name}, {b.name}"
        engines = {number: name for name, number in self.program.engines.items()}
        before = engines.get(a.engine) or self.program.agents[a.engine].base
        span = f"[{max(a.first, b.first)}, {min(a.end, b.end)})"
        return (
            f"{a.space} {names} {span}: {before} {a.verb}s, {self.program.agents[agent].base} "
            f"{b.verb}s (event {self.at[agent]}), not ordered"
        )

    def blocked(self) -> str:
        """A line for each agent that waits."""
        lines = ["every role waits"]
        for number, agent in enumerate(self.program.agents):
            at = self.at[number]
            what = "done"
            if at < len(agent.ops):
                what = f"event {at} of {len(agent.ops)}: {self.waits_for(agent.ops[at])}"
            line = f"  {agent.name.removesuffix('.a')}: {what}"
            if not (agent.name.endswith(".b") and lines[-1].partition(": ")[2] == what):
                lines.append(line)
        return "\n".join(lines)

    def waits_for(self, op: Op) -> str:
        if op.kind == "meet":
            return f"{op.event}; arrived: {self.names(self.met[op.target]) or 'nobody'}"
        barrier = self.phases[op.target]
        return (
            f"{op.event.verb} {barrier.barrier.label} phase {op.number}; {barrier.completed} "
            f"complete, missing {self.names(barrier.pending)}"
        )


def _join(into: Clock, other: Clock) -> None:
    """Pointwise maximum, in place."""
    for i, at in enumerate(other):
        if at > into[i]:
            into[i] = at
