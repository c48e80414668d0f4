"""Instructions the DSL has no word for: one typed function each, and nothing else.

Every function is a single PTX statement (or two that form one idiom), keeps the operand order of
the PTX ISA, and has a test of its own.  Pure functions have no side effects, so the compiler may
schedule and merge them; fences are volatile.
"""

from __future__ import annotations

from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


def _asm(result, operands, text, constraints, *, volatile=False, loc=None, ip=None):
    """One inline statement; ``$0`` is the result, operands follow."""
    return llvm.inline_asm(
        result,
        operands,
        text,
        constraints,
        has_side_effects=volatile,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


def _f32(x, loc, ip):
    return Float32(x).ir_value(loc=loc, ip=ip)


@dsl_user_op
def max3(a, b, c, *, loc=None, ip=None) -> Float32:
    """``max(a, b, c)`` in one instruction (three operands: sm_100 and later); a NaN is ignored."""
    return Float32(
        _asm(
            T.f32(),
            [_f32(a, loc, ip), _f32(b, loc, ip), _f32(c, loc, ip)],
            "max.f32 $0, $1, $2, $3;",
            "=f,f,f,f",
            loc=loc,
            ip=ip,
        )
    )


@dsl_user_op
def ex2_ftz(x, *, loc=None, ip=None) -> Float32:
    """``2 ** x`` on the special function unit, at most 2 ulp off; subnormals become 0."""
    return Float32(
        _asm(T.f32(), [_f32(x, loc, ip)], "ex2.approx.ftz.f32 $0, $1;", "=f,f", loc=loc, ip=ip)
    )


@dsl_user_op
def lg2_ftz(x, *, loc=None, ip=None) -> Float32:
    """``log2(x)`` on the special function unit; 0 gives ``-inf``."""
    return Float32(
        _asm(T.f32(), [_f32(x, loc, ip)], "lg2.approx.ftz.f32 $0, $1;", "=f,f", loc=loc, ip=ip)
    )


@dsl_user_op
def add_exponent(fraction, exponent_bits, *, loc=None, ip=None) -> Float32:
    """``fraction * 2 ** n`` for a normal result; ``n`` is in the low bits of ``exponent_bits``.

    ``exponent_bits`` is ``1.5 * 2**23 + n``: shifted left by 23 its low bits fall on the exponent
    field and everything above is lost.  ptxas makes one LEA of the pair.
    """
    return Float32(
        _asm(
            T.f32(),
            [_f32(fraction, loc, ip), _f32(exponent_bits, loc, ip)],
            "{\n.reg .b32 n;\nshl.b32 n, $2, 23;\nadd.s32 $0, $1, n;\n}",
            "=f,f,f",
            loc=loc,
            ip=ip,
        )
    )


@dsl_user_op
def low_ones(absent, *, loc=None, ip=None) -> Int32:
    """Word whose low ``32 - absent`` bits are set; from 32 absent bits on it is 0."""
    return Int32(
        _asm(
            T.i32(),
            [Int32(absent).ir_value(loc=loc, ip=ip)],
            "shr.u32 $0, 0xffffffff, $1;",
            "=r,r",
            loc=loc,
            ip=ip,
        )
    )


@dsl_user_op
def high_ones(absent, *, loc=None, ip=None) -> Int32:
    """Word whose high ``32 - absent`` bits are set; from 32 absent bits on it is 0."""
    return Int32(
        _asm(
            T.i32(),
            [Int32(absent).ir_value(loc=loc, ip=ip)],
            "shl.b32 $0, 0xffffffff, $1;",
            "=r,r",
            loc=loc,
            ip=ip,
        )
    )


@dsl_user_op
def arrive_elected(barrier, *, loc=None, ip=None) -> None:
    """One lane of the converged warp arrives once on an mbarrier of this CTA.

    The DSL's arrive takes the count in a register and its election is a branch: two instructions
    more for each of the many arrivals.
    """
    _asm(
        None,
        [barrier.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)],
        "{\n.reg .pred leader;\nelect.sync _|leader, -1;\n"
        "@leader mbarrier.arrive.shared::cta.b64 _, [$0];\n}",
        "r",
        volatile=True,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def unknown_zero(*, loc=None, ip=None) -> Int32:
    """0 in a converged warp: the elected lane's number shifted out, which no compiler sees.

    What is computed with it is computed here, not ahead of a loop where it would hold registers.
    """
    text = "{\n.reg .pred leader;\nelect.sync $0|leader, -1;\nshr.u32 $0, $0, 5;\n}"
    return Int32(_asm(T.i32(), [], text, "=r", volatile=True, loc=loc, ip=ip))


@dsl_user_op
def tcgen05_fence_before(*, loc=None, ip=None) -> None:
    """Order this thread's finished tensor-memory accesses before the arrive that follows."""
    _asm(None, [], "tcgen05.fence::before_thread_sync;", "", volatile=True, loc=loc, ip=ip)


@dsl_user_op
def tcgen05_fence_after(*, loc=None, ip=None) -> None:
    """Order the tensor-memory accesses that follow after the wait that has just succeeded."""
    _asm(None, [], "tcgen05.fence::after_thread_sync;", "", volatile=True, loc=loc, ip=ip)
