"""Native code and numpy run our forward to the same bits, instruction for instruction."""

from __future__ import annotations

import pytest


def test_both_engines_give_the_same_bits():
    torch = pytest.importorskip("torch")
    pytest.importorskip("cutlass")
    from fa_cute import flash_attn_func
    from fa_cute.sim import host

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 130, 1, 64, dtype=torch.bfloat16) for _ in range(3))
    results, executed = {}, {}
    for engine in ("python", "jit"):
        with host.session("sm_100a", dsl=False, engine=engine) as s:
            results[engine] = flash_attn_func(q, k, v, causal=True, return_lse=True, backend="sim")
            executed[engine] = s.launches[-1].instructions
    for native, reference in zip(results["jit"], results["python"]):
        assert torch.equal(native, reference)
    assert executed["jit"] == executed["python"] > 10_000
