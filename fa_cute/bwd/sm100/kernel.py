"""The SM100 backward: the host part (tensor maps, launches), and the kernel of the roles."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from ... import sched
from ...ops import pipes, tmem, umma
from ...ops.score import LOG2_E
from ..args import BwdSpec
from ..call import Backward, Idle
from .compute import Compute
from .ctx import A_OPERANDS, DTYPES, BwdCtx, Globals, Products, Smem
from .epilogue import Add, Store
from .exchange import Exchange, Keep
from .load import Load, LoadInTurn
from .mma import Ahead, Mma, Tight
from .plan import TURNED, BwdConfig
from .reduce_dq import AnyOrder, ReduceDq, Turnstile


@dataclass(frozen=True)
class BwdSm100(Backward):
    """The whole backward of one call."""

    @property
    def main(self):
        return Main(self.cfg, self.spec)


@dataclass(frozen=True)
class Main:
    """The main kernel."""

    cfg: BwdConfig
    spec: BwdSpec

    @cute.jit
    def __call__(self, call, inputs, outputs, stream):
        """``call``: `call.Call`; ``inputs``: q, k, v, dout; ``outputs``: dk, dv."""
        c = self.cfg
        order = call.order()
        self.kernel(self.globals(call, inputs, outputs, order)).launch(
            grid=order.grid(cluster=c.ctas),
            block=(c.warps.threads, 1, 1),
            cluster=(c.ctas, 1, 1) if c.pair else None,
            stream=stream,
            min_blocks_per_mp=1,
        )

    def globals(self, call, inputs, outputs, order) -> Globals:
        """TMA views of the tensors, and the sections of the workspace."""
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
            g = call.tma_view(tensors[tensor], turned=use in TURNED)
            made = make(load, g, slot, products.tile(product), mma, cluster.shape)
            return made[0], made[1]

        def result(tensor, use, cols):
            slot = cute.select(layouts[use], mode=[0, 1])
            view = call.tma_view(tensor)
            made = cpasync.make_tiled_tma_atom(store, view, slot, (c.tile_n, cols))
            return made[0], made[1]

        if spec.shares_kv:
            tma_dk, mdK = None, call.section("dk")
            tma_dv, mdV = None, call.section("dv")
        else:
            tma_dk, mdK = result(outputs[0], "dK rows", c.head_dim)
            tma_dv, mdV = result(outputs[1], "dV rows", c.head_dim_v)
        return Globals(
            loads=tuple(operand(use) for use in c.loads),
            tma_dk=tma_dk,
            tma_dv=tma_dv,
            mdK=mdK,
            mdV=mdV,
            mLse=call.per_row("lse"),
            mDelta=call.per_row("delta"),
            dq=call.section("dq"),
            dq_count=call.section("dq_count", Int32),
            dkv_count=call.section("dkv_count", Int32),
            order=order,
            scale=call.scale,
            scale_log2=call.scale * LOG2_E,
            seqlen_q=call.shape.seqlen_q,
            seqlen_k=call.shape.seqlen_k,
            records=None if call.lists is None else call.lists.records,
            window_left=call.window[0],
            window_right=call.window[1],
            heads=call.shape.heads,
            heads_kv=call.shape.heads_kv,
        )

    @property
    def epilogue(self):
        """How dK and dV get out."""
        return Add(self.spec.deterministic) if self.spec.shares_kv else Store()

    @property
    def program(self):
        """Role and body. Determinism is a matter of which order and which epilogue."""
        spec = self.spec
        bodies = {
            "reduce": ReduceDq(Turnstile() if spec.deterministic else AnyOrder()),
            "compute": Compute(Exchange() if self.cfg.pair else Keep(), self.epilogue),
            "mma": Mma(Tight() if self.cfg.tight else Ahead()),
            "load": LoadInTurn() if self.cfg.tight else Load(),
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
        tile = sched.here(g.order, c.ctas).tile()
        cx = BwdCtx(
            c, self.spec, g, smem, edges, barriers, products, tile, g.seqlens.at(tile), rank
        )
        if const_expr(self.spec.varlen or cx.mask.hides_keys):
            # The same for both CTAs of a pair.
            if tile.valid and cx.q_blocks().count > 0:
                self.play(cx, warp)
            elif tile.valid:
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
                # Each role finds its tile by itself: what is known before the roles part is alive
                # in all of them, and would be spilled for the one with the least room.
                body.run(cx.anew())
        if const_expr(c.pair):
            # Nobody leaves, or frees tensor memory, while the other CTA may still reach for it.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
            if warp == c.warps["mma"].start:
                tmem.free(cx.smem.tmem_address, c.tmem.alloc_cols, c.ctas)
