"""Matrix products on the fifth-generation tensor core (tcgen05.mma), operands in SMEM or TMEM.

The DSL's `cute.gemm` elects a thread and rebuilds two 64-bit descriptors for every K step, and the
compiler keeps them all in registers.  Here one product is one block of PTX: the descriptors'
constant halves are immediates, a K step adds an immediate to the variable half.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.cutlass_dsl import T, dsl_user_op
from cutlass.utils import blackwell_helpers

# PTX ISA, shared-memory matrix descriptor: swizzle code in bits 61-63 by the log2 of 16-byte pieces
# in the pattern's row, and the constant 1 in bits 46-48.
SWIZZLE_CODE = {0: 0, 1: 6, 2: 4, 3: 2}
VERSION_HI = 1 << 14
# PTX ISA, instruction descriptor for kind::f16.
D_FP32 = 1 << 4
A_BF16, B_BF16 = 1 << 7, 1 << 10
NEGATE_A = 1 << 13
A_MN_MAJOR, B_MN_MAJOR = 1 << 15, 1 << 16


CTA_GROUPS = {1: tcgen05.CtaGroup.ONE, 2: tcgen05.CtaGroup.TWO}


def mma_ss(element, tile_mn, a_mn_major: bool = False, b_mn_major: bool = False, ctas: int = 1):
    """``D = A B^T`` with both operands in SMEM, fp32 accumulator; K-major unless said otherwise.

    `ctas`: how many make the product together; `tile_mn` is theirs in all.
    """
    return blackwell_helpers.make_trivial_tiled_mma(
        element,
        element,
        OperandMajorMode.MN if a_mn_major else OperandMajorMode.K,
        OperandMajorMode.MN if b_mn_major else OperandMajorMode.K,
        Float32,
        CTA_GROUPS[ctas],
        tile_mn,
    )


def mma_ts(element, tile_mn, ctas: int = 1):
    """``D = A B`` with A in TMEM and B (K x N) contiguous along N in SMEM, fp32 accumulator."""
    return blackwell_helpers.make_trivial_tiled_mma(
        element,
        element,
        OperandMajorMode.K,
        OperandMajorMode.MN,
        Float32,
        CTA_GROUPS[ctas],
        tile_mn,
        tcgen05.OperandSource.TMEM,
    )


def instruction_descriptor(
    element, m: int, n: int, a_mn_major: bool = False, b_mn_major: bool = False
) -> int:
    """Types, shape and majors of one instruction; D is fp32."""
    bf16 = A_BF16 | B_BF16 if element is cutlass.BFloat16 else 0
    major = (A_MN_MAJOR if a_mn_major else 0) | (B_MN_MAJOR if b_mn_major else 0)
    return D_FP32 | bf16 | major | (n >> 3) << 17 | (m >> 4) << 24


@dataclass(frozen=True)
class SmemOperand:
    """A staged operand as descriptors: units are 16 bytes, as in the descriptor."""

    lo: Int32  # start address of slot 0 and leading byte offset
    hi: int  # stride byte offset, version, swizzle
    k_steps: tuple[int, ...]  # from the slot's start to each K step
    slot_step: int

    def at(self, slot) -> Int32:
        """The variable half for one slot."""
        return self.lo + slot * self.slot_step

    def steps(self, first: int, last: int) -> SmemOperand:
        """Only K steps ``[first, last)``."""
        return replace(self, k_steps=self.k_steps[first:last])


def smem_operand(sX: cute.Tensor, fragment: cute.Tensor, layout) -> SmemOperand:
    """Descriptors of operand `sX` (MMA, MMA_MN, MMA_K, SLOT); `layout` is its composed layout.

    The K steps are those of the DSL's own `fragment` of the operand.
    """
    (mn, _), *_ = layout.outer.shape
    (mn_stride, k_stride), *_ = layout.outer.stride
    if isinstance(
        mn, tuple
    ):  # MN-major: 64 (or fewer) contiguous elements, then the next such column
        sbo, lbo = 8 * k_stride, mn_stride[1]
    elif mn_stride == 1:  # MN-major, one column
        sbo, lbo = 8 * k_stride, 0
    else:  # K-major: eight rows, then the next eight; one pattern covers the K step
        sbo, lbo = 8 * mn_stride, 0
    units = sX.element_type.width // 8
    lbo_field, sbo_field = (lbo * units) >> 4, (sbo * units) >> 4
    start = (sX.iterator.toint() & 0x3FFFF) >> 4
    hi = sbo_field | VERSION_HI | SWIZZLE_CODE[layout.inner.num_bits] << 29
    k_layout = cute.select(fragment.layout, mode=[2])
    steps = tuple(k_layout(k) for k in range(cute.size(k_layout)))
    return SmemOperand(start | (lbo_field << 16), hi, steps, fragment.layout.stride[-1])


def _issue(a_hi, a_steps, b_hi: int, b_steps, first_adds: bool, ctas: int) -> str:
    """PTX of one product.  $0 D, $1 A, $2 B, $3 instruction descriptor, $4 whether step 0 adds.

    The elected lane's number shifted out is 0, which the compiler does not know: otherwise it would
    keep the descriptors of all K steps for the next product with the same operand, more than the
    warp's registers.
    """
    lines = [
        ".reg .pred leader, adds;",
        ".reg .b32 zero, a_lo, b_lo, lo, a_hi, b_hi;",
        ".reg .b64 a, b;",
        "elect.sync zero|leader, -1;",
        "shr.u32 zero, zero, 5;",
        "add.s32 b_lo, $2, zero;",
        f"mov.b32 b_hi, {b_hi:#x};",
        "setp.ne.b32 adds, $4, 0;",
    ]
    if a_hi is not None:
        lines += ["add.s32 a_lo, $1, zero;", f"mov.b32 a_hi, {a_hi:#x};"]
    for i, (a_step, b_step) in enumerate(zip(a_steps, b_steps, strict=True)):
        a_operand = f"[$1 + {a_step}]"  # tensor memory
        if a_hi is not None:
            lines += [f"add.s32 lo, a_lo, {a_step};", "mov.b64 a, {lo, a_hi};"]
            a_operand = "a"
        lines += [f"add.s32 lo, b_lo, {b_step};", "mov.b64 b, {lo, b_hi};"]
        adds = "adds" if i == 0 and not first_adds else "1"
        lines.append(
            f"@leader tcgen05.mma.cta_group::{ctas}.kind::f16 [$0], {a_operand}, b, $3, {adds};"
        )
    return "{\n" + "\n".join(lines) + "\n}"


@dsl_user_op
def _product(text: str, d, a, b, idesc, adds, *, loc=None, ip=None) -> None:
    operands = [Int32(x).ir_value(loc=loc, ip=ip) for x in (d, a, b, idesc, adds)]
    llvm.inline_asm(
        None,
        operands,
        text,
        "r,r,r,r,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def anew(idesc, *, loc=None, ip=None) -> Int32:
    """A run-time instruction descriptor, in the compiler's eyes another value at each call.

    An instruction takes it as half of a 64-bit pair. The compiler makes a pair for each instruction
    of a loop and keeps them all in registers, unless the value is made in the loop.
    """
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [Int32(idesc).ir_value(loc=loc, ip=ip)],
            "{\n.reg .pred leader;\n.reg .b32 zero;\n"
            "elect.sync zero|leader, -1;\nshr.u32 zero, zero, 5;\nadd.s32 $0, $1, zero;\n}",
            "=r,r",
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


def product_ss(
    d, a: SmemOperand, a_slot, b: SmemOperand, b_slot, idesc, adds=0, ctas: int = 1
) -> None:
    """Whole warp: issue ``D (+)= A B^T`` from SMEM, all K steps; the caller commits.

    `adds` (0 or 1) is about K step 0; later steps always add.
    """
    text = _issue(a.hi, a.k_steps, b.hi, b.k_steps, False, ctas)
    _product(text, d, a.at(a_slot), b.at(b_slot), idesc, adds)


def product_ts(
    d, a_columns, b: SmemOperand, b_slot, idesc, adds, k_start: int = 0, ctas: int = 1
) -> None:
    """Whole warp: issue ``D (+)= A B`` with A in TMEM, K steps from `k_start` on.

    `a_columns`: the column of A for each of these steps (a step of a 16-bit A takes 8).  `adds` (0
    or 1) is about K step 0; later steps always add.
    """
    steps = b.k_steps[k_start : k_start + len(a_columns)]
    text = _issue(None, a_columns, b.hi, steps, k_start > 0, ctas)
    _product(text, d, 0, b.at(b_slot), idesc, adds)


def packed_columns(start: int, first_step: int, last_step: int) -> range:
    """Columns of K steps ``[first_step, last_step)`` of a 16-bit operand at column `start`."""
    return range(start + 8 * first_step, start + 8 * last_step, 8)
