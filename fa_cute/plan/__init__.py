"""What a kernel uses, as data: warps and registers, pipeline edges, tensor memory, shared memory.

Frozen values that check themselves without a GPU and without the DSL; a kernel is built from them.
"""

from __future__ import annotations

from fa_cute.plan.smem import SmemField, SmemPlan
from fa_cute.plan.tmem import TmemPlan, TmemRegion
from fa_cute.plan.topology import Arrive, Barrier, Edge, Topology, Via
from fa_cute.plan.verify import verify
from fa_cute.plan.warps import Role, WarpPlan

__all__ = [
    "Arrive",
    "Barrier",
    "Edge",
    "Role",
    "SmemField",
    "SmemPlan",
    "TmemPlan",
    "TmemRegion",
    "Topology",
    "Via",
    "WarpPlan",
    "verify",
]
