"""The Hopper forward over a list of tiles on the simulator: many tiles for each CTA, whose numbers
its load warp hands to the teams with Q.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from fa_cute import arch, compile, launch
from fa_cute.fwd.args import FwdSpec
from fa_cute.fwd.sm90.plan import FwdConfig
from fa_cute.plan import show
from fa_cute.sim import host
from tests import tolerance

SM90 = arch.get("sm_90a")
HEADS, HEADS_KV, HEAD_DIM = 2, 1, 64
GIVEN = (True, True, False, False)  # cu_seqlens_q, cu_seqlens_k
# Neighbours differ in all that is handed over: numbers of another tile give another result. One to
# four blocks of keys, so that Q of a tile is there long before the one before is done, and not.
LENGTHS_Q, LENGTHS_K = (70, 300, 1, 0, 190), (40, 100, 250, 30, 160)
SIZES = {"head_dim": HEAD_DIM, "head_dim_v": HEAD_DIM, "tile_n": 64, "listed": True}
CONFIGS = {
    "joined": FwdConfig(**SIZES, scheduler="persistent"),
    "one Q": FwdConfig(**SIZES, scheduler="persistent", q_stages=1, scores_first=True),
}


@cache
def kernel(name: str, causal: bool):
    """The compiled kernel, its config and spec."""
    cfg, spec = CONFIGS[name], FwdSpec("bf16", HEAD_DIM, HEAD_DIM, causal, varlen=True)
    with host.compiling(SM90):
        request = compile.Request("forward", cfg, spec, SM90, lengths=GIVEN)
        return host.function_of(compile.build(request)), cfg, spec


def packed(lengths, heads: int, g: torch.Generator):
    """(rows, where sequences begin)."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return torch.randn(int(ends[-1]), heads, HEAD_DIM, generator=g).bfloat16(), ends.int()


def run(name: str, causal: bool, num_sms: int, schedule: str = "early"):
    """(inputs, out, lse) of one call; nothing that a call leaves unwritten is a number."""
    fn, cfg, spec = kernel(name, causal)
    g = torch.Generator().manual_seed(0)
    q, at_q = packed(LENGTHS_Q, HEADS, g)
    k, at_k = packed(LENGTHS_K, HEADS_KV, g)
    v, _ = packed(LENGTHS_K, HEADS_KV, g)
    out, lse = torch.full_like(q, float("nan")), torch.full((HEADS, q.shape[0]), float("nan"))
    room = cfg.work(spec).workspace(len(LENGTHS_Q), q.shape[0], k.shape[0], HEADS_KV).size
    tiles = torch.full((room,), -(2**30), dtype=torch.int32)
    rest = launch.rest(HEAD_DIM**-0.5, num_sms, (None, None), (at_q, at_k, None, None), tiles)
    with host.session(SM90, dsl=False, schedule=schedule, plan=show.to_dict(cfg)):
        fn(q, k, v, out, lse, *rest)
    return (q, k, v, at_q, at_k), out, lse


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("num_sms", [1, 3, 64])
def test_against_float64(name: str, causal: bool, num_sms: int) -> None:
    """With 64 CTAs some have no tile, and others one."""
    (q, k, v, at_q, at_k), out, lse = run(name, causal, num_sms)
    for s in range(len(LENGTHS_Q)):
        rows_q, rows_k = slice(*at_q[s : s + 2]), slice(*at_k[s : s + 2])
        if LENGTHS_Q[s]:
            own = q[rows_q][None], k[rows_k][None], v[rows_k][None]
            tolerance.assert_close_to_reference(
                out[rows_q][None], lse[:, rows_q][None], *own, causal=causal
            )


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_bits_in_every_schedule(name: str) -> None:
    _, want, want_lse = run(name, True, 2)
    schedules = ("late", *(f"random:{s}" for s in range(4)), *(f"priority:{s}" for s in range(4)))
    for schedule in schedules:
        _, out, lse = run(name, True, 2, schedule)
        assert torch.equal(out, want) and torch.equal(lse, want_lse), schedule
