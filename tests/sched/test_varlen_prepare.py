"""The kernel that lists tiles leaves what the same code gives on ints; kernels find it there."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from typing import Any

import cutlass.cute as cute
import pytest
import torch
from cutlass import BFloat16, Float32, Int32, const_expr
from cutlass.cute import runtime

from fa_cute import arch as archs
from fa_cute import sched, tune
from fa_cute.cli_kernels import PACKED
from fa_cute.compile import Request, build
from fa_cute.fwd.args import FwdSpec
from fa_cute.ops import seqlen
from fa_cute.ops.mask import Band
from fa_cute.sched import varlen
from fa_cute.sched.varlen import Work
from fa_cute.sched.varlen_prepare import Prepare, order_of
from fa_cute.sched.varlen_sides import Side
from fa_cute.sim import host
from fa_cute.sim.host_runtime import HostProgram

FORWARD = Work("q", 128, 64, 512, descending=True)
BACKWARD = Work("k", 64, 128, 2048, descending=False, owners=True)
FULL = ("cu_q", "cu_k")
SMS = 5


@dataclass(frozen=True)
class Walker:
    """Lists the tiles; then every CTA adds 1 to ``seen[sequence, block, head]`` and notes lengths
    and the order of its walk.
    """

    work: Work
    once: bool = False
    dealt: bool = False
    free: bool = False  # there is a number of CTAs to deal to, and it is 0

    @cute.jit
    def __call__(self, sequences, totals, mWork, seen, sms, stream):
        cu_q, cu_k, used_q, used_k, *limits = sequences
        total_q, total_k, heads, per = totals
        sides = Side(cu_q, used_q, total_q), Side(cu_k, used_k, total_k)
        prepare = Prepare(self.work, sms if self.dealt else 0 if self.free else None)
        made = prepare(*sides, heads, per, Band(*limits), mWork, stream)
        total = total_q if const_expr(self.work.owner == "q") else total_k
        order = order_of(self.work, made, total, heads, self.once)
        self.kernel(order, seqlen.Varlen(made.records), seen).launch(
            grid=order.grid(sms), block=(32, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, order: Any, seqlens: Any, seen: cute.Tensor):
        cute.arch.griddepcontrol_wait()
        walk = sched.here(order)
        tile = walk.tile()
        while tile.valid:
            at = seqlens.at(tile)
            if cute.arch.lane_idx() == 0:
                where = (tile.batch, tile.m_block, tile.head)
                seen[where] = seen[where] + 1 + 10 * at.q + 100_000 * at.k
            walk = walk.next()
            tile = walk.tile()


def compile_walker(walker: Walker, given: tuple[str, ...], limits: tuple):
    """The walker for lengths that are ``given``; ``limits`` are ints where there are any."""
    fake, size, one = runtime.make_fake_compact_tensor, cute.sym_int, Int32(1)
    lengths = tuple(
        fake(Int32, (size(),), stride_order=(0,)) if name in given else None
        for name in ("cu_q", "cu_k", "used_q", "used_k")
    )
    seen = fake(Int32, (size(), size(), size()), stride_order=(2, 1, 0))
    work = runtime.make_fake_tensor(Int32, (cute.sym_int64(),), (1,), assumed_align=16)
    stream = runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    limits = tuple(None if n is None else one for n in limits)
    args = (*lengths, *limits), (one, one, one, one), work, seen, one, stream
    return cute.compile(walker, *args, options="--enable-tvm-ffi")


@dataclass(frozen=True)
class Call:
    """What a call gets, and what the sequences are."""

    given: dict
    totals: tuple[int, int]
    spans: list[tuple[int, int, int, int]]  # (offset_q, len_q, offset_k, len_k)


def packed(rng: random.Random, count: int, longest: int, given: tuple[str, ...]) -> Call:
    """Random sequences in whatever form."""
    tensors, totals, spans = {}, [], []
    for side in "qk":
        rooms = [rng.choice((0, 1, rng.randint(0, longest))) for _ in range(count)]
        if f"cu_{side}" not in given:
            rooms = [longest] * count
        lengths = rooms
        if f"used_{side}" in given:
            lengths = [rng.randint(0, room + 2) for room in rooms]  # too many are cut
            tensors[f"used_{side}"] = torch.tensor(lengths, dtype=torch.int32)
            lengths = [min(pair) for pair in zip(lengths, rooms, strict=True)]
        offsets = [sum(rooms[:s]) for s in range(count)]
        if f"cu_{side}" in given:
            tensors[f"cu_{side}"] = torch.tensor([*offsets, sum(rooms)], dtype=torch.int32)
        totals.append(sum(rooms))
        spans.append(list(zip(offsets, lengths, strict=True)))
    return Call(tensors, tuple(totals), [(*q, *k) for q, k in zip(*spans, strict=True)])


def equal(count: int, length: int) -> Call:
    """Sequences of one length."""
    cu = torch.arange(count + 1, dtype=torch.int32) * length
    spans = [(length * s, length, length * s, length) for s in range(count)]
    return Call({"cu_q": cu, "cu_k": cu}, (count * length,) * 2, spans)


def check(
    compiled, walker: Walker, call: Call, heads: tuple[int, int], limits: tuple, num_sms: int = SMS
) -> None:
    """Workspace, walk and lengths against the lists on ints."""
    work, count = walker.work, len(call.spans)
    at = work.workspace(count, *call.totals, heads[0] // heads[1])
    memory = torch.full((at.size,), -7, dtype=torch.int32)
    blocks = max(-(-n // 64) for span in call.spans for n in (span[1], span[3]))
    seen = torch.zeros((count, blocks + 1, heads[0]), dtype=torch.int32)
    lengths = tuple(call.given.get(name) for name in ("cu_q", "cu_k", "used_q", "used_k"))
    compiled((*lengths, *limits), (*call.totals, *heads), memory, seen, num_sms)

    sms = num_sms if walker.dealt else 0 if walker.free else None
    want = varlen.lists(work, call.spans, *heads, Band(*limits), sms)
    parts = [
        (0, [want.header[0][:4]]),
        *((at.records + 8 * s, [r[:6]]) for s, r in enumerate(want.records)),
        (at.entries, want.entries),
    ]
    if work.owners:
        parts += [(at.owner_q, [want.owner_q]), (at.owner_k, [want.owner_k])]
    for start, rows in parts:
        flat = [x for row in rows for x in row]
        assert memory[start : start + len(flat)].tolist() == flat
    expected = torch.zeros_like(seen)
    for s, (_, len_q, _, len_k) in enumerate(call.spans):
        tiles = work.tiles_q(len_q) if work.owner == "q" else work.tiles_k(len_k)
        expected[s, :tiles] = 1 + 10 * len_q + 100_000 * len_k
    assert torch.equal(seen, expected)


@pytest.mark.parametrize(
    ("walker", "given", "limits"),
    [
        (Walker(FORWARD, dealt=True), FULL, (None, 0)),
        (Walker(FORWARD, dealt=True), FULL, (60, 70)),
        (Walker(FORWARD, free=True), FULL, (None, 0)),
        (Walker(FORWARD, once=True), ("used_q", "used_k"), (100, None)),
        (Walker(BACKWARD, once=True), (*FULL, "used_q", "used_k"), (None, None)),
        (Walker(BACKWARD), ("cu_k", "used_q"), (30, 40)),
    ],
)
def test_the_kernel_and_the_code_on_ints_agree(walker: Walker, given, limits) -> None:
    rng = random.Random(0)
    with host.session("sm_100a") as session:
        compiled = compile_walker(walker, given, limits)
        for count, longest, heads in (
            (1, 300, (4, 2)),
            (1, 0, (3, 1)),
            (9, 700, (6, 1)),
            (32, 150, (4, 1)),
            (33, 150, (2, 1)),
            (40, 0, (2, 2)),
            (70, 200, (1, 1)),
        ):
            check(compiled, walker, packed(rng, count, longest, given), heads, limits)
        assert not any(launch.unset for launch in session.launches)


@pytest.mark.parametrize("walker", [Walker(FORWARD, dealt=True), Walker(BACKWARD, once=True)])
def test_numbers_that_decrease_stay_within_the_room_there_is(walker: Walker) -> None:
    """Sequences that lie over each other have more tiles than the workspace of a backward: those
    past its end are empty.
    """
    work, total = walker.work, 1000
    cu = torch.tensor([0, total, -5, 2**31 - 1, 300, total, 0, 70], dtype=torch.int32)
    count = len(cu) - 1
    at = work.workspace(count, total, total, 2)
    memory = torch.full((at.size,), -7, dtype=torch.int32)
    seen = torch.zeros((count, 20, 2), dtype=torch.int32)
    with host.session("sm_90a") as session:
        compiled = compile_walker(walker, FULL, (None, None))
        compiled((cu, cu, None, None, None, None), (total, total, 2, 1), memory, seen, SMS)
        assert not any(launch.unset for launch in session.launches)
    rooms = [work.tiles(side, total, count) for side in "qk"]
    records = memory[at.records :][: 8 * count].unflatten(0, (count, 8)).tolist()
    done = 0
    for s, (offset_q, len_q, offset_k, len_k, first_q, first_k, *_) in enumerate(records):
        tiles = work.tiles_q(len_q), work.tiles_k(len_k)
        assert max(offset_q + len_q, offset_k + len_k) <= total
        assert not any(tiles) or (first_q + tiles[0] <= rooms[0] and first_k + tiles[1] <= rooms[1])
        own = tiles[0 if work.owner == "q" else 1]
        assert (seen[s, :own] == 1 + 10 * len_q + 100_000 * len_k).all() and not seen[s, own:].any()
        done += own
    assert records[0][1] == total and memory[0] == done


def test_long_sequences_go_in_sections_and_thousands_are_listed() -> None:
    rng, walker = random.Random(1), Walker(FORWARD, dealt=True)
    with host.session("sm_90a") as session:
        compiled = compile_walker(walker, FULL, (None, 0))
        long = packed(rng, 3, 40_000, FULL)
        check(compiled, walker, long, (12, 1), (None, 0))
        check(compiled, walker, packed(rng, 2300, 300, FULL), (1, 1), (None, 0))
        check(compiled, walker, equal(1100, 34), (1, 1), (None, 0))
        listing = session.launches[-4]
        assert "Prepare" in listing.kernel and listing.instructions < 150_000


def test_heads_one_at_a_time_where_sequences_are_long() -> None:
    rng, walker = random.Random(2), Walker(replace(BACKWARD, alone=True), once=True)
    with host.session("sm_90a"):
        compiled = compile_walker(walker, FULL, (None, None))
        for count, longest, heads in ((3, 5000, 3), (40, 2500, 2), (33, 900, 4), (1100, 40, 2)):
            check(compiled, walker, packed(rng, count, longest, FULL), (heads, 1), (None, None))


@pytest.mark.parametrize(
    ("count", "length", "right", "most"),
    [(32, 1024, 0, 12_000), (2, 16_384, 0, 8_000), (32, 1024, None, 10_000)],
)
def test_few_sequences_are_listed_by_a_few_instructions(
    count: int, length: int, right: int | None, most: int
) -> None:
    """Warp instructions of the whole CTA, of which a fifth is what one warp does alone. Where all
    tiles are alike nothing is sorted.
    """
    dealt, mask = length < 6144, (None, right)
    walker = Walker(replace(FORWARD, tile_q=192), dealt=dealt, free=not dealt)
    with host.session("sm_90a") as session:
        compiled = compile_walker(walker, FULL, mask)
        check(compiled, walker, equal(count, length), (16, 1), mask, num_sms=132)
        listing = session.launches[0]
    assert "Prepare" in listing.kernel
    assert listing.instructions < most


def test_alike_and_not_quite() -> None:
    """Without a limit: sequences of as many blocks, of one more in one of them, a single one."""
    walker = Walker(FORWARD, dealt=True)
    with host.session("sm_90a"):
        compiled = compile_walker(walker, FULL, (None, None))
        for lengths in ((700,) * 5, (700, 700, 765, 700), (130, 700, 0), (900,)):
            ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()
            spans = [(int(s), n, int(s), n) for s, n in zip(ends, lengths, strict=False)]
            call = Call({"cu_q": ends, "cu_k": ends}, (sum(lengths),) * 2, spans)
            check(compiled, walker, call, (4, 1), (None, None))


def test_races_of_the_listing_kernel() -> None:
    """No two threads of the kernel meet without a barrier in between."""
    rng = random.Random(2)
    with host.session("sm_90a", races=True) as session:
        for walker in (Walker(BACKWARD, once=True), Walker(FORWARD, dealt=True)):
            compiled = compile_walker(walker, FULL, (None, 0))
            check(compiled, walker, packed(rng, 70, 900, FULL), (4, 1), (None, 0))
            check(compiled, walker, packed(rng, 20, 900, FULL), (4, 1), (None, 0))
        assert not any(launch.races for launch in session.launches)


OVERLAPS = 6  # cudaLaunchAttributeProgrammaticStreamSerialization


def test_a_kernel_that_overlaps_the_listing_waits_for_it(monkeypatch, tmp_path) -> None:
    """The main kernel may be launched early, and so may the listing; before they wait, they touch
    nothing of global memory.
    """
    seen, launch = {}, HostProgram.launch

    def noted(program, config, handle, args):
        attributes = [config.attributes[i] for i in range(config.num_attributes)]
        name = program._kernel_names[handle - 1]
        seen["Prepare" in name] = any(x.id == OVERLAPS and x.value[0] for x in attributes)
        return launch(program, config, handle, args)

    monkeypatch.setattr(HostProgram, "launch", noted)
    walker, limits = Walker(FORWARD, dealt=True), (None, 0)
    with host.session("sm_90a"):
        compiled = compile_walker(walker, FULL, limits)
        check(compiled, walker, equal(3, 200), (2, 1), limits)
    assert seen == {True: True, False: True}

    spec = FwdSpec(head_dim=64, head_dim_v=64, dtype="bf16", causal=True, varlen=True)
    sm90 = archs.get("sm_90a")
    request = Request("forward", tune.forward(spec, sm90), spec, sm90, lengths=PACKED)
    text = build(request, f"--keep-ptx --dump-dir {tmp_path}").artifacts.PTX
    kernels = {"Prepare" in part.split("(")[0]: part for part in text.split(".entry ")[1:]}
    for kernel, then in ((kernels[True], "st.global"), (kernels[False], "cp.async.bulk.tensor")):
        assert "griddepcontrol.launch_dependents" in kernel
        before, wait, after = kernel.partition("griddepcontrol.wait")
        assert not re.search(r"\b(ld\.global|st\.global|cp\.async|atom\.|red\.)", before)
        assert wait and "ld.global" in after and then in after


@dataclass(frozen=True)
class Filler:
    """Lists the tiles and fills the rows of no sequence."""

    @cute.jit
    def __call__(self, sequences, tensors, lse, mWork, stream):
        cu_q, used_q, cu_k = sequences
        out, dk, dv = tensors
        sides = (
            Side(cu_q, used_q, out.shape[0], zeros=(out,), lse=lse),
            Side(cu_k, None, dk.shape[0], zeros=(dk, dv)),
        )
        Prepare(FORWARD)(*sides, out.shape[1], 1, Band(), mWork, stream)


def compile_filler(has_cu: bool):
    """The filler for tensors of any stride; ``has_cu``: queries lie one after the other."""
    fake, size, wide = runtime.make_fake_compact_tensor, cute.sym_int, cute.sym_int64

    def rows(dim):
        stride = (wide(divisibility=8), wide(divisibility=8), 1)
        return runtime.make_fake_tensor(BFloat16, (size(), size(), dim), stride, assumed_align=16)

    def ints():
        return fake(Int32, (size(),), stride_order=(0,))

    sequences = (ints() if has_cu else None, ints(), ints())
    lse = fake(Float32, (size(), size()), stride_order=(1, 0))
    work = runtime.make_fake_tensor(Int32, (wide(),), (1,), assumed_align=16)
    stream = runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    args = Filler(), sequences, (rows(64), rows(40), rows(64)), lse, work, stream
    return cute.compile(*args, options="--enable-tvm-ffi")


def ints_of(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("has_cu", [True, False])
def test_rows_of_no_sequence_are_filled(has_cu: bool) -> None:
    """Before, between and after: 0 and -inf there, nothing else touched, strides respected."""
    with host.session("sm_90a"):
        fill, nan = compile_filler(has_cu), float("nan")
        for lengths, rooms, tail in (
            ((3, 0, 7, 40), (5, 2, 7, 90), 3),
            ((0,), (2,), 700),
            ((1, 0) * 40, (2,) * 80, 0),
            ((5, 6), (5, 6), 0),
        ):
            if not has_cu:
                rooms, tail = (max(rooms),) * len(rooms), 0
            start = 4 * has_cu
            offsets = [start + sum(rooms[:s]) for s in range(len(rooms))]
            total = start + sum(rooms) + tail
            cu = ints_of([*offsets, start + sum(rooms)]) if has_cu else None
            out = torch.full((total, 6, 80), nan).bfloat16()[:, ::2, 8:72]
            lse = torch.full((3, total), nan)
            keys = (
                torch.full((100, 3, 40), nan).bfloat16(),
                torch.full((100, 3, 64), nan).bfloat16(),
            )
            at = FORWARD.workspace(len(rooms), total, 100, 3)
            memory = torch.zeros(at.size, dtype=torch.int32)
            cu_k = ints_of([10, *(11 + s for s in range(len(rooms)))])
            fill((cu, ints_of(lengths), cu_k), (out, *keys), lse, memory)
            used = torch.zeros(total, dtype=torch.bool)
            for offset, length in zip(offsets, lengths, strict=True):
                used[offset : offset + length] = True
            assert out[used].isnan().all() and lse[:, used].isnan().all()
            assert (out[~used] == 0).all() and (lse[:, ~used] == float("-inf")).all()
            assert out._base[:, 1::2].isnan().all() and out._base[:, :, :8].isnan().all()
            for tensor in keys:
                assert tensor[10 : 10 + len(rooms)].isnan().all()
                assert (tensor[:10] == 0).all() and (tensor[10 + len(rooms) :] == 0).all()
