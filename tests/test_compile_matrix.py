"""Every row of the tuning tables compiles for its architectures and assembles without a spill."""

from __future__ import annotations

import pytest

from fa_cute import cli_kernels, tune

pytest.importorskip("cutlass", reason="the kernel is compiled by NVIDIA's CuTe DSL")
REQUESTS = cli_kernels.requests(kinds=("forward",), dtypes=tune.DTYPES)
WINDOWS = cli_kernels.requests(
    kinds=("forward",), dtypes=("bf16",), windows=((True, False), (True, True))
)
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
