"""A plan as text for people and as a dict for tools.

``plan`` is any object with ``warps, topology, smem`` and ``tmem`` (None or missing without tensor
memory).
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from .smem import SmemPlan
from .tmem import TmemPlan
from .topology import Topology
from .warps import WarpPlan

MAP_WIDTH = 64  # characters of a memory map


def text(plan: Any, title: str = "") -> str:
    """The whole plan: warps, edges, barriers, tensor memory, shared memory."""
    parts = [title] if title else []
    parts.append(warps_text(plan.warps))
    parts.append(edges_text(plan.topology, plan.warps, plan.smem))
    if plan.topology.barriers:
        parts.append(barriers_text(plan.topology, plan.warps))
    if (tmem := getattr(plan, "tmem", None)) is not None:
        parts.append(tmem_text(tmem))
    parts.append(smem_text(plan.smem))
    return "\n\n".join(parts) + "\n"


def heading(plan: Any, title: str) -> str:
    """The start of a documentation page: what the docstring of the plan's module says."""
    about = inspect.cleandoc(sys.modules[type(plan).__module__].__doc__ or "")
    headline, _, rest = about.partition("\n")
    drawing = f"```text\n{rest.strip()}\n```\n" if rest.strip() else ""
    return f"# {title}\n\n{headline}\n\n{drawing}"


def warps_text(warps: WarpPlan) -> str:
    """One row a role, and the register sum."""
    rows = [("role", "warps", "teams", "threads", "regs", "setmaxnreg", "registers")]
    for r in warps.roles:
        change = (
            "-" if r.regs == warps.launch_regs else "inc" if r.regs > warps.launch_regs else "dec"
        )
        used = r.threads * r.regs
        rows.append((r.name, _span(r.start, r.stop), r.teams, r.threads, r.regs, change, used))
    tail = (
        f"{warps.threads} threads, {warps.launch_regs} registers each at launch; "
        f"{warps.budget} of {warps.launch_regs * warps.threads} used"
    )
    return f"WARPS\n{_table(rows)}\n{tail}"


def edges_text(topology: Topology, warps: WarpPlan, smem: SmemPlan) -> str:
    """One arrow an edge, with stages, arrivals a phase (producer/consumer) and TMA bytes."""
    rows = []
    for e in topology.edges:
        src, dst = "+".join(e.sources), "+".join(e.sinks)
        producer, consumer = e.arrivals(warps)
        counts = f"{producer} / {'-' if e.one_way else consumer}"
        notes = [f"{e.tx_bytes(smem)} B of {'+'.join(e.tx)}"] if e.tx else []
        notes += [f"one-way, ordered by {e.ordered_by}"] if e.one_way else []
        rows.append((src, e, dst, f"x{e.stages}", e.via.value, counts, "; ".join(notes)))
    if not rows:
        return "EDGES\nnone"
    left = max(len(r[0]) for r in rows)
    name = max(len(r[1].name) for r in rows)
    cells = [("", "stages", "via", "arrivals", "")]
    for src, e, dst, *rest in rows:
        arrow = f"{src.rjust(left)} --{e.name.center(name, '-')}--> {dst}"
        cells.append((arrow, *rest))
    return (
        f"EDGES (full / empty arrivals per phase)\n{_table(cells)}\n"
        f"{topology.mbarrier_bytes} bytes of mbarriers"
    )


def barriers_text(topology: Topology, warps: WarpPlan) -> str:
    """Named barriers with their hardware numbers."""
    rows = [("id", "barrier", "threads", "roles")]
    for b in topology.barriers:
        rows.append((topology.barrier_id(b.name), b.name, b.num_threads(warps), " ".join(b.roles)))
    return f"NAMED BARRIERS\n{_table(rows)}"


def tmem_text(tmem: TmemPlan) -> str:
    """Columns to scale, one line a region."""
    rows = [("region", "columns", "cols", "over", f"0 .. {tmem.alloc_cols}")]
    for r in tmem.regions:
        rows.append(
            (
                r.name,
                f"[{r.start}, {r.stop})",
                r.cols,
                " ".join(r.partners) or "-",
                _bar(r.start, r.stop, tmem.alloc_cols),
            )
        )
    return f"TENSOR MEMORY: {tmem.used_cols} of {tmem.alloc_cols} columns allocated\n{_table(rows)}"


def smem_text(smem: SmemPlan) -> str:
    """Bytes to scale, one line a field."""
    total = max(smem.total, 1)
    offsets = smem.offsets
    rows = [("field", "bytes", "stages", "offset", "over", f"0 .. {smem.total}")]
    for f in smem.fields:
        at = offsets[f.name]
        rows.append((f.name, f.bytes, f.stages, at, f.over or "-", _bar(at, at + f.size, total)))
    return (
        f"SHARED MEMORY: {smem.total} bytes "
        f"({smem.field_bytes} in fields, {smem.reserved_bytes} reserved)\n{_table(rows)}"
    )


def to_dict(plan: Any) -> dict[str, Any]:
    """The plan in JSON types: roles, edges with arrivals and bytes, barriers, memory maps."""
    warps, topology, smem = plan.warps, plan.topology, plan.smem
    tmem = getattr(plan, "tmem", None)
    edges = []
    for e in topology.edges:
        producer, consumer = e.arrivals(warps)
        edges.append(
            {
                "name": e.name,
                "via": e.via.value,
                "src": list(e.sources),
                "dst": list(e.sinks),
                "stages": e.stages,
                "producer_arrivals": producer,
                "consumer_arrivals": 0 if e.one_way else consumer,
                "ordered_by": e.ordered_by,
                "tx_bytes": e.tx_bytes(smem),
                "tx": list(e.tx),
            }
        )
    return {
        "threads": warps.threads,
        "launch_regs": warps.launch_regs,
        "roles": [
            {"name": r.name, "start": r.start, "stop": r.stop, "regs": r.regs, "teams": r.teams}
            for r in warps.roles
        ],
        "edges": edges,
        "barriers": [
            {
                "name": b.name,
                "id": topology.barrier_id(b.name),
                "threads": b.num_threads(warps),
                "roles": list(b.roles),
            }
            for b in topology.barriers
        ],
        "tmem": None
        if tmem is None
        else {
            "alloc_cols": tmem.alloc_cols,
            "regions": [
                {"name": r.name, "start": r.start, "stop": r.stop, "over": list(r.partners)}
                for r in tmem.regions
            ],
        },
        "smem": {
            "total": smem.total,
            "reserved_bytes": smem.reserved_bytes,
            "fields": [
                {
                    "name": f.name,
                    "bytes": f.bytes,
                    "stages": f.stages,
                    "offset": smem.offset(f.name),
                    "over": f.over,
                }
                for f in smem.fields
            ],
        },
    }


def _span(start: int, stop: int) -> str:
    return str(start) if stop == start + 1 else f"{start}-{stop - 1}"


def _bar(start: int, stop: int, total: int) -> str:
    first = start * MAP_WIDTH // total
    last = max(-(-stop * MAP_WIDTH // total), first + 1)
    return "|" + " " * first + "#" * (last - first) + " " * (MAP_WIDTH - last) + "|"


def _table(rows: list[tuple[Any, ...]]) -> str:
    """Columns as wide as their widest cell; numbers to the right."""
    cells = [[str(c) for c in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    right = [all(isinstance(row[i], int) for row in rows[1:]) for i in range(len(widths))]
    lines = []
    for row in cells:
        parts = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right)]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)
