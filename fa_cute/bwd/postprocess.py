"""Last kernel of the backward: an fp32 accumulator in fragment order becomes a gradient in the
tensor's dtype.

Used for dQ, and for dK and dV where kv heads are shared. `Chunks` or `RowChunks` is the order.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

from fa_cute.bwd.preprocess import VECTOR, vector_of
from fa_cute.ops.arith import ceil_div

# Elements between rows in shared memory: 16 bytes, so that a column of rows spreads over the banks.
PAD = 8


@dataclass(frozen=True)
class BwdPostprocess:
    """One tile of one head a CTA, 128 threads for each of its chunks."""

    chunks: object  # Chunks
    head_dim: int  # columns that exist; the tile may have more

    @cute.jit
    def __call__(self, accumulator: cute.Pointer, mOut: cute.Tensor, scale: Float32, stream):
        b, s, h, _ = mOut.shape
        # A grid has room for many batches in its first dimension only.
        grid = (ceil_div(s, self.chunks.rows) * b, h, 1)
        self.kernel(accumulator, mOut, scale).launch(
            grid=grid, block=(128 * self.chunks.num, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, accumulator: cute.Pointer, mOut: cute.Tensor, scale: Float32):
        c = self.chunks
        tidx = cute.arch.thread_idx()[0]
        index, head, _ = cute.arch.block_idx()
        blocks = ceil_div(mOut.shape[1], c.rows)
        block, batch = index % blocks, index // blocks
        smem = cutlass.memory.SmemAllocator()
        layout = cute.make_layout((c.rows, c.cols), stride=(c.cols + PAD, 1))
        sOut = smem.allocate_tensor(mOut.element_type, layout, 128)

        chunk, t = tidx // 128, tidx % 128
        tile = Int64(block) + blocks * (Int64(head) + Int64(mOut.shape[2]) * batch)
        source = accumulator + (tile * (c.rows * c.cols) + chunk * c.chunk_floats + t * 4)
        row, col = c.origin(chunk, t)
        values = cute.make_rmem_tensor(cute.make_layout((4, c.vectors)), Float32)
        cute.autovec_copy(
            cute.make_tensor(source, cute.make_layout((4, c.vectors), stride=(1, 512))), values
        )
        for j in cutlass.range_constexpr(c.vectors):
            for rows, cols, first, count in c.runs(j):
                run = cute.make_rmem_tensor(count, mOut.element_type)
                for i in cutlass.range_constexpr(count):
                    run[i] = (values[first + i, j] * scale).to(mOut.element_type)
                at = (sOut.iterator + layout((row + rows, col + cols))).align(2 * count)
                cute.autovec_copy(run, cute.make_tensor(at, cute.make_layout(count)))
        cute.arch.sync_threads()
        self.write(sOut, mOut, (batch, block, head))

    @cute.jit
    def write(self, sOut, mOut, where):
        """Rows that exist, 16 bytes a thread, neighbours side by side."""
        c = self.chunks
        batch, block, head = where
        tidx = cute.arch.thread_idx()[0]
        threads, per_row = 128 * c.num, self.head_dim // VECTOR
        for i in cutlass.range_constexpr((c.rows * per_row + threads - 1) // threads):
            at = i * threads + tidx
            row, col = at // per_row, at % per_row * VECTOR
            if row < c.rows and block * c.rows + row < mOut.shape[1]:
                cute.autovec_copy(
                    vector_of(sOut, (row, col)),
                    vector_of(mOut, (batch, block * c.rows + row, head, col)),
                )
