"""Pipelines that reach into the other CTA of a pair: who releases a slot tells whoever fills it."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass.cutlass_dsl import dsl_user_op

from fa_cute.ops.pipes import EdgePipe, arrive_warp
from fa_cute.plan import Edge

PAIR = 2


def own_rank():
    """This CTA's number in its pair. Not %cluster_ctarank, which the assembler takes for a value
    that may differ among threads."""
    return cute.arch.block_idx()[0] % PAIR


def other_rank():
    """The other CTA's number."""
    return 1 - own_rank()


@dataclass(frozen=True)
class PeerPipe(EdgePipe):
    """The other CTA fills our slots, and we fill its: a release tells that CTA."""

    @dsl_user_op
    def consumer_release(self, state, *, loc=None, ip=None) -> None:
        arrive_warp(self.sync_object_empty.get_barrier(state.index), other_rank(), loc=loc, ip=ip)


@dataclass(frozen=True)
class SharedPipe(EdgePipe):
    """Both CTAs fill the slots of both: a release tells both."""

    @dsl_user_op
    def consumer_release(self, state, *, loc=None, ip=None) -> None:
        barrier = self.sync_object_empty.get_barrier(state.index)
        arrive_warp(barrier, loc=loc, ip=ip)
        arrive_warp(barrier, other_rank(), loc=loc, ip=ip)


def kind(edge: Edge) -> type[EdgePipe] | None:
    """The pipeline of an edge of the plan; None where it stays in one CTA."""
    if edge.name == "peer_ds":
        return PeerPipe
    return SharedPipe if edge.dst_ctas > 1 else None
