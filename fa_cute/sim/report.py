"""What a launch did, and why it could not go on: in the names of the kernel's plan when given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fa_cute.errors import DeadlockError, UninitializedReadError
from fa_cute.sim.operands import SMEM_START

if TYPE_CHECKING:
    from fa_cute.sim.cta import Cta
    from fa_cute.sim.machine import Machine
    from fa_cute.sim.warp import Warp


class Names:
    """Roles, edges, barriers and shared-memory fields by number (`fa_cute.plan.show.to_dict`)."""

    def __init__(self, plan: dict | None):
        self.plan = plan or {}
        self.roles = {
            warp: role["name"]
            for role in self.plan.get("roles", ())
            for warp in range(role["start"], role["stop"])
        }
        self.barriers = {b["id"]: b["name"] for b in self.plan.get("barriers", ())}
        self.fields = sorted(
            (f["offset"], f["bytes"] * f.get("stages", 1), f["name"])
            for f in self.plan.get("smem", {}).get("fields", ())
        )
        self._edges: dict[int, dict[int, str]] = {}

    def role(self, warp: int) -> str:
        return self.roles.get(warp, f"warp {warp}")

    def barrier(self, number: int) -> str:
        name = self.barriers.get(number)
        return f"named barrier {name!r} ({number})" if name else f"named barrier {number}"

    def mbarrier(self, cta: Cta, offset: int) -> str:
        """`s_full[1]`-like name: edge, side and stage."""
        edges = self._edges.get(id(cta))
        if edges is None or len(edges) != len(cta.mbarriers):
            edges = self._edges[id(cta)] = self._match(cta)
        return edges.get(offset, f"smem+{offset - SMEM_START}")

    def _match(self, cta: Cta) -> dict[int, str]:
        """Pipelines lie in declaration order, each with its full, then its empty barriers.

        Names are given only as long as the arrival counts agree with the plan.
        """
        out: dict[int, str] = {}
        offsets = sorted(cta.mbarriers)
        explicit = self.plan.get("mbarriers")
        if explicit:
            return {SMEM_START + o: name for name, o in explicit.items()}
        wanted = []
        for edge in self.plan.get("edges", ()):
            sides = [("full", edge["producer_arrivals"])]
            if not edge.get("ordered_by") and edge["consumer_arrivals"]:
                sides.append(("empty", edge["consumer_arrivals"]))
            for side, count in sides:
                wanted += [(f"{edge['name']}.{side}[{i}]", count) for i in range(edge["stages"])]
        at = 0
        for offset in offsets:
            if at < len(wanted) and cta.mbarriers[offset].expected == wanted[at][1]:
                out[offset] = wanted[at][0]
                at += 1
            elif at:
                break
        return out if at == len(wanted) else {}


@dataclass(frozen=True)
class UnsetRead:
    """Reads of memory that nothing wrote, by one instruction."""

    space: str
    where: str
    op: str
    address: int
    count: int

    def __str__(self) -> str:
        first = f"first at {self.address:#x}"
        return f"{self.where}: {self.op} read {self.count} unwritten {self.space} values ({first})"


@dataclass
class LaunchReport:
    """Figures of one launch."""

    kernel: str
    arch: str
    grid: tuple
    block: tuple
    cluster: tuple
    dynamic_smem: int
    schedule: str
    seconds: float
    instructions: int
    counters: dict[str, int] = field(default_factory=dict)
    unset: list[UnsetRead] = field(default_factory=list)
    warnings: dict[str, int] = field(default_factory=dict)
    races: list = field(default_factory=list)
    timeline: object = field(default=None, repr=False)

    @classmethod
    def of(cls, machine: Machine, seconds: float) -> LaunchReport:
        launch = machine.launch
        unset = [
            UnsetRead(space, ins.where, ins.op, address, count)
            for (space, _), (ins, address, count) in machine.unset.items()
        ]
        report = cls(
            machine.program.kernel.name,
            machine.arch.name,
            launch.grid,
            launch.block,
            launch.cluster,
            launch.dynamic_smem,
            str(machine.schedule),
            seconds,
            machine.instructions,
            dict(machine.counters),
            unset,
            dict(machine.warnings),
            list(machine.races.found.values()) if machine.races is not None else [],
            machine.timeline,
        )
        if unset and machine.options.unset == "raise":
            raise UninitializedReadError("\n".join(map(str, unset)))
        return report

    def __str__(self) -> str:
        ctas = self.grid[0] * self.grid[1] * self.grid[2]
        lines = [
            f"{self.kernel[:60]} on {self.arch}: {ctas} CTAs of {self.block[0]} threads"
            f"{f', cluster {self.cluster}' if self.cluster != (1, 1, 1) else ''}, "
            f"{self.instructions} warp instructions in {self.seconds:.2f} s ({self.schedule})"
        ]
        lines += [f"  {name}: {value}" for name, value in sorted(self.counters.items())]
        lines += [f"  unwritten: {read}" for read in self.unset[:20]]
        lines += [f"  race: {race}" for race in self.races[:20]]
        lines += [f"  warning ({n} times): {text}" for text, n in self.warnings.items()]
        return "\n".join(lines)


def _mbarrier_line(names: Names, cta: Cta, state: dict) -> str:
    offset = state["offset"]
    name = names.mbarrier(cta.cluster.ctas[state["rank"]], offset)
    missing = []
    if state["pending"]:
        missing.append(f"{state['pending']} of {state['expected']} arrivals")
    if state["tx"]:
        missing.append(f"{state['tx']} bytes")
    return (
        f"mbarrier {name} parity {state['parity']} (smem+{offset - SMEM_START}, phase "
        f"{state['phase']}), missing {' and '.join(missing) or 'nothing'}"
    )


def describe(names: Names, warp: Warp) -> str:
    """One line: what a warp waits for."""
    paths = [f"lanes {m:#x}" for _, m in warp.core.groups()]
    split = f" (diverged: {', '.join(paths)})" if len(paths) > 1 else ""
    return _describe(names, warp) + split


def _describe(names: Names, warp: Warp) -> str:
    info = warp.wait.describe()
    kind = info["on"]
    if kind == "mbarrier":
        return _mbarrier_line(names, warp.cta, info)
    if kind == "named barrier":
        have = f"{info['arrived']} of {info['expected']} threads are there"
        return f"{names.barrier(info['id'])}, {have}"
    if kind == "polling":
        return "memory that it polls"
    rest = ", ".join(f"{k} {v}" for k, v in info.items() if k != "on")
    return f"{kind}{f' ({rest})' if rest else ''}"


def deadlock(machine: Machine) -> DeadlockError:
    """The error for a launch in which nothing can go on; equal warps of a role share a line."""
    names = Names(machine.options.plan)
    lines: dict[tuple, list[int]] = {}
    for cluster in machine.running:
        for cta in cluster.ctas:
            for warp in cta.warps:
                if warp.wait is None:
                    continue
                ins = warp.ins
                key = (
                    cta.ctaid,
                    names.roles.get(warp.index),
                    describe(names, warp),
                    f"{ins.where}: {ins.op}",
                )
                lines.setdefault(key, []).append(warp.index)
    text = [
        f"deadlock in {machine.program.kernel.name[:80]} (schedule {machine.schedule}): "
        "no warp can go on and no asynchronous work is outstanding"
    ]
    for (ctaid, role, what, where), warps in lines.items():
        who = f"warps {_ranges(warps)}" if len(warps) > 1 else f"warp {warps[0]}"
        text.append(
            f"  CTA {ctaid} {f'{role} ' if role else ''}({who}) waits on {what}\n    at {where}"
        )
    return DeadlockError("\n".join(text))


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    out: list[str] = []
    start = prev = numbers[0]
    for n in [*numbers[1:], -1]:
        if n != prev + 1:
            out.append(str(start) if start == prev else f"{start}-{prev}")
            start = n
        prev = n
    return ", ".join(out)
