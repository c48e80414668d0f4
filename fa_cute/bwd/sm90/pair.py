"""What the roles of a pair of CTAs do otherwise: they exchange dS, and share the columns of dQ.

    CTA r        keys [64 r, +64) of the pair's 128   dS(j): own stage j % 2, sent to the other CTA
    dQ(j) cols   [128 r, +128) of 256, half of them for each warpgroup: own dS K + other's dS K

So a CTA adds half as much to dQ as alone. Step j of the exchange, by CTA r and by 1 - r alike:

    keys     waits until 1 - r has read dS(j - 2) (then the copy of it has read ours, too), writes
             dS(j), expects the other's and sends its own
    both     wait for the other's dS(j), issue dQ(j), release it to the keys of 1 - r

Neither CTA gets stuck: what A(j) of one waits for is B(j - 1) of the other, which waits for
A(j - 2) of the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int16

from fa_cute.bwd.sm90.ctx import BwdCtx, warpgroup_slice
from fa_cute.bwd.sm90.epilogue import Add
from fa_cute.bwd.sm90.load import Load, partition
from fa_cute.bwd.sm90.plan import CONSUMERS, WARPGROUP_THREADS
from fa_cute.bwd.sm90.products import Lane, accumulator, gemm, share_ds, transposed
from fa_cute.bwd.sm90.remote import PAIR, other_rank
from fa_cute.bwd.sm90.roles import DqHalf
from fa_cute.ops import cluster
from fa_cute.ops.pipes import PAIR_MASK, LaneState


@dataclass(frozen=True)
class LoadOfPair(Load):
    """The load warp; with multicast it waits for the consumers of both CTAs."""

    def part(self, cx: BwdCtx):
        """With multicast half of the rows, for both."""
        return (cx.rank, PAIR) if cx.cfg.multicast else (0, 1)

    def mask(self, cx: BwdCtx):
        """Who gets that, as the bits of a multicast."""
        return Int16(PAIR_MASK) if cx.cfg.multicast else None

    def more(self, cx: BwdCtx):
        """K of the other CTA's keys, in our columns of dQ. Fills load_kx."""
        c, g = cx.cfg, cx.g
        rows, box = cx.lengths.rows(g.mKx, "k", cx.head_kv), (c.tile_n, c.head_dim // PAIR)
        block = cx.tile.n_block * PAIR + other_rank()
        to, source = partition(g.load_kx, cx.smem.sKx, cute.local_tile(rows, box, (block, cx.rank)))
        full = cx.pipes.load_kx.sync_object_full
        full.arrive(0, None)  # expects the bytes; nobody had the slot before
        cute.copy(g.load_kx, source, to, tma_bar_ptr=full.get_barrier(0))


def slot(cx: BwdCtx, m_block, filled: bool) -> LaneState:
    """Stage of a step's dS, and the parity that tells that it was filled, or may be."""
    round_ = (m_block - cx.q_blocks().lo) // 2 % 2
    return LaneState(m_block % 2, round_ if filled else 1 - round_)


@dataclass(frozen=True)
class DqOfPair(DqHalf):
    """One warpgroup's columns of this CTA's half, of the keys of both CTAs."""

    tdQrdSx: Any
    tdQrKx: Any

    @classmethod
    def of(cls, cx: BwdCtx, wg: int) -> DqOfPair:
        """Descriptors; of our own K, the columns of our half."""
        c, s, dq = cx.cfg, cx.smem, warpgroup_slice(cx.mmas.dq, wg)
        cols = c.head_dim // PAIR
        sK = cute.make_tensor(cute.domain_offset((0, cx.rank * cols), s.sK).iterator, s.sKx.layout)
        return cls(
            dq.make_fragment_A(dq.partition_A(s.sdS)),
            dq.make_fragment_B(dq.partition_B(transposed(sK))),
            dq.make_fragment_A(dq.partition_A(s.sdSx)),
            dq.make_fragment_B(dq.partition_B(transposed(s.sKx))),
        )

    def chunk(self, cx: BwdCtx, lane: Lane):
        """Which chunk of a dQ tile is ours."""
        return cx.rank * CONSUMERS + lane.wg

    @cute.jit
    def share(self, cx: BwdCtx, copy, to: cute.Tensor, rdS: cute.Tensor, m_block):
        """dS of a step from keys to all who need it, in both CTAs."""
        c, pipe = cx.cfg, cx.pipes.peer_ds
        at = slot(cx, m_block, False)
        pipe.sync_object_empty.wait(at.index, at.phase)
        share_ds(cx, copy, to, rdS)
        cute.arch.barrier(barrier_id=cx.barrier_id("ds_out"), number_of_threads=WARPGROUP_THREADS)
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == c.warps["keys"].start:
            with cute.arch.elect_one():
                full = pipe.sync_object_full.get_barrier(at.index)
                cute.arch.mbarrier_arrive_and_expect_tx(full, pipe.tx_bytes)
                there_dS = cluster.map_address(
                    cx.smem.sdSx[None, None, at.index].iterator.toint(), other_rank()
                )
                cluster.copy_bytes(
                    there_dS,
                    cx.smem.sdS[None, None, at.index].iterator,
                    pipe.tx_bytes,
                    cluster.map_address(full.toint(), other_rank()),
                )

    def begin(self, cx: BwdCtx):
        """Wait for K of the other CTA's keys: the next turn has the first dQ."""
        cx.pipes.load_kx.make_consumer().wait()

    def ready(self, cx: BwdCtx, m_block):
        """Wait for the other CTA's dS of a step."""
        cx.pipes.peer_ds.consumer_wait(slot(cx, m_block, True))

    def done(self, cx: BwdCtx, m_block):
        """The other CTA may send another dS in its place."""
        cx.pipes.peer_ds.consumer_release(slot(cx, m_block, True))

    def issue(self, cx: BwdCtx, m_block) -> cute.Tensor:
        """dQ = dS K of a step, issued; its registers."""
        c, mma, stage = cx.cfg, cx.mmas.dq, m_block % 2
        dQ = accumulator(mma, c.tile_m, c.head_dim // PAIR)
        gemm(mma, dQ, self.tdQrdS[None, None, None, stage], self.tdQrK, False)
        gemm(mma, dQ, self.tdQrdSx[None, None, None, stage], self.tdQrKx, True, fence=False)
        return dQ


@dataclass(frozen=True)
class AddExisting(Add):
    """Shared kv heads: the last block of a pair may not exist, and has no place for its zeros."""

    @cute.jit
    def write(self, cx: BwdCtx, results, lane, thread):
        if cx.n_block * cx.cfg.tile_n < cx.seqlen_k:
            Add.write(self, cx, results, lane, thread)
