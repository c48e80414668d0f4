"""All variants of the SM100 backward's main kernel, assembled: no register is spilled in any.

Tracing and assembling one takes 1.8 seconds of a core; the kernels around it are compiled by
`test_sm100_plan`. One file per architecture, so that two workers share them.
"""

from __future__ import annotations

import tempfile
from itertools import product

from fa_cute import arch as archs
from fa_cute import compile as compiler
from fa_cute import resources
from fa_cute.bwd.args import BwdSpec
from fa_cute.bwd.sm100.plan import HEAD_DIMS, config

# A gradient of the LSE comes in through the preprocess: not a variant of the main kernel.
SPECS = [
    BwdSpec(dtype, d, d, causal, ratio, deterministic)
    for d, dtype, causal, ratio, deterministic in product(
        HEAD_DIMS, ("bf16", "fp16"), (False, True), (1, 2), (False, True)
    )
]


def assembles_without_spills(spec: BwdSpec, arch: str) -> None:
    """Compile the main kernel alone and look at what the assembler made of it."""
    from fa_cute.bwd.sm100.kernel import Main

    target = archs.get(arch)
    cfg = config(spec, target)
    q, k, v, _, _, dout, _, _, dk, dv, work, scale, *_, stream = compiler._arguments(
        compiler.Request("backward", cfg, spec, target)
    )
    with tempfile.TemporaryDirectory() as folder:
        options = f"--enable-tvm-ffi --gpu-arch {target.name} --keep-cubin --dump-dir {folder}"
        compiled = compiler.require_dsl().compile(
            Main(cfg, spec), (q, k, v, dout), (dk, dv), work, scale, stream, options=options
        )
        (main,) = resources.of_cubin(compiled.artifacts.CUBIN)
    assert not main.spills, main
    assert main.regs <= cfg.warps.launch_regs and main.threads == cfg.warps.threads
