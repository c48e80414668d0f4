"""Online softmax of one row held by one thread: maximum, scaling, sum, and the final statistics.

Scores are kept as they leave the tensor core; the factor to log2 units is folded into the
subtraction of the maximum, ``exp2(score * scale_log2 - maximum * scale_log2)``.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

from . import ptx
from .score import LN_2, LOG2_E

# A factor of exactly 0 would make 0 * -inf = NaN of a masked score; this one leaves finite scores
# 0.
MIN_SCALE_LOG2 = 2.0**-120
HUGE = 2.0**27  # log2 units; below, the last place is 2**3, and 2**4 no problem for P in fp16
MANTISSA = 0x7FFFFF
LARGEST_TOTAL = 2.0**100  # no sum of exponentials gets there


def scale_log2_of(softmax_scale) -> Float32:
    """Magnitude of a score's factor in log2 units; the sign is the matrix product's business."""
    # Host code: the device's fmax does not exist here.
    magnitude = cutlass.max(softmax_scale, -softmax_scale) * Float32(LOG2_E)
    return cutlass.max(magnitude, Float32(MIN_SCALE_LOG2))


@cute.jit
def row_max(x: cute.Tensor, init) -> Float32:
    """Largest of `init` and all registers of `x`, in four independent chains; a NaN is ignored."""
    best = [cute.arch.fmax(x[0], init), x[1], x[2], x[3]]
    pairs = (cute.size(x.shape) - 4) // 2
    for i in cutlass.range_constexpr(pairs):
        best[i % 4] = ptx.max3(best[i % 4], x[4 + 2 * i], x[5 + 2 * i])
    return cute.arch.fmax(ptx.max3(best[0], best[1], best[2]), best[3])


@cute.jit
def row_sum(x: cute.Tensor, init) -> Float32:
    """`init` plus all registers of `x`, in four independent chains of pairs, in a fixed order."""
    total = [(x[2 * i], x[2 * i + 1]) for i in range(4)]
    total[0] = cute.arch.add_packed_f32x2(total[0], (init, Float32(0.0)))
    for i in cutlass.range_constexpr(4, cute.size(x.shape) // 2):
        total[i % 4] = cute.arch.add_packed_f32x2(total[i % 4], (x[2 * i], x[2 * i + 1]))
    left = cute.arch.add_packed_f32x2(total[0], total[1])
    right = cute.arch.add_packed_f32x2(total[2], total[3])
    both = cute.arch.add_packed_f32x2(left, right)
    return both[0] + both[1]


@cute.jit
def subtract_max(x: cute.Tensor, scale_log2: Float32, maximum: Float32):
    """Replace every register of `x` by ``x * scale_log2 - maximum * scale_log2``.

    The second product is rounded, so the largest exponential is ``2**r`` instead of 1, with r up to
    half a unit of its last place. Sums consist of the same factor, unless it overflows: beyond HUGE
    scores are multiplied by the next power of two instead, which rounds nothing. There the fp32
    scores of two keys are equal, or their exponentials differ so much that only the larger counts.
    """
    steep = next_power_of_two(scale_log2)
    offset = -(maximum * scale_log2)
    huge = cutlass.max(offset, -offset) > HUGE
    scale = cutlass.select_(huge, steep, scale_log2)
    offset = cutlass.select_(huge, -(maximum * steep), offset)
    for i in cutlass.range(0, cute.size(x.shape), 2, unroll_full=True):
        x[i], x[i + 1] = cute.arch.fma_packed_f32x2(
            (x[i], x[i + 1]), (scale, scale), (offset, offset)
        )


def next_power_of_two(x: Float32) -> Float32:
    """The least power of two that is not less than a positive normal `x`."""
    bits = Int32(llvm.bitcast(T.i32(), x.ir_value())) + MANTISSA & ~MANTISSA
    return Float32(llvm.bitcast(T.f32(), bits.ir_value()))


def finite_max(maximum: Float32) -> Float32:
    """What to subtract: a row without a key so far has maximum -inf, and ``-inf - -inf`` is NaN."""
    return cutlass.select_(maximum == -Float32.inf, Float32(0.0), maximum)


@cute.jit
def grow_max(old: Float32, new: Float32, scale_log2: Float32, threshold_log2: cutlass.Constexpr):
    """(maximum to use, factor for what was summed so far) when the row's maximum grows to `new`.

    Within the threshold the old maximum stays: exponentials then reach at most ``2**threshold``,
    and nothing summed so far has to change.  Sum and maximum stay consistent, so the result is
    exact.
    """
    shift = (old - finite_max(new)) * scale_log2  # <= 0
    keep = shift >= -threshold_log2
    return cutlass.select_(keep, old, new), cutlass.select_(keep, Float32(1.0), ptx.ex2_ftz(shift))


def has_keys(total: Float32) -> Boolean:
    """Whether a row saw a key: its sum is positive, or NaN where the inputs were."""
    return total != 0.0


def log_sum_exp(total: Float32, maximum: Float32, scale_log2: Float32) -> Float32:
    """Natural logarithm of the row's sum of exponentials; -inf for a row without a key.

    NaN where a score was: the polynomial of exp2 makes the largest number of it.
    """
    lse = (maximum * scale_log2 + ptx.lg2_ftz(total)) * LN_2
    lse = cutlass.select_(total < LARGEST_TOTAL, lse, Float32(math.nan))
    return cutlass.select_(has_keys(total), lse, -Float32.inf)
