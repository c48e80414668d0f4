"""The consumer warpgroups of the SM90 forward kernel: both matrix products, softmax, output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

from ...ops import rows, wgmma
from .ctx import FwdCtx, Handed
from .plan import TEAM_ROWS, TEAM_THREADS


@dataclass(frozen=True)
class Team:
    """One warpgroup: who it is, and its registers and operands."""

    index: Any  # of the team, warp-uniform
    thread: Any  # in the team
    warp: Any  # in the team, warp-uniform
    S: cute.Tensor  # fp32 scores of a block
    P: cute.Tensor  # left operand of P V
    P_pairs: cute.Tensor  # the same registers as pairs
    P_new: cute.Tensor  # pairs of the next P; others only if P V may still read the old one
    O: cute.Tensor  # fp32
    tSrQ: cute.Tensor  # (MMA, MMA_M, MMA_K, SLAB)
    tSrK: cute.Tensor  # (MMA, MMA_N, MMA_K, STAGE)
    tOrV: cute.Tensor  # (MMA, MMA_N, MMA_K, STAGE)


def _team(cx: FwdCtx) -> Team:
    """The team of the calling thread; consumers follow the loading warpgroup."""
    a, c = cx.args, cx.cfg
    thread = cute.arch.thread_idx()[0] - TEAM_THREADS
    index = cute.arch.make_warp_uniform(thread // TEAM_THREADS)
    P = wgmma.fragment_a(a.pv, c.tile_n)
    pairs = cute.recast_tensor(P, Int32)
    return Team(
        index=index,
        thread=thread % TEAM_THREADS,
        warp=cute.arch.make_warp_uniform(thread % TEAM_THREADS // 32),
        S=wgmma.accumulator(a.qk, c.tile_n),
        P=P,
        P_pairs=pairs,
        P_new=cute.make_rmem_tensor_like(pairs) if c.scores_first else pairs,
        O=wgmma.accumulator(a.pv, c.head_dim_v),
        tSrQ=wgmma.operand_a(a.qk, cx.smem.sQ),
        tSrK=wgmma.operand_b(a.qk, cx.smem.sK),
        tOrV=wgmma.operand_b(a.pv, wgmma.transposed(cx.smem.sV)),
    )


@cute.jit
def _wait_turn(cx: FwdCtx, t: Team):
    """Wait until the team before this one lets go of the tensor pipe."""
    if const_expr(cx.cfg.take_turns and cx.cfg.teams > 1):
        first = const_expr(cx.cfg.topology.barrier_id("turn0"))
        cute.arch.barrier(barrier_id=first + t.index, number_of_threads=2 * TEAM_THREADS)


@cute.jit
def _pass_turn(cx: FwdCtx, t: Team):
    """Let the next team start its turn."""
    if const_expr(cx.cfg.take_turns and cx.cfg.teams > 1):
        first = const_expr(cx.cfg.topology.barrier_id("turn0"))
        after = cx.late_team(t.index) + 1
        after = Int32(0) if after == cx.cfg.teams else after
        cute.arch.barrier_arrive(barrier_id=first + after, number_of_threads=2 * TEAM_THREADS)


@cute.jit
def _product(cx: FwdCtx, t: Team, mma, acc, a, b, accumulate, last: bool):
    """Issue ``acc (+)= a b``; the ``last`` one of a turn passes it on near its end."""
    n = const_expr(cute.size(a.shape[2]))
    tail = const_expr(cx.cfg.early_pass if last else 0)
    wgmma.issue(mma, acc, a, b, accumulate, range(n - tail))
    if const_expr(last):
        _pass_turn(cx, t)
        wgmma.issue(mma, acc, a, b, True, range(n - tail, n))
    warpgroup.commit_group()


@cute.jit
def _turn(cx: FwdCtx, t: Team, slab, k_slot, v_slot, accumulate):
    """One turn on the tensor pipe: O (+)= P V of ``v_slot`` and S = Q K^T of ``k_slot``; a slot
    that is None leaves its product out. All of it is complete on return, or only S with
    `scores_first`.
    """
    first = const_expr(cx.cfg.scores_first)
    both = const_expr(k_slot is not None and v_slot is not None)
    qk, pv = cx.args.qk, cx.args.pv
    Q = t.tSrQ[None, None, None, slab]
    K = t.tSrK[None, None, None, 0 if const_expr(k_slot is None) else k_slot]
    V = t.tOrV[None, None, None, 0 if const_expr(v_slot is None) else v_slot]
    _wait_turn(cx, t)
    warpgroup.fence()
    if const_expr(first and k_slot is not None):
        _product(cx, t, qk, t.S, Q, K, False, not both)
    if const_expr(v_slot is not None):
        _product(cx, t, pv, t.O, t.P, V, accumulate, first or not both)
    if const_expr(not first and k_slot is not None):
        _product(cx, t, qk, t.S, Q, K, False, True)
    warpgroup.wait_group(1 if const_expr(first and both) else 0)


@cute.jit
def _mask(cx: FwdCtx, t: Team, tile, n_block):
    """-inf for the keys of a block that a row does not see."""
    thread = cx.late(t.thread)
    row = cx.rows_of(tile, cx.late_team(t.index)) + t.warp * 16 + thread % 32 // rows.QUAD
    at = cx.seqlens(tile)
    limits = [cx.mask.k_limits(row + 8 * h, at.q, at.k) for h in range(rows.ROWS)]
    rows.mask(t.S, limits, n_block * cx.cfg.tile_n + 2 * (thread % rows.QUAD), cx.scale)


@cute.jit
def _store(cx: FwdCtx, t: Team, tile, slab, final):
    """O to global memory through the team's slab by TMA, one group of the team's first warp; LSE
    directly.
    """
    dtype = cx.spec.element
    factors, lse = (final[0], final[1]), (final[2], final[3])
    at, tile = cx.seqlens(tile), cx.numbers(tile)
    thread = cx.late(t.thread) if const_expr(cx.cfg.late_ids) else t.thread
    mine = cx.rows_of(tile, cx.late_team(t.index)) + t.warp * 16 + thread % 32 // rows.QUAD
    if thread % rows.QUAD == 0:
        for h in cutlass.range_constexpr(rows.ROWS):
            if mine + 8 * h < at.q:
                at.set_value(cx.args.mLSE, tile.head, mine + 8 * h, lse[h])
    rO = cute.make_rmem_tensor(t.O.shape, dtype)
    pairs = cute.recast_tensor(rO, Int32)
    for r in cutlass.range_constexpr(cute.size(t.O.shape) // 2):
        f = factors[r % 2]
        pair = rows.pack(t.O[2 * r] * f, t.O[2 * r + 1] * f, dtype)
        # Without keys set, not multiplied by 0: the products may have met a NaN or inf in V.
        pairs[r] = cutlass.select_(f != 0.0, pair, Int32(0))

    to_smem = cute.make_tiled_copy_C(
        cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), dtype),
        cx.args.pv,
    ).get_slice(rows.pinned(t.thread))  # here, not kept in registers over the main loop
    sO = cx.smem.sO[None, None, slab]
    # The whole team has waited for its last product with Q (it met in a turn since, or meets
    # here), so nobody reads Q any more.
    if const_expr(not (cx.cfg.take_turns and cx.cfg.teams > 1 and cx.cfg.joined)):
        _meet(cx, t)
    cute.copy(to_smem, to_smem.retile(rO), to_smem.partition_D(sO))
    cute.arch.fence_view_async_shared()
    _meet(cx, t)
    if t.warp == 0:
        mO = at.rows(cx.args.mO, "q", tile.head)
        gO = cute.local_tile(mO, (TEAM_ROWS, cx.cfg.head_dim_v), (None, 0))
        tOsO, tOgO = cpasync.tma_partition(
            cx.args.store_o,
            0,
            cute.make_layout(1),
            cute.group_modes(cx.smem.sO, 0, 2),
            cute.group_modes(gO, 0, 2),
        )
        m = tile.m_block * cx.cfg.teams + cx.late_team(t.index)
        cute.copy(cx.args.store_o, tOsO[None, slab], tOgO[None, m])
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def _meet(cx: FwdCtx, t: Team):
    """Barrier of one team."""
    first = const_expr(cx.cfg.topology.barrier_id("team0"))
    index = rows.pinned(t.index) if const_expr(cx.late_ids) else t.index
    cute.arch.barrier(barrier_id=first + index, number_of_threads=TEAM_THREADS)


@cute.jit
def _next_q(cx: FwdCtx, t: Team, q):
    """Wait for the next Q; returns the end and the team's slab of it."""
    q_full = q.wait_and_advance()
    return q, q_full.index * cx.cfg.teams + t.index


@cute.jit
def _next_tile(cx: FwdCtx, t: Team, q):
    """Wait for the next Q of a list's tiles, with which come its numbers or that there is none;
    returns the end, the team's slab and the tile.
    """
    q, slab = _next_q(cx, t, q)
    slot = cx.slot_of(slab)
    return q, slab, Handed(slot, cx.handed(slot).valid)


@cute.jit
def _first_scores(cx: FwdCtx, t: Team, q, kv, slab):
    """S of a tile's first block, in a turn of its own; returns the ends and the slab of Q, which is
    known if there is a list.
    """
    if const_expr(not cx.cfg.listed):
        q, slab = _next_q(cx, t, q)
    full = kv.wait_and_advance()
    _turn(cx, t, slab, full.index, None, False)
    full.release()
    return q, kv, slab


@cute.jit
def _go_down(cx: FwdCtx, t: Team, kv, slab, count):
    """S of the block ``count`` further down, since this team sees nothing of those before: it keeps
    taking its turns, and leaves their V alone.
    """
    for _ in cutlass.range(count, unroll=1):
        full = kv.wait_and_advance()
        _turn(cx, t, slab, full.index, None, False)
        full.release()
    return kv


@cute.jit
def _no_turn(cx: FwdCtx, t: Team):
    """A turn without a product."""
    _wait_turn(cx, t)
    _pass_turn(cx, t)


@cute.jit
def _last_values(cx: FwdCtx, t: Team, kv, slab, ready, accumulate, unused):
    """O += P V of a team's last block where its tile goes ``unused`` > 0 blocks further down, and
    turns without a product up to the tile's last one; returns whether the slot of that is full.
    """
    full = kv.wait_and_advance(ready)
    _turn(cx, t, slab, None, full.index, accumulate)
    full.release()
    for _ in cutlass.range(unused - 1, unroll=1):
        full = kv.wait_and_advance()
        _no_turn(cx, t)
        full.release()
    return kv, kv.try_wait()


@cute.jit
def _free_q(end, t: Team):
    """Give back the oldest Q slot once the team's O has been read out of it."""
    if t.warp == 0:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        end.release()
    end.advance()
    return end


@dataclass(frozen=True)
class Consumer:
    """A warpgroup: 64 rows from scores to output. Waits for load_q, load_kv and for its turn; frees
    their slots and passes the turn.
    """

    @cute.jit
    def run(self, cx: FwdCtx):
        c = cx.cfg
        scale, dtype = cx.scale, cx.spec.element
        t = _team(cx)
        q, kv = cx.pipes.load_q.make_consumer(), cx.pipes.load_kv.make_consumer()
        q_done = cx.pipes.load_q.make_consumer()  # as q, but where slots are given back
        if t.index == c.teams - 1:
            _pass_turn(cx, t)  # nobody comes before the first team's first turn
        if const_expr(c.listed):
            q, slab, tile = _next_tile(cx, t, q)
        else:
            sched = cx.scheduler()
            tile = sched.tile()
            slab = t.index  # of Q and O
        if const_expr(c.joined):
            q, kv, slab = _first_scores(cx, t, q, kv, slab)
        storing = Boolean(False)  # the previous tile's O still lies in a slot of Q
        while tile.valid:
            blocks = cx.team_blocks(tile, t.index)
            if const_expr(not c.joined):
                q, kv, slab = _first_scores(cx, t, q, kv, slab)
            kv = _go_down(cx, t, kv, slab, cx.unseen(tile, t.index))
            ready = kv.try_wait()  # asked early: the answer takes time
            if cx.needs_mask(blocks, blocks.hi - 1):
                _mask(cx, t, tile, blocks.hi - 1)
            ref0, ref1, sum0, sum1 = rows.begin(t.S, t.P_pairs, scale, dtype)
            if storing:
                q_done = _free_q(q_done, t)
            for i in cutlass.range(blocks.hi - 1 - blocks.lo, unroll=1):
                n_block = blocks.hi - 2 - i
                full = kv.wait_and_advance(ready)
                _turn(cx, t, slab, full.index, full.index, i != 0)
                if const_expr(not c.scores_first):
                    full.release()
                ready = kv.try_wait()
                if cx.needs_mask(blocks, n_block):
                    _mask(cx, t, tile, n_block)
                state = (ref0, ref1, sum0, sum1)
                part = rows.extend(t.S, t.P_new, scale, state, dtype)
                ref0, ref1, sum0, sum1 = rows.accept(t.S, t.P_new, t.O, scale, state, part, dtype)
                if const_expr(c.scores_first):
                    # Behind the branch of `accept`, where the compiler cannot pull it before the
                    # exponentials.
                    warpgroup.wait_group(0)  # P V is done with the old P
                    full.release()
                    for r in cutlass.range_constexpr(cute.size(t.P_new.shape)):
                        t.P_pairs[r] = rows.pinned(t.P_new[r])
            several = blocks.hi - blocks.lo > 1
            if const_expr(not c.listed):
                sched = sched.next()
                after = sched.tile()
            unused = cx.unseen_below(tile, t.index)
            if unused > 0:
                kv, ready = _last_values(cx, t, kv, slab, ready, several, unused)
            full = kv.wait_and_advance(ready)
            next_slab = slab
            if const_expr(c.joined):
                if const_expr(c.listed):
                    q, next_slab, after = _next_tile(cx, t, q)
                elif after.valid:
                    q, next_slab = _next_q(cx, t, q)
                # After the last tile this multiplies what lies there, and nobody looks.
                if unused > 0:
                    _turn(cx, t, next_slab, full.index, None, False)
                else:
                    _turn(cx, t, next_slab, full.index, full.index, several)
                warpgroup.wait_group(0)
            elif unused > 0:
                _no_turn(cx, t)
            else:
                _turn(cx, t, slab, None, full.index, several)
            full.release()
            _store(cx, t, tile, slab, rows.finish((ref0, ref1, sum0, sum1)))
            storing = Boolean(c.joined)  # to wait for it takes time: there is some later
            if const_expr(not c.joined):
                q_done = _free_q(q_done, t)
                if const_expr(c.listed):
                    q, next_slab, after = _next_tile(cx, t, q)
            slab, tile = next_slab, after
        if storing:
            q_done = _free_q(q_done, t)
        if const_expr(c.listed):
            q_done = _free_q(q_done, t)  # the slot that said that there is no tile
