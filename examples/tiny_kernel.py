"""A kernel of two roles: a warp loads tiles by TMA, two warps add up their rows; in the simulator.

``--forget release`` or ``--forget wait`` leaves a synchronisation out, and the report says, in the
plan's words, what goes wrong.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import cutlass
import torch
from cutlass import cute
from cutlass.cute import runtime
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from fa_cute import sim
from fa_cute.errors import SimError
from fa_cute.ops import pipes
from fa_cute.plan import Edge, Role, SmemField, SmemPlan, Topology, Via, WarpPlan, show

ROWS, COLS, STAGES = 64, 32, 2


@dataclass(frozen=True)
class Plan:
    warps = WarpPlan((Role("load", 0, 1, regs=64), Role("add", 1, 3, regs=64)), launch_regs=64)
    topology = Topology((Edge("x", Via.TMA_ASYNC, "load", "add", stages=STAGES, tx=("sX",)),))
    smem = SmemPlan((SmemField("sX", ROWS * COLS * 4, STAGES),), reserved_bytes=1024)


@dataclass(frozen=True)
class RowSums:
    plan: Plan
    forget: str = ""  # "wait" or "release"

    @cute.jit
    def __call__(self, mX: cute.Tensor, mSums: cute.Tensor, stream):
        layout = cute.make_layout((ROWS, COLS, STAGES), stride=(COLS, 1, ROWS * COLS))
        slot, op = cute.select(layout, mode=[0, 1]), cpasync.CopyBulkTensorTileG2SOp()
        tma, tX = cpasync.make_tiled_tma_atom(op, mX, slot, (ROWS, COLS))
        block = (self.plan.warps.threads, 1, 1)
        self.kernel(tma, tX, mSums, layout).launch(grid=(1, 1, 1), block=block, stream=stream)

    @cute.kernel
    def kernel(self, tma: cute.CopyAtom, tX: cute.Tensor, mSums: cute.Tensor, layout: cute.Layout):
        sX = SmemAllocator().allocate_tensor(cutlass.Float32, layout, byte_alignment=1024)
        x = pipes.build(self.plan.topology, self.plan.warps, self.plan.smem).x
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) < self.plan.warps["add"].start:
            self.load(tma, tX, sX, x)
        else:
            self.add(sX, mSums, x)

    @cute.jit
    def load(self, tma, tX, sX, x):
        """Waits for free slots; the copies themselves say when a slot is full."""
        tiles = cute.group_modes(cute.local_tile(tX, (ROWS, COLS), (None, 0)), 0, 2)
        sides = (cute.group_modes(sX, 0, 2), tiles)
        into, source = cpasync.tma_partition(tma, 0, cute.make_layout(1), *sides)
        x = x.make_producer()
        for i in cutlass.range(cute.size(source, mode=[1]), unroll=1):
            free = x.acquire_and_advance()
            cute.copy(tma, source[None, i], into[None, free.index], tma_bar_ptr=free.barrier)
        x.tail()

    @cute.jit
    def add(self, sX, mSums, x):
        """A row per thread: waits for full slots, says when one may be filled again."""
        row, x = cute.arch.thread_idx()[0] % ROWS, x.make_consumer()
        for i in cutlass.range(mSums.shape[0] // ROWS, unroll=1):
            if cutlass.const_expr(self.forget != "wait"):
                full = x.wait_and_advance()
            total = cutlass.Float32(0.0)
            for col in cutlass.range_constexpr(COLS):
                total += sX[row, col, i % STAGES]
            mSums[i * ROWS + row] = total
            if cutlass.const_expr(self.forget == "wait"):
                full = x.wait_and_advance()  # too late
            if cutlass.const_expr(self.forget != "release"):
                full.release()


def main() -> str:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--forget", choices=("wait", "release"), default="")
    kernel, f32, n = RowSums(Plan(), parser.parse_args().forget), cutlass.Float32, cute.sym_int()
    print(show.text(kernel.plan, "RowSums"))
    x, sums = torch.randn(6 * ROWS, COLS), torch.empty(6 * ROWS)
    with sim.session("sm_90a", races=True, plan=show.to_dict(kernel.plan)) as session:
        like_x = runtime.make_fake_tensor(f32, (n, COLS), (COLS, 1), assumed_align=16)
        like_sums = runtime.make_fake_tensor(f32, (n,), (1,), assumed_align=16)
        stream = runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
        fn = cute.compile(kernel, like_x, like_sums, stream, options="--enable-tvm-ffi")
        try:
            fn(x, sums)
        except SimError as error:
            return str(error)
    races = "\n".join(map(str, session.launches[-1].races))
    return races or f"no race; largest error {(sums - x.sum(1)).abs().max():.1e}"


if __name__ == "__main__":
    print(main())
