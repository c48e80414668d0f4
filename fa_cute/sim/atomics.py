"""Atomics, reductions, and the loads and stores that order memory."""

from __future__ import annotations

import numpy as np

from fa_cute.errors import MisuseError
from fa_cute.sim import operands as ops
from fa_cute.sim.alu_ops import DTYPES, bf16_to_f32, f32_to_bf16
from fa_cute.sim.handlers import FULL, handles, unknown
from fa_cute.sim.ptx import Bank, Imm, Instr, Reg, Sym, Vec

# Qualifiers that make a load or store one that others may be waiting for, or waiting with.
ORDERED = ("acquire", "release", "relaxed", "volatile", "mmio")
PACKED = ("f16x2", "bf16x2")


def _space(ins: Instr) -> str:
    for part in ins.parts:
        if part == "global" or part.startswith("shared"):
            return part.split("::")[0]
    return "generic"


def _target(warp, addr: int, size: int, space: str, ins: Instr, what: str, later: bool = False):
    """(uint8 view, valid bytes or None) of a checked address; `later`: not accessed right now."""
    if addr % size:
        raise MisuseError(f"{ins.where}: {ins.op}: address {addr:#x} is not {size}-byte aligned")
    if space == "generic" and addr >> 60 == 1:
        space = "shared"
    if space == "shared":
        addr &= FULL
        cta = warp.cta.at(addr, ins)
        offset = cta.memory.check(addr, size, ins, what)
        valid = cta.smem_valid[offset : offset + size]
        if warp.machine.races is not None and not later:
            warp.machine.races.shared(cta, offset, size, what != "read")
        return cta.smem[offset : offset + size], valid
    return warp.machine.memory.view(addr, size, ins, what), None


def _typed(smem: np.ndarray, dtype) -> np.ndarray:
    """Shared memory as elements of a type (a ragged tail is left out)."""
    size = np.dtype(dtype).itemsize
    return smem[: len(smem) // size * size].view(dtype)


def _own_cells(warp, mask: int, addrs, shape):
    """(lanes, element indices, byte indices) of an aligned access to the CTA's own memory.

    None when some lane goes elsewhere, or wrong: the slow path says what is the matter.
    """
    space, size, count, ins = shape
    if space == "global":
        return None
    lanes = np.flatnonzero(ops.lane_mask(mask))
    mine = addrs[lanes]
    tag = np.uint64(warp.cta.rank << 24)
    if space == "generic":
        tag |= np.uint64(ops.GENERIC_SHARED)
    offsets = (mine & np.uint64(ops.OFFSET_MASK)).astype(np.int64)
    total = size * count
    if (
        ((mine ^ offsets.astype(np.uint64)) != tag).any()
        or (offsets % total).any()
        or offsets.min() < ops.SMEM_START
        or offsets.max() + total > warp.cta.smem_size
    ):
        return None
    cells = (offsets // size)[:, None] + np.arange(count)
    valid = offsets[:, None] + np.arange(total)
    races = warp.machine.races
    if races is not None:
        races.words(warp.cta, valid[:, :: min(4, total)].reshape(-1), ins.parts[0] == "st")
    return lanes, cells, valid


def _values(operand, kind: str):
    """`fn(warp) -> array[32]` of a type; packed halves stay 32 bits."""
    if kind in PACKED:
        return ops.lanes32(operand)
    dtype = np.dtype(DTYPES.get(kind, np.uint16))
    if dtype.itemsize == 8:
        inner = ops.lanes64(operand)
        return lambda warp: inner(warp).view(dtype)
    inner = ops.lanes32(operand)
    narrow = np.dtype(f"u{dtype.itemsize}")
    return lambda warp: inner(warp).astype(narrow).view(dtype)


def _halves(kind: str, old: int, new: int, fn) -> int:
    """Apply `fn` to both halves of packed 16-bit floats."""
    out = 0
    for at in (0, 16):
        a, b = (np.array([x >> at & 0xFFFF], np.uint16) for x in (old, new))
        if kind == "bf16x2":
            half = f32_to_bf16(fn(bf16_to_f32(a), bf16_to_f32(b)))
        else:
            half = fn(a.view(np.float16), b.view(np.float16)).astype(np.float16).view(np.uint16)
        out |= int(half[0]) << at
    return out


def _combine(op: str, kind: str, ins: Instr):
    """`fn(old, new) -> result` on scalars of the type (a raw uint32 for packed halves)."""
    if kind in PACKED or kind == "bf16":
        fn = {"add": np.add, "min": np.fmin, "max": np.fmax}[op]
        if kind == "bf16":
            return lambda a, b: np.uint16(_halves("bf16x2", int(a), int(b), fn) & 0xFFFF)
        return lambda a, b: np.uint32(_halves(kind, int(a), int(b), fn))
    floating = kind[0] == "f"
    table = {
        "add": np.add,
        "min": np.fmin if floating else np.minimum,
        "max": np.fmax if floating else np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "exch": lambda a, b: b,
        "inc": lambda a, b: np.uint32(0) if a >= b else a + np.uint32(1),
        "dec": lambda a, b: b if a == 0 or a > b else a - np.uint32(1),
    }
    if op not in table:
        raise unknown(ins)
    return table[op]


def _size(kind: str) -> int:
    if kind in PACKED:
        return 4
    return 2 if kind == "bf16" else np.dtype(DTYPES[kind]).itemsize


def _dtype(kind: str):
    if kind in PACKED:
        return np.uint32
    return np.uint16 if kind == "bf16" else DTYPES[kind]


def _read_modify_write(warp, mask, addrs, old_new, shape):
    """Lane after lane: `old_new(lane, i, old) -> new`; the old values of every element."""
    space, dtype, count, ins = shape
    size = np.dtype(dtype).itemsize
    old = np.zeros((count, 32), dtype)
    changed = False
    for lane in ops.lanes_of(mask):
        view, valid = _target(warp, int(addrs[lane]), size * count, space, ins, "atomic access")
        cells = view.view(dtype)
        if valid is not None and not valid.all():
            warp.machine.note_unset("shared", ins, int(addrs[lane]))
            valid[:] = 1
        for i in range(count):
            old[i, lane] = cells[i]
            cells[i] = old_new(lane, i, cells[i])
            changed = changed or cells[i] != old[i, lane]
    if changed:
        warp.machine.wrote(warp)
    return old


def _operation(ins: Instr) -> str:
    names = ("add", "min", "max", "and", "or", "xor", "exch", "inc", "dec", "cas")
    for part in ins.parts[1:]:
        if part in names:
            return part
    raise unknown(ins)


@handles("atom", "red")
def bind_atomic(ins: Instr, k):
    if ins.starts("red", "async"):
        return bind_red_async(ins, k)
    has_result = ins.parts[0] == "atom"
    kind, op, space = ins.parts[-1], _operation(ins), _space(ins)
    if kind == "b128":
        raise unknown(ins)
    dst = ins.operands[0] if has_result else None
    mem, *rest = ins.operands[1 if has_result else 0 :]
    where = ops.addresses(mem, k)
    items = rest[0].items if isinstance(rest[0], Vec) else (rest[0],)
    sources = [_values(item, kind) for item in items]
    dtype, count = _dtype(kind), len(items)
    writers = None
    if has_result and not (isinstance(dst, Sym) and dst.is_sink):
        dsts = dst.items if isinstance(dst, Vec) else (dst,)
        writers = [ops.write32(d) for d in dsts]
    swap = _values(rest[1], kind) if op == "cas" else None
    fn = _combine(op, kind, ins) if op != "cas" else None
    shape = (space, dtype, count, ins)
    counted = "global" if space != "shared" else "shared"
    bits = np.dtype(f"u{np.dtype(dtype).itemsize}")
    polls = has_result and (op == "cas" or (op in ("add", "or", "exch") and _is_zero(rest[0])))

    def atomic(warp, mask):
        new = [source(warp) for source in sources]
        swaps = swap(warp) if swap is not None else None

        def change(lane, i, old):
            if swaps is not None:
                return swaps[lane] if old == new[i][lane] else old
            return fn(old, new[i][lane])

        old = _read_modify_write(warp, mask, where(warp), change, shape)
        warp.machine.counters[f"atomic.{counted}"] += mask.bit_count() * count * bits.itemsize
        if writers is not None:
            for write, value in zip(writers, old):
                write(
                    warp,
                    mask,
                    value.view(bits).astype(np.uint64 if bits.itemsize == 8 else np.uint32),
                )
        return warp.poll(ins, mask, old) if polls else None

    return atomic


def _is_zero(operand) -> bool:
    return isinstance(operand, Imm) and operand.bits == 0


def bind_red_async(ins: Instr, k):
    """`red.async...mbarrier::complete_tx::bytes.shared::cluster.op.type [a], v, [mbar]`."""
    kind, op = ins.parts[-1], _operation(ins)
    where, value = ops.addresses(ins.operands[0], k), _values(ins.operands[1], kind)
    barrier_at = ops.addresses(ins.operands[2], k)
    fn, dtype, size = _combine(op, kind, ins), _dtype(kind), _size(kind)

    def red(warp, mask):
        values, addrs, bars = value(warp).copy(), where(warp), barrier_at(warp)
        for lane in ops.lanes_of(mask):
            _post_remote(
                warp, int(addrs[lane]), int(bars[lane]), size, ins, (values[lane], fn, dtype)
            )

    return red


def _post_remote(warp, addr: int, bar: int, size: int, ins: Instr, payload) -> None:
    """Write (or reduce) at a cluster address later, then complete `size` bytes on its barrier."""
    data, fn, dtype = payload
    view, valid = _target(warp, addr, size, "shared", ins, "write", True)
    races, cta = warp.machine.races, warp.cta.at(addr, ins)
    barrier = warp.cta.mbarrier(bar & FULL, ins)

    def perform() -> None:
        cells = view.view(dtype)
        if fn is None:
            cells[:] = data
        else:
            cells[0] = fn(cells[0], data)
        valid[:] = 1
        if races is not None:
            races.shared(cta, addr & ops.OFFSET_MASK, size, True)
        barrier.complete_tx(size, ins)

    warp.machine.queue.post("st.async", ("st.async", warp), perform)


@handles("st.async")
def bind_st_async(ins: Instr, k):
    kind = ins.parts[-1]
    items = ins.operands[1].items if isinstance(ins.operands[1], Vec) else (ins.operands[1],)
    where, values = ops.addresses(ins.operands[0], k), [_values(i, kind) for i in items]
    barrier_at = ops.addresses(ins.operands[2], k)
    dtype, size = _dtype(kind), _size(kind) * len(items)

    def store(warp, mask):
        data = np.stack([v(warp) for v in values])
        addrs, bars = where(warp), barrier_at(warp)
        for lane in ops.lanes_of(mask):
            payload = (data[:, lane].copy(), None, dtype)
            _post_remote(warp, int(addrs[lane]), int(bars[lane]), size, ins, payload)

    return store


@handles(*(f"ld.{q}" for q in ORDERED))
def bind_ordered_load(ins: Instr, k):
    """A load that may poll: the second time it sees the same value, others run first."""
    return bind_load(ins, k, True)


def bind_load(ins: Instr, k, polls: bool = False):
    """A load, lane by lane."""
    kind, space = ins.parts[-1], _space(ins)
    if kind == "b128":
        raise unknown(ins)
    dst = ins.operands[0]
    items = dst.items if isinstance(dst, Vec) else (dst,)
    where, size, dtype = ops.addresses(ins.operands[1], k), _size(kind), _dtype(kind)
    writers = [_write_extended(item, kind) for item in items]

    def load(warp, mask):
        addrs = where(warp)
        own = _own_cells(warp, mask, addrs, (space, size, len(items), ins)) if not polls else None
        if own is not None:
            lanes, cells, valid = own
            if not warp.cta.smem_valid[valid].all():
                warp.machine.note_unset("shared", ins, int(addrs[lanes[0]]))
            out = np.zeros((len(items), 32), dtype)
            out[:, lanes] = _typed(warp.cta.smem, dtype)[cells].T
            for write, value in zip(writers, out):
                write(warp, mask, value)
            return None
        out = np.zeros((len(items), 32), dtype)
        for lane in ops.lanes_of(mask):
            addr = int(addrs[lane])
            view, valid = _target(warp, addr, size * len(items), space, ins, "read")
            if valid is not None and not valid.all():
                warp.machine.note_unset("shared", ins, addr)
            out[:, lane] = view.view(dtype)
        for write, value in zip(writers, out):
            write(warp, mask, value)
        return warp.poll(ins, mask, out) if polls else None

    return load


def _write_extended(operand, kind: str):
    """Write a loaded value: sign- or zero-extended to the register."""
    write = ops.write32(operand)
    wide = isinstance(operand, Reg) and operand.bank is Bank.R64
    size = _size(kind)

    def store(warp, mask, value):
        if kind[0] == "s":
            full = value.astype(np.int64).view(np.uint64)
        else:
            full = value.view(f"u{size}").astype(np.uint64)
        write(warp, mask, full if wide else full.astype(np.uint32))

    return store


@handles(*(f"st.{q}" for q in ORDERED))
def bind_store(ins: Instr, k):
    """A store, lane by lane."""
    kind, space = ins.parts[-1], _space(ins)
    if kind == "b128":
        raise unknown(ins)
    source = ins.operands[1]
    items = source.items if isinstance(source, Vec) else (source,)
    where, values = ops.addresses(ins.operands[0], k), [_values(i, kind) for i in items]
    size, dtype = _size(kind), _dtype(kind)

    def store(warp, mask):
        addrs, data = where(warp), np.stack([v(warp) for v in values])
        own = _own_cells(warp, mask, addrs, (space, size, len(items), ins))
        if own is not None:
            lanes, cells, valid = own
            _typed(warp.cta.smem, dtype)[cells] = data[:, lanes].T
            warp.cta.smem_valid[valid] = warp.core.ctx.mark & 0xFF
            return
        for lane in ops.lanes_of(mask):
            view, valid = _target(warp, int(addrs[lane]), size * len(items), space, ins, "write")
            view.view(dtype)[:] = data[:, lane]
            if valid is not None:
                valid[:] = warp.core.ctx.mark & 0xFF
        warp.machine.wrote(warp)

    return store
