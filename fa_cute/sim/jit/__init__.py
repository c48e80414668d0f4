"""Native execution of PTX for one warp at a time, without a compiler on the machine.

`build` turns a kernel into records, `Program.warp` gives a register file, `WarpState.run` executes
until an instruction comes that Python has to do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fa_cute.sim.jit.context import KIND_BUDGET, KIND_ERROR, KIND_EXIT, KIND_STOP, Context
from fa_cute.sim.jit.decode import supports
from fa_cute.sim.jit.program import Program, WarpState
from fa_cute.sim.jit.registers import compact
from fa_cute.sim.ptx import Instr, Kernel

# Instructions with a handler that native code executes as well.
_NATIVE = ("fence", "membar", "griddepcontrol", "prefetch", "prefetchu")
_NATIVE_FORMS = ("ldmatrix", "stmatrix", "movmatrix", "mma")  # the common ones of many


def native(instr: Instr) -> bool:
    """Whether native code takes an instruction that also has a handler."""
    name = instr.parts[0]
    if "proxy" in instr.parts:  # the machine tracks what the asynchronous proxy may see
        return False
    if name in _NATIVE or instr.op == "bar.warp.sync":
        return True
    return name in _NATIVE_FORMS and supports(instr)


def build(
    kernel: Kernel, handled: Collection[int] = (), symbols: Mapping[str, int] | None = None
) -> Program:
    """Encode a kernel; `handled` are the indices of the instructions that Python executes."""
    return Program(kernel, handled, symbols or {})


__all__ = [
    "KIND_BUDGET",
    "KIND_ERROR",
    "KIND_EXIT",
    "KIND_STOP",
    "Context",
    "Program",
    "WarpState",
    "build",
    "compact",
    "native",
    "supports",
]
