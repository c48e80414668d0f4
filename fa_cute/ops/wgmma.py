"""Hopper's warpgroup matrix product: operand layouts in shared memory, fragments, and issue loops.

One warpgroup computes 64 rows. Operands in shared memory are rows of ``d`` contiguous elements in
the widest swizzle that divides ``d``; the same bytes serve as K (its rows are the N of S = Q K^T)
and, transposed, as V (its columns are the N of O = P V).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind

ROWS = 64  # of one wgmma: a warpgroup
K_STEP = 16  # elements of one wgmma along K, 16-bit types
PITCH = 32  # head dims in shared memory are multiples of this: half a 128-byte swizzle


def padded(head_dim: int) -> int:
    """Columns that a head dim takes in shared memory; TMA fills the rest with zeros, and its stores
    leave them out.
    """
    return -(-head_dim // PITCH) * PITCH


def row_atom(head_dim: int) -> SmemLayoutAtomKind:
    """The widest swizzle whose pattern divides a row of ``head_dim`` 16-bit elements."""
    return SmemLayoutAtomKind.K_SW128 if head_dim % 64 == 0 else SmemLayoutAtomKind.K_SW64


def rows_layout(dtype, rows: int, head_dim: int, stages: int) -> cute.ComposedLayout:
    """(rows, head_dim, stages): stage after stage, in a stage column block after column block."""
    atom = warpgroup.make_smem_layout_atom(row_atom(head_dim), dtype)
    return cute.tile_to_shape(atom, (rows, head_dim, stages), order=(0, 1, 2))


def transposed(s: cute.Tensor) -> cute.Tensor:
    """The same shared memory with rows and columns exchanged: (head_dim, rows, stages)."""
    return cute.make_tensor(s.iterator, cute.select(s.layout, mode=[1, 0, 2]))


def make_mma(
    dtype, n: int, *, a_in_regs: bool = False, b_transposed: bool = False
) -> cute.TiledMma:
    """(64 x n) += (64 x k) (n x k)^T of one warpgroup, fp32 accumulator."""
    source = warpgroup.OperandSource.RMEM if a_in_regs else warpgroup.OperandSource.SMEM
    b_major = OperandMajorMode.MN if b_transposed else OperandMajorMode.K
    op = warpgroup.MmaF16BF16Op(
        dtype, Float32, (ROWS, n, K_STEP), source, OperandMajorMode.K, b_major
    )
    return cute.make_tiled_mma(op)


def accumulator(mma: cute.TiledMma, n: int) -> cute.Tensor:
    """fp32 registers of 64 x n; register 4 j + 2 h + i of a thread is row t / 4 + 8 h of its warp's
    16, column 8 j + 2 (t % 4) + i.
    """
    return cute.make_rmem_tensor(mma.partition_shape_C((ROWS, n)), Float32)


def fragment_a(mma: cute.TiledMma, k: int) -> cute.Tensor:
    """Registers of a 64 x k left operand; register for register the accumulator of 64 x k, in 16
    bits.
    """
    return mma.make_fragment_A(mma.get_slice(0).partition_shape_A((ROWS, k)))


def operand_a(mma: cute.TiledMma, s: cute.Tensor) -> cute.Tensor:
    """Descriptors of a left operand in shared memory: (MMA, MMA_M, MMA_K, STAGE)."""
    return mma.make_fragment_A(mma.get_slice(0).partition_A(s))


def operand_b(mma: cute.TiledMma, s: cute.Tensor) -> cute.Tensor:
    """Descriptors of a right operand in shared memory: (MMA, MMA_N, MMA_K, STAGE)."""
    return mma.make_fragment_B(mma.get_slice(0).partition_B(s))


@cute.jit
def issue(
    mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, accumulate, steps=None
):
    """Issue the K steps ``steps`` (default all) of ``acc (+)= a b``; the caller fences, commits,
    waits.

    The atom is made here: ACCUMULATE is state, and would not survive on a shared object.
    """
    chosen = range(cute.size(a.shape[2])) if const_expr(steps is None) else steps
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, accumulate)
    for i in cutlass.range_constexpr(len(chosen)):
        k = chosen[i]
        cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
