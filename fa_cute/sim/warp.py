"""A warp: its registers, where it stands, and the loop that runs it until it must wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa_cute.errors import MisuseError
from fa_cute.sim.handlers import FULL, Signal, Wait
from fa_cute.sim.schedule import Groups

if TYPE_CHECKING:
    from fa_cute.sim.cta import Cta

STOP, EXIT, ERROR, BUDGET = range(4)  # kinds of answers of an engine's run()


class Warpgroup:
    """Four consecutive warps: they share wgmma groups."""

    __slots__ = ("_groups", "index", "warps")

    def __init__(self, index: int):
        self.index = index
        self.warps: list[Warp] = []
        self._groups: dict[str, Groups] = {}

    def groups(self, kind: str) -> Groups:
        groups = self._groups.get(kind)
        if groups is None:
            groups = self._groups[kind] = Groups(kind)
        return groups


class Warp:
    """32 lanes. `core` (of the engine) holds registers and program counter."""

    __slots__ = (
        "_groups",
        "at",
        "cluster_generation",
        "core",
        "cta",
        "flush",
        "index",
        "last_seen",
        "live",
        "machine",
        "pred",
        "quarter",
        "r32",
        "r64",
        "regs",
        "run_core",
        "skew",
        "spins",
        "state",
        "steps",
        "time",
        "v32",
        "v64",
        "vp",
        "wait",
        "warpgroup",
    )

    def __init__(self, core):
        self.core = core
        self.run_core = core.run
        self.r32, self.r64, self.pred = core.r32, core.r64, core.pred
        self.v32 = memoryview(core.r32.reshape(-1))
        self.v64 = memoryview(core.r64.reshape(-1))
        self.vp = memoryview(core.pred.reshape(-1))

    def reset(self, cta: Cta, index: int, live: int, steps: list) -> None:
        """Put the warp at the start of the kernel, as warp `index` of a CTA."""
        self.cta, self.machine, self.index = cta, cta.machine, index
        self.quarter = index % 4
        self.steps = steps
        self.live = live
        self.wait: Wait | None = None
        self.at = 0
        self.time = 0
        self.skew = 0  # simulated step minus instructions executed
        self.regs = cta.launch_regs
        self.cluster_generation = None
        self.flush = None  # hands work that a handler still collects to the queue, at a wait
        self.warpgroup = cta.warpgroups[index // 4]
        self._groups: dict[str, Groups] = {}
        self.spins: dict[int, tuple] = {}
        self.core.start(live)

    def __hash__(self) -> int:
        return id(self)

    @property
    def ins(self):
        """The instruction that is being handled, or that the warp waits at."""
        return self.machine.program.kernel.instrs[self.at]

    def groups(self, kind: str) -> Groups:
        groups = self._groups.get(kind)
        if groups is None:
            groups = self._groups[kind] = Groups(kind)
            groups.races = self.machine.races
            who = self.index // 4 if kind == "wgmma" else self.index
            groups.key = (kind.split(".read")[0], self.cta.rank, who)
        return groups

    def run(self) -> None:
        """Go on until the warp waits, leaves or yields."""
        run, steps, machine = self.run_core, self.steps, self.machine
        machine.queue.owner = self.cta
        while True:
            stop = run()
            if stop < 0x1000000000000000:
                self.at = pc = stop >> 32
                wait = steps[pc](self, stop & FULL)
                if wait is not None and not self.block(wait):
                    return
                if machine.preempt:
                    machine.preempt = False
                    machine.ready.append(self)
                    return
            else:
                if self.leave(stop):
                    return

    def run_traced(self) -> None:
        """`run` that keeps the simulated clock and records what the warp did."""
        machine, ctx = self.machine, self.core.ctx
        clock, timeline, lane = machine.clock, machine.timeline, machine.timeline.lane(self.index)
        start = self.time
        machine.queue.owner = self.cta
        while True:
            stop = self.run_core()
            now = self.time = ctx.count + self.skew
            clock[0] = now
            if stop >> 60:
                if self.leave(stop):
                    timeline.add(self.cta.ctaid, lane, start, now)
                    return
                continue
            self.at = stop >> 32
            wait = self.steps[self.at](self, stop & FULL)
            if self.time > now:
                timeline.add(self.cta.ctaid, lane, start, now)
                timeline.add(self.cta.ctaid, lane, now, self.time, "wait")
                self.skew += self.time - now
                start = self.time
            if wait is not None and not self.block(wait):
                timeline.add(self.cta.ctaid, lane, start, now)
                return
            if machine.preempt:
                machine.preempt = False
                timeline.add(self.cta.ctaid, lane, start, now)
                machine.ready.append(self)
                return

    def block(self, wait: Wait) -> bool:
        """Register the wait; True when it is over at once."""
        while wait.ready():
            if self.machine.races is not None:
                self.machine.races.observed(self, wait.source)
            if wait.then is None:
                return True
            wait = wait.then(self)
            if wait is None:
                return True
        self.wait = wait
        self.machine.blocked(self, wait)
        return False

    def wake(self) -> None:
        """The wait is over: finish the instruction and queue for running."""
        wait, self.wait = self.wait, None
        races = self.machine.races
        if races is not None:
            outer = races.current
            races.enter(self)
            races.observed(self, wait.source)
            self._resume(wait)
            races.current = outer
            return
        self._resume(wait)

    def _resume(self, wait: Wait) -> None:
        timeline = self.machine.timeline
        if timeline is not None:
            now = max(getattr(wait.source, "time", 0), self.time)
            timeline.add(self.cta.ctaid, timeline.lane(self.index), self.time, now, "wait")
            self.skew += now - self.time
            self.time = now
        if wait.then is not None:
            again = wait.then(self)
            if again is not None and not self.block(again):
                return
        self.machine.woken(self)

    def leave(self, stop: int) -> bool:
        """Not a handled instruction: exit, error, or the end of a time slice."""
        kind = stop >> 60
        if kind == EXIT:
            self.live = 0
            self.cta.warp_left(self)
            return True
        if kind == BUDGET:
            self.machine.preempted(self)
            return True
        raise self.machine.explain(self.core.error(), self.core.ctx)

    def converge(self, mask: int, wanted: int, ins) -> Wait | None:
        """Wait for the other lanes of `wanted`, which are on other paths of this warp."""
        groups = self.core.groups()
        others = 0
        for _, lanes in groups:
            others |= lanes
        if wanted & ~others:
            raise MisuseError(
                f"{ins.where}: {ins.op}: lanes {wanted & ~others:#010x} of the mask have left"
            )
        return None

    def leaves_stores(self) -> bool:
        """Did the warp issue bulk stores whose reads it never waited for?"""
        read, whole = self._groups.get("bulk.read"), self._groups.get("bulk")
        return bool(read and read.unwaited and whole.unwaited)

    def poll(self, ins, mask: int, values) -> Wait | None:
        """After a load that may be part of a polling loop: None for a value that is news."""
        seen = (mask, values.tobytes())
        if self.spins.get(self.at) != seen:
            self.spins[self.at] = seen
            return None
        return self.machine.spin(self)

    def forget_wait(self) -> None:
        source = self.wait.source if self.wait else None
        if isinstance(source, Signal) and self in source.waiters:
            source.waiters.remove(self)
        self.wait = None
