"""Bodies of the DSL kernels (the DSL reads their source, so they live in a file)."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute


@cute.kernel
def _add_one_kernel(x: cute.Tensor, n: cutlass.Int32):
    tidx, _, _ = cute.arch.thread_idx()
    bidx, _, _ = cute.arch.block_idx()
    i = bidx * 32 + tidx
    if i < n:
        x[i] = x[i] + 1.0


@cute.jit
def add_one(x: cute.Tensor, n: cutlass.Int32):
    _add_one_kernel(x, n).launch(grid=[cute.ceil_div(n, 32), 1, 1], block=[32, 1, 1])
