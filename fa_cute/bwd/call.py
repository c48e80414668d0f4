"""The host side of a backward: one sequence of kernels for every architecture.

[prepare]    varlen: lists the tiles (`sched.varlen`)
preprocess   row statistics; zeroes what is added to
main         of the architecture
postprocess  dq; with shared kv heads dk and dv too
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from fa_cute import sched
from fa_cute.bwd.args import BwdSpec, Sizes, Workspace, stores_first, workspace
from fa_cute.bwd.blocks import Counted, Cut, Grid, Listed
from fa_cute.bwd.postprocess import BwdPostprocess
from fa_cute.bwd.preprocess import BwdPreprocess
from fa_cute.ops import ragged, seqlen
from fa_cute.ops.arith import ceil_div
from fa_cute.ops.mask import Band
from fa_cute.ops.semaphore import int32_at
from fa_cute.sched.varlen_prepare import Prepare, order_of
from fa_cute.sched.varlen_sides import Side


@dataclass(frozen=True)
class Call:
    """What the kernels of one call share while they are traced; stays on the host side."""

    cfg: Any
    spec: BwdSpec
    shape: Sizes  # as 32 bits
    seqlens: Any  # seqlen.Dense or seqlen.Varlen
    lists: Any  # varlen: sched.varlen.Lists; else None
    at: Workspace
    mWork: cute.Tensor
    scale: Float32
    window: tuple  # (left, right): Int32, or None
    num_sms: Int32
    dq: cute.Tensor  # the gradient: until the postprocess writes it, room for counters

    @property
    def band(self) -> Band:
        return self.spec.band(*self.window)

    @property
    def tile_count(self) -> Any:
        """int32: how many tiles are taken, where a fixed set of CTAs takes them; else None. Rows of
        dq that belong to no sequence are not written again, but a list's header has room.
        """
        if not getattr(self.cfg, "persistent", False):
            return None
        # Beside the mark of the first dQ tile (`first_of`).
        return int32_at((self.lists.header if self.spec.varlen else self.dq).iterator + 4)

    @property
    def firsts(self) -> Any:
        """Where `first_of` finds whether a dQ tile was begun, if nothing else counts who adds to
        it; else None.
        """
        return self.dq if stores_first(self.cfg) and not self.spec.deterministic else None

    def section(self, name: str, dtype=Float32) -> cute.Pointer:
        """Start of a section of the workspace, by its field in `Workspace`."""
        address = (self.mWork.iterator + getattr(self.at, name)).toint()
        return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16)

    def per_row(self, name: str) -> cute.Tensor:
        """lse or delta: (rows, heads, batch), varlen (rows of all sequences, heads); rows in whole
        tiles.
        """
        n, tile = self.shape, self.cfg.tile_m
        if self.spec.varlen:
            rows = self.lists.owner_q.shape[0] * tile
            layout = cute.make_layout((rows, n.heads), stride=(1, Int64(rows)))
        else:
            rows = ceil_div(n.seqlen_q, tile) * tile
            stride = (1, rows, Int64(rows) * n.heads)
            layout = cute.make_layout((rows, n.heads, n.batch), stride=stride)
        return cute.make_tensor(self.section(name), layout)

    def order(self):
        """Who does which tile of the main kernel."""
        n, work = self.shape, self.cfg.work(self.spec)
        if self.spec.varlen:
            return order_of(work, self.lists, n.seqlen_k, n.heads, once=True)
        space = sched.TileSpace(ceil_div(n.seqlen_k, work.tile_k), n.heads, n.batch)
        return sched.make(
            self.cfg.scheduler,
            space,
            seqlen_k=work.seen(self.band, n.seqlen_q),
            kv_bytes_per_row=work.bytes_per_row,
            l2_bytes=work.l2_bytes(self.band),
        )

    def grid(self, cut: Cut) -> Grid:
        """Who does which rows of a side in the other kernels."""
        made, on_q = self.lists, cut.side == "q"
        if self.spec.varlen:
            blocks = Listed(self.seqlens, made.header, made.owner_q if on_q else made.owner_k)
        else:
            blocks = Counted(self.seqlens)
        heads = self.shape.heads if on_q else self.shape.heads_kv
        return Grid(blocks, blocks.count(cut, self.shape.batch), heads)

    def tma_view(self, tensor: cute.Tensor, turned: bool = False) -> cute.Tensor:
        """(batch, seqlen, heads, d) as (seqlen, d, heads, batch), ``turned`` as (d, seqlen, ...);
        varlen as `ragged` says. Row strides are multiples of 16 bytes by contract.
        """
        if self.spec.varlen:
            return ragged.tma_view(tensor, turned)
        units = 128 // tensor.element_type.width
        strides = (s if isinstance(s, int) else cute.assume(s, divby=units) for s in tensor.stride)
        strides, order = tuple(strides), (3, 1, 2, 0) if turned else (1, 3, 2, 0)
        layout = cute.make_layout(
            tuple(tensor.shape[i] for i in order), stride=tuple(strides[i] for i in order)
        )
        pointer = cute.make_ptr(
            tensor.element_type, tensor.iterator.toint(), cute.AddressSpace.gmem, assumed_align=16
        )
        return cute.make_tensor(pointer, layout)


def call_of(cfg, spec: BwdSpec, tensors, grads, lengths, mWork, numbers, stream) -> Call:
    """The shared facts of a call; with varlen this launches the kernel that lists the tiles, and
    zeroes rows of ``grads`` that belong to no sequence.

    ``tensors``: q and k; ``lengths``: cu_q, cu_k, used_q, used_k and the int32 workspace;
    ``numbers``: the scale, the limits of the window, multiprocessors.
    """
    mQ, mK = tensors
    cu_q, cu_k, used_q, used_k, mVarlen = lengths
    scale, window, num_sms = numbers
    made = None
    if spec.varlen:
        (total_q, heads, _), (total_k, heads_kv, _) = mQ.shape, mK.shape
        sides = (
            Side(cu_q, used_q, total_q, zeros=grads[:1]),
            Side(cu_k, used_k, total_k, zeros=grads[1:]),
        )
        made = Prepare(cfg.work(spec))(*sides, heads, 1, spec.band(*window), mVarlen, stream)
        shape = Sizes(made.records.shape[0], heads, heads_kv, total_q, total_k)
        seqlens = seqlen.Varlen(made.records)
    else:
        (batch, seqlen_q, heads, _), (_, seqlen_k, heads_kv, _) = mQ.shape, mK.shape
        shape = Sizes(batch, heads, heads_kv, seqlen_q, seqlen_k)
        seqlens = seqlen.Dense(seqlen_q, seqlen_k)
    # 64 bits: the accumulator of a long batch has more than 2^31 elements.
    wide = Sizes(
        *(Int64(x) for x in (shape.batch, heads, heads_kv, shape.seqlen_q, shape.seqlen_k))
    )
    at = workspace(cfg, spec, wide)
    return Call(cfg, spec, shape, seqlens, made, at, mWork, scale, window, num_sms, grads[0])


@dataclass(frozen=True)
class Idle:
    """Warps that only complete a warpgroup: all four of its warps set its registers."""

    def run(self, cx):
        """Nothing."""


@dataclass(frozen=True)
class Backward:
    """The whole backward of one call; a subclass has ``main(call)``, its main kernel.

    ``__call__(q, k, v, out, lse, dout, dlse, dq, dk, dv, work, scale, ..., stream)``: tensors as
    the user holds them, ``dlse`` may be None, ``work`` is `args.workspace_floats` fp32 elements,
    uninitialised. What comes after the scale is None where the spec does not have it.
    """

    cfg: Any
    spec: BwdSpec

    # Whether each kernel is launched while the one before still runs (programmatic dependent
    # launch), and waits for its end when it has set itself up.
    early = False

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
        lengths = (cu_q, cu_k, used_q, used_k, mVarlen)
        numbers = (softmax_scale, (window_left, window_right), num_sms)
        grads = (mdQ, mdK, mdV)
        call = call_of(c, spec, (mQ, mK), grads, lengths, mWork, numbers, stream)
        BwdPreprocess(c, spec)(call, (mO, mdO, mLSE, mdLSE), stream)
        self.main(call, (mQ, mK, mV, mdO), (mdK, mdV), stream)
        cut, how = Cut("q", c.tile_m, c.tile_m), (self.early, spec.varlen)
        last = BwdPostprocess(cut, c.dq_chunks, spec.head_dim, *how)
        last(call, "dq", mdQ, softmax_scale, stream)
        if const_expr(spec.shares_kv):
            # Only a list of tiles counts those of a cluster.
            cut = Cut("k", c.work(spec).tile_k if spec.varlen else c.tile_n, c.tile_n)
            last = BwdPostprocess(cut, c.dk_chunks, spec.head_dim, *how)
            last(call, "dk", mdK, softmax_scale, stream)
            last = BwdPostprocess(cut, c.dv_chunks, spec.head_dim_v, *how)
            last(call, "dv", mdV, Float32(1.0), stream)
