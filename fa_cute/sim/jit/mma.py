"""mma.sync of f16 or bf16 with fp32 sums, from the lanes' fragments.

In the order of lanes and halves, the registers of a fragment are 8x8 blocks by rows: register q of
A is rows 8(q%2) .. and columns 8(q/2) ..; register q of B is the transposed block of k = 8q ..; and
the pair (2r, 2r+1) of D is rows 8r .., even and odd columns.
"""

from __future__ import annotations

import re

from fa_cute.sim.jit.context import PARTIAL_WARP
from fa_cute.sim.jit.ir import Fn, Val, vec
from fa_cute.sim.jit.registry import Form, Spec, Unsupported, op

_BLOCK = "vector<64xf32>"


def _shuffle(f: Fn, a: Val, b: Val, order: list[int]) -> Val:
    elem = a.elem
    text = f"llvm.shufflevector {a.name}, {b.name} [{', '.join(map(str, order))}] : {a.ty}"
    return f.emit(text, f"vector<{len(order)}x{elem}>")


def _block(f: Fn, slot: int, name: str) -> Val:
    """A register of halves as an 8x8 block of fp32."""
    halves = f.load(f.row(slot), "vector<64xi16>", 64)
    if name == "bf16":
        return halves.int("i32").shl(16).bits("f32")
    return halves.bits("f16").cast("fpext", "f32")


def _product(f: Fn, total: Val, a: Val, b_transposed: Val) -> Val:
    """total + a b, the terms in the order of k."""
    for k in range(8):
        column = _shuffle(f, a, a, [8 * (i // 8) + k for i in range(64)])
        row = _shuffle(f, b_transposed, b_transposed, [8 * (i % 8) + k for i in range(64)])
        total = column.call("fma", row, total)
    return total


@op("mma")
def mma(form: Form) -> Spec:
    shape = next((m for p in form.parts if (m := re.match(r"m16n8k(8|16)$", p))), None)
    if shape is None or form.parts[-4:] not in (
        ("f32", "bf16", "bf16", "f32"),
        ("f32", "f16", "f16", "f32"),
    ):
        raise Unsupported(form.key)
    name = form.parts[-2]
    form.rest("sync", "aligned", shape[0], "row", "col", "f32", name)
    steps = int(shape[1]) // 8
    a_at, b_at = 4, 4 + 2 * steps
    c_at = b_at + steps

    def emit(f: Fn) -> None:
        with f.when(f.mask.ne(-1)):
            f.fail(PARTIAL_WARP, f.const(0, "i32"), f.const(0, "i64"))
        b = [_block(f, b_at + q, name) for q in range(steps)]
        results = []
        for half in range(2):
            total = f.const(0.0, _BLOCK)
            for q in range(steps):
                total = _product(f, total, _block(f, a_at + 2 * q + half, name), b[q])
            for odd in range(2):
                part = _shuffle(f, total, total, [2 * i + odd for i in range(32)])
                results.append(part + f.load(f.row(c_at + 2 * half + odd), vec("f32"), 64))
        for index, value in enumerate(results):
            f.out(index, value)
        f.set_field("mma_flops", f.field("mma_flops") + 2 * 16 * 8 * 8 * steps)
        f.done()

    halves = ["i32"] * (3 * steps)
    return Spec((*["=f32"] * 4, *halves, *["f32"] * 4), emit)
