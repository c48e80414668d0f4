"""Kernels that apply device functions to rows of numbers (the DSL reads their source)."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fa_cute.ops import exp2, ptx, softmax

UNARY = ("ex2_ftz", "lg2_ftz", "low_ones", "exp2_x", "exp2_y")
ROWS = ("max3", "add_exponent", *UNARY)
ROW = 128  # registers of one thread's row


@cute.kernel
def _functions(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, out: cute.Tensor, bits: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 128 + thread
    if i < a.shape[0]:
        x, y, z = a[i], b[i], c[i]
        out[0, i] = ptx.max3(x, y, z)
        out[1, i] = ptx.add_exponent(x, y)
        out[2, i] = ptx.ex2_ftz(x)
        out[3, i] = ptx.lg2_ftz(x)
        first, second = exp2.exp2_pair(x, y)
        out[4, i] = first
        out[5, i] = second
        bits[0, i] = ptx.low_ones(Int32(i) - 8)
        bits[1, i] = ptx.high_ones(Int32(i) - 8)
        bits[2, i] = ptx.unknown_zero()
        ptx.tcgen05_fence_before()
        ptx.tcgen05_fence_after()


@cute.jit
def functions(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, out: cute.Tensor, bits: cute.Tensor):
    _functions(a, b, c, out, bits).launch(
        grid=(cute.ceil_div(a.shape[0], 128), 1, 1), block=(128, 1, 1)
    )


@cute.kernel
def _rows(
    x: cute.Tensor, old: cute.Tensor, stats: cute.Tensor, scaled: cute.Tensor, scale: Float32
):
    thread, _, _ = cute.arch.thread_idx()
    row = cute.make_rmem_tensor((ROW,), Float32)
    for j in cutlass.range(ROW, unroll_full=True):
        row[j] = x[thread, j]
    new = softmax.row_max(row, old[thread])
    stats[0, thread] = new
    stats[1, thread] = softmax.row_sum(row, old[thread])
    maximum, factor = softmax.grow_max(old[thread], new, scale, 8.0)
    stats[2, thread] = maximum
    stats[3, thread] = factor
    softmax.subtract_max(row, scale, softmax.finite_max(maximum))
    for j in cutlass.range(ROW, unroll_full=True):
        scaled[thread, j] = row[j]
    stats[4, thread] = softmax.log_sum_exp(cute.arch.fmax(old[thread], 0.0), new, scale)


@cute.jit
def rows(x: cute.Tensor, old: cute.Tensor, stats: cute.Tensor, scaled: cute.Tensor, scale: Float32):
    _rows(x, old, stats, scaled, scale).launch(grid=(1, 1, 1), block=(128, 1, 1))
