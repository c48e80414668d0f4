"""Where the rows of dS go in shared memory: they are the A operand of dQ, transposed.

One CTA holds all of it: (keys x rows), a column group for each team. In a pair, CTA r makes the dQ
of its half of the rows from the keys of both: the rows of team r, (keys of both x half of the
rows). So team t writes to CTA t, at the keys of its own CTA.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...ops import cluster, epilogue, ptx
from .ctx import BwdCtx

PIECE = 8  # 16-bit elements of a 16-byte store


@dataclass(frozen=True)
class Keep:
    """One CTA."""

    def put(self, cx: BwdCtx, x: cute.Tensor, team, thread):
        """This team's part of a key's row of dS."""
        s = cx.smem.operand("dS rows")
        row = epilogue.swizzled_row(s, cx.smem.layouts["dS rows"], thread)
        offset = team * row.group_bytes  # a team's rows are one column group
        epilogue.row_to_smem(x, row, offset, cx.products.element)
        cute.arch.fence_view_async_shared()  # before the tensor core's reads


@dataclass(frozen=True)
class Exchange:
    """A pair, through distributed shared memory; one of the teams happens to stay at home."""

    @cute.jit
    def put(self, cx: BwdCtx, x: cute.Tensor, team, thread):
        """This team's part of a key's row of dS."""
        s, n = cx.smem.operand("dS rows"), cx.cfg.tile_n
        row = epilogue.swizzled_row(s, cx.smem.layouts["dS rows"], cx.rank * n + thread)
        # A zero that nobody knows: each address takes two registers, and would be kept in them.
        there = cluster.map_address(row.address, team) - row.address + ptx.unknown_zero()
        element = cx.products.element
        for j in cutlass.range_constexpr(cute.size(x.shape) // PIECE):
            piece = cute.make_rmem_tensor(PIECE, element)
            piece.store(cute.local_tile(x, (PIECE,), (j,)).load().to(element))
            words = cute.make_tensor(
                cute.recast_ptr(piece.iterator, dtype=Int32), cute.make_layout(PIECE // 2)
            )
            cluster.store_b32x4(row.piece(j) + there, *(words[i] for i in range(PIECE // 2)))
        # Before the tensor core's reads, in either CTA.
        cute.arch.fence_proxy("async.shared", space="cluster")
