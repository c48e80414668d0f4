"""Additions to global memory: one vector from registers, or a chunk of shared memory in bulk; and
a chunk that is stored.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


def _asm(operands, text, constraints, loc, ip) -> None:
    llvm.inline_asm(
        None,
        operands,
        text,
        constraints,
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def bulk_add_f32(dst: cute.Pointer, src: cute.Pointer, num_bytes, *, loc=None, ip=None) -> None:
    """Add ``num_bytes`` of fp32 in shared memory to global memory, asynchronously, in the thread's
    bulk group.

    Both pointers 16-byte aligned; each element is one relaxed atomic add (PTX ISA,
    cp.reduce.async.bulk).
    """
    text = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], $2;"
    _asm(_chunk(dst, src, num_bytes, loc, ip), text, "l,r,r", loc, ip)


@dsl_user_op
def bulk_store(dst: cute.Pointer, src: cute.Pointer, num_bytes, *, loc=None, ip=None) -> None:
    """The same without adding (PTX ISA, cp.async.bulk)."""
    text = "cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2;"
    _asm(_chunk(dst, src, num_bytes, loc, ip), text, "l,r,r", loc, ip)


def _chunk(dst: cute.Pointer, src: cute.Pointer, num_bytes, loc, ip) -> list:
    """Operands of a bulk operation from shared to global memory."""
    return [
        dst.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
        src.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
        Int32(num_bytes).ir_value(loc=loc, ip=ip),
    ]


@dsl_user_op
def add_f32x4(dst: cute.Pointer, a, b, c, d, *, loc=None, ip=None) -> None:
    """Add four fp32 values to 16 aligned bytes of global memory; relaxed, at gpu scope (sm_90)."""
    operands = [dst.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)]
    operands += [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c, d)]
    _asm(
        operands, "red.relaxed.gpu.global.add.v4.f32 [$0], {$1, $2, $3, $4};", "l,f,f,f,f", loc, ip
    )
