"""A kernel that moves each block of each sequence through shared memory (the DSL wants files)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute import runtime
from cutlass.cute.nvgpu import cpasync

from fa_cute import sched
from fa_cute.ops import ragged, seqlen, wgmma

TILE, DIM = 64, 64


@dataclass(frozen=True)
class Args:
    """What crosses the kernel boundary."""

    load: cute.CopyAtom
    store: cute.CopyAtom
    mX: cute.Tensor
    mY: cute.Tensor
    mPlain: cute.Tensor  # (total, heads, d)
    mValues: cute.Tensor  # (heads, total)
    mTiles: cute.Tensor  # (sequences, heads, blocks, TILE, DIM): tiles as they arrive
    seqlens: Any


@dataclass(frozen=True)
class Mover:
    """x -> tile -> y, and first columns -> plain, row numbers -> values. ``turned``: the load takes
    x as (d, rows).
    """

    turned: bool = False

    @cute.jit
    def __call__(self, x, y, plain, values, tiles, records, stream):
        rows = cute.select(wgmma.rows_layout(BFloat16, TILE, DIM, 1), mode=[0, 1])
        load_layout, box = rows, (TILE, DIM)
        if const_expr(self.turned):
            load_layout, box = cute.select(rows, mode=[1, 0]), (DIM, TILE)
        made = cpasync.make_tiled_tma_atom
        view = ragged.tma_view(x, turned=self.turned)
        load, mX = made(cpasync.CopyBulkTensorTileG2SOp(), view, load_layout, box)
        view = ragged.tma_view(y)
        store, mY = made(cpasync.CopyBulkTensorTileS2GOp(), view, rows, (TILE, DIM))
        table = cute.make_tensor(
            records.iterator,
            cute.make_layout((records.shape[0], seqlen.RECORD_INTS), stride=(8, 1)),
        )
        args = Args(load, store, mX, mY, plain, values, tiles, seqlen.Varlen(table))
        grid = (tiles.shape[0], tiles.shape[1], tiles.shape[2])
        self.kernel(args).launch(grid=grid, block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, a: Args):
        sequence, head, block = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        lengths = a.seqlens.at(sched.Tile(block, head, sequence, True))
        smem = cutlass.memory.SmemAllocator()
        layout = wgmma.rows_layout(BFloat16, TILE, DIM, 1)
        barrier = smem.allocate_array(Int64, 1)
        sX = smem.allocate_tensor(BFloat16, layout.outer, 1024, swizzle=layout.inner)
        if lane == 0:
            cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        mX = lengths.rows(a.mX, "k", head, turned=self.turned)
        if const_expr(self.turned):
            gX = cute.local_tile(mX, (DIM, TILE), (0, None))
            to = cute.make_tensor(sX.iterator, cute.select(sX.layout, mode=[1, 0, 2]))
        else:
            gX, to = cute.local_tile(mX, (TILE, DIM), (None, 0)), sX
        gY = cute.local_tile(lengths.rows(a.mY, "q", head), (TILE, DIM), (None, 0))
        tXsX, tXgX = self.sides(a.load, to, gX)
        tYsY, tYgY = self.sides(a.store, sX, gY)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, TILE * DIM * 2)
        cute.copy(a.load, tXgX[None, block], tXsX[None, 0], tma_bar_ptr=barrier)
        cute.arch.mbarrier_wait(barrier, 0)
        cute.copy(a.store, tYsY[None, 0], tYgY[None, block])
        cute.arch.cp_async_bulk_commit_group()
        plain, values = lengths.plain(a.mPlain, "q", head), lengths.values(a.mValues, head)
        for i in cutlass.range_constexpr(TILE // 32):
            row = i * 32 + lane
            for col in cutlass.range(DIM, unroll=1):
                a.mTiles[sequence, head, block, row, col] = sX[row, col, 0]
            if block * TILE + row < lengths.q:
                plain[block * TILE + row, 0] = sX[row, 0, 0]
                values[block * TILE + row] = Float32(block * TILE + row)
        cute.arch.cp_async_bulk_wait_group(0)

    def sides(self, atom, shared, tiles):
        """(shared, global) sides of a copy."""
        shared, tiles = cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
        return cpasync.tma_partition(atom, 0, cute.make_layout(1), shared, tiles)


def compile_mover(turned: bool):
    """The kernel for tensors of any size and stride."""
    fake, size = runtime.make_fake_compact_tensor, cute.sym_int
    wide = cute.sym_int64

    def packed():
        stride = (wide(divisibility=8), wide(divisibility=8), 1)
        shape = (size(), size(), DIM)
        return runtime.make_fake_tensor(BFloat16, shape, stride, assumed_align=16)

    values = fake(Float32, (size(), size()), stride_order=(1, 0))
    shape = (size(), size(), size(), TILE, DIM)
    tiles = fake(BFloat16, shape, stride_order=(4, 3, 2, 1, 0))
    records = fake(Int32, (size(), 8), stride_order=(1, 0), assumed_align=16)
    stream = runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    x, y, plain = packed(), packed(), packed()
    return cute.compile(
        Mover(turned), x, y, plain, values, tiles, records, stream, options="--enable-tvm-ffi"
    )
