"""The table of instructions that are executed one by one (everything that is no plain arithmetic).

A handler binds an instruction once per kernel and returns a closure; the closure runs with a warp
and the mask of its active lanes (guard applied, never 0), and returns None, or a `Wait` when the
warp can't continue.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from fa_cute.errors import UnknownInstructionError

if TYPE_CHECKING:
    from fa_cute.sim.program import KernelContext
    from fa_cute.sim.ptx import Instr
    from fa_cute.sim.warp import Warp

Step = Callable[["Warp", int], "Wait | None"]
Bind = Callable[["Instr", "KernelContext"], Step]

FULL = 0xFFFFFFFF

# Files that register handlers when they are imported.
MODULES = (
    "sync",
    "atomics",
    "clc",
    "tma",
    "bulk",
    "cp_async",
    "umma",
    "tmem_ops",
    "wgmma",
    "mma",
    "matrix",
)

_TABLE: dict[str, Bind] = {}


def handles(*prefixes: str) -> Callable[[Bind], Bind]:
    """Register a binder for opcodes that start with one of these dotted prefixes."""

    def register(bind: Bind) -> Bind:
        for prefix in prefixes:
            if prefix in _TABLE:
                raise ValueError(f"two handlers for {prefix!r}")
            _TABLE[prefix] = bind
        return bind

    return register


def load() -> None:
    """Import every file that registers handlers (once; later calls cost nothing)."""
    for name in MODULES:
        importlib.import_module(f"fa_cute.sim.{name}")


def find(ins: Instr) -> Bind | None:
    """The binder with the longest matching prefix, or None."""
    for n in range(len(ins.parts), 0, -1):
        bind = _TABLE.get(".".join(ins.parts[:n]))
        if bind is not None:
            return bind
    return None


def table() -> dict[str, Bind]:
    """Every registered prefix with its binder."""
    load()
    return dict(_TABLE)


def unknown(ins: Instr) -> UnknownInstructionError:
    return UnknownInstructionError(f"{ins.where}: the simulator does not know {ins.op!r}")


class Signal:
    """Something that warps wait on; whoever changes it calls `fire`."""

    __slots__ = ("waiters",)

    def __init__(self) -> None:
        self.waiters: list[Warp] = []

    def fire(self) -> None:
        """Make every waiting warp whose condition holds ready to run."""
        if not self.waiters:
            return
        still = []
        for warp in self.waiters:
            wait = warp.wait
            if wait is None:
                continue
            if wait.ready():
                warp.wake()
            else:
                still.append(warp)
        self.waiters = still


class Wait:
    """Why a warp stands still.

    `source` is the Signal that fires when the answer of `ready` may have changed; without one the
    machine asks again after every asynchronous operation. Once ready, `then(warp)` runs (it may
    return another Wait) and the warp continues behind the instruction.
    """

    __slots__ = ("info", "source", "test", "then")

    def __init__(
        self,
        test: Callable[[], bool],
        info: Callable[[], dict] | dict,
        source: Signal | None = None,
        then: Callable[[Warp], Wait | None] | None = None,
    ):
        self.test, self.info, self.source, self.then = test, info, source, then

    def ready(self) -> bool:
        return self.test()

    def describe(self) -> dict:
        """For the deadlock report: {"on": "mbarrier", "address": ..., ...}."""
        return self.info() if callable(self.info) else self.info
