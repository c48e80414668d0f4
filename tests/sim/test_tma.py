"""Bulk and tensor copies: swizzles, clusters, groups, cp.async; what schedules may do to them."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from fa_cute.errors import MisuseError, OutOfBoundsError
from fa_cute.sim import layouts as lay
from fa_cute.sim import tensormap
from tests.sim.asm import SMEM_BASE, Program, mbarrier_wait

LOAD = "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
MODES = ("early", "late", "random:5")


def tensor_map(array, box, swizzle="none", dtype="f16"):
    made = tensormap.TensorMap(
        array.ctypes.data, array.ndim, dtype, array.itemsize, swizzle,
        tuple(reversed(array.shape)), tuple(reversed(array.strides)), tuple(box),
    )  # fmt: skip
    return tensormap.encode(made)


def copy_out(nbytes: int, at: int = 1024) -> str:
    """Thread t stores bytes 4t.. of shared memory at `at` to %out (its CTA's part)."""
    copies = "".join(
        f"ld.shared.b32 %r1, [%r0+{at + i}]; st.global.b32 [%d0+{i}], %r1;\n"
        for i in range(0, nbytes, 512)
    )
    return f"""
mul.wide.u32 %d0, %rank, {nbytes}; add.s64 %d0, %d0, %out;
mul.wide.u32 %d1, %t, 4; add.s64 %d0, %d0, %d1;
shl.b32 %r0, %t, 2; add.s32 %r0, %r0, %base;
{copies}
"""


SETUP = """
setp.eq.u32 %p0, %t, 0;
@%p0 mbarrier.init.shared.b64 [smem], 1;
@%p0 fence.mbarrier_init.release.cluster;
bar.sync 0;
"""


@pytest.mark.parametrize("schedule", MODES)
@pytest.mark.parametrize(
    ("swizzle", "width"), [("none", 32), ("32B", 16), ("64B", 32), ("128B", 64)]
)
def test_a_tile_is_loaded_swizzled_and_stored_back(swizzle, width, schedule):
    rng = np.random.default_rng(0)
    source = rng.integers(1, 2**16, (40, 96), dtype=np.uint16)
    target = np.zeros_like(source)
    rows, nbytes = 16, 16 * width * 2
    out = np.zeros(nbytes, np.uint8)
    body = f"""
{SETUP}
@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [smem], {nbytes};
mov.b32 %r10, 8; mov.b32 %r11, 3;
@%p0 {LOAD} [smem+1024], [%from, {{%r10, %r11}}], [smem];
{mbarrier_wait("smem", 0, "W")}
{copy_out(nbytes)}
fence.proxy.async.shared::cta;
bar.sync 0;
@%p0 {STORE} [%into, {{%r10, %r11}}], [smem+1024];
@%p0 cp.async.bulk.commit_group;
@%p0 cp.async.bulk.wait_group 0;
"""
    maps = {
        "from": tensor_map(source, (width, rows), swizzle),
        "into": tensor_map(target, (width, rows), swizzle),
    }
    program = Program("sm_90a", body, {**maps, "out": out})
    for array, name in ((source, "source"), (target, "target")):
        program.memory.add_array(array, name)
    report = program.run(smem=8192, schedule=schedule)
    tile = np.ascontiguousarray(source[3:19, 8 : 8 + width]).view(np.uint8).reshape(-1)
    got = np.zeros_like(tile)
    for i in range(nbytes):
        at = lay.swizzle(SMEM_BASE + 1024 + i, swizzle) - SMEM_BASE - 1024
        got[i] = out[at]
    np.testing.assert_array_equal(got, tile)
    want = np.zeros_like(source)
    want[3:19, 8 : 8 + width] = source[3:19, 8 : 8 + width]
    np.testing.assert_array_equal(target, want)
    assert report.counters["tma.load"] == report.counters["tma.store"] == nbytes


def test_stores_skip_what_lies_outside_and_reductions_add():
    source = np.zeros((8, 16), np.float32)
    target = np.ones((6, 24), np.float32)
    data = np.arange(8 * 8, dtype=np.float32)
    reduce = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group"
    body = f"""
{SETUP}
@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [smem], 256;
@%p0 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes
    [smem+1024], [%data], 256, [smem];
{mbarrier_wait("smem", 0, "W")}
mov.b32 %r10, 20; mov.b32 %r11, 2; mov.b32 %r12, 4;
@%p0 {reduce} [%into, {{%r10, %r11}}], [smem+1024];
@%p0 {reduce} [%into, {{%r12, %r12}}], [smem+1024];
@%p0 cp.async.bulk.commit_group;
@%p0 cp.async.bulk.wait_group 0;
"""
    params = {"into": tensor_map(target, (8, 8), dtype="f32"), "data": data}
    program = Program("sm_90a", body, params)
    program.memory.add_array(target, "target")
    program.run(threads=32, smem=4096)
    box, want = data.reshape(8, 8), np.ones((6, 24), np.float32)
    want[2:6, 20:24] += box[:4, :4]
    want[4:6, 4:12] += box[:2]
    np.testing.assert_array_equal(target, want)
    assert not source.any()


@pytest.mark.parametrize("schedule", MODES)
def test_multicast_reaches_every_cta_of_the_mask(schedule):
    source = np.arange(64 * 8, dtype=np.uint16).reshape(8, 64)
    out = np.zeros((4, 1024), np.uint8)
    load = LOAD.replace("shared::cta", "shared::cluster") + ".multicast::cluster"
    body = f"""
{SETUP}
barrier.cluster.arrive; barrier.cluster.wait;
setp.ne.u32 %p1, %rank, 1;
and.pred %p1, %p1, %p0;
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [smem], 1024;
setp.eq.u32 %p2, %rank, 1;
and.pred %p3, %p2, %p0;
mov.b32 %r10, 0; mov.b16 %h0, 13;
@%p3 {load} [smem+1024], [%from, {{%r10, %r10}}], [smem], %h0;
@%p2 bra DONE;
{mbarrier_wait("smem", 0, "W")}
{copy_out(1024)}
DONE:
barrier.cluster.arrive; barrier.cluster.wait;
"""
    program = Program("sm_90a", body, {"from": tensor_map(source, (64, 8)), "out": out})
    program.memory.add_array(source, "source")
    program.run(ctas=4, cluster=4, smem=4096, schedule=schedule)
    for rank in (0, 2, 3):
        np.testing.assert_array_equal(out[rank], source.view(np.uint8).reshape(-1))
    assert not out[1].any()


def test_a_pair_signals_the_barrier_of_its_leader():
    source = np.arange(64 * 16, dtype=np.uint16).reshape(16, 64)
    out = np.zeros((2, 1024), np.uint8)
    load = LOAD.replace("shared::cta", "shared::cluster") + ".cta_group::2"
    body = f"""
{SETUP}
barrier.cluster.arrive; barrier.cluster.wait;
setp.eq.u32 %p1, %rank, 0;
and.pred %p2, %p1, %p0;
@%p2 mbarrier.arrive.expect_tx.shared.b64 _, [smem], 2048;
and.b32 %r20, %base, 0xFEFFFFFF;
mov.b32 %r10, 0; shl.b32 %r11, %rank, 3;
add.s32 %r21, %base, 1024;
@%p0 {load} [%r21], [%from, {{%r10, %r11}}], [%r20];
@!%p1 bra JOIN;
{mbarrier_wait("smem", 0, "W")}
JOIN:
barrier.cluster.arrive; barrier.cluster.wait;
{copy_out(1024)}
"""
    program = Program("sm_100a", body, {"from": tensor_map(source, (64, 8)), "out": out})
    program.memory.add_array(source, "source")
    for schedule in MODES:
        out[:] = 0
        program.run(ctas=2, cluster=2, smem=4096, schedule=schedule)
        np.testing.assert_array_equal(out.reshape(-1), source.view(np.uint8).reshape(-1))


def test_shared_memory_of_a_peer_is_written_and_signalled():
    data = np.arange(256, dtype=np.uint8)
    out = np.zeros((2, 512), np.uint8)
    body = f"""
{SETUP}
barrier.cluster.arrive; barrier.cluster.wait;
setp.eq.u32 %p1, %rank, 0;
and.pred %p2, %p1, %p0;
@!%p2 bra READ;
mbarrier.arrive.expect_tx.shared.b64 _, [smem], 256;
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [smem+1024], [%data], 256, [smem];
{mbarrier_wait("smem", 0, "W0")}
mapa.shared::cluster.u32 %r20, %base, 1;
cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes
    [%r20+2048], [smem+1024], 256, [%r20];
READ:
@%p1 bra DONE;
@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [smem], 256;
{mbarrier_wait("smem", 0, "W1")}
{copy_out(512, 2048)}
DONE:
barrier.cluster.arrive; barrier.cluster.wait;
"""
    program = Program("sm_90a", body, {"data": data, "out": out})
    for schedule in MODES:
        out[:] = 0
        program.run(ctas=2, cluster=2, smem=4096, schedule=schedule, unset="ignore")
        np.testing.assert_array_equal(out[1, :256], data)


def test_wait_group_read_releases_the_source_before_the_data_has_arrived():
    """Late: after `.read` the target is still old; after the full wait it is new."""
    target, seen = np.zeros(64, np.uint32), np.zeros(2, np.uint32)
    body = """
setp.eq.u32 %p0, %t, 0;
@!%p0 bra DONE;
mov.b32 %r0, 7;
st.shared.v4.b32 [smem+1024], {%r0, %r0, %r0, %r0};
fence.proxy.async.shared::cta;
cp.async.bulk.global.shared::cta.bulk_group [%target], [smem+1024], 16;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 0;
ld.global.b32 %r1, [%target];
st.global.b32 [%seen], %r1;
cp.async.bulk.wait_group 0;
ld.global.b32 %r1, [%target];
st.global.b32 [%seen+4], %r1;
DONE:
"""
    program = Program("sm_90a", body, {"target": target, "seen": seen})
    program.run(threads=32, smem=4096, schedule="late")
    assert seen.tolist() == [0, 7]


@pytest.mark.parametrize("schedule", MODES)
def test_cp_async_copies_zero_fills_and_waits_per_group(schedule):
    source = np.arange(1, 32 * 16 + 1, dtype=np.uint32).view(np.uint8)[: 32 * 16].copy()
    out = np.zeros(512, np.uint8)
    body = f"""
shl.b32 %r0, %lane, 4; add.s32 %r1, %r0, %base;
cvt.u64.u32 %d2, %r0; add.s64 %d2, %d2, %source;
and.b32 %r2, %lane, 15; sub.s32 %r2, 16, %r2;
cp.async.cg.shared.global [%r1+1024], [%d2], 16, %r2;
cp.async.commit_group;
cp.async.wait_group 0;
bar.warp.sync -1;
{copy_out(512)}
"""
    program = Program("sm_90a", body, {"source": source, "out": out})
    program.run(threads=128, smem=4096, schedule=schedule)
    want = source.reshape(32, 16).copy()
    for lane in range(32):
        want[lane, 16 - lane % 16 :] = 0
    np.testing.assert_array_equal(out.reshape(32, 16), want)


BULK = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes"


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (f"@%p0 {BULK} [smem+1024], [%data], 24, [smem];", MisuseError, "multiple of 16"),
        (f"@%p0 {BULK} [smem+1032], [%data], 16, [smem];", MisuseError, "aligned"),
        (f"{BULK} [smem+1024], [%data], 16, [smem];", MisuseError, "elect.sync"),
        (f"@%p0 {BULK} [smem+4096], [%data], 16, [smem];", OutOfBoundsError, "outside the 4096"),
        (f"@%p0 {BULK} [smem+1024], [%data+256], 16, [smem];", OutOfBoundsError, "data"),
        (f"@%p0 {BULK} [smem+1024], [%data], 16, [smem+64];", MisuseError, "no mbarrier"),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%data], [smem+1024], 16;",
         MisuseError, "elect.sync"),
        ("@%p0 cp.reduce.async.bulk.global.shared::cta.bulk_group.min.f32 [%data], [smem], 16;",
         MisuseError, "min of f32"),
    ],
)  # fmt: skip
def test_misuse(text, error, message):
    data = np.zeros(256, np.uint8)
    body = f"{SETUP}\n{text}\n"
    with pytest.raises(error, match=message):
        Program("sm_90a", body, {"data": data}).run(threads=32, smem=4096)


LOAD_5D = LOAD.replace("2d", "5d")
STORE_5D = STORE.replace("2d", "5d")


BACK = 1 << 30  # rows that the last dimension of `ragged_map` takes away again


def mapped(*shape: int) -> np.ndarray:
    """Zeros in pages of their own, far above address 0 (small arrays may lie in a heap that is
    not): BACK rows before them is still an address.
    """
    count = int(np.prod(shape))
    return np.frombuffer(mmap.mmap(-1, 2 * count), np.uint16, count).reshape(shape)


def ragged_map(array, box_rows: int, shifted: bool) -> bytes:
    """Rows of a tensor as (columns, rows, 1, ends, back): one row stride twice, and a step back
    over all of memory. ``shifted``: instead a base that lies BACK rows before the tensor.
    """
    rows, cols = array.shape
    pitch = array.strides[0]
    made = tensormap.TensorMap(
        array.ctypes.data - shifted * BACK * pitch, 5, "f16", 2, "none",
        (cols, rows, 1, BACK + 1, BACK + 1), (2, pitch, 4096, pitch, (1 << 34) - pitch),
        (cols, box_rows, 1, 1, 1),
    )  # fmt: skip
    return tensormap.encode(made)


def move_rows(source, target, start: int, end: int, shifted: bool = False) -> None:
    """Rows of the sequence [start, end) through shared memory, in one box of 8."""
    rows = len(source)
    body = f"""
{SETUP}
mov.b32 %r10, 0; mov.b32 %r11, {rows - (end - start)}; mov.b32 %r12, {BACK - rows + end};
mov.b32 %r13, {0 if shifted else BACK};
@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [smem], 256;
@%p0 {LOAD_5D} [smem+1024], [%from, {{%r10, %r11, %r10, %r12, %r13}}], [smem];
{mbarrier_wait("smem", 0, "W")}
@%p0 {STORE_5D} [%into, {{%r10, %r11, %r10, %r12, %r13}}], [smem+1024];
@%p0 cp.async.bulk.commit_group;
@%p0 cp.async.bulk.wait_group 0;
"""
    maps = {"from": ragged_map(source, 8, shifted), "into": ragged_map(target, 8, shifted)}
    program = Program("sm_90a", body, maps)
    for array, name in ((source, "source"), (target, "target")):
        extent = (len(array) - 1) * array.strides[0] + 2 * array.shape[1]
        program.memory.add(array.ctypes.data, extent, name)
    program.run(threads=32, smem=4096)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("pitch", [16, 40])
@pytest.mark.parametrize(("start", "end"), [(0, 3), (5, 20), (12, 20), (19, 20), (0, 20)])
def test_maps_that_end_with_a_sequence(start: int, end: int, pitch: int, shifted: bool) -> None:
    """Only rows of the sequence move, up to the box; nothing beside it is touched."""
    rng = np.random.default_rng(0)
    source, target = (mapped(20, pitch)[:, :16] for _ in range(2))
    source[:] = rng.integers(1, 2**16, source.shape)
    move_rows(source, target, start, end, shifted)
    want = np.zeros_like(target)
    want[start : min(end, start + 8)] = source[start : min(end, start + 8)]
    np.testing.assert_array_equal(target, want)


def test_a_load_of_nothing_reads_the_base() -> None:
    """As the H200 does: a base with nothing behind it is no address for it."""
    source, target = mapped(20, 16), mapped(20, 16)
    target[:] = 1
    move_rows(source, target, 3, 3)
    assert target.all()
    with pytest.raises(OutOfBoundsError, match="the map's base"):
        move_rows(source, target, 3, 3, shifted=True)


def test_what_lies_before_the_tensor_is_still_checked() -> None:
    """A box that is inside the map but not inside the tensor: rows before the first one."""
    memory = np.zeros((60, 16), np.uint16)
    source, target = memory[40:], np.zeros((20, 16), np.uint16)
    with pytest.raises(OutOfBoundsError, match="source"):
        move_rows(source, target, -10, 0)
