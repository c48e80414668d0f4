"""Loads, stores and atomics: param, shared (of any CTA of the cluster), global, local, generic."""

from __future__ import annotations

from fa_cute.sim.jit.context import (
    LOCAL_WINDOW,
    MISALIGNED,
    OUT_OF_BOUNDS,
    SHARED_WINDOW,
    WRONG_CTA,
    offset_of,
)
from fa_cute.sim.jit.ir import ERROR, NEXT, PTR, WIDTHS, Fn, Val
from fa_cute.sim.jit.math import PRELUDE
from fa_cute.sim.jit.registry import INT_TYPES, Form, Spec, Unsupported, op

SPACES = ("shared", "global", "param", "local", "const")
_TYPE_BYTES = {"b8": 1, "b16": 2, "b32": 4, "b64": 8, "f16": 2, "bf16": 2, "f32": 4, "f64": 8}


# ---- address translation: a pointer, or null after setting the error ----


def _helper(name: str):
    def register(body):
        def text() -> str:
            f = Fn(f"fx_{name}", args=f"%ctx: {PTR}, %lane: i32, %addr: i64, %size: i64", ret=PTR)
            body(f, Val(f, "%lane", "i32"), Val(f, "%addr", "i64"), Val(f, "%size", "i64"))
            return f.text("internal ")

        PRELUDE[name] = text
        return body

    return register


def _null(f: Fn, code: int, lane: Val, address: Val) -> None:
    f.set_field("error", code)
    f.set_field("error_lane", lane)
    f.set_field("error_addr", address)
    f.give(f.emit(f"llvm.mlir.zero : {PTR}", PTR))


def _check_aligned(f: Fn, lane: Val, address: Val, size: Val) -> None:
    with f.when((address & (size - 1)).ne(0)):
        _null(f, MISALIGNED, lane, address)


def _shared(f: Fn, lane: Val, address: Val, size: Val, table: str) -> None:
    """Byte of a shared address; `table` is smem or smem_valid."""
    rank, offset = (address.lshr(24) & 0xFF).int("i32"), address & 0xFFFFFF
    with f.when(rank.cmp("uge", f.field("n_ranks"))):
        _null(f, WRONG_CTA, lane, address)
    low, high = f.field("smem_lo").int("i64"), f.field("smem_hi").int("i64")
    bad = offset.cmp("ult", low) | (offset + size).cmp("ugt", high)
    with f.when(bad):
        _null(f, OUT_OF_BOUNDS, lane, address)
    _check_aligned(f, lane, address, size)
    f.give(_rank_base(f, rank, table).gep(offset))


def _rank_base(f: Fn, rank: Val, table: str) -> Val:
    entry = f.ctx.gep(offset_of(table)[0]).gep(rank.int("i64").shl(3))
    return f.load(entry, PTR, 8)


@_helper("shared_byte")
def _shared_byte(f: Fn, lane: Val, address: Val, size: Val) -> None:
    _shared(f, lane, address, size, "smem")


@_helper("shared_own_byte")
def _shared_own_byte(f: Fn, lane: Val, address: Val, size: Val) -> None:
    with f.when((address.lshr(24) & 0xFF).int("i32").ne(f.field("rank"))):
        _null(f, WRONG_CTA, lane, address)
    _shared(f, lane, address, size, "smem")


@_helper("global_byte")
def _global_byte(f: Fn, lane: Val, address: Val, size: Val) -> None:
    _check_aligned(f, lane, address, size)
    table = f.field("extents", PTR)
    end = address + size

    def inside(index: Val) -> Val:
        entry = table.gep(index.int("i64").shl(4))
        low, high = f.load(entry, "i64"), f.load(entry.gep(8), "i64")
        return address.cmp("uge", low) & end.cmp("ule", high)

    count = f.field("n_extents")
    with f.when(count.ne(0)):
        last = f.field("last_extent")
        with f.when(inside(last)):
            f.give(f.emit(f"llvm.inttoptr {address.name} : i64 to {PTR}", PTR))
        index = f.alloca("i32")
        f.store(f.const(0, "i32"), index)
        head = f.block()
        f.br(head)
        f.at(head)
        current = f.load(index, "i32")
        with f.when(inside(current)):
            f.set_field("last_extent", current)
            f.give(f.emit(f"llvm.inttoptr {address.name} : i64 to {PTR}", PTR))
        following = current + 1
        f.store(following, index)
        after = f.block()
        f.cond(following.cmp("ult", count), head, after)
        f.at(after)
    _null(f, OUT_OF_BOUNDS, lane, address)


@_helper("local_byte")
def _local_byte(f: Fn, lane: Val, address: Val, size: Val) -> None:
    offset = address & 0xFFFFFFFF
    length = f.field("local_size").int("i64")
    with f.when((offset + size).cmp("ugt", length)):
        _null(f, OUT_OF_BOUNDS, lane, address)
    _check_aligned(f, lane, address, size)
    f.give(f.field("local", PTR).gep(lane.int("i64") * length + offset))


@_helper("param_byte")
def _param_byte(f: Fn, lane: Val, address: Val, size: Val) -> None:
    bad = (address + size).cmp("ugt", f.field("params_size").int("i64"))
    with f.when(bad | address.cmp("slt", 0)):
        _null(f, OUT_OF_BOUNDS, lane, address)
    f.give(f.field("params", PTR).gep(address))


@_helper("generic_byte")
def _generic_byte(f: Fn, lane: Val, address: Val, size: Val) -> None:
    window = address.lshr(60)
    rest = [Val(f, "%ctx", PTR), lane, address, size]
    with f.when(window.eq(SHARED_WINDOW)):
        f.give(f.call("shared_byte", rest, PTR))
    with f.when(window.eq(LOCAL_WINDOW)):
        f.give(f.call("local_byte", rest, PTR))
    f.give(f.call("global_byte", rest, PTR))


# ---- shadow of shared memory: which bytes were written ----


@_helper("note_unset")
def _note_unset(f: Fn, lane: Val, address: Val, size: Val) -> None:
    """Count a lane that read bytes nobody wrote; the loop fills in the instruction."""
    del lane, size
    count = f.field("unset_count")
    with f.when(count.eq(0)):
        f.set_field("unset_addr", address.int("i32"))
        f.set_field("unset_pc", f.field("pc"))
    f.set_field("unset_count", count + 1)
    f.give(f.emit(f"llvm.mlir.zero : {PTR}", PTR))


def _valid_pointer(f: Fn, address: Val) -> Val:
    rank, offset = (address.lshr(24) & 0xFF).int("i32"), address & 0xFFFFFF
    return _rank_base(f, rank, "smem_valid").gep(offset)


_ONES, _TOPS = 0x0101010101010101, 0x8080808080808080


def _pieces(size: int) -> list[tuple[int, int]]:
    """(offset, bytes) of the integers that cover `size` bytes."""
    return [(o, min(8, size)) for o in range(0, size, 8)]


def mark_valid(f: Fn, address: Val, size: int) -> None:
    pointer = _valid_pointer(f, address)
    for offset, width in _pieces(size):
        f.store(f.field("mark").int(f"i{8 * width}"), pointer.gep(offset), 1)


def check_valid(f: Fn, lane: Val, address: Val, size: int) -> None:
    pointer = _valid_pointer(f, address)
    complete = None
    for offset, width in _pieces(size):
        ones, tops = _ONES & ((1 << 8 * width) - 1), _TOPS & ((1 << 8 * width) - 1)
        marks = f.load(pointer.gep(offset), f"i{8 * width}", 1)
        good = ((marks - ones) & ~marks & tops).eq(0)  # no byte is zero
        complete = good if complete is None else complete & good
    with f.when(~complete):
        f.call("note_unset", [f.ctx, lane, address, f.const(size, "i64")], PTR)


def _when_shared(f: Fn, space: str, address: Val, body) -> None:
    """Run `body` if the access is to shared memory and the shadow exists."""
    if space in ("shared", "generic"):
        test = f.field("track_valid").ne(0)
        if space == "generic":
            test = test & address.lshr(60).eq(SHARED_WINDOW)
        with f.when(test):
            body()


# ---- forms ----


def _space(form: Form) -> tuple[str, str]:
    """(space, translation function)."""
    for part in form.parts:
        name, _, reach = part.partition("::")
        if name in SPACES:
            if name == "shared":
                return name, "shared_byte" if reach == "cluster" else "shared_own_byte"
            return name, {"const": "global", "param": "param"}.get(name, name) + "_byte"
    return "generic", "generic_byte"


def _element(form: Form) -> tuple[int, bool, int]:
    """(bytes, signed, count) of the elements of a vector."""
    count = next((int(p[1:]) for p in form.parts if p in ("v2", "v4", "v8")), 1)
    name = form.type
    size = _TYPE_BYTES.get("b" + name[1:] if name in INT_TYPES else name)
    if size is None:
        raise Unsupported(f".{name}")
    return size, name[0] == "s", count


def _known(form: Form) -> None:
    for part in form.parts[1:-1]:
        known = part in ("v2", "v4", "v8") or part.split("::")[0] in SPACES
        if not known:
            raise Unsupported(f".{part}")


def _address(f: Fn, slot: int, lane: Val, width: int) -> Val:
    """Base of one lane plus the constant offset of the instruction."""
    scale = 2 if width == 32 else 3
    raw = f.load(f.row(slot).gep(lane.int("i64").shl(scale)), f"i{width}")
    if width == 64:
        return raw + f.imm()
    return (raw + f.imm().int("i32")).int("i64")


def _address_width(form: Form, index: int) -> int:
    return form.bits[index] if form.bits and form.bits[index] else 64


def _cell(f: Fn, slot: int, lane: Val, width: int) -> Val:
    """Where a lane's value of an operand row is."""
    return f.row(slot).gep(lane.int("i64").shl(3 if width == 64 else 2))


def translate(f: Fn, helper: str, lane: Val, address: Val, size: int) -> Val:
    pointer = f.call(helper, [f.ctx, lane, address, f.const(size, "i64")], PTR)
    null = f.emit(f"llvm.mlir.zero : {PTR}", PTR)
    failed = f.emit(f'llvm.icmp "eq" {pointer.name}, {null.name} : {PTR}', "i1")
    with f.when(failed):
        f.done(ERROR)
    return pointer


@op("ld", "ldu", sized=True)
def load(form: Form) -> Spec:
    _known(form)
    space, helper = _space(form)
    size, signed, count = _element(form)
    widths = [max(w, 32) if w else 64 for w in form.bits[:count]]
    kinds = tuple(f"=i{w}" for w in widths)
    if space == "param":
        return Spec((*kinds, "mem"), lambda f: _load_param(f, size, signed, form.bits[:count]))
    base_width = _address_width(form, count)

    def emit(f: Fn) -> None:
        with f.each_lane() as lane:
            address = _address(f, count, lane, base_width)
            pointer = translate(f, helper, lane, address, size * count)
            _when_shared(f, space, address, lambda: check_valid(f, lane, address, size * count))
            for index in range(count):
                raw = f.load(pointer.gep(size * index), f"i{8 * size}")
                value = _extended(raw, signed, form.bits[index])
                f.store(value, _cell(f, index, lane, widths[index]))
        f.done()

    return Spec((*kinds, "mem"), emit)


def _extended(raw: Val, signed: bool, register: int) -> Val:
    """A loaded element in its register: extended to the declared width, zero above."""
    wide = "i64" if register == 64 or register == 0 else "i32"
    if signed and register == 16 and raw.width < 16:
        raw = raw.int("i16", True)
        signed = False
    if signed and register == 16:
        signed = False
    return raw.int(wide, signed)


def _load_param(f: Fn, size: int, signed: bool, bits: tuple[int, ...]) -> None:
    """One address for the warp, its first lane's: parameters are indexed by constants."""
    count = len(bits)
    lane = f.intrinsic("cttz", [f.mask], "i32", "<{is_zero_poison = true}>")
    address = _address(f, count, lane, 64)
    pointer = translate(f, "param_byte", lane, address, size * count)
    for index in range(count):
        raw = f.load(pointer.gep(size * index), f"i{8 * size}", 1)
        f.masked_store(f.splat(_extended(raw, signed, bits[index])), f.row(index))
    f.done(NEXT)


@op("st", sized=True)
def store(form: Form) -> Spec:
    _known(form)
    space, helper = _space(form)
    size, _, count = _element(form)
    if space in ("param", "const"):
        raise Unsupported(f".{space}")
    base_width = _address_width(form, 0)
    widths = [64 if size == 8 or w == 64 else 32 for w in form.bits[1 : count + 1]]

    def emit(f: Fn) -> None:
        with f.each_lane() as lane:
            address = _address(f, 0, lane, base_width)
            pointer = translate(f, helper, lane, address, size * count)
            for index in range(count):
                value = f.load(_cell(f, 1 + index, lane, widths[index]), f"i{widths[index]}")
                f.store(value.int(f"i{8 * size}"), pointer.gep(size * index))
            _when_shared(f, space, address, lambda: mark_valid(f, address, size * count))
        f.done()

    return Spec(("mem", *(f"i{w}" for w in widths)), emit)


_ATOMS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")


def _combine(name: str, ty: str, old: Val, value: Val, other: Val | None) -> Val:
    signed = ty[0] == "s"
    if name == "add":
        return old + value
    if name in ("min", "max"):
        return old.call(("s" if signed else "u") + name, value)
    if name in ("and", "or", "xor"):
        return old.binary(name, value)
    if name == "exch":
        return value
    if name == "cas":
        return old.eq(value).select(other, old)
    if name == "inc":
        return old.cmp("uge", value).select(0, old + 1)
    wraps = old.eq(0) | old.cmp("ugt", value)
    return wraps.select(value, old - 1)


@op("atom", "red", sized=True)
def atomic(form: Form) -> Spec:
    """Lane after lane; the simulator runs one warp at a time, so each is atomic by itself."""
    name = next((p for p in form.parts[1:] if p in _ATOMS), None)
    known = {*_ATOMS, form.type}
    for part in form.parts[1:]:
        if part not in known and part.split("::")[0] not in SPACES:
            raise Unsupported(f".{part}")
    is_float = form.type in ("f32", "f64")
    if (
        name is None
        or (is_float and name != "add")
        or (not is_float and form.type not in INT_TYPES)
    ):
        raise Unsupported(form.key)
    space, helper = _space(form)
    elem = form.type if is_float else INT_TYPES[form.type][0]
    width = WIDTHS[elem]
    if width < 32:
        raise Unsupported(form.key)
    first = 1 if form.op == "atom" else 0
    base_width = _address_width(form, first)

    def emit(f: Fn) -> None:
        with f.each_lane() as lane:
            address = _address(f, first, lane, base_width)
            pointer = translate(f, helper, lane, address, width // 8)
            size = width // 8
            _when_shared(f, space, address, lambda: check_valid(f, lane, address, size))
            old = f.load(pointer, elem)
            value = f.load(_cell(f, first + 1, lane, width), elem)
            other = f.load(_cell(f, first + 2, lane, width), elem) if name == "cas" else None
            f.store(_combine(name, form.type, old, value, other), pointer)
            if first:
                f.store(old, _cell(f, 0, lane, width))
        f.done()

    kinds = [elem] * (2 if name == "cas" else 1)
    return Spec((*([f"={elem}"] if first else []), "mem", *kinds), emit)
