"""Pipelines built from a plan's edges, and their two ends.

An edge has `stages` slots, and an end walks them in one of three ways:

* ring: slot after slot, the index is a run-time value (``make_producer``, ``make_consumer``);
* round: slot after slot in unrolled code, the index is a Python int, only the phase is carried
  (``round_producer``, ``round_consumer``); every loop body and branch must advance it by whole
  rounds;
* lane: one team of the role owns one slot and stays there (``lane_producer``, ``lane_consumer``).

A one-way edge has no state on the producer's side: ``signal(slot)``.

Arrival counts come from the plan; asynchronous sides arrive once per warp, by one elected lane,
after the warp has met.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import cutlass.cute as cute
from cutlass import Int32, const_expr, pipeline
from cutlass.cute.nvgpu import tcgen05
from cutlass.cutlass_dsl import dsl_user_op, if_generate
from cutlass.pipeline import helpers as pipeline_helpers

from ..errors import PlanError
from ..plan.topology import Arrive, Via
from . import ptx

UMMA_PRODUCER = (Via.UMMA_ASYNC,)
UMMA_CONSUMER = (Via.TMA_UMMA, Via.ASYNC_UMMA)
TMA_PRODUCER = (Via.TMA_ASYNC, Via.TMA_UMMA)
TENSOR_CORE = (Via.UMMA_ASYNC, Via.ASYNC_UMMA)
THREADS = (*TENSOR_CORE, Via.ASYNC)


class LaneState:
    """Position of an end that stays on one slot: only the phase changes."""

    stages = 1

    def __init__(self, index, phase):
        self._index, self._phase = index, phase

    @property
    def index(self):
        return self._index

    @property
    def phase(self):
        return self._phase

    def clone(self, *, loc=None, ip=None) -> LaneState:
        return LaneState(self._index, self._phase)

    def advance(self, count=1, *, loc=None, ip=None) -> None:
        self._phase = self._phase ^ 1

    def __get_mlir_types__(self):
        return [self._phase.type]

    def __extract_mlir_values__(self):
        return [self._phase.ir_value()]

    def __new_from_mlir_values__(self, values) -> LaneState:
        return LaneState(self._index, Int32(values[0]))


class RoundState:
    """Position of an end in unrolled code that visits every slot once per loop iteration."""

    def __init__(self, stages, phase, index=0):
        self.stages, self._phase, self._index = stages, phase, index

    @property
    def index(self):
        return self._index

    @property
    def phase(self):
        return self._phase

    def clone(self, *, loc=None, ip=None) -> RoundState:
        return RoundState(self.stages, self._phase, self._index)

    def advance(self, count=1, *, loc=None, ip=None) -> None:
        self._index += 1
        if self._index == self.stages:
            self._index, self._phase = 0, self._phase ^ 1

    def _check_whole_round(self) -> None:
        if self._index:
            raise PlanError(
                f"a round end leaves a region at slot {self._index} of {self.stages}; "
                "advance it by whole rounds inside every dynamic region"
            )

    def __get_mlir_types__(self):
        return [self._phase.type]

    def __extract_mlir_values__(self):
        self._check_whole_round()
        return [self._phase.ir_value()]

    def __new_from_mlir_values__(self, values) -> RoundState:
        return RoundState(self.stages, Int32(values[0]))


PAIR_MASK = 3  # both CTAs of a cluster of two
LEADER = 0  # the CTA of a pair whose warp issues the products, and whose barriers it waits on


@dsl_user_op
def arrive_warp(barrier, rank=None, *, loc=None, ip=None) -> None:
    """One arrival for the whole warp; the warp meets first, so it speaks for all its lanes.

    With `rank`, on the same barrier of that CTA of the cluster.
    """
    cute.arch.sync_warp(loc=loc, ip=ip)
    if rank is None:
        ptx.arrive_elected(barrier, loc=loc, ip=ip)
        return
    with cute.arch.elect_one(loc=loc, ip=ip):
        cute.arch.mbarrier_arrive(barrier, rank, loc=loc, ip=ip)


@dataclass(frozen=True)
class EdgePipe(pipeline.PipelineAsync):
    """The mbarriers of one edge; what each verb emits follows from the edge's `via`.

    `orders_tmem`: tensor-memory accesses are ordered by this edge.  So are those of a kernel with
    tensor-core edges by its edges among threads, which pass on what the tensor core told one side.
    The fences are no instructions, they only keep the compiler and the hardware from reordering.

    `cta_group` 2: a pair of CTAs. Each has all barriers; who feeds the tensor core arrives on the
    leader's, and what the tensor core commits arrives on both.
    """

    via: Via
    tx_bytes: int
    orders_tmem: bool
    cta_group: int = 1

    def _arrive(self, sync, state, umma: bool, loc, ip) -> None:
        if umma:
            mask, group = None, tcgen05.CtaGroup.ONE
            if self.cta_group == 2:
                mask, group = PAIR_MASK, tcgen05.CtaGroup.TWO
            sync.arrive(state.index, mask, group, loc=loc, ip=ip)
        else:
            if self.orders_tmem:
                ptx.tcgen05_fence_before(loc=loc, ip=ip)
            rank = LEADER if self.cta_group == 2 else None  # a side of the tensor core
            arrive_warp(sync.get_barrier(state.index, loc=loc, ip=ip), rank, loc=loc, ip=ip)

    @dsl_user_op
    def producer_acquire(
        self, state, try_acquire_token=None, *, tx_bytes=None, fill=None, loc=None, ip=None
    ) -> None:
        """``tx_bytes``: what this phase brings, where that is not all that the edge names.
        ``fill(slot)``: what the warp writes itself, when the slot is free and before it arrives.
        """
        assert self.sync_object_empty is not None, "a one-way edge has nothing to acquire"
        self.sync_object_empty.wait(state.index, state.phase, loc=loc, ip=ip)
        if fill is not None:
            fill(state.index)
            cute.arch.sync_warp(loc=loc, ip=ip)  # who arrives speaks for who wrote
        if self.via in TMA_PRODUCER:
            brings = self.tx_bytes if tx_bytes is None else tx_bytes
            if self.cta_group == 1:
                self.sync_object_full.arrive_and_expect_tx(state.index, brings, loc=loc, ip=ip)
            else:  # the leader's barrier counts the bytes of both
                if_generate(
                    cute.arch.block_idx()[0] % self.cta_group == LEADER,
                    lambda: self.sync_object_full.arrive_and_expect_tx(
                        state.index, brings, loc=loc, ip=ip
                    ),
                    loc=loc,
                    ip=ip,
                )

    @dsl_user_op
    def producer_commit(self, state, *, loc=None, ip=None) -> None:
        if self.via not in TMA_PRODUCER:  # the copy itself completes the barrier's bytes
            self._arrive(self.sync_object_full, state, self.via in UMMA_PRODUCER, loc, ip)

    @dsl_user_op
    def producer_tail(self, state, *, loc=None, ip=None) -> None:
        """Wait until every slot of this end is free again, so that nobody arrives after we exit."""
        at = state.clone()
        for _ in range(at.stages):
            self.sync_object_empty.wait(at.index, at.phase, loc=loc, ip=ip)
            at.advance(loc=loc, ip=ip)

    @dsl_user_op
    def consumer_wait(self, state, try_wait_token=None, *, loc=None, ip=None) -> None:
        if try_wait_token is None:
            self.sync_object_full.wait(state.index, state.phase, loc=loc, ip=ip)
        else:  # the answer of an earlier `try_wait` of this slot
            if_generate(
                try_wait_token == 0,
                lambda: self.sync_object_full.wait(state.index, state.phase, loc=loc, ip=ip),
                loc=loc,
                ip=ip,
            )
        if self.orders_tmem:
            ptx.tcgen05_fence_after(loc=loc, ip=ip)

    @dsl_user_op
    def consumer_try_wait(self, state, *, loc=None, ip=None):
        """Ask whether a slot is full. A test, not a try, which may hold the warp for a while."""
        barrier = self.sync_object_full.get_barrier(state.index, loc=loc, ip=ip)
        return cute.arch.mbarrier_test_wait(barrier, state.phase, loc=loc, ip=ip)

    @dsl_user_op
    def consumer_release(self, state, *, loc=None, ip=None) -> None:
        assert self.sync_object_empty is not None, "a one-way edge has nothing to release"
        self._arrive(self.sync_object_empty, state, self.via in UMMA_CONSUMER, loc, ip)

    def signal(self, slot) -> None:
        """Commit `slot` of a one-way edge: nothing to acquire, nothing to remember."""
        self.producer_commit(LaneState(slot, None))

    def release_slot(self, slot) -> None:
        """Release `slot`, which a round consumer has waited for: only its address is needed."""
        self.consumer_release(LaneState(slot, None))

    def round_producer(self) -> pipeline.PipelineProducer:
        """The producer of all slots, in unrolled code."""
        return pipeline.PipelineProducer(self, RoundState(self.num_stages, Int32(1)), None)

    def round_consumer(self) -> pipeline.PipelineConsumer:
        """The consumer of all slots, in unrolled code."""
        return pipeline.PipelineConsumer(self, RoundState(self.num_stages, Int32(0)), None)

    def lane_producer(self, lane) -> pipeline.PipelineProducer:
        """The producer of slot `lane` alone (a Python int or an Int32)."""
        return pipeline.PipelineProducer(self, LaneState(lane, Int32(1)), None)

    def lane_consumer(self, lane) -> pipeline.PipelineConsumer:
        """The consumer of slot `lane` alone (a Python int or an Int32)."""
        return pipeline.PipelineConsumer(self, LaneState(lane, Int32(0)), None)


def _sync(op, storage, stages: int, count: int, tx_bytes: int, name: str):
    group = pipeline.CooperativeGroup(pipeline.Agent.Thread, count)
    return pipeline_helpers.MbarrierArray(storage, stages, (op, group), tx_bytes, name=name)


def build(topology, warps, smem, kind=EdgePipe) -> SimpleNamespace:
    """One `EdgePipe` (or another ``kind`` of it) per edge, by name.  The caller fences and
    synchronises the CTA before use.
    """
    op = pipeline_helpers.PipelineOp
    pipes = {}
    has_tmem = any(edge.via in TENSOR_CORE for edge in topology.edges)
    for edge in topology.edges:
        if Arrive.THREADS in (edge.src_by, edge.dst_by):
            raise PlanError(f"edge {edge.name!r} arrives by threads; these pipes arrive by warps")
        produced, released = edge.arrivals(warps)
        sides = 1 if edge.one_way else 2
        storage = pipeline_helpers.alloc_reserved_mbarrier(edge.stages, multiplier=sides)
        storage = storage.align(min_align=8)
        tx_bytes = edge.tx_bytes(smem)
        full_op = op.TCGen05Mma if edge.via in UMMA_PRODUCER else op.AsyncThread
        full_op = op.TmaLoad if edge.via in TMA_PRODUCER else full_op
        full = _sync(full_op, storage, edge.stages, produced, tx_bytes, f"{edge.name}.full")
        empty = None
        if const_expr(not edge.one_way):
            empty_op = op.TCGen05Mma if edge.via in UMMA_CONSUMER else op.AsyncThread
            empty = _sync(
                empty_op, storage + edge.stages, edge.stages, released, 0, f"{edge.name}.empty"
            )
        orders_tmem, pair = has_tmem and edge.via in THREADS, edge.cta_group
        pipes[edge.name] = kind(
            full, empty, edge.stages, None, None, edge.via, tx_bytes, orders_tmem, pair
        )
    return SimpleNamespace(**pipes)


def barriers(topology, warps) -> SimpleNamespace:
    """The named barriers of a plan, by name; ids are the plan's."""
    named = {
        b.name: pipeline.NamedBarrier(topology.barrier_id(b.name), b.num_threads(warps))
        for b in topology.barriers
    }
    return SimpleNamespace(**named)
