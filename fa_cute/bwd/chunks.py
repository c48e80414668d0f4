"""The order in which gradients are summed in global memory: fragments, so that a thread adds 16 bytes."""

from __future__ import annotations

from dataclasses import dataclass

from fa_cute.errors import PlanError

WGMMA_ROWS = 64  # rows of a warpgroup's product on Hopper, and of a chunk


@dataclass(frozen=True)
class Chunks:
    """How a (rows x cols) fp32 tile lies in memory: ``row_chunks x col_chunks`` pieces, one per warpgroup.

    Inside a piece of 64 rows x n columns, thread ``t`` of 128 holds wgmma's D fragment, ``n / 2`` values
    ``r = 4 j + 2 h + i`` of row ``16 (t / 32) + (t % 32) / 4 + 8 h`` and column ``8 j + 2 (t % 4) + i``; value ``r`` is at
    float ``(j * 128 + t) * 4 + r % 4``: 16 bytes a thread, threads side by side.
    """

    rows: int
    cols: int
    row_chunks: int
    col_chunks: int

    def __post_init__(self) -> None:
        if self.rows != WGMMA_ROWS * self.row_chunks or self.chunk_cols % 8:
            raise PlanError(f"{self}: a chunk is {WGMMA_ROWS} rows and a multiple of 8 columns")

    @property
    def chunk_cols(self) -> int:
        return self.cols // self.col_chunks

    @property
    def num(self) -> int:
        return self.row_chunks * self.col_chunks

    @property
    def vectors(self) -> int:
        """16-byte vectors of one thread in one chunk."""
        return self.chunk_cols // 8

    @property
    def chunk_floats(self) -> int:
        return WGMMA_ROWS * self.chunk_cols
