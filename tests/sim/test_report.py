"""Reports, names, the timeline's files, the progress bar."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fa_cute.sim import progress
from fa_cute.sim.report import Names, _ranges
from fa_cute.sim.timeline import Timeline
from tests.sim.tiny import PROLOGUE, run

PLAN = {
    "roles": [{"name": "mma", "start": 0, "stop": 1}, {"name": "softmax", "start": 1, "stop": 3}],
    "edges": [],
    "barriers": [{"name": "tmem", "id": 1, "threads": 96}],
    "smem": {"fields": []},
}


def test_timeline_files(tmp_path):
    x = np.zeros(96, np.uint32)
    body = PROLOGUE + "bar.sync 1, 96; st.global.u32 [%rd1], %r0;"
    timeline = run(body, x, block=96, trace=True, plan=PLAN).timeline
    timeline.save_chrome(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {"CTA (0, 0, 0)", "mma 0", "softmax 1", "softmax 2"} <= names
    assert all(e["dur"] > 0 for e in events if e["ph"] == "X")
    pytest.importorskip("matplotlib")
    timeline.save_png(tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes()[:4] == b"\x89PNG"


def test_a_waiting_warp_takes_the_clock_of_the_last_arrival():
    """Warp 0 runs 100 more instructions before the barrier: warp 1 leaves it no earlier."""
    x = np.zeros(64, np.uint32)
    body = (
        PROLOGUE
        + """
    setp.ge.u32 %p0, %r0, 32;
    @%p0 bra MEET;
    mov.u32 %r1, 0;
    L: add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 50;
    @%p1 bra L;
    MEET: bar.sync 0; st.global.u32 [%rd1], %r0;
    """
    )
    events = run(body, x, block=64, trace=True).timeline.events
    waits = [e for e in events if e.what == "wait"]
    assert [e.lane for e in waits] == ["warp 1"] and waits[0].stop > 150
    late = [e for e in events if e.lane == "warp 1" and e.what == "run"]
    assert late[-1].start == waits[0].stop


def test_empty_intervals_are_dropped():
    timeline = Timeline()
    timeline.add((0, 0, 0), "a", 5, 5)
    assert timeline.events == []


def test_names_and_ranges():
    names = Names(PLAN)
    assert names.role(2) == "softmax" and names.role(9) == "warp 9"
    assert names.barrier(1) == "named barrier 'tmem' (1)" and names.barrier(4) == "named barrier 4"
    assert _ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


def test_report_text_counts_and_warns():
    x = np.zeros(256, np.float32)
    body = (
        PROLOGUE
        + """
    mov.u32 %r1, dyn; shl.b32 %r2, %r0, 2; add.u32 %r2, %r2, %r1; st.shared.u32 [%r2], %r0;
    fence.proxy.async.shared::cta; bar.warp.sync -1;
    setp.ne.u32 %p0, %r0, 0;
    @%p0 bra END;
    cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r1], 128;
    cp.async.bulk.commit_group;
    END:
    """
    )
    report = run(body, x, smem=128)
    text = str(report)
    assert report.counters["bulk.store"] == 128 and "bulk.store: 128" in text
    assert "leaves without waiting" in text
    waited = body.replace("commit_group;", "commit_group; cp.async.bulk.wait_group.read 0;")
    assert not run(waited, x, smem=128).warnings
    assert np.array_equal(x[:32].view(np.uint32), np.arange(32))


def test_progress_appears_only_when_it_takes_long(capsys):
    with progress.bar(3, "quick", None) as bar:
        bar.update(1)
    assert capsys.readouterr().err == ""
    with progress.bar(3, "asked for", True) as bar:
        bar.update(1)
        bar.update(1)
    assert "asked for" in capsys.readouterr().err
    with progress.bar(3, "never", False) as bar:
        assert bar is None
