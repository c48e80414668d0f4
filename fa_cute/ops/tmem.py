"""Tensor memory: allocation, and moving whole rows between it and registers.

A row of an accumulator is one lane; a warpgroup sees all 128, thread i has lane i.  Rows move with
the 32x32b instructions: register j of a thread is column j.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import tcgen05

from ..errors import PlanError
from ..plan.tmem import TMEM_COLS


@dataclass(frozen=True)
class TmemMap:
    """The columns of a plan that allocates all of them: addresses are then known while tracing.

    A CTA that owns the whole tensor memory owns it from column 0; constant addresses keep the MMA
    warp's descriptors out of registers.  `origin` (from `address`) is the same as a run-time value:
    for a role that touches many columns, whose instructions then add them to one register, while
    constants are merged with the lane into a register each.
    """

    plan: object
    origin: object = None

    def __post_init__(self) -> None:
        if self.plan.alloc_cols != TMEM_COLS:
            raise PlanError(
                f"{self.plan.alloc_cols} tensor-memory columns; constant addresses need {TMEM_COLS}"
            )

    def rows(self, first: str, second: str | None = None, index=0) -> cute.Tensor:
        """Region `first` as (lane, column) fp32; with `second`, `index` chooses one of the two."""
        region = self.plan[first]
        step = self.plan[second].start - region.start if second else 0
        layout = cute.make_layout((128, region.cols), stride=(1 << 16, 1))
        base = self.origin
        if base is None:
            base = cute.make_ptr(Float32, 0, cute.AddressSpace.tmem, assumed_align=16)
        return cute.make_tensor(base + region.start + step * index, layout)


def allocate(storage: cute.Pointer, cols: int, ctas: int = 1) -> None:
    """Whole warp: take `cols` columns; the address goes to SMEM, a barrier must follow.

    In a pair (`ctas` 2) a warp of each CTA does this.
    """
    cute.arch.alloc_tmem(cols, storage, is_two_cta=ctas == 2)
    cute.arch.relinquish_tmem_alloc_permit(is_two_cta=ctas == 2)


def address(storage: cute.Pointer) -> cute.Pointer:
    """Where the allocation starts, after the barrier that follows it."""
    return cute.arch.retrieve_tmem_ptr(Float32, alignment=16, ptr_to_buffer_holding_addr=storage)


def free(storage: cute.Pointer, cols: int, ctas: int = 1) -> None:
    """Whole warp, after everyone's last access; in a pair after the other CTA's too."""
    cute.arch.dealloc_tmem(address(storage), cols, is_two_cta=ctas == 2)


def load_op(cols: int):
    """Copy atom: `cols` columns of this thread's lane into registers."""
    return cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(cols)), Float32)


def load_max_op(cols: int):
    """Copy atom like `load_op` that also gives the largest of the columns (sm_103a)."""
    return cute.make_copy_atom(tcgen05.copy.LdRed32x32bOp(tcgen05.Repetition(cols)), Float32)


def store_op(cols: int):
    """Copy atom: registers into `cols` columns of this thread's lane."""
    return cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(cols)), Float32)


def source(atom, rows: cute.Tensor, thread) -> tuple[cute.TiledCopy, cute.Tensor]:
    """(copy, this thread's view of `rows` as source), one mode per instruction in the last mode."""
    copy = tcgen05.make_tmem_copy(atom, rows).get_slice(thread)
    return copy, copy.partition_S(rows)


def target(atom, rows: cute.Tensor, thread) -> tuple[cute.TiledCopy, cute.Tensor]:
    """(copy, this thread's view of `rows` as destination)."""
    copy = tcgen05.make_tmem_copy(atom, rows).get_slice(thread)
    return copy, copy.partition_D(rows)


def row_registers(partition, rows: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
    """Registers for this thread's row, as the copy sees them and as a plain vector of columns."""
    shape = partition(cute.make_identity_tensor(rows.shape)).shape
    split = cute.make_rmem_tensor(shape, Float32)
    return split, cute.make_tensor(split.iterator, cute.make_layout(rows.shape[1]))
