"""The host side: compiled DSL functions on CPU tensors, saved ones, and nothing left patched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fa_cute.errors import OutOfBoundsError, SimError
from fa_cute.sim import host

cutlass = pytest.importorskip("cutlass")
hk = pytest.importorskip("tests.sim.host_kernels")
cute = hk.cute
ROOT = Path(__file__).resolve().parents[2]
ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_103a")


def state():
    """Everything that a session may touch, as values."""
    from cutlass.base_dsl.compiler import Compiler
    from cutlass.base_dsl.dsl import DSLSingletonMeta
    from cutlass.cute import runtime
    from cutlass.cutlass_dsl import cuda_jit_executor, tvm_ffi_provider
    from cutlass.utils import HardwareInfo

    classes = (
        Compiler,
        HardwareInfo,
        runtime._Tensor,
        cuda_jit_executor.CudaDialectJitCompiledFunction,
        cuda_jit_executor.CudaDialectJitModule,
        tvm_ffi_provider.TVMFFIJitCompiledFunctionBase,
        tvm_ffi_provider.TVMFFIJitCompiledFunction,
        tvm_ffi_provider.TVMFFIJitCompiledFunctionWithKwargs,
        torch.Tensor,
    )
    settings = [dict(vars(dsl.envar)) for dsl in DSLSingletonMeta._instances.values()]
    return [dict(vars(c)) for c in classes], settings, dict(os.environ)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_tvm_ffi_function_runs_on_cpu_tensors(arch):
    a, b = torch.randn(100), torch.zeros(100)
    with host.session(arch) as session:
        hk.compile_add()(a, b, 2.5)
    torch.testing.assert_close(b, a + 2.5, rtol=0, atol=0)
    (report,) = session.launches
    assert report.arch == arch
    assert report.grid == (2, 1, 1)
    assert report.block == (64, 1, 1)


def test_a_plain_function_runs_on_cpu_tensors():
    a, b = torch.randn(64), torch.zeros(64)
    with host.session("sm_100a"):
        from cutlass.cute.runtime import from_dlpack

        tensors = from_dlpack(a), from_dlpack(b)
        compiled = cute.compile(hk.add, *tensors, cutlass.Float32(0))
        compiled(*tensors, cutlass.Float32(1.5))
        assert "gmem" in compiled.artifacts.PTX
        hk.add(*tensors, cutlass.Float32(2.5))  # compiled and run at once
    torch.testing.assert_close(b, a + 2.5, rtol=0, atol=0)


def test_cluster_dimensions_reach_the_machine():
    out = torch.full((4,), -1, dtype=torch.int32)
    with host.session("sm_90a") as session:
        cute.compile(hk.ranks, hk.vector(cutlass.Int32), options="--enable-tvm-ffi")(out)
    assert session.launches[0].cluster == (2, 1, 1)
    assert out.tolist() == [0, 1, 0, 1]


def test_nothing_is_patched_after_a_session_even_after_an_error():
    from cutlass.cutlass_dsl import tvm_ffi_provider  # noqa: F401

    before = state()
    with pytest.raises(ZeroDivisionError), host.session("sm_90a"):
        assert state() != before
        raise ZeroDivisionError
    assert state() == before


def test_an_access_past_a_tensor_names_the_tensor_and_the_python_line():
    b = torch.zeros(64)
    with host.session("sm_100a"):
        compiled = cute.compile(hk.past_the_end, hk.vector(), options="--enable-tvm-ffi")
        with pytest.raises(OutOfBoundsError, match=r"host_kernels\.py:\d+.*'b'"):
            compiled(b)
        compiled(torch.zeros(65))  # the session goes on


def test_the_compiled_checks_still_run():
    with host.session("sm_100a"):
        compiled = hk.compile_add()
        with pytest.raises(ValueError, match="dtype=float32"):
            compiled(torch.zeros(64, dtype=torch.float64), torch.zeros(64), 1.0)


def test_views_are_passed_as_they_are():
    base = torch.randn(4, 32)
    out = torch.zeros(4, 32)
    with host.session("sm_100a"):
        hk.compile_add()(base[2], out[1], 1.0)
    want = torch.zeros(4, 32)
    want[1] = base[2] + 1
    torch.testing.assert_close(out, want, rtol=0, atol=0)


def test_a_function_runs_in_a_later_session_but_not_outside():
    a, b = torch.randn(64), torch.zeros(64)
    with host.session("sm_100a"):
        compiled = hk.compile_add()
    with host.session("sm_100a", schedule="random:1"):
        compiled(a, b, 1.0)
    torch.testing.assert_close(b, a + 1, rtol=0, atol=0)
    with pytest.raises(ValueError, match="device_type=cuda"):
        compiled(a, b, 1.0)


def test_sessions_do_not_nest():
    with host.session("sm_100a"), pytest.raises(SimError, match="nest"), host.session("sm_90a"):
        pass


def test_compiling_inside_a_session_of_another_architecture():
    a, b = torch.randn(64), torch.zeros(64)
    with host.session("sm_90a") as session:
        before = state()
        with host.compiling("sm_80"):
            other = hk.compile_add()
        assert state() == before
        hk.compile_add()(a, b, 1.0)
        other(a, b, 2.0)
    torch.testing.assert_close(b, a + 2, rtol=0, atol=0)
    assert [r.arch for r in session.launches] == ["sm_90a", "sm_80"]


def test_a_saved_function_is_the_same_function(tmp_path):
    a, b = torch.randn(64), torch.zeros(64)
    path = tmp_path / "add.host"
    with host.session("sm_100a") as session:
        compiled = hk.compile_add()
        host.save(compiled, path)
        loaded = host.load(path)
        loaded(a, b, 3.0)
        assert loaded.ptx == compiled.artifacts.PTX
    torch.testing.assert_close(b, a + 3, rtol=0, atol=0)
    assert len(session.launches) == 1
    with pytest.raises(SimError, match="inside"):
        loaded(a, b, 3.0)


LOAD = """
import sys, time
import torch, tvm_ffi
from fa_cute.sim import host
start = time.perf_counter()
add = host.load(sys.argv[1])
seconds = time.perf_counter() - start
a, b = torch.arange(64.0), torch.zeros(64)
with host.session("sm_100a", dsl=False):
    add(a, b, 1.0)
assert torch.equal(b, a + 1), b
assert "cutlass" not in sys.modules
import cutlass.cute  # the extension module that is loaded already serves the DSL too
assert cutlass._mlir.ir.Context is not None
from tests.sim import host_kernels
with host.session("sm_100a"):
    host_kernels.compile_add()(a, b, 2.0)
assert torch.equal(b, a + 2), b
print(seconds)
"""


def test_another_process_loads_it_without_the_dsl(tmp_path):
    path = tmp_path / "add.host"
    with host.session("sm_100a"):
        host.save(hk.compile_add(), path)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LOAD, str(path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout.split()[-1]) < 0.3


def test_other_files_are_not_loaded(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"something else")
    with pytest.raises(SimError, match="not a saved host function"):
        host.load(path)
