"""The SM100 forward's plan: its map, the rows of the table, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fa_cute import tune
from fa_cute.errors import PlanError
from fa_cute.fwd.args import Exp2Split, FwdSpec
from fa_cute.fwd.sm100.plan import Q_TILES, FwdConfig

ROWS = [row for row in tune.FWD if isinstance(row.cfg, FwdConfig)]
BASE = FwdConfig()
UNEQUAL = {"head_dim": 192, "kv_parts": (3, 2), "o_over_q": True}


def config(**changes) -> FwdConfig:
    return replace(BASE, **changes)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_rows_use_the_machine(row):
    """Registers add up to the file, the KV ring fills SMEM, and its K and V alternate in it."""
    cfg = row.cfg
    assert cfg.warps.budget <= 65536 < cfg.warps.budget + 128 * 8  # no granule of a warpgroup left
    assert cfg.smem.total <= cfg.target.smem_bytes < cfg.smem.total + cfg.smem.bytes("sKV")
    assert cfg.ring > sum(cfg.kv_parts)  # V of a block, K of the next, and some in flight
    assert cfg.tmem.alloc_cols == 512  # constant addresses
    assert cfg.other_regs >= 56  # below, the MMA warp's descriptors spill


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_only_sm_100_computes_exponentials_by_polynomial(row):
    assert bool(row.cfg.exp2.period) == (row.cfg.arch == "sm_100a")


def test_arrivals_follow_from_the_warps():
    arrivals = {e.name: e.arrivals(BASE.warps) for e in BASE.topology.edges}
    team, correction = 8 // Q_TILES, 4
    assert arrivals["load_q"] == arrivals["load_kv"] == (1, 1)
    assert arrivals["mma_s"][0] == arrivals["mma_o"][0] == 1
    assert arrivals["softmax_p"][0] == team + correction
    assert arrivals["softmax_p_tail"][0] == team
    assert arrivals["softmax_stats"] == (team, correction)
    assert arrivals["correction_o"] == (correction, 1)


def test_one_way_edges_name_who_orders_them():
    for edge in BASE.topology.edges:
        if edge.one_way:
            back = BASE.topology[edge.ordered_by]
            assert set(back.sources) & set(edge.sinks), f"{edge.name}: nobody of its sinks answers"
            assert set(back.sinks) & set(edge.sources)


def test_a_block_may_take_several_slots_and_o_the_place_of_q():
    cfg = config(**UNEQUAL)
    assert cfg.smem.bytes("sKV") * 3 == cfg.tile_n * cfg.head_dim * 2
    assert cfg.smem.bytes("sKV") * 2 == cfg.tile_n * cfg.head_dim_v * 2
    assert cfg.ring >= 3 + 2 + 2
    assert cfg.smem.aliases("sO") == ("sQ",)
    assert cfg.smem.bytes("sO") == cfg.smem.bytes("sQ")  # O t lies in the slot of Q t
    assert cfg.topology["load_q"].arrivals(cfg.warps) == (1, 2)


def test_p_lies_over_the_scores_it_replaces():
    for t in range(Q_TILES):
        s, p, o = (BASE.tmem[f"{name}{t}"] for name in "SPO")
        assert s.start <= p.start and p.stop == s.stop and 2 * p.cols == s.cols
        assert o.start >= Q_TILES * BASE.tile_n
    assert not BASE.tmem.may_overlap("S0", "S1")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"tile_m": 64}, "tiles 64 x 128"),
        ({"head_dim": 112, "head_dim_v": 112}, "multiple of 32"),
        ({"head_dim": 160, "head_dim_v": 160}, "TMEM"),
        ({"head_dim": 288, "head_dim_v": 288}, "up to 256"),
        ({"kv_parts": (3, 3)}, "42 columns of K"),
        ({**UNEQUAL, "kv_stages": 9}, "SMEM"),
        ({"head_dim": 192, "o_over_q": True}, "share the KV ring"),
        ({"head_dim": 64}, "share the KV ring"),
        ({"kv_stages": 4}, "SMEM"),
        ({"softmax_regs": 208, "correction_regs": 96}, "register"),
        ({"softmax_regs": 190}, "multiple of 8"),
        ({"p_head": 128}, "p_head 128"),
        ({"p_head": 40}, "p_head 40"),
        ({"arch": "sm_90a"}, "TMEM"),
    ],
)
def test_what_does_not_fit_is_refused(changes, words):
    with pytest.raises(PlanError, match=words):
        config(**changes)


def test_configs_and_specs_are_keys():
    assert hash(config()) == hash(FwdConfig()) and config() == FwdConfig()
    assert config(exp2=Exp2Split(16)) != config()
    spec = FwdSpec("bf16", 128, 128, causal=True)
    assert {spec: 1}[FwdSpec("bf16", 128, 128, causal=True)] == 1


@pytest.mark.parametrize("bad", [{"dtype": "fp32"}, {"qhead_per_kvhead": 0}])
def test_specs_refuse(bad):
    good = {"dtype": "bf16", "head_dim": 64, "head_dim_v": 64, "causal": False}
    with pytest.raises(PlanError):
        FwdSpec(**(good | bad))
