"""Random programs on the native engine and on the numpy engine: the same bits in every register.

Without float arithmetic, because the payload of a NaN is nobody's promise; test_jit_float has it.
"""

from __future__ import annotations

import numpy as np
import pytest

from fa_cute.sim import alu, jit
from tests.sim import jit_tools as t

# %R, %D, %H, %P stand for random 32-, 64-, 16-bit registers and predicates; %I for a constant.
# Some of the numbers that the integers stand for are NaN or overflow in numpy's casts.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

PATTERNS = [
    *(f"{op}.{kind} %R, %R, %X;" for op in ("add", "sub", "min", "max") for kind in ("s32", "u32")),
    *(f"{op}.b32 %R, %R, %X;" for op in ("and", "or", "xor")),
    *(f"{op} %R, %R, %S;" for op in ("shl.b32", "shr.u32", "shr.s32")),
    *(f"{op}.s64 %D, %D, %D;" for op in ("add", "sub", "mul.lo")),
    *(f"{op} %D, %D, %S;" for op in ("shl.b64", "shr.u64", "shr.s64")),
    *(f"{op} %H, %H, %H;" for op in ("add.s16", "sub.s16", "mul.lo.s16", "and.b16", "xor.b16")),
    *(f"{op} %R, %R, %X;" for op in ("mul.lo.s32", "mul.hi.s32", "mul.hi.u32")),
    *(f"{op} %D, %R, %R;" for op in ("mul.wide.s32", "mul.wide.u32")),
    "mad.lo.s32 %R, %R, %X, %R;",
    "mad.wide.u32 %D, %R, %R, %D;",
    "prmt.b32 %R, %R, %R, %R;",
    "lop3.b32 %R, %R, %R, %R, 0x96;",
    "bfe.u32 %R, %R, %S, %S;",
    "popc.b32 %R, %R;",
    "clz.b32 %R, %R;",
    "neg.s32 %R, %R;",
    "not.b32 %R, %R;",
    "neg.f32 %R, %R;",
    "cvt.rn.bf16x2.f32 %R, %R, %R;",
    "cvt.rn.f16x2.f32 %R, %R, %R;",
    "cvt.rn.f32.s32 %R, %R;",
    "cvt.rzi.s32.f32 %R, %R;",
    "cvt.u64.u32 %D, %R;",
    "cvt.s64.s32 %D, %R;",
    "cvt.u32.u64 %R, %D;",
    "cvt.u32.u16 %R, %H;",
    "cvt.u16.u32 %H, %R;",
    "cvt.s32.s8 %R, %R;",
    "mov.b64 %D, {%R, %R};",
    "mov.b64 {%R, %R}, %D;",
    "mov.b32 %R, {%H, %H};",
    "mov.b32 {%H, %H}, %R;",
    "selp.b32 %R, %R, %X, %P;",
    "selp.b64 %D, %D, %D, %P;",
    *(f"setp.{test}.{kind} %P, %R, %X;" for test in ("lt", "ge") for kind in ("s32", "u32")),
    "setp.eq.b32 %P, %R, %R;",
    "setp.lt.f32 %P, %R, %R;",
    "setp.neu.f32 %P, %R, %R;",
    "setp.gt.and.s32 %P|%P, %R, %X, %P;",
    "and.pred %P, %P, %P;",
    "xor.pred %P, %P, %P;",
    "not.pred %P, %P;",
    "vote.sync.ballot.b32 %R, %P, %A;",
    "activemask.b32 %R;",
    "elect.sync %R|%P, %A;",
    "shfl.sync.bfly.b32 %R, %R, 4, 31, %A;",
    "shfl.sync.idx.b32 %R|%P, %R, 3, 31, %A;",
]
UNGUARDED = ("vote", "elect", "shfl")


def random_line(gen: np.random.Generator, mask: int) -> str:
    pattern = PATTERNS[int(gen.integers(len(PATTERNS)))]
    out, used = "", set()
    for i, piece in enumerate(pattern.split("%")):
        if i == 0:
            out += piece
            continue
        kind, rest = piece[0], piece[1:]
        if kind == "X":
            kind = "I" if gen.integers(3) == 0 else "R"
        stem, count = {"R": ("%r", 12), "D": ("%rd", 8), "H": ("%rs", 8), "P": ("%p", 6)}.get(
            kind, ("", 0)
        )
        if stem:
            name = f"{stem}{gen.integers(count)}"
            while name in used and ("|" in rest or "{" in pattern.split(",")[0] or "|" in out[-4:]):
                name = f"{stem}{gen.integers(count)}"  # two results of one instruction differ
            used.add(name)
        else:
            name = {
                "I": str(int(gen.integers(-300, 300))),
                "S": str(int(gen.integers(0, 70))),
                "A": f"{mask:#x}",
            }[kind]
        out += name + rest
    if gen.integers(4) == 0 and not pattern.startswith(UNGUARDED):
        out = f"@{'!' if gen.integers(2) else ''}%p{gen.integers(6)} {out}"
    return out


@pytest.mark.parametrize("mask", [t.FULL, 0x00FFFF00])
@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed, mask):
    gen = np.random.default_rng(seed)
    body = "\n".join(random_line(gen, mask) for _ in range(120))
    head = "\n".join(
        [f"mov.b32 %r{i}, {i};" for i in range(12)]
        + [f"mov.b64 %rd{i}, {i};" for i in range(8)]
        + [f"mov.b16 %rs{i}, {i};" for i in range(8)]
        + [f"setp.eq.b32 %p{i}, %r{i}, 0;" for i in range(6)]
    )
    kernel = t.kernel_of(head + "\nmembar.cta;\n" + body)  # the place where values are put in
    banks = {"r32": t.floats32(gen, 12 * 32), "r64": t.ints(gen, 8 * 32, 64)}
    halves = gen.integers(0, 1 << 16, 8 * 32).astype(np.uint32)
    start = len(head.splitlines())
    results = []
    for engine in (jit, alu):
        core = engine.build(kernel, [start], {}).warp()
        core.start(mask)
        assert core.run() == start << 32 | mask
        for i in range(12):
            t.set_rows_of(kernel, core, f"%r{i}", banks["r32"][32 * i : 32 * i + 32])
        for i in range(8):
            t.set_rows_of(kernel, core, f"%rd{i}", banks["r64"][32 * i : 32 * i + 32])
            t.set_rows_of(kernel, core, f"%rs{i}", halves[32 * i : 32 * i + 32])
        assert core.run() >> 60 == jit.KIND_EXIT
        rows = {n: t.rows_in(kernel, core, n).copy() for n in kernel.regs}
        results.append(rows)
    on = np.array([mask >> i & 1 for i in range(32)], bool)
    lines = body.splitlines()
    for name, native in results[0].items():
        other = results[1][name]
        assert (native[on] == other[on]).all(), (name, [x for x in lines if f" {name}" in x][-4:])
