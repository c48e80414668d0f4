"""What every role of the SM100 backward is handed: frozen, so the DSL never carries it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import blackwell_helpers

from ...ops import mask, rows, seqlen, umma
from ...sched import Tile
from ..args import BwdSpec
from .plan import BwdConfig

A_OPERANDS = ("K of s", "V of dp")
DTYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}


@dataclass(frozen=True)
class Products:
    """The five matrix products: tiled MMAs, and the layouts of their operands in shared memory.

    K, Q and dO are read in two ways; both layouts describe the same bytes, row-major (rows, cols).
    """

    cfg: BwdConfig
    element: Any

    def mma(self, name: str):
        """Tiled MMA of "s", "dp" (keys x rows), "dv", "dk" (keys x cols) or "dq" (rows x cols)."""
        c = self.cfg
        mn = self.tile(name)[:2]
        return {
            "s": lambda: umma.mma_ss(self.element, mn, ctas=c.ctas),
            "dp": lambda: umma.mma_ss(self.element, mn, ctas=c.ctas),
            "dv": lambda: umma.mma_ts(self.element, mn, ctas=c.ctas),
            "dk": lambda: umma.mma_ts(self.element, mn, ctas=c.ctas),
            "dq": lambda: umma.mma_ss(self.element, mn, True, True, ctas=c.ctas),
        }[name]()

    def tile(self, name: str) -> tuple[int, int, int]:
        """(M, N, K) of a product, of both CTAs of a pair."""
        c = self.cfg
        n = c.cluster_n
        return {
            "s": (n, c.tile_m, c.head_dim),
            "dp": (n, c.tile_m, c.head_dim_v),
            "dv": (n, c.head_dim_v, c.tile_m),
            "dk": (n, c.head_dim, c.tile_m),
            "dq": (c.tile_m, c.head_dim, n),
        }[name]

    def layout_a(self, name: str, stages: int = 1):
        """Shared-memory layout of a product's A operand."""
        return blackwell_helpers.make_smem_layout_a(
            self.mma(name), self.tile(name), self.element, stages
        )

    def layout_b(self, name: str, stages: int = 1):
        """Shared-memory layout of a product's B operand."""
        return blackwell_helpers.make_smem_layout_b(
            self.mma(name), self.tile(name), self.element, stages
        )

    def rows_layout(self, rows: int, cols: int):
        """Row-major (rows, cols), as threads write and TMA stores."""
        return blackwell_helpers.make_smem_layout_epi(
            self.element, LayoutEnum.ROW_MAJOR, (rows, cols), 1
        )

    def layouts(self) -> dict:
        """Field and use -> layout."""
        c = self.cfg
        return {
            "K of s": self.layout_a("s"),
            "V of dp": self.layout_a("dp"),
            "Q of s": self.layout_b("s", c.q_stages),
            "dO of dp": self.layout_b("dp", c.do_stages),
            "dO of dv": self.layout_b("dv", c.do_stages),
            "Q of dk": self.layout_b("dk", 1 if c.pair else c.q_stages),
            "dS of dq": self.layout_a("dq"),
            "K of dq": self.layout_b("dq"),
            "dS rows": self.rows_layout(c.cluster_n, c.tile_m // c.ctas),
            "dK rows": self.rows_layout(c.tile_n, c.head_dim),
            "dV rows": self.rows_layout(c.tile_n, c.head_dim_v),
        }


@dataclass(frozen=True)
class Globals:
    """Everything that crosses the kernel boundary: TMA views, scratch memory, scalars."""

    loads: Any  # (copy atom, TMA tensor) for each of the plan's loads
    tma_dk: Any  # CopyAtom, None where kv heads are shared
    tma_dv: Any
    mdK: Any  # TMA tensor; where kv heads are shared the fp32 accumulator (pointer)
    mdV: Any
    mLse: cute.Tensor  # (rows, heads, batch) fp32, log2 units
    mDelta: cute.Tensor
    dq: cute.Pointer  # fp32 accumulator
    dq_count: cute.Pointer  # int32 turnstiles; not read unless deterministic
    dkv_count: cute.Pointer
    order: Any  # of the tiles
    scale: Float32
    scale_log2: Float32
    seqlen_q: Int32  # varlen: of all sequences
    seqlen_k: Int32
    records: Any  # varlen: of the sequences; else None
    window_left: Any  # Int32, None where the band has no such limit or knows it while tracing
    window_right: Any
    heads: Int32
    heads_kv: Int32

    @property
    def seqlens(self):
        """Lengths, and where rows lie."""
        if self.records is not None:
            return seqlen.Varlen(self.records)
        return seqlen.Dense(self.seqlen_q, self.seqlen_k)


@dataclass(frozen=True)
class Smem:
    """The fields of the plan by use; several names may be the same bytes."""

    base: cute.Pointer
    tmem_address: cute.Pointer
    layouts: Any
    cfg: BwdConfig
    element: Any

    def operand(self, use: str) -> cute.Tensor:
        """A field in the layout of one of its uses."""
        layout = self.layouts[use]
        start = self.base + self.cfg.smem.offset(self.cfg.field_of(use))
        return cute.make_tensor(
            cute.recast_ptr(start, layout.inner, dtype=self.element), layout.outer
        )

    def floats(self, field: str) -> cute.Tensor:
        """(floats, stages)."""
        plan = self.cfg.smem
        f = plan[field]
        start = cute.recast_ptr(self.base + plan.offset(field), dtype=Float32)
        return cute.make_tensor(start.align(16), cute.make_layout((f.bytes // 4, f.stages)))


@dataclass(frozen=True)
class BwdCtx:
    """The one argument of a role. `tile` says which keys this CTA owns."""

    cfg: BwdConfig
    spec: BwdSpec
    g: Globals
    smem: Smem
    pipes: Any  # ops.pipes.EdgePipe by edge name
    barriers: Any  # NamedBarrier by name
    products: Products
    tile: Tile  # of the cluster
    lengths: Any  # of the tile's batch element, as `ops.seqlen` gives them
    rank: Any  # of this CTA in it; 0 where it is alone

    def anew(self) -> BwdCtx:
        """The same with the tile found once more: not alive, or spilled, in the loop before."""
        index = rows.pinned(Int32(cute.arch.block_idx()[0]))
        tile = self.g.order.start(index, cute.arch.grid_dim()[0], self.cfg.ctas).tile()
        return replace(self, tile=tile, lengths=self.g.seqlens.at(tile))

    @property
    def seqlen_q(self):
        return self.lengths.q

    @property
    def seqlen_k(self):
        return self.lengths.k

    @property
    def mask(self) -> mask.Band:
        return self.spec.band(self.g.window_left, self.g.window_right)

    @property
    def n_block(self):
        """This CTA's block of keys; the last cluster may have one that does not exist."""
        return self.tile.n_block * self.cfg.ctas + self.rank

    @property
    def head_kv(self):
        return self.tile.head // self.spec.qhead_per_kvhead

    def q_blocks(self) -> mask.Blocks:
        """Query blocks of this cluster, and which of them need no element mask."""
        c = self.cfg
        n_block, lengths = self.tile.n_block, (self.seqlen_q, self.seqlen_k)
        # Rows past the end have LSE +inf: their P and dS are 0 by themselves.
        return mask.q_blocks(self.mask, n_block, c.tile_m, c.cluster_n, *lengths, tail_rows=False)

    def spans(self) -> tuple:
        """The same in order, as parts with an element mask and without one."""
        return mask.spans(self.mask, self.q_blocks(), tail_rows=False)

    def kv_blocks(self, m_block) -> mask.Blocks:
        """Clusters' blocks of keys that add to a dQ tile."""
        c = self.cfg
        return mask.kv_blocks(
            self.mask, m_block, c.tile_m, c.cluster_n, self.seqlen_q, self.seqlen_k
        )

    def dq_tile(self, m_block):
        """Number of a dQ tile in the accumulator, 64 bits."""
        return self.lengths.tile_q(m_block, self.tile.head, self.g.heads, self.cfg.tile_m)

    def dkv_tile(self):
        """Number of this CTA's dK and dV tile in their accumulators, 64 bits."""
        c = self.cfg
        return self.lengths.tile_k(self.n_block, self.head_kv, self.g.heads_kv, c.tile_n, c.ctas)
