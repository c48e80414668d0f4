"""Every row of the tuning tables compiles for its architectures and assembles without a spill."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fa_cute import cli_kernels, tune

pytest.importorskip("cutlass", reason="the kernel is compiled by NVIDIA's CuTe DSL")
REQUESTS = cli_kernels.requests(kinds=("forward",), dtypes=tune.DTYPES)
WINDOWS = cli_kernels.requests(
    kinds=("forward",), dtypes=("bf16",), windows=((True, False), (True, True))
)


def of_sequences(request):
    """The same kernel for sequences of any lengths."""
    spec = replace(request.spec, varlen=True)
    cfg = tune.forward(spec, request.arch)
    return replace(request, cfg=cfg, spec=spec, lengths=(True, True, False, False))


VARLEN = [
    of_sequences(r)
    for r in REQUESTS
    if r.spec.dtype == "bf16"
    and (r.arch.name == "sm_90a" or (r.arch.name, r.spec.head_dim) == ("sm_100a", 128))
]
# What the system takes of each CTA's shared memory: in a cubin's static size, not in the limit.
SYSTEM_SMEM = 1024


@pytest.mark.parametrize(
    "request_",
    [*REQUESTS, *WINDOWS],
    ids=[f"{r.label}-{r.spec.dtype}" for r in (*REQUESTS, *WINDOWS)],
)
def test_row_compiles_and_assembles_without_spills(request_):
    (_, usage), *_ = cli_kernels.parts(request_)
    warps, smem = request_.cfg.warps, request_.cfg.smem
    assert not usage.spills, usage
    assert usage.threads == warps.threads
    assert usage.regs <= warps.launch_regs
    static = usage.static_smem_bytes - SYSTEM_SMEM
    assert smem.total + static <= request_.arch.smem_bytes


@pytest.mark.parametrize("request_", VARLEN, ids=[r.label for r in VARLEN])
def test_sequences_of_any_lengths_assemble_without_spills(request_):
    """The kernel of the row, and the one that lists its tiles."""
    usages = [usage for _, usage in cli_kernels.parts(request_)]
    assert len(usages) == 2 and not any(usage.spills for usage in usages), usages
