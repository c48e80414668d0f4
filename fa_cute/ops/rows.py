"""Softmax on rows that four neighbouring threads of a warp share (wgmma accumulators).

A thread holds two rows: accumulator register 4 j + 2 h + i is row h, column 8 j + 2 (t % 4) + i
(and eight rows further down for h = 1).

Online softmax needs some reference m per row so that exp2(s - m) neither overflows nor vanishes; it
need not be the running maximum. `begin` takes the maximum of the row's first block. `extend` keeps
that reference: it makes P at once, without looking for a maximum, without talking to the
neighbours and without touching O, and only compares the block's sum of P with a limit. Where a
sum exceeds the limit (or is not a number, as with no reference yet), `restart` takes the new
maximum and rescales. The result is the same softmax: a common factor of P, of its sum and of O
cancels at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import T, dsl_user_op

from . import ptx
from .score import LN_2

ROWS = 2  # of one thread
QUAD = 4  # threads that share a row

# Largest sum of P over one thread's part of a block's row that keeps the reference: P fits in fp16
# (65504), and O, which is P V before the division, in fp32 with V up to 2^100.
SUM_LIMIT = 2.0**14


@dsl_user_op
def pack(low, high, dtype, *, loc=None, ip=None) -> Int32:
    """Two fp32 values rounded to a pair of 16-bit ones in one register."""
    kind = "bf16x2" if dtype is BFloat16 else "f16x2"
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [Float32(high).ir_value(loc=loc, ip=ip), Float32(low).ir_value(loc=loc, ip=ip)],
            f"cvt.rn.{kind}.f32 $0, $1, $2;",
            "=r,f,f",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


@dsl_user_op
def fma(a, b, c, *, loc=None, ip=None) -> Float32:
    """a * b + c, rounded once."""
    return Float32(
        llvm.inline_asm(
            T.f32(),
            [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c)],
            "fma.rn.f32 $0, $1, $2, $3;",
            "=f,f,f,f",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


@dsl_user_op
def pinned(x, *, loc=None, ip=None):
    """A copy of an Int32 or Float32 that is made here: neither it nor what it waits for crosses a
    wait for wgmma, in the compiler's hands, that stands before or after it.

    The compiler does not know that a wgmma still reads its operands after it was issued. Without
    this it would compute the next left operand in the very registers that the tensor core is
    reading.
    """
    kind = type(x)
    letter = "f" if kind is Float32 else "r"
    return kind(
        llvm.inline_asm(
            kind.mlir_type,
            [x.ir_value(loc=loc, ip=ip)],
            "mov.b32 $0, $1;",
            f"={letter},{letter}",
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


@cute.jit
def quad_max(x: Float32, scale: Scale) -> Float32:
    """The product of the largest score over the four threads of a row."""
    x = scale.larger(x, cute.arch.shuffle_sync_bfly(x, offset=1))
    return scale.larger(x, cute.arch.shuffle_sync_bfly(x, offset=2))


@cute.jit
def quad_sum(x: Float32) -> Float32:
    """Sum over the four threads of a row."""
    x = x + cute.arch.shuffle_sync_bfly(x, offset=1)
    return x + cute.arch.shuffle_sync_bfly(x, offset=2)


@dataclass(frozen=True)
class Scale:
    """The factor from a product q k to log2 units, and what follows from its sign: which of two
    products is the larger score, and which one stands for no key.
    """

    log2: Any  # Float32, of that sign
    negative: bool = False  # known while tracing

    @property
    def unseen(self) -> Float32:
        """A product whose score is -inf."""
        return Float32.inf if self.negative else -Float32.inf

    def larger(self, a: Float32, b: Float32) -> Float32:
        """The product with the larger score."""
        return cute.arch.fmin(a, b) if self.negative else cute.arch.fmax(a, b)


@cute.jit
def mask(acc: cute.Tensor, limits, first_column, scale: Scale):
    """No score outside columns [lo, hi) = ``limits[h]`` of each row h; ``first_column`` is the one
    of register 0.

    ``lo`` None: no lower bound.
    """
    n = const_expr(cute.size(acc.shape) // (2 * ROWS))
    for h in cutlass.range_constexpr(ROWS):
        k_lo, k_hi = limits[h]
        end = k_hi - first_column
        start = 0 if const_expr(k_lo is None) else k_lo - first_column
        for j in cutlass.range_constexpr(n):
            for i in cutlass.range_constexpr(2):
                r = const_expr(4 * j + 2 * h + i)
                column = const_expr(8 * j + i)
                keep = column < end
                if const_expr(k_lo is not None):
                    keep = keep & (column >= start)
                acc[r] = acc[r] if keep else scale.unseen


@cute.jit
def exponentials(acc: cute.Tensor, p: cute.Tensor, scale: Scale, reference, dtype):
    """P = exp2(S * scale - reference) in 16 bits; returns this thread's sums of the two rows.

    ``p``: the left operand's registers as Int32 pairs.
    """
    minus = [-reference[0], -reference[1]]
    sums = [None, None]
    for r in cutlass.range_constexpr(cute.size(acc.shape) // 2):
        h = const_expr(r % 2)
        low = ptx.ex2_ftz(fma(acc[2 * r], scale.log2, minus[h]))
        high = ptx.ex2_ftz(fma(acc[2 * r + 1], scale.log2, minus[h]))
        sums[h] = (low + high) if const_expr(sums[h] is None) else sums[h] + low + high
        p[r] = pack(low, high, dtype)
    return sums[0], sums[1]


@cute.jit
def maxima(acc: cute.Tensor, scale: Scale):
    """Products of the rows' largest scores in a block, the same in all four threads of a row."""
    n = const_expr(cute.size(acc.shape) // (2 * ROWS))
    found = []
    for h in cutlass.range_constexpr(ROWS):
        even, odd = acc[2 * h], acc[2 * h + 1]
        for j in cutlass.range_constexpr(1, n):
            even = scale.larger(even, acc[4 * j + 2 * h])
            odd = scale.larger(odd, acc[4 * j + 2 * h + 1])
        found.append(quad_max(scale.larger(even, odd), scale))
    return found[0], found[1]


@cute.jit
def finite(reference: Float32) -> Float32:
    """0 where there is no reference (-inf: no key seen), so that exp2(-inf - 0) is 0."""
    return Float32(0.0) if reference == -Float32.inf else reference


@cute.jit
def begin(acc: cute.Tensor, p: cute.Tensor, scale: Scale, dtype):
    """First block of the rows: P, and the state (references, sums) of the rows.

    A row that sees no key of the block has reference -inf and sum 0.
    """
    m = maxima(acc, scale)
    ref = (m[0] * scale.log2, m[1] * scale.log2)
    sums = exponentials(acc, p, scale, (finite(ref[0]), finite(ref[1])), dtype)
    return ref[0], ref[1], sums[0], sums[1]


@cute.jit
def restart(acc: cute.Tensor, p: cute.Tensor, o: cute.Tensor, scale: Scale, ref, sums, dtype):
    """P with the running maximum as new reference; O and the old sums are rescaled to it."""
    m = maxima(acc, scale)
    new = [cute.arch.fmax(ref[h], m[h] * scale.log2) for h in range(ROWS)]
    safe = [finite(new[0]), finite(new[1])]
    factor = [ptx.ex2_ftz(ref[h] - safe[h]) for h in range(ROWS)]
    part = exponentials(acc, p, scale, safe, dtype)
    for j in cutlass.range_constexpr(cute.size(o.shape) // (2 * ROWS)):
        for h in cutlass.range_constexpr(ROWS):
            for i in cutlass.range_constexpr(2):
                o[4 * j + 2 * h + i] = o[4 * j + 2 * h + i] * factor[h]
    return new[0], new[1], fma(sums[0], factor[0], part[0]), fma(sums[1], factor[1], part[1])


@cute.jit
def extend(acc: cute.Tensor, p: cute.Tensor, scale: Scale, state, dtype):
    """P of a further block by the references that the rows have; returns the sums of this block."""
    return exponentials(acc, p, scale, (state[0], state[1]), dtype)


@cute.jit
def accept(acc: cute.Tensor, p: cute.Tensor, o: cute.Tensor, scale: Scale, state, part, dtype):
    """Take what `extend` made, or `restart` where a sum is too large; returns the new state.

    Only the latter touches O. The choice is a warp's: every lane keeps its references, or none.
    """
    ref0, ref1, sum0, sum1 = state
    fits = (part[0] <= SUM_LIMIT) & (part[1] <= SUM_LIMIT)  # false for NaN
    if cute.arch.vote_all_sync(fits):
        sum0 = sum0 + part[0]
        sum1 = sum1 + part[1]
    else:
        warpgroup.wait_group(0)  # a product with O may still be in flight
        ref0, ref1, sum0, sum1 = restart(acc, p, o, scale, (ref0, ref1), (sum0, sum1), dtype)
    return ref0, ref1, sum0, sum1


@cute.jit
def finish(state):
    """Factors of O and the natural-log LSE of both rows, the same in all four threads of a row."""
    ref0, ref1, sum0, sum1 = state
    total = [quad_sum(sum0), quad_sum(sum1)]
    refs = [ref0, ref1]
    factor, lse = [], []
    for h in cutlass.range_constexpr(ROWS):
        none = total[h] == 0.0
        factor.append(Float32(0.0) if none else cute.arch.rcp_approx(total[h]))
        lse.append(-Float32.inf if none else (refs[h] + ptx.lg2_ftz(total[h])) * LN_2)
    return factor[0], factor[1], lse[0], lse[1]
