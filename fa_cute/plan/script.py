"""Scripts of roles, resolved against a plan: which slot, which phase, which bytes each event means.

What is wrong in one script alone is found here; what is wrong between scripts is check.py's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import PlanError
from .events import Event, ProtocolError
from .topology import Arrive, Edge, Via
from .warps import WARP_THREADS

# Edges on which a side arrives by tcgen05.commit.
TAKING = ("acquire", "claim")  # of a slot, by a producer
COMMITS = {"full": (Via.UMMA_ASYNC,), "empty": (Via.TMA_UMMA, Via.ASYNC_UMMA)}


@dataclass(frozen=True)
class Op:
    """One event as the run needs it.

    ``kind``: "look" (wait for phase ``number`` of barrier ``target``), "arrive" (on barrier
    ``target``; what engine ``number`` did is done by then, -1 for none), "meet" (named barrier
    ``target``; wait if ``number``), "access" (of place ``target``) or "none".
    """

    kind: str
    target: int
    number: int
    event: Event


@dataclass
class Agent:
    """Warps that do the same; ``base`` is the name of the script."""

    name: str
    base: str
    role: str
    team: int | None
    threads: int
    script: tuple[Event, ...]
    ops: list[Op] = field(default_factory=list)


@dataclass(frozen=True)
class Place:
    """Memory that one engine reads or writes. Accesses with the same ``order`` keep their order."""

    engine: int
    verb: str
    name: str
    space: str
    first: int
    end: int
    order: str


@dataclass
class MBarrier:
    """One slot of one side of an edge; ``waiters`` with the phases that each looks at."""

    label: str
    arrivers: frozenset[int]
    waiters: dict[int, list[int]] = field(default_factory=dict)

    def last_look(self, waiter: int, phase: int) -> int | None:
        """The last phase up to ``phase`` that a waiter looks at."""
        return max((p for p in self.waiters[waiter] if p <= phase), default=None)


class Program:
    """All agents of a plan, with barriers and places by number.

    Engines are numbered after the agents: one per TMA edge, one per role that issues tcgen05.
    """

    def __init__(self, plan: Any, scripts: Mapping[str, Sequence[Event]]) -> None:
        self.plan = plan
        parts: dict[str, int] = {}
        for name in scripts:
            parts[name.partition("/")[0]] = parts.get(name.partition("/")[0], 0) + 1
        self.agents = [
            agent
            for name, script in scripts.items()
            for agent in _halves(plan, name, tuple(script), parts[name.partition("/")[0]])
        ]
        edges = plan.topology.edges
        umma = {e.src for e in edges if e.via is Via.UMMA_ASYNC}
        umma |= {e.dst for e in edges if e.via in (Via.TMA_UMMA, Via.ASYNC_UMMA)}
        names = [e.name for e in edges if e.via.by_tma] + sorted(umma)
        self.engines = {name: len(self.agents) + i for i, name in enumerate(names)}
        self.barriers: list[MBarrier] = []
        self.places: list[Place] = []
        self._barrier_ids: dict[tuple[str, str, int], int] = {}
        self._place_ids: dict[Place, int] = {}
        self.named = [b.name for b in plan.topology.barriers]
        given_back = {e.name for a in self.agents for e in a.script if e.verb == "release"}
        for number, agent in enumerate(self.agents):
            _Resolver(self, number, agent).resolve(given_back)
        self.conflicts = [
            [j for j, b in enumerate(self.places) if _conflict(a, b)] for a in self.places
        ]

    @property
    def width(self) -> int:
        """Entries of a vector clock."""
        return len(self.agents) + len(self.engines)

    def barrier(self, edge: Edge, side: str, slot: int) -> int:
        """Number of the full or empty barrier of a slot."""
        key = (edge.name, side, slot)
        if key not in self._barrier_ids:
            roles, by = edge.sources, edge.src_by
            if side == "empty":
                roles, by = edge.sinks, edge.dst_by
            arrivers: list[int] = []
            for role in roles:
                mine = [
                    i
                    for i, a in enumerate(self.agents)
                    if a.role == role and a.team in (None, slot)
                ]
                if not mine:
                    raise PlanError(f"edge {edge.name!r}: role {role!r} has no script")
                arrivers += mine[:1] if by is Arrive.ONE else mine
            self._barrier_ids[key] = len(self.barriers)
            label = f"{edge.name}.{side}[{slot}]"
            self.barriers.append(MBarrier(label, frozenset(arrivers)))
        return self._barrier_ids[key]

    def place(self, place: Place) -> int:
        """Number of a place."""
        if place not in self._place_ids:
            self._place_ids[place] = len(self.places)
            self.places.append(place)
        return self._place_ids[place]


def _halves(plan: Any, name: str, script: tuple[Event, ...], parts: int) -> Iterator[Agent]:
    """The agent, or both its halves if it has more than one warp."""
    role_name, bracket, rest = name.partition("/")[0].partition("[")
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
        yield Agent(name, name, role_name, team, threads, script)
    else:
        for half in "ab":
            yield Agent(f"{name}.{half}", name, role_name, team, threads // 2, script)


def _conflict(a: Place, b: Place) -> bool:
    """Whether two accesses need an order that they do not have by themselves."""
    if a.space != b.space or "write" not in (a.verb, b.verb) or (a.order and a.order == b.order):
        return False
    return a.first < b.end and b.first < a.end


class _Resolver:
    """Turns one agent's events into ops, and checks their order in its own script."""

    def __init__(self, program: Program, number: int, agent: Agent) -> None:
        self.program, self.number, self.agent = program, number, agent
        self.plan = program.plan
        self.counts: dict[tuple[str, str, int | None], int] = {}
        self.acquired = {e.name for e in agent.script if e.verb in TAKING}

    def resolve(self, given_back: set[str]) -> None:
        for at, event in enumerate(self.agent.script):
            if event.verb in ("read", "write"):
                op = Op("access", self.program.place(self.locate(event)), 0, event)
            elif event.verb in ("sync", "arrive"):
                barrier = self.plan.topology.barrier(event.name)
                if self.agent.role not in barrier.roles:
                    raise self.wrong(at, event, f"only {barrier.roles} may")
                number = self.program.named.index(event.name)
                op = Op("meet", number, event.verb == "sync", event)
            else:
                op = self.edge_op(at, event)
            self.agent.ops.append(op)
        self.check_end(given_back)

    def wrong(self, at: int, event: Event, why: str) -> ProtocolError:
        return ProtocolError("order", f"{self.agent.base}, event {at}: {event}; {why}")

    def count(self, edge: Edge, verb: str, slot: int | None) -> int:
        return self.counts.get((edge.name, verb, slot), 0)

    def edge_op(self, at: int, event: Event) -> Op:
        edge, verb = self.plan.topology[event.name], event.verb
        slot = event.slot
        # What is used is the oldest slot that is held, and a claim counts as an acquire.
        counted = {"use": "release", "claim": "acquire"}.get(verb, verb)
        if slot is None:  # the next one of the ring
            slot = self.count(edge, counted, None) % edge.stages
        if not 0 <= slot < edge.stages:
            raise PlanError(f"{self.agent.base}: {event}; {edge.name} has {edge.stages} stages")
        may = edge.sources if verb in (*TAKING, "commit", "tail") else edge.sinks
        if self.agent.role not in may:
            raise self.wrong(at, event, f"only {may} may")
        if edge.one_way and verb in (*TAKING, "tail", "release"):
            raise self.wrong(at, event, "the edge is one-way")
        held = self.count(edge, "wait", slot) - self.count(edge, "release", slot)
        if verb in ("release", "use") and held <= 0:
            raise self.wrong(at, event, f"slot {slot} is not held")
        free = self.count(edge, "acquire", slot) - self.count(edge, "commit", slot)
        # One of several producers may rely on another's acquire.
        relies = edge.one_way or (len(edge.sources) > 1 and edge.name not in self.acquired)
        if verb == "commit" and not relies and free <= 0:
            raise self.wrong(at, event, f"slot {slot} was not acquired")
        op = self.barrier_op(event, edge, slot)
        if verb not in ("tail", "use"):
            for key in (slot, None):
                self.counts[edge.name, counted, key] = self.count(edge, counted, key) + 1
        return op

    def barrier_op(self, event: Event, edge: Edge, slot: int) -> Op:
        verb = event.verb
        if verb in ("use", "claim"):
            return Op("none", 0, 0, event)
        side = "empty" if verb in ("acquire", "tail", "release") else "full"
        number = self.program.barrier(edge, side, slot)
        barrier = self.program.barriers[number]
        if verb in ("acquire", "tail", "wait"):
            # A producer's first look at a slot passes: the phase "before the first" is over.
            phase = self.count(edge, "wait" if verb == "wait" else "acquire", slot)
            barrier.waiters.setdefault(self.number, []).append(phase - (side == "empty"))
            return Op("look", number, phase - (side == "empty"), event)
        if self.number not in barrier.arrivers:  # another warp of the role speaks for it
            return Op("none", 0, 0, event)
        engine = -1
        if side == "full" and edge.via.by_tma:
            engine = self.program.engines[edge.name]
        elif edge.via in COMMITS[side]:
            engine = self.program.engines[self.agent.role]
        return Op("arrive", number, engine, event)

    def locate(self, event: Event) -> Place:
        """Where an access goes, and who makes it.

        A TMA load is known to be done only through its own edge, tensor-core accesses only through
        tcgen05.commit; the latter keep their order among themselves.
        """
        engine, order = self.number, self.agent.base
        for edge in self.plan.topology.edges:
            loads = edge.via.by_tma and event.verb == "write" and event.name in edge.tx
            if loads and self.agent.role in edge.sources:
                engine, order = self.program.engines[edge.name], ""
        if self.agent.role in self.program.engines:
            engine = self.program.engines[self.agent.role]
        tmem = getattr(self.plan, "tmem", None)
        if tmem is not None and any(r.name == event.name for r in tmem.regions):
            space, first, end = "TMEM", tmem[event.name].start, tmem[event.name].stop
        else:
            smem_field = self.plan.smem[event.name]
            space, first = "SMEM", self.plan.smem.offset(event.name)
            end = first + smem_field.size
            if event.slot is not None:
                first += event.slot * smem_field.bytes
                end = first + smem_field.bytes
        if event.span is not None:
            first, end = first + event.span[0], first + event.span[1]
        return Place(engine, event.verb, event.name, space, first, end, order)

    def check_end(self, given_back: set[str]) -> None:
        """Nobody leaves with a slot in hand, but for edges whose slots never come back."""
        for edge in self.plan.topology.edges:
            for slot in range(edge.stages):
                n = {v: self.count(edge, v, slot) for v in ("acquire", "commit", "wait", "release")}
                where = f"{edge.name}[{slot}]"
                if n["acquire"] > n["commit"]:
                    raise ProtocolError(
                        "order", f"{self.agent.base} ends without commit of {where}"
                    )
                if edge.name in given_back and n["wait"] > n["release"]:
                    raise ProtocolError(
                        "order", f"{self.agent.base} ends without release of {where}"
                    )
