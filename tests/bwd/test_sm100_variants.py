"""Every variant of the SM100 backward assembles for sm_100a without spills."""

from __future__ import annotations

import pytest

from fa_cute.bwd.args import BwdSpec

from .sm100_variants import SPECS, assembles_without_spills, name

pytest.importorskip("cutlass", reason="the kernels are compiled by NVIDIA's CuTe DSL")


@pytest.mark.parametrize("spec", SPECS, ids=name)
def test_no_variant_spills(spec: BwdSpec) -> None:
    assembles_without_spills(spec, "sm_100a")
