"""Packed sequences through tensor maps: what lies beside a sequence never enters, and is never
written.
"""

from __future__ import annotations

import pytest
import torch

from fa_cute.sim import host
from tests.ops.ragged_kernels import DIM, TILE, compile_mover

NAN = float("nan")
LENGTHS = (0, 1, TILE - 1, TILE, TILE + 1, 0, 2 * TILE + 3, 5, 0)
HEADS = 2


def spans(lengths: tuple[int, ...], gaps: tuple[int, ...]) -> tuple[list[tuple[int, int]], int]:
    """(offset, length) of sequences with unused rows before each, and the rows in all."""
    found, at = [], 0
    for length, gap in zip(lengths, gaps, strict=True):
        found.append((at + gap, length))
        at += gap + length
    return found, at + gaps[-1]


def packed(rows: int, heads: int, wide: bool, fill: float) -> torch.Tensor:
    """(rows, heads, DIM); ``wide``: every second head of tensors with longer rows, from the 8th
    column on.
    """
    if not wide:
        return torch.full((rows, heads, DIM), fill, dtype=torch.bfloat16)
    return torch.full((rows, 2 * heads, DIM + 24), fill).bfloat16()[:, ::2, 8 : 8 + DIM]


@pytest.mark.parametrize("turned", [False, True], ids=["rows", "turned"])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_sequence_ends_where_it_ends(arch: str, turned: bool) -> None:
    with host.session(arch):
        move = compile_mover(turned)
        for gaps in ((0,) * len(LENGTHS), (3, 0, 1, 0, 70, 2, 0, 0, 1)):
            for wide in (False, True):
                check(move, gaps, wide)


def check(move, gaps: tuple[int, ...], wide: bool) -> None:
    """Move LENGTHS with NaN in every row of no sequence; the two sides are packed differently."""
    there, total_k = spans(LENGTHS, gaps)
    here, total_q = spans(LENGTHS, gaps[::-1])
    x = packed(total_k, HEADS, wide, NAN)
    for offset, length in there:
        x[offset : offset + length] = torch.randn(length, HEADS, DIM).bfloat16()
    y, plain = (packed(total_q, HEADS, wide, NAN) for _ in range(2))
    values = torch.full((HEADS, total_q), NAN)
    blocks = -(-max(LENGTHS) // TILE) + 1
    tiles = torch.full((len(LENGTHS), HEADS, blocks, TILE, DIM), NAN).bfloat16()
    records = torch.tensor(
        [(*q, *k, 0, 0, 0, 0) for q, k in zip(here, there, strict=True)], dtype=torch.int32
    )
    move(x, y, plain, values, tiles, records)
    wants = [torch.full_like(t, NAN) for t in (y, plain, values)]
    for s, ((offset, length), (start, _)) in enumerate(zip(here, there, strict=True)):
        rows = x[start : start + length]
        tile = torch.zeros(blocks * TILE, HEADS, DIM).bfloat16()
        tile[:length] = rows
        assert torch.equal(tiles[s].flatten(1, 2), tile.transpose(0, 1)), (s, gaps, wide)
        wants[0][offset : offset + length] = rows
        wants[1][offset : offset + length, :, 0] = rows[..., 0]
        wants[2][:, offset : offset + length] = torch.arange(length).float()
    for got, want in zip((y, plain, values), wants, strict=True):
        assert torch.equal(got.nan_to_num(7e7), want.nan_to_num(7e7)), (gaps, wide)
