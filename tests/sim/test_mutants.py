"""Break every synchronisation of the SM100 forward in turn: most of it must be noticed."""

from __future__ import annotations

import numpy as np
import pytest

from fa_cute.errors import SimError
from fa_cute.sim import machine, mutants
from fa_cute.sim.host_tensors import Extent
from fa_cute.sim.schedule import Schedule
from tests.sim.tiny import PROLOGUE, kernel

SCHEDULES = [Schedule.of(s) for s in ("early", "random:1", "priority:0", "priority:1")]

CERTAIN = ("no commit", "expect_tx + 16", "expect_tx - 16", "no bar.sync")


@pytest.fixture(scope="module")
def forward_launch(request) -> mutants.Launch:
    """One causal forward of two query tiles, as the machine got it."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("cutlass")
    from fa_cute import flash_attn_func

    calls = []
    patch = pytest.MonkeyPatch()
    run = machine.run
    patch.setattr(machine, "run", lambda *args: calls.append(args) or run(*args))
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 384, 1, 64, dtype=torch.bfloat16) for _ in range(3))
    patch.setenv("FA_CUTE_ARCH", "sm_100a")
    out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True, backend="sim")
    patch.undo()
    code, grid, block, cluster, smem, params, memory, _, _ = calls[-1]
    extents = [Extent(e.start, e.stop - e.start, e.name) for e in memory.extents if e.writable]
    outputs = [t.view(torch.uint8).numpy().reshape(-1) for t in (out, lse)]
    request.module.keep = (q, k, v, out, lse)
    options = machine.Options(races=True)
    return mutants.Launch(code, grid, block, cluster, smem, params, extents, outputs, options)


def test_broken_forwards_are_noticed(forward_launch, capsys):
    result = mutants.campaign(forward_launch, SCHEDULES)
    with capsys.disabled():
        print(f"\n{result.table()}")
    caught = {m for m, how in result.outcomes.items() if how}
    missed = result.missed()
    assert len(result.executed) >= 80
    assert len(caught) >= 0.75 * len(result.executed), "\n".join(map(str, missed))
    assert not [m for m in missed if m.kind in CERTAIN]


def test_a_missed_mutant_is_counted_as_missed():
    """Nothing depends on this barrier, so nobody can notice that it is gone."""
    x = np.zeros(64, np.uint32)
    code = kernel(PROLOGUE + "bar.sync 0; st.global.u32 [%rd1], %r0;")
    launch = mutants.Launch(
        code,
        (1,),
        (64,),
        (1,),
        0,
        x.ctypes.data.to_bytes(8, "little"),
        [Extent(x.ctypes.data, x.nbytes, "x")],
        [x.view(np.uint8)],
    )
    result = mutants.campaign(launch, [Schedule(), Schedule("late")])
    (mutant,) = result.outcomes
    assert result.missed() == [mutant] and mutant.kind == "no bar.sync"
    assert "| no bar.sync | 1 | 1 | 0 |" in result.table()


def test_a_program_that_is_wrong_already_is_refused():
    x = np.zeros(64, np.uint32)
    code = kernel(PROLOGUE + "mov.u32 %r1, dyn; ld.shared.u32 %r2, [%r1]; bar.sync 0;")
    extents, params = [Extent(x.ctypes.data, 256, "x")], x.ctypes.data.to_bytes(8, "little")
    launch = mutants.Launch(code, (1,), (64,), (1,), 64, params, extents, [x.view(np.uint8)])
    with pytest.raises(SimError, match="reported already"):
        mutants.campaign(launch, [Schedule()])
