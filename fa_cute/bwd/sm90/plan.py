"""The map of the Hopper backward: warps, edges, shared memory, tile sizes.

One CTA owns ``tile_n`` keys and walks over query blocks of ``tile_m`` rows. Two consumer warpgroups, each with half of
the keys, five products per query block (A operand first, R = from registers):

    S^T  = K Q^T      (keys x rows)      P^T = exp2(S^T * scale - lse)
    dP^T = V dO^T     (keys x rows)      dS^T = P^T * (dP^T - delta)
    dV  += P^T(R) dO  (keys x d_v)
    dK  += dS^T(R) Q  (keys x d)
    dQ   = dS K       (rows x d)         needs the dS of both warpgroups: through sdS

dQ goes to an fp32 accumulator in global memory, in the order in which the threads hold it ("fragment order"), so that
one bulk reduction moves a contiguous chunk. See `Chunks` for the order; the postprocess undoes it.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa_cute.arch import Arch
from fa_cute.bwd.args import BwdSpec
from fa_cute.errors import PlanError, UnsupportedError
from fa_cute.plan import Barrier, Edge, Role, SmemField, SmemPlan, Topology, Via, WarpPlan

ELEMENT_BYTES = 2  # bf16, fp16
FLOAT_BYTES = 4
WARPGROUP_THREADS = 128
WGMMA_ROWS = 64
CONSUMERS = 2  # warpgroups


@dataclass(frozen=True)
class Chunks:
    """How a (rows x cols) fp32 tile lies in memory: ``row_chunks x col_chunks`` pieces, one per warpgroup.

    Inside a piece of 64 rows x n columns, thread ``t`` of 128 holds wgmma's D fragment, ``n / 2`` values
    ``r = 4 j + 2 h + i`` of row ``16 (t / 32) + (t % 32) / 4 + 8 h`` and column ``8 j + 2 (t % 4) + i``; value ``r`` is at
    float ``(j * 128 + t) * 4 + r % 4``: 16 bytes a thread, threads side by side.
    """

    rows: int
    cols: int
    row_chunks: int
    col_chunks: int

    def __post_init__(self) -> None:
        if self.rows != WGMMA_ROWS * self.row_chunks or self.chunk_cols % 8:
            raise PlanError(f"{self}: a chunk is {WGMMA_ROWS} rows and a multiple of 8 columns")

    @property
    def chunk_cols(self) -> int:
        return self.cols // self.col_chunks

    @property
    def num(self) -> int:
        return self.row_chunks * self.col_chunks

    @property
    def vectors(self) -> int:
        """16-byte vectors of one thread in one chunk."""
        return self.chunk_cols // 8

    @property
    def chunk_floats(self) -> int:
        return WGMMA_ROWS * self.chunk_cols


@dataclass(frozen=True)
class BwdSm90Config:
    """Tile sizes and stages of one row of the tuning table. ``head_dim`` and ``head_dim_v`` are those of the tiles:
    TMA fills columns past the tensor's with zeros and does not store them.

    dq_split: which part of a dQ tile a warpgroup computes: "rows", "cols", or "turns" (all of every other tile, where
    half of the columns would cut a swizzle atom).
    """

    head_dim: int
    head_dim_v: int
    tile_m: int
    tile_n: int = 128
    q_stages: int = 2
    do_stages: int = 2
    ds_stages: int = 2
    dq_split: str = "cols"
    dq_direct: bool = False
    dv_first: bool = True
    scheduler: str = "single"
    consumer_regs: int = 240
    other_regs: int = 24

    def __post_init__(self) -> None:
        if self.tile_n != WGMMA_ROWS * CONSUMERS:
            raise PlanError(
                f"tile_n is {self.tile_n}; {WGMMA_ROWS} keys for each of {CONSUMERS} warpgroups"
            )
        if self.tile_m % WGMMA_ROWS:
            raise PlanError(
                f"tile_m is {self.tile_m}; a multiple of {WGMMA_ROWS}, the rows of a wgmma"
            )
        if self.dq_split not in ("rows", "cols", "turns"):
            raise PlanError(f"dq_split is {self.dq_split!r}; 'rows', 'cols' or 'turns'")
        _ = self.dq_chunks
        self.topology.check(self.warps, self.smem)

    def check(self, arch: Arch) -> None:
        """Raise PlanError unless the plan fits the machine."""
        if self.smem.total > arch.smem_bytes:
            raise PlanError(
                f"{self.smem.total} bytes of shared memory; {arch.name} has {arch.smem_bytes}"
            )

    @property
    def warps(self) -> WarpPlan:
        return WarpPlan(
            (
                Role("load", 0, 1, self.other_regs),
                *(() if self.dq_direct else (Role("dq_store", 1, 2, self.other_regs),)),
                Role("idle", 1 if self.dq_direct else 2, 4, self.other_regs),
                Role("consumer", 4, 4 + 4 * CONSUMERS, self.consumer_regs),
            ),
            launch_regs=168,
        )

    @property
    def dq_chunks(self) -> Chunks:
        """Layout of a dQ tile in the accumulator."""
        if self.dq_split == "rows":
            return Chunks(self.tile_m, self.head_dim, self.tile_m // WGMMA_ROWS, 1)
        return Chunks(self.tile_m, self.head_dim, 1, CONSUMERS if self.dq_split == "cols" else 1)

    @property
    def dk_chunks(self) -> Chunks:
        """Layout of a dK tile in its accumulator (shared kv heads)."""
        return Chunks(self.tile_n, self.head_dim, CONSUMERS, 1)

    @property
    def dv_chunks(self) -> Chunks:
        return Chunks(self.tile_n, self.head_dim_v, CONSUMERS, 1)

    @property
    def smem(self) -> SmemPlan:
        m, n, d, dv = self.tile_m, self.tile_n, self.head_dim, self.head_dim_v
        # one buffer per warpgroup, written by it and drained by dq_store
        sdQ = SmemField("sdQ", self.dq_chunks.chunk_floats * FLOAT_BYTES, CONSUMERS)
        return SmemPlan(
            (
                SmemField("sK", n * d * ELEMENT_BYTES),
                SmemField("sV", n * dv * ELEMENT_BYTES),
                SmemField("sQ", m * d * ELEMENT_BYTES, self.q_stages),
                SmemField("sdO", m * dv * ELEMENT_BYTES, self.do_stages),
                SmemField("sdS", m * n * ELEMENT_BYTES, self.ds_stages),
                *(() if self.dq_direct else (sdQ,)),
                SmemField("sLse", m * FLOAT_BYTES, self.q_stages, align=128),
                SmemField("sDelta", m * FLOAT_BYTES, self.do_stages, align=128),
                # results replace the operands that they came from, once both warpgroups have read these for good
                SmemField("sdK", n * d * ELEMENT_BYTES, over="sK"),
                SmemField("sdV", n * dv * ELEMENT_BYTES, over="sV"),
            ),
            reserved_bytes=256,  # mbarriers
        )

    @property
    def topology(self) -> Topology:
        """
        load --k, v-----> consumer (0, 1) --dq_full---> dq_store --> global accumulator
             --q, do-->                  <--dq_empty--
        consumer 0 <--ds--> consumer 1
        """
        both = WARPGROUP_THREADS * CONSUMERS
        buffers = tuple(
            Barrier(f"dq_{what}_{w}", ("consumer", "dq_store"), WARPGROUP_THREADS + 32)
            for what in ("full", "empty")
            for w in range(CONSUMERS)
        )
        return Topology(
            (
                Edge("load_k", Via.TMA_ASYNC, "load", "consumer", tx=("sK",)),
                Edge("load_v", Via.TMA_ASYNC, "load", "consumer", tx=("sV",)),
                Edge("load_q", Via.TMA_ASYNC, "load", "consumer", self.q_stages, tx=("sQ", "sLse")),
                Edge(
                    "load_do",
                    Via.TMA_ASYNC,
                    "load",
                    "consumer",
                    self.do_stages,
                    tx=("sdO", "sDelta"),
                ),
            ),
            (
                # ds_<w><s>: warpgroup w has written its half of sdS stage s; the other one waits. Ids are consecutive.
                *(
                    Barrier(f"ds_{w}{s}", ("consumer",), both)
                    for w in range(CONSUMERS)
                    for s in range(2)
                ),
                Barrier("epilogue", ("consumer",)),
                *(() if self.dq_direct else buffers),
            ),
        )


# head dims of the tiles -> (tile_m, dq_split); a problem takes the first row that holds its head dims
TILES = (
    # d, d_v, tile_m, dq_split
    (64, 64, 128, "rows"),
    (96, 96, 64, "turns"),
    (128, 128, 64, "cols"),
)


def config(spec: BwdSpec) -> BwdSm90Config:
    """The tuning row of a problem."""
    for d, dv, tile_m, dq_split in TILES:
        if spec.head_dim <= d and spec.head_dim_v <= dv:
            order = "single"
            if spec.deterministic:
                order = "spt" if spec.causal else "ascending"
            return BwdSm90Config(
                d, dv, tile_m, dq_split=dq_split, dv_first=tile_m < 128, scheduler=order
            )
    raise UnsupportedError(
        f"backward with head_dim={spec.head_dim}, head_dim_v={spec.head_dim_v} is not implemented on sm90; "
        f"implemented: head dims up to {[row[:2] for row in TILES]}"
    )
