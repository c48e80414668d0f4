"""What the consumers of both splits have in common: issuing a product, and the arithmetic between
the products, on registers in wgmma's order r = 4 j + 2 h + i (row + 8 h, column 8 j + i of a
thread).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass.cute.nvgpu import warp, warpgroup

from fa_cute.bwd.sm90.ctx import BwdCtx
from fa_cute.bwd.sm90.plan import CONSUMERS, WARPGROUP_THREADS
from fa_cute.ops.arith import hi
from fa_cute.ops.rows import pinned

BOTH = CONSUMERS * WARPGROUP_THREADS


@dataclass(frozen=True)
class Lane:
    """Where a thread stands: its warpgroup, its index in it, and the row and column of its first
    accumulator.
    """

    wg: Any
    t: Int32
    key: Any  # first key of the warpgroup in the CTA's tile

    @property
    def row(self):
        return self.t // 32 * 16 + self.t % 32 // 4

    @property
    def col(self):
        return self.t % 4 * 2


def gemm(tiled: cute.TiledMma, acc: cute.Tensor, tA, tB, accumulate, fence: bool = True) -> None:
    """Issue ``acc (+)= A B`` as one wgmma group; ``accumulate`` may be dynamic. ``fence``: unless
    nobody touched its registers since the one of a product issued before.
    """
    atom = cute.make_mma_atom(tiled.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    if fence:
        warpgroup.fence()
    for k in range(cute.size(tA.shape[2])):
        cute.gemm(atom, acc, tA[None, None, k], tB[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def transposed(tensor: cute.Tensor) -> cute.Tensor:
    """(rows, cols, ...) as (cols, rows, ...)."""
    order = [1, 0, *range(2, cute.rank(tensor))]
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=order))


def flat(fragment: cute.Tensor) -> cute.Tensor:
    """A register fragment as a vector in wgmma's order r = 4 j + 2 h + i."""
    return cute.make_tensor(fragment.iterator, cute.make_layout(cute.size(fragment)))


def accumulator(tiled: cute.TiledMma, rows: int, cols: int) -> cute.Tensor:
    """Registers of a (rows, cols) product."""
    return cute.make_rmem_tensor(tiled.partition_shape_C((rows, cols)), Float32)


def columns(vector: cute.Tensor, size: int, lane: Lane) -> cute.Tensor:
    """A thread's columns 8 j + col + i of a vector in shared memory, (2, size / 8) in registers."""
    start = (vector.iterator + lane.col).align(8)
    layout = cute.make_layout((2, size // 8), stride=(1, 8))
    values = cute.make_rmem_tensor(cute.make_layout((2, size // 8)), vector.element_type)
    cute.autovec_copy(cute.make_tensor(start, layout), values)
    return values


def operand(cx: BwdCtx, acc: cute.Tensor, tiled: cute.TiledMma) -> cute.Tensor:
    """An accumulator in 16 bits as a register operand A: wgmma holds both in the same order."""
    shape = tiled.partition_shape_A((cx.cfg.tile_n, cx.cfg.tile_m))
    fragment = cute.make_rmem_tensor(shape, cx.smem.sQ.element_type)
    flat(fragment).store(flat(acc).load().to(fragment.element_type))
    return fragment


@cute.jit
def probabilities(cx: BwdCtx, S: cute.Tensor, lse: cute.Tensor, m_block, lane: Lane, masked):
    """S <- exp2(S * scale - lse), in place; lse by column, as `columns` loads it.

    ``masked`` (static): pairs that the mask forbids become 0, and so do keys that do not exist
    (their score of 0 may be far above lse). No branch: it would keep exp2 from running beside dS.
    """
    rS = flat(S)
    seen = tuple(queries(cx, m_block, lane, h) for h in range(2)) if masked else ()
    for j in cutlass.range_constexpr(cx.cfg.tile_m // 8):
        for i in cutlass.range_constexpr(2):
            for h in cutlass.range_constexpr(2):
                r = 4 * j + 2 * h + i
                score = rS[r] * cx.scale_log2 - lse[i, j]
                if const_expr(masked):
                    score = score if within(8 * j + i, seen[h]) else -Float32.inf
                rS[r] = cute.math.exp2(score, fastmath=True)


@cute.jit
def queries(cx: BwdCtx, m_block, lane: Lane, h: cutlass.Constexpr[int]):
    """Queries that see key ``h`` of a thread, as columns of that thread's fragment: (start, None)
    from one on, (None, end) up to one, else (start, how many). Rows past the last query need no
    limit: their lse is +inf.
    """
    c = cx.cfg
    if const_expr(cx.mask.hides_keys):
        lane = replace(lane, t=pinned(lane.t))  # else kept, or spilled, from one loop to the next
    key = cx.n_block * c.tile_n + lane.key + lane.row + 8 * h
    first, end = cx.mask.q_limits(key, cx.seqlen_q, cx.seqlen_k)
    origin = m_block * c.tile_m
    if const_expr(first is None and end is not None):
        last = end - origin - lane.col
        if key >= cx.seqlen_k:
            last = Int32(0)
        return None, last
    start, count = Int32(0), None
    if const_expr(first is not None):
        start = first - origin - lane.col
    if const_expr(end is not None):
        count = hi(end - first, 0)  # of a band, the same for every key: one register
    if key >= cx.seqlen_k:
        start = Int32(c.tile_m)
    return start, count


def within(column: int, seen):
    """Whether ``column`` is in ``seen``, as `queries` gives it: one comparison."""
    start, rest = seen
    if rest is None:
        return column >= start
    if start is None:
        return column < rest
    return Uint32(column - start) < Uint32(rest)


def spans(blocks, start):
    """Query blocks from ``start`` on as ((from, to, masked), ...): a loop for each, no branches."""
    full_lo = hi(blocks.full_lo, start)
    full_hi = hi(blocks.full_hi, full_lo)
    return (
        (start, full_lo, True),
        (full_lo, full_hi, False),
        (full_hi, hi(blocks.hi, full_hi), True),
    )


@cute.jit
def score_gradient(cx: BwdCtx, P: cute.Tensor, dP: cute.Tensor, delta: cute.Tensor):
    """dP <- P * (dP - delta), in place."""
    score_gradient_of(P, dP, delta, range(cx.cfg.tile_m // 8))


@cute.jit
def score_gradient_of(P: cute.Tensor, dP: cute.Tensor, delta: cute.Tensor, eights):
    """The same for some columns, counted in eights."""
    rP, rdP = flat(P), flat(dP)
    for j in eights:
        for i in cutlass.range_constexpr(2):
            for h in cutlass.range_constexpr(2):
                r = 4 * j + 2 * h + i
                rdP[r] = rP[r] * (rdP[r] - delta[i, j])


def take_turn(cx: BwdCtx, wg):
    """Wait until the other warpgroup has issued its block of products."""
    cute.arch.barrier(barrier_id=cx.barrier_id("turn_0") + wg, number_of_threads=BOTH)


def pass_turn(cx: BwdCtx, wg):
    """Let the other warpgroup issue."""
    other = cx.barrier_id("turn_0") + 1 - wg
    cute.arch.barrier_arrive(barrier_id=other, number_of_threads=BOTH)


@cute.jit
def follow(cx: BwdCtx, wg):
    """Warpgroup 1 waits, in a tile that says so, until warpgroup 0 is ahead."""
    if (wg == 1) & cx.has_at_most(cx.cfg.stagger_rows):
        cute.arch.barrier(barrier_id=cx.barrier_id("lead"), number_of_threads=BOTH)


@cute.jit
def lead(cx: BwdCtx, wg):
    """Warpgroup 0 is ahead, in such a tile."""
    if (wg == 0) & cx.has_at_most(cx.cfg.stagger_rows):
        cute.arch.barrier_arrive(barrier_id=cx.barrier_id("lead"), number_of_threads=BOTH)


def wait_ds(cx: BwdCtx, wg, m_block):
    """Wait for the other warpgroup's dS of a step (where no turns order that)."""
    other = cx.barrier_id("ds_00") + 2 * (1 - wg) + m_block % 2
    cute.arch.barrier(barrier_id=other, number_of_threads=BOTH)


def signal_ds(cx: BwdCtx, wg, m_block):
    """Our dS of a step is written, and we have read that of the step before."""
    own = cx.barrier_id("ds_00") + 2 * wg + m_block % 2
    cute.arch.barrier_arrive(barrier_id=own, number_of_threads=BOTH)


def share_ds(cx: BwdCtx, copy: cute.TiledCopy, to: cute.Tensor, rdS: cute.Tensor):
    """Write dS of our keys for the dQ products of both warpgroups, which follow after a turn."""
    shape = cx.mmas.sdp.partition_shape_C((cx.cfg.tile_n, cx.cfg.tile_m))
    source = cute.make_tensor(rdS.iterator, cute.make_layout(shape))
    cute.copy(copy, copy.retile(source), to)
    cute.arch.fence_proxy("async.shared", space="cta")  # wgmma reads through the async proxy


@cute.jit
def share_score_gradient(cx: BwdCtx, products, delta, copy: cute.TiledCopy, to: cute.Tensor):
    """`score_gradient` of ``products`` = (P, dP), `operand` and `share_ds` in one, 16 columns at a
    time: the first ones are on their way to shared memory while the last ones are computed.
    """
    P, dP = products
    rdS = cute.make_rmem_tensor(
        cx.mmas.dk.partition_shape_A((cx.cfg.tile_n, cx.cfg.tile_m)), cx.smem.sQ.element_type
    )
    shape = cx.mmas.sdp.partition_shape_C((cx.cfg.tile_n, cx.cfg.tile_m))
    source = copy.retile(cute.make_tensor(rdS.iterator, cute.make_layout(shape)))
    for part in cutlass.range_constexpr(cx.cfg.tile_m // 16):
        score_gradient_of(P, dP, delta, range(2 * part, 2 * part + 2))
        eight = cute.make_layout(8)
        new, old = (cute.make_tensor(x.iterator + 8 * part, eight) for x in (rdS, dP))
        new.store(old.load().to(rdS.element_type))
        at = ((None, part), None, None)  # one instruction's registers of each thread
        cute.copy(copy, source[at], to[at])
    cute.arch.fence_proxy("async.shared", space="cta")  # wgmma reads through the async proxy
    return rdS


def ds_copy(cx: BwdCtx) -> cute.TiledCopy:
    """Registers of dS^T -> sdS, transposed on the way: wgmma reads a left operand with its K side
    contiguous at full speed, and dQ's K side is the keys."""
    op = warp.StMatrix8x8x16bOp(transpose=True, num_matrices=4)
    return cute.make_tiled_copy_C(cute.make_copy_atom(op, cx.smem.sdS.element_type), cx.mmas.sdp)
