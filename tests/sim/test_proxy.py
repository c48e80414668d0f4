"""Ordinary stores that an asynchronous unit reads need a fence of the writer in between."""

from __future__ import annotations

import numpy as np
import pytest

from fa_cute.errors import MisuseError
from tests.sim.asm import Program

STORE = "cp.async.bulk.global.shared::cta.bulk_group [%target], [smem+1024], 64;"
DONE = "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
FENCE = "fence.proxy.async.shared::cta;"


def run(before: str, after: str, engine: str, **options):
    """Warp 0 writes 64 bytes, `before`, a barrier, `after` in all warps; thread 32 stores them."""
    target = np.zeros(16, np.uint32)
    body = f"""
setp.lt.u32 %p0, %t, 16;
setp.eq.u32 %p1, %t, 32;
shl.b32 %r0, %t, 2; add.s32 %r0, %r0, %base; add.s32 %r1, %t, 100;
@%p0 st.shared.b32 [%r0+1024], %r1;
{before}
bar.sync 0;
{after}
@%p1 {STORE}
{DONE}
"""
    program = Program("sm_90a", body, {"target": target})
    report = program.run(threads=64, smem=4096, engine=engine, **options)
    np.testing.assert_array_equal(target, np.arange(16) + 100)
    return report


def test_a_fence_of_the_writer_makes_it_right(engine):
    assert not run(FENCE, "", engine).warnings


def test_without_a_fence_it_is_an_error(engine):
    with pytest.raises(MisuseError, match=r"warp 0 of CTA 0 .*no fence\.proxy\.async"):
        run("", "", engine)


def test_a_fence_for_global_memory_does_not_help(engine):
    with pytest.raises(MisuseError, match="no fence"):
        run("fence.proxy.async.global;", "", engine)


def test_a_fence_of_the_reader_only_is_a_warning(engine):
    report = run("", f"@%p1 {FENCE}", engine)
    assert any("another warp" in text for text in report.warnings)


def test_a_store_after_the_fence_is_noticed(engine):
    with pytest.raises(MisuseError, match="no fence"):
        run(f"@%p0 {FENCE} @%p0 st.shared.b32 [%r0+1024], %r1;", "", engine)


def test_marks_are_recycled(engine):
    """More fences than there are marks."""
    loop = f"""
mov.b32 %r5, 0;
AGAIN:
@%p0 st.shared.b32 [%r0+1024], %r1;
@%p0 {FENCE}
add.s32 %r5, %r5, 1;
setp.lt.u32 %p3, %r5, 600;
@%p3 bra AGAIN;
"""
    assert not run(loop, "", engine).warnings
    with pytest.raises(MisuseError, match="no fence"):
        run(f"{loop} @%p0 st.shared.b32 [%r0+1024], %r1;", "", engine)
