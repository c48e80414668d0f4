"""The SM100 backward: the host part (tensor maps, launches), and the kernel of the roles."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync

from ... import sched
from ...ops import pipes, tmem, umma
from ...ops.arith import ceil_div
from ...ops.score import LOG2_E
from ..args import BwdSpec, workspace
from ..postprocess import BwdPostprocess
from ..preprocess import BwdPreprocess, sizes_of
from .compute import Compute
from .ctx import A_OPERANDS, DTYPES, BwdCtx, Globals, Products, Smem
from .epilogue import Add, Store
from .exchange import Exchange, Keep
from .load import Load
from .mma import Mma
from .plan import TURNED, BwdConfig
from .reduce_dq import AnyOrder, ReduceDq, Turnstile


@dataclass(frozen=True)
class Idle:
    """Completes the last warpgroup: setmaxnreg is issued by all four of its warps."""

    def run(self, cx: BwdCtx):
        """Nothing."""


@dataclass(frozen=True)
class BwdSm100:
    """The whole backward of one call: preprocess, main kernel, postprocess.

    ``__call__(q, k, v, out, lse, dout, dlse, dq, dk, dv, work, scale, stream)``: tensors as the
    user holds them, ``dlse`` may be None, ``work`` is `args.workspace_floats` fp32 elements,
    uninitialised.
    """

    cfg: BwdConfig
    spec: BwdSpec

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        mdO: cute.Tensor,
        mdLSE: cute.Tensor | None,
        mdQ: cute.Tensor,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        mWork: cute.Tensor,
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
        c, spec = self.cfg, self.spec
        BwdPreprocess(c, spec)(mQ, mK, mO, mdO, mLSE, mdLSE, mWork, stream)
        Main(c, spec)((mQ, mK, mV, mdO), (mdK, mdV), mWork, softmax_scale, stream)
        at = workspace(c, spec, sizes_of(mQ, mK))
        BwdPostprocess(c.dq_chunks, spec.head_dim)(
            section(mWork, at.dq), mdQ, softmax_scale, stream
        )
        if const_expr(spec.shares_kv):
            BwdPostprocess(c.dk_chunks, spec.head_dim)(
                section(mWork, at.dk), mdK, softmax_scale, stream
            )
            BwdPostprocess(c.dv_chunks, spec.head_dim_v)(
                section(mWork, at.dv), mdV, Float32(1.0), stream
            )


def section(mWork: cute.Tensor, offset, dtype=Float32) -> cute.Pointer:
    """Start of a section of the workspace."""
    address = (mWork.iterator + offset).toint()
    return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16)


def as_tma(t: cute.Tensor, turned: bool = False) -> cute.Tensor:
    """(batch, seqlen, heads, d) as (seqlen, d, heads, batch), or as (d, seqlen, ...)."""
    mode = [3, 1, 2, 0] if turned else [1, 3, 2, 0]
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=mode))


@dataclass(frozen=True)
class Main:
    """The main kernel."""

    cfg: BwdConfig
    spec: BwdSpec

    @cute.jit
    def __call__(self, inputs, outputs, mWork: cute.Tensor, softmax_scale: Float32, stream):
        """inputs: q, k, v, dout; outputs: dk, dv."""
        c = self.cfg
        mQ, mK = inputs[0], inputs[1]
        at = workspace(c, self.spec, sizes_of(mQ, mK))
        seqlen_q, seqlen_k = mQ.shape[1], mK.shape[1]
        space = sched.TileSpace(ceil_div(seqlen_k, c.cluster_n), mQ.shape[2], mQ.shape[0])
        row_bytes = 2 * (c.head_dim + c.head_dim_v) + 4 * c.head_dim
        order = sched.make(c.scheduler, space, seqlen_k=seqlen_q, kv_bytes_per_row=row_bytes)
        g = self.globals(inputs, outputs, mWork, (at, order, softmax_scale))
        self.kernel(g).launch(
            grid=order.grid(cluster=c.ctas),
            block=(c.warps.threads, 1, 1),
            cluster=(c.ctas, 1, 1) if c.pair else None,
            stream=stream,
            min_blocks_per_mp=1,
        )

    def globals(self, inputs, outputs, mWork: cute.Tensor, rest) -> Globals:
        """TMA views of the tensors, and the sections of the workspace."""
        at, order, scale = rest
        c, spec = self.cfg, self.spec
        products = Products(c, DTYPES[spec.dtype])
        layouts = products.layouts()
        load = cpasync.CopyBulkTensorTileG2SOp(umma.CTA_GROUPS[c.ctas])
        store = cpasync.CopyBulkTensorTileS2GOp()
        q, k, v, dout = inputs
        tensors = {"Q": q, "K": k, "V": v, "dO": dout}

        def operand(use):
            tensor, product = use.split(" of ")
            mma = products.mma(product)
            slot = cute.select(layouts[use], mode=[0, 1, 2])
            cluster = cute.tiled_divide(cute.make_layout((c.ctas, 1, 1)), (mma.thr_id.shape,))
            helpers = cute.nvgpu
            make = helpers.make_tiled_tma_atom_B
            if use in A_OPERANDS:
                make = helpers.make_tiled_tma_atom_A
            g = as_tma(tensors[tensor], turned=use in TURNED)
            made = make(load, g, slot, products.tile(product), mma, cluster.shape)
            return made[0], made[1]

        def result(tensor, use, cols):
            slot = cute.select(layouts[use], mode=[0, 1])
            made = cpasync.make_tiled_tma_atom(store, as_tma(tensor), slot, (c.tile_n, cols))
            return made[0], made[1]

        if spec.shares_kv:
            tma_dk, mdK = None, section(mWork, at.dk)
            tma_dv, mdV = None, section(mWork, at.dv)
        else:
            tma_dk, mdK = result(outputs[0], "dK rows", c.head_dim)
            tma_dv, mdV = result(outputs[1], "dV rows", c.head_dim_v)
        batch, seqlen_q, heads, _ = q.shape
        rows_q = ceil_div(seqlen_q, c.tile_m) * c.tile_m
        rows = cute.make_layout((rows_q, heads, batch), stride=(1, rows_q, Int64(rows_q) * heads))
        return Globals(
            loads=tuple(operand(use) for use in c.loads),
            tma_dk=tma_dk,
            tma_dv=tma_dv,
            mdK=mdK,
            mdV=mdV,
            mLse=cute.make_tensor(section(mWork, at.lse), rows),
            mDelta=cute.make_tensor(section(mWork, at.delta), rows),
            dq=section(mWork, at.dq),
            dq_count=section(mWork, at.dq_count, Int32),
            dkv_count=section(mWork, at.dkv_count, Int32),
            order=order,
            scale=scale,
            scale_log2=scale * LOG2_E,
            seqlen_q=seqlen_q,
            seqlen_k=k.shape[1],
            heads=heads,
            heads_kv=k.shape[2],
        )

    @property
    def program(self):
        """Role and body. Determinism is a matter of which order and which epilogue."""
        spec = self.spec
        bodies = {
            "reduce": ReduceDq(Turnstile() if spec.deterministic else AnyOrder()),
            "compute": Compute(
                Exchange() if self.cfg.pair else Keep(),
                Add(spec.deterministic) if spec.shares_kv else Store(),
            ),
            "mma": Mma(),
            "load": Load(),
            "idle": Idle(),
        }
        return tuple((role, bodies[role.name]) for role in self.cfg.warps.roles)

    @cute.kernel
    def kernel(self, g: Globals):
        c, element = self.cfg, DTYPES[self.spec.dtype]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        edges = pipes.build(c.topology, c.warps, c.smem)
        products = Products(c, element)
        allocator = cutlass.memory.SmemAllocator()
        address = allocator.allocate_array(
            Int32, byte_alignment=8, partition=cutlass.memory.SmemPartition.RESERVED
        )
        base = allocator.allocate(c.smem.field_bytes, 1024)
        if warp == c.warps["load"].start:
            for i in cutlass.range_constexpr(len(g.loads)):
                cpasync.prefetch_descriptor(g.loads[i][0])
        cute.arch.mbarrier_init_fence()
        rank = 0
        if const_expr(c.pair):
            # Not %cluster_ctarank, which the assembler takes for a value that may differ among
            # threads: it would make a loop of each product under a condition on it.
            rank = cute.arch.block_idx()[0] % c.ctas
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        smem = Smem(base, address, products.layouts(), c, element)
        barriers = pipes.barriers(c.topology, c.warps)
        for i in cutlass.range_constexpr(len(self.program)):
            role, body = self.program[i]
            if warp >= role.start and warp < role.stop:
                if const_expr(role.regs > c.warps.launch_regs):
                    cute.arch.setmaxregister_increase(role.regs)
                else:
                    cute.arch.setmaxregister_decrease(role.regs)
                # Each role finds its tile by itself: what is known before the roles part is alive
                # in all of them, and would be spilled for the one with the least room.
                tile = sched.here(g.order, c.ctas).tile()
                body.run(BwdCtx(c, self.spec, g, smem, edges, barriers, products, tile, rank))
        if const_expr(c.pair):
            # Nobody leaves, or frees tensor memory, while the other CTA may still reach for it.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
            if warp == c.warps["mma"].start:
                tmem.free(address, c.tmem.alloc_cols, c.ctas)
