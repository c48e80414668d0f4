"""ldmatrix, stmatrix and movmatrix of 16-bit 8x8 matrices.

The 16 bytes of row i of all matrices of an instruction, in the order of the lanes that give their
addresses, are the registers of the fragment: lanes 4i .. 4i + 3. Only `.trans` has work to do.
"""

from __future__ import annotations

from fa_cute.sim.jit.context import PARTIAL_WARP
from fa_cute.sim.jit.ir import NEXT, Fn, Val, vec
from fa_cute.sim.jit.memory import check_valid, mark_valid, translate
from fa_cute.sim.jit.registry import Form, Spec, Unsupported, op

_ROW_BYTES = 16


def _transposed(f: Fn, pointer: Val) -> Val:
    """A fragment in memory with its 8x8 halves transposed."""
    halves = f.load(pointer, "vector<64xi16>", 64)
    order = ", ".join(str((i % 8) * 8 + i // 8) for i in range(64))
    text = f"llvm.shufflevector {halves.name}, {halves.name} [{order}] : {halves.ty}"
    return f.emit(
        f"llvm.bitcast {f.emit(text, halves.ty).name} : {halves.ty} to {vec('i32')}", vec("i32")
    )


def _need_whole_warp(f: Fn) -> None:
    with f.when(f.mask.ne(-1)):
        f.fail(PARTIAL_WARP, f.const(0, "i32"), f.const(0, "i64"))


def _count(form: Form) -> int:
    """Number of matrices; raises Unsupported for what Python handles."""
    form.rest("sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16")
    number = next((int(p[1]) for p in form.parts if p in ("x1", "x2", "x4")), 0)
    if not number or not form.has("shared", "shared::cta") or not form.has("m8n8"):
        raise Unsupported(form.key)
    return number


def _address(f: Fn, addresses: Val, row: Val, width: int) -> Val:
    shift = 3 if width == 64 else 2
    value = f.load(addresses.gep(row.int("i64").shl(shift)), f"i{width}")
    return value + f.imm() if width == 64 else (value + f.imm().int("i32")).int("i64")


def _each_row(f: Fn, slot: int, width: int, number: int, body) -> None:
    """`body(address, pointer, cell offset)` for each row of each matrix."""
    kept = f.alloca(vec(f"i{width}"))  # the address register may be a destination too
    f.store(f.load(f.row(slot), vec(f"i{width}"), 64), kept, 64)
    with f.each_lane(f.const((1 << 8 * number) - 1, "i32")) as row:
        address = _address(f, kept, row, width)
        pointer = translate(f, "shared_own_byte", row, address, _ROW_BYTES)
        body(row, address, pointer, row.int("i64").shl(4))


@op("ldmatrix", sized=True)
def ldmatrix(form: Form) -> Spec:
    number = _count(form)
    width = form.bits[-1] or 64

    def emit(f: Fn) -> None:
        _need_whole_warp(f)
        cells = f.alloca("i8", 128 * number)

        def read(row: Val, address: Val, pointer: Val, offset: Val) -> None:
            with f.when(f.field("track_valid").ne(0)):
                check_valid(f, row, address, _ROW_BYTES)
            f.store(f.load(pointer, "i128", 16), cells.gep(offset), 16)

        _each_row(f, number, width, number, read)
        for index in range(number):
            tile = cells.gep(128 * index)
            value = _transposed(f, tile) if form.has("trans") else f.load(tile, vec("i32"), 64)
            f.out(index, value)
        f.done(NEXT)

    return Spec((*["=i32"] * number, "mem"), emit)


@op("stmatrix", sized=True)
def stmatrix(form: Form) -> Spec:
    number = _count(form)
    width = form.bits[0] or 64

    def emit(f: Fn) -> None:
        _need_whole_warp(f)
        cells = f.alloca("i8", 128 * number)
        for index in range(number):
            tile = cells.gep(128 * index)
            value = _transposed(f, f.row(1 + index)) if form.has("trans") else f.arg(1 + index)
            f.store(value, tile, 64)

        def write(row: Val, address: Val, pointer: Val, offset: Val) -> None:
            f.store(f.load(cells.gep(offset), "i128", 16), pointer, 16)
            with f.when(f.field("track_valid").ne(0)):
                mark_valid(f, address, _ROW_BYTES)

        _each_row(f, 0, width, number, write)
        f.done(NEXT)

    return Spec(("mem", *["i32"] * number), emit)


@op("movmatrix")
def movmatrix(form: Form) -> Spec:
    form.rest("sync", "aligned", "m8n8", "trans", "b16")

    def emit(f: Fn) -> None:
        _need_whole_warp(f)
        f.out(0, _transposed(f, f.row(1)))
        f.done(NEXT)

    return Spec(("=i32", "i32"), emit)
