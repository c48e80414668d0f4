"""The map of the SM90 forward kernel: who does what, who waits for whom, and where everything lies.

A CTA walks tiles of `teams` x 64 query rows; warpgroup `consumer<i>` owns 64 of them from the
scores to the output. KV blocks run from the last one to the first.

Edges (#: ring)

    load --q #---> consumer0, consumer1, ...   free again when O, which takes Q's place, has left
    load --kv #--> consumer0, consumer1, ...   V of a block and K of the next: what a turn takes

Tensor pipe: the teams take turns. A turn is O += P V of the block at hand and S = Q K^T of the next
one, issued together; near the end of its turn a team lets the next one start, then it turns S
into P while the others multiply:

    consumer0   [PV QK]  softmax.........  [PV QK]  softmax.........
    consumer1            [PV QK]  softmax.........  [PV QK]  softm
    consumer2   ........          [PV QK]  softmax.........  [PV QK]

With two Q stages the last turn of a tile already multiplies the next tile's Q, so the epilogue of
one tile and the loads of the next lie under the other teams' turns.

Tiles: every role walks over them by itself, which costs a few instructions. Those of sequences come
from a list in memory (`listed`): there only the load warp looks them up. It puts the numbers of a
tile into sTile before it signals load_q, and a team that has waited for Q finds them there, until
it gives Q's slot back. After the last tile comes a slot without Q whose numbers say so; it is
acquired and given back like any other.

SMEM: Q (slabs of 64 rows, O over them), K ring, V ring, numbers of tiles; barriers lie below.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ... import arch as archs
from ...errors import PlanError
from ...plan import (
    Arrive,
    Barrier,
    Edge,
    Role,
    SmemField,
    SmemPlan,
    Topology,
    Via,
    WarpPlan,
    verify,
)
from ...sched.varlen import Work
from ..args import ELEMENT_BYTES, FwdSpec

TEAM_ROWS = 64  # query rows of a warpgroup: one wgmma
TEAM_THREADS = 128
PITCH = 32  # head dims take multiples of this in shared memory
SM_REGISTERS = 65536
# Barriers, and what rounds them up to the fields' alignment.
RESERVED_BYTES = 1024
INT_BYTES = 4
TILE_INTS = 8  # of a slot of sTile: `ctx.FwdCtx.handed` says which
# (consumer, producer) registers a thread by number of consumer warpgroups; with the launch's even
# share they add up to the register file.
TEAM_REGS = {1: (248, 24), 2: (240, 24), 3: (160, 32), 4: (112, 32)}


def padded(head_dim: int) -> int:
    """Columns that a head dim takes in shared memory; TMA fills the rest with zeros, and its stores
    leave them out.
    """
    return -(-head_dim // PITCH) * PITCH


@dataclass(frozen=True)
class FwdConfig:
    """One row of the tuning table for this kernel; head dims are padded ones."""

    arch: str = "sm_90a"
    head_dim: int = 128
    head_dim_v: int = 128
    teams: int = 2  # consumer warpgroups
    tile_n: int = 128  # keys of a block
    kv_stages: int = 2
    q_stages: int = 2
    scheduler: str = "lpt_persistent"
    early_pass: int = (
        2  # wgmmas of its turn that a team still has to issue when it lets the next one start
    )
    scores_first: bool = False  # in a turn S before O, so that softmax of S runs beside P V
    take_turns: bool = True  # False: teams issue whenever they can
    # The number of a team's barrier (with a window or sequences also that of a row, when it is
    # stored) is computed where it is used, not kept in a register over the loops.
    late_ids: bool = False
    listed: bool = False  # tiles come from a list: of varlen kernels, and of no other

    def work(self, spec: FwdSpec) -> Work:
        """How sequences of a varlen call are cut into tiles."""
        return Work("q", self.tile_m, self.tile_n, spec.kv_bytes_per_row, descending=True)

    def __post_init__(self) -> None:
        for what, d in (("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)):
            if d % PITCH or not PITCH <= d <= 256:
                raise PlanError(f"{what} {d}; a multiple of {PITCH} up to 256")
        if self.teams not in TEAM_REGS:
            raise PlanError(f"{self.teams} consumer warpgroups; one of {sorted(TEAM_REGS)}")
        if self.tile_n % 16 or not 16 <= self.tile_n <= 256:
            raise PlanError(f"tile_n {self.tile_n}; a multiple of 16 up to 256")
        if self.q_stages not in (1, 2):
            raise PlanError(f"q_stages {self.q_stages}; 1 or 2")
        if not 0 <= self.early_pass < self.head_dim // 16:
            raise PlanError(f"early_pass {self.early_pass}; below {self.head_dim // 16}")
        verify(self, self.target)

    @property
    def target(self) -> archs.Arch:
        """The architecture whose limits hold."""
        return archs.get(self.arch)

    @property
    def tile_m(self) -> int:
        """Query rows of a tile."""
        return self.teams * TEAM_ROWS

    @property
    def persistent(self) -> bool:
        """Whether a CTA computes more than one tile."""
        return self.scheduler not in ("single", "lpt")

    @property
    def joined(self) -> bool:
        """Whether the last turn of a tile starts the next one: its Q needs a stage of its own."""
        return self.persistent and self.q_stages > 1

    @cached_property
    def consumers(self) -> tuple[str, ...]:
        """Roles of the consumer warpgroups."""
        return tuple(f"consumer{i}" for i in range(self.teams))

    @cached_property
    def warps(self) -> WarpPlan:
        """The loading warp, three that only complete its warpgroup, and the consumers."""
        consumer, producer = TEAM_REGS[self.teams]
        return WarpPlan(
            (
                Role("load", 0, 1, producer),
                Role("idle", 1, 4, producer),
                *(
                    Role(name, 4 + 4 * i, 8 + 4 * i, consumer)
                    for i, name in enumerate(self.consumers)
                ),
            ),
            launch_regs=min(SM_REGISTERS // (TEAM_THREADS * (1 + self.teams)) // 8 * 8, consumer),
        )

    @cached_property
    def topology(self) -> Topology:
        """The graph of the module's docstring."""
        turns = tuple(
            # consumer<i> waits for the one before it to arrive.
            Barrier(f"turn{i}", (name, self.consumers[i - 1]))
            for i, name in enumerate(self.consumers)
            if self.teams > 1
        )
        return Topology(
            edges=(
                Edge(
                    "load_q",
                    Via.TMA_ASYNC,
                    "load",
                    self.consumers,
                    self.q_stages,
                    tx=("sQ",),
                    dst_by=Arrive.ONE,
                ),
                Edge(
                    "load_kv",
                    Via.TMA_ASYNC,
                    "load",
                    self.consumers,
                    self.kv_stages,
                    tx=("sK", "sV"),
                ),
            ),
            # A team agrees that all of its O lies in shared memory before one thread stores it.
            barriers=turns
            + tuple(Barrier(f"team{i}", (name,)) for i, name in enumerate(self.consumers)),
        )

    @property
    def o_over_q(self) -> bool:
        """Whether O lies where Q was (in slabs of Q's size)."""
        return self.head_dim_v <= self.head_dim

    @property
    def tmem(self) -> None:
        """Hopper has no tensor memory."""
        return None

    @cached_property
    def smem(self) -> SmemPlan:
        """Byte map; every operand starts on a swizzle pattern."""
        row_k, row_v = self.head_dim * ELEMENT_BYTES, self.head_dim_v * ELEMENT_BYTES
        over = "sQ" if self.o_over_q else None
        tiles = SmemField("sTile", INT_BYTES * TILE_INTS, self.q_stages, align=16)
        return SmemPlan(
            (
                SmemField("sQ", self.tile_m * row_k, self.q_stages),
                SmemField("sK", self.tile_n * row_k, self.kv_stages),
                SmemField("sV", self.tile_n * row_v, self.kv_stages),
                # A team's O takes the place of its own Q, which all its scores have been made from.
                SmemField("sO", self.tile_m * row_v, self.q_stages, over=over),
                *((tiles,) if self.listed else ()),
            ),
            reserved_bytes=RESERVED_BYTES,
        )
