"""The SM90 forward kernel: plans and roles put together."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ... import sched
from ...errors import PlanError
from ...ops import pipes, ragged, wgmma
from ...ops.arith import at_most, hi
from ...ops.softmax import scale_log2_of
from ...sched.varlen_prepare import Prepare, order_of
from ...sched.varlen_sides import Side
from ..args import FwdSpec
from .consumer import Consumer
from .ctx import FwdArgs, FwdCtx
from .load import Load
from .plan import TEAM_ROWS, TILE_INTS, FwdConfig

LONG_ROWS = 6144  # keys


def _rows_first(x: cute.Tensor) -> cute.Tensor:
    """(batch, rows, heads, head_dim) as (rows, head_dim, heads, batch)."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 3, 2, 0]))


class FwdSm90:
    """``out = softmax(q k^T * scale) v`` and LSE on Hopper.

    A call takes q (batch, seqlen_q, heads, head_dim), k and v (batch, seqlen_k >= 1, heads_kv,
    head_dim or head_dim_v), out like q with head_dim_v, lse (batch, heads, seqlen_q) fp32; varlen:
    q (total_q, heads, head_dim), k and v (total_k, ...), lse (heads, total_q); a
    scale that is negative or not as the spec says.
    """

    def __init__(self, cfg: FwdConfig, spec: FwdSpec):
        if cfg.listed != spec.varlen:
            raise PlanError(f"listed is {cfg.listed}, varlen {spec.varlen}; the same")
        self.cfg, self.spec = cfg, spec

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        softmax_scale: Float32,
        window_left: Int32 | None,
        window_right: Int32 | None,
        cu_q: cute.Tensor | None,
        cu_k: cute.Tensor | None,
        used_q: cute.Tensor | None,
        used_k: cute.Tensor | None,
        mVarlen: cute.Tensor | None,
        num_sms: Int32,
        stream,
    ):
        c, dtype = self.cfg, self.spec.element
        slabs = c.teams * c.q_stages
        layouts = SimpleNamespace(
            sQ=wgmma.rows_layout(dtype, TEAM_ROWS, c.head_dim, slabs),
            sK=wgmma.rows_layout(dtype, c.tile_n, c.head_dim, c.kv_stages),
            sV=wgmma.rows_layout(dtype, c.tile_n, c.head_dim_v, c.kv_stages),
            sO=wgmma.rows_layout(dtype, TEAM_ROWS, c.head_dim_v, slabs),
        )
        ratio = mQ.shape[-2] // mK.shape[-2]
        band, records = self.spec.band(window_left, window_right), None
        if const_expr(self.spec.varlen):
            lengths = (cu_q, cu_k, used_q, used_k)
            order, ctas, records = self._sequences(
                (mQ, mK, mO, mLSE), lengths, band, mVarlen, num_sms, stream
            )
        else:
            order, ctas = self._batch(mQ, mK, band, num_sms)
        view = ragged.tma_view if self.spec.varlen else _rows_first
        tma, load = cpasync.make_tiled_tma_atom, cpasync.CopyBulkTensorTileG2SOp()
        load_q, tQ = tma(load, view(mQ), layouts.sQ, (TEAM_ROWS, c.head_dim))
        load_k, tK = tma(load, view(mK), layouts.sK, (c.tile_n, c.head_dim))
        load_v, tV = tma(load, view(mV), layouts.sV, (c.tile_n, c.head_dim_v))
        store = cpasync.CopyBulkTensorTileS2GOp()
        store_o, tO = tma(store, view(mO), layouts.sO, (TEAM_ROWS, c.head_dim_v))
        scale_log2 = scale_log2_of(softmax_scale)
        args = FwdArgs(
            load_q=load_q,
            load_k=load_k,
            load_v=load_v,
            store_o=store_o,
            mQ=tQ,
            mK=tK,
            mV=tV,
            mO=tO,
            mLSE=mLSE,
            qk=wgmma.make_mma(dtype, c.tile_n),
            pv=wgmma.make_mma(dtype, c.head_dim_v, a_in_regs=True, b_transposed=True),
            scale_log2=-scale_log2 if const_expr(self.spec.negative_scale) else scale_log2,
            window_left=window_left,
            window_right=window_right,
            qhead_per_kvhead=ratio,
            order=order,
            records=records,
        )
        self.kernel(args).launch(
            grid=order.grid(ctas),
            block=(c.warps.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=self.spec.varlen,  # sets itself up while the tiles are listed
        )

    def _sequences(self, tensors, lengths, band, mVarlen, num_sms, stream):
        """(order of tiles, CTAs of a persistent grid, records) of sequences: launches the kernel
        that lists their tiles.
        """
        mQ, mK, mO, mLSE = tensors
        cu_q, cu_k, used_q, used_k = lengths
        total, heads, _ = mQ.shape
        work = self.cfg.work(self.spec)
        q = Side(cu_q, used_q, total, zeros=(mO,), lse=mLSE)
        k = Side(cu_k, used_k, mK.shape[0])
        ratio = heads // mK.shape[1]
        batch = q.batch() if k.batch() is None else k.batch()
        # With long rows one CTA per tile, as in a dense batch: then they are not dealt in turn.
        long = at_most(LONG_ROWS, mK.shape[0] // batch)
        prepare = Prepare(work, num_sms * (1 - long))
        made = prepare(q, k, heads, ratio, band, mVarlen, stream)
        order = order_of(work, made, total, heads)
        return order, num_sms + long * hi(order.capacity - num_sms, 0), made.records

    def _batch(self, mQ, mK, band, num_sms):
        """(order of tiles, CTAs of a persistent grid) of a dense batch."""
        c = self.cfg
        heads, batch, seqlen_q = mQ.shape[2], mQ.shape[0], mQ.shape[1]
        space = sched.TileSpace(cute.ceil_div(seqlen_q, c.tile_m), heads, batch)
        # Tiles that run together share as much of K and V as a tile sees of it.
        seqlen_k = band.most_keys(c.tile_m, mK.shape[1])
        lengths = {
            "seqlen_k": seqlen_k,
            "kv_bytes_per_row": self.spec.kv_bytes_per_row,
            "qhead_per_kvhead": heads // mK.shape[2],
        }
        if c.scheduler == "snake":
            return sched.snake.dealt(space, num_sms, **lengths)
        # With long rows the ends of a tile weigh little, and the hardware balances better.
        one_per_tile = at_most(LONG_ROWS, seqlen_k) * hi(space.size - num_sms, 0)
        return sched.make(c.scheduler, space, **lengths), num_sms + one_per_tile

    @cute.kernel
    def kernel(self, args: FwdArgs):
        c = self.cfg
        dtype = self.spec.element
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == c.warps["load"].start:
            for atom in (args.load_q, args.load_k, args.load_v, args.store_o):
                cpasync.prefetch_descriptor(atom)
        cx = FwdCtx(
            cfg=c,
            spec=self.spec,
            args=args,
            smem=_allocate(c, dtype),
            pipes=pipes.build(c.topology, c.warps, c.smem),
            barriers=pipes.barriers(c.topology, c.warps),
        )
        if const_expr(self.spec.varlen):
            cute.arch.griddepcontrol_wait()  # for all that the kernel before wrote: the list
            cute.arch.griddepcontrol_launch_dependents()  # the list of a call after this one
            # Three loads, each of which says where the next one goes, take as long as the set-up,
            # and go on beside it.
            first = cx.tile_of(cx.scheduler())
            there_is = first.valid & (first.at.q > 0)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if const_expr(self.spec.varlen):
            # There may be fewer tiles than there are CTAs.
            if there_is:
                self.roles(replace(cx, first_tile=first), warp)
        else:
            self.roles(cx, warp)

    @cute.jit
    def roles(self, cx: FwdCtx, warp):
        """What each warp does."""
        c = self.cfg
        load, first = c.warps["load"], c.warps[c.consumers[0]]
        if warp < first.start:
            cute.arch.setmaxregister_decrease(load.regs)
            if warp == load.start:
                Load().run(cx)
        else:
            if const_expr(first.regs > c.warps.launch_regs):
                cute.arch.setmaxregister_increase(first.regs)
            Consumer().run(cx)


def _allocate(c: FwdConfig, dtype) -> SimpleNamespace:
    """Shared-memory tensors as the plan lays them out."""
    slabs = c.teams * c.q_stages
    shapes = {
        "sQ": (TEAM_ROWS, c.head_dim, slabs),
        "sK": (c.tile_n, c.head_dim, c.kv_stages),
        "sV": (c.tile_n, c.head_dim_v, c.kv_stages),
        "sO": (TEAM_ROWS, c.head_dim_v, slabs),
    }
    memory = SmemAllocator()
    base = memory.allocate(c.smem.field_bytes, byte_alignment=1024)
    found = {}
    for name, shape in shapes.items():
        layout = wgmma.rows_layout(dtype, *shape)
        pointer = cute.recast_ptr(base + c.smem.offset(name), layout.inner, dtype=dtype)
        outer = layout.outer
        if const_expr(name == "sO" and c.o_over_q):
            slab = cute.select(outer, mode=[0, 1])
            outer = cute.append(slab, cute.make_layout(slabs, stride=TEAM_ROWS * c.head_dim))
        found[name] = cute.make_tensor(pointer, outer)
    if const_expr(c.listed):
        pointer = cute.recast_ptr(base + c.smem.offset("sTile"), dtype=Int32)
        layout = cute.make_layout((c.q_stages, TILE_INTS), stride=(TILE_INTS, 1))
        found["sTile"] = cute.make_tensor(pointer, layout)
    return SimpleNamespace(**found)
