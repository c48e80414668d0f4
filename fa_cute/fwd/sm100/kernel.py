"""SM100 forward: the host part (tensor maps, launch) and the kernel that starts the roles."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import blackwell_helpers

from ... import sched
from ...ops import pipes, ragged, seqlen, softmax, umma
from ...ops.arith import ceil_div
from ...sched.varlen_prepare import Prepare, order_of
from ...sched.varlen_sides import Side
from ..args import FwdSpec
from .correction import Correction
from .ctx import FwdCtx, KernelArgs, Smem
from .epilogue import Epilogue, Idle
from .load import Load
from .mma import Mma
from .plan import Q_TILES, FwdConfig
from .softmax import Softmax

BODIES = {
    "softmax": Softmax(),
    "correction": Correction(),
    "mma": Mma(),
    "epilogue": Epilogue(),
    "load": Load(),
    "idle": Idle(),
}


class FwdSm100:
    """Attention forward for one row of the tuning table and one static problem."""

    def __init__(self, cfg: FwdConfig, spec: FwdSpec):
        self.cfg, self.spec = cfg, spec
        self.program = tuple((role, BODIES[role.name]) for role in cfg.warps.roles)

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
        stream: Any,
    ):
        """q (batch, seqlen_q, heads, d), k and v (batch, seqlen_k, heads_kv, d), out like q,
        lse (batch, heads, seqlen_q) fp32; any strides with unit last dimension and 16-byte rows.
        Varlen: q (total_q, heads, d), k and v (total_k, heads_kv, d), lse (heads, total_q).
        """
        c, element = self.cfg, self.spec.element
        qk = umma.mma_ss(element, (c.tile_m, c.tile_n))
        pv = umma.mma_ts(element, (c.tile_m, c.head_dim_v))
        q_tile = (c.tile_m, c.tile_n, c.head_dim)
        k_tile = (c.tile_m, c.tile_n, c.k_cols)  # what a ring slot has of K, of V
        v_tile = (c.tile_m, c.head_dim_v, c.v_keys)
        layouts = {
            "sQ": blackwell_helpers.make_smem_layout_a(qk, q_tile, element, Q_TILES),
            "sK": blackwell_helpers.make_smem_layout_b(qk, k_tile, element, c.ring),
            "sV": blackwell_helpers.make_smem_layout_b(pv, v_tile, element, c.ring),
            "sO": blackwell_helpers.make_smem_layout_epi(
                element, LayoutEnum.ROW_MAJOR, (c.tile_m, c.head_dim_v), Q_TILES
            ),
        }
        lengths = (cu_q, cu_k, used_q, used_k)
        band = self.spec.band(window_left, window_right)
        if const_expr(self.spec.varlen):
            order, seqlens = self.sequences(
                (mQ, mK, mO, mLSE), lengths, band, mVarlen, num_sms, stream
            )
        else:
            order, seqlens = self.batch(mQ, mK, band)
        qhead_per_kvhead = mQ.shape[-2] // mK.shape[-2]
        view = ragged.tma_view if self.spec.varlen else _dense_view
        mQ, mK, mV, mO = view(mQ), view(mK), view(mV, turned=True), view(mO)

        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        slot = {name: cute.select(layout, mode=[0, 1, 2]) for name, layout in layouts.items()}
        tma_q, mQ = cute.nvgpu.make_tiled_tma_atom_A(load, mQ, slot["sQ"], q_tile, qk)
        tma_k, mK = cute.nvgpu.make_tiled_tma_atom_B(load, mK, slot["sK"], k_tile, qk)
        tma_v, mV = cute.nvgpu.make_tiled_tma_atom_B(load, mV, slot["sV"], v_tile, pv)
        tma_o, mO = cpasync.make_tiled_tma_atom(
            store, mO, cute.select(layouts["sO"], mode=[0, 1]), (c.tile_m, c.head_dim_v)
        )
        args = KernelArgs(
            tma_q,
            tma_k,
            tma_v,
            tma_o,
            mQ,
            mK,
            mV,
            mO,
            mLSE,
            qk,
            pv,
            order,
            softmax.scale_log2_of(softmax_scale),
            softmax_scale < 0.0,
            seqlens,
            qhead_per_kvhead,
            window_left,
            window_right,
        )
        self.kernel(args, layouts["sQ"], layouts["sK"], layouts["sV"], layouts["sO"]).launch(
            grid=order.grid(num_sms),
            block=(c.warps.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    def batch(self, mQ: cute.Tensor, mK: cute.Tensor, band):
        """(order of tiles, lengths) of a dense batch."""
        c = self.cfg
        batch, seqlen_q, heads, _ = mQ.shape
        order = sched.make(
            c.scheduler,
            sched.TileSpace(ceil_div(seqlen_q, Q_TILES * c.tile_m), heads, batch),
            seqlen_k=band.most_keys(Q_TILES * c.tile_m, mK.shape[1]),
            kv_bytes_per_row=self.spec.kv_bytes_per_row,
            qhead_per_kvhead=heads // mK.shape[2],
        )
        return order, seqlen.Dense(seqlen_q, mK.shape[1])

    def sequences(self, tensors, lengths, band, mVarlen: cute.Tensor, num_sms: Int32, stream):
        """The same of sequences: launches the kernel that lists their tiles."""
        mQ, mK, mO, mLSE = tensors
        cu_q, cu_k, used_q, used_k = lengths
        total, heads, _ = mQ.shape
        work = self.cfg.work(self.spec)
        q = Side(cu_q, used_q, total, zeros=(mO,), lse=mLSE)
        k = Side(cu_k, used_k, mK.shape[0])
        ratio = heads // mK.shape[1]
        made = Prepare(work, num_sms)(q, k, heads, ratio, band, mVarlen, stream)
        return order_of(work, made, total, heads), seqlen.Varlen(made.records)

    @cute.kernel
    def kernel(
        self,
        args: KernelArgs,
        sQ_layout: cute.ComposedLayout,
        sK_layout: cute.ComposedLayout,
        sV_layout: cute.ComposedLayout,
        sO_layout: cute.ComposedLayout,
    ):
        c = self.cfg
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        edges = pipes.build(c.topology, c.warps, c.smem)
        layouts = {"sQ": sQ_layout, "sK": sK_layout, "sV": sV_layout, "sO": sO_layout}
        smem = self.shared(layouts)
        if warp == c.warps["load"].start:
            for atom in (args.tma_q, args.tma_k, args.tma_v, args.tma_o):
                cpasync.prefetch_descriptor(atom)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cx = FwdCtx(c, self.spec, args, smem, layouts, edges, pipes.barriers(c.topology, c.warps))
        for i in cutlass.range_constexpr(len(self.program)):
            role, body = self.program[i]
            if warp >= role.start and warp < role.stop:
                if const_expr(role.regs > c.warps.launch_regs):
                    cute.arch.setmaxregister_increase(role.regs)
                else:
                    cute.arch.setmaxregister_decrease(role.regs)
                body.run(cx)

    def shared(self, layouts) -> Smem:
        """The fields of the plan at their offsets."""
        c, element = self.cfg, self.spec.element
        allocator = cutlass.memory.SmemAllocator()
        address = allocator.allocate_array(
            Int32, byte_alignment=8, partition=cutlass.memory.SmemPartition.RESERVED
        )
        base = allocator.allocate(c.smem.field_bytes, 1024)

        def operand(name: str, field: str) -> cute.Tensor:
            layout = layouts[name]
            ptr = cute.recast_ptr(base + c.smem.offset(field), layout.inner, dtype=element)
            return cute.make_tensor(ptr, layout.outer)

        sO = operand("sO", "sO")
        pitch = c.smem.bytes("sO") * 8 // element.width  # from tile to tile
        by_tile = cute.make_layout(Q_TILES, stride=pitch)
        sO = cute.make_tensor(
            sO.iterator, cute.append(cute.select(sO.layout, mode=[0, 1]), by_tile)
        )
        stats = cute.recast_ptr(base + c.smem.offset("sStats"), dtype=Float32)
        return Smem(
            sQ=operand("sQ", "sQ"),
            sK=operand("sK", "sKV"),
            sV=operand("sV", "sKV"),
            sO=sO,
            sStats=cute.make_tensor(
                stats, cute.make_layout((c.tile_m, 2, Q_TILES), stride=(1, c.tile_m, 2 * c.tile_m))
            ),
            tmem_address=address,
        )


def _dense_view(t: cute.Tensor, turned: bool = False) -> cute.Tensor:
    """(batch, rows, heads, d) as (rows, d, heads, batch), or ``turned`` as (d, rows, ...)."""
    mode = [3, 1, 2, 0] if turned else [1, 3, 2, 0]
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=mode))
