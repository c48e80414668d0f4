"""The Hopper backward: host side of the main kernel, and its body."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from fa_cute import sched
from fa_cute.bwd.args import BwdSpec, workspace
from fa_cute.bwd.postprocess import BwdPostprocess
from fa_cute.bwd.preprocess import BwdPreprocess, sizes_of
from fa_cute.bwd.sm90.ctx import (
    DTYPES,
    BwdCtx,
    Globals,
    Layouts,
    build_pipes,
    build_smem,
    make_mmas,
)
from fa_cute.bwd.sm90.dq_store import AnyOrder, Buffered, Direct, DqStore, Turnstile
from fa_cute.bwd.sm90.epilogue import Add, Store
from fa_cute.bwd.sm90.lagged import Lagged
from fa_cute.bwd.sm90.load import Load
from fa_cute.bwd.sm90.lockstep import Lockstep
from fa_cute.bwd.sm90.plan import BwdSm90Config
from fa_cute.bwd.sm90.roles import Keys, Values
from fa_cute.ops.arith import ceil_div
from fa_cute.ops.score import LOG2_E


@dataclass(frozen=True)
class Idle:
    """Warps that only complete a warpgroup."""

    def run(self, cx: BwdCtx):
        """Nothing."""


@dataclass(frozen=True)
class BwdSm90:
    """The whole backward of one call: preprocess, main kernel, postprocess.

    ``__call__(q, k, v, out, lse, dout, dlse, dq, dk, dv, work, scale, stream)``: tensors as the
    user holds them, ``dlse`` may be None, ``work`` is `args.workspace_floats` fp32 elements,
    uninitialised.
    """

    cfg: BwdSm90Config
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
        window = (window_left, window_right)
        Main(c, spec)((mQ, mK, mV, mdO), (mdK, mdV), mWork, (softmax_scale, window), stream)
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


def as_tma(tensor: cute.Tensor) -> cute.Tensor:
    """(batch, seqlen, heads, d) as (seqlen, d, heads, batch); row strides are multiples of 16 bytes
    by contract.
    """
    units = 128 // tensor.element_type.width
    stride = tuple(s if isinstance(s, int) else cute.assume(s, divby=units) for s in tensor.stride)
    order = (1, 3, 2, 0)
    layout = cute.make_layout(
        tuple(tensor.shape[i] for i in order), stride=tuple(stride[i] for i in order)
    )
    pointer = cute.make_ptr(
        tensor.element_type, tensor.iterator.toint(), cute.AddressSpace.gmem, assumed_align=16
    )
    return cute.make_tensor(pointer, layout)


@dataclass(frozen=True)
class Main:
    """The main kernel."""

    cfg: BwdSm90Config
    spec: BwdSpec

    @cute.jit
    def __call__(self, inputs, outputs, mWork: cute.Tensor, numbers, stream):
        """``numbers``: the scale, and (left, right) of the window."""
        c, spec = self.cfg, self.spec
        softmax_scale, window = numbers
        mQ = inputs[0]
        at = workspace(c, spec, sizes_of(mQ, inputs[1]))
        seqlen_q, seqlen_k = mQ.shape[1], inputs[1].shape[1]
        g = self.globals(inputs, outputs, mWork, (at, window))
        space = sched.TileSpace(ceil_div(seqlen_k, c.tile_n), mQ.shape[2], mQ.shape[0])
        row_bytes = 2 * (c.head_dim + c.head_dim_v) + 4 * c.head_dim
        order = sched.make(c.scheduler, space, seqlen_k=seqlen_q, kv_bytes_per_row=row_bytes)
        self.kernel(g, order, softmax_scale, softmax_scale * LOG2_E).launch(
            grid=order.grid(), block=(c.warps.threads, 1, 1), stream=stream, min_blocks_per_mp=1
        )

    def globals(self, inputs, outputs, mWork: cute.Tensor, rest) -> Globals:
        """TMA views of the tensors, and the sections of the workspace."""
        c, spec = self.cfg, self.spec
        at, window = rest
        layouts = Layouts(c, DTYPES[spec.dtype])
        boxes = {
            "sQ": (c.tile_m, c.head_dim),
            "sK": (c.tile_n, c.head_dim),
            "sV": (c.tile_n, c.head_dim_v),
            "sdO": (c.tile_m, c.head_dim_v),
        }

        def tma(op, tensor, field):
            made = cpasync.make_tiled_tma_atom(
                op, as_tma(tensor), layouts.of(field, stages=False), boxes[field]
            )
            return made[0], made[1]

        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        loads = [tma(load, x, f) for x, f in zip(inputs, ("sQ", "sK", "sV", "sdO"), strict=True)]
        if spec.shares_kv:
            stores = [(None, section(mWork, at.dk)), (None, section(mWork, at.dv))]
        else:
            stores = [tma(store, x, f) for x, f in zip(outputs, ("sK", "sV"), strict=True)]
        b, sq, h, _ = inputs[0].shape
        rows_q = ceil_div(sq, c.tile_m) * c.tile_m
        rows = cute.make_layout((rows_q, h, b), stride=(1, rows_q, cutlass.Int64(rows_q) * h))
        (load_q, mQ), (load_k, mK), (load_v, mV), (load_do, mdO) = loads
        (store_dk, mdK), (store_dv, mdV) = stores
        return Globals(
            load_q=load_q,
            load_k=load_k,
            load_v=load_v,
            load_do=load_do,
            store_dk=store_dk,
            store_dv=store_dv,
            mQ=mQ,
            mK=mK,
            mV=mV,
            mdO=mdO,
            mdK=mdK,
            mdV=mdV,
            mLse=cute.make_tensor(section(mWork, at.lse), rows),
            mDelta=cute.make_tensor(section(mWork, at.delta), rows),
            dq=section(mWork, at.dq),
            dq_count=section(mWork, at.dq_count, Int32),
            dkv_count=section(mWork, at.dkv_count, Int32),
            window_left=window[0],
            window_right=window[1],
        )

    @property
    def writer(self):
        """How dQ gets to its accumulator."""
        if self.cfg.dq_direct:
            return Direct()
        return Buffered(Turnstile() if self.spec.deterministic else AnyOrder())

    @property
    def epilogue(self):
        """How dK and dV get out."""
        return Add(self.spec.deterministic) if self.spec.shares_kv else Store()

    @property
    def program(self):
        """Role and body, in the order of the warps. Determinism is a matter of which writer and
        epilogue.
        """
        epilogue = self.epilogue
        bodies = {
            "load": Load(),
            "dq_store": DqStore(),
            "idle": Idle(),
            "consumer": {"lagged": Lagged, "lockstep": Lockstep}[self.cfg.schedule](epilogue),
            "values": Values(epilogue),
            "keys": Keys(epilogue),
        }
        return tuple((role, bodies[role.name]) for role in self.cfg.warps.roles)

    @cute.kernel
    def kernel(self, g: Globals, order, scale: Float32, scale_log2: Float32):
        c = self.cfg
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = build_smem(c, DTYPES[self.spec.dtype])
        pipes = build_pipes(c)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cx = BwdCtx(
            cfg=c,
            spec=self.spec,
            g=g,
            smem=smem,
            pipes=pipes,
            mmas=make_mmas(c, DTYPES[self.spec.dtype]),
            writer=self.writer,
            tile=sched.here(order).tile(),
            seqlen_q=g.mQ.shape[0],
            seqlen_k=g.mK.shape[0],
            scale=scale,
            scale_log2=scale_log2,
        )
        if const_expr(cx.mask.hides_keys):
            if cx.q_blocks().count > 0:
                self.play(cx, warp)
            else:
                self.epilogue.nothing(cx, warp)
        else:
            self.play(cx, warp)

    @cute.jit
    def play(self, cx: BwdCtx, warp):
        """Every role on its warps."""
        c = self.cfg
        for i in cutlass.range_constexpr(len(self.program)):
            role, body = self.program[i]
            if warp >= role.start and warp < role.stop:
                if const_expr(role.regs > c.warps.launch_regs):
                    cute.arch.setmaxregister_increase(role.regs)
                else:
                    cute.arch.setmaxregister_decrease(role.regs)
                body.run(cx)
