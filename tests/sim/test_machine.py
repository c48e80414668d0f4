"""The machine on hand-written kernels: divergence, memories, polling, residency, schedules."""

from __future__ import annotations

import numpy as np
import pytest

from fa_cute.errors import (
    DeadlockError,
    MisuseError,
    OutOfBoundsError,
    UninitializedReadError,
    UnknownInstructionError,
)
from fa_cute.sim.schedule import Schedule
from tests.sim.tiny import PROLOGUE, run

TID = np.arange(32, dtype=np.uint32)


def test_every_thread_adds_one(engine):
    x = np.arange(64, dtype=np.float32)
    body = (
        PROLOGUE
        + "ld.global.f32 %f0, [%rd1]; add.f32 %f0, %f0, 0f3F800000; st.global.f32 [%rd1], %f0;"
    )
    report = run(body, x, block=64, engine=engine)
    assert np.array_equal(x, np.arange(64) + 1)
    assert report.instructions == 2 * 8


def test_divergence_merges_again(engine):
    """Odd lanes, lanes below 4 and the rest take three paths; then all lanes meet in a ballot."""
    x, y = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    body = (
        PROLOGUE
        + """
    and.b32 %r1, %r0, 1;
    setp.eq.s32 %p0, %r1, 1;
    @%p0 bra ODD;
    setp.lt.s32 %p1, %r0, 4;
    @%p1 bra LOW;
    mov.u32 %r2, 300;
    bra JOIN;
    LOW: mov.u32 %r2, 200;
    bra JOIN;
    ODD: mov.u32 %r2, 100;
    JOIN: st.global.u32 [%rd1], %r2;
    vote.sync.ballot.b32 %r3, %p0, -1;
    ld.param.u64 %rd2, [a1];
    mul.wide.u32 %rd3, %r0, 4;
    add.s64 %rd3, %rd2, %rd3;
    st.global.u32 [%rd3], %r3;
    """
    )
    run(body, x, y, engine=engine)
    assert np.array_equal(x, np.where(TID % 2 == 1, 100, np.where(TID < 4, 200, 300)))
    assert (y == 0xAAAAAAAA).all()


def test_loop_with_a_trip_count_per_lane(engine):
    x = np.zeros(32, np.uint32)
    body = (
        PROLOGUE
        + """
    mov.u32 %r1, 0; mov.u32 %r2, 0;
    LOOP: add.u32 %r2, %r2, %r1; add.u32 %r1, %r1, 1;
    setp.le.u32 %p0, %r1, %r0;
    @%p0 bra LOOP;
    st.global.u32 [%rd1], %r2;
    """
    )
    run(body, x, engine=engine)
    assert np.array_equal(x, TID * (TID + 1) // 2)


def test_guarded_exit_leaves_the_others(engine):
    x = np.zeros(32, np.uint32)
    body = (
        PROLOGUE
        + """
    setp.gt.u32 %p0, %r0, 9;
    @%p0 exit;
    mov.u32 %r1, 7; st.global.u32 [%rd1], %r1;
    """
    )
    run(body, x, engine=engine)
    assert np.array_equal(x, np.where(TID > 9, 0, 7))


def test_block_that_is_no_multiple_of_a_warp(engine):
    x = np.zeros(64, np.uint32)
    run(
        PROLOGUE + "mov.u32 %r1, 5; bar.sync 0; st.global.u32 [%rd1], %r1;",
        x,
        block=40,
        engine=engine,
    )
    assert (x[:40] == 5).all() and (x[40:] == 0).all()


def test_special_registers(engine):
    x = np.zeros(32, np.uint32)
    body = (
        PROLOGUE
        + """
    mov.u32 %r1, %ctaid.x; mov.u32 %r2, %nctaid.x;
    mov.u32 %r3, %cluster_ctarank; mov.u32 %r4, %clusterid.x;
    mad.lo.u32 %r5, %r1, 10, %r2; mad.lo.u32 %r5, %r5, 10, %r3; mad.lo.u32 %r5, %r5, 10, %r4;
    mul.wide.u32 %rd2, %r1, 4; add.s64 %rd2, %rd0, %rd2;
    st.global.u32 [%rd2], %r5;
    """
    )
    run(body, x, grid=6, cluster=2, engine=engine)
    assert x[:6].tolist() == [600, 1610, 2601, 3611, 4602, 5612]


# ---- memory errors ----


def test_out_of_bounds_names_the_tensor_and_the_line(engine):
    x = np.zeros(32, np.uint32)
    with pytest.raises(OutOfBoundsError) as error:
        run(PROLOGUE + "st.global.u32 [%rd1+64], %r0;", x, engine=engine)
    assert "PTX line" in str(error.value) and "'a0'" in str(error.value)
    assert "4 bytes past the end" in str(error.value)


def test_shared_out_of_bounds(engine):
    x = np.zeros(32, np.uint32)
    with pytest.raises(OutOfBoundsError, match="PTX line"):
        run(
            PROLOGUE + "mov.u32 %r1, dyn; st.shared.u32 [%r1+128], %r0;", x, smem=128, engine=engine
        )


def test_misaligned_access(engine):
    x = np.zeros(32, np.uint32)
    with pytest.raises(MisuseError, match="align"):
        run(PROLOGUE + "st.global.u32 [%rd0+2], %r0;", x, engine=engine)


def test_unwritten_shared_memory_is_reported_and_is_nan(engine):
    x = np.zeros(32, np.float32)
    body = PROLOGUE + "mov.u32 %r1, dyn; ld.shared.f32 %f0, [%r1+32]; st.global.f32 [%rd1], %f0;"
    report = run(body, x, smem=128, engine=engine)
    assert np.isnan(x).all()
    assert report.unset and "ld.shared.f32" in str(report.unset[0])
    with pytest.raises(UninitializedReadError, match=r"ld\.shared"):
        run(body, x, smem=128, engine=engine, unset="raise")


def test_written_shared_memory_is_not_reported(engine):
    x = np.zeros(32, np.uint32)
    body = (
        PROLOGUE
        + """
    mov.u32 %r1, dyn; shl.b32 %r2, %r0, 2; add.u32 %r1, %r1, %r2; st.shared.u32 [%r1], %r0;
    ld.shared.u32 %r3, [%r1]; st.global.u32 [%rd1], %r3;
    """
    )
    report = run(body, x, smem=128, engine=engine)
    assert not report.unset and np.array_equal(x, TID)


def test_unknown_instruction_names_its_line(engine):
    with pytest.raises(UnknownInstructionError, match=r"PTX line \d+.*frobnicate"):
        run(PROLOGUE + "frobnicate.u32 %r1, %r2;", np.zeros(32), engine=engine)


# ---- launches ----


def test_wrong_launches():
    x = np.zeros(32, np.uint32)
    with pytest.raises(MisuseError, match="multiple of cluster"):
        run(PROLOGUE, x, grid=3, cluster=2)
    with pytest.raises(MisuseError, match="shared memory"):
        run(PROLOGUE, x, smem=1 << 20)
    with pytest.raises(MisuseError, match="threads"):
        run(PROLOGUE, x, block=2048)


def test_clusters_that_wait_for_each_other_become_resident(engine):
    """CTA 0 polls a flag that the last CTA sets: the machine starts as many as it takes."""
    x = np.zeros(32, np.uint32)
    body = (
        PROLOGUE
        + """
    mov.u32 %r1, %ctaid.x;
    setp.ne.u32 %p0, %r1, 0;
    @%p0 bra SET;
    WAIT: ld.acquire.gpu.global.u32 %r2, [%rd0];
    setp.eq.u32 %p1, %r2, 0;
    @%p1 bra WAIT;
    st.global.u32 [%rd0+4], %r2;
    bra DONE;
    SET: setp.ne.u32 %p2, %r1, 3;
    @%p2 bra DONE;
    mov.u32 %r3, 9;
    st.release.gpu.global.u32 [%rd0], %r3;
    DONE:
    """
    )
    run(body, x, grid=4, engine=engine)
    assert x[:2].tolist() == [9, 9]
    with pytest.raises(DeadlockError, match="polls"):
        run(body, np.zeros(32, np.uint32), grid=4, engine=engine, resident=1)


def test_a_turnstile_of_atomics_orders_ctas(engine):
    """Each CTA waits for its turn (highest number first) and appends its number."""
    x = np.zeros(32, np.uint32)
    body = (
        PROLOGUE
        + """
    mov.u32 %r1, %ctaid.x; mov.u32 %r2, %nctaid.x; sub.u32 %r3, %r2, %r1; sub.u32 %r3, %r3, 1;
    setp.ne.u32 %p0, %r0, 0;
    @%p0 bra DONE;
    WAIT: ld.relaxed.gpu.global.u32 %r4, [%rd0];
    setp.ne.u32 %p1, %r4, %r3;
    @%p1 bra WAIT;
    mul.wide.u32 %rd2, %r4, 4; add.s64 %rd2, %rd0, %rd2; st.global.u32 [%rd2+4], %r1;
    red.release.gpu.global.add.u32 [%rd0], 1;
    DONE:
    """
    )
    for schedule in ("early", "random:1", "random:2"):
        x[:] = 0
        run(body, x, grid=5, engine=engine, schedule=schedule)
        assert x[:6].tolist() == [5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize(
    "op, expected",
    [
        ("add.u32", 32 * 3 + 5),
        ("max.u32", 5),
        ("or.b32", 7),
        ("exch.b32", 3),
        ("inc.u32", None),
    ],
)
def test_global_atomics(op, expected, engine):
    x, old = np.full(4, 5, np.uint32), np.zeros(32, np.uint32)
    body = (
        PROLOGUE
        + f"""
    mov.u32 %r1, 3;
    atom.global.{op} %r2, [%rd0], %r1;
    ld.param.u64 %rd2, [a1]; mul.wide.u32 %rd3, %r0, 4; add.s64 %rd3, %rd2, %rd3;
    st.global.u32 [%rd3], %r2;
    """
    )
    run(body, x, old, engine=engine)
    assert old[0] == 5
    if expected is not None:
        assert x[0] == expected
    if op == "add.u32":
        assert np.array_equal(old, 5 + 3 * TID)


def test_compare_and_swap_lets_one_lane_win(engine):
    x, old = np.zeros(4, np.uint32), np.zeros(32, np.uint32)
    body = (
        PROLOGUE
        + """
    add.u32 %r1, %r0, 1;
    atom.global.cas.b32 %r2, [%rd0], 0, %r1;
    ld.param.u64 %rd2, [a1]; mul.wide.u32 %rd3, %r0, 4; add.s64 %rd3, %rd2, %rd3;
    st.global.u32 [%rd3], %r2;
    """
    )
    run(body, x, old, engine=engine)
    assert x[0] == 1 and old.tolist() == [0] + [1] * 31


def test_float_and_vector_reductions(engine):
    x = np.zeros(8, np.float32)
    body = (
        PROLOGUE
        + """
    mov.f32 %f0, 0f3F800000; mov.f32 %f1, 0f40000000;
    red.global.add.f32 [%rd0], %f1;
    red.global.v2.f32.add [%rd0+8], {%f0, %f1};
    """.replace("red.global.v2.f32.add", "red.global.add.v2.f32")
    )
    run(body, x, engine=engine)
    assert x.tolist()[:4] == [64.0, 0.0, 32.0, 64.0]


# ---- schedules ----


@pytest.mark.parametrize("schedule", ["early", "late", "random:1", "random:2"])
def test_producer_and_consumer_agree_in_every_schedule(schedule, engine):
    """Warp 0 copies with cp.async.bulk through one mbarrier; warp 1 adds up what arrives."""
    x, y = np.arange(256, dtype=np.float32), np.zeros(32, np.float32)
    body = (
        PROLOGUE
        + """
    ld.param.u64 %rd5, [a1];
    mov.u32 %r1, dyn; add.u32 %r2, %r1, 8; add.u32 %r3, %r1, 128;
    setp.ne.u32 %p0, %r0, 0;
    @%p0 bra READY;
    mbarrier.init.shared.b64 [%r1], 1; mbarrier.init.shared.b64 [%r2], 32;
    READY: bar.sync 0;
    setp.ge.u32 %p1, %r0, 32;
    mov.u32 %r4, 0; mov.f32 %f1, 0f00000000;
    @%p1 bra CONSUME;
    setp.ne.u32 %p2, %r0, 0;
    @%p2 bra END;
    PRODUCE: and.b32 %r5, %r4, 1; xor.b32 %r6, %r5, 1;
    W1: mbarrier.try_wait.parity.shared.b64 %p3, [%r2], %r6;
    @!%p3 bra W1;
    mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r1], 128;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r3], [%rd0], 128, [%r1];
    add.s64 %rd0, %rd0, 128; add.u32 %r4, %r4, 1;
    setp.lt.u32 %p4, %r4, 8;
    @%p4 bra PRODUCE;
    bra END;
    CONSUME: and.b32 %r5, %r4, 1;
    W2: mbarrier.try_wait.parity.shared.b64 %p3, [%r1], %r5;
    @!%p3 bra W2;
    sub.u32 %r7, %r0, 32; shl.b32 %r7, %r7, 2; add.u32 %r8, %r3, %r7;
    ld.shared.f32 %f0, [%r8]; add.f32 %f1, %f1, %f0;
    mbarrier.arrive.shared.b64 %rd9, [%r2];
    add.u32 %r4, %r4, 1;
    setp.lt.u32 %p4, %r4, 8;
    @%p4 bra CONSUME;
    cvt.u64.u32 %rd6, %r7; add.s64 %rd6, %rd5, %rd6; st.global.f32 [%rd6], %f1;
    END:
    """
    )
    report = run(body, x, y, block=64, smem=512, schedule=schedule, engine=engine, trace=True)
    assert np.array_equal(y, np.arange(256).reshape(8, 32).sum(0))
    assert not report.unset
    assert {"run", "wait"} <= {e.what for e in report.timeline.events}


def test_schedule_texts():
    assert Schedule.of("random:7") == Schedule("random", "random", 7)
    with pytest.raises(ValueError, match="early, late, random"):
        Schedule.of("sometimes")


def test_local_memory_is_private_to_a_lane(engine):
    x = np.zeros(32, np.uint32)
    body = """
    .local .align 8 .b8 depot[16];
    mov.b64 %rd5, depot; cvta.local.u64 %rd6, %rd5;
    """
    body += (
        PROLOGUE
        + """
    st.local.u32 [%rd5+4], %r0; add.s64 %rd7, %rd6, 4; ld.u32 %r1, [%rd7];
    add.u32 %r1, %r1, 1; st.u32 [%rd7+4], %r1; ld.local.u32 %r2, [%rd5+8];
    st.global.u32 [%rd1], %r2;
    """
    )
    run(body, x, engine=engine)
    assert np.array_equal(x, TID + 1)
    with pytest.raises(OutOfBoundsError):
        run(body + "st.local.u32 [%rd5+16], %r0;", x, engine=engine)


def test_a_plain_loop_that_polls_for_ever_is_a_deadlock(engine):
    """No acquire, no volatile: nothing but a loop that never ends."""
    body = PROLOGUE + "L: ld.global.u32 %r1, [%rd0]; setp.eq.u32 %p0, %r1, 0;\n@%p0 bra L;"
    with pytest.raises(DeadlockError, match="polls"):
        run(body, np.zeros(32, np.uint32), engine=engine, budget=200)
