"""What a backward is traced with, and the scratch memory that one call needs.

A call is three kernels over the tensors as the user holds them (q, out, dout, dq ``(batch,
seqlen_q, heads, d)``; k, v, dk, dv ``(batch, seqlen_k, heads_kv, d)``; lse, dlse ``(batch, heads,
seqlen_q)`` fp32):

    preprocess   lse_log2, delta = rowsum(dout * out) - dlse; zeroes counters, and what is added to
    main         dk, dv; adds its share of dq to an fp32 accumulator
    postprocess  dq from the accumulator; with shared kv heads dk and dv too

All scratch is one fp32 vector, ``Workspace``: one allocation a call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fa_cute.ops import mask
from fa_cute.ops.arith import ceil_div
from fa_cute.sched.spt import descends
from fa_cute.sched.varlen import Work

# Sections of the workspace start on a multiple of this: 128 bytes, a line of L2.
ALIGN_FLOATS = 32


@dataclass(frozen=True)
class BwdSpec:
    """The static part of a problem: what a backward kernel is compiled for."""

    dtype: str  # "bf16" or "fp16"
    head_dim: int
    head_dim_v: int
    causal: bool
    qhead_per_kvhead: int = 1
    deterministic: bool = False
    window: tuple[bool, bool] = (False, False)  # whether a call limits the left, the right side
    varlen: bool = False
    custom: mask.Band | None = None  # a mask of the caller's own

    def __post_init__(self) -> None:
        mask.check(self.causal, self.window, self.custom, backward=True)

    def band(self, left: Any = None, right: Any = None) -> mask.Band:
        """Which keys a query sees; ``left`` and ``right`` count where ``window`` says so."""
        return self.custom or mask.limited(self.causal, self.window, left, right)

    @property
    def shares_kv(self) -> bool:
        """Several query heads add to one dk and dv, so these are summed in fp32 first."""
        return self.qhead_per_kvhead > 1


def work(cfg: Any, spec: BwdSpec, keys: int) -> Work:
    """How the main kernel cuts a call into tiles: ``keys`` of a cluster, which reads Q, dO and dQ
    of every query that sees them.
    """
    bytes_per_row = 2 * (cfg.head_dim + cfg.head_dim_v) + 4 * cfg.head_dim
    # Longest first (causal: the first keys), unless those launched later wait for earlier ones.
    waits = spec.deterministic or stores_first(cfg)
    down = waits and descends(spec.band(0, 0))
    # As in a dense batch: `single`, or an order whose tiles wait for each other.
    alone = getattr(cfg, "scheduler", "single") == "single"
    return Work("k", cfg.tile_m, keys, bytes_per_row, descending=down, owners=True, alone=alone)


def _aligned(floats: Any) -> Any:
    return ceil_div(floats, ALIGN_FLOATS) * ALIGN_FLOATS


@dataclass(frozen=True)
class Workspace:
    """Where each scratch array starts, in floats (counters are int32: the same four bytes).

    Everything from ``dq`` on must start as zero (where the main kernel begins dQ tiles by storing,
    from ``dk`` on, and the dQ tiles that it does not begin): the preprocess does that. Plain
    arithmetic: ints on the host, 64-bit DSL integers where it is traced. Shapes are those of a
    dense batch; varlen has (tiles of all sequences, heads, ...) instead of (batch, heads, tiles of
    one, ...).
    """

    lse: Any  # (batch, heads, rows_q) log2 units, +inf where a row sees nothing or does not exist
    delta: Any  # (batch, heads, rows_q)
    dq: Any  # (batch, heads, num_m, tile_m * head_dim) in fragment order
    dk: Any  # (batch, heads_kv, num_n, tile_n * head_dim) likewise; empty unless kv heads shared
    dv: Any  # (batch, heads_kv, num_n, tile_n * head_dim_v)
    dq_count: Any  # (batch, heads, num_m, ctas) int32; empty unless in order
    dkv_count: Any  # (batch, heads_kv, num_n) int32; empty unless deterministic and shared
    size: Any  # floats in all


@dataclass(frozen=True)
class Sizes:
    """The dynamic part of a problem."""

    batch: Any
    heads: Any
    heads_kv: Any
    seqlen_q: Any  # varlen: of all sequences together
    seqlen_k: Any


def tiles(cfg: Any, spec: BwdSpec, n: Sizes) -> tuple[Any, Any]:
    """Blocks of queries and of keys of one head, over the batch; varlen: no more than these."""
    if spec.varlen:
        cut = cfg.work(spec)
        owners = cut.tiles("k", n.seqlen_k, n.batch)  # of a cluster's keys each
        return cut.tiles("q", n.seqlen_q, n.batch), owners * getattr(cfg, "ctas", 1)
    return (
        n.batch * ceil_div(n.seqlen_q, cfg.tile_m),
        n.batch * ceil_div(n.seqlen_k, cfg.tile_n),
    )


def stores_first(cfg: Any) -> bool:
    """Whether the main kernel itself begins each dQ tile that somebody adds to."""
    return getattr(cfg, "store_first", False)


def stores_alone(cfg: Any, spec: BwdSpec) -> bool:
    """Whether it does so where one KV block is all that adds to a dQ tile, and only there."""
    return hasattr(cfg, "stores_alone") and cfg.stores_alone(spec)


def workspace(cfg: Any, spec: BwdSpec, n: Sizes) -> Workspace:
    """Lay the scratch arrays out; ``cfg`` has ``tile_m, tile_n, head_dim, head_dim_v`` (padded head
    dims).
    """
    num_m, num_n = tiles(cfg, spec, n)
    rows_q = n.heads * num_m * cfg.tile_m
    rows_k = n.heads_kv * num_n * cfg.tile_n if spec.shares_kv else 0
    lse = 0
    delta = lse + _aligned(rows_q)
    dq = delta + _aligned(rows_q)
    dk = dq + _aligned(rows_q * cfg.head_dim)
    dv = dk + _aligned(rows_k * cfg.head_dim)
    dq_count = dv + _aligned(rows_k * cfg.head_dim_v)
    # CTAs of a pair add to different rows of a dQ tile, each in its own order.
    counts_q = n.heads * num_m * getattr(cfg, "ctas", 1)
    dkv_count = dq_count + (_aligned(counts_q) if spec.deterministic else 0)
    counts_kv = n.heads_kv * num_n if spec.deterministic and spec.shares_kv else 0
    size = dkv_count + _aligned(counts_kv)
    return Workspace(lse, delta, dq, dk, dv, dq_count, dkv_count, size)


def workspace_floats(cfg: Any, spec: BwdSpec, n: Sizes) -> int:
    """fp32 elements that a call must allocate, uninitialised."""
    return workspace(cfg, spec, n).size
