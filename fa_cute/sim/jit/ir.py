"""A small writer of LLVM-dialect MLIR text: values with operators, blocks, and rows of 32 lanes.

A native op function has the signature `i32 f(base, record, mask, ctx)`: `base` points to the
register file of one warp, `record` to the 64 bytes that describe the instruction, `mask` has a bit
per lane that executes, `ctx` is the warp's `Context`.
"""

from __future__ import annotations

import struct

from fa_cute.sim.jit.context import RECORD_IMM, RECORD_NUM_SLOTS, RECORD_SLOTS, offset_of

LANES = 32
WIDTHS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "i128": 128}
WIDTHS |= {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}
PTR = "!llvm.ptr"
# Two elements in one register: (element, elements of a row, register).
PACKED = {"f32x2": ("f32", 64, "i64")}
PACKED |= {k + "x2": (k, 64, "i32") for k in ("f16", "bf16", "i16")}

# What an op function returns to the interpreter's loop.
NEXT, BRANCH, STOP, LEAVE, ERROR, CONVERGE = range(6)


def vec(elem: str) -> str:
    return f"vector<{LANES}x{elem}>"


def elem_of(ty: str) -> str:
    return ty[:-1].rsplit("x", 1)[1] if ty.startswith("vector") else ty


def like(ty: str, elem: str) -> str:
    """The type of the same shape with other elements."""
    return f"{ty.split('x')[0]}x{elem}>" if ty.startswith("vector") else elem


class Val:
    """An SSA value; Python numbers beside it in an operator become constants of its type."""

    __slots__ = ("f", "name", "ty")

    def __init__(self, f: Fn, name: str, ty: str):
        self.f, self.name, self.ty = f, name, ty

    @property
    def elem(self) -> str:
        return elem_of(self.ty)

    @property
    def is_float(self) -> bool:
        return "f" in self.elem

    @property
    def width(self) -> int:
        return WIDTHS[self.elem]

    def binary(self, op: str, other) -> Val:
        other = self.f.lift(other, self.ty)
        return self.f.emit(f"llvm.{op} {self.name}, {other.name} : {self.ty}", self.ty)

    def __add__(self, other):
        return self.binary("fadd" if self.is_float else "add", other)

    def __sub__(self, other):
        return self.binary("fsub" if self.is_float else "sub", other)

    def __mul__(self, other):
        return self.binary("fmul" if self.is_float else "mul", other)

    def __truediv__(self, other):
        return self.binary("fdiv", other)

    def __and__(self, other):
        return self.binary("and", other)

    def __or__(self, other):
        return self.binary("or", other)

    def __xor__(self, other):
        return self.binary("xor", other)

    def __invert__(self):
        return self.binary("xor", -1)

    def __neg__(self):
        if self.is_float:
            return self.f.emit(f"llvm.fneg {self.name} : {self.ty}", self.ty)
        return self.f.lift(0, self.ty) - self

    def shl(self, other):
        return self.binary("shl", other)

    def lshr(self, other):
        return self.binary("lshr", other)

    def ashr(self, other):
        return self.binary("ashr", other)

    def cmp(self, predicate: str, other) -> Val:
        other = self.f.lift(other, self.ty)
        op = "fcmp" if self.is_float else "icmp"
        text = f'llvm.{op} "{predicate}" {self.name}, {other.name} : {self.ty}'
        return self.f.emit(text, like(self.ty, "i1"))

    def eq(self, other) -> Val:
        return self.cmp("oeq" if self.is_float else "eq", other)

    def ne(self, other) -> Val:
        return self.cmp("une" if self.is_float else "ne", other)

    def isnan(self) -> Val:
        return self.cmp("uno", self)

    def cast(self, op: str, elem: str) -> Val:
        """`op` one of trunc, zext, sext, fpext, fptrunc, sitofp, uitofp, bitcast."""
        ty = like(self.ty, elem)
        return self.f.emit(f"llvm.{op} {self.name} : {self.ty} to {ty}", ty)

    def int(self, elem: str, signed: bool = False) -> Val:
        """Resize an integer."""
        if self.elem == elem:
            return self
        wider = WIDTHS[elem] > self.width
        return self.cast(("sext" if signed else "zext") if wider else "trunc", elem)

    def bits(self, elem: str) -> Val:
        """The same bits as another type of this width."""
        return self if self.elem == elem else self.cast("bitcast", elem)

    def select(self, yes, no) -> Val:
        if not isinstance(yes, Val):
            yes = self.f.lift(yes, no.ty)
        no = self.f.lift(no, yes.ty)
        text = f"llvm.select {self.name}, {yes.name}, {no.name} : {self.ty}, {yes.ty}"
        return self.f.emit(text, yes.ty)

    def call(self, name: str, *others) -> Val:
        """An intrinsic whose operands and result have this value's type."""
        args = [self, *(self.f.lift(o, self.ty) for o in others)]
        return self.f.intrinsic(name, args, self.ty)

    def gep(self, index) -> Val:
        """Pointer plus bytes."""
        if isinstance(index, int):
            if index == 0:
                return self
            text = f"llvm.getelementptr {self.name}[{index}] : ({PTR}) -> {PTR}, i8"
        else:
            index = index.int("i64")
            text = f"llvm.getelementptr {self.name}[{index.name}] : ({PTR}, i64) -> {PTR}, i8"
        return self.f.emit(text, PTR)


class Fn:
    """The text of one function while it is being written."""

    # Whether the processor stores under a mask of bits at no cost (AVX-512 does).
    predicated_stores = True

    def __init__(self, name: str, sig: tuple[str, ...] = (), args: str | None = None, ret="i32"):
        self.name, self.sig, self.ret = name, sig, ret
        self.params = args or f"%base: {PTR}, %rec: {PTR}, %mask: i32, %ctx: {PTR}"
        self.lines: list[str] = []
        self.header: list[str] = []
        self.count = 0
        self.consts: dict[tuple, Val] = {}
        self.base, self.rec = Val(self, "%base", PTR), Val(self, "%rec", PTR)
        self.ctx, self.mask = Val(self, "%ctx", PTR), Val(self, "%mask", "i32")
        self.lanes_of_mask: Val | None = None
        self.needs: set[str] = set()  # functions of the prelude that it calls

    # ---- plain emission ----
    def emit(self, text: str, ty: str) -> Val:
        self.count += 1
        name = f"%v{self.count}"
        self.lines.append(f"{name} = {text}")
        return Val(self, name, ty)

    def const(self, value, ty: str) -> Val:
        """A constant: an int, a float, or `Bits` of a float, in every element."""
        key = (ty, repr(value))
        if key in self.consts:
            return self.consts[key]
        elem = elem_of(ty)
        if "f" in elem:
            bits = value.value if isinstance(value, Bits) else float_bits(value, elem)
            text = f"0x{bits:0{WIDTHS[elem] // 4}X}"
        elif elem == "i1":
            text = "true" if value else "false"
        else:
            width = WIDTHS[elem]
            value &= (1 << width) - 1
            text = str(value - (1 << width) if value >> (width - 1) else value)
        if ty.startswith("vector"):
            text = f"dense<{text}> : {ty}"
        elif elem != "i1":
            text = f"{text} : {ty}"
        self.count += 1
        name = f"%v{self.count}"
        self.header.append(f"{name} = llvm.mlir.constant({text}) : {ty}")
        self.consts[key] = value = Val(self, name, ty)
        return value

    def lift(self, value, ty: str) -> Val:
        return value if isinstance(value, Val) else self.const(value, ty)

    def lanes(self, values: list[int], elem: str = "i32") -> Val:
        """A constant row with its own value per lane."""
        ty = vec(elem)
        text = ", ".join(map(str, values))
        return self.emit(f"llvm.mlir.constant(dense<[{text}]> : {ty}) : {ty}", ty)

    def intrinsic(self, name: str, args: list[Val], ty: str, attrs: str = "") -> Val:
        names = ", ".join(a.name for a in args)
        types = ", ".join(a.ty for a in args)
        return self.emit(f'"llvm.intr.{name}"({names}) {attrs} : ({types}) -> {ty}', ty)

    def call(self, name: str, args: list[Val], ty: str) -> Val:
        """Call a function of the prelude."""
        self.needs.add(name)
        names = ", ".join(a.name for a in args)
        types = ", ".join(a.ty for a in args)
        return self.emit(f"llvm.call @fx_{name}({names}) : ({types}) -> {ty}", ty)

    def splat(self, value: Val) -> Val:
        """A scalar in every lane."""
        ty = vec(value.ty)
        undef = self.emit(f"llvm.mlir.undef : {ty}", ty)
        zero = self.const(0, "i32")
        text = f"llvm.insertelement {value.name}, {undef.name}[{zero.name} : i32] : {ty}"
        first = self.emit(text, ty)
        zeros = ", ".join("0" for _ in range(LANES))
        return self.emit(f"llvm.shufflevector {first.name}, {undef.name} [{zeros}] : {ty}", ty)

    def load(self, pointer: Val, ty: str, align: int = 0) -> Val:
        align = align or max(1, WIDTHS.get(ty, 64) // 8)
        return self.emit(
            f"llvm.load {pointer.name} {{alignment = {align} : i64}} : {PTR} -> {ty}", ty
        )

    def store(self, value: Val, pointer: Val, align: int = 0) -> None:
        align = align or max(1, WIDTHS.get(value.ty, 64) // 8)
        attrs = f"{{alignment = {align} : i64}}"
        self.lines.append(f"llvm.store {value.name}, {pointer.name} {attrs} : {value.ty}, {PTR}")

    def alloca(self, ty: str, count: int = 1, align: int = 64) -> Val:
        self.count += 1
        name = f"%v{self.count}"
        size, attrs = self.const(count, "i64"), f"{{alignment = {align} : i64}}"
        self.header.append(f"{name} = llvm.alloca {size.name} x {ty} {attrs} : (i64) -> {PTR}")
        return Val(self, name, PTR)

    # ---- control flow ----
    def block(self) -> str:
        self.count += 1
        return f"^b{self.count}"

    def at(self, label: str) -> None:
        self.lines.append(f"{label}:")

    def br(self, label: str) -> None:
        self.lines.append(f"llvm.br {label}")

    def cond(self, test: Val, yes: str, no: str) -> None:
        self.lines.append(f"llvm.cond_br {test.name}, {yes}, {no}")

    def when(self, test: Val):
        """`with f.when(test):` emits its body under a condition."""
        return _When(self, test)

    def each_lane(self, mask: Val | None = None):
        """`with f.each_lane() as lane:` repeats its body for each bit of the mask, lowest first."""
        return _EachLane(self, mask or self.mask)

    def done(self, code: int = NEXT) -> None:
        self.lines.append(f"llvm.return {self.const(code, self.ret).name} : {self.ret}")

    def give(self, value: Val) -> None:
        self.lines.append(f"llvm.return {value.name} : {value.ty}")

    # ---- record, context, rows ----
    def slot(self, index: int) -> Val:
        """Offset of an operand; those that the record has no room for are in a table behind it."""
        if index < RECORD_NUM_SLOTS:
            return self.load(self.rec.gep(RECORD_SLOTS + 4 * index), "i32")
        more = self.load(self.rec.gep(RECORD_IMM), PTR)
        return self.load(more.gep(4 * (index - RECORD_NUM_SLOTS)), "i32")

    def imm(self) -> Val:
        return self.load(self.rec.gep(RECORD_IMM), "i64")

    def field(self, name: str, ty: str | None = None) -> Val:
        """A field of the context."""
        offset, size = offset_of(name)
        return self.load(self.ctx.gep(offset), ty or f"i{8 * size}")

    def set_field(self, name: str, value) -> None:
        offset, size = offset_of(name)
        self.store(self.lift(value, f"i{8 * size}"), self.ctx.gep(offset))

    def row(self, index: int) -> Val:
        """Pointer to the row of an operand."""
        return self.base.gep(self.slot(index).int("i64"))

    def lane_mask(self) -> Val:
        if self.lanes_of_mask is None:
            ty = vec("i1")
            self.header.append(f"%lanes = llvm.bitcast %mask : i32 to {ty}")
            self.lanes_of_mask = Val(self, "%lanes", ty)
        return self.lanes_of_mask

    def to_lanes(self, mask: Val) -> Val:
        return self.emit(f"llvm.bitcast {mask.name} : i32 to {vec('i1')}", vec("i1"))

    def to_mask(self, lanes: Val) -> Val:
        return self.emit(f"llvm.bitcast {lanes.name} : {vec('i1')} to i32", "i32")

    def arg(self, index: int) -> Val:
        """A source operand, as its signature says; a predicate comes as an i32 mask."""
        kind = self.sig[index]
        if kind == "pred":
            slot = self.slot(index)
            value = self.load(self.base.gep((slot & -4).int("i64")), "i32")
            return value ^ (self.const(0, "i32") - (slot & 1))
        if kind in PACKED:
            elem, lanes, _ = PACKED[kind]
            return self.load(self.row(index), f"vector<{lanes}x{elem}>", 64)
        if WIDTHS[kind] == 64:
            return self.load(self.row(index), vec(kind), 64)
        if WIDTHS[kind] == 32:
            return self.load(self.row(index), vec(kind), 64)
        low = self.load(self.row(index), vec("i32"), 64).int(f"i{WIDTHS[kind]}")
        return low.bits(kind)

    def args(self, *indices: int) -> list[Val]:
        return [self.arg(i) for i in indices]

    def out(self, index: int, value: Val, signed: bool = False) -> None:
        """Write a destination row (or predicate) in the executing lanes."""
        kind = self.sig[index].lstrip("=")
        if kind == "pred":
            self.out_pred(index, value)
            return
        if kind in PACKED:
            ty = vec(PACKED[kind][2])
            packed = self.emit(f"llvm.bitcast {value.name} : {value.ty} to {ty}", ty)
            self.masked_store(packed, self.row(index))
            return
        wide = "i64" if kind in ("i64", "f64") else "i32"
        if value.is_float:
            value = value.bits(f"i{value.width}")
        value = value.int(wide, signed)
        self.masked_store(value, self.row(index))

    def masked_store(self, value: Val, pointer: Val) -> None:
        if self.predicated_stores:
            mask = self.lane_mask()
            self.lines.append(
                f'"llvm.intr.masked.store"({value.name}, {pointer.name}, {mask.name}) '
                f"<{{alignment = 64 : i32}}> : ({value.ty}, {PTR}, {mask.ty}) -> ()"
            )
            return
        whole, part, after = self.block(), self.block(), self.block()
        self.cond(self.mask.eq(-1), whole, part)
        self.at(whole)
        self.store(value, pointer, 64)
        self.br(after)
        self.at(part)
        old = self.load(pointer, value.ty, 64)
        self.store(self.lane_mask().select(value, old), pointer, 64)
        self.br(after)
        self.at(after)

    def out_pred(self, index: int, value: Val) -> None:
        if value.ty != "i32":
            value = self.to_mask(value)
        pointer = self.row(index)
        old = self.load(pointer, "i32")
        self.store((value & self.mask) | (old & ~self.mask), pointer)

    def fail(self, code: int, lane: Val, address: Val) -> None:
        """Leave with an error; the loop adds the instruction."""
        self.set_field("error", code)
        self.set_field("error_lane", lane)
        self.set_field("error_addr", address.int("i64"))
        self.done(ERROR)

    def text(self, linkage: str = "") -> str:
        body = "\n".join([*self.header, *self.lines])
        ret = f" -> {self.ret}" if self.ret else ""
        # The engine wraps each function in another of its own, into which nothing must be inlined.
        attributes = "" if linkage else "attributes {no_inline} "
        return f"llvm.func {linkage}@{self.name}({self.params}){ret} {attributes}{{\n{body}\n}}\n"


class Bits:
    """A float constant given by its pattern."""

    def __init__(self, value: int):
        self.value = value

    def __repr__(self) -> str:
        return f"Bits({self.value:#x})"


def float_bits(value: float, elem: str) -> int:
    if elem == "f64":
        return struct.unpack("<Q", struct.pack("<d", value))[0]
    if elem == "f32":
        return struct.unpack("<I", struct.pack("<f", value))[0]
    if elem == "f16":
        return struct.unpack("<H", struct.pack("<e", value))[0]
    return struct.unpack("<I", struct.pack("<f", value))[0] >> 16


class _When:
    def __init__(self, f: Fn, test: Val):
        self.f, self.test = f, test

    def __enter__(self) -> None:
        yes, self.after = self.f.block(), self.f.block()
        self.f.cond(self.test, yes, self.after)
        self.f.at(yes)

    def __exit__(self, *exc) -> None:
        if not self.f.lines[-1].startswith(("llvm.return", "llvm.br", "llvm.cond_br")):
            self.f.br(self.after)
        self.f.at(self.after)


class _EachLane:
    def __init__(self, f: Fn, mask: Val):
        self.f, self.mask = f, mask

    def __enter__(self) -> Val:
        f = self.f
        self.left = f.alloca("i32")
        f.store(self.mask, self.left)
        self.head, body, self.after = f.block(), f.block(), f.block()
        f.br(self.head)
        f.at(self.head)
        left = f.load(self.left, "i32")
        f.cond(left.ne(0), body, self.after)
        f.at(body)
        lane = f.intrinsic("cttz", [left], "i32", "<{is_zero_poison = true}>")
        f.store(left & (left - 1), self.left)
        return lane

    def __exit__(self, *exc) -> None:
        self.f.br(self.head)
        self.f.at(self.after)
