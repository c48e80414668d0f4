"""The traps of the state lint are real: compiled, each loses its pipeline state without an error.

A producer fills a ring of three slots in a loop. Where the state is carried, slot and parity change
from step to step; where it is not, the wait has a constant parity, which the PTX check reports.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import pytest
from cutlass import Int32

from fa_cute.ops import pipes
from fa_cute.plan import Edge, Role, SmemPlan, Topology, Via, WarpPlan

from . import ptx_waits, state_lint, tree

WARPS = WarpPlan((Role("make", 0, 1, 128), Role("take", 1, 2, 128)), 128)
TOPOLOGY = Topology((Edge("ring", Via.ASYNC, "make", "take", 3),))


class Kernel:
    """One warp makes, the other takes; ``produce`` is how the first one goes round its loop."""

    def __init__(self, produce: str) -> None:
        self.produce = getattr(self, produce)

    @cute.jit
    def __call__(self, out: cute.Tensor, steps: Int32):
        self.kernel(out, steps).launch(grid=(1, 1, 1), block=(WARPS.threads, 1, 1))

    @cute.kernel
    def kernel(self, out: cute.Tensor, steps: Int32):
        ring = pipes.build(TOPOLOGY, WARPS, SmemPlan(())).ring
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            self.produce(ring, out, steps)
        if warp == 1:
            taken = ring.make_consumer()
            for _ in cutlass.range(steps, unroll=1):
                slot = taken.wait_and_advance()
                out[slot.index] = Int32(1)
                slot.release()

    @cute.jit
    def local(self, ring, out, steps):
        end = ring.make_producer()
        for _ in cutlass.range(steps, unroll=1):
            slot = end.acquire_and_advance()
            out[slot.index] = Int32(2)
            slot.commit()

    @cute.jit
    def returned(self, ring, out, steps):
        end = ring.make_producer()
        for _ in cutlass.range(steps, unroll=1):
            end = self.put_and_return(end, out)

    @cute.jit
    def attribute(self, ring, out, steps):
        self.end = ring.make_producer()
        for _ in cutlass.range(steps, unroll=1):
            slot = self.end.acquire_and_advance()
            out[slot.index] = Int32(2)
            slot.commit()

    @cute.jit
    def argument(self, ring, out, steps):
        end = ring.make_producer()
        for _ in cutlass.range(steps, unroll=1):
            self.put(end, out)

    @cute.jit
    def element(self, ring, out, steps):
        ends = {"o": ring.make_producer()}
        for _ in cutlass.range(steps, unroll=1):
            slot = ends["o"].acquire_and_advance()
            out[slot.index] = Int32(2)
            slot.commit()

    @cute.jit
    def put(self, end, out):
        slot = end.acquire_and_advance()
        out[slot.index] = Int32(2)
        slot.commit()

    @cute.jit
    def put_and_return(self, end, out):
        slot = end.acquire_and_advance()
        out[slot.index] = Int32(2)
        slot.commit()
        return end


def compiled(produce: str, folder) -> str:
    """PTX of a kernel that produces in one of the ways above."""
    out = cute.runtime.make_fake_compact_tensor(Int32, (8,), stride_order=(0,))
    options = f"--gpu-arch sm_90a --keep-ptx --dump-dir {folder}"
    return cute.compile(Kernel(produce), out, Int32(1), options=options).artifacts.PTX


@pytest.mark.parametrize("produce", ["local", "returned"])
def test_state_in_local_names_is_carried(produce: str, tmp_path) -> None:
    ptx = compiled(produce, tmp_path)
    assert ptx_waits.waits_in_loops(ptx) == 2
    assert ptx_waits.constant_waits(ptx) == []


@pytest.mark.parametrize("produce", ["attribute", "argument", "element"])
def test_a_trap_compiles_and_is_wrong(produce: str, tmp_path) -> None:
    ptx = compiled(produce, tmp_path)
    assert ptx_waits.waits_in_loops(ptx) == 2
    assert len(ptx_waits.constant_waits(ptx)) == 1


def test_the_lint_knows_them_all() -> None:
    text = (tree.ROOT / "tests" / "test_state_traps.py").read_text()
    found = [what for _, what in state_lint.findings(text)]
    for start in ("self.end is not", "ends['o'] is not", "end goes to self.put,"):
        assert any(what.startswith(start) for what in found), (start, found)
