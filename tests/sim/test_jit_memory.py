"""Native loads, stores and atomics: values, masks, bounds, alignment, bytes never written."""

from __future__ import annotations

import numpy as np
import pytest

from fa_cute.errors import MisuseError, OutOfBoundsError, UnknownInstructionError
from fa_cute.sim import jit
from tests.sim import jit_tools as t

BASE = 0x400


def make(body: str, smem_bytes: int = 4096, ranks: int = 1, rank: int = 0, valid=True, **bind):
    """A warp of `body` with shared memories (bytes start at BASE) bound to it."""
    warp = t.program(body).warp()
    smem = [np.zeros(BASE + smem_bytes, np.uint8) for _ in range(ranks)]
    shadow = [np.zeros(BASE + smem_bytes, np.uint8) for _ in range(ranks)]
    warp.bind(smem=smem, valid=shadow if valid else None, base=0, rank=rank, **bind)
    return warp, smem, shadow


def finish(warp) -> None:
    stop = warp.run()
    assert stop >> 60 == jit.KIND_EXIT, warp.error()


def addresses(offsets, rank: int = 0) -> np.ndarray:
    return (np.asarray(offsets) + BASE + (rank << 24)).astype(np.uint32)


_DTYPES = {"b8": "u1", "b16": "u2", "b32": "u4", "b64": "u8"}


@pytest.mark.parametrize(
    "kind,vector",
    [(k, v) for k in _DTYPES for v in (1, 2, 4) if np.dtype(_DTYPES[k]).itemsize * v <= 16],
)
def test_shared_round_trip(kind, vector):
    dtype = _DTYPES[kind]
    size = np.dtype(dtype).itemsize * vector
    reg = {"b8": "%rs", "b16": "%rs", "b32": "%r", "b64": "%rd"}[kind]
    values = "{" + ", ".join(f"{reg}{i + 1}" for i in range(vector)) + "}"
    loaded = "{" + ", ".join(f"{reg}{i + 11}" for i in range(vector)) + "}"
    suffix = f".v{vector}" if vector > 1 else ""
    if vector == 1:
        values, loaded = values[1:-1], loaded[1:-1]
    body = (
        f"st.shared{suffix}.{kind} [%r50+16], {values}; "
        f"ld.shared{suffix}.{kind} {loaded}, [%r50+16];"
    )
    warp, smem, shadow = make(body)
    gen = np.random.default_rng(size)
    lanes = gen.permutation(32)
    data = gen.integers(0, 1 << 63, (vector, 32), np.uint64).astype(dtype)
    t.set_rows(warp, "%r50", addresses(lanes * size))
    for i in range(vector):
        t.set_rows(warp, f"{reg}{i + 1}", data[i])
    finish(warp)
    stored = smem[0][BASE + 16 : BASE + 16 + 32 * size].view(dtype).reshape(32, vector)
    assert (stored[lanes] == data.T).all()
    for i in range(vector):
        assert (t.rows_of(warp, f"{reg}{i + 11}") == data[i]).all()
    assert shadow[0][BASE + 16 : BASE + 16 + 32 * size].all() and shadow[0].sum() == 32 * size
    assert warp.ctx.unset_count == 0


def test_signed_loads_extend_to_the_register():
    body = (
        "ld.shared.s8 %r1, [%r50]; ld.shared.u8 %r2, [%r50]; ld.shared.s16 %rd1, [%r50]; "
        "ld.shared.s8 %rs1, [%r50];"
    )
    warp, smem, _ = make(body, valid=False)
    smem[0][BASE : BASE + 2] = [0x80, 0xFF]
    t.set_rows(warp, "%r50", addresses(0))
    finish(warp)
    assert (t.rows_of(warp, "%r1") == 0xFFFFFF80).all() and (t.rows_of(warp, "%r2") == 0x80).all()
    assert (t.rows_of(warp, "%rd1") == np.uint64(0xFFFFFFFFFFFFFF80)).all()
    assert (t.rows_of(warp, "%rs1") == 0xFF80).all()


def test_only_executing_lanes_touch_memory_and_registers():
    body = (
        "setp.lt.u32 %p1, %r1, 5; @%p1 st.shared.b32 [%r50], %r1; @!%p1 ld.shared.b32 %r2, [%r50];"
    )
    warp, smem, _ = make(body, valid=False)
    smem[0][BASE : BASE + 128].view("u4")[:] = 1000 + np.arange(32)
    t.set_rows(warp, "%r50", addresses(np.arange(32) * 4))
    t.set_rows(warp, "%r1", np.arange(32))
    t.set_rows(warp, "%r2", 77)
    warp.start(0x00FFFFFF)
    finish(warp)
    memory = smem[0][BASE : BASE + 128].view("u4")
    assert memory[:5].tolist() == [0, 1, 2, 3, 4] and (memory[5:] == 1000 + np.arange(5, 32)).all()
    loaded = t.rows_of(warp, "%r2")
    assert (
        (loaded[:5] == 77).all()
        and (loaded[5:24] == 1000 + np.arange(5, 24)).all()
        and (loaded[24:] == 77).all()
    )


def test_unset_bytes_are_counted_with_the_first_place():
    body = (
        "st.shared.b32 [%r50], %r1; ld.shared.v2.b32 {%r2, %r3}, [%r51]; "
        "ld.shared.b8 %r4, [%r51+2];"
    )
    warp, *_ = make(body)
    t.set_rows(warp, "%r50", addresses(np.arange(32) * 8))
    t.set_rows(warp, "%r51", addresses(np.arange(32) * 8))
    finish(warp)
    assert warp.ctx.unset_count == 32  # the upper halves of the pairs; the byte was written
    assert warp.ctx.unset_pc == 1 and warp.ctx.unset_addr == BASE


def test_other_ctas_memory_needs_shared_cluster():
    body = (
        "mapa.shared::cluster.u32 %r1, %r50, 1; st.shared::cluster.b32 [%r1], %r2; "
        "ld.shared::cluster.b32 %r3, [%r1]; getctarank.shared::cluster.u32 %r4, %r1;"
    )
    warp, smem, shadow = make(body, ranks=2, rank=0)
    t.set_rows(warp, "%r50", addresses(np.arange(32) * 4))
    t.set_rows(warp, "%r2", np.arange(32) + 5)
    finish(warp)
    assert (smem[1][BASE : BASE + 128].view("u4") == np.arange(32) + 5).all() and not smem[0].any()
    assert (t.rows_of(warp, "%r3") == np.arange(32) + 5).all() and (
        t.rows_of(warp, "%r4") == 1
    ).all()
    assert shadow[1].sum() == 128
    warp, *_ = make("st.shared.b32 [%r50], %r2;", ranks=2, rank=0)
    t.set_rows(warp, "%r50", addresses(0, rank=1))
    assert warp.run() >> 60 == jit.KIND_ERROR
    assert isinstance(warp.error(), MisuseError) and "shared memory" in str(warp.error())
    warp, *_ = make("st.shared::cluster.b32 [%r50], %r2;", ranks=2, rank=0)
    t.set_rows(warp, "%r50", addresses(0, rank=2))
    assert warp.run() >> 60 == jit.KIND_ERROR and isinstance(warp.error(), MisuseError)


@pytest.mark.parametrize(
    "offset,kind,error",
    [
        (4096, "b32", OutOfBoundsError),
        (4094, "b16", None),
        (4088, "v4.b32", OutOfBoundsError),
        (4092, "b64", OutOfBoundsError),
        (20, "b64", MisuseError),
        (-4, "b32", OutOfBoundsError),
        (2, "b32", MisuseError),
        (8, "v4.b32", MisuseError),
    ],
)
def test_shared_limits(offset, kind, error):
    reg = {"b16": "%rs1", "b32": "%r1", "b64": "%rd1", "v4.b32": "{%r1, %r2, %r3, %r4}"}[kind]
    warp, *_ = make(f"add.s32 %r60, %r60, 1; st.shared.{kind} [%r50], {reg};")
    rows = addresses(np.zeros(32, int))
    rows[7] = BASE + offset
    t.set_rows(warp, "%r50", rows)
    stop = warp.run()
    if error is None:
        assert stop >> 60 == jit.KIND_EXIT
        return
    assert stop >> 60 == jit.KIND_ERROR and warp.ctx.error_lane == 7
    problem = warp.error()
    assert (
        isinstance(problem, error)
        and "lane 7" in str(problem)
        and f"{BASE + offset:#x}" in str(problem)
    )
    assert "PTX line" in str(problem)


def global_warp(body: str, *tensors: np.ndarray):
    extents = sorted((a.ctypes.data, a.ctypes.data + a.nbytes) for a in tensors)
    warp, smem, _ = make(body, extents=np.array(extents, np.uint64))
    return warp, smem[0]


def test_global_gather_and_scatter():
    gen = np.random.default_rng(1)
    source = gen.integers(0, 1 << 32, 256, np.uint64).astype(np.uint32)
    target = np.zeros(64, np.uint64)
    body = (
        "ld.global.v2.b32 {%r1, %r2}, [%rd1+8]; mov.b64 %rd3, {%r1, %r2}; "
        "st.global.b64 [%rd2], %rd3;"
    )
    warp, _ = global_warp(body, source, target)
    pick, place = gen.integers(0, 100, 32), gen.permutation(64)[:32]
    t.set_rows(warp, "%rd1", (source.ctypes.data + pick * 8).astype(np.uint64))
    t.set_rows(warp, "%rd2", (target.ctypes.data + place * 8).astype(np.uint64))
    finish(warp)
    assert (target[place] == source.view(np.uint64)[pick + 1]).all()


@pytest.mark.parametrize(
    "shift,error", [(0, None), (4, OutOfBoundsError), (-4, OutOfBoundsError), (2, MisuseError)]
)
def test_global_limits(shift, error):
    arrays = [np.zeros(32, np.uint32) for _ in range(3)]
    for middle in arrays:
        warp, _ = global_warp("ld.global.b32 %r1, [%rd1];", *arrays)
        address = middle.ctypes.data + (124 if shift > 0 else 0) + shift
        if error is OutOfBoundsError and any(
            a.ctypes.data <= address < a.ctypes.data + 128 for a in arrays
        ):
            continue
        t.set_rows(warp, "%rd1", np.uint64(address))
        stop = warp.run()
        assert (stop >> 60 == jit.KIND_EXIT) == (error is None)
        if error:
            assert isinstance(warp.error(), error)


def test_generic_addresses_choose_the_space():
    data = np.arange(32, dtype=np.uint32)
    body = (
        "cvta.shared.u64 %rd2, %rd1; st.b32 [%rd2], %r1; ld.b32 %r2, [%rd3]; "
        "cvta.to.shared.u64 %rd4, %rd2; isspacep.shared %p1, %rd2; "
        "isspacep.global %p2, %rd3;"
    )
    warp, smem = global_warp(body, data)
    t.set_rows(warp, "%rd1", (BASE + np.arange(32) * 4).astype(np.uint64))
    t.set_rows(warp, "%rd3", (data.ctypes.data + np.arange(32)[::-1] * 4).astype(np.uint64))
    t.set_rows(warp, "%r1", np.arange(32) + 3)
    finish(warp)
    assert (smem[BASE : BASE + 128].view("u4") == np.arange(32) + 3).all()
    assert (t.rows_of(warp, "%r2") == np.arange(32)[::-1]).all()
    assert (t.rows_of(warp, "%rd4") == BASE + np.arange(32) * 4).all()
    assert t.rows_of(warp, "%p1").all() and t.rows_of(warp, "%p2").all()


def test_local_memory_belongs_to_a_lane():
    body = """.local .align 8 .b8 other[12]; .local .align 16 .b8 depot[32];
    mov.b64 %rd1, depot; cvta.local.u64 %rd2, %rd1; shl.b32 %r2, %r1, 2; and.b32 %r2, %r2, 28;
    cvt.u64.u32 %rd3, %r2; add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3;
    st.local.b32 [%rd4], %r1; ld.local.b32 %r3, [%rd4]; ld.b32 %r4, [%rd5];
    st.local.b64 [other], %rd3; ld.local.b32 %r5, [depot+28]; isspacep.local %p1, %rd5;"""
    warp, *_ = make(body)
    t.set_rows(warp, "%r1", np.arange(32) + 100)
    finish(warp)
    for name in ("%r3", "%r4"):
        assert (t.rows_of(warp, name) == np.arange(32) + 100).all()
    own = np.arange(32) + 100
    assert (t.rows_of(warp, "%r5") == np.where(own % 8 == 7, own, 0)).all()
    assert t.rows_of(warp, "%p1").all()
    warp, *_ = make(".local .align 4 .b8 d[8]; st.local.b32 [d+16], %r1;")
    assert warp.run() >> 60 == jit.KIND_ERROR and isinstance(warp.error(), OutOfBoundsError)


def test_parameters():
    params = np.arange(64, dtype=np.uint8) + 1
    body = """ld.param.b64 %rd1, [p0]; ld.param.v4.b32 {%r1, %r2, %r3, %r4}, [p1+16];
    ld.param.v2.b8 {%rs1, %rs2}, [p1+2]; mov.b64 %rd2, p1; cvta.param.u64 %rd3, %rd2;
    ld.global.b32 %r5, [%rd3+4]; ld.param.b32 %r6, [%rd2+4];"""
    extents = np.array([[params.ctypes.data, params.ctypes.data + 64]], np.uint64)
    warp, *_ = make(body, params=params, extents=extents)
    finish(warp)
    words = params.view(np.uint32)
    assert (t.rows_of(warp, "%rd1") == params.view(np.uint64)[0]).all()
    assert [int(t.rows_of(warp, f"%r{i}")[3]) for i in (1, 2, 3, 4)] == words[8:12].tolist()
    assert t.rows_of(warp, "%rs1")[0] == 19 and t.rows_of(warp, "%rs2")[31] == 20
    assert (t.rows_of(warp, "%r5") == words[5]).all() and (t.rows_of(warp, "%r6") == words[5]).all()


@pytest.mark.parametrize(
    "op,kind,rule",
    [
        ("add", "u32", lambda o, v: o + v),
        ("min", "s32", lambda o, v: min(o, v)),
        ("max", "u32", lambda o, v: max(o, v)),
        ("or", "b32", lambda o, v: o | v),
        ("exch", "b32", lambda o, v: v),
        ("inc", "u32", lambda o, v: 0 if o >= v else o + 1),
        ("add", "u64", lambda o, v: o + v),
    ],
)
def test_atomics_go_lane_after_lane(op, kind, rule):
    reg = "%rd" if kind.endswith("64") else "%r"
    cell = np.zeros(4, np.uint64)
    cell[0] = 3
    warp, _ = global_warp(f"atom.global.{op}.{kind} {reg}2, [%rd1], {reg}3;", cell)
    values = np.arange(32) % 7 + 1
    t.set_rows(warp, "%rd1", np.uint64(cell.ctypes.data))
    t.set_rows(warp, f"{reg}3", values)
    finish(warp)
    state, seen = 3, []
    for v in values:
        seen.append(state)
        state = rule(state, int(v))
    assert int(cell[0]) == state and t.rows_of(warp, f"{reg}2").tolist() == seen


def test_compare_and_swap_and_float_add():
    cell, total = np.zeros(1, np.uint32), np.zeros(1, np.float32)
    body = (
        "atom.global.cas.b32 %r2, [%rd1], %r3, %r4; red.global.add.f32 [%rd2], %r5; "
        "red.shared.add.u32 [%r50], 1;"
    )
    extents = sorted((a.ctypes.data, a.ctypes.data + 4) for a in (cell, total))
    warp, smem, _ = make(body, extents=np.array(extents, np.uint64), valid=False)
    t.set_rows(warp, "%rd1", np.uint64(cell.ctypes.data))
    t.set_rows(warp, "%rd2", np.uint64(total.ctypes.data))
    t.set_rows(warp, "%r3", np.arange(32))
    t.set_rows(warp, "%r4", np.arange(32) + 1)
    t.set_rows(warp, "%r5", np.full(32, 0.5, np.float32).view("u4"))
    t.set_rows(warp, "%r50", addresses(0))
    finish(warp)
    assert cell[0] == 32 and total[0] == 16 and smem[0][BASE : BASE + 4].view("u4")[0] == 32


def test_unknown_forms_name_the_line():
    with pytest.raises(UnknownInstructionError, match=r"PTX line \d+.*frobnicate"):
        t.program("frobnicate.b32 %r1, %r2;")
    with pytest.raises(UnknownInstructionError, match=r"add\.rq\.f32"):
        t.program("add.rq.f32 %r1, %r2, %r3;")
    with pytest.raises(UnknownInstructionError, match="%rd1"):
        t.program("add.s32 %r1, %rd1, %r3;")


def fragment(tile: np.ndarray, transposed: bool) -> np.ndarray:
    """Register of an 8x8 matrix of halves, lane by lane as the ISA's tables say."""
    out = np.zeros((32, 2), np.uint16)
    for lane in range(32):
        for half in range(2):
            row, col = lane // 4, 2 * (lane % 4) + half
            out[lane, half] = tile[col, row] if transposed else tile[row, col]
    return out.view(np.uint32)[:, 0]


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_matrices(number, trans):
    gen = np.random.default_rng(number)
    tiles = gen.integers(0, 1 << 16, (number, 8, 8)).astype(np.uint16)
    regs = "{" + ", ".join(f"%r{i + 1}" for i in range(number)) + "}"
    more = "{" + ", ".join(f"%r{i + 11}" for i in range(number)) + "}"
    kind = f"sync.aligned.m8n8.x{number}{trans}.shared.b16"
    body = f"ldmatrix.{kind} {regs}, [%r50+32]; stmatrix.{kind} [%r51], {regs}; "
    body += f"mov.b32 %r11, %r52; ldmatrix.{kind} {more}, [%r11]; "
    body += "movmatrix.sync.aligned.m8n8.trans.b16 %r40, %r1;"
    warp, smem, shadow = make(body)
    places = gen.permutation(64)[: 8 * number] * 16
    for i, at in enumerate(places):
        smem[0][BASE + 32 + at : BASE + 48 + at] = tiles.reshape(-1, 8)[i].view(np.uint8)
        shadow[0][BASE + 32 + at : BASE + 48 + at] = 1
    t.set_rows(warp, "%r50", np.resize(addresses(places), 32))
    t.set_rows(warp, "%r51", np.resize(addresses(2048 + places), 32))
    t.set_rows(warp, "%r52", np.resize(addresses(2048 + places), 32))
    finish(warp)
    for i in range(number):
        want = fragment(tiles[i], bool(trans))
        assert (t.rows_of(warp, f"%r{i + 1}") == want).all()
        assert (t.rows_of(warp, f"%r{i + 11}") == want).all()
    for i, at in enumerate(places):
        at += BASE + 2048
        assert (smem[0][at : at + 16].view(np.uint16) == tiles.reshape(-1, 8)[i]).all()
        assert shadow[0][at : at + 16].all()
    first = t.rows_of(warp, "%r1").view(np.uint16).reshape(8, 8)
    assert (t.rows_of(warp, "%r40") == fragment(first, True)).all()
    assert warp.ctx.unset_count == 0


def test_matrices_need_a_whole_warp_and_written_rows():
    kind = "sync.aligned.m8n8.x4.shared.b16"
    warp, *_ = make(f"ldmatrix.{kind} {{%r1, %r2, %r3, %r4}}, [%r50];")
    t.set_rows(warp, "%r50", addresses(np.arange(32) * 16))
    finish(warp)
    assert warp.ctx.unset_count == 32
    warp.start(0xFFFF)
    assert warp.run() >> 60 == jit.KIND_ERROR and isinstance(warp.error(), MisuseError)
