"""What a kernel uses, as data: warps and registers, pipeline edges, tensor memory, shared memory.

Frozen values that check themselves without a GPU and without the DSL; a kernel is built from them.
"""

from __future__ import annotations

from .smem import SmemField, SmemPlan
from .tmem import TmemPlan, TmemRegion
from .topology import Arrive, Barrier, Edge, Topology, Via
from .verify import verify
from .warps import Role, WarpPlan

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
