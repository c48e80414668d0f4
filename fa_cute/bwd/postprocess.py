"""Last kernel of the backward: an fp32 accumulator in fragment order becomes a gradient in the
tensor's dtype.

Used for dQ, and for dK and dV where kv heads are shared. `Chunks` or `RowChunks` is the order.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from fa_cute.bwd.blocks import Cut
from fa_cute.bwd.preprocess import VECTOR, vector_of

# Elements between rows in shared memory: 16 bytes, so that a column of rows spreads over the banks.
PAD = 8


@dataclass(frozen=True)
class BwdPostprocess:
    """One tile of one head a CTA, 128 threads for each of its chunks."""

    cut: Cut
    chunks: object  # Chunks
    head_dim: int  # columns that exist; the tile may have more
    early: bool = False  # launched while the kernel before still runs
    ragged: bool = False  # many tiles end within their rows: those past the end are not read

    @cute.jit
    def __call__(self, call, name: str, mOut: cute.Tensor, scale: Float32, stream):
        """``call``: `call.Call`; ``name``: of the accumulator, in its workspace."""
        grid = call.grid(self.cut)
        self.kernel(grid, call.section(name), mOut, scale).launch(
            grid=grid.launch, block=(128 * self.chunks.num, 1, 1), stream=stream, use_pdl=self.early
        )

    @cute.kernel
    def kernel(self, grid, accumulator: cute.Pointer, mOut: cute.Tensor, scale: Float32):
        if const_expr(self.early):
            cute.arch.griddepcontrol_wait()  # for all of the kernels before
            cute.arch.griddepcontrol_launch_dependents()
        block, head = grid.here(self.cut)
        if block.valid:
            self.tile((block, head, grid.heads), accumulator, mOut, scale)

    @cute.jit
    def tile(self, at, accumulator: cute.Pointer, mOut: cute.Tensor, scale: Float32):
        """Fragments -> shared memory -> rows; ``at``: (block, head, heads)."""
        block, head, heads = at
        c = self.chunks
        tidx = cute.arch.thread_idx()[0]
        smem = cutlass.memory.SmemAllocator()
        layout = cute.make_layout((c.rows, c.cols), stride=(c.cols + PAD, 1))
        sOut = smem.allocate_tensor(mOut.element_type, layout, 128)

        chunk, t = tidx // 128, tidx % 128
        tile = self.number(block, head, heads)
        source = accumulator + (tile * (c.rows * c.cols) + chunk * c.chunk_floats + t * 4)
        row, col = c.origin(chunk, t)
        values = cute.make_rmem_tensor(cute.make_layout((4, c.vectors)), Float32)
        given = cute.make_tensor(source, cute.make_layout((4, c.vectors), stride=(1, 512)))
        if const_expr(self.ragged):
            values.fill(0.0)
            if block.number * c.rows + row < self.length(block):
                cute.autovec_copy(given, values)
        else:
            cute.autovec_copy(given, values)
        for j in cutlass.range_constexpr(c.vectors):
            for rows, cols, first, count in c.runs(j):
                run = cute.make_rmem_tensor(count, mOut.element_type)
                for i in cutlass.range_constexpr(count):
                    run[i] = (values[first + i, j] * scale).to(mOut.element_type)
                at = (sOut.iterator + layout((row + rows, col + cols))).align(2 * count)
                cute.autovec_copy(run, cute.make_tensor(at, cute.make_layout(count)))
        cute.arch.sync_threads()
        self.write(sOut, block.lengths.plain(mOut, self.cut.side, head), block)

    def length(self, block):
        """Rows of the batch element."""
        return block.lengths.q if self.cut.side == "q" else block.lengths.k

    def number(self, block, head, heads):
        """Of the tile among those in the accumulator."""
        if self.cut.side == "q":
            return block.lengths.tile_q(block.number, head, heads, self.cut.rows)
        ctas = self.cut.per_tile
        return block.lengths.tile_k(block.number, head, heads, self.cut.rows, ctas)

    @cute.jit
    def write(self, sOut, gOut, block):
        """Rows that exist, 16 bytes a thread, neighbours side by side."""
        c = self.chunks
        length = self.length(block)
        tidx = cute.arch.thread_idx()[0]
        threads, per_row = 128 * c.num, self.head_dim // VECTOR
        for i in cutlass.range_constexpr((c.rows * per_row + threads - 1) // threads):
            at = i * threads + tidx
            row, col = at // per_row, at % per_row * VECTOR
            if row < c.rows and block.number * c.rows + row < length:
                cute.autovec_copy(
                    vector_of(sOut, (row, col)),
                    vector_of(gOut, (block.number * c.rows + row, col)),
                )
