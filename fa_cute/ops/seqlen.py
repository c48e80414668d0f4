"""The lengths of one batch element, and where it starts in the tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .arith import ceil_div


@dataclass(frozen=True)
class Seqlen:
    """Lengths of one batch element in rows; starts are 0 for a dense batch.

    A kernel asks for lengths and starts only through this value, so that batches whose elements lie
    one after the other (``start_q``/``start_k`` from cumulative lengths) need no change in a role.
    """

    seqlen_q: Any
    seqlen_k: Any
    start_q: Any = 0
    start_k: Any = 0

    @property
    def diagonal(self) -> Any:
        """``k - q`` on the bottom-right aligned diagonal."""
        return self.seqlen_k - self.seqlen_q

    def num_m(self, tile_m: int, pack: int = 1) -> Any:
        """Query blocks; ``pack`` query heads that share a kv head are rows of the same block."""
        return ceil_div(self.seqlen_q * pack, tile_m)

    def num_n(self, tile_n: int) -> Any:
        """KV blocks."""
        return ceil_div(self.seqlen_k, tile_n)
