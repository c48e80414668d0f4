"""Schedulers and masks inside traced kernels: each order compiles, and simulated CTAs do what the
same code does on ints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Int32

from fa_cute import sched
from fa_cute.ops.mask import Band, kv_blocks, q_blocks
from fa_cute.sched import TileSpace
from fa_cute.sim import host

TILE = 64
SECTIONS = {"kv_bytes_per_row": 2**19, "qhead_per_kvhead": 2}


@dataclass(frozen=True)
class Args:
    """What crosses the kernel boundary."""

    out: cute.Tensor
    order: Any
    seqlen_q: Int32
    seqlen_k: Int32
    left: Int32


class Walker:
    """Adds to ``out[m_block, head, batch, n]`` for each KV block of each tile: 1, and 10 if it
    needs no element mask, and 100 for each query block that visits it in turn.
    """

    def __init__(self, name: str, cluster: int = 1) -> None:
        self.name, self.cluster = name, cluster

    @cute.jit
    def __call__(self, out: cute.Tensor, num_m: Int32, heads: Int32, batch: Int32, lengths: tuple):
        seqlen_q, seqlen_k, left, num_sms = lengths
        space = TileSpace(num_m, heads, batch)
        order = sched.make(self.name, space, **SECTIONS | {"seqlen_k": seqlen_k})
        self.kernel(Args(out, order, seqlen_q, seqlen_k, left)).launch(
            grid=order.grid(num_sms, self.cluster), block=(32, 1, 1)
        )

    @cute.kernel
    def kernel(self, args: Args):
        walk = sched.here(args.order, self.cluster)
        tile = walk.tile()
        mask = Band(left=args.left, right=0)
        while tile.valid:
            blocks = kv_blocks(mask, tile.m_block, TILE, TILE, args.seqlen_q, args.seqlen_k)
            for n in cutlass.range(blocks.lo, blocks.hi, unroll=1):
                back = q_blocks(mask, n, TILE, TILE, args.seqlen_q, args.seqlen_k)
                value = 1 + 100 * (back.hi - back.lo)
                if n >= blocks.full_lo and n < blocks.full_hi:
                    value = value + 10
                if cute.arch.lane_idx() == 0:
                    at = (tile.m_block, tile.head, tile.batch, n)
                    args.out[at] = args.out[at] + value
            walk = walk.next()
            tile = walk.tile()


def expected(num_m: int, heads: int, batch: int, lengths: tuple[int, ...]) -> torch.Tensor:
    """What the walker adds, tile by tile."""
    seqlen_q, seqlen_k, left, _ = lengths
    mask = Band(left=left, right=0)
    out = torch.zeros((num_m, heads, batch, -(-seqlen_k // TILE)), dtype=torch.int32)
    for m in range(num_m):
        blocks = kv_blocks(mask, m, TILE, TILE, seqlen_q, seqlen_k)
        for n in range(blocks.lo, blocks.hi):
            back = q_blocks(mask, n, TILE, TILE, seqlen_q, seqlen_k)
            full = blocks.full_lo <= n < blocks.full_hi
            out[m, :, :, n] = 1 + 100 * (back.hi - back.lo) + 10 * full
    return out


def fake_arguments() -> tuple:
    """What a walker is compiled with: any sizes."""
    shape = tuple(cute.sym_int() for _ in range(4))
    out = cute.runtime.make_fake_compact_tensor(Int32, shape, stride_order=(3, 2, 1, 0))
    one = Int32(1)
    return out, one, one, one, (one, one, one, one)


def run(walker: Walker, *shapes: tuple) -> None:
    """Compile once, compare every shape with what the same code gives on ints."""
    with host.session("sm_100a"):
        compiled = cute.compile(walker, *fake_arguments(), options="--enable-tvm-ffi")
        for num_m, heads, batch, lengths in shapes:
            want = expected(num_m, heads, batch, lengths)
            out = torch.zeros_like(want)
            compiled(out, num_m, heads, batch, lengths)
            assert torch.equal(out, want), (walker.name, num_m, heads, batch, lengths)


@pytest.mark.parametrize("name", sched.NAMES)
def test_every_order_in_a_kernel(name: str) -> None:
    """Ragged lengths, more and fewer SMs than tiles, L2 sections of two heads and of all."""
    run(
        Walker(name),
        (3, 4, 2, (150, 210, 40, 5)),
        (3, 3, 1, (150, 40, 1000, 64)),
        (1, 3, 1, (1, 64, 0, 2)),
    )


def test_lengths_of_the_test_make_sections() -> None:
    sections = [
        sched.make("lpt", TileSpace(3, 4, 2), **SECTIONS | {"seqlen_k": n}).section
        for n in (210, 40, 10)
    ]
    assert sections == [2, 4, 8]


def test_clusters_share_a_tile() -> None:
    """Both CTAs of a cluster visit the same tiles: everything is added twice."""
    with host.session("sm_100a"):
        compiled = cute.compile(
            Walker("persistent", 2), *fake_arguments(), options="--enable-tvm-ffi"
        )
        want = expected(3, 2, 1, (150, 210, 40, 4))
        out = torch.zeros_like(want)
        compiled(out, 3, 2, 1, (150, 210, 40, 4))
    assert torch.equal(out, 2 * want)


class Drawer(Walker):
    """The walker with tiles from an atomic counter instead of every n-th one."""

    @cute.jit
    def __call__(self, out: cute.Tensor, counter: cute.Tensor, num_m: Int32, heads: Int32):
        order = sched.make("dynamic", TileSpace(num_m, heads, 1), **SECTIONS | {"seqlen_k": 210})
        self.draw(out, counter, order).launch(grid=order.grid(5), block=(32, 1, 1))

    @cute.kernel
    def draw(self, out: cute.Tensor, counter: cute.Tensor, order: Any):
        ctas, _, _ = cute.arch.grid_dim()
        walk = sched.here(order)
        tile = walk.tile()
        while tile.valid:
            before = Int32(0)
            if cute.arch.lane_idx() == 0:
                out[tile.m_block, tile.head] = out[tile.m_block, tile.head] + 1
                before = cute.arch.atomic_add(counter.iterator, Int32(1))
            before = cute.arch.shuffle_sync(before, 0)
            walk = walk.take(order.drawn(before, ctas))
            tile = walk.tile()


def test_tiles_drawn_from_a_counter() -> None:
    """Each tile once, and each CTA draws once in vain."""
    with host.session("sm_90a"):
        fake = cute.runtime.make_fake_compact_tensor
        out = fake(Int32, (cute.sym_int(), cute.sym_int()), stride_order=(1, 0))
        counter = fake(Int32, (1,), stride_order=(0,))
        options = "--enable-tvm-ffi"
        compiled = cute.compile(
            Drawer("dynamic"), out, counter, Int32(1), Int32(1), options=options
        )
        for num_m, heads in ((3, 5), (1, 1), (7, 2)):
            got, drawn = torch.zeros((num_m, heads), dtype=torch.int32), torch.zeros(1).int()
            compiled(got, drawn, num_m, heads)
            assert torch.equal(got, torch.ones_like(got))
            assert drawn.item() == num_m * heads
