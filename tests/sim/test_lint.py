"""Loads from tensor memory that a release may overtake."""

from __future__ import annotations

import pytest

from fa_cute.sim import lint, ptx

LOAD = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1, %r2}, [%r0];"
WAIT = "tcgen05.wait::ld.sync.aligned;"
ARRIVE = "mbarrier.arrive.shared.b64 _, [%r9];"
USE = "add.f32 %r3, %r1, %r2;"


def findings(body: str):
    text = f"""
.version 8.8
.target sm_100a
.address_size 64
.visible .entry k()
{{
.reg .b32 %r<12>; .reg .pred %p<2>;
{body}
ret;
}}
"""
    return lint.overtaken_loads(ptx.parse(text).kernels["k"])


@pytest.mark.parametrize(
    "body",
    [
        f"{LOAD} {WAIT} {ARRIVE}",
        f"{LOAD} {USE} {ARRIVE}",
        f"{LOAD} mov.b32 %r1, 0; mov.b32 %r2, 0; {ARRIVE}",  # overwritten: ordered by the register
        f"{LOAD} @%p0 bra L; {WAIT} {ARRIVE} ret; L: {USE} {ARRIVE}",
        f"L: {LOAD} {WAIT} {ARRIVE} @%p0 bra L;",
        f"{ARRIVE} {LOAD} {USE}",
        f"{LOAD} st.shared.v2.b32 [%r9], {{%r1, %r2}}; bar.sync 0;",
    ],
)
def test_ordered_loads(body):
    assert findings(body) == []


@pytest.mark.parametrize(
    ("body", "unread"),
    [
        (f"{LOAD} {ARRIVE} {USE}", 2),
        (f"{LOAD} mov.b32 %r3, %r1; {ARRIVE} {USE}", 1),
        (f"{LOAD} @%p0 bra L; {WAIT} L: {ARRIVE}", 2),  # on one path only
        (f"L: {ARRIVE} {LOAD} @%p0 bra L; {WAIT}", 2),  # around the loop
        (f"{LOAD} bar.sync 0; {USE}", 2),
    ],
)
def test_overtaken_loads(body, unread):
    (found,) = findings(body)
    assert found.registers == unread
    assert "may overtake" in str(found)
