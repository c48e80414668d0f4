"""First kernel of the backward: row statistics, and zeros where the main kernel adds.

lse_log2 = lse * log2(e); +inf where a row sees nothing or does not exist: P = exp2(S - inf) = 0
delta    = rowsum(dout * out) - dlse
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, const_expr

from fa_cute.bwd.args import BwdSpec, Sizes, workspace
from fa_cute.ops.arith import ceil_div
from fa_cute.ops.score import LOG2_E

LANES = 8  # threads of one row
THREADS = 256
VECTOR = 8  # 16-bit elements of a 16-byte access
ROWS = 64  # rows of a CTA


def vector_of(tensor: cute.Tensor, coord) -> cute.Tensor:
    """The 16 bytes at ``coord``, which is 16-byte aligned by the API's contract."""
    at = cute.domain_offset(coord, tensor).iterator
    pointer = cute.make_ptr(tensor.element_type, at.toint(), at.memspace, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout(128 // tensor.element_type.width))


def sizes_of(mQ: cute.Tensor, mK: cute.Tensor) -> Sizes:
    """Dynamic sizes as 64-bit integers: the accumulator of a long batch has more than 2^31
    elements.
    """
    b, sq, h, _ = mQ.shape
    _, sk, hk, _ = mK.shape
    return Sizes(*(Int64(x) for x in (b, h, hk, sq, sk)))


@dataclass(frozen=True)
class BwdPreprocess:
    """``ROWS`` rows of one head a CTA; ``LANES`` threads a row. Feeds the main kernel."""

    cfg: object
    spec: BwdSpec

    @cute.jit
    def __call__(self, mQ, mK, mO, mdO, mLSE, mdLSE, mWork, stream):
        n = sizes_of(mQ, mK)
        w = workspace(self.cfg, self.spec, n)
        rows_q = ceil_div(mQ.shape[1], self.cfg.tile_m) * self.cfg.tile_m
        rows = cute.make_layout(
            (mQ.shape[0], mQ.shape[2], rows_q),
            stride=(Int64(mQ.shape[2]) * rows_q, Int64(rows_q), 1),
        )
        mLse2 = cute.make_tensor(mWork.iterator + w.lse, rows)
        mDelta = cute.make_tensor(mWork.iterator + w.delta, rows)
        vectors = (w.size - w.dq) // 4
        zeros = cute.make_ptr(
            Float32, (mWork.iterator + w.dq).toint(), cute.AddressSpace.gmem, assumed_align=16
        )
        # A grid has room for many batches in its first dimension only.
        grid = (ceil_div(rows_q, ROWS) * mQ.shape[0], mQ.shape[2], 1)
        self.kernel(mO, mdO, mLSE, mdLSE, mLse2, mDelta, zeros, vectors).launch(
            grid=grid, block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mO, mdO, mLSE, mdLSE, mLse2, mDelta, zeros: cute.Pointer, vectors: Int64):
        tidx = cute.arch.thread_idx()[0]
        block, head, _ = cute.arch.block_idx()
        blocks = ceil_div(mLse2.shape[2], ROWS)
        m_block, batch = block % blocks, block // blocks
        lane = tidx % LANES
        for i in cutlass.range_constexpr(ROWS * LANES // THREADS):
            row = m_block * ROWS + i * (THREADS // LANES) + tidx // LANES
            self.row(mO, mdO, mLSE, mdLSE, mLse2, mDelta, (batch, row, head, lane))
        # every CTA zeroes its share, whole waves side by side
        grid = cute.arch.grid_dim()
        ctas = Int64(grid[0]) * grid[1]
        cta = Int64(block) + Int64(grid[0]) * head
        zero = cute.make_rmem_tensor(4, Float32)
        zero.fill(0.0)
        at = cta * THREADS + tidx
        while at < vectors:
            cute.autovec_copy(zero, cute.make_tensor(zeros + at * 4, cute.make_layout(4)))
            at += ctas * THREADS

    @cute.jit
    def row(self, mO, mdO, mLSE, mdLSE, mLse2, mDelta, where):
        """One row: its eight threads sum 16-byte vectors, the first one writes."""
        batch, row, head, lane = where
        inside = row < mO.shape[1]
        total = Float32(0.0)
        if inside:
            for v in cutlass.range_constexpr((self.cfg.head_dim_v // VECTOR + LANES - 1) // LANES):
                col = (v * LANES + lane) * VECTOR
                if col < self.spec.head_dim_v:
                    rO, rdO = (cute.make_rmem_tensor(VECTOR, mO.element_type) for _ in range(2))
                    cute.autovec_copy(vector_of(mO, (batch, row, head, col)), rO)
                    cute.autovec_copy(vector_of(mdO, (batch, row, head, col)), rdO)
                    product = rO.load().to(Float32) * rdO.load().to(Float32)
                    total += product.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        for step in cutlass.range_constexpr(3):
            total += cute.arch.shuffle_sync_bfly(total, offset=1 << step)
        if lane == 0 and row < mLse2.shape[2]:
            lse2, delta = Float32(math.inf), Float32(0.0)
            if inside:
                lse = Float32(mLSE[batch, head, row])
                if lse != -math.inf:
                    lse2, delta = lse * LOG2_E, total
                    if const_expr(mdLSE is not None):
                        delta = total - Float32(mdLSE[batch, head, row])
            mLse2[batch, head, row] = lse2
            mDelta[batch, head, row] = delta
