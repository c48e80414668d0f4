"""What a backward takes beside its gradients: one fp32 dQ, two fp32 rows, with shared kv heads fp32
dK and dV, in order a counter for each dQ tile."""

from __future__ import annotations

import itertools

import pytest

from fa_cute import arch, tune
from fa_cute.bwd.args import BwdSpec, Sizes, workspace_floats

DIMS = {"sm_90a": (64, 96, 128, 192, 256), "sm_100a": (64, 96, 128)}
CASES = [(name, d) for name, dims in DIMS.items() for d in dims]


@pytest.mark.parametrize(("name", "head_dim"), CASES)
def test_scratch_is_what_the_sums_need(name: str, head_dim: int) -> None:
    """Lengths that every tile divides; rows of the tiles may be wider than the tensors'."""
    batch, heads, length = 2, 6, 1536
    for causal, ratio, ordered in itertools.product((False, True), (1, 3), (False, True)):
        spec = BwdSpec("bf16", head_dim, head_dim, causal, ratio, ordered)
        cfg = tune.backward(spec, arch.get(name))
        sizes = Sizes(batch, heads, heads // ratio, length, length)
        rows = batch * heads * length
        floats = rows * (cfg.head_dim + 2)
        if spec.shares_kv:
            floats += rows // ratio * (cfg.head_dim + cfg.head_dim_v)
        counters = 0
        if ordered:
            counters = rows // cfg.tile_m * getattr(cfg, "ctas", 1)
        if ordered and spec.shares_kv:
            counters += rows // ratio // cfg.tile_n
        found = workspace_floats(cfg, spec, sizes)
        assert floats + counters <= found <= floats + counters + 64 * (counters > 0)
