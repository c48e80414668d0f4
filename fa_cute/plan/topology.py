"""Who hands what to whom: pipeline edges between roles, and named barriers.

An edge is a ring of ``stages`` slots with two mbarriers a slot: *full* (producer -> consumer) and
*empty* (consumer -> producer). How many arrivals complete a phase of each follows from the
mechanism and the warp plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..errors import PlanError
from .smem import SmemPlan
from .warps import WarpPlan

MBARRIER_BYTES = 8
# PTX ISA: expected arrivals and tx-count of an mbarrier are at most 2^20 - 1.
MBARRIER_MAX = (1 << 20) - 1
# Named barriers of a CTA; 0 belongs to __syncthreads.
NAMED_BARRIERS = 16


class Via(Enum):
    """Mechanism of the producer and of the consumer: ``<producer>_<consumer>``."""

    TMA_ASYNC = "tma_async"  # TMA load -> threads (wgmma or registers)
    TMA_UMMA = "tma_umma"  # TMA load -> tcgen05.mma
    UMMA_ASYNC = "umma_async"  # tcgen05.mma -> threads
    ASYNC_UMMA = "async_umma"  # threads -> tcgen05.mma
    ASYNC = "async"  # threads -> threads

    @property
    def by_tma(self) -> bool:
        return self in (Via.TMA_ASYNC, Via.TMA_UMMA)

    @property
    def threads_produce(self) -> bool:
        return self in (Via.ASYNC_UMMA, Via.ASYNC)

    @property
    def threads_consume(self) -> bool:
        return self in (Via.TMA_ASYNC, Via.UMMA_ASYNC, Via.ASYNC)


class Arrive(Enum):
    """How the threads of a role arrive on an mbarrier."""

    THREADS = "threads"  # each thread
    WARPS = "warps"  # one elected thread of each warp
    ONE = "one"  # one thread of the role, after a barrier among its warps


@dataclass(frozen=True)
class Edge:
    """One ring between roles.

    Args:
        name: ``<producer>_<what>``; also the name of the pipeline in the DSL and in simulator
            reports.
        via: mechanism on both sides.
        src, dst: a role, or several whose arrivals complete a phase together.
        stages: slots.
        tx: SMEM fields that one TMA phase brings, each one stage.
        src_by, dst_by: how the threads of that side arrive, where threads do; by default once per
            warp, which is what `ops.pipes` emits.
        cta_group: CTAs whose loads complete on the leader's barrier (1, or 2 for paired
            tcgen05.mma).
        src_ctas, dst_ctas: CTAs of the cluster whose arrivals land on one barrier of that side.
        ordered_by: the edge whose handshake already tells the producer that a slot is free; then
            this edge is one-way and has full barriers only.
    """

    name: str
    via: Via
    src: str | tuple[str, ...]
    dst: str | tuple[str, ...]
    stages: int = 1
    tx: tuple[str, ...] = ()
    src_by: Arrive | None = None
    dst_by: Arrive | None = None
    cta_group: int = 1
    src_ctas: int = 1
    dst_ctas: int = 1
    ordered_by: str | None = None

    def __post_init__(self) -> None:
        for side, roles in (("src", self.sources), ("dst", self.sinks)):
            if not roles or len(set(roles)) != len(roles):
                raise PlanError(
                    f"edge {self.name!r}: {side} is {roles}; at least one role, each once"
                )
        if self.stages < 1:
            raise PlanError(f"edge {self.name!r}: stages is {self.stages}; at least 1")
        if self.cta_group not in (1, 2):
            raise PlanError(f"edge {self.name!r}: cta_group is {self.cta_group}; 1 or 2")
        if self.src_ctas < 1 or self.dst_ctas < 1:
            raise PlanError(
                f"edge {self.name!r}: src_ctas {self.src_ctas}, dst_ctas {self.dst_ctas}; at "
                "least 1"
            )
        if self.via.by_tma != bool(self.tx):
            need = (
                "names the SMEM fields that a phase brings"
                if self.via.by_tma
                else "is for TMA edges only"
            )
            raise PlanError(f"edge {self.name!r} via {self.via.value}: tx is {self.tx}; tx {need}")
        if self.dst_by is not None and not self.via.threads_consume:
            raise PlanError(
                f"edge {self.name!r} via {self.via.value}: dst_by is set, but tcgen05.commit "
                "arrives once"
            )
        if self.src_by is not None and not self.via.threads_produce:
            raise PlanError(
                f"edge {self.name!r} via {self.via.value}: src_by is set, but no threads produce"
            )
        if not self.via.threads_produce and len(self.sources) > 1:
            raise PlanError(
                f"edge {self.name!r} via {self.via.value}: one producer role, not {self.sources}"
            )
        if not self.via.threads_consume and len(self.sinks) > 1:
            raise PlanError(
                f"edge {self.name!r} via {self.via.value}: one consumer role, not {self.sinks}"
            )

    @property
    def one_way(self) -> bool:
        """Whether there is no empty barrier."""
        return self.ordered_by is not None

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.src,) if isinstance(self.src, str) else self.src

    @property
    def sinks(self) -> tuple[str, ...]:
        return (self.dst,) if isinstance(self.dst, str) else self.dst

    def arrivals(self, warps: WarpPlan) -> tuple[int, int]:
        """(producer, consumer) arrivals per phase, from the mechanism and the warp plan."""
        producer = consumer = (
            1  # one arrive.expect_tx before TMA loads; one arrive by tcgen05.commit
        )
        if self.via.threads_produce:
            producer = sum(_arrivals(warps, role, self.src_by) for role in self.sources)
        if self.via.threads_consume:
            consumer = sum(_arrivals(warps, role, self.dst_by) for role in self.sinks)
        return producer * self.src_ctas, consumer * self.dst_ctas

    def tx_bytes(self, smem: SmemPlan) -> int:
        """Bytes that complete one phase of the full barrier (0 unless TMA)."""
        return self.cta_group * sum(smem.bytes(field) for field in self.tx)


def _arrivals(warps: WarpPlan, role: str, by: Arrive | None) -> int:
    teams = warps[role].teams  # one of them serves a slot
    return {
        Arrive.THREADS: warps[role].threads // teams,
        Arrive.WARPS: len(warps[role].warps) // teams,
        Arrive.ONE: 1,
    }[by or Arrive.WARPS]


@dataclass(frozen=True)
class Barrier:
    """A named barrier among roles; ``threads`` where not all of theirs take part at once."""

    name: str
    roles: tuple[str, ...]
    threads: int | None = None

    def num_threads(self, warps: WarpPlan) -> int:
        """Threads that complete it."""
        return self.threads or sum(warps[role].threads for role in self.roles)


@dataclass(frozen=True)
class Topology:
    """All edges and named barriers of a kernel; barriers are numbered from 1 in their order."""

    edges: tuple[Edge, ...] = ()
    barriers: tuple[Barrier, ...] = ()

    def __post_init__(self) -> None:
        names = [x.name for x in (*self.edges, *self.barriers)]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise PlanError(f"edges or barriers {twice} are declared twice")
        if len(self.barriers) >= NAMED_BARRIERS:
            raise PlanError(
                f"{len(self.barriers)} named barriers; a CTA has {NAMED_BARRIERS - 1} (0 is for "
                "all threads)"
            )

    def __getitem__(self, name: str) -> Edge:
        for edge in self.edges:
            if edge.name == name:
                return edge
        raise PlanError(f"no edge {name!r}; edges: {[e.name for e in self.edges]}")

    def barrier(self, name: str) -> Barrier:
        """A named barrier."""
        for barrier in self.barriers:
            if barrier.name == name:
                return barrier
        raise PlanError(f"no barrier {name!r}; barriers: {[b.name for b in self.barriers]}")

    def barrier_id(self, name: str) -> int:
        """The hardware's number of a named barrier."""
        return 1 + self.barriers.index(self.barrier(name))

    def barrier_threads(self, barrier: Barrier, warps: WarpPlan) -> int:
        """Threads that complete a named barrier."""
        return barrier.num_threads(warps)

    @property
    def mbarrier_bytes(self) -> int:
        """SMEM of all full and empty barriers."""
        return sum((1 if e.one_way else 2) * MBARRIER_BYTES * e.stages for e in self.edges)

    def check(self, warps: WarpPlan, smem: SmemPlan) -> None:
        """Raise PlanError unless roles and fields exist and all counts fit their barriers."""
        for e in self.edges:
            if e.one_way:
                self[e.ordered_by]  # raises for an unknown edge
            for role in (*e.sources, *e.sinks):
                if warps[role].teams not in (1, e.stages):
                    raise PlanError(
                        f"edge {e.name!r} has {e.stages} stages; role {role!r} has "
                        f"{warps[role].teams} teams, and team t serves stage t"
                    )
            counts = (*e.arrivals(warps), e.tx_bytes(smem))
            if max(counts) > MBARRIER_MAX:
                raise PlanError(
                    f"edge {e.name!r}: arrivals and bytes {counts}; an mbarrier counts to "
                    f"{MBARRIER_MAX}"
                )
            for field in e.tx:
                if smem[field].stages < e.stages:
                    raise PlanError(
                        f"edge {e.name!r} has {e.stages} stages, its field {field!r} has "
                        f"{smem[field].stages}"
                    )
        for b in self.barriers:
            known = sum(warps[role].threads for role in b.roles)
            threads = b.num_threads(warps)
            if threads % 32 or not 0 < threads <= known:
                raise PlanError(
                    f"barrier {b.name!r}: {threads} threads; a multiple of 32 up to the {known} "
                    f"of roles {b.roles}"
                )
