"""When asynchronous work happens, and in which order warps run.

An asynchronous operation (a TMA copy, an MMA, a bulk store) is posted with the agent that performs
it. Operations of one agent happen in order; agents are independent of each other. A schedule picks
the moment: at issue (`early`), when nothing else can run (`late`), or at random. `priority` gives
every warp and every kind of operation a random rank and always runs the highest that can go on, so
some role is always as far ahead, and another as far behind, as the program allows.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from fa_cute.errors import ArgumentError
from fa_cute.sim.handlers import Signal, Wait

MODES = ("early", "late", "random", "priority")
WARP_ORDERS = ("order", "random")


@dataclass(frozen=True)
class Schedule:
    """`mode` is for asynchronous work, `warps` for the order of warps; `seed` repeats a run."""

    mode: str = "early"
    warps: str = "order"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ArgumentError(f"schedule mode {self.mode!r}; allowed: {', '.join(MODES)}")
        if self.warps not in WARP_ORDERS:
            raise ArgumentError(f"warp order {self.warps!r}; allowed: {', '.join(WARP_ORDERS)}")

    @classmethod
    def of(cls, text: Schedule | str) -> Schedule:
        """`early`, `late`, `random:7`, `priority:7` (warps too, with seed 7), or a Schedule."""
        if isinstance(text, Schedule):
            return text
        mode, _, seed = text.partition(":")
        return cls(mode, "random" if mode in ("random", "priority") else "order", int(seed or 0))

    def __str__(self) -> str:
        return f"{self.mode}/{self.warps}/{self.seed}"


class AsyncQueue:
    """Outstanding asynchronous operations."""

    def __init__(self, schedule: Schedule):
        self.schedule = schedule
        self.at_once = schedule.mode == "early"
        self.early = self.at_once  # handlers need not post what they could do in place
        self.rng = random.Random(schedule.seed)
        self.agents: dict[Hashable, deque] = {}
        self.order: deque[Hashable] = deque()  # agent of each operation, in order of issue
        self.done = 0  # operations performed: somebody who polls may look again
        self.timeline = None
        self.owner = None  # the CTA whose warp, or whose operation, is running
        self._running = False
        self.ranks: dict[str, float] | None = {} if schedule.mode == "priority" else None
        self.running = 1.0  # rank of whatever runs now

    def __len__(self) -> int:
        return sum(len(q) for q in self.agents.values())

    def post(self, kind: str, agent: Hashable, fn: Callable[[], None]) -> None:
        """Perform `fn` now or later; it reads memory, writes results and signals barriers."""
        if self.at_once and not self._running:
            self.done += 1
            self._running = True
            try:
                fn()
            finally:
                self._running = False
            while self.agents:
                self.run_one()
            return
        self.agents.setdefault(agent, deque()).append((kind, fn, self.owner))
        if self.ranks is not None:
            while not self._running and agent in self.agents and self.rank(agent) > self.running:
                self._running = True
                try:
                    self._perform(agent)
                finally:
                    self._running = False
        self.order.append(agent)

    def trace(self, clock: list[int], counters) -> None:
        """Give operations a start and an end in simulated steps, from what they count."""
        plain, busy, usual = self.post, {}, {}

        def post(kind: str, agent: Hashable, fn: Callable[[], None]) -> None:
            issued, cta = clock[0], self.owner.ctaid

            def timed() -> None:
                outer, before = clock[0], _work(counters)
                start = max(issued, busy.get(agent, 0))
                clock[0] = start + usual.get(kind, 1)  # signals come at the end
                fn()
                usual[kind] = 1 + int(_work(counters) - before)
                busy[agent] = start + usual[kind]
                self.timeline.add(cta, kind, start, busy[agent], kind)
                clock[0] = outer

            plain(kind, agent, timed)

        self.post = post

    def rank(self, agent: Hashable) -> float:
        """Priority of an agent; half of the agents of a kind share one."""
        rank = self.ranks.get(agent)
        if rank is None:
            kind = self.agents[agent][0][0]
            shared = self.ranks.setdefault(kind, self.rng.random())
            rank = self.ranks[agent] = shared if self.rng.random() < 0.5 else self.rng.random()
        return rank

    def highest(self) -> Hashable | None:
        """The agent that a priority schedule runs next."""
        return max(self.agents, key=self.rank) if self.agents else None

    def pending(self, agent: Hashable) -> int:
        return len(self.agents.get(agent, ()))

    def run_one(self) -> bool:
        """Perform one operation: the oldest, or the head of a random agent."""
        if not self.agents:
            return False
        if self.schedule.mode == "random":
            agent = self.rng.choice(list(self.agents))
        else:
            agent = self.order[0]
            while agent not in self.agents:
                self.order.popleft()
                agent = self.order[0]
            self.order.popleft()
        self._perform(agent)
        return True

    def _perform(self, agent: Hashable) -> None:
        queue = self.agents[agent]
        _, fn, owner = queue.popleft()
        if not queue:
            del self.agents[agent]
            if self.ranks is not None:
                self.ranks.pop(agent, None)
        self.done += 1
        outer, self.owner = self.owner, owner
        fn()
        self.owner = outer

    def run_agent(self, agent: Hashable) -> None:
        self._perform(agent)

    def drain(self, agent: Hashable) -> None:
        """Perform everything that one agent still has to do."""
        while agent in self.agents:
            self._perform(agent)

    def finish(self, owner) -> None:
        """Perform what one CTA still has outstanding, and whatever stands before it."""
        for agent in [a for a, q in self.agents.items() if any(e[2] is owner for e in q)]:
            while any(e[2] is owner for e in self.agents.get(agent, ())):
                self._perform(agent)

    def of(self, owner) -> list[str]:
        """Kinds of the outstanding operations that warps of one CTA issued."""
        return [kind for q in self.agents.values() for kind, _, who in q if who is owner]

    def between_warps(self) -> None:
        """A chance for asynchronous work while warps are still running (random schedule only)."""
        if self.schedule.mode == "random" and self.agents:
            for _ in range(self.rng.randrange(3)):
                self.run_one()

    def kinds(self) -> dict[str, int]:
        out: dict[str, int] = {}
        for queue in self.agents.values():
            for kind, _, _ in queue:
                out[kind] = out.get(kind, 0) + 1
        return out


def _work(counters) -> float:
    """Steps of asynchronous work counted so far: tensor-core flops and bytes moved."""
    moved = sum(n for name, n in counters.items() if not name.startswith("mma."))
    return counters["mma.flops"] / 16384 + moved / 64


class Groups(Signal):
    """Commit groups of one kind of asynchronous operation (bulk, cp.async, wgmma)."""

    __slots__ = (
        "added",
        "committed",
        "covered",
        "key",
        "kind",
        "last",
        "live",
        "open",
        "races",
        "total",
        "watchers",
    )

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.key, self.races = None, None  # of the race checker
        self.open = [0]  # outstanding operations of the group that is being collected
        self.committed: deque[list[int]] = deque()
        self.added = 0  # operations of the open group
        self.total = self.last = 0  # groups so far; number of the last one that was not empty
        self.covered = 0  # groups that some wait has covered
        self.live: set[object] = set()  # operations that are not done
        self.watchers: list[tuple[set, Callable[[], None]]] = []

    def add(self) -> Callable[[], None]:
        """One more operation in the open group; call the result when it is done."""
        group, me, number = self.open, object(), self.total + 1
        group[0] += 1
        self.added += 1
        self.live.add(me)

        def done() -> None:
            group[0] -= 1
            self.live.discard(me)
            if self.races is not None:
                self.races.group_done(self, number)
            for watcher in self.watchers[:]:
                watcher[0].discard(me)
                if not watcher[0]:
                    self.watchers.remove(watcher)
                    watcher[1]()
            self.fire()

        return done

    def after(self, fn: Callable[[], None]) -> None:
        """Call `fn` when the operations that were added so far are done (perhaps at once)."""
        if self.live:
            self.watchers.append((set(self.live), fn))
        else:
            fn()

    def commit(self) -> None:
        self.total += 1
        if self.added:
            self.last, self.added = self.total, 0
        self.committed.append(self.open)
        self.open = [0]

    def outstanding(self, allowed: int) -> int:
        """Groups beyond the `allowed` newest that are unfinished; the oldest retire first."""
        while self.committed and self.committed[0][0] == 0:
            self.committed.popleft()
        return max(0, len(self.committed) - allowed)

    def wait(self, allowed: int, ins=None) -> Wait | None:
        self.covered = max(self.covered, self.total - allowed)
        if self.races is not None:
            self.races.group_waited(self, self.total - allowed)
        if not self.outstanding(allowed):
            return None
        return Wait(
            lambda: not self.outstanding(allowed),
            lambda: {
                "on": f"{self.kind} groups",
                "outstanding": self.outstanding(allowed),
                "allowed": allowed,
            },
            self,
        )

    @property
    def unwaited(self) -> bool:
        """Is there an operation that no wait has covered?"""
        return self.added > 0 or self.last > self.covered

    def idle(self) -> bool:
        """Nothing outstanding, committed or not."""
        return self.open[0] == 0 and not self.outstanding(0)
