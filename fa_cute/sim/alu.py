"""The reference engine: one numpy call per instruction, the same interface as the native one.

Slow and simple on purpose. `FA_CUTE_SIM_JIT=0` selects it, and tests compare the native engine
with it.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from fa_cute.errors import SimError
from fa_cute.sim import handlers
from fa_cute.sim.alu_more import MemoryMixin, bind
from fa_cute.sim.alu_ops import FULL, Env
from fa_cute.sim.memory import GlobalMemory
from fa_cute.sim.ptx import Kernel, Special

EXIT, BUDGET = 1 << 60, 3 << 60


def compact(kernel: Kernel) -> Kernel:
    """Nothing to gain here."""
    return kernel


def _specials(kernel: Kernel) -> list[str]:
    native = ("%clock", "%globaltimer")
    names = {o.name for ins in kernel.instrs for o in ins.operands if isinstance(o, Special)}
    return sorted(n for n in names if not n.startswith(native))


class Code:
    """A kernel in the engine's form: a closure per instruction, None where a handler runs."""

    def __init__(self, kernel: Kernel, handled, symbols: dict[str, int]):
        self.kernel = kernel
        self.specials = _specials(kernel)
        env = Env(kernel, symbols)
        self.local_bytes = env.local_bytes
        handled = set(handled)
        self.rows: list[tuple] = []
        for i, ins in enumerate(kernel.instrs):
            guard = (ins.guard[0].index, FULL if ins.guard[1] else 0) if ins.guard else None
            name = ins.parts[0]
            if i in handled:
                self.rows.append(("handled", guard, None))
            elif name == "bra":
                self.rows.append(("bra", guard, ins.operands[0].target))
            elif name in ("ret", "exit", "trap"):
                self.rows.append(("exit", guard, None))
            else:
                try:
                    fn = bind(ins, env)
                except (KeyError, TypeError, AttributeError) as error:
                    raise handlers.unknown(ins) from error
                if fn is None:
                    raise handlers.unknown(ins)
                self.rows.append(("alu", guard, fn))

    def warp(self) -> Core:
        return Core(self)


def build(kernel: Kernel, handled, symbols: dict[str, int]) -> Code:
    return Code(kernel, handled, symbols)


class Core(MemoryMixin):
    """Registers and program counter of one warp."""

    def __init__(self, code: Code):
        kernel = code.kernel
        self.rows = code.rows
        self.r32 = np.zeros((max(kernel.n32, 1), 32), np.uint32)
        self.r64 = np.zeros((max(kernel.n64, 1), 32), np.uint64)
        self.pred = np.zeros(max(kernel.npred, 1), np.uint32)
        self.ctx = SimpleNamespace(
            count=0, budget=1_000_000, unset_count=0, unset_pc=0, unset_addr=0, mark=1
        )
        self.local = np.zeros((32, code.local_bytes), np.uint8)
        self.specials: dict[str, np.ndarray] = {}
        self.memory = GlobalMemory()

    def bind(self, smem, valid, base, rank, params, extents) -> None:
        if base:
            raise SimError("the reference engine indexes shared memory from the window's start")
        self.smem, self.valid, self.rank = smem, valid, rank
        self.param_address = params.ctypes.data
        self.memory = GlobalMemory()
        for i, (start, stop) in enumerate(extents.tolist()):
            self.memory.add(start, stop - start, f"range {i}")

    def special(self, name: str, value) -> None:
        self.specials[name] = np.broadcast_to(np.asarray(value, np.uint32), 32).copy()

    def start(self, mask: int = FULL) -> None:
        self.r32[:] = 0
        self.r64[:] = 0
        self.pred[:] = 0
        self.pc, self.mask = 0, mask
        self.others: dict[int, int] = {}  # paths that wait at a higher instruction: pc -> lanes
        self.ctx.count = 0
        self.ctx.unset_count = 0

    def groups(self) -> list[tuple[int, int]]:
        return [(self.pc, self.mask), *self.others.items()]

    def switch(self) -> bool:
        """Continue with another path than the current one."""
        if not self.others:
            return False
        pc = min(self.others)
        mask = self.others.pop(pc)
        self.others[self.pc] = self.others.get(self.pc, 0) | self.mask
        self.pc, self.mask = pc, mask
        return True

    def _next_path(self) -> bool:
        """Lowest waiting path becomes the current one; False when there is none."""
        if not self.others:
            return False
        self.pc = min(self.others)
        self.mask = self.others.pop(self.pc)
        return True

    def _meet(self) -> None:
        """Merge with, or give way to, a path at or before the current instruction."""
        low = min(self.others)
        if self.pc == low:
            self.mask |= self.others.pop(low)
        elif self.pc > low:
            self.others[self.pc] = self.others.get(self.pc, 0) | self.mask
            self.pc, self.mask = low, self.others.pop(low)

    def run(self) -> int:
        ctx, rows = self.ctx, self.rows
        limit = ctx.count + ctx.budget
        while True:
            while self.others and self.pc >= min(self.others):
                self._meet()
            pc, mask = self.pc, self.mask
            kind, guard, arg = rows[pc]
            if guard is not None:
                mask &= int(self.pred[guard[0]]) ^ guard[1]
            ctx.count += 1
            if ctx.count > limit:
                ctx.count -= 1
                return BUDGET
            if not mask:
                self.pc = pc + 1
            elif kind == "alu":
                self.pc = pc
                arg(self, mask)
                self.pc = pc + 1
            elif kind == "handled":
                self.pc = pc + 1
                return pc << 32 | mask
            elif kind == "bra":
                self._branch(pc, mask, arg)
            else:
                self.mask &= ~mask
                self.pc = pc + 1
                if not self.mask and not self._next_path():
                    return EXIT

    def _branch(self, pc: int, taken: int, target: int) -> None:
        stay = self.mask & ~taken
        if not stay:
            self.pc = target
            return
        self.others[pc + 1] = self.others.get(pc + 1, 0) | stay
        self.pc, self.mask = target, taken

    def error(self) -> Exception:
        return SimError("the reference engine raises its errors where they happen")
