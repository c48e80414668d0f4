"""Which bytes of shared memory the asynchronous proxy (TMA, tensor cores) may see.

Ordinary stores are made in the generic proxy: the writer must execute fence.proxy.async before an
asynchronous unit reads the bytes. So each store leaves the writer's current mark in `smem_valid`
(0: never written, 1: visible to all), a fence makes the mark of its warp good and gives the warp a
new one, and a reader looks at the marks of what it reads. Marks are a byte, so they are recycled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fa_cute.errors import MisuseError
from fa_cute.sim.memory import place

if TYPE_CHECKING:
    from fa_cute.sim.cta import Cluster, Cta
    from fa_cute.sim.ptx import Instr
    from fa_cute.sim.warp import Warp

VISIBLE = 1
_MARKS = 256
_PATTERN = 0x0101010101010101
_SPARE = 32  # marks beyond one per warp that make recycling rare


class Proxy:
    """The marks of one cluster."""

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self.fenced = np.zeros(_MARKS, bool)
        self.fenced[:2] = True  # unwritten bytes are reported elsewhere
        self.owner: dict[int, Warp] = {}
        self.mark_of: dict[Warp, int] = {}
        self.born: dict[int, int] = {}  # fences of the cluster before the mark came into use
        self.fences = 0
        self.free = list(range(_MARKS - 1, VISIBLE, -1))
        warps = [warp for cta in cluster.ctas for warp in cta.warps]
        self.on = len(warps) <= _MARKS - 2 - _SPARE
        for warp in warps:
            if self.on:
                self._renew(warp)
            else:
                warp.core.ctx.mark = _PATTERN * VISIBLE

    def _renew(self, warp: Warp) -> None:
        if not self.free:
            self._recycle()
        mark = self.free.pop()
        self.fenced[mark] = False
        self.owner[mark], self.mark_of[warp], self.born[mark] = warp, mark, self.fences
        warp.core.ctx.mark = _PATTERN * mark

    def _recycle(self) -> None:
        """Rewrite the marks that are good to VISIBLE, so that they can be given out again."""
        table = np.arange(_MARKS, dtype=np.uint8)
        current = set(self.mark_of.values())
        good = [m for m in range(2, _MARKS) if self.fenced[m] and m not in current]
        table[good] = VISIBLE
        for cta in self.cluster.ctas:
            np.take(table, cta.smem_valid, out=cta.smem_valid, mode="clip")
        self.free = good[::-1]

    def fence(self, warp: Warp) -> None:
        """The warp makes what it wrote visible."""
        if self.on:
            self.fences += 1
            self.fenced[self.mark_of[warp]] = True
            self._renew(warp)

    def check(self, cta: Cta, marks: np.ndarray, address: int, ins: Instr) -> None:
        """An asynchronous read of bytes with these marks, from `address` on."""
        if self.fenced[marks].all():
            return
        marks = marks.reshape(-1)
        first = int(np.flatnonzero(~self.fenced[marks])[0])
        mark = int(marks[first])
        writer = self.owner[mark]
        text = (
            f"{place(ins)}an asynchronous read of shared memory (near smem+"
            f"{(address & 0xFFFFFF) - 0x400}) that warp {writer.index} of CTA {writer.cta.rank} "
            "wrote with ordinary stores"
        )
        if self.fences > self.born[mark]:
            cta.machine.warn(f"{text}; only another warp has executed fence.proxy.async since")
            return
        raise MisuseError(f"{text}, with no fence.proxy.async in between")


def is_proxy_fence(ins: Instr) -> bool:
    """Does this fence order shared memory between the generic and the asynchronous proxy?"""
    parts = set(ins.parts)
    return "proxy" in parts and bool(
        parts & {"async", "async::generic"} and "global" not in parts and "tensormap" not in parts
    )
