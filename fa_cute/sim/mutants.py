"""How much would the simulator notice? Break one synchronisation of a launch at a time and look.

A mutant replaces one handled instruction of the program: a wait that passes at once, an arrival or
barrier that is left out, a byte count that is 16 too large. It is caught when a schedule deadlocks,
raises, reads unwritten memory, gives other bits than the sound program, races (with the option
`races`), or draws a warning.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from fa_cute.errors import DeadlockError, SimError
from fa_cute.sim import machine
from fa_cute.sim import operands as ops
from fa_cute.sim.memory import GlobalMemory
from fa_cute.sim.program import Program, load_program
from fa_cute.sim.ptx import Instr, Kernel

CAUGHT_BY = ("deadlock", "error", "unwritten", "numbers", "race", "warning")


@dataclass(frozen=True)
class Mutant:
    """One broken instruction."""

    index: int
    kind: str
    where: str

    def __str__(self) -> str:
        return f"{self.kind} at {self.where}"


@dataclass
class Launch:
    """Everything that `machine.run` needs to repeat a launch, and where its results lie."""

    kernel: Kernel
    grid: tuple
    block: tuple
    cluster: tuple
    dynamic_smem: int
    params: bytes
    extents: Sequence
    outputs: Sequence[np.ndarray]  # uint8 views, overwritten by every run
    options: machine.Options = field(default_factory=machine.Options)

    def run(self, schedule) -> tuple[bytes, object]:
        """(bits of the outputs, report); outputs start as NaN patterns."""
        for array in self.outputs:
            array[...] = 0xFF
        report = machine.run(
            self.kernel,
            self.grid,
            self.block,
            self.cluster,
            self.dynamic_smem,
            self.params,
            GlobalMemory(self.extents),
            schedule,
            self.options,
        )
        return b"".join(a.tobytes() for a in self.outputs), report


def _pass_at_once(ins: Instr, step: Callable) -> Callable:
    write = ops.write_pred(ins.operands[0])

    def passes(warp, mask):
        if warp.flush is not None:
            warp.flush()
        write(warp, mask, mask)

    return passes


def _leave_out(ins: Instr, step: Callable) -> Callable:
    return lambda warp, mask: None


def _more_bytes(ins: Instr, step: Callable) -> Callable:
    """The barrier expects 16 bytes more than the kernel says, and so never completes by itself."""
    address = ops.shared_address(ins.operands[-2], None)

    def expect(warp, mask):
        warp.cta.mbarrier(address(warp, mask), ins).tx += 16
        return step(warp, mask)

    return expect


def _fewer_bytes(ins: Instr, step: Callable) -> Callable:
    """The barrier expects 16 bytes less, and so may complete too early."""
    address = ops.shared_address(ins.operands[-2], None)

    def expect(warp, mask):
        warp.cta.mbarrier(address(warp, mask), ins).tx -= 16
        return step(warp, mask)

    return expect


def _break(ins: Instr) -> dict[str, Callable]:
    """Ways to break an instruction: name -> maker of the new step."""
    if ins.starts("mbarrier", "try_wait"):
        return {"try_wait passes": _pass_at_once}
    if ins.starts("mbarrier", "arrive") and ins.has("expect_tx"):
        return {"expect_tx + 16": _more_bytes, "expect_tx - 16": _fewer_bytes}
    if ins.starts("mbarrier", "arrive"):
        return {"no arrive": _leave_out}
    if ins.parts[0] in ("bar", "barrier") and "warp" not in ins.parts:
        return {f"no {'.'.join(ins.parts[:2])}": _leave_out}
    if ins.starts("tcgen05", "wait::st"):
        return {"no wait::st": _leave_out}
    if ins.starts("tcgen05", "commit"):
        return {"no commit": _leave_out}
    if ins.starts("cp", "async", "bulk", "wait_group"):
        return {"no wait_group": _leave_out}
    if ins.starts("wgmma", "wait_group"):
        return {"no wgmma wait": _leave_out}
    return {}


def mutants(program: Program) -> list[Mutant]:
    """Every way to break every handled synchronisation of a kernel, in program order."""
    return [
        Mutant(i, kind, f"{ins.where}: {ins.op}")
        for i, ins in enumerate(program.kernel.instrs)
        if program.steps[i] is not None
        for kind in _break(ins)
    ]


@contextmanager
def broken(program: Program, mutant: Mutant) -> Iterator[None]:
    """The program with one mutant inside the `with`."""
    step = program.steps[mutant.index]
    ins = program.kernel.instrs[mutant.index]
    program.steps[mutant.index] = _break(ins)[mutant.kind](ins, step)
    try:
        yield
    finally:
        program.steps[mutant.index] = step


@dataclass
class Campaign:
    """Outcome: for every mutant how it was caught, or None."""

    outcomes: dict[Mutant, str | None]
    executed: set[Mutant]  # mutants whose instruction the sound program executes

    def table(self) -> str:
        """Markdown: kind, sites, executed, caught, and by what."""
        kinds: dict[str, collections.Counter] = {}
        for mutant, how in self.outcomes.items():
            row = kinds.setdefault(mutant.kind, collections.Counter())
            row["sites"] += 1
            row["executed"] += mutant in self.executed
            if how:
                row["caught"] += 1
                row[how] += 1
        columns = ("sites", "executed", "caught", *CAUGHT_BY)
        lines = ["| broken | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        total: collections.Counter = collections.Counter()
        for kind, row in kinds.items():
            total.update(row)
            lines.append(f"| {kind} | " + " | ".join(str(row[c]) for c in columns) + " |")
        lines.append("| **all** | " + " | ".join(str(total[c]) for c in columns) + " |")
        return "\n".join(lines)

    def missed(self) -> list[Mutant]:
        """Executed mutants that no schedule noticed."""
        return [m for m, how in self.outcomes.items() if how is None and m in self.executed]


def _outcome(launch: Launch, schedule, sound: bytes) -> str | None:
    try:
        bits, report = launch.run(schedule)
    except DeadlockError:
        return "deadlock"
    except SimError:
        return "error"
    if report.unset:
        return "unwritten"
    if bits != sound:
        return "numbers"
    if report.races:
        return "race"
    return "warning" if report.warnings else None


def campaign(launch: Launch, schedules: Sequence, pick: Callable | None = None) -> Campaign:
    """Try every mutant (that `pick` accepts) in the schedules until one notices it."""
    program = load_program(launch.kernel, launch.options)
    seen: set[int] = set()
    steps = list(program.steps)
    for i, step in enumerate(steps):
        if step is not None:
            program.steps[i] = _watched(step, i, seen)
    try:
        sound, report = launch.run(schedules[0])
    finally:
        program.steps[:] = steps
    if report.unset or report.races or report.warnings:
        raise SimError(f"the sound program is reported already:\n{report}")
    for schedule in schedules[1:]:
        if launch.run(schedule)[0] != sound:
            raise SimError(f"the sound program gives other bits in schedule {schedule}")
    limited = replace(launch, options=replace(launch.options, limit=4 * report.instructions))
    chosen = [m for m in mutants(program) if pick is None or pick(m)]
    outcomes: dict[Mutant, str | None] = {}
    for mutant in chosen:
        outcomes[mutant] = None
        if mutant.index not in seen:
            continue
        with broken(program, mutant):
            for schedule in schedules:
                outcomes[mutant] = _outcome(limited, schedule, sound)
                if outcomes[mutant]:
                    break
    return Campaign(outcomes, {m for m in chosen if m.index in seen})


def _watched(step: Callable, index: int, seen: set[int]) -> Callable:
    def watched(warp, mask):
        seen.add(index)
        return step(warp, mask)

    return watched
