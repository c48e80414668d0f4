"""The kinds of the Hopper backward's main kernel that are tightest, assembled: no register in local
memory. The kernels around it are compiled by other tests."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

from fa_cute import compile, resources
from fa_cute.bwd.args import BwdSpec
from fa_cute.bwd.sm90 import plan

from ..test_custom_mask import Chunked
from .test_sm90_sim import HOPPER

pytest.importorskip("cutlass", reason="the kernels are compiled by NVIDIA's CuTe DSL")

# Dense ones as they are timed; shared kv heads, an order, limits on both sides and lists of
# sequences all take registers.
KINDS = {
    "causal": {"causal": True},
    "in order": {"causal": True, "deterministic": True},
    "full, in order": {"deterministic": True},
    "left": {"window": (True, False), "qhead_per_kvhead": 2},
    "both": {"window": (True, True), "varlen": True},
    "ordered": {"window": (True, True), "deterministic": True, "qhead_per_kvhead": 2},
    "list": {"varlen": True},
    "causal list": {"causal": True, "varlen": True},
    "list, in order": {"varlen": True, "deterministic": True},
    "causal list, in order": {"causal": True, "varlen": True, "deterministic": True},
}
SPECS = {
    f"{row['head_dim']}_{row['head_dim_v']}-{kind}": BwdSpec(
        "bf16", row["head_dim"], row["head_dim_v"], **{"causal": False, **options}
    )
    for row in plan.TILES
    for kind, options in KINDS.items()
}
# Of the persistent ones besides.
NARROW = {
    "left, causal list, in order": {"window": (True, False), "varlen": True, "deterministic": True},
    "causal list, shared": {"varlen": True, "qhead_per_kvhead": 2},
    "own": {"custom": Chunked(chunk=96)},
}
SPECS |= {
    f"{d}_{d}-{kind}": BwdSpec("bf16", d, d, True, **options)
    for d in (64, 128)
    for kind, options in NARROW.items()
}


@pytest.mark.parametrize("name", SPECS)
def test_no_variant_spills(name):
    spec = SPECS[name]
    assemble(spec, plan.config(spec))


@pytest.mark.parametrize("kind", ["causal", "full, in order"])
@pytest.mark.parametrize("dims", ["64_64", "96_96", "128_128", "256_256"])
def test_no_persistent_one_spills(dims, kind):
    spec = SPECS[f"{dims}-{kind}"]
    assemble(spec, replace(plan.config(spec), persistent=True, pair=False))


def assemble(spec: BwdSpec, cfg: plan.BwdSm90Config) -> None:
    """The main kernel, without a register in local memory."""
    from fa_cute.bwd import call

    lengths = (spec.varlen, spec.varlen, False, False)
    request = compile.Request("backward", cfg, spec, HOPPER, lengths=lengths)
    nothing = dict.fromkeys(("BwdPreprocess", "BwdPostprocess"), mock.DEFAULT)
    with mock.patch.multiple(call, **nothing):
        kernels = resources.of_cubin(compile.cubin(request))
    (main,) = (k for k in kernels if k.threads == cfg.warps.threads)
    assert not main.spills, main
    assert main.regs <= cfg.warps.launch_regs
