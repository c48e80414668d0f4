"""The SM100 backward in the simulator, against float64 and with torch's own error as the bar."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

from fa_cute import arch as archs
from fa_cute import compile as compiler
from fa_cute import launch, reference
from fa_cute.bwd.args import BwdSpec, Sizes, workspace_floats
from fa_cute.bwd.sm100.plan import config
from fa_cute.plan import show

from .. import tolerance

pytest.importorskip("cutlass", reason="the kernels are compiled by NVIDIA's CuTe DSL")

SM100 = archs.get("sm_100a")
# With one key dS is 0: dP minus delta, the same sum of products in fp32 but in another order.
CANCELLATION = 1e-6
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    """One call: lengths, (query heads, kv heads), and what the kernel is compiled for."""

    seqlens: tuple[int, int]
    heads: tuple[int, int] = (1, 1)
    head_dim: int = 64
    causal: bool = False
    dtype: str = "bf16"
    deterministic: bool = False
    batch: int = 1
    with_dlse: bool = False
    window: tuple[int | None, int | None] = (None, None)

    @property
    def spec(self) -> BwdSpec:
        ratio = self.heads[0] // self.heads[1]
        dims = self.head_dim, self.head_dim_v
        sides = self.window[0] is not None, self.window[1] is not None
        return BwdSpec(self.dtype, *dims, self.causal, ratio, self.deterministic, sides)

    @property
    def mask(self) -> dict:
        """What the reference takes."""
        return {
            "causal": self.causal,
            "window": (self.window[0], 0 if self.causal else self.window[1]),
        }

    @property
    def head_dim_v(self) -> int:
        return min(self.head_dim, 128)

    def tensors(self) -> list[torch.Tensor]:
        """q, k, v, dout."""
        g = torch.Generator().manual_seed(self.seqlens[0] * 1000 + self.seqlens[1])
        q, k = (self.seqlens[0], self.heads[0]), (self.seqlens[1], self.heads[1])
        d, dv = self.head_dim, self.head_dim_v
        return [
            torch.randn(self.batch, s, h, dim, generator=g).to(DTYPES[self.dtype])
            for (s, h), dim in ((q, d), (k, d), (k, dv), (q, dv))
        ]


ONE_CTA = {"ctas": 1, "q_stages": 2, "reduce_regs": 160, "compute_regs": 136}


def alone(case: Case):
    """The configuration of one CTA where a pair is the rule, as a cross-check."""
    return replace(config(case.spec, SM100), **ONE_CTA)


def run(case: Case, schedule: str = "early", cfg=None, **options):
    """(dq, dk, dv) of the kernels, and the simulator's session."""
    from fa_cute.sim import host

    spec = case.spec
    cfg = cfg or config(spec, SM100)
    q, k, v, dout = case.tensors()
    fn = compiler.backward(cfg, spec, SM100, "sim", case.with_dlse)
    out, lse = reference.attention(q, k, v, **case.mask)
    out, lse = out.to(q.dtype), lse.float().contiguous()
    sizes = Sizes(case.batch, *case.heads, *case.seqlens)
    work = torch.full((workspace_floats(cfg, spec, sizes),), float("nan"))
    grads = [torch.full_like(t, float("nan")) for t in (q, k, v)]
    plan = show.to_dict(cfg)
    with host.session(SM100, dsl=False, schedule=schedule, plan=plan, **options) as session:
        rest = launch.rest(case.head_dim**-0.5, SM100.num_sms, case.window)
        fn(q, k, v, out, lse, dout, dlse(case), *grads, work, *rest)
    return grads, session


def dlse(case: Case):
    if not case.with_dlse:
        return None
    g = torch.Generator().manual_seed(7)
    return torch.randn(case.batch, case.heads[0], case.seqlens[0], generator=g)


def torch_gradients(case: Case):
    """What torch computes in the case's dtype."""
    *leaves, dout = case.tensors()
    leaves = [t.requires_grad_() for t in leaves]
    out, lse = reference.attention(*leaves, **case.mask, dtype=None)
    if not case.with_dlse:
        return torch.autograd.grad(out, leaves, dout)
    seen = torch.isfinite(lse)
    return torch.autograd.grad((out, lse[seen]), leaves, (dout, dlse(case)[seen]))


def errors(case: Case, got) -> dict[str, tuple[float, float]]:
    """Of each gradient the error against float64, and the bar."""
    q, k, v, dout = case.tensors()
    found = {}
    exact = reference.gradients(dout, q, k, v, **case.mask, dlse=dlse(case))
    for which, ours, want, theirs in zip("qkv", got, exact, torch_gradients(case), strict=True):
        bar = tolerance.FACTOR * tolerance.worst(theirs, want) + tolerance.rounding(
            want, ours.dtype
        )
        bar += CANCELLATION * math.sqrt(max(case.seqlens))  # summed over rows or keys
        found[f"d{which}"] = tolerance.worst(ours, want), bar
    return found


def check(case: Case, got) -> None:
    for which, (error, bar) in errors(case, got).items():
        assert error <= bar, f"{which}: error {error:.2e}, bar {bar:.2e}"


# Few compiled kernels (a spec each), many lengths.
FULL = [
    (1, 1),
    (3, 3),
    (64, 1),
    (128, 128),
    (64, 129),
    (255, 256),
    (239, 1),
    (113, 203),
    (640, 128),
]
CAUSAL = [(1, 1), (64, 32), (128, 192), (256, 255), (799, 3), (108, 256), (384, 256)]
CASES = [
    *(Case(s, head_dim=64) for s in FULL),
    *(Case(s, head_dim=64, causal=True) for s in CAUSAL),
    *(
        Case(s, head_dim=128, causal=True, with_dlse=True)
        for s in [(1, 129), (203, 113), (300, 512)]
    ),
    Case((1024, 1023), head_dim=128, causal=True, with_dlse=True),
    Case((257, 384), (2, 2), head_dim=128, dtype="fp16", batch=2),
    Case((130, 257), (4, 2), head_dim=96, causal=True, dtype="fp16", deterministic=True),
    Case((200, 70), (3, 1), head_dim=96, batch=2),
    # An odd number of KV tiles for pairs, and a turn for each head's dK and dV.
    Case((130, 257), (4, 2), head_dim=128, deterministic=True),
    # Head dim 192 has 128 for V.
    *(Case(s, head_dim=192) for s in [(1, 1), (128, 256), (239, 1)]),
    *(Case(s, head_dim=192, causal=True, with_dlse=True) for s in [(1, 129), (300, 513)]),
    Case((130, 257), (4, 2), head_dim=192, causal=True, dtype="fp16", deterministic=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case: Case) -> None:
    got, session = run(case)
    check(case, got)
    assert not any(launch.warnings for launch in session.launches)
    blind = case.seqlens[0] - case.seqlens[1]
    if case.causal and blind > 0:
        assert (got[0][:, :blind] == 0).all(), "no key, no gradient"


PAIR = [
    Case((128, 256), head_dim=128),
    Case((300, 513), head_dim=128, causal=True, with_dlse=True),
]


@pytest.mark.parametrize("case", PAIR, ids=str)
def test_a_pair_and_one_cta_agree(case: Case) -> None:
    """Within rounding: they add in different orders."""
    pair, _ = run(case)
    one, _ = run(case, cfg=alone(case))
    check(case, one)
    for a, b in zip(pair, one, strict=True):
        assert tolerance.worst(a, b) <= 2 * torch.finfo(a.dtype).eps * b.abs().max().item()


def test_a_pair_moves_what_it_should() -> None:
    """Bytes per 128 x 128 tile: operands from shared memory, dQ to its sums."""
    case, tile = PAIR[0], 128 * 128
    tiles = case.seqlens[0] * case.seqlens[1] / tile
    for cfg, operands, dq in ((None, 12 * tile, 2 * tile), (alone(case), 16 * tile, 4 * tile)):
        _, session = run(case, cfg=cfg)
        moved = next(x.counters for x in session.launches if "mma.smem" in x.counters)
        assert moved["mma.smem"] == operands * tiles
        assert sum(n for kind, n in moved.items() if "reduce" in kind) == dq * tiles


@pytest.mark.parametrize(
    "case", [Case((384, 256), head_dim=d, causal=True) for d in (64, 128, 192)]
)
def test_nothing_is_unordered(case: Case) -> None:
    """Happens-before among all accesses to shared and tensor memory, over several blocks."""
    _, session = run(case, races=True)
    assert not [race for launch in session.launches for race in launch.races]


ORDERED = [
    Case((300, 400), (2, 1), head_dim=64, causal=True, deterministic=True),
    Case((200, 800), head_dim=128, deterministic=True),
    Case((300, 800), (2, 1), head_dim=128, causal=True, dtype="fp16", deterministic=True),
    Case((200, 520), (2, 1), head_dim=192, causal=True, deterministic=True),
]


@pytest.mark.parametrize("case", ORDERED, ids=str)
def test_the_same_bits_in_every_schedule(case: Case) -> None:
    """Sixteen, also where only a few clusters are there at once, in the order of the launch."""
    want, _ = run(case)
    check(case, want)
    for seed in range(16):
        got, _ = run(case, f"random:{seed}", resident=(1, 2, 3, None)[seed % 4])
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), seed


def test_without_an_order_schedules_differ() -> None:
    """Otherwise the test above could not fail."""
    case = Case((256, 1024), head_dim=64, dtype="fp16")
    first, _ = run(case, "random:0", resident=3)
    others = (run(case, f"random:{seed}", resident=3)[0] for seed in range(1, 16))
    assert any(not torch.equal(other[0], first[0]) for other in others)
