"""Every row of the tuning tables compiles for its architectures and assembles without a spill."""

from __future__ import annotations

import pytest

from fa_cute import cli

pytest.importorskip("cutlass", reason="the kernel is compiled by NVIDIA's CuTe DSL")
ROWS = list(cli.config_rows())
# What the system takes of each CTA's shared memory: in a cubin's static size, not in the limit.
SYSTEM_SMEM = 1024


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("row,arch", ROWS, ids=[f"{row}" for row, _ in ROWS])
def test_row_compiles_and_assembles_without_spills(row, arch, dtype):
    usage = cli.row_resources(row, arch, dtype)
    warps = row.cfg.warps
    assert not usage.spills, usage
    assert usage.threads == warps.threads
    assert usage.regs <= warps.launch_regs
    static = usage.static_smem_bytes - SYSTEM_SMEM
    assert row.cfg.smem.total + static <= arch.smem_bytes
