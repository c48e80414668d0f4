"""The map of the Hopper backward: warps, edges, shared memory, tile sizes.

One CTA owns ``tile_n`` keys and walks over query blocks of ``tile_m`` rows. Two consumer
warpgroups, each with half of the keys, five products per query block (A operand first, R = from
registers):

    S^T  = K Q^T      (keys x rows)      P^T = exp2(S^T * scale - lse)
    dP^T = V dO^T     (keys x rows)      dS^T = P^T * (dP^T - delta)
    dV  += P^T(R) dO  (keys x d_v)
    dK  += dS^T(R) Q  (keys x d)
    dQ   = dS K       (rows x d)         needs the dS of both warpgroups: through sdS

dQ goes to an fp32 accumulator in global memory, in the order in which the threads hold it
("fragment order"), so that one bulk reduction moves a contiguous chunk. See `Chunks` for the order;
the postprocess undoes it.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa_cute.arch import Arch
from fa_cute.bwd.args import BwdSpec, work
from fa_cute.bwd.chunks import WGMMA_ROWS, Chunks
from fa_cute.errors import PlanError, UnsupportedError
from fa_cute.plan import Barrier, Edge, Role, SmemField, SmemPlan, Topology, Via, WarpPlan
from fa_cute.sched.spt import descends
from fa_cute.sched.varlen import Work

ELEMENT_BYTES = 2  # bf16, fp16
FLOAT_BYTES = 4
WARPGROUP_THREADS = 128
CONSUMERS = 2  # warpgroups
# At least: dS of a step, and of the one before, whose dQ the other warpgroup may still compute.
DS_STAGES = 2
EVERY = 1 << 30  # more rows than there are
TILE_STAGES = 2  # the next tile is known while this one's number is still looked up


@dataclass(frozen=True)
class BwdSm90Config:
    """Tile sizes and stages of one row of the tuning table. ``head_dim`` and ``head_dim_v`` are
    those of the tiles: TMA fills columns past the tensor's with zeros and does not store them.

    split: how the two consumer warpgroups share the work. "keys": 128 keys, half for each, all five
        products. "roles": 64 keys for both, one makes P and dV, the other dS and dK (head dims
        whose dK and dV of 128 keys do not fit in the registers).
    dq_split: whether a warpgroup computes half of the "rows" or of the "cols" of a dQ tile.
    dq_direct: dQ goes from the registers to the accumulator, not through shared memory; no order.
    store_warps: warps that add dQ. In turn where an order is kept: a turn takes longer than a step
        (wait for it, add, wait until all is added, pass it on), so the next one must overlap. Else
        one for each consumer warpgroup, so that neither's buffer is emptied with the other's.
    store_first: the first in the order stores instead of adding, and nobody zeroes the accumulator
        (see also `stores_alone`).
    late_do: dO is waited for when S has been issued ("lagged").
    few_fences: one wgmma fence for products that are issued one after the other ("lagged").
    late_stats: row statistics are loaded after the products that they wait with: fewer registers.
    by_parts: dS is made and stored 16 columns at a time, not made first ("lagged").
    schedule: of the "keys" split: "lagged" (dQ one step late) or "lockstep" (see there).
    pair: two CTAs with neighbouring keys exchange dS, and each adds half of the columns of dQ for
        the keys of both ("roles").
    multicast: each CTA of a pair loads half of the rows of Q and dO, for both.
    persistent: one CTA per SM takes tile after tile (`tiles`).
    prefetch_rows: K and V of a tile with at most so many query rows are brought into L2 as soon as
        the tile is known, while their place in shared memory is still taken (persistent).
    stagger_rows: in a tile with at most so many, warpgroup 1 begins when warpgroup 0 has its first
        P: they are half a step apart from the start ("lagged").
    """

    head_dim: int
    head_dim_v: int
    tile_m: int
    split: str = "keys"
    q_stages: int = 2
    do_stages: int = 2
    ds_stages: int = 2
    dq_split: str = "cols"
    dq_direct: bool = False
    store_warps: int = 1
    store_first: bool = False
    late_do: bool = False
    few_fences: bool = False
    late_stats: bool = False
    by_parts: bool = False
    schedule: str = "lagged"
    pair: bool = False
    multicast: bool = False
    scheduler: str = "single"
    persistent: bool = False
    prefetch_rows: int = 0
    stagger_rows: int = 0
    consumer_regs: int = 240
    other_regs: int = 24

    def __post_init__(self) -> None:
        if self.split not in ("keys", "roles"):
            raise PlanError(f"split is {self.split!r}; 'keys' or 'roles'")
        if self.tile_m % WGMMA_ROWS:
            raise PlanError(f"tile_m is {self.tile_m}; a multiple of {WGMMA_ROWS}, wgmma's rows")
        if self.dq_split not in ("rows", "cols"):
            raise PlanError(f"dq_split is {self.dq_split!r}; 'rows' or 'cols'")
        if self.schedule not in ("lagged", "lockstep"):
            raise PlanError(f"schedule is {self.schedule!r}; 'lagged' or 'lockstep'")
        if self.store_first and (self.dq_direct or self.scheduler == "single"):
            raise PlanError(
                "store_first needs dQ through shared memory, and that who stores is launched "
                "first: scheduler 'spt' for masks with a limit on the right, else 'ascending'"
            )
        if self.store_warps not in (1, 2, 3):
            raise PlanError(f"store_warps is {self.store_warps}; 1 to 3, beside the load warp")
        if self.by_parts and (self.by_role or self.schedule != "lagged"):
            raise PlanError(f"by_parts with {self.split!r}, {self.schedule!r}; 'keys', 'lagged'")
        if self.pair and not (self.by_role and self.dq_split == "cols" and self.ds_stages == 2):
            raise PlanError(
                f"pair with split {self.split!r}, dq_split {self.dq_split!r}, ds_stages "
                f"{self.ds_stages}; 'roles', 'cols', 2"
            )
        if self.pair and not self.dq_direct:
            raise PlanError("pair without dq_direct: there is no shared memory for dQ")
        if self.prefetch_rows and not self.persistent:
            raise PlanError("prefetch_rows without persistent: there is no next tile")
        for name in ("prefetch_rows", "stagger_rows"):
            rows = getattr(self, name)
            if rows < 0 or 0 < rows < self.tile_m:
                raise PlanError(f"{name} is {rows}; 0, or at least a block, {self.tile_m}")
        if self.stagger_rows and (self.by_role or self.schedule != "lagged"):
            raise PlanError(
                f"stagger_rows with {self.split!r}, {self.schedule!r}; 'keys', 'lagged'"
            )
        if self.pair and self.persistent:
            raise PlanError("pair and persistent; one of them")
        if self.multicast and not self.pair:
            raise PlanError("multicast without pair: nobody else takes part in a load")
        if self.ds_stages < DS_STAGES:
            raise PlanError(
                f"ds_stages is {self.ds_stages}; at least {DS_STAGES}: a warpgroup "
                "would overwrite dS that the other one may still be reading"
            )
        _ = self.dq_chunks
        self.topology.check(self.warps, self.smem)

    def check(self, arch: Arch) -> None:
        """Raise PlanError unless the plan fits the machine."""
        if self.smem.total > arch.smem_bytes:
            raise PlanError(
                f"{self.smem.total} bytes of shared memory; {arch.name} has {arch.smem_bytes}"
            )

    def work(self, spec: BwdSpec) -> Work:
        """How a call is cut into tiles."""
        maybe_empty = spec.varlen or spec.band(0, 0).hides_keys
        if self.persistent and maybe_empty and (self.by_role or self.schedule != "lagged"):
            raise PlanError(
                f"persistent, split {self.split!r}, schedule {self.schedule!r}, with varlen="
                f"{spec.varlen}, window={spec.window}; only 'keys', 'lagged': the others do not "
                "expect a tile without queries"
            )
        return work(self, spec, self.cluster_n)

    def stores_alone(self, spec: BwdSpec) -> bool:
        """Whether the only KV block of a dQ tile stores, where others add to what was zeroed."""
        others = self.dq_direct or self.store_first or spec.deterministic
        return spec.varlen and not (others or spec.custom)

    @property
    def by_role(self) -> bool:
        return self.split == "roles"

    @property
    def waits_early(self) -> bool:
        """Whether a warpgroup waits for the other's dS of the step before as soon as it would write
        its own, over the one before that ("lagged"). With a stage more it waits when it needs it.
        """
        return not self.by_role and self.schedule == "lagged" and self.ds_stages == 2

    @property
    def tile_n(self) -> int:
        """Keys of a CTA."""
        return WGMMA_ROWS * (1 if self.by_role else CONSUMERS)

    @property
    def ctas(self) -> int:
        """CTAs of a cluster."""
        return 2 if self.pair else 1

    @property
    def cluster_n(self) -> int:
        """Keys of a cluster."""
        return self.tile_n * self.ctas

    @property
    def warps(self) -> WarpPlan:
        other, mine = self.other_regs, self.consumer_regs
        first = 4
        if self.by_role:
            consumers = (Role("values", first, first + 4, mine), Role("keys", first + 4, 12, mine))
        else:
            consumers = (Role("consumer", first, 12, mine),)
        last = 1 if self.dq_direct else 1 + self.store_warps
        store = () if self.dq_direct else (Role("dq_store", 1, last, other),)
        idle = () if last == first else (Role("idle", last, first, other),)
        return WarpPlan((Role("load", 0, 1, other), *store, *idle, *consumers), launch_regs=168)

    @property
    def dq_chunks(self) -> Chunks:
        """Layout of a dQ tile in the accumulator."""
        if self.dq_split == "rows":
            return Chunks(self.tile_m, self.head_dim, self.tile_m // WGMMA_ROWS, 1)
        return Chunks(self.tile_m, self.head_dim, 1, CONSUMERS * self.ctas)

    @property
    def dk_chunks(self) -> Chunks:
        """Layout of a dK tile in its accumulator (shared kv heads)."""
        return Chunks(self.tile_n, self.head_dim, self.tile_n // WGMMA_ROWS, 1)

    @property
    def dv_chunks(self) -> Chunks:
        return Chunks(self.tile_n, self.head_dim_v, self.tile_n // WGMMA_ROWS, 1)

    @property
    def dq_buffers(self) -> int:
        """Buffers between the consumers and dq_store: one each, or one that both fill in turn."""
        return 1 if self.by_role else CONSUMERS

    @property
    def own_store(self) -> bool:
        """Whether each consumer warpgroup has a store warp of its own."""
        return self.store_warps == CONSUMERS == self.dq_buffers and self.scheduler == "single"

    @property
    def full_barriers(self) -> int:
        """Barriers of a warpgroup that tell of its dQ: of the store warps in turn."""
        return 1 if self.own_store else self.store_warps

    @property
    def dk_over_ds(self) -> bool:
        """Whether dK goes out through the memory of dS, so that the next tile's K, the first thing
        that it needs, comes in meanwhile. V is let go of when dK and dV have been read, and nobody
        writes dS before the next V is there.
        """
        return self.persistent and self.head_dim <= self.ds_stages * self.tile_m

    @property
    def smem(self) -> SmemPlan:
        m, n, d, dv = self.tile_m, self.tile_n, self.head_dim, self.head_dim_v
        sdQ = SmemField("sdQ", self.dq_chunks.chunk_floats * FLOAT_BYTES, self.dq_buffers)
        # P in fragment order, from the warpgroup that makes it to the one that needs it for dS
        sP = SmemField("sP", m * n * ELEMENT_BYTES)
        # of the other CTA: its dS, and K of its keys in our columns of dQ
        peers = (
            SmemField("sKx", n * d // 2 * ELEMENT_BYTES),
            SmemField("sdSx", m * n * ELEMENT_BYTES, self.ds_stages),
        )
        return SmemPlan(
            (
                SmemField("sK", n * d * ELEMENT_BYTES),
                SmemField("sV", n * dv * ELEMENT_BYTES),
                SmemField("sQ", m * d * ELEMENT_BYTES, self.q_stages),
                SmemField("sdO", m * dv * ELEMENT_BYTES, self.do_stages),
                SmemField("sdS", m * n * ELEMENT_BYTES, self.ds_stages),
                *(peers if self.pair else ()),
                *((sP,) if self.by_role else ()),
                *(() if self.dq_direct else (sdQ,)),
                SmemField("sLse", m * FLOAT_BYTES, self.q_stages, align=128),
                SmemField("sDelta", m * FLOAT_BYTES, self.do_stages, align=128),
                # n_block, head, batch, whether there is such a tile
                *((SmemField("sTile", 16, TILE_STAGES, align=16),) if self.persistent else ()),
                # results replace the operands, once both warpgroups have read these for good
                SmemField("sdK", n * d * ELEMENT_BYTES, over="sdS" if self.dk_over_ds else "sK"),
                SmemField("sdV", n * dv * ELEMENT_BYTES, over="sV"),
            ),
            reserved_bytes=256,  # mbarriers
        )

    @property
    def topology(self) -> Topology:
        """
        load --k, v-----> consumer (0, 1) --dq_full---> dq_store --> global accumulator
             --q, do-->                  <--dq_empty--
        consumer 0 <--ds--> consumer 1, consumer 0 --lead--> consumer 1
        by role: values <--turn--> keys, values --p_full--> keys
        pair: keys --peer_ds--> values, keys of the other CTA, which release it to our keys; with
        multicast consumers release Q and dO to the load warps of both
        persistent: load --tile--> all others, and K and V come back, for the next tile's
        """
        all_ = ("values", "keys") if self.by_role else ("consumer",)
        # In a persistent kernel values, too, lets go of V, over which it puts dV.
        v_users = ("keys",) if self.by_role and not self.persistent else all_
        store = () if self.dq_direct else ("dq_store",)
        # dq_full_<w><m % full_barriers>: warpgroup w's dQ of step m; consecutive ids
        names = [f"full_{w}{s}" for w in range(CONSUMERS) for s in range(self.full_barriers)]
        names += [f"empty_{w}" for w in range(CONSUMERS)]
        buffers = tuple(
            Barrier(f"dq_{name}", (*all_, "dq_store"), WARPGROUP_THREADS + 32) for name in names
        )
        if self.by_role:
            # turn_<w>: the other warpgroup has issued its products, warpgroup w may issue its own
            order = tuple(Barrier(f"turn_{w}", all_) for w in range(CONSUMERS))
            order += (Barrier("p_full", all_),)
            # ds_out: all of our dS is written, it may be sent
            order += (Barrier("ds_out", ("keys",)),) if self.pair else ()
        else:
            # ds_<w><m % 2>: warpgroup w's dS of step m is written; consecutive ids
            order = tuple(Barrier(f"ds_{w}{s}", all_) for w in range(CONSUMERS) for s in range(2))
            # lead: warpgroup 0 has its first P of a tile, warpgroup 1 may begin
            order += (Barrier("lead", all_),) if self.stagger_rows else ()
        q, do = self.q_stages, self.do_stages
        both = {"dst_ctas": self.ctas} if self.multicast else {}
        # Full here when the other CTA's dS is there, empty when that CTA has read ours.
        peers = (
            Edge("load_kx", Via.TMA_ASYNC, "load", all_, tx=("sKx",)),
            Edge("peer_ds", Via.TMA_ASYNC, "keys", all_, self.ds_stages, tx=("sdSx",)),
        )
        tile = Edge("load_tile", Via.ASYNC, "load", (*all_, *store), TILE_STAGES)
        return Topology(
            (
                Edge("load_k", Via.TMA_ASYNC, "load", all_, tx=("sK",)),
                Edge("load_v", Via.TMA_ASYNC, "load", v_users, tx=("sV",)),
                Edge("load_q", Via.TMA_ASYNC, "load", all_, q, tx=("sQ", "sLse"), **both),
                Edge("load_do", Via.TMA_ASYNC, "load", all_, do, tx=("sdO", "sDelta"), **both),
                *(peers if self.pair else ()),
                *((tile,) if self.persistent else ()),
            ),
            (*order, Barrier("epilogue", all_), *(() if self.dq_direct else buffers)),
        )


# Head dims of the tiles and how they are cut; a problem takes the first row that holds its own.
TILES = (
    {
        "head_dim": 64,
        "head_dim_v": 64,
        "tile_m": 128,
        "dq_split": "rows",
        "ds_stages": 3,
        "few_fences": True,
    },
    {"head_dim": 96, "head_dim_v": 96, "tile_m": 64, "schedule": "lockstep"},
    {"head_dim": 128, "head_dim_v": 128, "tile_m": 64, "ds_stages": 3},
    {"head_dim": 192, "head_dim_v": 128, "tile_m": 64, "split": "roles"},
    {"head_dim": 192, "head_dim_v": 192, "tile_m": 64, "split": "roles"},
    {"head_dim": 256, "head_dim_v": 256, "tile_m": 64, "split": "roles", "do_stages": 1},
)
# What an order to keep takes besides, and what is faster without one: dQ straight from the
# registers, or a step late, or through the memory of a store warp each.
FIRST = {"store_first": True}
ORDERED = {"store_warps": 2, **FIRST}
UNORDERED = {
    64: {"dq_direct": True, "few_fences": False, "late_stats": True},
    96: {"schedule": "lagged", "ds_stages": 3, "late_do": True, "store_warps": 2},
    128: {"store_warps": 2},
    192: {"dq_direct": True},
    256: {"dq_direct": True, "do_stages": 2},
}
# Full and causal masks, by (head dim, whether the order is kept, causal). Up to 128 a persistent
# kernel, with a slot more for Q, since its load warp knows less beforehand; at 64 a stage of dS
# gives way for that, elsewhere two of them were faster. 192 and more: pairs of CTAs, half of the
# additions to dQ. Measured, each row beside its variants (NOTES: "The two warpgroups' phase").
STAY = {"persistent": True, "q_stages": 3}
LESS_DS = {**STAY, "ds_stages": 2}
PARTS = {"by_parts": True}
# 64: dQ through shared memory after all.
BUFFERED = {"dq_direct": False, "store_warps": 2, "few_fences": True, "late_stats": False}
SHORT = 4096  # rows
PREFETCH, PREFETCH_SHORT = {"prefetch_rows": EVERY}, {"prefetch_rows": SHORT}
STAGGER, STAGGER_SHORT = {"stagger_rows": EVERY}, {"stagger_rows": SHORT}
REGULAR = {
    (64, False, False): {**LESS_DS, **BUFFERED, **PREFETCH_SHORT},
    (64, False, True): {**LESS_DS, **BUFFERED, **PREFETCH_SHORT},
    (64, True, False): {**LESS_DS, **PREFETCH},
    (64, True, True): {**LESS_DS, **PREFETCH, **STAGGER},
    (96, False, False): LESS_DS,
    (96, False, True): {**LESS_DS, **PARTS},
    (96, True, False): {**LESS_DS, "schedule": "lagged"},
    (96, True, True): {**LESS_DS, "schedule": "lagged"},
    (128, False, False): STAY,
    (128, False, True): {**LESS_DS, **PARTS, **FIRST, "store_warps": 3},
    (128, True, False): {**STAY, **PREFETCH},
    (128, True, True): {**LESS_DS, **PARTS, "store_warps": 3},
    (192, False, False): {"pair": True},
    (192, False, True): {"pair": True},
    (256, False, False): {"pair": True, "do_stages": 1},
    (256, False, True): {"pair": True, "do_stages": 1},
}
# The same of sequences, where it is another row.
LISTED = {
    (64, False, True): {**LESS_DS, **BUFFERED, **FIRST, **PREFETCH_SHORT},
    (128, False, False): {**LESS_DS, **PARTS},
    # Where kv heads are shared; else it is the row in order (`faster_in_order`).
    (128, False, True): {**STAY, **PARTS, **STAGGER_SHORT},
    (128, True, False): {**STAY, **PARTS, **PREFETCH_SHORT},
    (128, True, True): {**STAY, **PARTS, **PREFETCH_SHORT, "store_warps": 3},
    (192, False, True): {},
    # The numbers of a tile are alive in every role: with 24 registers they spill.
    (256, False, True): {"pair": True, "do_stages": 1, "other_regs": 40, "consumer_regs": 232},
}
# Windows, by (head dim, whether the order is kept): short tiles.
WINDOWS = {
    (64, False): {**LESS_DS, **BUFFERED, **FIRST, **PREFETCH},
    (64, True): {**LESS_DS, **PREFETCH},
    (96, False): LESS_DS,
    (96, True): {**LESS_DS, "schedule": "lagged"},
    (128, False): {**LESS_DS, **FIRST, **PREFETCH},
    (128, True): {**LESS_DS, **STAGGER},
}
LISTED_WINDOWS = {(128, True): {**LESS_DS, **PREFETCH}}
# Masks of one's own, likewise: limits that are computed take registers.
OWN = {
    (64, False): {"late_stats": True},
    (64, True): {"few_fences": False, "late_stats": True},
    (128, False): {"late_stats": True},
    (128, True): {"schedule": "lockstep", "ds_stages": 2, "late_stats": True},
}


def faster_in_order(spec: BwdSpec) -> bool:
    """Whether the deterministic kernel is at least as fast: nobody zeroes its accumulator.

    Measured (NOTES): windows at head_dim 64 and 128, causal lists at 128. Not where kv heads are
    shared, which would have to take turns at dK and dV.
    """
    if spec.shares_kv or spec.custom or spec.head_dim != spec.head_dim_v:
        return False
    if any(spec.window):
        return spec.head_dim in (64, 128)
    return spec.head_dim == 128 and spec.causal and spec.varlen


def tuned(spec: BwdSpec, head_dim: int) -> dict:
    """What is measured for such a mask, over the tiles of ``head_dim``."""
    if spec.custom:
        kind, tables = (head_dim, spec.deterministic), [OWN]
    elif any(spec.window):
        kind, tables = (head_dim, spec.deterministic), [WINDOWS]
        tables += [LISTED_WINDOWS] if spec.varlen else []
    else:
        kind, tables = (head_dim, spec.deterministic, spec.causal), [REGULAR]
        tables += [LISTED] if spec.varlen else []
    found = {}
    for table in tables:
        found = table.get(kind, found)
    return found


def scheduler(spec: BwdSpec, store_first: bool) -> str:
    """The order of launches: who stores first is launched first."""
    if not store_first:
        return "single"
    return "spt" if descends(spec.band(0, 0)) else "ascending"


def config(spec: BwdSpec) -> BwdSm90Config:
    """The tuning row of a problem."""
    for row in TILES:
        d = row["head_dim"]
        if spec.head_dim > d or spec.head_dim_v > row["head_dim_v"]:
            continue
        row = {**row, **(ORDERED if spec.deterministic else UNORDERED.get(d, {}))}
        row = {**row, **tuned(spec, d)}
        return BwdSm90Config(**row, scheduler=scheduler(spec, row.get("store_first", False)))
    raise UnsupportedError(
        f"backward with head_dim={spec.head_dim}, head_dim_v={spec.head_dim_v} is not implemented "
        f"on sm90; implemented: up to {[(r['head_dim'], r['head_dim_v']) for r in TILES]}"
    )
