"""Do the parts of a kernel's plan fit together and on the machine?"""

from __future__ import annotations

from typing import Any

from ..arch import Arch
from ..errors import PlanError


def verify(plan: Any, arch: Arch) -> None:
    """Raise PlanError unless ``plan.warps, .topology, .smem, .tmem`` fit together and on ``arch``.

    ``plan.tmem`` is None or missing for a kernel without tensor memory.
    """
    if plan.warps.threads > arch.max_threads:
        raise PlanError(
            f"{plan.warps.threads} threads; {arch.name} allows {arch.max_threads} per CTA"
        )
    launched = plan.warps.threads * plan.warps.launch_regs * plan.warps.ctas_per_sm
    if launched > arch.regs_per_sm:
        raise PlanError(
            f"{launched} registers for {plan.warps.ctas_per_sm} CTAs; {arch.name} has "
            f"{arch.regs_per_sm}"
        )
    plan.topology.check(plan.warps, plan.smem)
    if plan.smem.reserved_bytes < plan.topology.mbarrier_bytes:
        raise PlanError(
            f"SMEM reserves {plan.smem.reserved_bytes} bytes; "
            f"the mbarriers take {plan.topology.mbarrier_bytes}"
        )
    if plan.smem.total > arch.smem_bytes:
        raise PlanError(
            f"SMEM {plan.smem.total} bytes ({plan.smem.field_bytes} in fields, "
            f"{plan.smem.reserved_bytes} reserved); "
            f"{arch.name} has {arch.smem_bytes}, {plan.smem.total - arch.smem_bytes} too many"
        )
    tmem = getattr(plan, "tmem", None)
    if tmem is not None and tmem.alloc_cols > arch.tmem_cols:
        raise PlanError(f"TMEM {tmem.alloc_cols} columns; {arch.name} has {arch.tmem_cols}")
