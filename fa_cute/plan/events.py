"""What roles do to edges, barriers and memory: the words of protocol scripts (see check.py)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import PlanError


class ProtocolError(PlanError):
    """Roles that hang, overrun or race; ``kind`` is deadlock, overrun, order or race."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


@dataclass(frozen=True)
class Event:
    """One step of an agent.

    ``slot`` None is the next slot of the ring; ``span`` is a part of a region.
    """

    verb: str
    name: str
    slot: int | None = None
    span: tuple[int, int] | None = None

    def __str__(self) -> str:
        return f"{self.verb} {self.name}" + ("" if self.slot is None else f"[{self.slot}]")


def acquire(edge: str, slot: int | None = None) -> Event:
    """Producer: wait until the slot is free."""
    return Event("acquire", edge, slot)


def claim(edge: str, slot: int | None = None) -> Event:
    """Producer: take the slot without waiting, since something else orders it."""
    return Event("claim", edge, slot)


def commit(edge: str, slot: int | None = None) -> Event:
    """Producer: the slot is full (of TMA loads: will be)."""
    return Event("commit", edge, slot)


def wait(edge: str, slot: int | None = None) -> Event:
    """Consumer: wait until the slot is full."""
    return Event("wait", edge, slot)


def use(edge: str, slot: int | None = None) -> Event:
    """Consumer: touch what a held slot carries; wrong before ``wait`` or after ``release``."""
    return Event("use", edge, slot)


def release(edge: str, slot: int | None = None) -> Event:
    """Consumer: the slot is free again."""
    return Event("release", edge, slot)


def tail(edge: str, slots: Iterable[int]) -> list[Event]:
    """Producer: wait until every slot came back."""
    return [Event("tail", edge, s) for s in slots]


def sync(barrier: str) -> Event:
    """Named barrier: arrive and wait."""
    return Event("sync", barrier)


def arrive(barrier: str) -> Event:
    """Named barrier: arrive only."""
    return Event("arrive", barrier)


def read(region: str, slot: int | None = None, span: tuple[int, int] | None = None) -> Event:
    """Read a TMEM region or an SMEM field.

    ``slot`` is one stage of a field; ``span`` are some columns of a region, bytes of a field.
    """
    return Event("read", region, slot, span)


def write(region: str, slot: int | None = None, span: tuple[int, int] | None = None) -> Event:
    """Write a TMEM region or an SMEM field, like :func:`read`."""
    return Event("write", region, slot, span)
