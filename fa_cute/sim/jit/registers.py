"""Fewer rows for the same registers: virtual registers that never live together share one.

Compilers emit PTX in single-assignment form, thousands of registers of which a few hundred live at
once; sharing rows keeps a warp's register file in the processor's caches. A row belongs to each
lane by itself and writes are masked, so what holds for the program of one thread holds for the warp
whatever way its lanes go.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator

from fa_cute.sim.ptx import Bank, Instr, Kernel, Label, Mem, Pair, Reg, Vec

_BANKS = (Bank.R32, Bank.R64)
# Their register operands may be written after the instruction is over.
_ASYNCHRONOUS = ("wgmma",)
_ENDS = ("bra", "ret", "exit", "trap")
# No destination register comes first in these.
_NO_RESULT = frozenset(
    (
        *("st", "red", "bra", "ret", "exit", "bar", "barrier", "fence", "membar", "cp", "prefetch"),
        *("tcgen05", "wgmma", "setmaxnreg", "nanosleep", "griddepcontrol", "stmatrix", "mbarrier"),
        *("multimem", "clusterlaunchcontrol"),
    )
)


def _collect(operand, into: list[Reg]) -> None:
    kind = type(operand)
    if kind is Reg:
        if operand.bank is not Bank.PRED:
            into.append(operand)
    elif kind is Vec:
        for item in operand.items:
            _collect(item, into)
    elif kind is Mem:
        _collect(operand.base, into)
        if operand.coords is not None:
            _collect(operand.coords, into)
    elif kind is Pair:
        _collect(operand.first, into)
        _collect(operand.second, into)


def _access(instr: Instr) -> tuple[list[Reg], list[Reg]]:
    """(registers written for certain in every executing lane, registers read or in doubt)."""
    written: list[Reg] = []
    used: list[Reg] = []
    operands = instr.operands
    op = instr.parts[0]
    first_is_result = op not in _NO_RESULT or instr.op.startswith("tcgen05.ld")
    for position, operand in enumerate(operands):
        result = position == 0 and first_is_result and not isinstance(operand, Mem)
        _collect(operand, written if result else used)
    if instr.guard is not None:
        used += written
    return written, used


def _bits(numbers: set[int]) -> int:
    """A set as an integer, on which the flow analysis is fast."""
    if not numbers:
        return 0
    array = bytearray(max(numbers) // 8 + 1)
    for number in numbers:
        array[number >> 3] |= 1 << (number & 7)
    return int.from_bytes(array, "little")


def _numbers(bits: int) -> Iterator[int]:
    for at, byte in enumerate(bits.to_bytes((bits.bit_length() + 7) // 8, "little")):
        while byte:
            low = byte & -byte
            yield 8 * at + low.bit_length() - 1
            byte ^= low


class _Intervals:
    """First and last instruction at which each register holds a value that matters."""

    def __init__(self, kernel: Kernel):
        self.instrs = kernel.instrs
        self.ids: dict[tuple[Bank, int], int] = {}
        self.pinned: set[int] = set()  # keep a row for themselves
        self.double: set[int] = set()  # .b128: two rows
        self.writes: list[list[int]] = []
        self.reads: list[list[int]] = []
        self.by_object: dict[int, int] = {}
        for instr in self.instrs:
            written, used = _access(instr)
            self.writes.append([self._id(r) for r in written])
            self.reads.append([self._id(r) for r in used])
            if instr.parts[0] in _ASYNCHRONOUS:
                self.pinned.update(self._id(r) for r in (*written, *used))
            self.double.update(self._id(r) for r in (*written, *used) if r.type == ".b128")
        self.pinned |= self.double
        self.start = [len(self.instrs)] * len(self.ids)
        self.stop = [-1] * len(self.ids)

    def _id(self, reg: Reg) -> int:
        number = self.by_object.get(id(reg))
        if number is None:
            number = self.ids.setdefault((reg.bank, reg.index), len(self.ids))
            self.by_object[id(reg)] = number
        return number

    def blocks(self) -> tuple[list[int], list[list[int]]]:
        """First instructions of the basic blocks, and the successors of each block."""
        count = len(self.instrs)
        leaders = {0}
        for index, instr in enumerate(self.instrs):
            if instr.parts[0] in _ENDS:
                leaders.add(index + 1)
                leaders.update(o.target for o in instr.operands if isinstance(o, Label))
        starts = sorted(s for s in leaders if s < count)
        number = {s: i for i, s in enumerate(starts)}
        following = []
        for i, begin in enumerate(starts):
            end = starts[i + 1] if i + 1 < len(starts) else count
            last = self.instrs[end - 1]
            targets = [
                number[o.target] for o in last.operands if isinstance(o, Label) and o.target < count
            ]
            always = last.guard is None and last.parts[0] in _ENDS
            if not always and i + 1 < len(starts):
                targets.append(i + 1)
            following.append(targets)
            del begin
        return starts, following

    def compute(self) -> None:
        starts, following = self.blocks()
        ends = [*starts[1:], len(self.instrs)]
        needs, kills = [], []
        for begin, end in zip(starts, ends, strict=True):
            need: set[int] = set()
            kill: set[int] = set()
            for index in range(begin, end):
                need.update(r for r in self.reads[index] if r not in kill)
                kill.update(self.writes[index])
            needs.append(_bits(need))
            kills.append(_bits(kill - need))
        live_in = list(needs)
        changed = True
        while changed:
            changed = False
            for block in range(len(starts) - 1, -1, -1):
                out = 0
                for target in following[block]:
                    out |= live_in[target]
                new = needs[block] | (out & ~kills[block])
                if new != live_in[block]:
                    live_in[block] = new
                    changed = True
        moments: list[tuple[int, int]] = []  # (instruction, registers alive), in order
        for block, (begin, end) in enumerate(zip(starts, ends, strict=True)):
            out = 0
            for target in following[block]:
                out |= live_in[target]
            moments += ((begin, live_in[block]), (end - 1, out))
        for bounds, order in ((self.start, moments), (self.stop, reversed(moments))):
            seen = 0
            for index, alive in order:
                for number in _numbers(alive & ~seen):
                    bounds[number] = index
                seen |= alive
        start, stop = self.start, self.stop
        for index, (reads, writes) in enumerate(zip(self.reads, self.writes, strict=True)):
            for number in reads:
                if index < start[number]:
                    start[number] = index
                if index > stop[number]:
                    stop[number] = index
            for number in writes:
                if index < start[number]:
                    start[number] = index
                if index > stop[number]:
                    stop[number] = index


def _assign(intervals: _Intervals) -> tuple[dict[tuple[Bank, int], int], dict[Bank, int]]:
    """New rows by first fit over intervals sorted by their start; and the number of rows."""
    rows: dict[tuple[Bank, int], int] = {}
    counts = dict.fromkeys(_BANKS, 0)
    for bank in _BANKS:
        mine = [(key, i) for key, i in intervals.ids.items() if key[0] is bank]
        for key, i in sorted(mine, key=lambda entry: entry[0][1]):
            if i in intervals.pinned:
                rows[key] = counts[bank]
                counts[bank] += 2 if i in intervals.double else 1
        active: list[tuple[int, int]] = []  # (last instruction, row)
        free: list[int] = []
        for key, i in sorted(mine, key=lambda entry: intervals.start[entry[1]]):
            if i in intervals.pinned:
                continue
            while active and active[0][0] < intervals.start[i]:
                heapq.heappush(free, heapq.heappop(active)[1])
            if free:
                row = heapq.heappop(free)
            else:
                row = counts[bank]
                counts[bank] += 1
            rows[key] = row
            heapq.heappush(active, (intervals.stop[i], row))
    return rows, counts


class _Renamer:
    def __init__(self, rows: dict[tuple[Bank, int], int]):
        self.rows = rows
        self.known: dict[int, Reg] = {}  # by identity of the old register

    def reg(self, reg: Reg) -> Reg:
        new = self.known.get(id(reg))
        if new is None:
            row = self.rows.get((reg.bank, reg.index), reg.index if reg.bank is Bank.PRED else 0)
            new = self.known[id(reg)] = Reg(reg.bank, row, reg.name, reg.type)
        return new

    def operand(self, operand):
        kind = type(operand)
        if kind is Reg:
            return self.reg(operand)
        if kind is Vec:
            return Vec(tuple([self.operand(o) for o in operand.items]))
        if kind is Mem:
            coords = None if operand.coords is None else self.operand(operand.coords)
            return Mem(self.operand(operand.base), operand.offset, coords)
        if kind is Pair:
            return Pair(self.operand(operand.first), self.operand(operand.second))
        return operand  # predicates, also negated ones, stay where they are

    def instr(self, instr: Instr) -> Instr:
        operands = tuple([self.operand(o) for o in instr.operands])
        return Instr(instr.op, instr.parts, operands, instr.guard, instr.line, instr.loc)


def compact(kernel: Kernel) -> Kernel:
    """The kernel with its registers in as few rows as their lives allow."""
    intervals = _Intervals(kernel)
    intervals.compute()
    rows, counts = _assign(intervals)
    renamer = _Renamer(rows)
    return dataclasses.replace(
        kernel,
        instrs=[renamer.instr(instr) for instr in kernel.instrs],
        n32=counts[Bank.R32],
        n64=counts[Bank.R64],
        regs={name: renamer.reg(reg) for name, reg in kernel.regs.items()},
    )
