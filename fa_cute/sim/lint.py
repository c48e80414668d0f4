"""Faults in PTX that no schedule of the simulator can show: `python -m fa_cute.sim.lint FILE`.

tcgen05.ld is asynchronous. A thread that reads a destination register waits for it, but a release
(an arrival, a barrier, an MMA) does not: it may overtake a load whose registers nobody has read,
and then the tensor core may overwrite the columns first. So on every path from a load to a release
there must be tcgen05.wait::ld, or a use of each register that the load writes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from fa_cute.sim import ptx
from fa_cute.sim.ptx import Instr, Kernel, Label, Mem, Not, Pair, Reg, Vec

_RELEASES = (
    "mbarrier.arrive",
    "bar.sync",
    "bar.arrive",
    "barrier.",
    "tcgen05.commit",
    "tcgen05.mma",
)
_WITHOUT_RESULT = {
    *("st", "bar", "barrier", "mbarrier", "tcgen05", "cp", "fence", "bra", "red", "stmatrix"),
    *("wgmma", "ret", "exit", "membar", "prefetch", "setmaxnreg"),
}


@dataclass(frozen=True)
class Finding:
    """A load that a release may overtake."""

    load: Instr
    release: Instr
    registers: int  # that nothing has read in between

    def __str__(self) -> str:
        return (
            f"{self.release.where}: {self.release.op} may overtake the load at {self.load.where}: "
            f"{self.registers} of its registers are not read yet and there is no tcgen05.wait::ld"
        )


def _registers(operand) -> set[Reg]:
    if isinstance(operand, Reg):
        return {operand}
    if isinstance(operand, Not):
        return {operand.reg}
    if isinstance(operand, Vec):
        return set().union(*map(_registers, operand.items))
    if isinstance(operand, Pair):
        return _registers(operand.first) | _registers(operand.second)
    if isinstance(operand, Mem):
        return _registers(operand.base) | (_registers(operand.coords) if operand.coords else set())
    return set()


def _uses(ins: Instr) -> tuple[set[Reg], set[Reg]]:
    """(registers read, registers written)."""
    has_result = ins.parts[0] not in _WITHOUT_RESULT and bool(ins.operands)
    sources = ins.operands[1:] if has_result else ins.operands
    read = set().union(*map(_registers, sources)) if sources else set()
    if ins.guard:
        read.add(ins.guard[0])
    return read, _registers(ins.operands[0]) if has_result else set()


def _is_release(ins: Instr) -> bool:
    return ins.op.startswith(_RELEASES) and not ins.op.startswith("barrier.cluster.wait")


def _paths_from(kernel: Kernel, start: int, uses: list) -> dict[int, int]:
    """Releases that a load at `start` reaches too early -> its registers still unread there."""
    instrs = kernel.instrs
    found: dict[int, int] = {}
    unread = frozenset(_registers(instrs[start].operands[0]))
    todo, seen = [(start + 1, unread)], set()
    while todo:
        at, waiting = todo.pop()
        while waiting and at < len(instrs) and (at, waiting) not in seen:
            seen.add((at, waiting))
            ins = instrs[at]
            if ins.op.startswith("tcgen05.wait::ld"):
                break
            if _is_release(ins):
                found[at] = len(waiting)
                break
            read, written = uses[at]
            waiting = waiting - read - written
            if ins.parts[0] in ("ret", "exit") and not ins.guard:
                break
            if ins.parts[0] == "bra":
                target = next(op.target for op in ins.operands if isinstance(op, Label))
                if ins.guard is None:
                    at = target
                    continue
                todo.append((target, waiting))
            at += 1
    return found


def overtaken_loads(kernel: Kernel) -> list[Finding]:
    """Every (load, release) pair of a kernel with a path that breaks the rule."""
    loads = [i for i, ins in enumerate(kernel.instrs) if ins.op.startswith("tcgen05.ld")]
    uses = [_uses(ins) for ins in kernel.instrs] if loads else []
    return [
        Finding(kernel.instrs[load], kernel.instrs[release], count)
        for load in loads
        for release, count in _paths_from(kernel, load, uses).items()
    ]


def main(files: list[str]) -> int:
    findings = 0
    for file in files:
        for kernel in ptx.parse(Path(file).read_text()).kernels.values():
            for finding in overtaken_loads(kernel):
                print(f"{file}: {finding}")
                findings += 1
    return min(findings, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
