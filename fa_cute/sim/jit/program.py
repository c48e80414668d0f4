"""A kernel as a table of records, and the register file of a warp that runs it."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Collection, Iterable, Mapping

import numpy as np

from fa_cute.errors import MisuseError, OutOfBoundsError, SimError, UnknownInstructionError
from fa_cute.sim.jit import context as cx
from fa_cute.sim.jit.context import Context
from fa_cute.sim.jit.decode import form_for
from fa_cute.sim.jit.library import library
from fa_cute.sim.jit.registry import Unsupported
from fa_cute.sim.ptx import Bank, Imm, Instr, Kernel, Not, Reg, Special, Sym

_RECORD = struct.Struct("<QII10Iq")
_ALL = 0xFFFFFFFF
SYSTEM_BYTES = 0x400  # of each CTA's shared window, in front of what the kernel has
_NO_SLOTS = [0] * cx.RECORD_NUM_SLOTS


class _Rows:
    """Where each operand lives in a warp's register file."""

    def __init__(self, kernel: Kernel, symbols: Mapping[str, int]):
        self.kernel, self.symbols = kernel, symbols
        self.r64 = kernel.n32 * 128
        self.r64 += -self.r64 % 256
        self.end = self.r64 + kernel.n64 * 256
        self.sink = self._new(256)
        self.consts: dict[tuple[int, int], int] = {}  # (bits, width) -> offset
        self.specials: dict[str, int] = {}
        # (offset in shared memory, bits of a lane) -> row with the rank added
        self.shared: dict[tuple[int, int], int] = {}
        self.local: dict[str, int] = {}  # offsets of variables in a lane's local memory
        self.local_bytes = 0
        for var in kernel.local.values():
            self.local_bytes += -self.local_bytes % var.align
            self.local[var.name] = self.local_bytes
            self.local_bytes += var.size
        self.local_bytes += -self.local_bytes % 16
        self.registers: dict[int, int] = {}  # by identity: the parser has one object per register
        self.preds = self._new(4 * (kernel.npred + 3))
        self.true = self.preds + 4 * kernel.npred
        self.false, self.pred_sink = self.true + 4, self.true + 8

    def _new(self, size: int) -> int:
        at = self.end
        self.end += size + -size % 64
        return at

    def const(self, bits: int, width: int) -> int:
        key = (bits & ((1 << width) - 1), 64 if width == 64 else 32)
        if key not in self.consts:
            self.consts[key] = self._new(4 * key[1])
        return self.consts[key]

    def special(self, name: str) -> int:
        if name not in self.specials:
            self.specials[name] = self._new(256)
        return self.specials[name]

    def symbol(self, operand: Sym, width: int) -> int:
        """A row with the value of a symbol in each lane, 32 or 64 bits wide."""
        name = operand.name
        if name in self.kernel.param:
            return self.const(self.kernel.param[name].offset + operand.offset, width)
        if name in self.local:
            return self.const(self.local[name] + operand.offset, width)
        if name not in self.symbols:
            raise Unsupported(f"symbol {name}")
        value = self.symbols[name] + operand.offset
        var = self.kernel.shared.get(name)
        if var is None:
            return self.const(value, width)
        if (value, width) not in self.shared:
            self.shared[value, width] = self._new(4 * width)
        return self.shared[value, width]

    def register(self, reg: Reg) -> int:
        at = self.registers.get(id(reg))
        if at is None:
            if reg.bank is Bank.R32:
                at = reg.index * 128
            elif reg.bank is Bank.R64:
                at = self.r64 + reg.index * 256
            else:
                at = self.preds + 4 * reg.index
            self.registers[id(reg)] = at
        return at

    def source(self, operand, kind: str) -> int:
        if isinstance(operand, Imm):
            if kind == "pred":
                return self.true if operand.bits else self.false
            return self.const(operand.bits, 64 if kind in _WIDE else 32)
        if isinstance(operand, Not):
            return self.register(operand.reg) + 1
        if isinstance(operand, Special):
            return self.special(operand.name)
        return self.symbol(operand, 64 if kind in _WIDE else 32)

    def sink_for(self, kind: str) -> int:
        return self.pred_sink if kind == "=pred" else self.sink


_WIDE = ("i64", "f64", "mem", "f32x2")


def _wants_whole_warp(instr: Instr) -> bool:
    """Lanes that come by another way are awaited before such an instruction goes to Python."""
    name = instr.parts[0]
    return "aligned" in instr.parts or (name == "bar" and "warp" not in instr.parts)


class Program:
    """A kernel ready to run: records, and the layout of a warp's register file."""

    def __init__(self, kernel: Kernel, handled: Collection[int], symbols: Mapping[str, int]):
        self.kernel = kernel
        self.rows = _Rows(kernel, symbols)
        self.handled = frozenset(handled)
        self._tables: list[np.ndarray] = []  # operands that records have no room for
        encoded = [self._encode(i, instr) for i, instr in enumerate(kernel.instrs)]
        addresses = library().get({key for key, *_ in encoded} | {"ret"})
        pack, end = _RECORD.pack, ("ret", self.rows.true, 0, _NO_SLOTS, 0)
        records = b"".join(
            pack(addresses[key], guard, flip, *slots, imm)
            for key, guard, flip, slots, imm in (*encoded, end)
        )
        self.records = np.frombuffer(records, np.uint8).copy()
        self.specials = sorted(self.rows.specials)
        self._template = self._make_template()

    def _encode(self, index: int, instr: Instr) -> tuple[str, int, int, list[int], int]:
        rows = self.rows
        guard, flip = rows.true, 0
        if instr.guard is not None:
            guard, flip = rows.register(instr.guard[0]), _ALL if instr.guard[1] else 0
        if index in self.handled:
            return "stop", guard, flip, _NO_SLOTS, int(_wants_whole_warp(instr))
        try:
            key, signature, flat = form_for(instr)
            slots, imm = [0] * max(cx.RECORD_NUM_SLOTS, len(flat)), 0
            for i, operand in enumerate(flat):
                if type(operand) is Reg:
                    slots[i] = rows.register(operand)
                    continue
                kind = signature[i]
                if kind == "mem":
                    base, imm = operand.base, operand.offset
                    slots[i] = rows.register(base) if type(base) is Reg else rows.source(base, kind)
                elif kind == "imm":
                    slots[i] = operand.bits & _ALL
                elif kind == "label":
                    slots[i] = operand.target
                elif kind[0] == "=":
                    slots[i] = rows.sink_for(kind)
                else:
                    slots[i] = rows.source(operand, kind)
        except Unsupported as why:
            raise UnknownInstructionError(
                f"{instr.where}: no native code for {instr.op} ({why})"
            ) from None
        if len(slots) > cx.RECORD_NUM_SLOTS:
            more = np.array(slots[cx.RECORD_NUM_SLOTS :], np.uint32)
            self._tables.append(more)
            slots, imm = slots[: cx.RECORD_NUM_SLOTS], more.ctypes.data
        return key, guard, flip, slots, imm

    def _make_template(self) -> np.ndarray:
        """A fresh register file: zeros, constants, lane numbers."""
        block = np.zeros(self.rows.end, np.uint8)
        for (bits, width), at in self.rows.consts.items():
            dtype = np.uint64 if width == 64 else np.uint32
            block[at : at + 4 * width].view(dtype)[:] = bits
        block[self.rows.true : self.rows.true + 4].view(np.uint32)[0] = _ALL
        for name, at in self.rows.specials.items():
            lane = np.arange(32, dtype=np.uint64)
            value = {
                "%laneid": lane,
                "%lanemask_eq": 1 << lane,
                "%lanemask_lt": (1 << lane) - 1,
                "%lanemask_le": (2 << lane) - 1,
                "%lanemask_gt": _ALL & ~((2 << lane) - 1),
                "%lanemask_ge": _ALL & ~((1 << lane) - 1),
            }.get(name)
            if value is not None:
                block[at : at + 128].view(np.uint32)[:] = value
        return block

    def warp(self) -> WarpState:
        return WarpState(self)


class WarpState:
    """Registers and control state of one warp; `reset` makes it fit for another CTA."""

    def __init__(self, program: Program):
        self.program = program
        rows, kernel = program.rows, program.kernel
        raw = np.zeros(rows.end + 256, np.uint8)
        skip = -raw.ctypes.data % 256
        self.block = raw[skip : skip + rows.end]
        self.r32 = self.block[: kernel.n32 * 128].view(np.uint32).reshape(-1, 32)
        end64 = rows.r64 + kernel.n64 * 256
        self.r64 = self.block[rows.r64 : end64].view(np.uint64).reshape(-1, 32)
        self.pred = self.block[rows.preds : rows.preds + 4 * kernel.npred].view(np.uint32)
        self.ctx = Context()
        self._address = ctypes.addressof(self.ctx)
        self._native = _run_function(library().run_address)
        self._keep: list = []
        self.ctx.base, self.ctx.code = self.block.ctypes.data, program.records.ctypes.data
        self.ctx.budget = 1 << 40
        self.ctx.n_ranks = 1
        self.ctx.mark = 0x0101010101010101
        self.reset()
        self.start()

    def reset(self) -> None:
        self.block[:] = self.program._template

    def special(self, name: str, value) -> None:
        """Set a special register that the program reads (others are ignored)."""
        at = self.program.rows.specials.get(name)
        if at is None:
            return
        wide = name.endswith("64") or name in ("%globaltimer", "%gridid")
        dtype, size = (np.uint64, 256) if wide else (np.uint32, 128)
        self.block[at : at + size].view(dtype)[:] = value

    def bind(
        self,
        *,
        smem: Iterable[np.ndarray] = (),
        valid: Iterable[np.ndarray] | None = None,
        base: int = 0x400,
        rank: int = 0,
        params: np.ndarray | None = None,
        extents: np.ndarray | None = None,
    ) -> None:
        """Point the context at the memories; `smem[r]` starts at shared address `base` of CTA r."""
        ctx = self.ctx
        smem = list(smem)
        ctx.rank, ctx.n_ranks = rank, max(1, len(smem))
        ctx.smem_lo = max(base, SYSTEM_BYTES)
        ctx.smem_hi = base + (len(smem[rank]) if smem else 0)
        for index, array in enumerate(smem):
            ctx.smem[index] = array.ctypes.data - base
        ctx.track_valid = valid is not None
        shadows = list(valid) if valid is not None else []
        for index, array in enumerate(shadows):
            ctx.smem_valid[index] = array.ctypes.data - base
        if params is not None:
            ctx.params, ctx.params_size = params.ctypes.data, params.nbytes
        if extents is not None:
            extents = np.ascontiguousarray(extents, np.uint64)
            ctx.extents, ctx.n_extents = extents.ctypes.data, len(extents)
            ctx.last_extent = 0
        local_bytes = self.program.rows.local_bytes
        local = np.zeros(32 * local_bytes + 16, np.uint8)
        ctx.local, ctx.local_size = local.ctypes.data + -local.ctypes.data % 16, local_bytes
        self._keep = [smem, shadows, params, extents, local]
        for (offset, width), at in self.program.rows.shared.items():
            row = self.block[at : at + 4 * width]
            row.view(np.uint64 if width == 64 else np.uint32)[:] = offset + (rank << 24)

    def start(self, mask: int = _ALL) -> None:
        ctx = self.ctx
        ctx.pc, ctx.mask, ctx.live, ctx.parked_live = 0, mask, mask, mask
        ctx.limit, ctx.n_groups, ctx.count = _ALL, 0, 0
        ctx.error = ctx.unset_count = ctx.mma_flops = 0

    def run(self) -> int:
        """Execute until Python is needed: kind << 60 | pc << 32 | lanes."""
        return self._native(self._address)

    def groups(self) -> list[tuple[int, int]]:
        """(pc, lanes) of each group, the current one first."""
        ctx = self.ctx
        others = [(ctx.group_pc[i], ctx.group_mask[i]) for i in range(ctx.n_groups)]
        return [(ctx.pc, ctx.mask), *others] if ctx.mask else others

    def switch(self) -> bool:
        """Let another group run in place of the current one, which goes to the end of the list."""
        ctx = self.ctx
        if not ctx.n_groups:
            return False
        pc, mask = ctx.group_pc[0], ctx.group_mask[0]
        last = ctx.n_groups - 1
        for i in range(last):
            for table in (ctx.group_pc, ctx.group_mask, ctx.group_parked):
                table[i] = table[i + 1]
        ctx.group_pc[last], ctx.group_mask[last], ctx.group_parked[last] = ctx.pc, ctx.mask, 0
        ctx.pc, ctx.mask = pc, mask
        ctx.limit = (
            min(ctx.group_pc[i] for i in range(ctx.n_groups) if ctx.group_pc[i] > pc)
            if any(ctx.group_pc[i] > pc for i in range(ctx.n_groups))
            else _ALL
        )
        return True

    def error(self) -> SimError:
        """The exception for a run that ended with an error."""
        ctx = self.ctx
        instr = self.program.kernel.instrs[ctx.pc]
        what = f"{instr.where}: {instr.op} of lane {ctx.error_lane}, address {ctx.error_addr:#x}"
        if ctx.error == cx.OUT_OF_BOUNDS:
            return OutOfBoundsError(f"{what}: outside of every tensor or of the memory's size")
        if ctx.error == cx.MISALIGNED:
            return MisuseError(f"{what}: not aligned to the size of the access")
        if ctx.error == cx.WRONG_CTA:
            return MisuseError(f"{what}: not in this CTA's shared memory (ranks: {ctx.n_ranks})")
        if ctx.error == cx.TRAPPED:
            return SimError(f"{instr.where}: the kernel stopped itself in lane {ctx.error_lane}")
        return MisuseError(
            f"{instr.where}: {instr.op} needs lanes of its member mask that never come"
            f" (executing groups: {self.groups()})"
        )


_run_functions: dict[int, object] = {}


def _run_function(address: int):
    if address not in _run_functions:
        _run_functions[address] = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(address)
    return _run_functions[address]
