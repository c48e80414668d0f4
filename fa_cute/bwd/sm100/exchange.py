"""Where the rows of dS go in shared memory: they are the A operand of dQ, transposed.

One CTA holds all of it: (keys x rows), a column group for each team. In a pair, CTA r makes the dQ
of its half of the rows from the keys of both, (keys of both x half of the rows). So a team writes
each word of its rows to the CTA that owns these rows, at the keys of its own CTA, by stores: a bulk
copy would read and write the half that moves once more, from a place that is not free
(benchmarks/NOTES.md has the numbers).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...ops import cluster, epilogue, ptx
from .ctx import BwdCtx
from .plan import ELEMENT_BYTES, WORD

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
    """A pair, through distributed shared memory; half of the rows happen to stay at home."""

    @cute.jit
    def put(self, cx: BwdCtx, x: cute.Tensor, team, thread):
        """This team's part of a key's row of dS, word by word."""
        c, element = cx.cfg, cx.products.element
        s = cx.smem.operand("dS rows")
        row = epilogue.swizzled_row(s, cx.smem.layouts["dS rows"], cx.rank * c.tile_n + thread)
        # A zero that nobody knows: each address takes two registers, and would be kept in them.
        zero = ptx.unknown_zero()
        pieces, words_apart = WORD // PIECE, c.team_rows[1] != WORD
        for w in cutlass.range_constexpr(cute.size(x.shape) // WORD):
            # Whose rows these are, and which word of that CTA's half.
            owner, word = (w, team) if const_expr(words_apart) else (team, w)
            there = cluster.map_address(row.address, owner) - row.address + zero
            to = replace(row, key=row.key ^ (word * (WORD * ELEMENT_BYTES)))
            for j in cutlass.range_constexpr(pieces):
                piece = cute.make_rmem_tensor(PIECE, element)
                source = cute.local_tile(x, (PIECE,), (w * pieces + j,))
                piece.store(source.load().to(element))
                words = cute.make_tensor(
                    cute.recast_ptr(piece.iterator, dtype=Int32), cute.make_layout(PIECE // 2)
                )
                cluster.store_b32x4(to.piece(j) + there, *(words[i] for i in range(PIECE // 2)))
        # Before the tensor core's reads, in either CTA.
        cute.arch.fence_proxy("async.shared", space="cluster")
