"""The order in which gradients are summed in global memory, so that a thread adds 16 bytes.

An order says which elements a thread's 16-byte vector holds: `origin` of the thread, and `runs` of
neighbours in a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fa_cute.errors import PlanError

LANES = 128  # of tensor memory: rows of an accumulator on Blackwell
WGMMA_ROWS = 64  # rows of a warpgroup's product on Hopper, and of a chunk


@dataclass(frozen=True)
class Chunks:
    """How a (rows x cols) fp32 tile lies in memory: ``row_chunks x col_chunks`` pieces, one per
    warpgroup.

    Inside a piece of 64 rows x n columns, thread ``t`` of 128 holds wgmma's D fragment, ``n / 2``
    values ``r = 4 j + 2 h + i`` of row ``16 (t / 32) + (t % 32) / 4 + 8 h`` and column
    ``8 j + 2 (t % 4) + i``; value ``r`` is at float ``(j * 128 + t) * 4 + r % 4``: 16 bytes a
    thread, threads side by side.
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

    def origin(self, chunk: Any, t: Any) -> tuple[Any, Any]:
        """(row, column) of the first value of thread ``t``."""
        row = chunk // self.col_chunks * WGMMA_ROWS + t // 32 * 16 + t % 32 // 4
        return row, chunk % self.col_chunks * self.chunk_cols + t % 4 * 2

    def runs(self, j: int) -> tuple[tuple[int, int, int, int], ...]:
        """Vector ``j`` as (rows, columns from the origin, first value, values side by side)."""
        return (0, 8 * j, 0, 2), (8, 8 * j, 2, 2)


@dataclass(frozen=True)
class RowChunks:
    """The same where a thread holds (a part of) a row of 128, as tensor memory gives it.

    Vector ``v`` of four columns of all rows is contiguous: column ``4 v + i`` of row ``t`` is at
    float ``(v * rows + t) * 4 + i``. Any number of vectors is one piece of memory, so a part of the
    columns moves in one bulk operation.
    """

    rows: int
    cols: int
    col_chunks: int = 1

    def __post_init__(self) -> None:
        if self.rows != LANES or self.cols % (4 * self.col_chunks):
            raise PlanError(f"{self}: {LANES} rows, and columns in whole vectors of 4")

    @property
    def chunk_cols(self) -> int:
        return self.cols // self.col_chunks

    @property
    def num(self) -> int:
        return self.col_chunks

    @property
    def vectors(self) -> int:
        """16-byte vectors of one thread in one chunk."""
        return self.chunk_cols // 4

    @property
    def chunk_floats(self) -> int:
        return self.rows * self.chunk_cols

    def origin(self, chunk: Any, t: Any) -> tuple[Any, Any]:
        """(row, column) of the first value of thread ``t``."""
        return t, chunk * self.chunk_cols

    def runs(self, j: int) -> tuple[tuple[int, int, int, int], ...]:
        """Vector ``j`` as (rows, columns from the origin, first value, values side by side)."""
        return ((0, 4 * j, 0, 4),)


@dataclass(frozen=True)
class PairChunks(RowChunks):
    """The same for a product of 128 rows by a pair of CTAs: a chunk is one CTA's half of the rows.

    A lane holds half of the columns of a row: lane ``t`` row ``t % 64``, the half ``t // 64``.
    """

    col_chunks: int = 2  # pieces of the same size as if the columns were split

    def origin(self, chunk: Any, t: Any) -> tuple[Any, Any]:
        """(row, column) of the first value of thread ``t``."""
        half = self.rows // 2
        return chunk * half + t % half, t // half * (self.cols // 2)
