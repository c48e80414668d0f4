"""The SM100 backward's plan: its maps, what it refuses, and what the assembler makes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fa_cute import arch as archs
from fa_cute.bwd.args import BwdSpec
from fa_cute.bwd.chunks import PairChunks, RowChunks
from fa_cute.bwd.sm100.plan import HEAD_DIMS, BwdConfig, config
from fa_cute.errors import PlanError, UnsupportedError

SM100 = archs.get("sm_100a")


def spec(head_dim: int, **changes) -> BwdSpec:
    return replace(BwdSpec("bf16", head_dim, dict(HEAD_DIMS)[head_dim], causal=True), **changes)


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize("head_dim", dict(HEAD_DIMS))
def test_it_fits(head_dim: int, arch: str) -> None:
    cfg = config(spec(head_dim), archs.get(arch))
    assert cfg.warps.budget <= 65536
    assert cfg.tmem.alloc_cols == 512  # constant addresses
    assert cfg.smem.total <= cfg.target.smem_bytes
    assert cfg.pair == (head_dim >= 128)
    assert cfg.tmem["dQ"].cols % (cfg.dq_cols * cfg.dq_buffers) == 0


def test_a_pair_arrives_on_the_leader() -> None:
    """Both CTAs' warps and bytes count there; statistics are each CTA's own."""
    cfg = config(spec(128), SM100)
    arrivals = {e.name: e.arrivals(cfg.warps) for e in cfg.topology.edges}
    assert arrivals["compute_p"] == arrivals["compute_ds"] == (16, 1)
    assert arrivals["mma_dq"] == (1, 8)
    assert arrivals["load_lse"] == (1, 8)
    bytes_of = {e.name: e.tx_bytes(cfg.smem) for e in cfg.topology.edges}
    assert bytes_of["load_q"] == 2 * 64 * 128 * 2 and bytes_of["load_lse"] == 128 * 4


@pytest.mark.parametrize("head_dim", dict(HEAD_DIMS))
def test_p_and_ds_replace_what_their_own_team_read(head_dim: int) -> None:
    """And no team's P, or dS, lies where the other team's S, or dP, still is."""
    cfg = config(spec(head_dim), SM100)
    to_team, to_word = cfg.team_rows
    for result, source in (("P", "S"), ("dS", "dP")):
        for team in (0, 1):
            rows = {to_team * team + to_word * w + r for w in (0, 1) for r in range(32)}
            at = {cfg.tmem[source].start + row for row in rows}
            region = cfg.tmem[f"{result}{team}"]
            assert set(range(region.start, region.stop)) <= at


def test_the_launch_order_follows_the_additions() -> None:
    assert config(spec(64, deterministic=True), SM100).scheduler == "spt"
    assert config(spec(64, deterministic=True, causal=False), SM100).scheduler == "ascending"
    assert config(spec(64), SM100).scheduler == "ascending"  # the longest first


@pytest.mark.parametrize("order", [RowChunks(128, 96, 2), PairChunks(128, 128)])
def test_every_element_of_a_tile_has_one_place(order) -> None:
    seen = set()
    for chunk in range(order.num):
        for t in range(128):
            row, col = order.origin(chunk, t)
            for j in range(order.vectors):
                for rows, cols, _, count in order.runs(j):
                    seen |= {(row + rows, col + cols + i) for i in range(count)}
    assert len(seen) == order.rows * order.cols
    assert order.num * order.chunk_floats == order.rows * order.cols


@pytest.mark.parametrize(
    "changes",
    [
        {"tile_m": 64},
        {"head_dim_v": 64},
        {"q_stages": 1},
        {"ctas": 3},
        {"ctas": 2, "head_dim": 64, "head_dim_v": 64},
        {"head_dim": 192},  # one CTA
        {"do_stages": 2},  # SMEM
        {"compute_regs": 168},
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(changes) -> None:
    with pytest.raises(PlanError):
        replace(BwdConfig(), **changes)


def test_head_dims_that_are_missing() -> None:
    with pytest.raises(UnsupportedError, match="head_dim=192, head_dim_v=192"):
        config(BwdSpec("bf16", 192, 192, causal=True), SM100)


@pytest.mark.parametrize("head_dim", dict(HEAD_DIMS))
def test_all_kernels_of_a_call_assemble_without_spills(head_dim: int) -> None:
    """The main kernel's variants are in test_sm100_variants and test_sm103_variants."""
    pytest.importorskip("cutlass")
    from fa_cute import compile as compiler
    from fa_cute import resources

    shared = spec(head_dim, qhead_per_kvhead=2, deterministic=True)
    cfg = config(shared, SM100)
    request = compiler.Request("backward", cfg, shared, SM100, has_dlse=True)
    found = resources.of_cubin(compiler.cubin(request))
    assert not [kernel for kernel in found if kernel.spills]
    main = next(kernel for kernel in found if kernel.threads == cfg.warps.threads)
    assert main.regs <= cfg.warps.launch_regs
