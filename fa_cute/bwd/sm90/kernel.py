"""The Hopper backward: host side of the main kernel, and its body."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from fa_cute import sched
from fa_cute.bwd.args import BwdSpec
from fa_cute.bwd.call import Backward, Idle
from fa_cute.bwd.sm90.ctx import (
    DTYPES,
    BwdCtx,
    Globals,
    Layouts,
    build_pipes,
    build_smem,
    make_mmas,
)
from fa_cute.bwd.sm90.dq_store import (
    AnyOrder,
    Buffered,
    Direct,
    DqStore,
    FirstStores,
    Turnstile,
)
from fa_cute.bwd.sm90.epilogue import Add, Store
from fa_cute.bwd.sm90.lagged import Lagged
from fa_cute.bwd.sm90.load import Load, LoadEveryTile
from fa_cute.bwd.sm90.lockstep import Lockstep
from fa_cute.bwd.sm90.pair import AddExisting, DqOfPair, LoadOfPair
from fa_cute.bwd.sm90.plan import BwdSm90Config
from fa_cute.bwd.sm90.remote import own_rank
from fa_cute.bwd.sm90.roles import DqHalf, Keys, Values
from fa_cute.bwd.sm90.tiles import EveryTile, OnlyTile
from fa_cute.ops.score import LOG2_E


@dataclass(frozen=True)
class BwdSm90(Backward):
    """The whole backward of one call."""

    early = True

    @property
    def main(self):
        return Main(self.cfg, self.spec)


@dataclass(frozen=True)
class Main:
    """The main kernel."""

    cfg: BwdSm90Config
    spec: BwdSpec

    @cute.jit
    def __call__(self, call, inputs, outputs, stream):
        """``inputs``: q, k, v, dout; ``outputs``: dk, dv."""
        order = call.order()
        g = self.globals(call, inputs, outputs)
        grid = order.grid(cluster=self.cfg.ctas)
        if const_expr(self.cfg.persistent):
            grid = sched.grid_of(sched.capped(grid[0], call.num_sms, 1), 1)
        self.kernel(g, order, call.scale, call.scale * LOG2_E).launch(
            grid=grid,
            block=(self.cfg.warps.threads, 1, 1),
            cluster=(self.cfg.ctas, 1, 1) if self.cfg.pair else None,
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    def globals(self, call, inputs, outputs) -> Globals:
        """TMA views of the tensors, and the sections of the workspace."""
        c, spec = self.cfg, self.spec
        layouts = Layouts(c, DTYPES[spec.dtype])
        boxes = {
            "sQ": (c.tile_m, c.head_dim),
            "sK": (c.tile_n, c.head_dim),
            "sV": (c.tile_n, c.head_dim_v),
            "sdO": (c.tile_m, c.head_dim_v),
            "sKx": (c.tile_n, c.head_dim // 2),
        }

        def tma(op, tensor, field, ctas=1):
            layout, view = layouts.of(field, stages=False), call.tma_view(tensor)
            made = cpasync.make_tiled_tma_atom(op, view, layout, boxes[field], ctas)
            return made[0], made[1]

        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        loads = [tma(load, x, f) for x, f in zip(inputs, ("sQ", "sK", "sV", "sdO"), strict=True)]
        more = {}
        if c.multicast:
            shared = cpasync.CopyBulkTensorTileG2SMulticastOp()
            loads[0], loads[3] = (
                tma(shared, inputs[i], f, c.ctas) for i, f in ((0, "sQ"), (3, "sdO"))
            )
        if c.pair:
            more["load_kx"], more["mKx"] = tma(load, inputs[1], "sKx")
        if spec.shares_kv:
            stores = [(None, call.section("dk")), (None, call.section("dv"))]
        else:
            stores = [tma(store, x, f) for x, f in zip(outputs, ("sK", "sV"), strict=True)]
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
            mLse=call.per_row("lse"),
            mDelta=call.per_row("delta"),
            dq=call.section("dq"),
            dq_count=call.section("dq_count", Int32),
            dkv_count=call.section("dkv_count", Int32),
            tile_count=call.tile_count,
            firsts=call.firsts,
            records=call.lists.records if spec.varlen else None,
            window_left=call.window[0],
            window_right=call.window[1],
            **more,
        )

    @property
    def writer(self):
        """How dQ gets to its accumulator."""
        if self.cfg.dq_direct:
            return Direct()
        if self.spec.deterministic:
            return Buffered(Turnstile())
        return Buffered(FirstStores() if self.cfg.store_first else AnyOrder())

    @property
    def epilogue(self):
        """How dK and dV get out."""
        if not self.spec.shares_kv:
            return Store()
        return (AddExisting if self.cfg.pair else Add)(self.spec.deterministic)

    @property
    def program(self):
        """Role and body, in the order of the warps. Determinism is a matter of which writer and
        epilogue.
        """
        epilogue, walk = self.epilogue, EveryTile if self.cfg.persistent else OnlyTile
        part = DqOfPair if self.cfg.pair else DqHalf
        keys_split = {"lagged": Lagged, "lockstep": Lockstep}[self.cfg.schedule]
        load = LoadEveryTile() if self.cfg.persistent else Load()
        bodies = {
            "load": LoadOfPair() if self.cfg.pair else load,
            "dq_store": DqStore(),
            "idle": Idle(),
            "consumer": walk(keys_split(epilogue)),
            "values": walk(Values(epilogue, part)),
            "keys": walk(Keys(epilogue, part)),
        }
        return tuple((role, bodies[role.name]) for role in self.cfg.warps.roles)

    @cute.kernel
    def kernel(self, g: Globals, order, scale: Float32, scale_log2: Float32):
        c = self.cfg
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = build_smem(c, DTYPES[self.spec.dtype])
        pipes = build_pipes(c)
        cute.arch.griddepcontrol_wait()  # for the preprocess, and all that came before it
        cute.arch.griddepcontrol_launch_dependents()
        if const_expr(self.spec.varlen and not c.persistent):
            # Three loads, each of which says where the next one goes, beside the set-up.
            tile, lengths = self.only_tile(g, order)
        cute.arch.mbarrier_init_fence()
        rank = 0
        if const_expr(c.pair):
            rank = own_rank()
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        if const_expr(c.persistent):
            tile, lengths = None, None
        elif const_expr(not self.spec.varlen):
            tile, lengths = self.only_tile(g, order)
        cx = BwdCtx(
            cfg=c,
            spec=self.spec,
            g=g,
            smem=smem,
            pipes=pipes,
            mmas=make_mmas(c, DTYPES[self.spec.dtype]),
            writer=self.writer,
            order=order,
            tile=tile,
            lengths=lengths,
            scale=scale,
            scale_log2=scale_log2,
            rank=rank,
        )
        if const_expr(not c.persistent and cx.may_be_empty):
            if tile.valid and cx.q_blocks().count > 0:
                self.play(cx, warp)
            elif tile.valid:
                self.epilogue.nothing(cx, warp)
        else:
            self.play(cx, warp)

    def only_tile(self, g: Globals, order):
        """The tile of this CTA or pair, and the lengths of what it belongs to."""
        tile = sched.here(order, self.cfg.ctas).tile()
        return tile, g.seqlens.at(tile)

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
        if const_expr(c.pair):
            # Nobody leaves while the other CTA may still reach for its shared memory.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
