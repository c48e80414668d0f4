"""ldmatrix, stmatrix and movmatrix: 8x8 tiles between shared memory and register fragments."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fa_cute.errors import MisuseError, UnknownInstructionError
from fa_cute.sim.handlers import handles
from fa_cute.sim.memory import place
from fa_cute.sim.operands import addresses, lanes32, write32
from fa_cute.sim.smem_ops import CHUNK_TYPE, chunk_view
from fa_cute.sim.tmem_ops import register_rows, whole_warp

if TYPE_CHECKING:
    from fa_cute.sim.ptx import Instr

_OFFSET = np.uint64(0xFFFFFF)


def _tile(ins: Instr) -> tuple[str, int, bool]:
    """(shape and type, number of matrices, transposed)."""
    shape = next((p for p in ins.parts if p in ("m8n8", "m16n16", "m16n8")), None)
    num = next((int(p[1]) for p in ins.parts if p in ("x1", "x2", "x4")), None)
    dtype = ins.parts[-1]
    if shape is None or num is None or (shape, dtype) not in _ROWS:
        raise UnknownInstructionError(f"{ins.where}: {ins.op}")
    return f"{shape}.{dtype}", num, ins.has("trans")


# rows of 16 bytes per matrix
_ROWS = {("m8n8", "b16"): 8, ("m16n16", "b8"): 16, ("m16n8", "b8"): 8}


def _row_chunks(ins: Instr, k, operand, rows: int):
    """`fn(warp) -> chunk numbers` of the rows that the first `rows` lanes point at, checked."""
    address_of = addresses(operand, k)

    def chunks(warp, what: str) -> np.ndarray:
        offsets = (address_of(warp)[:rows] & _OFFSET).astype(np.intp)
        if (offsets & 15).any():
            raise MisuseError(f"{place(ins)}a row address is not 16-byte aligned")
        low, high = int(offsets.min()), int(offsets.max()) + 16
        warp.cta.check_smem(low, high - low, ins, what)
        return offsets >> 4

    return chunks


@handles("ldmatrix.sync")
def bind_ldmatrix(ins: Instr, k):
    kind, num, transposed = _tile(ins)
    rows = num * _ROWS[tuple(kind.split("."))]
    chunks_of = _row_chunks(ins, k, ins.operands[1], rows)
    target = list(register_rows(ins.operands[0]))

    def step(warp, mask):
        whole_warp(mask, warp, ins)
        cta = warp.cta
        chunks = chunks_of(warp, "ldmatrix")
        valid = np.take(chunk_view(cta.smem_valid), chunks).view(np.uint8)
        if not valid.all():
            address = cta.window | int(chunks[0]) << 4
            cta.machine.note_unset("shared", ins, address, int((valid == 0).sum()))
        if cta.machine.races is not None:
            cta.machine.races.chunks(cta, chunks, False)
        cells = np.take(chunk_view(cta.smem), chunks)
        if kind == "m16n16.b8":
            warp.r32[target] = _fragment_b8(cells.view(np.uint8).reshape(num, 16, 16))
        else:
            warp.r32[target] = _fragment_b16(cells.view(np.uint16).reshape(num, 8, 8), transposed)

    return step


def _fragment_b16(tiles: np.ndarray, transposed: bool) -> np.ndarray:
    """(num, 8, 8) halves -> (num, 32) registers: thread t has row t/4, columns 2(t%4) and the
    next.
    """
    if transposed:
        tiles = np.ascontiguousarray(tiles.transpose(0, 2, 1))
    return tiles.view(np.uint32).reshape(len(tiles), 32)


def _fragment_b8(tiles: np.ndarray) -> np.ndarray:
    """(num, 16, 16) bytes -> (2 num, 32): byte i of register h is M[4(t%4)+i][t/4+8h]."""
    cells = tiles.reshape(len(tiles), 4, 4, 2, 8)  # matrix, t%4, i, h, t/4
    regs = np.ascontiguousarray(cells.transpose(0, 3, 4, 1, 2))
    return regs.view(np.uint32).reshape(2 * len(tiles), 32)


@handles("stmatrix.sync")
def bind_stmatrix(ins: Instr, k):
    kind, num, transposed = _tile(ins)
    rows = num * 8
    chunks_of = _row_chunks(ins, k, ins.operands[0], rows)
    source = list(register_rows(ins.operands[1]))

    def step(warp, mask):
        whole_warp(mask, warp, ins)
        cta = warp.cta
        chunks = chunks_of(warp, "stmatrix")
        regs = warp.r32[source]
        if kind == "m16n8.b8":
            cells = _rows_b8(regs)
        else:
            cells = regs.view(np.uint16).reshape(num, 8, 8)
            if transposed:
                cells = np.ascontiguousarray(cells.transpose(0, 2, 1))
        chunk_view(cta.smem)[chunks] = cells.reshape(rows, -1).view(CHUNK_TYPE)[:, 0]
        if cta.machine.races is not None:
            cta.machine.races.chunks(cta, chunks, True)
        marks = np.full(16, warp.core.ctx.mark & 0xFF, np.uint8)
        chunk_view(cta.smem_valid)[chunks] = marks.view(CHUNK_TYPE)[0]

    return step


def _rows_b8(regs: np.ndarray) -> np.ndarray:
    """(num, 32) registers -> (num, 8, 16) bytes: byte v is row 2(t%4)+v%2, column t/4+8(v/2)."""
    cells = regs.view(np.uint8).reshape(len(regs), 8, 4, 2, 2)  # t/4, t%4, v/2, v%2
    return np.ascontiguousarray(cells.transpose(0, 2, 4, 3, 1)).reshape(len(regs), 8, 16)


@handles("movmatrix.sync")
def bind_movmatrix(ins: Instr, k):
    write, read = write32(ins.operands[0]), lanes32(ins.operands[1], k)

    def step(warp, mask):
        whole_warp(mask, warp, ins)
        tile = np.ascontiguousarray(read(warp)).view(np.uint16).reshape(1, 8, 8)
        write(warp, mask, _fragment_b16(tile, True)[0])

    return step
