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
    | S          | dP          | dV        | dK          |
    |P0|  |P1|   |dS0|  |dS1|     halves of the rows; P and dS take half of the columns they replace
                 | dQ          |  after dS was consumed, until reduce has read it

SMEM: K, V, dS, the rings of Q and dO with their statistics, and dQ on its way to memory. dK and dV
leave through K's and V's place.

Head dim 192 with 128 (`tight`): dK takes 64 columns more, so S, dP and dQ share 192 columns. A team
has rows 0-31 and 64-95 or 32-63 and 96-127, so that P and dS lie in columns that it read itself:

    0       64      96      128     192           320              512
    | S                     |       | dV          | dK             |
    | P0 P1 | dP                    |
    |               | dQ            |
    |                       |dS0 dS1|

    S_0   { dV += P_i   dP_i   S_i+1   dK += dS_i   dQ_i } ...

dP_i waits until reduce has read dQ_i-1, S_i+1 until dS_i is there, dQ_i until S_i+1 was read
(compute_s). While compute makes P_i+1, the tensor core works on dK and dQ; nothing is left to do
while it makes dS. In shared memory dO^T follows Q, and Q^T follows dO, in one place: there is half
a step to load each.
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
from ...sched.spt import descends
from ...sched.varlen import Work
from ..args import BwdSpec, work
from ..chunks import PairChunks, RowChunks

ELEMENT_BYTES = 2  # bf16, fp16
FLOAT_BYTES = 4
RESERVED_BYTES = 1024  # barriers, the tensor-memory address, and what rounds them up
SM_REGISTERS = 65536
TEAMS = 2  # of compute warps
LSE_STAGES = 2
# Operands by "<tensor> of <product>"; of these a column of the tensor is a row.
TURNED = ("K of dq", "Q of dk", "dO of dv")
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128))  # of Q and K, of V
WORD = 32  # query rows of a team that lie side by side


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
    reduce_regs: int = 160
    compute_regs: int = 136
    scheduler: str = "ascending"
    ctas: int = 1  # that work on neighbouring blocks of keys, in a cluster

    def __post_init__(self) -> None:
        if (self.tile_m, self.tile_n) != (128, 128):
            raise PlanError(f"tiles {self.tile_m} x {self.tile_n}; this kernel has 128 x 128")
        if (self.head_dim, self.head_dim_v) not in HEAD_DIMS:
            raise PlanError(
                f"head_dim {self.head_dim} and head_dim_v {self.head_dim_v}; one of {HEAD_DIMS}"
            )
        if self.ctas not in (1, 2):
            raise PlanError(f"{self.ctas} CTAs; 1, or 2 as a pair")
        if self.pair and self.head_dim < 128:
            raise PlanError(f"a pair of CTAs with head_dim {self.head_dim}; it has 128 or 192")
        if self.tight and not self.pair:
            raise PlanError(f"one CTA with head_dim {self.head_dim}; its dQ needs a pair's columns")
        if not self.pair and self.q_stages < 2:
            raise PlanError(f"q_stages {self.q_stages}; S of the next block needs a second one")
        verify(self, self.target)

    @property
    def target(self) -> archs.Arch:
        """The architecture whose limits hold."""
        return archs.get(self.arch)

    @property
    def pair(self) -> bool:
        """Whether two CTAs make each product together."""
        return self.ctas == 2

    @property
    def tight(self) -> bool:
        """Whether S and dP share columns of tensor memory, and Q^T a place with dO."""
        return self.head_dim + self.head_dim_v > 256

    @property
    def team_rows(self) -> tuple[int, int]:
        """Query rows from a team's first one to the next team's, and from its first word to its
        second.
        """
        return (WORD, self.tile_m // TEAMS) if self.tight else (self.tile_m // TEAMS, WORD)

    @property
    def cluster_n(self) -> int:
        """Keys of a cluster."""
        return self.ctas * self.tile_n

    def work(self, spec: BwdSpec) -> Work:
        """How a call is cut into tiles."""
        return work(self, spec, self.cluster_n)

    @property
    def loads(self) -> tuple[str, ...]:
        """Operands that are brought by themselves, "<tensor> of <product>".

        A CTA of a pair holds half of each B operand, rows for one product and columns for another,
        so these are two fields; else one field serves both.
        """
        alone = ("K of s", "V of dp", "Q of s", "dO of dp")
        return (*alone, *TURNED) if self.pair else alone

    def field_of(self, use: str) -> str:
        """The SMEM field of an operand."""
        tensor = use.partition(" of ")[0]
        turned = self.pair and use in TURNED
        return f"s{tensor.removesuffix(' rows')}{'t' if turned else ''}"

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
        c, two = self.ctas, {"cta_group": self.ctas}
        s_read = Edge(
            "compute_s", Via.ASYNC_UMMA, "compute", "mma", ordered_by="mma_s", src_ctas=c, **two
        )
        return Topology(
            edges=(
                Edge("load_k", Via.TMA_UMMA, "load", "mma", tx=("sK",), **two),
                Edge("load_v", Via.TMA_UMMA, "load", "mma", tx=("sV",), **two),
                *self.loads_of_rows(),
                Edge("load_lse", Via.TMA_ASYNC, "load", "compute", LSE_STAGES, tx=("sLse",)),
                Edge(
                    "load_delta", Via.TMA_ASYNC, "load", "compute", self.do_stages, tx=("sDelta",)
                ),
                # S may be overwritten when the product that reads P, over it, is issued.
                Edge("mma_s", Via.UMMA_ASYNC, "mma", "compute", ordered_by="compute_p", **two),
                *((s_read,) if self.tight else ()),  # what replaces S beside P
                # P may be replaced when the next S is there: its commit covers that product too.
                Edge(
                    "compute_p",
                    Via.ASYNC_UMMA,
                    "compute",
                    "mma",
                    ordered_by="mma_s",
                    src_ctas=c,
                    **two,
                ),
                # dP overwrites dQ, so it waits for mma_dq; dS, below dQ, was consumed before that.
                Edge("mma_dp", Via.UMMA_ASYNC, "mma", "compute", ordered_by="mma_dq", **two),
                # Both copies of dS may be replaced when the next dP is there, as for P.
                Edge(
                    "compute_ds",
                    Via.ASYNC_UMMA,
                    "compute",
                    "mma",
                    ordered_by="mma_dp",
                    src_ctas=c,
                    **two,
                ),
                Edge("mma_dq", Via.UMMA_ASYNC, "mma", "reduce", dst_ctas=c, **two),
                # dV and dK, once: nothing comes after them.
                Edge(
                    "mma_dkv", Via.UMMA_ASYNC, "mma", "compute", TEAMS, ordered_by="mma_dq", **two
                ),
            ),
            barriers=(
                Barrier("tmem", ("reduce", "compute", "mma")),
                Barrier("reduce", ("reduce",)),  # a piece of dQ is in shared memory
                Barrier("epilogue_0", ("compute",), 128),  # a team's gradient is
                Barrier("epilogue_1", ("compute",), 128),
                Barrier("epilogue", ("compute",)),
            ),
        )

    def loads_of_rows(self) -> tuple[Edge, ...]:
        """What brings query rows, and K^T."""
        q, do, two = self.q_stages, self.do_stages, {"cta_group": self.ctas}
        if self.tight:  # each brings two operands in turn: Q and dO^T, dO and Q^T
            return (
                Edge("load_q", Via.TMA_UMMA, "load", "mma", tx=("sQ",), **two),
                Edge("load_do", Via.TMA_UMMA, "load", "mma", tx=("sdO",), **two),
                Edge("load_kt", Via.TMA_UMMA, "load", "mma", tx=("sKt",), **two),
            )
        if self.pair:
            return (
                Edge("load_q", Via.TMA_UMMA, "load", "mma", q, tx=("sQ",), **two),
                Edge("load_do", Via.TMA_UMMA, "load", "mma", do, tx=("sdO", "sdOt"), **two),
                Edge("load_qt", Via.TMA_UMMA, "load", "mma", tx=("sQt",), **two),
                Edge("load_kt", Via.TMA_UMMA, "load", "mma", tx=("sKt",), **two),
            )
        return (
            Edge("load_q", Via.TMA_UMMA, "load", "mma", q, tx=("sQ",)),
            Edge("load_do", Via.TMA_UMMA, "load", "mma", do, tx=("sdO",)),
        )

    @property
    def tmem(self) -> TmemPlan:
        """Accumulators, and what replaces them."""
        half, packed = self.tile_m // TEAMS, self.tile_m // TEAMS // 2
        dp, dv = self.tile_m, 2 * self.tile_m
        if self.tight:
            return TmemPlan(
                (
                    TmemRegion("S", 0, 2 * half),
                    TmemRegion("P0", 0, packed, over="S"),
                    TmemRegion("P1", packed, packed, over="S"),
                    TmemRegion("dP", half, 2 * half, over="S"),
                    TmemRegion("dS0", 2 * half, packed, over="dP"),
                    TmemRegion("dS1", 2 * half + packed, packed, over="dP"),
                    TmemRegion("dQ", half + packed, self.head_dim // self.ctas, over=("S", "dP")),
                    TmemRegion("dV", 3 * half, self.head_dim_v),
                    TmemRegion("dK", 3 * half + self.head_dim_v, self.head_dim),
                )
            )
        dq_cols = self.head_dim // self.ctas  # lanes of a pair: two halves of 64 rows
        return TmemPlan(
            (
                TmemRegion("S", 0, 2 * half),
                TmemRegion("P0", 0, packed, over="S"),
                TmemRegion("P1", half, packed, over="S"),
                TmemRegion("dP", dp, 2 * half),
                TmemRegion("dS0", dp, packed, over="dP"),
                TmemRegion("dS1", dp + half, packed, over="dP"),
                TmemRegion("dQ", dp, dq_cols, over="dP"),
                TmemRegion("dV", dv, self.head_dim_v),
                TmemRegion("dK", dv + self.head_dim_v, self.head_dim),
            )
        )

    @property
    def dq_buffers(self) -> int:
        """Pieces of dQ in shared memory: all of them take turns, so their number divides."""
        return 3 if self.head_dim == 96 else 2

    @property
    def dq_cols(self) -> int:
        """Columns of dQ in a piece, which one bulk addition takes."""
        return 16 if self.tight else 32

    @property
    def smem(self) -> SmemPlan:
        """Byte map; every operand starts on a swizzle pattern."""
        keys, rows = self.tile_n * ELEMENT_BYTES, self.tile_m * ELEMENT_BYTES
        stat, d, dv = self.tile_m * FLOAT_BYTES, self.head_dim, self.head_dim_v
        q, do, share = self.q_stages, self.do_stages, self.ctas
        halves = (
            SmemField("sQ", rows * d // share, q),
            SmemField("sdO", rows * dv // share, do, over="sQt" if self.tight else None),
        )
        turned = (
            SmemField("sQt", rows * d // share),
            SmemField("sdOt", rows * dv // share, do, over="sQ" if self.tight else None),
            SmemField("sKt", self.ctas * keys * d // share),
        )
        return SmemPlan(
            (
                SmemField("sK", keys * d),
                SmemField("sV", keys * dv),
                *halves,
                *(turned if self.pair else ()),
                SmemField("sdS", keys * self.tile_m),
                SmemField("sdQ", self.dq_cols * self.tile_m * FLOAT_BYTES, self.dq_buffers),
                SmemField("sdK", keys * d, over="sK"),
                SmemField("sdV", keys * dv, over="sV"),
                SmemField("sLse", stat, LSE_STAGES, align=128),
                SmemField("sDelta", stat, do, align=128),
            ),
            reserved_bytes=RESERVED_BYTES,
        )

    @property
    def dq_chunks(self) -> RowChunks:
        """Order of dQ in its accumulator, and the postprocess's share of it."""
        return (PairChunks if self.pair else RowChunks)(self.tile_m, self.head_dim, 2)

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
    if (spec.head_dim, spec.head_dim_v) not in HEAD_DIMS:
        raise UnsupportedError(
            f"no backward on {arch.name} for head_dim={spec.head_dim}, head_dim_v="
            f"{spec.head_dim_v}; one of {HEAD_DIMS}"
        )
    # Longest first. Where dQ has an order that descends, the launches follow it instead.
    order = "spt" if spec.deterministic and descends(spec.band(0, 0)) else "ascending"
    # The pair reads less shared memory per product and adds half as much dQ. head_dim 64 is bound
    # by the exponentials. Registers: a reduce thread holds a row of dQ, of a pair half a row.
    return BwdConfig(
        arch=arch.name,
        head_dim=spec.head_dim,
        head_dim_v=spec.head_dim_v,
        scheduler=order,
        **{
            64: {"reduce_regs": 112, "compute_regs": 160},
            96: {"reduce_regs": 144, "compute_regs": 144},
            128: {"ctas": 2, "q_stages": 1, "reduce_regs": 96, "compute_regs": 168},
            192: {"ctas": 2, "q_stages": 1, "reduce_regs": 136, "compute_regs": 152},
        }[spec.head_dim],
    )
