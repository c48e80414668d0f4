"""The Hopper backward, executed from its PTX, against float64: every row of the table, every order
of events, only a few CTAs at a time, and bit by bit where it promises that."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from fa_cute import arch, launch, ops, reference, tune
from fa_cute.bwd.args import BwdSpec
from fa_cute.bwd.sm90 import plan
from fa_cute.problem import AttnProblem
from fa_cute.sim import host

from .. import tolerance

pytest.importorskip("cutlass", reason="the kernels are compiled by NVIDIA's CuTe DSL")

HOPPER = arch.get("sm_90a")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROWS = [(row["head_dim"], row["head_dim_v"]) for row in plan.TILES]
SHAPES = [(1, 1), (65, 129), (200, 70), (128, 128), (131, 1)]
DIRECT = {"dq_direct": True, "store_first": False, "scheduler": "single"}
SCHEDULES = ("late", *(f"random:{seed}" for seed in range(4)), *(f"priority:{s}" for s in range(3)))


def strided(seqlen, heads, head_dim, dtype, g, batch=1):
    """A view whose neighbours in memory are NaN."""
    t = torch.full((batch, seqlen + 1, heads, head_dim + 8), math.nan, dtype=dtype)
    t[:, :seqlen, :, :head_dim] = torch.randn(batch, seqlen, heads, head_dim, generator=g).to(dtype)
    return t[:, :seqlen, :, :head_dim]


class Case:
    """One problem: inputs, forward results, and what its gradients must be."""

    def __init__(
        self,
        spec: BwdSpec,
        sq: int,
        sk: int,
        batch=1,
        heads_kv=1,
        with_lse=True,
        window=(None, None),
        scale=None,
    ):
        self.spec = spec
        self.how = {"causal": spec.causal, "window": window, "softmax_scale": scale}
        g, dtype = torch.Generator().manual_seed(1000 * sq + sk), DTYPES[spec.dtype]
        heads, d, dv = heads_kv * spec.qhead_per_kvhead, spec.head_dim, spec.head_dim_v
        self.q, self.k = (
            strided(sq, heads, d, dtype, g, batch),
            strided(sk, heads_kv, d, dtype, g, batch),
        )
        self.v, self.dout = (
            strided(sk, heads_kv, dv, dtype, g, batch),
            strided(sq, heads, dv, dtype, g, batch),
        )
        options = {"causal": spec.causal, "window_size": window, "softmax_scale": scale}
        self.problem = AttnProblem.of(self.q, self.k, self.v, **options)
        out, lse = reference.attention(self.q, self.k, self.v, **self.how)
        self.out, self.lse = out.to(dtype), lse.contiguous()
        self.dlse = torch.randn(lse.shape, generator=g) if with_lse else None

    def run(self):
        """dq, dk, dv of the simulated kernels."""
        tensors = (self.q, self.k, self.v, self.out, self.lse, self.dout, self.dlse)
        grads = [torch.full(t.shape, math.nan, dtype=t.dtype) for t in tensors[:3]]
        launch.backward(tensors, self.spec, self.problem, HOPPER, "sim", grads)
        return grads

    def check(self):
        """Fail unless each gradient is at most twice as wrong as torch's own in this dtype."""
        inputs = (self.q, self.k, self.v)
        exact = reference.gradients(self.dout, *inputs, **self.how, dlse=self.dlse)
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        out, lse = reference.attention(*leaves, **self.how, dtype=None)
        outputs, grads = [out], [self.dout]
        if self.dlse is not None:
            seen = lse != -math.inf
            outputs, grads = [out, lse[seen]], [self.dout, self.dlse[seen]]
        in_torch = torch.autograd.grad(outputs, leaves, grads)
        for name, got, want, theirs in zip(
            ("dq", "dk", "dv"), self.run(), exact, in_torch, strict=True
        ):
            want = want.nan_to_num(0.0)
            bar = 2 * tolerance.worst(theirs.nan_to_num(0.0), want) + tolerance.rounding(
                want, got.dtype
            )
            error = tolerance.worst(got, want)
            assert error <= bar + 1e-5, f"{name}: error {error:.3e}, bar {bar:.3e}"


@pytest.fixture(autouse=True)
def poisoned_outputs():
    """torch.empty gives NaN, so an element that is not written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), ROWS)
def test_every_row_against_float64(head_dim, head_dim_v, causal):
    spec = BwdSpec("bf16", head_dim, head_dim_v, causal)
    for sq, sk in SHAPES:
        Case(spec, sq, sk).check()


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 64), (128, 128), (192, 128)])
def test_shared_kv_heads(head_dim, head_dim_v):
    spec = BwdSpec("fp16", head_dim, head_dim_v, True, qhead_per_kvhead=3)
    for sq, sk in ((70, 190), (190, 70)):
        Case(spec, sq, sk, heads_kv=2 if sq < sk else 1, batch=2 if sq > sk else 1).check()


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(80, 80), (40, 64), (184, 120), (248, 256)])
def test_head_dims_between_the_rows(head_dim, head_dim_v):
    Case(BwdSpec("bf16", head_dim, head_dim_v, True), 140, 150, with_lse=False).check()


@pytest.mark.parametrize(("head_dim", "dtype"), [(256, "fp16"), (128, "fp16"), (256, "bf16")])
def test_no_error_but_the_roundings_to_16_bits(head_dim, dtype):
    """Of P, of dS and of the out that delta is made of; all else adds less than the last bit. With
    three keys these are the whole error, and may be more than twice torch's."""
    kind, spec = DTYPES[dtype], BwdSpec(dtype, head_dim, head_dim, True, deterministic=True)
    for n in (3, 5, 9):
        case = Case(spec, n, n, heads_kv=4)
        tensors = (case.q, case.k, case.v, case.dout, case.out)
        q, k, v, dout, out = (x[0].transpose(0, 1).double() for x in tensors)
        scale, seen = head_dim**-0.5, torch.ones(n, n, dtype=torch.bool).tril()
        scores = q @ k.mT * scale - case.lse[0].double()[..., None]
        p = scores.exp().masked_fill(~seen, 0.0)
        rounded = p.to(kind).double()
        delta = (dout * out).sum(-1, keepdim=True) - case.dlse[0].double()[..., None]
        # By role, dS is made of the P that went through shared memory in 16 bits.
        ds = (rounded if head_dim == 256 else p) * (dout @ v.mT - delta)
        ds = ds.to(kind).double()
        model = (ds @ k * scale, ds.mT @ q * scale, rounded.mT @ dout)
        for got, want in zip(case.run(), model, strict=True):
            error = tolerance.worst(got[0].transpose(0, 1), want)
            assert error <= 1.05 * tolerance.rounding(want, kind) / 2


@pytest.mark.parametrize("scale", [-0.2, 0.0, 3.0])
@pytest.mark.parametrize(("head_dim", "causal"), [(64, True), (128, False), (256, True)])
def test_scales_of_any_sign(head_dim, causal, scale):
    Case(BwdSpec("bf16", head_dim, head_dim, causal), 70, 150, scale=scale).check()


@pytest.mark.parametrize("ratio", [1, 2], ids=["mha", "gqa"])
@pytest.mark.parametrize(("head_dim", "causal"), [(64, True), (128, False), (256, True)])
def test_deterministic_bits_under_any_schedule(head_dim, causal, ratio, monkeypatch):
    case = Case(BwdSpec("bf16", head_dim, head_dim, causal, ratio, deterministic=True), 130, 200)
    case.check()
    first = case.run()
    for schedule in SCHEDULES:
        monkeypatch.setenv("FA_CUTE_SIM_SCHEDULE", schedule)
        for a, b in zip(first, case.run(), strict=True):
            assert torch.equal(a, b), schedule


def test_without_the_flag_two_schedules_differ(monkeypatch):
    case = Case(BwdSpec("bf16", 64, 64, False), 200, 900)
    results = []
    for schedule in ("early", *(f"priority:{seed}" for seed in range(8))):
        monkeypatch.setenv("FA_CUTE_SIM_SCHEDULE", schedule)
        results.append(case.run()[0])
    assert any(not torch.equal(results[0], r) for r in results[1:])


@pytest.mark.parametrize("resident", [1, 2, 3])
@pytest.mark.parametrize(("head_dim", "causal"), [(64, True), (128, False)])
def test_no_deadlock_with_few_ctas_at_a_time(head_dim, causal, resident):
    """Each turn waits for CTAs launched before only, so any number that fits at once will do."""
    from fa_cute.sim import host

    case = Case(BwdSpec("bf16", head_dim, head_dim, causal, 2, deterministic=True), 300, 400)
    with host.session(HOPPER, dsl=False, resident=resident):
        limited = case.run()
    for a, b in zip(limited, case.run(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("head_dim", "causal", "deterministic"),
    [(64, True, True), (128, False, False), (256, True, True)],
)
def test_no_races(head_dim, causal, deterministic):
    """Every two accesses of shared memory of which one writes are ordered by a barrier: also what
    compute-sanitizer's racecheck, which does not know the copy engine's, reports."""
    from fa_cute.sim import host

    spec = BwdSpec("bf16", head_dim, head_dim, causal, 1, deterministic=deterministic)
    with host.session(HOPPER, dsl=False, races=True) as session:
        Case(spec, 130, 200).run()
    assert not [race for launch in session.launches for race in launch.races]


FIRST = {"dq_direct": False, "store_warps": 2, "store_first": True, "pair": False}


@pytest.mark.parametrize(("head_dim", "causal"), [(64, False), (128, True), (256, True)])
def test_the_first_stores_and_nobody_zeroes(head_dim, causal, monkeypatch):
    """In any order otherwise; also where some queries see no key, and with one CTA at a time."""
    spec = BwdSpec("bf16", head_dim, head_dim, causal, 2)
    cfg = dataclasses.replace(
        plan.config(spec), **FIRST, scheduler="spt" if causal else "ascending", do_stages=1
    )
    monkeypatch.setattr(tune, "backward", lambda *_: cfg)
    case = Case(spec, 200, 180)
    for schedule in ("early", "late", "priority:1"):
        monkeypatch.setenv("FA_CUTE_SIM_SCHEDULE", schedule)
        case.check()
    with host.session(HOPPER, dsl=False, resident=1):
        case.check()


def test_views_and_contiguous_tensors_give_the_same_bits():
    case = Case(BwdSpec("bf16", 128, 128, True, deterministic=True), 150, 170)
    first = case.run()
    for name in ("q", "k", "v", "out", "dout"):
        setattr(case, name, getattr(case, name).contiguous())
    second = case.run()
    heads_first = {n: getattr(case, n).transpose(1, 2).contiguous().transpose(1, 2) for n in "qkv"}
    for name, t in heads_first.items():
        setattr(case, name, t)
    for a, b, c in zip(first, second, case.run(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_a_backward_that_reads_too_little_dq_is_caught():
    """The bar can fail: a wrong dout gives other gradients."""
    case = Case(BwdSpec("bf16", 64, 64, False), 128, 128)
    wrong = case.dout.clone()
    wrong[0, 5] = 0
    right, case.dout = case.dout, wrong
    got = case.run()
    case.dout = right
    exact = reference.gradients(right, case.q, case.k, case.v, dlse=case.dlse)
    assert tolerance.worst(got[0], exact[0]) > 0.01


@pytest.mark.parametrize(
    "change",
    [
        {"late_do": True, "few_fences": True},
        {"few_fences": True, **DIRECT, "q_stages": 3, "do_stages": 3},
    ],
    ids=lambda change: "-".join(change),
)
def test_variants_that_no_row_has_yet(change, monkeypatch):
    """They wait to be timed. One CTA a head: nothing adds to dQ in another order."""
    spec = BwdSpec("bf16", 128, 128, True)
    case, row = Case(spec, 200, 120), plan.config(spec)
    first = case.run()
    monkeypatch.setattr(tune, "backward", lambda *_: dataclasses.replace(row, **change))
    for a, b in zip(first, case.run(), strict=True):
        assert torch.equal(a, b)
    monkeypatch.setenv("FA_CUTE_SIM_SCHEDULE", "late")
    case.check()


def test_more_batches_than_a_grid_has_in_its_later_dimensions(monkeypatch):
    grids = []
    monkeypatch.setattr(host.Session, "launch", lambda self, *launch: grids.append(launch[1]))
    monkeypatch.setenv("FA_CUTE_ARCH", "sm_90a")
    one_each = dataclasses.replace(
        plan.config(BwdSpec("bf16", 64, 64, False)), persistent=False, prefetch_rows=0
    )
    monkeypatch.setattr(tune, "backward", lambda *_: one_each)
    q, out, lse = torch.ones(66000, 1, 1, 64).bfloat16(), None, torch.zeros(66000, 1, 1)
    out = torch.ones_like(q)
    ops.flash_bwd(out, q, q, q, out, lse)
    assert len(grids) == 3 and all(grid[0] >= 66000 for grid in grids)
