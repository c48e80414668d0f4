"""Sequences of different lengths in the Hopper backward: each as if it were alone, bit for bit."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fa_cute import compile, launch, reference, tune
from fa_cute.bwd.args import BwdSpec, Sizes, workspace_floats
from fa_cute.bwd.sm90 import plan
from fa_cute.sim import host

from .. import tolerance
from .test_sm90_sim import DTYPES, HOPPER, SCHEDULES, poisoned_outputs  # noqa: F401  (a fixture)

pytest.importorskip("cutlass", reason="the kernels are compiled by NVIDIA's CuTe DSL")

# Of queries and of keys: empty ones anywhere, ends inside a tile, several tiles.
LENGTHS = ([0, 70, 1, 0, 200, 5, 64, 0], [3, 0, 1, 0, 150, 260, 128, 0])


def starts(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


class Batch:
    """Packed tensors; rows that no sequence uses are NaN, and so is what lies beside heads."""

    arch = HOPPER

    def __init__(self, spec: BwdSpec, lengths=LENGTHS, window=(None, None), heads_kv=1, used=None):
        self.spec, self.window = spec, window
        self.used = lengths if used is None else used  # rows that count, of those there is room for
        self.lengths = lengths
        g, dtype = torch.Generator().manual_seed(7), DTYPES[spec.dtype]
        heads, d, dv = heads_kv * spec.qhead_per_kvhead, spec.head_dim, spec.head_dim_v
        self.starts = [starts(x) for x in lengths]
        total_q, total_k = (int(s[-1]) + 3 for s in self.starts)

        def packed(side, heads, d):
            t = torch.full(((total_q, total_k)[side], heads, d + 8), math.nan, dtype=dtype)
            for start, rows in zip(self.starts[side], self.used[side], strict=False):
                t[start : start + rows, :, :d] = torch.randn(rows, heads, d, generator=g)
            return t[..., :d]

        self.q, self.k = packed(0, heads, d), packed(1, heads_kv, d)
        self.v, self.dout = packed(1, heads_kv, dv), packed(0, heads, dv)
        self.out = torch.full_like(self.dout, math.nan)
        self.lse = torch.full((heads, total_q), math.nan)
        self.dlse = torch.full_like(self.lse, math.nan)
        self.how = {"causal": spec.causal, "window": window}
        for rows_q, rows_k in self.sequences():
            q, k, v = self.q[rows_q][None], self.k[rows_k][None], self.v[rows_k][None]
            out, lse = reference.attention(q, k, v, **self.how)
            self.out[rows_q], self.lse[:, rows_q] = out[0].to(dtype), lse[0]
            self.dlse[:, rows_q] = torch.randn(lse[0].shape, generator=g)

    def sequences(self):
        """Rows of queries and of keys of each."""
        for i in range(len(self.lengths[0])):
            yield tuple(slice(int(s[i]), int(s[i]) + u[i]) for s, u in zip(self.starts, self.used))

    def run(self):
        """dq, dk, dv of the simulated kernels."""
        spec = replace(self.spec, varlen=True)
        cfg = tune.backward(spec, self.arch)
        used = [None if u is n else torch.tensor(u).int() for u, n in zip(self.used, self.lengths)]
        lengths = (*self.starts, *used)
        given = tuple(x is not None for x in lengths)
        kernel = compile.get(compile.Request("backward", cfg, spec, self.arch, True, given), "sim")
        batch, heads, heads_kv = len(self.lengths[0]), self.q.shape[1], self.k.shape[1]
        sizes = Sizes(batch, heads, heads_kv, self.q.shape[0], self.k.shape[0])
        work = torch.empty(workspace_floats(cfg, spec, sizes))
        room = cfg.work(spec).workspace(batch, self.q.shape[0], self.k.shape[0], heads).size
        tiles = torch.full((room,), -(2**30), dtype=torch.int32)
        grads = [torch.full(t.shape, math.nan, dtype=t.dtype) for t in (self.q, self.k, self.v)]
        tensors = (self.q, self.k, self.v, self.out, self.lse, self.dout, self.dlse, *grads, work)
        limits = tuple(x if given else None for x, given in zip(self.window, spec.window))
        rest = launch.rest(spec.head_dim**-0.5, self.arch.num_sms, limits, lengths, tiles)
        launch._run(kernel, (*tensors, *rest), self.arch, cfg)
        return grads

    def alone(self, rows_q, rows_k):
        """dq, dk, dv of one sequence by the kernels of dense batches."""
        batch = [t[r][None] for t, r in ((self.q, rows_q), (self.k, rows_k), (self.v, rows_k))]
        rest = (self.out[rows_q][None], self.lse[None, :, rows_q].contiguous())
        rest += (self.dout[rows_q][None], self.dlse[None, :, rows_q].contiguous())
        problem = launch.AttnProblem.of(*batch, causal=self.spec.causal, window_size=self.window)
        grads = [torch.full(t.shape, math.nan, dtype=t.dtype) for t in batch]
        launch.backward((*batch, *rest), self.spec, problem, self.arch, "sim", grads)
        return [g[0] for g in grads]

    def check(self, grads):
        """Each sequence against float64; 0 where nothing comes from, in rows of no sequence."""
        left = [torch.ones(g.shape[0], dtype=torch.bool) for g in grads]
        for rows_q, rows_k in self.sequences():
            inputs = (self.q[rows_q][None], self.k[rows_k][None], self.v[rows_k][None])
            outer = {"dlse": self.dlse[None, :, rows_q]}
            exact = reference.gradients(self.dout[rows_q][None], *inputs, **self.how, **outer)
            theirs = reference.gradients(
                self.dout[rows_q][None], *inputs, **self.how, **outer, dtype=self.q.dtype
            )
            for i, rows in enumerate((rows_q, rows_k, rows_k)):
                got, left[i][rows] = grads[i][rows], False
                if 0 in (rows_q.stop - rows_q.start, rows_k.stop - rows_k.start):
                    assert (got == 0).all()
                    continue
                want = exact[i][0].nan_to_num(0.0)
                bar = 2 * tolerance.worst(theirs[i][0].nan_to_num(0.0), want)
                bar += tolerance.rounding(want, got.dtype) + 1e-5
                error = tolerance.worst(got, want)
                assert error <= bar, f"{['dq', 'dk', 'dv'][i]}: error {error:.3e}, bar {bar:.3e}"
        for gradient, rest in zip(grads, left, strict=True):
            assert (gradient[rest] == 0).all()


def batch_of(spec, lengths=LENGTHS, used=None, window=(None, None)):
    """With all four arguments of lengths, so that tests share kernels."""
    return Batch(spec, lengths, window, used=used or tuple([*x] for x in lengths))


GROUPED = BwdSpec("bf16", 64, 64, True, 2, deterministic=True)
WINDOWED = BwdSpec("fp16", 128, 128, False, 1, deterministic=True, window=(True, True))
NARROW = BwdSpec("bf16", 64, 64, True, 1, deterministic=True, window=(True, False))
WIDE = BwdSpec("bf16", 256, 256, True, 1, deterministic=True)
UNORDERED = BwdSpec("bf16", 64, 64, False)


@pytest.mark.parametrize(
    ("spec", "window"),
    [(GROUPED, (None, 0)), (WINDOWED, (40, 30)), (NARROW, (60, 0)), (WIDE, (None, 0))],
    ids=["64-gqa-causal", "128-window", "64-window-causal", "256-causal"],
)
def test_against_float64_and_bits_of_a_dense_call(spec, window):
    batch = batch_of(spec, window=window)
    grads = batch.run()
    batch.check(grads)
    for rows_q, rows_k in batch.sequences():
        if 0 in (rows_q.stop - rows_q.start, rows_k.stop - rows_k.start):
            continue
        for got, rows, want in zip(
            grads, (rows_q, rows_k, rows_k), batch.alone(rows_q, rows_k), strict=True
        ):
            assert torch.equal(got[rows], want)


def test_used_lengths():
    """Rows that have room but do not count hold NaN, and their gradients are 0."""
    used = ([0, 33, 1, 0, 200, 0, 64, 0], [3, 0, 0, 0, 129, 260, 100, 0])
    batch = batch_of(UNORDERED, used=used)
    batch.check(batch.run())


@pytest.mark.parametrize("lengths", [([0, 0], [0, 0]), ([0, 0], [5, 0]), ([5], [0]), ([300], [7])])
def test_all_empty_and_one_sequence(lengths):
    batch = batch_of(UNORDERED, lengths)
    batch.check(batch.run())


@pytest.mark.parametrize(("spec", "window"), [(GROUPED, (None, 0)), (WINDOWED, (250, 100))])
def test_deterministic_bits_under_any_schedule(spec, window, monkeypatch):
    """And with few CTAs at a time: nobody waits for one that is launched later."""
    batch = batch_of(spec, ([130, 0, 300], [300, 10, 200]), window=window)
    first = batch.run()
    for schedule in SCHEDULES:
        monkeypatch.setenv("FA_CUTE_SIM_SCHEDULE", schedule)
        for a, b in zip(first, batch.run(), strict=True):
            assert torch.equal(a, b), schedule
    for resident in (1, 3):
        with host.session(HOPPER, dsl=False, resident=resident):
            limited = batch.run()
        for a, b in zip(first, limited, strict=True):
            assert torch.equal(a, b), resident


ONE_TILE = {"persistent": False, "prefetch_rows": 0}


class Persistent(Batch):
    """By two CTAs that take tile after tile, those of sequences without queries too."""

    arch = replace(HOPPER, num_sms=2)


def row(head_dim, causal, ratio=1, **options) -> BwdSpec:
    return BwdSpec("bf16", head_dim, head_dim, causal, ratio, **options)


@pytest.mark.parametrize(
    "spec",
    [
        row(64, False),
        row(64, True, 2),  # the first of a tile stores
        row(96, True),
        row(96, False, deterministic=True),
        row(128, False, 2),
        row(128, True),
        row(192, False),  # pairs
        row(256, True, 2),
    ],
    ids=lambda s: f"{s.head_dim}-{s.causal}-{s.qhead_per_kvhead}-{s.deterministic}",
)
def test_rows_of_the_table_against_float64(spec, monkeypatch):
    """Tile after tile where they are persistent; a CTA or cluster at a time, too."""
    window = (None, 0) if spec.causal else (None, None)
    batch = Persistent(spec, window=window, heads_kv=2 if spec.head_dim < 192 else 1)
    batch.check(batch.run())
    monkeypatch.setenv("FA_CUTE_SIM_SCHEDULE", "late")
    batch = Persistent(spec, ([0, 70, 130], [150, 0, 200]), window=window)
    with host.session(batch.arch, dsl=False, resident=1):
        batch.check(batch.run())


@pytest.mark.parametrize("ratio", [1, 2])
def test_persistent_in_order_has_the_bits_of_one_tile_per_cta(ratio, monkeypatch):
    spec = BwdSpec("bf16", 128, 128, True, ratio, deterministic=True)
    batch = Persistent(spec, window=(None, 0))
    assert plan.config(replace(spec, varlen=True)).persistent
    grads = batch.run()
    batch.check(grads)
    for schedule in ("late", "random:3", "priority:1"):
        monkeypatch.setenv("FA_CUTE_SIM_SCHEDULE", schedule)
        assert all(map(torch.equal, grads, batch.run())), schedule
    monkeypatch.setattr(tune, "backward", lambda spec, *_: replace(plan.config(spec), **ONE_TILE))
    assert all(map(torch.equal, grads, Batch(spec, window=(None, 0)).run()))


@pytest.mark.parametrize(
    ("spec", "change"),
    [
        (row(64, False), {}),  # tiles of 128 rows
        (row(96, True), {"store_warps": 1}),
        (row(128, True, 2), {}),
        (row(128, True, 2), {"store_warps": 3}),
        (row(128, True, 2), ONE_TILE),
    ],
)
def test_a_kv_block_that_is_alone_stores(spec, change, monkeypatch):
    """dQ tiles of one KV block, of several and of none, beside each other; scratch is NaN."""
    changed = replace(plan.config(replace(spec, varlen=True)), **change)
    assert changed.stores_alone(replace(spec, varlen=True))
    monkeypatch.setattr(tune, "backward", lambda *_: changed)
    window = (None, 0) if spec.causal else (None, None)
    lengths = ([34, 129, 0, 300, 128], [34, 129, 70, 100, 0])
    for schedule in ("early", "random:1"):
        monkeypatch.setenv("FA_CUTE_SIM_SCHEDULE", schedule)
        batch = Persistent(spec, lengths, window)
        batch.check(batch.run())


def test_short_sequences_add_nothing():
    """Counted: every dQ tile is stored once; of longer ones all blocks add to all tiles."""
    found = []
    for length in (34, 300):
        batch = Persistent(row(128, False), ([length] * 3, [length] * 3))
        with host.session(batch.arch, dsl=False) as session:
            batch.run()
        found.append(next(x.counters for x in session.launches if "mma.flops" in x.counters))
    short, long = found
    tile = 64 * 128 * 4
    assert (short["bulk.store"], short.get("bulk.reduce", 0)) == (3 * tile, 0)
    assert (long.get("bulk.store", 0), long["bulk.reduce"]) == (0, 3 * 5 * 3 * tile)
