"""What every role of the Hopper backward is handed: frozen, so that the DSL reads it and never
carries it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers

from fa_cute import sched
from fa_cute.bwd.args import BwdSpec
from fa_cute.bwd.sm90 import remote
from fa_cute.bwd.sm90.plan import CONSUMERS, EVERY, WARPGROUP_THREADS, BwdSm90Config
from fa_cute.ops import mask, rows, seqlen
from fa_cute.ops.pipes import build
from fa_cute.plan import Topology, Via

K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN
RMEM, SMEM = warpgroup.OperandSource.RMEM, warpgroup.OperandSource.SMEM
PLAIN = {"sdQ": Float32, "sLse": Float32, "sDelta": Float32, "sP": None, "sTile": Int32}
DTYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}


def swizzled(dtype, shape, stages: int | None = None, cut: int = 1):
    """Layout of a row-major (rows, cols) operand in the widest swizzle that a ``cut``-th of its
    columns allows: a product over part of them starts on a swizzle atom."""
    kinds = warpgroup.SmemLayoutAtomKind
    widths = ((64, kinds.K_SW128), (32, kinds.K_SW64), (16, kinds.K_SW32))
    kind = next(kind for width, kind in widths if shape[1] // cut % width == 0)
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    shape, order = tuple(shape), (0, 1)
    if stages is not None:
        shape, order = (*shape, stages), (0, 1, 2)
    return cute.tile_to_shape(atom, shape, order)


@dataclass(frozen=True)
class Layouts:
    """Shared-memory layouts of the operands, by field of the plan."""

    cfg: BwdSm90Config
    dtype: Any

    def of(self, field: str, stages: bool = True):
        """Layout of a field, with its stages or of one of them."""
        c = self.cfg
        m, n, d, dv = c.tile_m, c.tile_n, c.head_dim, c.head_dim_v
        shapes = {"sQ": (m, d), "sK": (n, d), "sV": (n, dv), "sdO": (m, dv), "sdS": (m, n)}
        shapes |= {"sKx": (n, d // 2), "sdSx": (m, n)}
        num = c.smem[field].stages if stages and field not in ("sK", "sV", "sKx") else None
        cut = c.dq_chunks.col_chunks if field == "sK" else CONSUMERS if field == "sKx" else 1
        return swizzled(self.dtype, shapes[field], num, cut=cut)


@dataclass(frozen=True)
class Mmas:
    """The tiled products. Both warpgroups side by side along keys, except in dQ."""

    sdp: cute.TiledMma
    dv: cute.TiledMma
    dk: cute.TiledMma
    dq: cute.TiledMma


def make_mmas(cfg: BwdSm90Config, dtype) -> Mmas:
    """Tiled products of a plan."""

    def mma(majors, atoms, n, a_source=SMEM):
        return hopper_helpers.make_trivial_tiled_mma(
            dtype, dtype, *majors, Float32, (*atoms, 1), (64, n), a_source
        )

    by_keys = (1 if cfg.by_role else CONSUMERS, 1)
    dq_atoms = {"rows": (CONSUMERS, 1), "cols": (1, CONSUMERS)}[cfg.dq_split]
    return Mmas(
        sdp=mma((K_MAJOR, K_MAJOR), by_keys, cfg.tile_m),
        dv=mma((K_MAJOR, MN_MAJOR), by_keys, cfg.head_dim_v, RMEM),
        dk=mma((K_MAJOR, MN_MAJOR), by_keys, cfg.head_dim, RMEM),
        dq=mma((K_MAJOR, MN_MAJOR), dq_atoms, cfg.dq_chunks.chunk_cols),
    )


@dataclass(frozen=True)
class Globals:
    """Everything the kernel gets: tensors as TMA sees them, (seqlen, d, heads, batch), and scratch
    memory.
    """

    load_q: cute.CopyAtom
    load_k: cute.CopyAtom
    load_v: cute.CopyAtom
    load_do: cute.CopyAtom
    store_dk: Any  # CopyAtom, None where kv heads are shared
    store_dv: Any
    mQ: cute.Tensor
    mK: cute.Tensor
    mV: cute.Tensor
    mdO: cute.Tensor
    mdK: Any  # TMA tensor; where kv heads are shared the fp32 accumulator (pointer)
    mdV: Any
    mLse: cute.Tensor  # (rows, heads, batch) fp32, log2 units; varlen (rows, heads)
    mDelta: cute.Tensor
    dq: cute.Pointer  # fp32 accumulator
    dq_count: cute.Pointer  # int32 turnstiles; not read unless dQ has an order
    dkv_count: cute.Pointer
    tile_count: Any  # int32, tiles that are taken; None unless persistent
    firsts: Any  # dq as the caller holds it, where `blocks.first_of` finds marks; else None
    records: Any  # varlen: of the sequences; else None
    window_left: Any  # Int32, None where the band has no such limit or knows it while tracing
    window_right: Any
    load_kx: Any = None  # of a pair: K of the other CTA's keys
    mKx: Any = None

    @property
    def seqlens(self):
        """Lengths, and where rows lie."""
        if self.records is not None:
            return seqlen.Varlen(self.records)
        return seqlen.Dense(self.mQ.shape[0], self.mK.shape[0])


@dataclass(frozen=True)
class BwdCtx:
    """One CTA's view. ``tile`` says which keys it owns; None in a persistent kernel, whose roles
    see each of theirs by `of`.
    """

    cfg: BwdSm90Config
    spec: BwdSpec
    g: Globals
    smem: SimpleNamespace
    pipes: SimpleNamespace
    mmas: Mmas
    writer: Any
    order: Any  # who does which tile
    tile: Any
    lengths: Any  # of the tile's batch element, as `ops.seqlen` gives them
    scale: Float32
    scale_log2: Float32
    rank: Any = 0  # of this CTA in its pair
    slot: Any = None  # persistent: where the tile's number lies, in sTile

    def of(self, tile: sched.Tile, slot) -> BwdCtx:
        """The view of a tile of a persistent CTA."""
        return replace(self, tile=tile, lengths=self.g.seqlens.at(tile), slot=slot)

    def shared_tile(self, slot) -> sched.Tile:
        """The tile that the load warp put into a slot of sTile, which must be full."""
        source = cute.make_tensor(self.smem.sTile[None, slot].iterator, cute.make_layout(4))
        values = cute.make_rmem_tensor(4, Int32)
        cute.autovec_copy(source, values)
        return sched.Tile(values[0], values[1], values[2], values[3] != 0)

    def anew(self) -> BwdCtx:
        """The same for what comes after the loop: a sequence's tile is looked up once more, where
        otherwise its numbers would be alive, or spilled, in the loop; and so is that of a
        persistent CTA."""
        if self.cfg.persistent:
            return self.of(self.shared_tile(self.slot), self.slot)
        if not self.spec.varlen:
            return self
        index = rows.pinned(Int32(cute.arch.block_idx()[0]))
        tile = self.order.start(index, cute.arch.grid_dim()[0], self.cfg.ctas).tile()
        return replace(self, tile=tile, lengths=self.g.seqlens.at(tile))

    @property
    def mask(self) -> mask.Band:
        return self.spec.band(self.g.window_left, self.g.window_right)

    @property
    def seqlen_q(self):
        return self.lengths.q

    @property
    def seqlen_k(self):
        return self.lengths.k

    @property
    def n_block(self):
        """This CTA's block of keys; the last pair may have one that does not exist."""
        if not self.cfg.pair:
            return self.tile.n_block
        return self.tile.n_block * self.cfg.ctas + self.rank

    @property
    def head_kv(self):
        return self.tile.head // self.spec.qhead_per_kvhead

    @property
    def may_be_empty(self) -> bool:
        """Whether a tile may have no queries: of a sequence without any, or of keys that none
        sees.
        """
        return self.spec.varlen or self.mask.hides_keys

    def q_blocks(self) -> mask.Blocks:
        """Query blocks of this CTA or pair, and which of them need no element mask."""
        c = self.cfg
        return mask.q_blocks(
            self.mask, self.tile.n_block, c.tile_m, c.cluster_n, self.seqlen_q, self.seqlen_k
        )

    def has_at_most(self, rows: int):
        """Whether this tile has no more query rows, in whole blocks."""
        if rows >= EVERY:
            return True
        return self.q_blocks().count <= rows // self.cfg.tile_m

    def dq_tile(self, m_block):
        """Number of a dQ tile in the accumulator, 64 bits."""
        heads = self.g.mQ.shape[2]
        return self.lengths.tile_q(m_block, self.tile.head, heads, self.cfg.tile_m)

    def dkv_tile(self):
        """Number of this CTA's dK and dV tile in their accumulators, 64 bits."""
        heads = self.g.mK.shape[2]
        c = self.cfg
        return self.lengths.tile_k(self.n_block, self.head_kv, heads, c.tile_n, c.ctas)

    def barrier_id(self, name: str) -> int:
        return self.cfg.topology.barrier_id(name)


def build_pipes(cfg: BwdSm90Config) -> SimpleNamespace:
    """The plan's edges as pipelines: TMA to threads, but for a tile's number. The caller fences and
    synchronises the CTA.
    """
    pipes = {}
    for edge in cfg.topology.edges:
        if edge.via is Via.ASYNC:
            pipes |= vars(build(Topology((edge,)), cfg.warps, cfg.smem))
            continue
        assert edge.via is Via.TMA_ASYNC
        if kind := remote.kind(edge):
            pipes |= vars(build(Topology((edge,)), cfg.warps, cfg.smem, kind))
            continue
        produced, released = edge.arrivals(cfg.warps)
        group = pipeline.CooperativeGroup
        pipes[edge.name] = pipeline.PipelineTmaAsync.create(
            num_stages=edge.stages,
            producer_group=group(pipeline.Agent.Thread, produced),
            consumer_group=group(pipeline.Agent.Thread, released),
            tx_count=edge.tx_bytes(cfg.smem),
            defer_sync=True,
            name=edge.name,
        )
    return SimpleNamespace(**pipes)


def build_smem(cfg: BwdSm90Config, dtype) -> SimpleNamespace:
    """The plan's fields as tensors."""
    smem, layouts = cutlass.memory.SmemAllocator(), Layouts(cfg, dtype)
    found = {}
    # The number of a tile first: beside the barriers, where the operands' alignment leaves room.
    for f in sorted(cfg.smem.fields, key=lambda f: f.name != "sTile"):
        if f.over is not None:
            continue
        if f.name in PLAIN:
            kind = dtype if PLAIN[f.name] is None else PLAIN[f.name]
            layout = cute.make_layout((f.bytes * 8 // kind.width, f.stages))
            found[f.name] = smem.allocate_tensor(kind, layout, f.align)
        else:
            layout = layouts.of(f.name)
            found[f.name] = smem.allocate_tensor(dtype, layout.outer, f.align, swizzle=layout.inner)
    return SimpleNamespace(**found)


def warpgroup_slice(tiled: cute.TiledMma, index):
    """The part of a tiled product that warpgroup ``index`` has a hand in (descriptors, not
    registers).
    """
    return tiled.get_slice(index * WARPGROUP_THREADS)
