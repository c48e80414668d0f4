"""mbarriers, named and cluster barriers, register pools: state machines and errors."""

from __future__ import annotations

import numpy as np
import pytest

from fa_cute.errors import DeadlockError, MisuseError
from fa_cute.sim.mbarrier import MBarrier
from fa_cute.sim.memory import TmemAllocator
from fa_cute.sim.schedule import AsyncQueue, Groups, Schedule
from tests.sim.tiny import PROLOGUE, run

# ---- the objects ----


def test_bytes_may_come_before_they_are_expected():
    barrier = MBarrier(1)
    barrier.complete_tx(8192)
    assert (barrier.phase, barrier.tx, barrier.pending) == (0, -8192, 1)
    barrier.arrive_expect_tx(16384)
    assert (barrier.phase, barrier.tx, barrier.pending) == (0, 8192, 0)
    barrier.complete_tx(8192)
    assert barrier.phase == 1 and barrier.pending == 1
    assert barrier.passed(0) and not barrier.passed(1)


def test_fresh_barrier_passes_parity_one():
    assert MBarrier(3).passed(1) and not MBarrier(3).passed(0)


def test_dropping_lowers_later_phases():
    barrier = MBarrier(3)
    barrier.arrive_drop()
    assert (barrier.expected, barrier.pending) == (2, 2)
    barrier.arrive(2)
    assert (barrier.phase, barrier.pending) == (1, 2)


@pytest.mark.parametrize(
    "act, message",
    [
        (lambda b: b.arrive(3), "3 arrivals"),
        (lambda b: b.expect_tx(1 << 20), "20 bits"),
        (lambda b: b.complete_tx(1 << 20), "20 bits"),
        (lambda b: b.arrive_drop(3), "dropping 3 of 2"),
        (lambda b: (b.complete_tx(16), b.arrive(2), b.expect_tx(16)), "without an arrival"),
        (lambda b: (b.expect_tx(16), b.arrive(2), b.arrive(1)), "only 0 more"),
    ],
)
def test_mbarrier_misuse(act, message):
    with pytest.raises(MisuseError, match=message):
        act(MBarrier(2))


def test_groups_retire_oldest_first():
    groups = Groups("bulk")
    first = groups.add()
    groups.commit()
    second = groups.add()
    groups.commit()
    second()
    assert groups.wait(1) is not None, "the older group is unfinished, whatever the newer one did"
    first()
    assert groups.wait(0) is None
    groups.commit()
    assert groups.wait(0) is None, "an empty group is complete"


def test_after_waits_only_for_what_was_there():
    groups, seen = Groups("cp_async"), []
    a, b = groups.add(), groups.add()
    groups.after(lambda: seen.append("a and b"))
    c = groups.add()
    b(), a()
    assert seen == ["a and b"]
    c()


@pytest.mark.parametrize("mode", ["late", "random"])
def test_an_agent_works_in_order(mode):
    queue, seen = AsyncQueue(Schedule(mode, seed=3)), []
    for i in range(6):
        queue.post("op", i % 2, lambda i=i: seen.append(i))
    assert seen == [] and len(queue) == 6
    while queue.run_one():
        pass
    assert [i for i in seen if i % 2 == 0] == [0, 2, 4] and sorted(seen) == list(range(6))
    early = AsyncQueue(Schedule("early"))
    early.post("op", 0, lambda: seen.append(9))
    assert seen[-1] == 9


def test_tensor_memory_allocation():
    tmem = TmemAllocator()
    assert tmem.alloc(256) == 0 and tmem.alloc(128) == 256 and tmem.alloc(128) == 384
    assert tmem.alloc(32) is None
    tmem.free(256, 128)
    assert tmem.alloc(64) == 256 and tmem.owned.sum() == 448
    for columns, message in (
        (48, "powers of two"),
        (1024, "powers of two"),
        (128, "must not grow"),
    ):
        with pytest.raises(MisuseError, match=message):
            tmem.alloc(columns)
    with pytest.raises(MisuseError, match="no allocation"):
        tmem.free(0, 128)
    tmem.relinquished = True
    with pytest.raises(MisuseError, match="relinquished"):
        tmem.alloc(32)


# ---- the instructions ----

SETUP = (
    PROLOGUE
    + """
mov.u32 %r1, dyn; add.u32 %r2, %r1, 8; shr.u32 %r9, %r0, 5; mov.u32 %r8, %laneid;
setp.ne.u32 %p0, %r0, 0;
@%p0 bra READY;
mbarrier.init.shared.b64 [%r1], 1; mbarrier.init.shared.b64 [%r2], 64;
READY: bar.sync 0;
setp.eq.u32 %p1, %r9, 0;
"""
)


def launch(body: str, engine="jit", block=64, **options):
    x = np.zeros(512, np.uint32)
    report = run(SETUP + body, x, block=block, smem=1024, engine=engine, **options)
    return x, report


def test_state_form_of_wait_and_drop(engine):
    """64 arrivals with a state, a wait on that state, then a phase of 63."""
    x, _ = launch(
        """
        mbarrier.arrive.shared.b64 %rd5, [%r2];
        W: mbarrier.try_wait.shared.b64 %p2, [%r2], %rd5;
        @!%p2 bra W;
        bar.sync 0;
        @%p0 bra ALL;
        mbarrier.arrive_drop.shared.b64 _, [%r2];
        bra OUT;
        ALL: mbarrier.arrive.shared.b64 _, [%r2];
        OUT: bar.sync 0;
        V: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 1;
        @!%p2 bra V;
        @!%p0 bra END;
        mbarrier.arrive.shared.b64 _, [%r2];
        U: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0;
        @!%p2 bra U;
        st.global.u32 [%rd1], %r0;
        END:
        """,
        engine,
    )
    assert np.array_equal(x[:64], np.arange(64))


def test_test_wait_lets_others_run(engine):
    """Warp 1 polls with test_wait until warp 0, which comes later, has arrived."""
    x, _ = launch(
        """
        @%p1 bra LATE;
        P: mbarrier.test_wait.parity.shared.b64 %p2, [%r1], 0;
        @!%p2 bra P;
        ld.shared.u32 %r5, [%r1+64]; st.global.u32 [%rd1], %r5;
        bra END;
        LATE: mov.u32 %r6, 77; st.shared.u32 [%r1+64], %r6;
        @%p0 bra END;
        mbarrier.arrive.shared.b64 _, [%r1];
        END:
        """,
        engine,
        schedule="early",
    )
    assert (x[32:64] == 77).all()


def test_named_barriers_of_part_of_the_block(engine):
    """Warps 0 and 1 meet at barrier 1; warp 1 only arrives at barrier 2, where warp 2 waits."""
    x, _ = launch(
        """
        setp.eq.u32 %p3, %r9, 2; setp.eq.u32 %p4, %r9, 3;
        @%p4 bra END;
        @%p3 bra THIRD;
        st.shared.u32 [%r1+64], %r9;
        barrier.sync 1, 64;
        @%p1 bra END;
        mov.u32 %r5, 5; st.shared.u32 [%r1+68], %r5;
        bar.arrive 2, 64;
        bra END;
        THIRD: bar.sync 2, 64;
        ld.shared.u32 %r6, [%r1+68]; st.global.u32 [%rd1], %r6;
        END:
        """,
        engine,
        block=128,
    )
    assert (x[64:96] == 5).all()


def test_bar_red(engine):
    x, _ = launch(
        """
        setp.lt.u32 %p3, %r0, 40;
        bar.red.popc.u32 %r5, 0, %p3;
        bar.red.or.pred %p4, 0, %p3;
        bar.red.and.pred %p5, 0, %p3;
        selp.u32 %r6, 100, 0, %p4; selp.u32 %r7, 1000, 0, %p5;
        add.u32 %r5, %r5, %r6; add.u32 %r5, %r5, %r7; st.global.u32 [%rd1], %r5;
        """,
        engine,
    )
    assert (x[:64] == 140).all()


def test_an_exited_warp_is_not_waited_for(engine):
    x, _ = launch("@%p1 exit; bar.sync 0; mov.u32 %r5, 3; st.global.u32 [%rd1], %r5;", engine)
    assert (x[32:64] == 3).all() and (x[:32] == 0).all()


CLUSTER = """
mov.u32 %r3, %cluster_ctarank; xor.b32 %r4, %r3, 1; mapa.shared::cluster.u32 %r5, %r1, %r4;
fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed; barrier.cluster.wait;
mov.u32 %r10, %ctaid.x; mad.lo.u32 %r11, %r10, 64, %r0;
mul.wide.u32 %rd1, %r11, 4; add.s64 %rd1, %rd0, %rd1;
"""


def test_distributed_shared_memory_and_remote_arrival(engine):
    """Each CTA writes its rank into the other's memory and arrives on the other's barrier."""
    x, _ = launch(
        CLUSTER
        + """
        @%p0 bra W;
        st.shared::cluster.u32 [%r5+64], %r3;
        mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r5];
        W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r1], 0;
        @!%p2 bra W;
        ld.shared.u32 %r6, [%r1+64]; add.u32 %r6, %r6, 10; st.global.u32 [%rd1], %r6;
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        """,
        engine,
        grid=2,
        cluster=2,
    )
    assert (x[:64] == 11).all() and (x[64:128] == 10).all()


@pytest.mark.parametrize("schedule", ["early", "late", "random:4"])
def test_st_async_and_red_async(engine, schedule):
    x, _ = launch(
        CLUSTER
        + """
        mov.u32 %r7, 0; st.shared.u32 [%r1+128], %r7;
        barrier.cluster.arrive; barrier.cluster.wait;
        @%p0 bra W;
        mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 12;
        add.u32 %r6, %r3, 20;
        st.async.mbarrier::complete_tx::bytes.shared::cluster.v2.b32 [%r5+64], {%r6, %r6}, [%r5];
        red.async.relaxed.cluster.mbarrier::complete_tx::bytes.shared::cluster.add.u32
            [%r5+128], %r6, [%r5];
        W: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0;
        @!%p2 bra W;
        ld.shared.u32 %r6, [%r1+68]; ld.shared.u32 %r7, [%r1+128]; add.u32 %r6, %r6, %r7;
        st.global.u32 [%rd1], %r6;
        barrier.cluster.arrive; barrier.cluster.wait;
        """,
        engine,
        grid=2,
        cluster=2,
        schedule=schedule,
    )
    assert (x[:64] == 42).all() and (x[64:128] == 40).all()


def test_cluster_launch_control_takes_over_the_grid(engine):
    """One cluster cancels the others one by one and does their work; then the request fails."""
    x, _ = launch(
        """
        mov.u32 %r20, %ctaid.x; mov.u32 %r21, 0; add.u32 %r22, %r1, 64;
        LOOP: mul.wide.u32 %rd5, %r20, 4; add.s64 %rd5, %rd0, %rd5;
        mov.u32 %r23, %ctaid.x; add.u32 %r23, %r23, 1;
        @!%p0 st.global.u32 [%rd5], %r23;
        bar.sync 0;
        @%p0 bra W;
        mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 16;
        clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128
            [%r22], [%r1];
        W: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], %r21;
        @!%p2 bra W;
        xor.b32 %r21, %r21, 1;
        ld.shared.v2.b64 {%rd6, %rd7}, [%r22]; mov.b128 %q0, {%rd6, %rd7};
        clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p3, %q0;
        @!%p3 bra END;
        clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r20, %r24, %r25, %r26}, %q0;
        bra LOOP;
        END:
        """,
        engine,
        grid=5,
    )
    assert x[:5].tolist() == [1, 1, 1, 1, 1], "CTA 0 did all tiles; the others never started"


def test_setmaxnreg_waits_for_the_pool(engine):
    """512 threads start with 128 registers each: 240 fits only after others gave theirs back."""
    body = """
    setp.lt.u32 %p3, %r9, 4; setp.lt.u32 %p4, %r9, 8;
    @%p3 bra UP;
    @%p4 bra UP2;
    setmaxnreg.dec.sync.aligned.u32 24;
    bra END;
    UP: setmaxnreg.inc.sync.aligned.u32 232;
    bra END;
    UP2: setmaxnreg.inc.sync.aligned.u32 {};
    END:
    """
    launch(body.format(232), engine, block=512)
    with pytest.raises(DeadlockError, match=r"registers \(wanted"):
        launch(body.format(240), engine, block=512)
    with pytest.raises(MisuseError, match="multiples of 8"):
        launch("setmaxnreg.inc.sync.aligned.u32 130;", engine)


def test_cp_async_arrival_waits_for_the_copies(engine):
    for schedule in ("early", "late", "random:1"):
        x, _ = launch(
            """
            shl.b32 %r5, %r0, 2; add.u32 %r6, %r1, %r5; st.global.u32 [%rd1+1024], %r0;
            cp.async.ca.shared.global [%r6+64], [%rd1+1024], 4;
            cp.async.mbarrier.arrive.noinc.shared.b64 [%r2];
            W: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0;
            @!%p2 bra W;
            ld.shared.u32 %r7, [%r6+64]; st.global.u32 [%rd1], %r7;
            """,
            engine,
            schedule=schedule,
        )
        assert np.array_equal(x[:64], np.arange(64))


# ---- misuse ----


@pytest.mark.parametrize(
    "body, message",
    [
        ("mbarrier.arrive.shared.b64 _, [%r1+64];", "no mbarrier was initialised at smem"),
        ("mbarrier.arrive.shared.b64 _, [%r2], 3;", "expects only"),
        ("mbarrier.try_wait.parity.shared.b64 %p2, [%r1+4], 0;", "no mbarrier"),
        ("mbarrier.init.shared.b64 [%r1+20], 1;", "8-byte aligned"),
        ("mbarrier.init.shared.b64 [%r1+64], 0;", "count 0"),
        ("bar.sync 1, 48;", "multiple of 32"),
        ("bar.sync 16, 64;", "0..15"),
        ("@%p0 bar.sync 1, 64;", "only lanes"),
        (
            "or.b32 %r3, %r1, 0x1000000; mbarrier.arrive.shared::cluster.b64 _, [%r3];",
            "names CTA 1",
        ),
        ("barrier.cluster.arrive; barrier.cluster.arrive;", "second arrival"),
        ("setp.ne.u32 %p3, %r9, 0; @%p3 bar.sync 1, 64; @!%p3 bar.sync 1, 96;", "came for"),
    ],
)
def test_misuse_names_the_ptx_line(body, message, engine):
    with pytest.raises(MisuseError, match=message) as error:
        launch(body, engine)
    assert "PTX line" in str(error.value)


# ---- deadlock ----

PLAN = {
    "roles": [
        {"name": "load", "start": 0, "stop": 1},
        {"name": "mma", "start": 1, "stop": 2},
    ],
    "edges": [
        {
            "name": "kv",
            "stages": 1,
            "producer_arrivals": 1,
            "consumer_arrivals": 64,
            "ordered_by": None,
        }
    ],
    "barriers": [{"name": "stats", "id": 3, "threads": 64}],
    "smem": {"fields": []},
}
STUCK = """
@%p1 bra LOAD;
W: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0;
@!%p2 bra W;
bra END;
LOAD: @%p0 bra WAIT;
mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 256;
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1+128], [%rd0], 240, [%r1];
WAIT: bar.sync 3, 64;
END:
"""


@pytest.mark.parametrize("schedule", ["early", "late"])
def test_deadlock_report(engine, schedule):
    with pytest.raises(DeadlockError) as error:
        launch(STUCK, engine, plan=PLAN, schedule=schedule)
    text = str(error.value)
    assert "load (warp 0) waits on named barrier 'stats' (3), 32 of 64 threads are there" in text
    assert "mma (warp 1) waits on mbarrier kv.full[0] parity 0 (smem+0, phase 0)" in text
    assert "missing 16 bytes" in text
    assert "bar.sync" in text and "mbarrier.try_wait" in text and "PTX line" in text


def test_deadlock_report_without_a_plan(engine):
    with pytest.raises(DeadlockError) as error:
        launch(STUCK, engine)
    assert "(warp 1) waits on mbarrier smem+0 parity 0" in str(error.value)


def test_deadlock_groups_equal_warps(engine):
    with pytest.raises(DeadlockError, match=r"warps 1-3"):
        launch("@%p1 bra END; bar.sync 1, 128; END:", engine, block=128)
