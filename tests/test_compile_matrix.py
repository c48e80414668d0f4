"""Every row of the tuning tables compiles for its architectures and assembles without a spill."""

from __future__ import annotations

import pytest

from fa_cute import cli

pytest.importorskip("cutlass", reason="the kernel is compiled by NVIDIA's CuTe DSL")
ROWS = list(cli.config_rows())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("row,arch", ROWS, ids=[f"{row}" for row, _ in ROWS])
def test_row_compiles_and_assembles_without_spills(row, arch, dtype):
    usage = cli.row_resources(row, arch, dtype)
    warps = row.cfg.warps
    assert not usage.spills, usage
    assert usage.threads == warps.threads
    assert usage.regs <= warps.launch_regs
    assert row.cfg.smem.total + usage.static_smem_bytes <= arch.smem_bytes
