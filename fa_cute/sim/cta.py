"""Thread blocks and clusters: what their warps share, and the launch that they belong to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fa_cute.errors import MisuseError
from fa_cute.sim import operands as ops
from fa_cute.sim.mbarrier import MBarrier
from fa_cute.sim.memory import SharedMemory, TensorMemory
from fa_cute.sim.sync import ClusterBarrier, NamedBarrier

if TYPE_CHECKING:
    from fa_cute.sim.machine import Machine
    from fa_cute.sim.warp import Warp


class Cta:
    """One thread block: its memories, barriers and warps."""

    def __init__(self, machine: Machine, memory: SharedMemory, tmem: TensorMemory | None):
        self.machine = machine
        self.memory = memory
        self.smem, self.smem_valid = memory.bytes, memory.valid
        self.smem_size = memory.size
        self.tensor_memory = tmem
        if tmem is not None:
            self.tmem, self.tmem_valid = tmem.lanes, tmem.lanes_valid
            self.tmem_cols, self.tmem_valid_cols = tmem.cols, tmem.cols_valid
        self.mbarriers: dict[int, MBarrier] = {}
        self.barriers: dict[int, NamedBarrier] = {}
        self.warps: list[Warp] = []
        self.scratch: dict = {}  # for handlers: state that lives as long as the CTA
        self.live = 0

    def place(self, cluster: Cluster, rank: int, ctaid: tuple[int, int, int]) -> None:
        self.cluster, self.rank, self.ctaid = cluster, rank, ctaid
        self.window = rank << ops.RANK_SHIFT

    @property
    def peer(self) -> Cta:
        """The other CTA of the pair."""
        return self.cluster.ctas[self.rank ^ 1]

    @property
    def tmem_alloc(self):
        return self.tensor_memory.alloc

    def live_warps(self) -> int:
        return self.live

    # ---- barriers ----
    def mbarrier_init(self, addr: int, count: int, ins) -> None:
        if addr >> ops.RANK_SHIFT != self.rank:
            raise MisuseError(f"{ins.where}: {ins.op}: {addr:#x} is not in this CTA's memory")
        offset = self.memory.check(addr, 8, ins, "write")
        old = self.mbarriers.get(offset)
        if old is not None and old.waiters:
            raise MisuseError(f"{ins.where}: {old} is initialised again while a warp waits on it")
        barrier = MBarrier(count, self.rank, offset, self.machine.clock)
        barrier.races = self.machine.races
        self.mbarriers[offset] = barrier
        self.smem_valid[offset : offset + 8] = 1

    def mbarrier(self, addr: int, ins=None) -> MBarrier:
        """The barrier at an address of this CTA or (by the rank bits) of another of the cluster."""
        rank = addr >> ops.RANK_SHIFT
        cta = self
        if rank != self.rank:
            if rank >= len(self.cluster.ctas):
                raise MisuseError(
                    f"{ins.where if ins else ''}: address {addr:#x} names CTA {rank} of a cluster "
                    f"of {len(self.cluster.ctas)}"
                )
            cta = self.cluster.ctas[rank]
            if not cta.live:
                raise MisuseError(
                    f"{ins.where + ': ' + ins.op + ': ' if ins else ''}CTA {rank} of the cluster "
                    "has exited; nothing may target its barriers any more"
                )
        barrier = cta.mbarriers.get(addr & ops.OFFSET_MASK)
        if barrier is None:
            raise MisuseError(
                f"{ins.where + ': ' + ins.op + ': ' if ins else ''}no mbarrier was initialised at "
                f"smem+{(addr & ops.OFFSET_MASK) - ops.SMEM_START} of CTA {rank}"
            )
        return barrier

    def barrier(self, number: int) -> NamedBarrier:
        barrier = self.barriers.get(number)
        if barrier is None:
            barrier = self.barriers[number] = NamedBarrier(number, self.machine.races)
        return barrier

    # ---- checks ----
    def check_smem(self, addr: int, nbytes: int, ins, what: str) -> int:
        """Offset of a checked address in the CTA that the address names."""
        return self.at(addr, ins).memory.check(addr, nbytes, ins, what)

    def at(self, addr: int, ins=None) -> Cta:
        """The CTA of the cluster that a shared address names."""
        rank = addr >> ops.RANK_SHIFT
        if rank >= len(self.cluster.ctas):
            raise MisuseError(
                f"{ins.where + ': ' if ins else ''}address {addr:#x} names CTA {rank} of a cluster "
                f"of {len(self.cluster.ctas)}"
            )
        return self.cluster.ctas[rank]

    def check_tmem(self, col: int, ncols: int, ins=None) -> None:
        self.tensor_memory.check(col, ncols, ins)

    # ---- life ----
    def warp_left(self, warp: Warp) -> None:
        self.live -= 1
        for barrier in self.barriers.values():
            if barrier.arrived and barrier.whole and barrier.arrived == self.live * 32:
                barrier.complete()
        self.cluster.barrier.check()
        if self.live == 0:
            self.finished()

    def finished(self) -> None:
        if self.tensor_memory is not None and self.tensor_memory.alloc.blocks:
            blocks = self.tensor_memory.alloc.blocks
            held = ", ".join(f"{c}..{c + n - 1}" for c, n in blocks.items())
            raise MisuseError(
                f"CTA {self.ctaid} exits with tensor memory allocated: columns {held}"
            )
        for warp in self.warps:
            if warp.leaves_stores():
                self.machine.warn(
                    f"warp {warp.index} leaves without waiting (cp.async.bulk.wait_group) until "
                    "its bulk stores have read shared memory"
                )
        if not self.machine.queue.early:
            flying = [k for k in self.machine.queue.of(self) if k in TRAFFIC]
            if flying:
                raise MisuseError(
                    f"CTA {self.ctaid} exits while its asynchronous operations still use its "
                    f"memory: {', '.join(sorted(set(flying)))} (schedule {self.machine.schedule})"
                )
            late = [k for k in self.machine.queue.of(self) if not k.endswith((".write", ".store"))]
            for kind in sorted(set(late)):
                self.machine.warn(f"a CTA exits while a {kind} of its warps is outstanding")
            self.machine.queue.finish(self)
        self.cluster.cta_left()


# Operations that read or write memory of the CTA that issued them.
TRAFFIC = ("tma.load", "bulk.load", "mma", "wgmma", "tcgen05.st")


class Cluster:
    """CTAs that are scheduled together."""

    def __init__(self, machine: Machine, ctas: list[Cta], index: int):
        self.machine, self.ctas, self.index = machine, ctas, index
        self.barrier = ClusterBarrier(self)
        self.left = 0
        self.refused = False  # a cluster-launch-control request has failed

    def cta_left(self) -> None:
        self.left += 1
        if self.left == len(self.ctas):
            self.machine.cluster_left(self)


@dataclass
class Launch:
    """The launch configuration, checked."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_smem: int
    threads: int = field(init=False)
    warps: int = field(init=False)
    cluster_size: int = field(init=False)
    clusters: int = field(init=False)

    def __post_init__(self) -> None:
        self.threads = self.block[0] * self.block[1] * self.block[2]
        self.warps = -(-self.threads // 32)
        cx, cy, cz = self.cluster
        self.cluster_size = cx * cy * cz
        for grid, cluster, axis in zip(self.grid, self.cluster, "xyz"):
            if grid < 1 or grid % cluster:
                raise MisuseError(
                    f"grid {self.grid} is not a positive multiple of cluster {self.cluster} "
                    f"in {axis}"
                )
        gx, gy, gz = self.grid
        self.clusters = (gx // cx) * (gy // cy) * (gz // cz)

    def cluster_id(self, index: int) -> tuple[int, int, int]:
        nx, ny = self.grid[0] // self.cluster[0], self.grid[1] // self.cluster[1]
        return index % nx, index // nx % ny, index // (nx * ny)

    def cta_in_cluster(self, rank: int) -> tuple[int, int, int]:
        cx, cy, _ = self.cluster
        return rank % cx, rank // cx % cy, rank // (cx * cy)
