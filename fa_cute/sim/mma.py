"""mma.sync: the warp-wide matrix multiplication of sm_80 and later."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from fa_cute.errors import UnknownInstructionError
from fa_cute.sim import layouts
from fa_cute.sim.handlers import handles
from fa_cute.sim.ptx import Imm, Vec
from fa_cute.sim.tmem_ops import register_rows, whole_warp

if TYPE_CHECKING:
    from fa_cute.sim.ptx import Instr

_SHAPE = re.compile(r"m16n8k(\d+)$")


@handles("mma.sync")
def bind_mma(ins: Instr, k):
    """D = A B + C for m16n8kK: f16, bf16, tf32, fp8 and int8 operands."""
    shape = next((m for p in ins.parts if (m := _SHAPE.match(p))), None)
    types = [p for p in ins.parts if p in layouts.ELEM_BYTES or p in ("f32", "s32")]
    if shape is None or len(types) != 4 or ins.has("sp") or ins.has("block_scale"):
        raise UnknownInstructionError(f"{ins.where}: {ins.op}: only dense m16n8kK is modelled")
    d_type, a_type, b_type, c_type = types
    size = layouts.ELEM_BYTES[a_type]
    d_rows, a_rows, b_rows = (list(register_rows(op)) for op in ins.operands[:3])
    c_operand = ins.operands[3]
    if int(shape[1]) * size // 8 != len(a_rows) or len(b_rows) * 2 != len(a_rows):
        raise UnknownInstructionError(f"{ins.where}: {ins.op}: {len(a_rows)} registers of A")
    c_rows, c_fixed = _accumulator(c_operand, c_type)

    def step(warp, mask):
        whole_warp(mask, warp, ins)
        regs = warp.r32
        a = layouts.to_float32(layouts.fragment_to_a(regs[a_rows][None], size), a_type)
        b = layouts.to_float32(layouts.fragment_to_b(regs[b_rows], size), b_type)
        product = layouts.d_to_fragment(a @ b)[0]
        warp.machine.counters["mma.flops"] += 2 * a.size * 8
        old = regs[c_rows] if c_fixed is None else c_fixed
        regs[d_rows] = _add(product, old, d_type, c_type, ins.has("satfinite"))

    return step


def _accumulator(operand, c_type: str):
    """Rows of C, or its value where it is given as constants."""
    items = operand.items if isinstance(operand, Vec) else (operand,)
    if all(isinstance(item, Imm) for item in items):
        bits = np.array([item.bits & 0xFFFFFFFF for item in items], np.uint32)
        return None, np.repeat(bits[:, None], 32, axis=1)
    return list(register_rows(operand)), None


def _add(product, old, d_type: str, c_type: str, saturate: bool) -> np.ndarray:
    if c_type == "s32":
        total = product.astype(np.int64) + old.view(np.int32)
        if saturate:
            total = np.clip(total, -(2**31), 2**31 - 1)
        return total.astype(np.uint32)
    if c_type == "f16":
        total = product + layouts.unpack_halves(old).view(np.float16).astype(np.float32)
    else:
        total = product + old.view(np.float32)
    if d_type == "f16":
        return layouts.pack_halves(total.astype(np.float16).view(np.uint16))
    return total.view(np.uint32)
