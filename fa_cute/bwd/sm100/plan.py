"""The map of the SM100 backward: who does what, who waits for whom, where everything lies.

A CTA owns `tile_n` keys and walks over query blocks of `tile_m` rows, first to last. Accumulators
have a key in each lane, so that P and dS are the tensor core's A operand where they lie:

    S   = K Q^T      (keys x rows)     P  = exp2(S * scale - lse)
    dP  = V dO^T     (keys x rows)     dS = P * (dP - delta)
    dV += P dO       (keys x d_v)      P from tensor memory
    dK += dS Q       (keys x d)        dS from tensor memory
    dQ  = dS^T K     (rows x d)        dS from shared memory, its transpose by the descriptor

Edges (#: ring, w: one slot per compute team; a team has half of the rows of a block)

    load --q #, do #, k, v--> mma --s, dp--> compute --p, ds--> mma --dq--> reduce (adds to memory)
    load --lse #, delta #-----------------> compute <--dkv w--- mma

MMA order (one thread issues, the tensor pipe runs in this order)

    S_0   { dP_i   dV += P_i   S_i+1   dK += dS_i   dQ_i } ...

While compute makes dS_i, the tensor core works on dV and S_i+1; while reduce reads dQ_i, compute
makes P_i+1.

TMEM columns (128 lanes x 512)

    0            128           256         256+dv        256+dv+d
    | S0  | S1   | dP0  | dP1  | dV        | dK          |
    |P0|  |P1|   |dS0|  |dS1|     halves of the rows; P and dS take half of the columns they replace
                 | dQ          |  after dS was consumed, until reduce has read it

SMEM: K, V, dS, the rings of Q and dO with their statistics, and dQ on its way to memory. dK and dV
leave through K's and V's place.
"""

from __future__ import annotations

from dataclasses import dataclass

from ... import arch as archs
from ...errors import PlanError, UnsupportedError
from ...plan import (
    Barrier,
    Edge,
    Role,
    SmemField,
    SmemPlan,
    TmemPlan,
    TmemRegion,
    Topology,
    Via,
    WarpPlan,
    verify,
)
from ..args import BwdSpec
from ..chunks import RowChunks

ELEMENT_BYTES = 2  # bf16, fp16
FLOAT_BYTES = 4
RESERVED_BYTES = 1024  # barriers, the tensor-memory address, and what rounds them up
SM_REGISTERS = 65536
TEAMS = 2  # of compute warps
HEAD_DIMS = (64, 96, 128)
REDUCE_COLS = 32  # columns of dQ that one bulk addition takes


@dataclass(frozen=True)
class BwdConfig:
    """One row of the tuning table for this kernel."""

    arch: str = "sm_100a"
    head_dim: int = 128
    head_dim_v: int = 128
    tile_m: int = 128  # query rows of a block
    tile_n: int = 128  # keys of a CTA
    q_stages: int = 2
    do_stages: int = 1
    reduce_regs: int = 152
    compute_regs: int = 136
    scheduler: str = "ascending"

    def __post_init__(self) -> None:
        if (self.tile_m, self.tile_n) != (128, 128):
            raise PlanError(f"tiles {self.tile_m} x {self.tile_n}; this kernel has 128 x 128")
        if self.head_dim != self.head_dim_v or self.head_dim not in HEAD_DIMS:
            raise PlanError(
                f"head_dim {self.head_dim} and head_dim_v {self.head_dim_v}; both one of "
                f"{HEAD_DIMS}"
            )
        if self.q_stages < 2:
            raise PlanError(f"q_stages {self.q_stages}; S of the next block needs a second one")
        verify(self, self.target)

    @property
    def target(self) -> archs.Arch:
        """The architecture whose limits hold."""
        return archs.get(self.arch)

    @property
    def other_regs(self) -> int:
        """What reduce and compute leave for the remaining warpgroup."""
        left = SM_REGISTERS // 128 - self.reduce_regs - TEAMS * self.compute_regs
        return left // 8 * 8

    @property
    def warps(self) -> WarpPlan:
        """Sixteen warps; compute is two warpgroups."""
        other = self.other_regs
        return WarpPlan(
            (
                Role("reduce", 0, 4, self.reduce_regs),
                Role("compute", 4, 12, self.compute_regs),
                Role("mma", 12, 13, other),
                Role("load", 13, 14, other),
                Role("idle", 14, 16, other),  # complete the warpgroup for setmaxnreg
            ),
            launch_regs=SM_REGISTERS // 512,
        )

    @property
    def topology(self) -> Topology:
        """The graph of the module's docstring."""
        q, do = self.q_stages, self.do_stages
        return Topology(
            edges=(
                Edge("load_k", Via.TMA_UMMA, "load", "mma", tx=("sK",)),
                Edge("load_v", Via.TMA_UMMA, "load", "mma", tx=("sV",)),
                Edge("load_q", Via.TMA_UMMA, "load", "mma", q, tx=("sQ",)),
                Edge("load_do", Via.TMA_UMMA, "load", "mma", do, tx=("sdO",)),
                Edge("load_lse", Via.TMA_ASYNC, "load", "compute", q, tx=("sLse",)),
                Edge("load_delta", Via.TMA_ASYNC, "load", "compute", do, tx=("sDelta",)),
                # S may be overwritten when the product that reads P, over it, is issued.
                Edge("mma_s", Via.UMMA_ASYNC, "mma", "compute", ordered_by="compute_p"),
                # P may be replaced when the next S is there: its commit covers that product too.
                Edge("compute_p", Via.ASYNC_UMMA, "compute", "mma", ordered_by="mma_s"),
                # dP overwrites dQ, so it waits for mma_dq; dS, below dQ, was consumed before that.
                Edge("mma_dp", Via.UMMA_ASYNC, "mma", "compute", ordered_by="mma_dq"),
                # Both copies of dS may be replaced when the next dP is there, as for P.
                Edge("compute_ds", Via.ASYNC_UMMA, "compute", "mma", ordered_by="mma_dp"),
                Edge("mma_dq", Via.UMMA_ASYNC, "mma", "reduce"),
                # dV and dK, once: nothing comes after them.
                Edge("mma_dkv", Via.UMMA_ASYNC, "mma", "compute", TEAMS, ordered_by="mma_dq"),
            ),
            barriers=(
                Barrier("tmem", ("reduce", "compute", "mma")),
                Barrier("reduce", ("reduce",)),  # a piece of dQ is in shared memory
                Barrier("epilogue_0", ("compute",), 128),  # a team's gradient is
                Barrier("epilogue_1", ("compute",), 128),
                Barrier("epilogue", ("compute",)),
            ),
        )

    @property
    def tmem(self) -> TmemPlan:
        """Accumulators, and what replaces them."""
        half, packed = self.tile_m // TEAMS, self.tile_m // TEAMS // 2
        dp, dv = self.tile_m, 2 * self.tile_m
        over_dq = ("dP0", "dP1") if self.head_dim > half else ("dP0",)
        return TmemPlan(
            (
                TmemRegion("S0", 0, half),
                TmemRegion("S1", half, half),
                TmemRegion("P0", 0, packed, over="S0"),
                TmemRegion("P1", half, packed, over="S1"),
                TmemRegion("dP0", dp, half),
                TmemRegion("dP1", dp + half, half),
                TmemRegion("dS0", dp, packed, over="dP0"),
                TmemRegion("dS1", dp + half, packed, over="dP1"),
                TmemRegion("dQ", dp, self.head_dim, over=over_dq),
                TmemRegion("dV", dv, self.head_dim_v),
                TmemRegion("dK", dv + self.head_dim_v, self.head_dim),
            )
        )

    @property
    def dq_buffers(self) -> int:
        """Pieces of dQ in shared memory: all of them take turns, so their number divides."""
        return 3 if self.head_dim == 96 else 2

    @property
    def smem(self) -> SmemPlan:
        """Byte map; every operand starts on a swizzle pattern."""
        keys, rows = self.tile_n * ELEMENT_BYTES, self.tile_m * ELEMENT_BYTES
        stat = self.tile_m * FLOAT_BYTES
        return SmemPlan(
            (
                SmemField("sK", keys * self.head_dim),
                SmemField("sV", keys * self.head_dim_v),
                SmemField("sQ", rows * self.head_dim, self.q_stages),
                SmemField("sdO", rows * self.head_dim_v, self.do_stages),
                SmemField("sdS", keys * self.tile_m),
                SmemField("sdQ", REDUCE_COLS * self.tile_m * FLOAT_BYTES, self.dq_buffers),
                SmemField("sdK", keys * self.head_dim, over="sK"),
                SmemField("sdV", keys * self.head_dim_v, over="sV"),
                SmemField("sLse", stat, self.q_stages, align=128),
                SmemField("sDelta", stat, self.do_stages, align=128),
            ),
            reserved_bytes=RESERVED_BYTES,
        )

    @property
    def dq_chunks(self) -> RowChunks:
        """Order of dQ in its accumulator, and the postprocess's share of it."""
        return RowChunks(self.tile_m, self.head_dim, 2)

    @property
    def dk_chunks(self) -> RowChunks:
        """Order of dK where query heads share it."""
        return RowChunks(self.tile_n, self.head_dim, 2)

    @property
    def dv_chunks(self) -> RowChunks:
        """Order of dV where query heads share it."""
        return RowChunks(self.tile_n, self.head_dim_v, 2)


def config(spec: BwdSpec, arch: archs.Arch) -> BwdConfig:
    """The configuration that runs a spec."""
    if spec.head_dim != spec.head_dim_v or spec.head_dim not in HEAD_DIMS:
        raise UnsupportedError(
            f"no backward on {arch.name} for head_dim={spec.head_dim}, head_dim_v="
            f"{spec.head_dim_v}; both one of {HEAD_DIMS}"
        )
    # Longest first. Where dQ has an order and the mask is causal, the launches follow it instead.
    order = "spt" if spec.causal and spec.deterministic else "ascending"
    return BwdConfig(
        arch=arch.name,
        head_dim=spec.head_dim,
        head_dim_v=spec.head_dim_v,
        scheduler=order,
    )
