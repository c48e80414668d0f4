"""The map of the SM100 forward kernel: who does what, who waits for whom, where everything lies.

A CTA computes two query tiles (t = 0, 1) of `tile_m` rows against one stream of KV blocks, from the
last block to the first.

Edges (t: one slot per query tile, stays with it; #: ring)

    load --q t---------> mma --s t----------> softmax t --stats t--> correction --o t--> epilogue
         --kv #--------> mma <--p t, p_tail t-- softmax t                (O in SMEM, TMA store)
                         mma <--p t------------------------------------ correction (O t rescaled)
                         mma --o_acc t--------------------------------> correction (last P V done)

MMA order (in the tensor pipe, one thread issues, so it also runs in this order)

    S0 = Q0 K0'   S1 = Q1 K0'   { O0 += P0 Vi   S0 = Q0 Ki+1'   O1 += P1 Vi   S1 = Q1 Ki+1' } ...

While softmax t works on its scores, the tensor core works for the other tile.

TMEM columns (128 lanes x 512)

    0          128         256         256+dv        256+2dv
    | S0       | S1        | O0        | O1          |
    |     |P0  |     |P1   |    P t replaces the upper half of S t once softmax t has read S t

SMEM: stats, Q (two tiles), the KV ring (K and V blocks in turn), O (two tiles); barriers lie below.
Where K and V differ in size, a block takes several slots of the ring, all alike (`kv_parts`): K by
columns, V by keys. Where O has no room of its own (`o_over_q`), O t takes the place of Q t, and the
epilogue, too, frees Q t:

    load --q t--> mma, epilogue
"""

from __future__ import annotations

from dataclasses import dataclass

from ... import arch as archs
from ...errors import PlanError
from ...plan import (
    Arrive,
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
from ...sched.varlen import Work
from ..args import ELEMENT_BYTES, Exp2Split, FwdSpec

WARPS = Arrive.WARPS
FP32_BYTES = 4
# Barriers, the tensor-memory address, and what rounds them up to the fields' alignment.
RESERVED_BYTES = 1024
SM_REGISTERS = 65536
Q_TILES = 2
ALL_ON_SFU = Exp2Split()


@dataclass(frozen=True)
class FwdConfig:
    """One row of the tuning table for this kernel."""

    arch: str = "sm_100a"
    head_dim: int = 128
    head_dim_v: int = 128
    tile_m: int = 128  # query rows of one tile; a CTA has two
    tile_n: int = 128  # keys of a block
    kv_stages: int | None = None  # None: as many as fit
    softmax_regs: int = 192
    correction_regs: int = 80
    exp2: Exp2Split = ALL_ON_SFU
    p_head: int = 96  # keys of P that are handed over before the rest
    max_by_load: bool = False  # the load of unmasked scores also finds their maximum (sm_103a)
    rescale_log2: float = 8.0  # O is rescaled only when a row maximum grows by more (log2 units)
    scheduler: str = "persistent"
    kv_parts: tuple[int, int] = (1, 1)  # ring slots of a K and of a V block
    o_over_q: bool = False  # O lies where Q was; else it has memory of its own

    def work(self, spec: FwdSpec) -> Work:
        """How sequences of a varlen call are cut into tiles."""
        rows = Q_TILES * self.tile_m
        return Work("q", rows, self.tile_n, spec.kv_bytes_per_row, descending=True)

    def __post_init__(self) -> None:
        if (self.tile_m, self.tile_n) != (128, 128):
            raise PlanError(f"tiles {self.tile_m} x {self.tile_n}; this kernel has 128 x 128")
        k_parts, v_parts = self.kv_parts
        if self.head_dim * v_parts != self.head_dim_v * k_parts:
            raise PlanError(
                f"head_dim {self.head_dim} and head_dim_v {self.head_dim_v} in {self.kv_parts} "
                "parts; they share the KV ring, whose slots are alike"
            )
        for what, size in (("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)):
            if size % 32 or not 32 <= size <= 256:
                raise PlanError(f"{what} {size}; a multiple of 32 up to 256")
        if self.k_cols % 32 or self.v_keys % 16:
            raise PlanError(
                f"kv_parts {self.kv_parts}: {self.k_cols} columns of K, {self.v_keys} keys of V; "
                "multiples of 32 and 16"
            )
        if self.p_head % 32 or not 0 < self.p_head < self.tile_n:
            raise PlanError(f"p_head {self.p_head}; a multiple of 32 in (0, {self.tile_n})")
        if self.max_by_load and self.arch != "sm_103a":
            raise PlanError(f"max_by_load on {self.arch}; sm_103a has tcgen05.ld.red")
        verify(self, self.target)

    @property
    def target(self) -> archs.Arch:
        """The architecture whose limits hold."""
        return archs.get(self.arch)

    @property
    def other_regs(self) -> int:
        """What softmax and correction leave for the remaining warpgroup."""
        left = SM_REGISTERS // 128 - 2 * self.softmax_regs - self.correction_regs
        return min(left // 8 * 8, 128)

    @property
    def k_cols(self) -> int:
        """Columns of K in a ring slot."""
        return self.head_dim // self.kv_parts[0]

    @property
    def v_keys(self) -> int:
        """Keys of V in a ring slot."""
        return self.tile_n // self.kv_parts[1]

    @property
    def warps(self) -> WarpPlan:
        """Sixteen warps; softmax is two warpgroups, one per query tile."""
        other = self.other_regs
        return WarpPlan(
            (
                Role("softmax", 0, 8, self.softmax_regs, teams=Q_TILES),
                Role("correction", 8, 12, self.correction_regs),
                Role("mma", 12, 13, other),
                Role("epilogue", 13, 14, other),
                Role("load", 14, 15, other),
                Role("idle", 15, 16, other),  # completes the warpgroup for setmaxnreg
            ),
            launch_regs=SM_REGISTERS // 512,
        )

    @property
    def topology(self) -> Topology:
        """The graph of the module's docstring."""
        q, two = Q_TILES, {"stages": Q_TILES}
        return Topology(
            edges=(
                # Freed by tcgen05.commit, or by both once O has left Q's memory.
                Edge("load_q", Via.TMA_ASYNC, "load", ("mma", "epilogue"), q, tx=("sQ",))
                if self.o_over_q
                else Edge("load_q", Via.TMA_UMMA, "load", "mma", q, tx=("sQ",)),
                Edge("load_kv", Via.TMA_UMMA, "load", "mma", self.ring, tx=("sKV",)),
                # S t may be overwritten when P t has been handed over (S t was read before).
                Edge("mma_s", Via.UMMA_ASYNC, "mma", "softmax", ordered_by="softmax_p", **two),
                # P t is ready up to `p_head` keys, and O t is rescaled (or was read, before a new
                # tile). Softmax may replace P t when the next S t is there: its commit also covers
                # the P V that read P t.
                Edge(
                    "softmax_p",
                    Via.ASYNC_UMMA,
                    ("softmax", "correction"),
                    "mma",
                    src_by=WARPS,
                    ordered_by="mma_s",
                    **two,
                ),
                Edge(
                    "softmax_p_tail",
                    Via.ASYNC_UMMA,
                    "softmax",
                    "mma",
                    src_by=WARPS,
                    ordered_by="mma_s",
                    **two,
                ),
                Edge(
                    "softmax_stats",
                    Via.ASYNC,
                    "softmax",
                    "correction",
                    src_by=WARPS,
                    dst_by=WARPS,
                    **two,
                ),
                # O t may be overwritten when correction says so through softmax_p.
                Edge("mma_o", Via.UMMA_ASYNC, "mma", "correction", ordered_by="softmax_p", **two),
                Edge(
                    "correction_o",
                    Via.ASYNC,
                    "correction",
                    "epilogue",
                    src_by=WARPS,
                    dst_by=WARPS,
                    **two,
                ),
            ),
            barriers=(Barrier("tmem", ("softmax", "correction", "mma")),),
        )

    @property
    def tmem(self) -> TmemPlan:
        """S and O of both tiles; P over S."""
        half = self.tile_n // 2  # a 16-bit P takes half the columns of a 32-bit S
        dv = self.head_dim_v
        return TmemPlan(
            (
                TmemRegion("S0", 0, self.tile_n),
                TmemRegion("P0", half, half, over="S0"),
                TmemRegion("S1", self.tile_n, self.tile_n),
                TmemRegion("P1", self.tile_n + half, half, over="S1"),
                TmemRegion("O0", 2 * self.tile_n, dv),
                TmemRegion("O1", 2 * self.tile_n + dv, dv),
            )
        )

    @property
    def ring(self) -> int:
        """Slots of the KV ring."""
        if self.kv_stages is not None:
            return self.kv_stages
        return (self.target.smem_bytes - RESERVED_BYTES - self._fixed.field_bytes) // self._kv_bytes

    @property
    def _kv_bytes(self) -> int:
        return self.tile_n * self.k_cols * ELEMENT_BYTES

    @property
    def _fixed(self) -> SmemPlan:
        row_floats = self.tile_m * FP32_BYTES
        q_bytes = self.tile_m * self.head_dim * ELEMENT_BYTES
        o_bytes = self.tile_m * self.head_dim_v * ELEMENT_BYTES
        if self.o_over_q:  # each O in the slot of its Q
            o = SmemField("sO", max(q_bytes, o_bytes), Q_TILES, over="sQ")
        else:
            o = SmemField("sO", o_bytes, Q_TILES)
        return SmemPlan(
            (
                # Per tile: the factor for O or, at the end, the row sum; and the row maximum.
                SmemField("sStats", 2 * row_floats, Q_TILES),
                SmemField("sQ", q_bytes, Q_TILES),
                o,
            )
        )

    @property
    def smem(self) -> SmemPlan:
        """Byte map; every operand starts on a swizzle pattern."""
        stats, q, o = self._fixed.fields
        kv = SmemField("sKV", self._kv_bytes, self.ring)
        return SmemPlan((stats, q, kv, o), reserved_bytes=RESERVED_BYTES)
