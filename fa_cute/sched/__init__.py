"""Orders of tiles, one module each, and their names in the tuning tables."""

from __future__ import annotations

from typing import Any

from ..errors import PlanError
from . import snake
from .base import Linear, Once, Order, Scheduler, Tile, TileSpace, Walk, capped, grid_of, here
from .dynamic import Dynamic
from .lpt import L2_BYTES, Lpt, LptPersistent, Sections, sectioned
from .persistent import Persistent
from .single import Single
from .snake import Snake
from .spt import Ascending, Spt

NAMES: dict[str, type] = {
    "single": Single,
    "persistent": Persistent,
    "lpt": Lpt,
    "lpt_persistent": LptPersistent,
    "snake": Snake,
    "dynamic": Dynamic,
    "ascending": Ascending,
    "spt": Spt,
}


def by_name(name: str) -> type:
    """The class of a name in a tuning table."""
    if name not in NAMES:
        raise PlanError(f"no scheduler {name!r}; schedulers: {sorted(NAMES)}")
    return NAMES[name]


def make(
    name: str,
    space: TileSpace,
    *,
    seqlen_k: Any = 1,
    kv_bytes_per_row: int = 1,
    qhead_per_kvhead: Any = 1,
    l2_bytes: int = L2_BYTES,
) -> Any:
    """The order ``name`` over a space; what follows sizes L2 sections, where an order has them."""
    cls = by_name(name)
    if issubclass(cls, Sections):
        return sectioned(cls, space, seqlen_k, kv_bytes_per_row, qhead_per_kvhead, l2_bytes)
    return cls(space)


__all__ = [
    "NAMES",
    "Ascending",
    "Dynamic",
    "Linear",
    "Lpt",
    "LptPersistent",
    "Once",
    "Order",
    "Persistent",
    "Scheduler",
    "Sections",
    "Single",
    "Snake",
    "Spt",
    "Tile",
    "TileSpace",
    "Walk",
    "by_name",
    "capped",
    "grid_of",
    "here",
    "make",
    "sectioned",
    "snake",
]
