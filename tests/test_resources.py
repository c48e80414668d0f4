"""Registers and local memory of a kernel, read from its cubin."""

from __future__ import annotations

import pytest

from fa_cute import errors, resources

cute = pytest.importorskip("cutlass.cute", reason="a cubin comes from NVIDIA's CuTe DSL")

import cutlass  # noqa: E402
from cutlass.cute import runtime  # noqa: E402


@cute.kernel
def uses_local_memory(m: cute.Tensor, indexed: cutlass.Constexpr):
    """``indexed``: an array addressed at run time cannot stay in registers."""
    r = cute.make_rmem_tensor(64, cutlass.Float32)
    for i in cutlass.range(64, unroll_full=True):
        r[i] = m[i]
    tid, _, _ = cute.arch.thread_idx()
    if cutlass.const_expr(indexed):
        for i in cutlass.range(64, unroll=1):
            r[(tid * 5 + i) % 64] = r[(tid * 7 - i) % 64] + m[i]
        m[tid] = r[(tid * 7) % 64]
    else:
        m[tid] = r[7] + r[9]


@cute.jit
def start(m: cute.Tensor, indexed: cutlass.Constexpr):
    uses_local_memory(m, indexed).launch(grid=(1, 1, 1), block=(96, 1, 1))


def usage(arch: str, indexed: bool, folder) -> resources.Resources:
    m = runtime.make_fake_compact_tensor(cutlass.Float32, (128,), assumed_align=16)
    options = f"--gpu-arch {arch} --keep-cubin --dump-dir {folder}"
    (found,) = resources.of_cubin(cute.compile(start, m, indexed, options=options).artifacts.CUBIN)
    return found


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_local_memory_is_seen(arch, tmp_path):
    found = usage(arch, True, tmp_path)
    assert found.spills and found.stack_bytes >= 64 * 4
    assert found.local_loads and found.local_stores
    assert found.threads == 96 and 0 < found.regs <= 255


def test_registers_alone(tmp_path):
    found = usage("sm_100a", False, tmp_path)
    assert not found.spills and found.local_loads == found.local_stores == 0
    assert found.instructions > 8 and found.static_smem_bytes == 0


def test_not_a_cubin():
    with pytest.raises(errors.CompileError, match="ELF"):
        resources.of_cubin(b"// PTX text")
