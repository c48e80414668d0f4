"""Base-2 exponentials of a row, some on the special function unit, some as a polynomial.

The special function unit gives 16 results per clock and SM on sm_100, the multiply-add units have
slots to spare, so a fraction of every row is computed there (Cody-Waite: split into integer and
fraction, polynomial for the fraction, integer into the exponent field).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from . import ptx

# 2**t on [0, 1) with p(0) = 1, so that the largest exponential of a row is exact where it is the
# reference. The largest relative error, 8.56e-5 (below half a bf16 ulp, 2**-9), is the least
# possible; p(0) = 1 - 7.5e-5 would make it 7.5e-5. Mean 7.5e-6: the bias of a sum.
POLY3 = (1.0, 0.69511678, 0.227644993, 0.0770670426)
ROUND_DOWN = float(3 << 22)  # 1.5 * 2**23: adding it rounding down leaves floor(x) in the low bits
SMALLEST = -127.0  # exponent field 0: an input of -inf becomes exactly +0


def exp2_pair(x, y):
    """``(2**x, 2**y)`` for x, y <= 127 by polynomial; 0 below -127; a NaN stays not finite."""
    x, y = cute.arch.fmax(x, SMALLEST, nan=True), cute.arch.fmax(y, SMALLEST, nan=True)
    bits = cute.arch.add_packed_f32x2((x, y), (ROUND_DOWN, ROUND_DOWN), rnd="rm")
    floor = cute.arch.add_packed_f32x2(bits, (-ROUND_DOWN, -ROUND_DOWN))
    t = cute.arch.sub_packed_f32x2((x, y), floor)
    p = (Float32(POLY3[3]), Float32(POLY3[3]))
    for c in POLY3[2::-1]:
        p = cute.arch.fma_packed_f32x2(p, t, (Float32(c), Float32(c)))
    return ptx.add_exponent(p[0], bits[0]), ptx.add_exponent(p[1], bits[1])


@cute.jit
def exp2_group(
    x: cute.Tensor, split: cutlass.Constexpr, first: cutlass.Constexpr, count: cutlass.Constexpr
):
    """Replace registers ``[first, first + 32)`` of the `count` in `x` by their exponentials."""
    for i in cutlass.range_constexpr(first, first + 32, 2):
        if const_expr(split.polynomial(i, count)):
            x[i], x[i + 1] = exp2_pair(x[i], x[i + 1])
        else:
            x[i] = ptx.ex2_ftz(x[i])
            x[i + 1] = ptx.ex2_ftz(x[i + 1])
