"""The happens-before checker: what is ordered is silent, what is not is named."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sim.tiny import run

SETUP = """
mov.u32 %r0, %tid.x; ld.param.u64 %rd0, [a0]; mul.wide.u32 %rd1, %r0, 4; add.s64 %rd1, %rd0, %rd1;
mov.u32 %r1, dyn; shl.b32 %r2, %r0, 2; and.b32 %r2, %r2, 127; add.u32 %r2, %r2, %r1;
shr.u32 %r9, %r0, 5; setp.eq.u32 %p1, %r9, 0; setp.ne.u32 %p0, %r0, 0;
@%p0 bra READY;
mbarrier.init.shared.b64 [%r1+512], 1; mbarrier.init.shared.b64 [%r1+520], 32;
READY: bar.sync 0;
"""


def races(body: str, engine="jit", block=64, **options) -> list:
    x = np.zeros(512, np.uint32)
    return run(SETUP + body, x, block=block, smem=1024, engine=engine, races=True, **options).races


def test_two_warps_without_a_barrier(engine):
    """Warp 0 writes, warp 1 reads the same words; in order warp 0 comes first, and still."""
    body = """
    @!%p1 bra READ;
    st.shared.u32 [%r2], %r0;
    bra END;
    READ: {wait} ld.shared.u32 %r3, [%r2];
    END:
    """
    found = races(body.format(wait=""), engine)
    assert len(found) == 1
    text = str(found[0])
    assert "a read by warp 1 of CTA 0" in text and "a write by warp 0 of CTA 0" in text
    assert "ld.shared.u32" in text and "st.shared.u32" in text and "smem +0" in text


@pytest.mark.parametrize("schedule", ["early", "late", "random:1", "priority:2"])
def test_a_named_barrier_orders(schedule, engine):
    body = "@%p1 st.shared.u32 [%r2], %r0; bar.sync 1, 64; ld.shared.u32 %r3, [%r2];"
    assert not races(body, engine, schedule=schedule)


def test_an_arrival_orders_only_what_came_before_it():
    body = """
    @!%p1 bra READ;
    st.shared.u32 [%r2], %r0;
    mbarrier.arrive.shared.b64 _, [%r1+520];
    {after}
    bra END;
    READ: W: mbarrier.try_wait.parity.shared.b64 %p2, [%r1+520], 0;
    @!%p2 bra W;
    ld.shared.u32 %r3, [%r2];
    END:
    """
    assert not races(body.format(after=""))
    assert races(body.format(after="st.shared.u32 [%r2], %r0;"), schedule="priority:1")


COPY = """
@%p0 bra OTHERS;
mbarrier.arrive.expect_tx.shared.b64 _, [%r1+512], 128;
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd0], 128, [%r1+512];
OTHERS:
{wait}
ld.shared.u32 %r3, [%r2];
"""
WAIT = "W: mbarrier.try_wait.parity.shared.b64 %p2, [%r1+512], 0; @!%p2 bra W;"


def test_a_copy_is_ordered_by_its_mbarrier(engine):
    assert not races(COPY.format(wait=WAIT), engine)
    found = races(COPY.format(wait="bar.sync 2, 64;"), engine)
    assert any("cp.async.bulk" in str(r) for r in found), (
        "a barrier of threads does not wait for it"
    )


STORE = """
@!%p1 bra END;
st.shared.u32 [%r2], %r0; fence.proxy.async.shared::cta; bar.warp.sync -1;
@%p0 bra AGAIN;
cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r1], 128;
cp.async.bulk.commit_group;
{wait}
AGAIN: bar.warp.sync -1;
st.shared.u32 [%r2], %r0;
END:
"""


def test_a_store_is_ordered_by_its_group(engine):
    assert not races(STORE.format(wait="cp.async.bulk.wait_group.read 0;"), engine)
    assert not races(STORE.format(wait="cp.async.bulk.wait_group 0;"), engine)
    (race,) = races(STORE.format(wait="cp.async.bulk.wait_group.read 1;"), engine)
    assert "a read by bulk operations" in str(race)


def test_async_copies_are_ordered_by_wait_group_or_mbarrier():
    body = """
    @!%p1 bra END;
    cp.async.ca.shared.global [%r2], [%rd1], 4;
    {wait}
    ld.shared.u32 %r3, [%r2];
    END:
    """
    assert races(body.format(wait=""))
    assert not races(body.format(wait="cp.async.commit_group; cp.async.wait_group 0;"))
    assert not races(body.format(wait="cp.async.wait_all;"))
    barrier = """
    cp.async.mbarrier.arrive.noinc.shared.b64 [%r1+520];
    W: mbarrier.try_wait.parity.shared.b64 %p2, [%r1+520], 0;
    @!%p2 bra W;
    """
    assert not races(body.format(wait=barrier))


TMEM = """
@!%p1 bra END;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;
ld.shared.u32 %r5, [%r1];
tcgen05.st.sync.aligned.32x32b.x1.b32 [%r5], {{%r0}};
{wait}
tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r6}}, [%r5];
tcgen05.wait::ld.sync.aligned;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 32;
END:
"""


def test_tensor_memory_stores_are_ordered_by_their_wait():
    assert not races(TMEM.format(wait="tcgen05.wait::st.sync.aligned;"))
    (race,) = races(TMEM.format(wait=""))
    assert race.space == "tmem" and "column 0, lanes 0.." in str(race)


def test_remote_writes_are_ordered_by_a_cluster_barrier():
    body = """
    mov.u32 %r3, %cluster_ctarank; xor.b32 %r4, %r3, 1; mapa.shared::cluster.u32 %r5, %r2, %r4;
    barrier.cluster.arrive; barrier.cluster.wait;
    @%p1 st.shared::cluster.u32 [%r5], %r3;
    {wait}
    @%p1 ld.shared.u32 %r6, [%r2];
    barrier.cluster.arrive; barrier.cluster.wait;
    """
    options = {"grid": 4, "cluster": 2}
    ordered = body.format(wait="barrier.cluster.arrive; barrier.cluster.wait;")
    assert not races(ordered, **options)
    assert races(body.format(wait=""), **options)


def test_our_forward_has_no_race():
    torch = pytest.importorskip("torch")
    pytest.importorskip("cutlass")
    from fa_cute import flash_attn_func
    from fa_cute.sim import host

    q, k, v = (torch.randn(1, 300, 1, 64, dtype=torch.bfloat16) for _ in range(3))
    with host.session("sm_100a", dsl=False, races=True, schedule="priority:1") as s:
        flash_attn_func(q, k, v, causal=True, backend="sim")
    assert s.launches and not s.launches[-1].races, "\n".join(map(str, s.launches[-1].races))
