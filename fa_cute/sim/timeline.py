"""What each role did and when, in simulated steps: a Chrome trace and a picture.

A warp's clock advances by one for each of its instructions, and a warp that was woken takes the
clock of whoever woke it when that is later. So the picture shows order and waiting, not time.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from fa_cute.errors import SimError


@dataclass(frozen=True)
class Event:
    """`what` ("run", "mma", "tma.load", ...) on the lane of a role, from step `start` to `stop`."""

    cta: tuple
    lane: str
    start: int
    stop: int
    what: str


COLORS = {
    "run": "#4c78a8",
    "wait": "#e5e5e5",
    "mma": "#e45756",
    "tma.load": "#54a24b",
    "tma.store": "#b279a2",
}


class Timeline:
    """Events of one launch; `names` gives roles to warps."""

    def __init__(self, names=None) -> None:
        self.names = names
        self.events: list[Event] = []

    def lane(self, warp: int) -> str:
        """`softmax 3`: role and warp number."""
        role = self.names.roles.get(warp) if self.names is not None else None
        return f"{role or 'warp'} {warp}"

    def add(self, cta: tuple, lane: str, start: int, stop: int, what: str = "run") -> None:
        if stop > start:
            self.events.append(Event(cta, lane, start, stop, what))

    def chrome(self) -> list[dict]:
        """Events of the Chrome trace format: a process per CTA, a thread per role."""
        out, processes, threads = [], {}, {}
        for e in self.events:
            if e.cta not in processes:
                pid = processes[e.cta] = len(processes)
                name = {"name": f"CTA {e.cta}"}
                out.append({"ph": "M", "pid": pid, "name": "process_name", "args": name})
            pid = processes[e.cta]
            if (pid, e.lane) not in threads:
                tid = threads[pid, e.lane] = len(threads)
                meta = {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name"}
                out.append(meta | {"args": {"name": e.lane}})
            out.append(
                {
                    "ph": "X",
                    "pid": pid,
                    "tid": threads[pid, e.lane],
                    "ts": e.start,
                    "dur": e.stop - e.start,
                    "name": e.what,
                }
            )
        return out

    def save_chrome(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps({"traceEvents": self.chrome()}))

    def save_png(self, path: str | Path, cta: tuple | None = None, title: str = "") -> None:
        """One CTA (the first by default), a row per role."""
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
            from matplotlib.patches import Patch
        except ImportError as error:
            raise SimError(
                "a picture of a timeline needs matplotlib: pip install matplotlib, or write it for "
                "ui.perfetto.dev by save_chrome"
            ) from error
        cta = cta if cta is not None else (self.events[0].cta if self.events else (0, 0, 0))
        events = [e for e in self.events if e.cta == cta]
        lanes = sorted({e.lane for e in events}, key=_lane_order)
        figure = Figure(figsize=(14, 1.2 + 0.32 * len(lanes)), dpi=110)
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        kinds = list(dict.fromkeys(e.what for e in events))
        for row, lane in enumerate(lanes):
            for what in kinds:
                bars = [
                    (e.start, e.stop - e.start) for e in events if (e.lane, e.what) == (lane, what)
                ]
                color = COLORS.get(what, "#f58518")
                axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=color, linewidth=0)
        axes.set_yticks(range(len(lanes)), lanes, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel("simulated steps (warp instructions; order, not time)")
        axes.set_title(title or f"CTA {cta}", fontsize=10)
        handles = [Patch(color=COLORS.get(k, "#f58518"), label=k) for k in kinds]
        axes.legend(
            handles=handles, fontsize=7, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(kinds)
        )
        figure.tight_layout()
        figure.savefig(path)


def _lane_order(lane: str):
    """By the first warp number in the name, so that roles stand in warp order."""
    digits = "".join(c if c.isdigit() else " " for c in lane).split()
    return (0, int(digits[0])) if digits else (1, lane)
