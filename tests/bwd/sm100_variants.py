"""All variants of the SM100 backward's main kernel, assembled: no register is spilled in any.

Tracing and assembling one takes two seconds of a core; the kernels around it are compiled by
`test_sm100_plan`. One file per architecture, so that two workers share them.
"""

from __future__ import annotations

from itertools import product
from unittest import mock

from fa_cute import arch as archs
from fa_cute import compile as compiler
from fa_cute import resources
from fa_cute.bwd.args import BwdSpec
from fa_cute.bwd.sm100.plan import HEAD_DIMS, config

# A gradient of the LSE comes in through the preprocess: not a variant of the main kernel.
SPECS = [
    BwdSpec(dtype, *dims, causal, ratio, deterministic)
    for dims, dtype, causal, ratio, deterministic in product(
        HEAD_DIMS, ("bf16", "fp16"), (False, True), (1, 2), (False, True)
    )
]


class NotLaunched:
    """In the place of a kernel that is not looked at."""

    def __init__(self, *args) -> None:
        pass

    def __call__(self, *args) -> None:
        pass


def name(spec: BwdSpec) -> str:
    """A spec in a word."""
    words = [spec.dtype, f"{spec.head_dim}_{spec.head_dim_v}", "causal" if spec.causal else "full"]
    words += [f"gqa{spec.qhead_per_kvhead}"] * spec.shares_kv
    words += ["deterministic"] * spec.deterministic
    return "-".join(words)


def assembles_without_spills(spec: BwdSpec, arch: str) -> None:
    """Compile the main kernel alone and look at what the assembler made of it."""
    from fa_cute.bwd import call

    target = archs.get(arch)
    cfg = config(spec, target)
    with (
        mock.patch.object(call, "BwdPreprocess", NotLaunched),
        mock.patch.object(call, "BwdPostprocess", NotLaunched),
    ):
        request = compiler.Request("backward", cfg, spec, target)
        (main,) = resources.of_cubin(compiler.cubin(request))
    assert not main.spills, main
    assert main.regs <= cfg.warps.launch_regs and main.threads == cfg.warps.threads
