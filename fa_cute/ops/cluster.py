"""Instructions that reach another CTA of the cluster: one typed function each."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


def _asm(result, operands, text, constraints, volatile, loc, ip):
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


@dsl_user_op
def map_address(address, rank, *, loc=None, ip=None) -> Int32:
    """The address in the shared memory of CTA `rank` that `address` is in ours."""
    operands = [Int32(x).ir_value(loc=loc, ip=ip) for x in (address, rank)]
    text = "mapa.shared::cluster.u32 $0, $1, $2;"
    return Int32(_asm(T.i32(), operands, text, "=r,r,r", False, loc, ip))


@dsl_user_op
def store_b32x4(address, a, b, c, d, *, loc=None, ip=None) -> None:
    """Write 16 bytes to shared memory of the cluster, at an address of `map_address`."""
    operands = [Int32(x).ir_value(loc=loc, ip=ip) for x in (address, a, b, c, d)]
    text = "st.shared::cluster.v4.b32 [$0], {$1, $2, $3, $4};"
    _asm(None, operands, text, "r,r,r,r,r", True, loc, ip)


@dsl_user_op
def copy_bytes(dst, src: cute.Pointer, num_bytes, barrier, *, loc=None, ip=None) -> None:
    """Copy shared memory to another CTA, asynchronously; its mbarrier counts the bytes.

    ``dst`` and ``barrier``: addresses of `map_address`; all in multiples of 16 bytes.
    """
    here = src.toint(loc=loc, ip=ip)
    operands = [Int32(x).ir_value(loc=loc, ip=ip) for x in (dst, here, num_bytes, barrier)]
    text = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
    _asm(None, operands, f"{text} [$0], [$1], $2, [$3];", "r,r,r,r", True, loc, ip)
