"""Tensor copies of the TMA unit: tile loads (multicast, CTA pairs), stores and reductions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fa_cute.errors import MisuseError, UnknownInstructionError
from fa_cute.sim import tensormap
from fa_cute.sim.handlers import handles
from fa_cute.sim.memory import BASE, place
from fa_cute.sim.operands import address, lanes_of, shared_address, uniform32
from fa_cute.sim.reduce import reduce_into
from fa_cute.sim.smem_ops import (
    RAW_TYPE,
    aligned,
    note_unset_range,
    one_issuer,
    read_tile,
    split,
    write_tile,
)
from fa_cute.sim.tensormap import TensorMap

if TYPE_CHECKING:
    from fa_cute.sim.ptx import Instr
    from fa_cute.sim.warp import Cta


@dataclass(frozen=True)
class Box:
    """The part of a box that lies inside the tensor, slowest dimension first."""

    shape: tuple[int, ...]  # of the whole box, elements
    inside: tuple[slice, ...] | None  # None: the whole box; () never
    empty: bool
    first: int  # address of the first element inside
    counts: tuple[int, ...]  # elements inside, per dimension
    strides: tuple[int, ...]  # bytes

    def global_view(self, memory, dtype, ins: Instr, what: str) -> np.ndarray:
        """The tensor's elements as a strided array; what it spans is checked."""
        last = sum((n - 1) * s for n, s in zip(self.counts, self.strides, strict=True))
        span = memory.view(self.first, last + dtype().itemsize, ins, what)
        return np.ndarray(self.counts, dtype, span, 0, self.strides)


def clip(tmap: TensorMap, coords: tuple[int, ...]) -> Box:
    """Cut the box that starts at `coords` (fastest first, may be negative) to the tensor."""
    shape = tuple(reversed(tmap.box))
    first, slices, counts, whole = tmap.address, [], [], True
    for c, dim, box, stride in zip(coords, tmap.dims, tmap.box, tmap.strides, strict=True):
        low, high = max(c, 0), min(c + box, dim)
        if high <= low:
            return Box(shape, None, True, 0, (), ())
        first += low * stride
        slices.append(slice(low - c, high - c))
        counts.append(high - low)
        whole &= high - low == box
    first %= 1 << 64  # a dimension may step back by wrapping around
    inside = None if whole else tuple(reversed(slices))
    return Box(shape, inside, False, first, tuple(reversed(counts)), tuple(reversed(tmap.strides)))


def _map_reader(operand, k):
    """`fn(warp, mask) -> (TensorMap, coords)` of `[map, {c0, ..}]`."""
    if operand.coords is None:
        raise UnknownInstructionError(f"a tensor copy without coordinates: {operand!r}")
    at = address(operand, k)
    coordinates = [uniform32(c, k) for c in operand.coords.items]

    def read(warp, mask):
        where = at(warp, mask)
        blob = warp.machine.memory.u8[where - BASE : where - BASE + tensormap.BYTES].tobytes()
        coords = tuple(_signed(c(warp, mask)) for c in coordinates)
        tmap = tensormap.decode(blob)
        if tmap.rank != len(coords):
            raise MisuseError(f"{len(coords)} coordinates for a tensor map of rank {tmap.rank}")
        if tensormap.is_narrow(tmap):
            warp.machine.warn(
                f"swizzle {tmap.swizzle} of {tmap.box[0] * tmap.elem_bytes}-byte box rows: "
                "rows shorter than the swizzle span are taken as dense, which no document promises"
            )
        return tmap, coords

    return read


def _signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


def load_box(memory, tmap: TensorMap, box: Box, ins: Instr) -> np.ndarray:
    """The box as dense bytes; outside the tensor it is zero.

    The H200 reads the base of the map where nothing of the box is inside (a store does not, nor
    does a load of a box that is cut): an illegal address if nothing is there.
    """
    raw = RAW_TYPE[tmap.elem_bytes]
    if box.empty:
        memory.check(tmap.address, 1, ins, "the map's base, which a TMA load of nothing reads,")
        return np.zeros(tmap.box_bytes, np.uint8)
    source = box.global_view(memory, raw, ins, "TMA load")
    if box.inside is None:
        return np.ascontiguousarray(source).reshape(-1).view(np.uint8)
    dense = np.zeros(box.shape, raw)
    dense[box.inside] = source
    return dense.reshape(-1).view(np.uint8)


def signal_cta(cta: Cta, destination: Cta, mbar_cta: Cta, pair: bool, ins: Instr) -> Cta:
    """The CTA whose barrier counts the bytes that arrive in `destination`."""
    if not pair:
        return destination
    rank = (destination.rank & ~1) | (mbar_cta.rank & 1)
    return cta.cluster.ctas[rank]


def _is_multicast(ins: Instr) -> bool:
    return any(part.startswith("multicast::cluster") for part in ins.parts)


@handles("cp.async.bulk.tensor")
def bind_tensor(ins: Instr, k):
    if ins.has("im2col") or "tile::gather4" in ins.parts or "tile::scatter4" in ins.parts:
        raise UnknownInstructionError(f"{ins.where}: {ins.op}: only tile mode is modelled")
    # cp.async.bulk.tensor.Nd.<destination>.<source>
    if ins.parts[5].startswith("shared"):
        return _bind_load(ins, k)
    if ins.parts[5] == "global":
        return _bind_store(ins, k, None)
    raise UnknownInstructionError(f"{ins.where}: {ins.op}")


def _bind_load(ins: Instr, k):
    dst_of = shared_address(ins.operands[0], k)
    map_of = _map_reader(ins.operands[1], k)
    mbar_of = shared_address(ins.operands[2], k)
    mask_of = uniform32(ins.operands[3], k) if _is_multicast(ins) else None
    pair = ins.has("cta_group::2")
    own_only = ins.has("shared::cta")

    def step(warp, mask):
        one_issuer(mask, ins, "a TMA load")
        cta, machine = warp.cta, warp.machine
        tmap, coords = map_of(warp, mask)
        dst, mbar = dst_of(warp, mask), mbar_of(warp, mask)
        home, offset = split(cta, dst, ins)
        mbar_cta, mbar_offset = split(cta, mbar, ins)
        aligned(offset, 128, ins, "TMA destination")
        nbytes = tmap.box_bytes
        if own_only and home is not cta:
            raise MisuseError(f"{place(ins)}destination {dst:#x} is in another CTA")
        if mask_of is None:
            targets = [home]
        else:
            ranks = lanes_of(mask_of(warp, mask) & 0xFFFF)
            targets = [split(cta, r << 24, ins)[0] for r in ranks]
        if not pair and mask_of is None and mbar_cta is not home:
            raise MisuseError(
                f"{place(ins)}the mbarrier is in CTA {mbar_cta.rank}, the destination in "
                f"CTA {home.rank}: "
                "without .cta_group::2 they must be in one CTA"
            )
        signals = []
        for target in targets:
            target.check_smem(offset, nbytes, ins, "TMA load")
            signaled = signal_cta(cta, target, mbar_cta, pair, ins)
            signals.append((target, signaled.mbarrier(signaled.window | mbar_offset, ins)))
        box = clip(tmap, coords)

        def run():
            data = load_box(machine.memory, tmap, box, ins)
            machine.counters["tma.load"] += nbytes
            for target, barrier in signals:
                write_tile(target, offset, data, tmap.swizzle)
                barrier.complete_tx(nbytes)

        machine.queue.post("tma.load", object(), run)

    return step


@handles("cp.reduce.async.bulk.tensor")
def bind_reduce(ins: Instr, k):
    operation = next(
        (p for p in ins.parts if p in ("add", "min", "max", "inc", "dec", "and", "or", "xor")), None
    )
    if operation is None or ins.has("im2col_no_offs"):
        raise UnknownInstructionError(f"{ins.where}: {ins.op}")
    return _bind_store(ins, k, operation)


def _bind_store(ins: Instr, k, operation: str | None):
    """Store (operation None) or reduction of a box from shared to global memory."""
    map_of = _map_reader(ins.operands[0], k)
    src_of = shared_address(ins.operands[1], k)
    what = "TMA store" if operation is None else "TMA reduction"

    def step(warp, mask):
        if operation is not None:
            one_issuer(mask, ins, "a TMA reduction")
        cta, machine = warp.cta, warp.machine
        tmap, coords = map_of(warp, mask)
        home, offset = split(cta, src_of(warp, mask), ins)
        if home is not cta:
            raise MisuseError(f"{place(ins)}the source is in another CTA")
        aligned(offset, 128, ins, f"{what} source")
        nbytes = tmap.box_bytes
        cta.check_smem(offset, nbytes, ins, what)
        box = clip(tmap, coords)
        read_done, done = bulk_tokens(warp)

        def read():
            dense = _read_box(cta, offset, tmap, box, ins)
            read_done()
            machine.queue.post("tma.write", object(), lambda: write(dense))

        def write(dense):
            machine.counters["tma.store" if operation is None else "tma.reduce"] += nbytes
            if dense is not None:
                target = box.global_view(machine.memory, dense.dtype.type, ins, what)
                if operation is None:
                    target[...] = dense
                else:
                    reduce_into(target, np.ascontiguousarray(dense), operation, tmap.dtype, ins)
            done()

        machine.queue.post("tma.store", object(), read)

    return step


def bulk_tokens(warp):
    """(source has been read, all is done) of one more bulk operation of the open group."""
    return warp.groups("bulk.read").add(), warp.groups("bulk").add()


def _read_box(cta: Cta, offset: int, tmap: TensorMap, box: Box, ins: Instr) -> np.ndarray | None:
    """The elements of the box that lie inside the tensor; None when none do."""
    if box.empty:
        return None
    if box.inside is None:
        note_unset_range(cta, offset, tmap.box_bytes, ins)
    elif cta.machine.races is not None:  # what lies outside may never have been written
        cta.machine.races.shared(cta, offset, tmap.box_bytes, False)
    raw = RAW_TYPE[tmap.elem_bytes]
    dense = read_tile(cta, offset, tmap.box_bytes, tmap.swizzle).view(raw).reshape(box.shape)
    return dense if box.inside is None else dense[box.inside]


@handles(
    "prefetch", "prefetchu", "cp.async.bulk.prefetch", "applypriority", "discard", "createpolicy"
)
def bind_hint(ins: Instr, k):
    """Hints to the caches; they move no data that a program can observe."""
    return lambda warp, mask: None
