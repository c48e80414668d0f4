"""The rest of the reference engine's instructions: moves, conversions, memory, warp collectives."""

from __future__ import annotations

import numpy as np

from fa_cute.errors import MisuseError, OutOfBoundsError
from fa_cute.sim import operands as ops
from fa_cute.sim.alu_ops import (
    DTYPES,
    FULL,
    LANES,
    bits32,
    bits64,
    compare,
    f32_to_bf16,
    float_family,
    flush,
    int_op,
    put,
    read,
    round_f32,
    shift,
    simple,
    write,
)
from fa_cute.sim.ptx import Instr, Vec

FLOATS = ("f16", "bf16", "f32", "f64", "f32x2", "f16x2", "bf16x2")


def move(ins: Instr, env):
    dst, src, kind = ins.operands[0], ins.operands[1], ins.parts[-1]
    if isinstance(dst, Vec):
        total = 128 if kind == "b128" else np.dtype(DTYPES[kind]).itemsize * 8
        width = total // len(dst.items)
        outs = [write(item, f"b{width}", env) for item in dst.items]
        if kind == "b128":
            row = src.index
            return lambda c, mask: [o(c, mask, c.r64[row + i]) for i, o in enumerate(outs)]
        inner = bits64(src, env) if total == 64 else bits32(src, env)

        def unpack(c, mask):
            value = inner(c)
            kept = value.dtype.type((1 << width) - 1) if width < total else None
            parts = [value >> value.dtype.type(width * i) for i in range(len(outs))]
            for out, part in zip(outs, parts):
                out(c, mask, (part & kept if kept is not None else part).astype(f"u{width // 8}"))

        return unpack
    if kind == "b128" and isinstance(src, Vec):
        halves = [bits64(item, env) for item in src.items]
        row = dst.index

        def pack(c, mask):
            for i, half in enumerate(halves):
                put(c.r64[row + i], mask, half(c))

        return pack
    return simple(ins, env, kind, lambda a: a)


def convert(ins: Instr, env):
    to, source = ins.parts[-2], ins.parts[-1]
    how, relu, sat = ins.parts, ins.has("relu"), ins.has("satfinite")
    clamp01 = ins.has("sat")
    if to in ("bf16x2", "f16x2") and source == "f32":
        a, b = (read(o, "f32", env) for o in ins.operands[1:3])
        return _pack_halves(ins, env, to, a, b, relu, sat)
    if to == "bf16x2" or to == "f16x2" or "x2" in source or "x2" in to:
        return None
    out, inner = write(ins.operands[0], to, env), read(ins.operands[1], source, env)
    rounding = next((p for p in how if p in ("rni", "rzi", "rmi", "rpi")), None)
    mode = next((p for p in how if p in ("rn", "rz", "rm", "rp")), "rn")
    if to in ("tf32",):
        return None

    def run(c, mask):
        x = inner(c)
        if ins.has("ftz") and source == "f32":
            x = flush(x)
        out(c, mask, _convert(x, source, to, rounding, mode, (relu, sat, clamp01)))

    return run


def _convert(x, source, to, rounding, mode, flags):
    relu, sat, clamp01 = flags
    if source in FLOATS and to not in FLOATS:
        wide = x.astype(np.longdouble)
        fn = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[rounding]
        info = np.iinfo(DTYPES[to])
        nan = np.isnan(wide)
        value = np.clip(np.where(nan, 0, fn(wide)), info.min, info.max)
        return np.array([int(v) for v in value], object).astype(DTYPES[to])
    if source in FLOATS:
        if rounding:
            fn = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[rounding]
            x = fn(x)
        if relu:
            x = np.where(x > 0, x, np.where(np.isnan(x), np.nan, 0)).astype(x.dtype)
        if clamp01:
            x = np.clip(np.nan_to_num(x, nan=0.0), 0, 1).astype(x.dtype)
        if to == "bf16":
            x = x.astype(np.float32)
            if sat:
                x = np.clip(x, -3.3895314e38, 3.3895314e38)
            return x
        if to == "f32" and source == "f64":
            return round_f32(x, np.zeros(32), mode)
        if to == "f16" and sat:
            x = np.clip(x, -65504, 65504)
        return x.astype(DTYPES[to])
    if to in FLOATS:
        if to == "bf16":
            return x.astype(np.float32)
        if to == "f32":
            exact = x.astype(np.float64)
            error = (x.astype(np.longdouble) - exact.astype(np.longdouble)).astype(np.float64)
            return round_f32(exact, error, mode)
        return x.astype(DTYPES[to])
    info = np.iinfo(DTYPES[to])
    if sat or clamp01:
        x = np.clip(x.astype(object), info.min, info.max)
    return x.astype(DTYPES[to])


def _pack_halves(ins, env, to, a, b, relu, sat):
    out = write(ins.operands[0], "b32", env)
    limit = 3.3895314e38 if to == "bf16x2" else 65504.0

    def half(x):
        if relu:
            x = np.where(x > 0, x, np.where(np.isnan(x), np.nan, 0)).astype(np.float32)
        if sat:
            x = np.clip(x, -limit, limit)
        if to == "bf16x2":
            return f32_to_bf16(x).astype(np.uint32)
        bits = x.astype(np.float16).view(np.uint16).astype(np.uint32)
        return np.where(np.isnan(x), 0x7FFF, bits).astype(np.uint32)

    return lambda c, mask: out(c, mask, half(a(c)) << 16 | half(b(c)))


def mad(ins: Instr, env):
    kind = ins.parts[-1]
    if ins.has("wide"):
        wide = f"{kind[0]}{2 * int(kind[1:])}"
        fn = lambda a, b, c: a.astype(DTYPES[wide]) * b.astype(DTYPES[wide]) + c  # noqa: E731
        return simple(ins, env, wide, fn, [kind, kind, wide], wide)
    product = int_op("mul", kind, ins.parts)
    return simple(ins, env, kind, lambda a, b, c: product(a, b) + c)


def select(ins: Instr, env):
    kind = ins.parts[-1]
    a, b = read(ins.operands[1], kind, env), read(ins.operands[2], kind, env)
    p, out = read(ins.operands[3], "pred", env), write(ins.operands[0], kind, env)
    return lambda c, mask: out(c, mask, np.where(p(c), a(c), b(c)))


def logic_pred(ins: Instr, env):
    table = {
        "and": np.logical_and,
        "or": np.logical_or,
        "xor": np.logical_xor,
        "not": np.logical_not,
    }
    return simple(ins, env, "pred", table[ins.parts[0]])


def permute(ins: Instr, env):
    if len(ins.parts) > 2:
        return None
    a, b, sel = (bits32(o, env) for o in ins.operands[1:4])
    out = write(ins.operands[0], "b32", env)

    def run(c, mask):
        both = a(c).astype(np.uint64) | b(c).astype(np.uint64) << np.uint64(32)
        pick, result = sel(c), np.zeros(32, np.uint32)
        for i in range(4):
            n = (pick >> (4 * i)) & 15
            byte = (both >> ((n & 7) * 8).astype(np.uint64)).astype(np.uint32) & 0xFF
            sign = np.where(byte & 0x80, 0xFF, 0).astype(np.uint32)
            result |= np.where(n & 8, sign, byte).astype(np.uint32) << (8 * i)
        out(c, mask, result)

    return run


def lop3(ins: Instr, env):
    a, b, d = (bits32(o, env) for o in ins.operands[1:4])
    table, out = ins.operands[4].bits, write(ins.operands[0], "b32", env)

    def run(c, mask):
        x, y, z, result = a(c), b(c), d(c), np.zeros(32, np.uint32)
        for i in range(8):
            if table >> i & 1:
                result |= (x if i & 4 else ~x) & (y if i & 2 else ~y) & (z if i & 1 else ~z)
        out(c, mask, result)

    return run


def bitfield(ins: Instr, env):
    name, kind = ins.parts[0], ins.parts[-1]
    width = int(kind[1:])
    if name == "bfe":

        def extract(a, b, n):
            out = []
            for x, pos, size in zip(a, b & 255, n & 255):
                value = (int(x) & ((1 << width) - 1)) >> int(pos) & ((1 << int(size)) - 1)
                top = min(int(pos) + int(size) - 1, width - 1)
                if kind[0] == "s" and size and int(x) >> top & 1:
                    value |= -1 << int(size)
                out.append(value & ((1 << width) - 1))
            return np.array(out, f"u{width // 8}")

        return simple(ins, env, kind, extract, [kind, "u32", "u32"])

    def insert(a, b, pos, size):
        out = []
        for x, y, p, n in zip(a, b, pos & 255, size & 255):
            keep = ((1 << int(n)) - 1) << int(p)
            out.append(((int(y) & ~keep) | (int(x) << int(p) & keep)) & ((1 << width) - 1))
        return np.array(out, f"u{width // 8}")

    return simple(ins, env, kind, insert, [kind, kind, "u32", "u32"])


def count_bits(ins: Instr, env):
    name, kind = ins.parts[0], ins.parts[-1]
    width = int(kind[1:])
    low = (1 << width) - 1
    fn = {
        "popc": lambda v: v.bit_count(),
        "clz": lambda v: width - v.bit_length(),
        "brev": lambda v: int(format(v, f"0{width}b")[::-1], 2),
        "bfind": lambda v: v.bit_length() - 1,
    }[name]
    to = kind if name == "brev" else "u32"
    signed = kind[0] == "s"

    def run(a):
        values = [int(x) & low for x in a]
        if name == "bfind" and signed:
            values = [~v & low if v >> (width - 1) else v for v in values]
        return np.array([fn(v) & 0xFFFFFFFFFFFFFFFF for v in values], np.uint64).astype(DTYPES[to])

    return simple(ins, env, kind, run, to_kind=to)


def funnel(ins: Instr, env):
    left, clamp = ins.parts[1] == "l", ins.parts[2] == "clamp"

    def run(a, b, n):
        count = np.minimum(n, 32) if clamp else n & 31
        both = b.astype(np.uint64) << np.uint64(32) | a.astype(np.uint64)
        count = count.astype(np.uint64)
        return (both << count >> np.uint64(32) if left else both >> count).astype(np.uint32)

    return simple(ins, env, "b32", run)


# ---- memory ----


def _space(ins: Instr) -> str:
    for part in ins.parts:
        if part in ("global", "param", "local", "const"):
            return part
        if part.startswith("shared"):
            return "shared"
        if part.startswith("param"):
            return "param"
    return "generic"


def memory(ins: Instr, env):
    """ld and st of every space; addresses are checked lane by lane."""
    kind, load = ins.parts[-1], ins.parts[0] in ("ld", "ldu")
    space, size = _space(ins), np.dtype(DTYPES.get(kind, np.uint64)).itemsize
    if kind == "b128":
        return None
    mem = ins.operands[1] if load else ins.operands[0]
    data = ins.operands[0] if load else ins.operands[1]
    items = data.items if isinstance(data, Vec) else (data,)
    ends = [write(o, kind, env) for o in items] if load else [read(o, kind, env) for o in items]
    base, offset, total = bits64(mem.base, env), mem.offset, size * len(items)
    narrow = space == "shared"
    dtype = DTYPES[kind]

    def run(c, mask):
        lanes = LANES[ops.lane_mask(mask)]
        addrs = base(c).astype(np.int64) + offset
        if narrow:
            addrs &= FULL
        values = [np.zeros(32, dtype) for _ in items] if load else [end(c) for end in ends]
        for lane in lanes:
            target = c.bytes_at(int(addrs[lane]), total, (space, lane), ins, load)
            for i, value in enumerate(values):
                part = target[i * size : (i + 1) * size]
                if load:
                    value[lane] = part.view(dtype)[0]
                else:
                    part.view(f"u{size}")[0] = np.asarray(value[lane]).view(f"u{size}")
        if load:
            for end, value in zip(ends, values):
                end(c, mask, value)

    return run


class MemoryMixin:
    """Checked views of the memories, for the reference engine's warp."""

    def bytes_at(self, addr: int, size: int, place, ins: Instr, load: bool) -> np.ndarray:
        """`place`: (space, lane)."""
        space, lane = place
        what = "read" if load else "write"
        if addr % size:
            raise MisuseError(
                f"{ins.where}: {ins.op}: address {addr:#x} is not {size}-byte aligned"
            )
        if space == "generic" and addr >> 60 == 1:
            space, addr = "shared", addr & FULL
        if space == "generic" and addr >> 60 == 2:
            space, addr = "local", addr & FULL
        if space == "local":
            if addr < 0 or addr + size > self.local.shape[1]:
                raise OutOfBoundsError(
                    f"{ins.where}: {ins.op}: {what} at {addr:#x} of local memory"
                )
            return self.local[lane, addr : addr + size]
        if space == "shared":
            rank, offset = addr >> 24, addr & 0xFFFFFF
            if rank >= len(self.smem) or not 0x400 <= offset <= len(self.smem[rank]) - size:
                raise OutOfBoundsError(
                    f"{ins.where}: {ins.op}: {what} of {size} bytes at {addr:#x}"
                )
            if load:
                if not self.valid[rank][offset : offset + size].all():
                    if not self.ctx.unset_count:
                        self.ctx.unset_pc, self.ctx.unset_addr = self.pc, addr
                    self.ctx.unset_count += 1
            else:
                self.valid[rank][offset : offset + size] = self.ctx.mark & 0xFF
            return self.smem[rank][offset : offset + size]
        if space == "param":
            addr = self.param_address + addr if addr < 4096 else addr
        return self.memory.view(addr, size, ins, what)


# ---- address spaces and warp collectives ----


def cvta(ins: Instr, env):
    inner, out = bits64(ins.operands[1], env), write(ins.operands[0], "b64", env)
    if ins.has("local"):
        local = np.uint64(2 << 60)
        if ins.parts[1] == "to":
            return lambda c, mask: out(c, mask, inner(c) & ~local)
        return lambda c, mask: out(c, mask, inner(c) | local)
    if "shared" not in ins.op:
        return lambda c, mask: out(c, mask, inner(c))
    bit = np.uint64(ops.GENERIC_SHARED)
    if ins.parts[1] == "to":
        return lambda c, mask: out(c, mask, inner(c) & ~bit)
    return lambda c, mask: out(c, mask, inner(c) | bit)


def mapa(ins: Instr, env):
    wide = ins.parts[-1].endswith("64")
    address, rank = bits64(ins.operands[1], env), bits64(ins.operands[2], env)
    out = write(ins.operands[0], "b64" if wide else "b32", env)
    keep, shift24 = np.uint64(~0xFF000000 & (2**64 - 1)), np.uint64(24)
    return lambda c, mask: out(c, mask, (address(c) & keep) | rank(c) << shift24)


def getctarank(ins: Instr, env):
    address, out = bits64(ins.operands[1], env), write(ins.operands[0], "b32", env)
    return lambda c, mask: out(c, mask, (address(c) >> np.uint64(24)) & np.uint64(0xFF))


def shuffle(ins: Instr, env):
    first, second = ops.pair(ins.operands[0])
    mode = ins.parts[2]
    a, b, clamp = (bits32(o, env) for o in ins.operands[1:4])
    out, out_p = write(first, "b32", env), write(second, "pred", env)

    def run(c, mask):
        value, lane = a(c).copy(), LANES
        n, control = b(c).astype(np.int64), clamp(c).astype(np.int64)
        limit, segment = control & 31, control >> 8 & 31
        top, bottom = (lane & segment) | (limit & ~segment), lane & segment
        if mode == "up":
            source = lane - n
            ok = source >= top
        elif mode == "down":
            source = lane + n
            ok = source <= top
        elif mode == "bfly":
            source = lane ^ n
            ok = source <= top
        else:
            source = bottom | (n & ~segment & 31)
            ok = source <= top
        source = np.where(ok, source, lane) & 31
        out(c, mask, value[source])
        out_p(c, mask, ok)

    return run


def vote(ins: Instr, env):
    how = ins.parts[2]
    source, members = read(ins.operands[1], "pred", env), bits32(ins.operands[2], env)
    out = write(ins.operands[0], "b32" if how == "ballot" else "pred", env)

    def run(c, mask):
        inside = int(members(c)[ops.first_lane(mask)]) & mask
        bits = ops.bits_of(source(c)) & inside
        if how == "ballot":
            out(c, mask, np.full(32, bits, np.uint32))
            return
        result = {"any": bits != 0, "all": bits == inside, "uni": bits in (0, inside)}[how]
        out(c, mask, np.full(32, result))

    return run


def elect(ins: Instr, env):
    first, second = ops.pair(ins.operands[0])
    members = bits32(ins.operands[1], env)
    out, out_p = write(first, "b32", env), write(second, "pred", env)

    def run(c, mask):
        lane = ops.first_lane(int(members(c)[ops.first_lane(mask)]) & mask)
        out(c, mask, np.full(32, lane, np.uint32))
        out_p(c, mask, lane == LANES)

    return run


def redux(ins: Instr, env):
    name, kind = ins.parts[2], ins.parts[-1]
    source, out = read(ins.operands[1], kind, env), write(ins.operands[0], kind, env)
    fn = {
        "add": np.add,
        "min": np.fmin if kind == "f32" else np.minimum,
        "max": np.fmax if kind == "f32" else np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[name]

    def run(c, mask):
        value = source(c)[ops.lane_mask(mask)]
        if ins.has("abs"):
            value = np.abs(value)
        out(c, mask, np.full(32, fn.reduce(value).astype(value.dtype)))

    return run


def activemask(ins: Instr, env):
    out = write(ins.operands[0], "b32", env)
    return lambda c, mask: out(c, mask, np.full(32, mask, np.uint32))


SPECIAL_FORMS = {
    "mov": move,
    "cvt": convert,
    "setp": compare,
    "selp": select,
    "mad": mad,
    "prmt": permute,
    "lop3": lop3,
    "bfe": bitfield,
    "bfi": bitfield,
    "popc": count_bits,
    "clz": count_bits,
    "brev": count_bits,
    "bfind": count_bits,
    "shf": funnel,
    "ld": memory,
    "ldu": memory,
    "st": memory,
    "cvta": cvta,
    "mapa": mapa,
    "getctarank": getctarank,
    "shfl": shuffle,
    "vote": vote,
    "elect": elect,
    "redux": redux,
    "activemask": activemask,
}


def bind(ins: Instr, env):
    """`fn(core, mask)`, or None for an instruction that this engine doesn't know."""
    name, kind = ins.parts[0], ins.parts[-1]
    if name == "mad" and kind in FLOATS:
        return float_family(ins, env, kind)
    form = SPECIAL_FORMS.get(name)
    if form is not None:
        return form(ins, env)
    if kind == "pred" and name in ("and", "or", "xor", "not"):
        return logic_pred(ins, env)
    if kind in FLOATS or ins.op.startswith("fma.rn.f32"):
        return float_family(ins, env, kind)
    if kind not in DTYPES:
        return None
    if name in ("shl", "shr"):
        return simple(ins, env, kind, lambda a, n: shift(name, kind, a, n), [kind, "u32"])
    if name == "mul" and ins.has("wide"):
        wide = f"{kind[0]}{2 * int(kind[1:])}"
        fn = lambda a, b: a.astype(DTYPES[wide]) * b.astype(DTYPES[wide])  # noqa: E731
        return simple(ins, env, kind, fn, [kind, kind], wide)
    if name in ("not", "neg", "abs"):
        return simple(ins, env, kind, {"not": np.invert, "neg": np.negative, "abs": np.abs}[name])
    fn = int_op(name, kind, ins.parts)
    return simple(ins, env, kind, fn) if fn is not None else None
