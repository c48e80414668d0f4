"""Native control flow, guards, divergence, and instructions in which lanes see each other."""

from __future__ import annotations

import numpy as np
import pytest

from fa_cute.errors import MisuseError, SimError
from fa_cute.sim import jit
from fa_cute.sim.jit.registers import compact
from tests.sim import jit_tools as t

LANE = np.arange(32, dtype=np.uint32)


def run(body: str, mask: int = t.FULL, **rows):
    warp = t.program(body).warp()
    for name, values in rows.items():
        t.set_rows(warp, "%" + name, values)
    warp.start(mask)
    stop = warp.run()
    assert stop >> 60 == jit.KIND_EXIT, warp.error()
    return warp


@pytest.mark.parametrize("mask", [t.FULL, 0x0000FFFF, 0x80000001, 0x5A5A1234])
def test_lanes_outside_the_mask_keep_their_registers(mask):
    body = (
        "add.s32 %r1, %r1, 1; cvt.u64.u32 %rd1, %r1; setp.gt.u32 %p1, %r1, 0; "
        "cvt.rn.bf16x2.f32 %r2, %r1, %r1; mov.b16 %rs1, 9; ex2.approx.f32 %r3, %r3;"
    )
    warp = run(body, mask, r1=LANE, rd1=1 << 40, rs1=7, r2=1, r3=0)
    inside = np.array([mask >> i & 1 for i in range(32)], bool)
    assert (t.rows_of(warp, "%r1") == LANE + inside).all()
    assert (t.rows_of(warp, "%rd1") == np.where(inside, LANE + 1, np.uint64(1 << 40))).all()
    assert (t.rows_of(warp, "%p1") == inside).all()
    assert (t.rows_of(warp, "%rs1") == np.where(inside, 9, 7)).all()
    assert (t.rows_of(warp, "%r2")[~inside] == 1).all() and (
        t.rows_of(warp, "%r3")[~inside] == 0
    ).all()


@pytest.mark.parametrize("guard", ["@%p1", "@!%p1"])
def test_guards_select_lanes(guard):
    body = (
        f"setp.lt.u32 %p1, %r1, 9; {guard} add.s32 %r2, %r1, 100; "
        f"{guard} mov.b64 {{%r3, %r4}}, %rd1; {guard} setp.eq.u32 %p2, %r1, %r1;"
    )
    warp = run(body, r1=LANE, r2=1, r3=2, r4=3, rd1=(7 << 32) | 6, p2=0)
    on = (LANE < 9) == (guard == "@%p1")
    assert (t.rows_of(warp, "%r2") == np.where(on, LANE + 100, 1)).all()
    assert (t.rows_of(warp, "%r3") == np.where(on, 6, 2)).all()
    assert (t.rows_of(warp, "%r4") == np.where(on, 7, 3)).all()
    assert (t.rows_of(warp, "%p2") == on).all()


def test_loop_with_a_trip_count_per_lane():
    body = """mov.b32 %r2, 0; mov.b32 %r3, 0;
    LOOP: setp.ge.u32 %p1, %r2, %r1; @%p1 bra DONE;
    add.s32 %r3, %r3, %r2; add.s32 %r2, %r2, 1; bra.uni LOOP;
    DONE: activemask.b32 %r4; mov.b32 %r5, 1;"""
    warp = run(body, r1=LANE)
    assert (t.rows_of(warp, "%r3") == LANE * (LANE.astype(int) - 1) // 2).all()
    assert (t.rows_of(warp, "%r4") == t.FULL).all()  # all lanes meet again behind the loop


def test_nested_branches_meet_again():
    body = """and.b32 %r2, %r1, 1; setp.eq.u32 %p1, %r2, 0;
    and.b32 %r2, %r1, 2; setp.eq.u32 %p2, %r2, 0;
    @%p1 bra EVEN;
    @%p2 bra ODD0;
    mov.b32 %r3, 3; activemask.b32 %r4; bra JOIN1;
    ODD0: mov.b32 %r3, 1; activemask.b32 %r4;
    JOIN1: activemask.b32 %r5; bra JOIN;
    EVEN: mov.b32 %r3, 0; activemask.b32 %r4; activemask.b32 %r5;
    JOIN: activemask.b32 %r6;"""
    warp = run(body, r1=LANE)
    assert (t.rows_of(warp, "%r3") == np.where(LANE % 2 == 0, 0, LANE % 4)).all()
    parts = {0: 0x55555555, 1: 0x22222222, 3: 0x88888888}
    assert t.rows_of(warp, "%r4").tolist() == [parts[int(v)] for v in t.rows_of(warp, "%r3")]
    assert (t.rows_of(warp, "%r5") == np.where(LANE % 2 == 0, 0x55555555, 0xAAAAAAAA)).all()
    assert (t.rows_of(warp, "%r6") == t.FULL).all()


def test_lanes_that_leave_early():
    body = "setp.lt.u32 %p1, %r1, 10; @%p1 ret; mov.b32 %r2, 5; vote.sync.ballot.b32 %r3, %p2, -1;"
    warp = run(body, r1=LANE, r2=0, p2=1)
    assert (t.rows_of(warp, "%r2") == np.where(LANE < 10, 0, 5)).all()
    assert (t.rows_of(warp, "%r3")[10:] == 0xFFFFFC00).all()


class _RandomProgram:
    """Nested ifs and loops of random shape: PTX text, and the same as a tree to simulate."""

    def __init__(self, gen: np.random.Generator):
        self.gen, self.lines, self.labels = gen, [], 0
        self.steps = self.block(0, 0)

    def label(self, stem: str) -> str:
        self.labels += 1
        return f"{stem}{self.labels}"

    def block(self, depth: int, loops: int) -> list:
        steps: list = []
        for _ in range(int(self.gen.integers(1, 4))):
            choice = int(self.gen.integers(0, 3)) if depth < 3 else 0
            k = int(self.gen.integers(1, 9))
            if choice == 0:
                self.lines.append(f"mad.lo.u32 %r2, %r2, 5, {k};")
                steps.append(("step", k))
            elif choice == 1:
                steps.append(self.branch(k, depth, loops))
            else:
                steps.append(self.loop(depth, loops))
        return steps

    def branch(self, k: int, depth: int, loops: int) -> tuple:
        other, end = self.label("E"), self.label("J")
        self.lines += [f"and.b32 %r3, %r2, {k};", "setp.eq.u32 %p1, %r3, 0;", f"@%p1 bra {other};"]
        first = self.block(depth + 1, loops)
        self.lines += [f"bra {end};", f"{other}:"]
        second = self.block(depth + 1, loops)
        self.lines.append(f"{end}:")
        return "if", k, first, second

    def loop(self, depth: int, loops: int) -> tuple:
        head, counter = self.label("L"), f"%r{10 + loops}"
        self.lines += [f"and.b32 {counter}, %r2, 3;", f"{head}:"]
        body = self.block(depth + 1, loops + 1)
        self.lines += [f"sub.s32 {counter}, {counter}, 1;", f"setp.gt.s32 %p2, {counter}, 0;"]
        self.lines.append(f"@%p2 bra {head};")
        return "loop", body


def _simulate(steps: list, x: int) -> int:
    for kind, *rest in steps:
        if kind == "step":
            x = (x * 5 + rest[0]) & t.FULL
        elif kind == "if":
            x = _simulate(rest[1] if x & rest[0] else rest[2], x)
        else:
            for _ in range(max(1, x & 3)):
                x = _simulate(rest[0], x)
    return x


def test_random_structured_programs():
    """Nested ifs and loops of random shape against a lane-by-lane Python run."""
    gen = np.random.default_rng(5)
    for _ in range(25):
        code = _RandomProgram(gen)
        warp = run("\n".join(code.lines) + "\nactivemask.b32 %r5;", r2=LANE * 77 + 3)
        expected = [_simulate(code.steps, int(x)) for x in LANE * 77 + 3]
        assert t.rows_of(warp, "%r2").tolist() == expected
        assert (t.rows_of(warp, "%r5") == t.FULL).all()


def test_stop_and_resume():
    kernel = t.kernel_of(
        "add.s32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 20; @%p1 mov.b32 %r2, 1; add.s32 %r1, %r1, 1;"
    )
    warp = jit.build(kernel, handled=[2]).warp()
    t.set_rows(warp, "%r1", LANE)
    warp.start()
    stop = warp.run()
    assert (stop >> 60, stop >> 32, stop & t.FULL) == (jit.KIND_STOP, 2, (1 << 19) - 1)
    assert warp.groups() == [(3, t.FULL)]
    assert warp.run() >> 60 == jit.KIND_EXIT
    assert (t.rows_of(warp, "%r1") == LANE + 2).all() and warp.ctx.count == 5
    t.set_rows(warp, "%r1", 100)  # the guard holds in no lane: Python isn't asked
    warp.start()
    assert warp.run() >> 60 == jit.KIND_EXIT


def test_stops_of_diverged_groups_and_switching():
    body = (
        "setp.lt.u32 %p1, %r1, 8; @%p1 bra A; mov.b32 %r2, 1; bra B; A: mov.b32 %r2, 2; "
        "B: mov.b32 %r3, 3;"
    )
    kernel = t.kernel_of(body)
    warp = jit.build(kernel, handled=[2, 4]).warp()
    t.set_rows(warp, "%r1", LANE)
    warp.start()
    assert warp.run() == 2 << 32 | 0xFFFFFF00
    assert sorted(warp.groups()) == [(3, 0xFFFFFF00), (4, 0xFF)]
    assert warp.switch()
    assert warp.run() == 4 << 32 | 0xFF
    assert warp.run() >> 60 == jit.KIND_EXIT
    assert (t.rows_of(warp, "%r3") == 3).all()


def test_a_warp_that_has_left_stays_away():
    warp = run("mov.b32 %r1, 4;")
    assert warp.run() >> 60 == jit.KIND_EXIT and warp.ctx.count == 2
    warp.start()
    assert warp.run() >> 60 == jit.KIND_EXIT and warp.ctx.count == 2


def test_budget_interrupts_endless_loops():
    warp = t.program("L: add.s32 %r1, %r1, 1; bra.uni L;").warp()
    warp.ctx.budget = 1000
    for turn in (1, 2):
        assert warp.run() >> 60 == jit.KIND_BUDGET
        assert warp.ctx.count == 1000 * turn
    assert (t.rows_of(warp, "%r1") == 1000).all()


_MODES = {"up": 0, "down": 31, "bfly": 31, "idx": 31}


@pytest.mark.parametrize("mode", sorted(_MODES))
@pytest.mark.parametrize("width", [32, 16, 8, 4])
def test_shuffles(mode, width):
    segment = (32 - width) << 8
    clamp = _MODES[mode] | segment
    for b in (0, 1, 3, width // 2, width - 1, 31):
        warp = run(
            f"shfl.sync.{mode}.b32 %r2|%p1, %r1, {b}, {clamp}, -1; "
            f"shfl.sync.{mode}.b32 %r3, %r1, {b}, {clamp}, -1;",
            r1=LANE + 100,
        )
        for lane in range(32):
            low, seg = lane & ~(width - 1), segment >> 8
            limit = low | (clamp & 31 & ~seg)
            target = {
                "up": lane - b,
                "down": lane + b,
                "bfly": lane ^ b,
                "idx": low | (b & ~seg & 31),
            }[mode]
            good = target >= limit if mode == "up" else target <= limit
            want = 100 + (target if good else lane)
            assert t.rows_of(warp, "%r2")[lane] == want and t.rows_of(warp, "%r3")[lane] == want
            assert t.rows_of(warp, "%p1")[lane] == good


def test_votes_matches_and_election():
    yes = (LANE % 3 == 0).astype(np.uint32)
    body = """vote.sync.ballot.b32 %r1, %p1, -1; vote.sync.all.pred %p2, %p1, -1;
    vote.sync.any.pred %p3, %p1, -1;
    vote.sync.uni.pred %p4, %p1, -1; vote.sync.ballot.b32 %r2, !%p1, -1;
    elect.sync %r3|%p5, -1; elect.sync _|%p6, -1;
    match.any.sync.b32 %r4, %r10, -1; match.all.sync.b32 %r5|%p7, %r10, -1;
    match.all.sync.b32 %r6|%p8, %r11, -1;"""
    body = body.replace("match.any.sync", "match.sync.any").replace(
        "match.all.sync", "match.sync.all"
    )
    warp = run(body, p1=yes, r10=LANE % 5, r11=9)
    ballot = sum(1 << int(i) for i in LANE if i % 3 == 0)
    assert (t.rows_of(warp, "%r1") == ballot).all() and (
        t.rows_of(warp, "%r2") == t.FULL ^ ballot
    ).all()
    assert (
        not t.rows_of(warp, "%p2").any()
        and t.rows_of(warp, "%p3").all()
        and not t.rows_of(warp, "%p4").any()
    )
    assert (t.rows_of(warp, "%r3") == 0).all() and t.rows_of(warp, "%p5").tolist() == [1] + [0] * 31
    assert t.rows_of(warp, "%p6").tolist() == [1] + [0] * 31
    groups = [sum(1 << int(i) for i in LANE if i % 5 == k) for k in range(5)]
    assert t.rows_of(warp, "%r4").tolist() == [groups[int(i) % 5] for i in LANE]
    assert not t.rows_of(warp, "%r5").any() and not t.rows_of(warp, "%p7").any()
    assert (t.rows_of(warp, "%r6") == t.FULL).all() and t.rows_of(warp, "%p8").all()


def test_election_takes_the_lowest_live_lane():
    warp = run("elect.sync %r1|%p1, 0xFFFF0000;", mask=0xFFF00000)
    assert (t.rows_of(warp, "%r1")[20:] == 20).all() and t.rows_of(warp, "%p1").tolist() == [
        0
    ] * 20 + [1] + [0] * 11


@pytest.mark.parametrize("op,rule", [("add", np.sum), ("min", np.min), ("max", np.max)])
@pytest.mark.parametrize("kind", ["s32", "u32"])
@pytest.mark.parametrize("mask", [t.FULL, 0x00FF00F0])
def test_reductions(op, rule, kind, mask):
    values = np.random.default_rng(3).integers(0, 1 << 32, 32, np.uint64).astype(np.uint32)
    warp = run(f"redux.sync.{op}.{kind} %r2, %r1, {mask};", mask, r1=values)
    inside = np.array([mask >> i & 1 for i in range(32)], bool)
    with np.errstate(all="ignore"):
        chosen = values[inside].view(np.int32 if kind == "s32" else np.uint32)
        want = np.asarray(rule(chosen.astype(np.int64))).astype(np.uint64).astype(np.uint32)
    assert (t.rows_of(warp, "%r2")[inside] == want).all()


def test_bit_and_float_reductions():
    values = np.random.default_rng(4).standard_normal(32).astype(np.float32)
    values[5] = np.nan
    body = (
        "redux.sync.and.b32 %r2, %r1, -1; redux.sync.or.b32 %r3, %r1, -1; "
        "redux.sync.xor.b32 %r4, %r1, -1; redux.sync.max.f32 %r5, %r6, -1; "
        "redux.sync.min.abs.f32 %r7, %r6, -1; redux.sync.max.NaN.f32 %r8, %r6, -1;"
    )
    ints = LANE * 0x01010101 + 0x80
    warp = run(body, r1=ints, r6=values.view("u4"))
    for name, f in (("%r2", np.bitwise_and), ("%r3", np.bitwise_or), ("%r4", np.bitwise_xor)):
        assert (t.rows_of(warp, name) == f.reduce(ints)).all()
    assert (t.rows_of(warp, "%r5").view("f4") == np.nanmax(values)).all()
    assert (t.rows_of(warp, "%r7").view("f4") == np.nanmin(np.abs(values))).all()
    assert (t.rows_of(warp, "%r8") == 0x7FFFFFFF).all()


def test_diverged_lanes_meet_at_a_warp_barrier():
    body = """setp.lt.u32 %p1, %r1, 16; @%p1 bra A;
    mov.b32 %r2, 1; bar.warp.sync -1; mov.b32 %r3, 1; bra B;
    A: mov.b32 %r2, 2; B: bar.warp.sync -1; mov.b32 %r4, 1;"""
    warp = t.program(body).warp()
    t.set_rows(warp, "%r1", LANE)
    assert warp.run() >> 60 == jit.KIND_ERROR  # two different barriers: they never meet
    assert isinstance(warp.error(), MisuseError) and "member mask" in str(warp.error())
    body = """setp.lt.u32 %p1, %r1, 16; mov.b32 %r5, 0; @%p1 bra A; bra M;
    A: mov.b32 %r5, 2; M: shfl.sync.idx.b32 %r6, %r5, 0, 31, -1;"""
    warp = run(body, r1=LANE)
    assert (t.rows_of(warp, "%r6") == 2).all()
    # The lanes that reach the barrier first wait there for those that come by a longer way.
    body = """setp.lt.u32 %p1, %r1, 16; mov.b32 %r5, 0; @%p1 bra LONG;
    M: bar.warp.sync -1; activemask.b32 %r6; bra END;
    LONG: mov.b32 %r5, 2; bra M; END: mov.b32 %r7, 1;"""
    warp = run(body, r1=LANE)
    assert (t.rows_of(warp, "%r6") == t.FULL).all() and (t.rows_of(warp, "%r7") == 1).all()


def test_waiting_lanes_go_on_when_the_others_have_left():
    body = """setp.lt.u32 %p1, %r1, 16; @%p1 bra FAR;
    shfl.sync.idx.b32 %r2, %r1, 20, 31, -1; mov.b32 %r3, 1; ret; FAR: mov.b32 %r3, 2;"""
    warp = run(body, r1=LANE)
    assert (t.rows_of(warp, "%r2")[16:] == 20).all()
    assert (t.rows_of(warp, "%r3") == np.where(LANE < 16, 2, 1)).all()


def test_an_instruction_for_whole_warps_waits_for_lanes_that_come_by_a_far_block():
    body = """setp.lt.u32 %p1, %r1, 16; @%p1 bra FAR;
    MEET: bar.sync 0; mov.b32 %r4, 1; barrier.cluster.arrive.aligned; ret;
    FAR: mov.b32 %r3, 2; bra MEET;"""
    kernel = t.kernel_of(body)
    handled = [i for i, ins in enumerate(kernel.instrs) if ins.parts[0] in ("bar", "barrier")]
    warp = jit.build(kernel, handled).warp()
    t.set_rows(warp, "%r1", LANE)
    assert warp.run() == handled[0] << 32 | t.FULL
    assert warp.run() == handled[1] << 32 | t.FULL
    assert warp.run() >> 60 == jit.KIND_EXIT
    # Lanes that never come are the machine's to report: it gets the instruction with those there.
    body = """setp.lt.u32 %p1, %r1, 16; @%p1 bra FAR; bar.sync 0; ret; FAR: bar.sync 1;"""
    kernel = t.kernel_of(body)
    warp = jit.build(kernel, [2, 4]).warp()
    t.set_rows(warp, "%r1", LANE)
    assert warp.run() in (2 << 32 | 0xFFFF0000, 4 << 32 | 0xFFFF)
    assert sum(mask.bit_count() for _, mask in warp.groups()) == 32
    assert warp.run() >> 60 == jit.KIND_STOP
    assert warp.run() >> 60 == jit.KIND_EXIT


def test_a_collective_without_its_members_is_an_error():
    warp = t.program("setp.lt.u32 %p1, %r1, 16; @%p1 shfl.sync.idx.b32 %r2, %r1, 0, 31, -1;").warp()
    t.set_rows(warp, "%r1", LANE)
    assert warp.run() >> 60 == jit.KIND_ERROR and isinstance(warp.error(), MisuseError)


def test_trap_is_an_error_of_the_kernel():
    warp = t.program("setp.eq.u32 %p1, %r1, 5; @%p1 trap;").warp()
    assert warp.run() >> 60 == jit.KIND_EXIT
    warp.start()
    t.set_rows(warp, "%r1", LANE)
    assert warp.run() >> 60 == jit.KIND_ERROR
    assert isinstance(warp.error(), SimError) and "lane 5" in str(warp.error())


def test_special_registers():
    body = (
        "mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.y; "
        "mad.lo.s32 %r3, %ctaid.x, %ntid.x, %r1; mov.u32 %r4, %laneid; "
        "mov.u32 %r5, %lanemask_lt; mov.u64 %rd1, %clock64; mov.u32 %r6, %clock; "
        "mov.u64 %rd2, %clock64;"
    )
    code = t.program(body)
    assert set(code.specials) >= {"%tid.x", "%ctaid.x", "%ctaid.y", "%ntid.x"}
    warp = code.warp()
    for name, value in (("%tid.x", LANE + 64), ("%ctaid.x", 3), ("%ctaid.y", 4), ("%ntid.x", 128)):
        warp.special(name, value)
    assert warp.run() >> 60 == jit.KIND_EXIT
    assert (t.rows_of(warp, "%r3") == 3 * 128 + LANE + 64).all() and (
        t.rows_of(warp, "%r2") == 4
    ).all()
    assert (t.rows_of(warp, "%r4") == LANE).all()
    assert (t.rows_of(warp, "%r5") == (np.uint64(1) << LANE.astype(np.uint64)) - 1).all()
    assert (t.rows_of(warp, "%rd2") > t.rows_of(warp, "%rd1")).all()


def test_compaction_keeps_the_results_and_saves_rows():
    lines = ["mov.b32 %r0, %r50;"]
    for i in range(40):
        lines.append(f"mad.lo.u32 %r{i + 1}, %r{i}, 3, {i};")
        if i % 10 == 5:
            lines.append(
                f"setp.gt.u32 %p1, %r{i}, 4096; @%p1 bra S{i}; "
                f"add.s32 %r{i + 1}, %r{i + 1}, %r{max(0, i - 3)}; S{i}:"
            )
    body = "\n".join(lines)
    kernel = t.kernel_of(body)
    small = compact(kernel)
    assert small.n32 <= 8 < kernel.n32
    results = []
    for k in (kernel, small):
        warp = jit.build(k).warp()
        t.set_rows(warp, "%r50", LANE)
        assert warp.run() >> 60 == jit.KIND_EXIT
        results.append(t.rows_of(warp, "%r40").copy())
    assert (results[0] == results[1]).all()


def test_compaction_keeps_both_halves_of_wide_registers():
    body = """.reg .b128 %q<4>; mov.b64 %rd1, 5; mov.b64 %rd2, 6; mov.b128 %q1, {%rd1, %rd2};
    mov.b128 %q2, %q1; mov.b64 %rd3, 9; add.s64 %rd4, %rd3, %rd3; mov.b128 {%rd5, %rd6}, %q2;
    add.s64 %rd7, %rd5, %rd6; add.s64 %rd8, %rd7, %rd4;"""
    kernel = t.kernel_of(body)
    for k in (kernel, compact(kernel)):
        warp = jit.build(k).warp()
        assert warp.run() >> 60 == jit.KIND_EXIT
        assert (t.rows_of(warp, "%rd8") == 29).all()
    assert compact(kernel).n64 < kernel.n64


def test_compaction_follows_loops():
    body = """mov.b32 %r1, 0; mov.b32 %r2, 7; mov.b32 %r9, 1;
    L: add.s32 %r3, %r1, %r2; mul.lo.u32 %r4, %r3, 3; @%p1 mov.b32 %r2, %r4; add.s32 %r1, %r1, 1;
    setp.lt.u32 %p2, %r1, 10; @%p2 bra L; add.s32 %r5, %r2, %r9;"""
    kernel = t.kernel_of(body)
    found = []
    for k in (kernel, compact(kernel)):
        warp = jit.build(k).warp()
        t.set_rows(warp, "%p1", LANE % 2)
        assert warp.run() >> 60 == jit.KIND_EXIT
        found.append(t.rows_of(warp, "%r5").copy())
    assert (found[0] == found[1]).all()
