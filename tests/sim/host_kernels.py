"""A DSL kernel for the tests of the host side (the DSL wants its source in a file)."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor


@cute.kernel
def add_kernel(a: cute.Tensor, b: cute.Tensor, s: cutlass.Float32):
    t, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 64 + t
    if i < a.shape[0]:
        b[i] = a[i] + s


@cute.jit
def add(a: cute.Tensor, b: cute.Tensor, s: cutlass.Float32):
    add_kernel(a, b, s).launch(grid=[(a.shape[0] + 63) // 64, 1, 1], block=[64, 1, 1])


@cute.kernel
def past_the_end_kernel(b: cute.Tensor):
    t, _, _ = cute.arch.thread_idx()
    b[t + 1] = cutlass.Float32(1.0)


@cute.jit
def past_the_end(b: cute.Tensor):
    past_the_end_kernel(b).launch(grid=[1, 1, 1], block=[64, 1, 1])


@cute.kernel
def rank_kernel(out: cute.Tensor):
    t, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    if t == 0:
        out[block] = cute.arch.block_idx_in_cluster()


@cute.jit
def ranks(out: cute.Tensor):
    rank_kernel(out).launch(grid=[out.shape[0], 1, 1], block=[32, 1, 1], cluster=[2, 1, 1])


def vector(dtype=cutlass.Float32):
    return make_fake_tensor(dtype, (cute.sym_int(),), stride=(1,))


def compile_add(**kw):
    args = (add, vector(), vector(), cutlass.Float32(0))
    return cute.compile(*args, options="--enable-tvm-ffi", **kw)
