"""First kernel of the backward: row statistics, and zeros where the main kernel adds.

lse_log2 = lse * log2(e); +inf where a row sees nothing or does not exist: P = exp2(S - inf) = 0
delta    = rowsum(dout * out) - dlse
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from fa_cute.bwd.args import BwdSpec, stores_alone, stores_first
from fa_cute.bwd.blocks import Cut
from fa_cute.ops.arith import ceil_div, hi, lo
from fa_cute.ops.mask import kv_blocks
from fa_cute.ops.score import LOG2_E
from fa_cute.ops.semaphore import first_of

LANES = 8  # threads of one row
THREADS = 256
VECTOR = 8  # 16-bit elements of a 16-byte access
ROWS = 64  # rows of a CTA


def vector_of(tensor: cute.Tensor, coord) -> cute.Tensor:
    """The 16 bytes at ``coord``, which is 16-byte aligned by the API's contract."""
    at = cute.domain_offset(coord, tensor).iterator
    pointer = cute.make_ptr(tensor.element_type, at.toint(), at.memspace, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout(128 // tensor.element_type.width))


@cute.jit
def put_zeros(to: cute.Pointer):
    """16 bytes of fp32 zeros."""
    zero = cute.make_rmem_tensor(4, Float32)
    zero.fill(0.0)
    cute.autovec_copy(zero, cute.make_tensor(to, cute.make_layout(4)))


@dataclass(frozen=True)
class Unstored:
    """The dQ accumulator where the main kernel begins tiles by storing, and the mask."""

    dq: cute.Pointer
    mask: Any


@dataclass(frozen=True)
class Zeros:
    """What the main kernel finds zeroed; None where there is no such thing."""

    start: cute.Pointer  # of the workspace: from here on
    vectors: Int64  # of 16 bytes
    unstored: Any  # Unstored
    tile_count: Any  # as in `call.Call`
    firsts: Any


@dataclass(frozen=True)
class BwdPreprocess:
    """``ROWS`` rows of one head a CTA; ``LANES`` threads a row. Feeds the main kernel."""

    cfg: object
    spec: BwdSpec

    @property
    def cut(self) -> Cut:
        return Cut("q", self.cfg.tile_m, ROWS)

    @cute.jit
    def __call__(self, call, rows, stream):
        """``call``: `call.Call`; ``rows``: out, dout, lse and dlse."""
        grid, at = call.grid(self.cut), call.at
        stored = stores_first(self.cfg) or stores_alone(self.cfg, self.spec)
        first = "dk" if stored else "dq"
        vectors = (at.size - getattr(at, first)) // 4
        unstored = Unstored(call.section("dq"), call.band) if stored else None
        zeros = Zeros(call.section(first), vectors, unstored, call.tile_count, call.firsts)
        results = (call.per_row("lse"), call.per_row("delta"))
        self.kernel(grid, rows, results, zeros).launch(
            grid=grid.launch, block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, grid, rows, results, zeros: Zeros):
        # The main kernel, where it may, sets itself up meanwhile.
        cute.arch.griddepcontrol_launch_dependents()
        tidx = cute.arch.thread_idx()[0]
        block, head = grid.here(self.cut)
        if block.valid:
            inputs, outputs = self.of_head(block.lengths, rows, results, head)
            first = block.number * ROWS + tidx // LANES
            self.rows(inputs, outputs, block.lengths.q, (first, tidx % LANES))
            if const_expr(zeros.unstored is not None):
                self.zero_unstored(zeros.unstored, (block, head, grid.heads))
            if const_expr(zeros.firsts is not None):
                self.zero_first(zeros.firsts, block, head)
        if const_expr(zeros.tile_count is not None):
            self.zero_count(zeros.tile_count)
        # every CTA zeroes its share, whole waves side by side
        at = Int64(cute.arch.block_idx()[0]) * THREADS + tidx
        step = Int64(cute.arch.grid_dim()[0]) * THREADS
        while at < zeros.vectors:
            put_zeros(zeros.start + at * 4)
            at += step

    @cute.jit
    def zero_count(self, count: cute.Pointer):
        """The first thread of all: no tile is taken yet."""
        if cute.arch.block_idx()[0] + cute.arch.thread_idx()[0] == 0:
            cute.make_tensor(count, cute.make_layout(1))[0] = Int32(0)

    @cute.jit
    def zero_first(self, dq: cute.Tensor, block, head):
        """Nobody has begun the dQ tile whose first rows are this block's."""
        if block.number % self.cut.per_tile + cute.arch.thread_idx()[0] == 0:
            first = first_of(dq, block.lengths, head, block.number * ROWS)
            cute.make_tensor(first, cute.make_layout(1))[0] = Int32(0)

    @cute.jit
    def zero_unstored(self, unstored: Unstored, where):
        """This CTA's part of its dQ tile, unless the main kernel begins it by storing: of queries
        that no key sees, or that more than one KV block adds to where only one alone stores.
        ``where`` = (block, head, heads).
        """
        c, (block, head, heads) = self.cfg, where
        lengths = block.lengths
        m_block = block.number * ROWS // c.tile_m
        seen = kv_blocks(unstored.mask, m_block, c.tile_m, c.tile_n, lengths.q, lengths.k)
        stores = 1 if stores_alone(c, self.spec) else hi(seen.count, 1)
        if seen.count != stores:
            tile = lengths.tile_q(m_block, head, heads, c.tile_m)
            part = block.number - m_block * (c.tile_m // ROWS)
            to = unstored.dq + (tile * (c.tile_m * c.head_dim) + part * (ROWS * c.head_dim))
            for i in cutlass.range(
                cute.arch.thread_idx()[0], ROWS * c.head_dim // 4, THREADS, unroll=1
            ):
                put_zeros(to + i * 4)

    def of_head(self, lengths, rows, results, head):
        """The rows of one head of one batch element."""
        mO, mdO, mLSE, mdLSE = rows
        dlse = None if mdLSE is None else lengths.values(mdLSE, head)
        inputs = (lengths.plain(mO, "q", head), lengths.plain(mdO, "q", head))
        outputs = tuple(lengths.padded(x, head, self.cfg.tile_m) for x in results)
        return (*inputs, lengths.values(mLSE, head), dlse), outputs

    @cute.jit
    def rows(self, inputs, outputs, seqlen_q, where):
        """A thread's part of some rows: eight threads sum 16-byte vectors of each, the first one
        writes.
        """
        first, lane = where
        loaded = []
        for i in cutlass.range_constexpr(ROWS * LANES // THREADS):
            # All loads before a sum waits for one; past the end those of the last row.
            row = first + i * (THREADS // LANES)
            at = lo(row, seqlen_q - 1)
            lse = [None if x is None else Float32(x[at]) for x in inputs[2:]]
            loaded.append((row, lse, self.vectors(inputs, at, lane)))
        for i in cutlass.range_constexpr(len(loaded)):
            self.row(outputs, seqlen_q, lane, loaded[i])

    @cute.jit
    def vectors(self, inputs, row, lane):
        """A thread's vectors of out and dout of a row; zeros past the last column."""
        gO, gdO, _, _ = inputs
        found = []
        for v in cutlass.range_constexpr(ceil_div(self.cfg.head_dim_v, VECTOR * LANES)):
            rO, rdO = (cute.make_rmem_tensor(VECTOR, gO.element_type) for _ in range(2))
            col = (v * LANES + lane) * VECTOR
            if const_expr((v + 1) * LANES * VECTOR <= self.spec.head_dim_v):
                cute.autovec_copy(vector_of(gO, (row, col)), rO)
                cute.autovec_copy(vector_of(gdO, (row, col)), rdO)
            else:
                rO.fill(0.0)
                rdO.fill(0.0)
                if col < self.spec.head_dim_v:
                    cute.autovec_copy(vector_of(gO, (row, col)), rO)
                    cute.autovec_copy(vector_of(gdO, (row, col)), rdO)
            found.append((rO, rdO))
        return found

    @cute.jit
    def row(self, outputs, seqlen_q, lane, loaded):
        """One row from what was loaded."""
        gLse2, gDelta = outputs
        row, (lse, dlse), pairs = loaded
        total = Float32(0.0)
        for v in cutlass.range_constexpr(len(pairs)):
            rO, rdO = pairs[v]
            product = rO.load().to(Float32) * rdO.load().to(Float32)
            total += product.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        for step in cutlass.range_constexpr(3):
            total += cute.arch.shuffle_sync_bfly(total, offset=1 << step)
        if lane == 0:
            lse2, delta = Float32(math.inf), Float32(0.0)
            if row < seqlen_q and lse != -math.inf:
                lse2, delta = lse * LOG2_E, total
                if const_expr(dlse is not None):
                    delta = total - dlse
            gLse2[row] = lse2
            gDelta[row] = delta
