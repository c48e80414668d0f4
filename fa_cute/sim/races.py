"""Happens-before checking: unordered accesses to one place, at least one of them a write.

Every warp and every asynchronous agent is an actor with a clock. What an actor knows of the others
is a vector of their ticks. Synchronisation passes it on: an arrival adds the arriver's vector to
the barrier, whoever has waited takes the vector of the completed phase. Asynchronous work knows
what its issuer knew when it was issued; others know that it is done when they have observed its
signal: bytes of a TMA load by the phase of their mbarrier, tensor-core work by a commit, stores and
copies by the wait on their group. Shared memory is watched in words of 4 bytes, tensor memory by
column and quarter of lanes.

A race is reported whatever the schedule was, and whether or not a value went wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fa_cute.errors import SimError
from fa_cute.sim.memory import TMEM_COLS
from fa_cute.sim.operands import SMEM_START

if TYPE_CHECKING:
    from fa_cute.sim.cta import Cluster, Cta
    from fa_cute.sim.machine import Machine
    from fa_cute.sim.warp import Warp

WORD = 4
CHUNK_WORDS = 4
QUARTERS = 4
_UNTAGGED = -2  # actor of an operation that has not signalled yet
_NOBODY = -1


@dataclass(frozen=True)
class Race:
    """Two unordered accesses."""

    space: str
    place: str
    earlier: str
    later: str
    cta: tuple

    def __str__(self) -> str:
        return (
            f"{self.later} races with {self.earlier} at {self.space} {self.place}, CTA {self.cta}"
        )


class Context:
    """Who acts now: a warp, or one asynchronous operation."""

    __slots__ = ("actor", "ins", "name", "pending", "tick", "vector", "warp")

    def __init__(self, actor: int, tick: int, vector: np.ndarray, name: str):
        self.actor, self.tick, self.vector, self.name = actor, tick, vector, name
        self.ins = 0  # of an operation: the instruction that issued it
        self.warp: Warp | None = None
        self.pending: list[tuple] | None = None  # accesses that wait for the operation's signal


class Shadow:
    """Last write and last reads of every cell of one memory."""

    def __init__(self, cells: int):
        self.cells = cells
        self.writer = np.full(cells, _NOBODY, np.int32)
        self.tick = np.zeros(cells, np.int32)
        self.ins = np.zeros(cells, np.int32)
        self.reads: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # actor -> (ticks, instructions)

    def conflict(self, cells, write: bool, who: Context) -> tuple[int, int, int, str] | None:
        """(index within `cells`, actor, instruction, "write"|"read") of an unordered access."""
        writer, vector = self.writer[cells], who.vector
        bad = (writer >= 0) & (writer != who.actor) & (self.tick[cells] > vector[writer])
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            return at, int(writer.reshape(-1)[at]), int(self.ins[cells].reshape(-1)[at]), "write"
        if write:
            for actor, (ticks, ins) in self.reads.items():
                if actor == who.actor:
                    continue
                bad = ticks[cells] > vector[actor]
                if bad.any():
                    at = int(np.flatnonzero(bad)[0])
                    return at, actor, int(ins[cells].reshape(-1)[at]), "read"
        return None

    def record(self, cells, write: bool, actor: int, tick: int, ins: int) -> None:
        if write:
            self.writer[cells] = actor
            self.tick[cells] = tick
            self.ins[cells] = ins
            return
        row = self.reads.get(actor)
        if row is None:
            row = self.reads[actor] = (
                np.zeros(self.cells, np.int32),
                np.zeros(self.cells, np.int32),
            )
        row[0][cells] = tick
        row[1][cells] = ins


class Races:
    """The checker of one launch."""

    def __init__(self, machine: Machine):
        self.machine = machine
        self.found: dict[tuple, Race] = {}
        launch = machine.launch
        self.size = 256 + 8 * launch.cluster_size * (launch.warps + 16)  # actors of a vector
        self.actors: dict[object, int] = {}
        self.names: list[str] = []
        self.current: Context | None = None
        self.contexts: dict[object, Context] = {}  # warps, and agents that work in order
        self.plain_post = machine.queue.post
        machine.queue.post = self._post
        machine.queue.early = False  # handlers must post, so that operations are actors

    # ---- actors ----
    def actor(self, key, name: str) -> int:
        index = self.actors.get(key)
        if index is None:
            index = self.actors[key] = len(self.names)
            self.names.append(name)
            if index >= self.size:
                raise SimError("too many clusters run at once for the race checker")
        return index

    def vector(self) -> np.ndarray:
        return np.zeros(self.size, np.int32)

    def start(self, cluster: Cluster) -> None:
        """A new cluster: nobody has done anything."""
        if self.machine.running == [cluster]:
            self.actors, self.names, self.contexts = {}, [], {}
        for cta in cluster.ctas:
            cta.shadow = Shadow(-(-cta.smem_size // WORD) + CHUNK_WORDS)
            cta.tmem_shadow = Shadow(TMEM_COLS * QUARTERS)
            for warp in cta.warps:
                name = f"warp {warp.index} of CTA {cta.rank}"
                context = Context(self.actor(warp, name), 1, self.vector(), name)
                context.vector[context.actor] = 1
                context.warp = warp
                self.contexts[warp] = context

    def enter(self, warp: Warp) -> None:
        self.current = self.contexts[warp]

    # ---- asynchronous operations ----
    def _post(self, kind: str, agent, fn) -> None:
        issuer = self.current
        vector, ins = issuer.vector.copy(), self._ins(issuer)

        def run() -> None:
            outer, self.current = self.current, self._operation(kind, agent, vector, ins)
            try:
                fn()
            finally:
                self.current = outer

        self.plain_post(kind, agent, run)

    def _operation(self, kind: str, agent, vector: np.ndarray, ins: int) -> Context:
        """The context of one operation; a tensor pipe is one actor and goes on where it was."""
        if kind in ("mma", "commit", "tcgen05.cp"):
            pipe = self.contexts.get(agent)
            if pipe is None:
                actor = self.actor(agent, f"the tensor pipe of CTA {agent.cta.rank}")
                pipe = self.contexts[agent] = Context(actor, 0, self.vector(), self.names[actor])
            np.maximum(pipe.vector, vector, out=pipe.vector)
            pipe.tick += 1
            pipe.vector[pipe.actor] = pipe.tick
            pipe.ins = ins
            return pipe
        context = Context(_UNTAGGED, 0, vector, kind)
        context.ins, context.pending = ins, []
        return context

    def _ins(self, context: Context) -> int:
        return context.warp.at if context.warp is not None else context.ins

    def _tag(self, actor: int, tick: int) -> None:
        """The current operation's accesses so far become those of a signal."""
        context = self.current
        if context.pending:
            for shadow, cells, write, ins in context.pending:
                shadow.record(cells, write, actor, tick, ins)
            context.pending.clear()

    # ---- synchronisation ----
    def arrive(self, barrier) -> None:
        """The current actor arrives at a barrier (of any kind)."""
        context = self.current
        if barrier.gathered is None:
            barrier.gathered = self.vector()
        np.maximum(barrier.gathered, context.vector, out=barrier.gathered)
        if context.warp is not None:  # what comes after is not covered by this arrival
            context.tick += 1
            context.vector[context.actor] = context.tick

    def bytes_done(self, barrier) -> None:
        """complete_tx: the current operation's accesses are covered by the barrier's phase."""
        key = ("mbarrier", barrier.rank, barrier.offset)
        actor = self.actor(key, f"copies signalled at smem+{barrier.offset - SMEM_START}")
        self._tag(actor, barrier.phase + 1)
        if barrier.gathered is None:
            barrier.gathered = self.vector()
        np.maximum(barrier.gathered, self.current.vector, out=barrier.gathered)
        barrier.gathered[actor] = barrier.phase + 1

    def completed(self, barrier) -> None:
        """A phase is complete: whoever waits now may know what its arrivers knew."""
        barrier.known, barrier.gathered = barrier.gathered, None

    def observed(self, warp: Warp, barrier) -> None:
        """A warp has waited on a barrier with success."""
        known = getattr(barrier, "known", None)
        if known is not None:
            vector = self.contexts[warp].vector
            np.maximum(vector, known, out=vector)

    def group_actor(self, groups) -> int:
        kind, rank, index = groups.key
        who = "warpgroup" if kind == "wgmma" else "warp"
        return self.actor(groups.key, f"{kind} operations of {who} {index} of CTA {rank}")

    def group_done(self, groups, number: int) -> None:
        """An operation of commit group `number` is done (or has read its source)."""
        if self.current.pending is not None:
            self._tag(self.group_actor(groups), number)

    def group_waited(self, groups, covered: int) -> None:
        """The current warp waits until groups up to `covered` are done."""
        context, actor = self.current, self.group_actor(groups)
        context.vector[actor] = max(context.vector[actor], covered)

    def group_arrives(self, groups, barrier) -> None:
        """cp.async.mbarrier.arrive: the barrier covers everything issued so far."""
        if barrier.gathered is None:
            barrier.gathered = self.vector()
        actor = self.group_actor(groups)
        barrier.gathered[actor] = max(barrier.gathered[actor], groups.total + 1)

    # ---- accesses ----
    def shared(self, cta: Cta, offset: int, nbytes: int, write: bool) -> None:
        cells = slice(offset // WORD, -(-(offset + nbytes) // WORD))
        self._access("smem", cta, cta.shadow, cells, write)

    def chunks(self, cta: Cta, chunks: np.ndarray, write: bool) -> None:
        """Shared memory in chunks of 16 bytes."""
        chunks = np.unique(chunks.reshape(-1))
        if chunks[-1] - chunks[0] + 1 == len(chunks):
            cells = slice(int(chunks[0]) * CHUNK_WORDS, (int(chunks[-1]) + 1) * CHUNK_WORDS)
        else:
            cells = (chunks[:, None] * CHUNK_WORDS + np.arange(CHUNK_WORDS)).reshape(-1)
        self._access("smem", cta, cta.shadow, cells, write)

    def words(self, cta: Cta, offsets: np.ndarray, write: bool) -> None:
        """Shared memory at any byte offsets."""
        self._access("smem", cta, cta.shadow, np.unique(offsets // WORD), write)

    def tensor(self, cta: Cta, cells: tuple, write: bool) -> None:
        """Tensor memory: (columns, lanes), two slices or two index arrays."""
        cols, lanes = cells
        if not isinstance(cols, slice):
            index = np.unique(cols * QUARTERS + lanes // 32)
            self._access("tmem", cta, cta.tmem_shadow, index, write)
            return
        first, last = lanes.start // 32, -(-lanes.stop // 32)
        index = np.arange(cols.start, cols.stop)[:, None] * QUARTERS + np.arange(first, last)
        self._access("tmem", cta, cta.tmem_shadow, index.reshape(-1), write)

    def _access(self, space: str, cta: Cta, shadow: Shadow, cells, write: bool) -> None:
        context = self.current
        ins = self._ins(context)
        clash = shadow.conflict(cells, write, context)
        if clash is not None:
            self._report(space, cta, cells, write, clash)
        if context.pending is not None:
            context.pending.append((shadow, cells, write, ins))
        else:
            shadow.record(cells, write, context.actor, context.tick, ins)

    def _report(self, space: str, cta: Cta, cells, write: bool, clash: tuple) -> None:
        at, actor, earlier_ins, what = clash
        context, instrs = self.current, self.machine.program.kernel.instrs
        ins = self._ins(context)
        key = (space, earlier_ins, ins, what, write)
        if key in self.found:
            return
        cell = cells.start + at if isinstance(cells, slice) else int(cells[at])
        if space == "smem":
            place = f"+{cell * WORD - SMEM_START}"
        else:
            place = f"column {cell // QUARTERS}, lanes {cell % QUARTERS * 32}.."
        verb = "write" if write else "read"
        self.found[key] = Race(
            space,
            place,
            f"a {what} by {self.names[actor]} ({_at(instrs[earlier_ins])})",
            f"a {verb} by {context.name} ({_at(instrs[ins])})",
            cta.ctaid,
        )


def _at(ins) -> str:
    return f"{ins.where}: {ins.op}"
