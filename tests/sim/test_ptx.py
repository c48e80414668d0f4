"""The PTX reader: scopes, labels, operands, directives; and what the DSL really emits."""

from __future__ import annotations

import pytest

from fa_cute.sim import ptx
from fa_cute.sim.ptx import Bank, Imm, Label, Mem, Not, Pair, Reg, Special, Sym, Vec

HEADER = ".version 8.8\n.target sm_100a\n.address_size 64\n"
KERNEL = (
    HEADER
    + """
.extern .shared .align 1024 .b8 dyn[];
.visible .entry k(
    .param .align 64 .b8 k_map[128],
    .param .u32 k_n,
    .param .align 4 .b8 k_tail[12],
    .param .u64 .ptr .global .align 16 k_ptr
)
.reqntid 128, 1, 1
.reqnctapercluster 2, 1, 1
{
    .reg .pred %p<4>;
    .reg .b16 %rs<3>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<5>;
    .shared .align 8 .b8 bars[16];
    .loc 1 10 0
    ld.param.b32 %r1, [k_n+4]; mov.b64 %rd1, k_map; // a comment; with a semicolon
    /* another
       comment */
    mov.b32 %r2, %tid.x;;
    setp.lt.s32 %p1|%p2, %r1, -1;
    .loc 1 11 3
    @!%p1 bra $L__exit;
    mov.b64 {_, %r3}, %rd1;
    add.f32 %r4, %r3, 0fFF800000;
    { .reg .pred P1; .reg .b32 a, x_<2>;
    WAIT:
    mbarrier.try_wait.parity.shared.b64 P1, [%r2+-8], %r1, 10000000;
    @P1 bra.uni DONE;
    bra.uni WAIT;
    DONE: mov.b32 x_1, a;
    }
    { .reg .pred P1;
    WAIT:
    mbarrier.try_wait.parity.shared.b64 P1, [ dyn + 0x10 ], 0x1, 1;
    @P1 bra.uni DONE;
    bra.uni WAIT;
    DONE:
    }
    .reg .b32 late;
    mov.b32 late, 1;
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
        [%r1], [%rd1, {%r2, %r3}], [%r4];
    selp.b32 %r5, 1, 0, %p2;
    and.pred %p3, %p1, !%p2;
$L__exit:
    ret;
}
.file 1 "/somewhere/kernel.py"
"""
)


@pytest.fixture(scope="module")
def kernel() -> ptx.Kernel:
    return ptx.parse(KERNEL).kernels["k"]


def find(kernel: ptx.Kernel, op: str) -> ptx.Instr:
    return next(i for i in kernel.instrs if i.op.startswith(op))


def test_parameters_are_laid_out_with_their_alignment(kernel):
    assert [(p.name, p.size, p.offset) for p in kernel.params] == [
        ("k_map", 128, 0),
        ("k_n", 4, 128),
        ("k_tail", 12, 132),
        ("k_ptr", 8, 144),
    ]
    assert kernel.param_bytes == 152


def test_launch_bounds_and_shared_variables(kernel):
    assert kernel.reqntid == (128, 1, 1)
    assert kernel.cluster == (2, 1, 1)
    assert kernel.shared["dyn"].extern and kernel.shared["dyn"].align == 1024
    assert (kernel.shared["bars"].size, kernel.shared["bars"].align) == (16, 8)


def test_operands(kernel):
    load = kernel.instrs[0]
    assert load.operands[1] == Mem(Sym("k_n"), 4, None)
    assert kernel.instrs[1].operands[1] == Sym("k_map")
    assert kernel.instrs[2].operands[1] == Special("%tid.x")
    compare = find(kernel, "setp")
    assert isinstance(compare.operands[0], Pair)
    assert (
        compare.operands[2] == Imm(0xFFFFFFFFFFFFFFFF, False, "-1")
        and compare.operands[2].signed == -1
    )
    unpack = [i for i in kernel.instrs if i.op == "mov.b64"][1]
    assert isinstance(unpack.operands[0], Vec) and unpack.operands[0].items[0].is_sink
    assert find(kernel, "add.f32").operands[2].bits == 0xFF800000
    load_tile = find(kernel, "cp.async.bulk.tensor")
    assert load_tile.has("mbarrier::complete_tx::bytes")
    assert [r.name for r in load_tile.operands[1].coords.items] == ["%r2", "%r3"]
    assert isinstance(find(kernel, "and.pred").operands[2], Not)


def test_scopes_have_their_own_registers_and_labels(kernel):
    first, second = (i for i in kernel.instrs if i.op.startswith("mbarrier"))
    assert first.operands[0] != second.operands[0]
    assert first.operands[1].offset == -8
    assert second.operands[1] == Mem(Sym("dyn"), 16, None)
    for wait in (first, second):
        at = kernel.instrs.index(wait)
        done, again = kernel.instrs[at + 1], kernel.instrs[at + 2]
        assert again.operands[0].target == at
        assert done.guard == (wait.operands[0], False)
    first_done = kernel.instrs[kernel.instrs.index(first) + 1].operands[0]
    assert kernel.instrs[first_done.target].op == "mov.b32"


def test_branch_guard_line_and_python_line(kernel):
    branch = find(kernel, "bra")
    assert branch.operands[0] == Label("$L__exit", len(kernel.instrs) - 1)
    assert branch.guard[1] is True and branch.guard[0].bank is Bank.PRED
    assert branch.loc == ("/somewhere/kernel.py", 11)
    assert KERNEL.splitlines()[branch.line - 1].strip().startswith("@!%p1 bra")
    assert branch.where == f"PTX line {branch.line} (kernel.py:11)"


def test_registers_are_numbered_by_bank(kernel):
    rows = [r for r in kernel.regs.values() if isinstance(r, Reg)]
    for bank, count in ((Bank.R32, kernel.n32), (Bank.R64, kernel.n64), (Bank.PRED, kernel.npred)):
        assert sorted(r.index for r in rows if r.bank is bank) == list(range(count))


@pytest.mark.parametrize(
    "body, message",
    [
        ("bra nowhere;", "no label 'nowhere'"),
        ("add.s32 %q1, 1, 2", "no closing brace|without an end"),
        (".frobnicate 3;", "unknown directive"),
        ("A: A: ret;", "twice"),
        ("@%r1 ret;", "no predicate register"),
    ],
)
def test_errors_name_the_line(body, message):
    text = HEADER + ".entry k()\n{\n.reg .b32 %r<4>;\n" + body + "\n}\n"
    with pytest.raises(ptx.PtxSyntaxError, match=message):
        ptx.parse(text)


def test_wide_registers_take_two_rows():
    text = (
        HEADER
        + ".entry k() { .reg .b128 %rq<2>; .reg .b64 %rd<2>; mov.b128 %rq1, {%rd0, %rd1}; ret; }"
    )
    kernel = ptx.parse(text).kernels["k"]
    assert kernel.n64 == 4


def test_what_the_dsl_emits(tmp_path):
    from tests.sim import dsl_kernels

    text = dsl_kernels.compile_ptx("add_one", "sm_90a", tmp_path)
    module = ptx.parse(text)
    (kernel,) = module.kernels.values()
    assert module.target == "sm_90a"
    assert kernel.params and kernel.instrs[-1].op == "ret"
    assert any(i.loc and i.loc[0].endswith("dsl_bodies.py") for i in kernel.instrs)


def test_inline_assembly_is_at_the_line_of_its_call():
    text = (
        HEADER
        + """
.visible .entry k() {
    .reg .b32 %r<2>;
    .loc 1 10 4
    // begin inline asm
    { .reg .b32 x;
    .loc 1 11 4
    mov.b32 x, 1;
    .loc 1 12 4
    mov.b32 %r1, x;
    }
    // end inline asm
    .loc 1 30 4
    mov.b32 %r0, %r1;
    ret;
}
.file 1 "a.py"
"""
    )
    kernel = ptx.parse(text).kernels["k"]
    assert [ins.loc for ins in kernel.instrs[:3]] == [("a.py", 10), ("a.py", 10), ("a.py", 30)]
