"""Tensor memory as a column map: 128 lanes x 512 columns of 32 bits, allocated by columns."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import PlanError

TMEM_COLS = 512
ALLOC_MIN = 32


@dataclass(frozen=True)
class TmemRegion:
    """Columns ``[start, start + cols)``; never live together with the regions in ``over``."""

    name: str
    start: int
    cols: int
    over: str | tuple[str, ...] | None = None

    @property
    def stop(self) -> int:
        return self.start + self.cols

    @property
    def partners(self) -> tuple[str, ...]:
        """The regions that this one replaces."""
        return (
            () if self.over is None else (self.over,) if isinstance(self.over, str) else self.over
        )

    def __str__(self) -> str:
        return f"{self.name!r} [{self.start}, {self.stop})"


@dataclass(frozen=True)
class TmemPlan:
    """Regions of one CTA. They overlap only where ``over`` says so."""

    regions: tuple[TmemRegion, ...]

    def __post_init__(self) -> None:
        names = [r.name for r in self.regions]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise PlanError(f"TMEM regions {twice} are declared twice")
        for r in self.regions:
            if r.start < 0 or r.cols <= 0 or r.stop > TMEM_COLS:
                raise PlanError(f"TMEM region {r} is outside columns [0, {TMEM_COLS})")
            for partner in r.partners:
                if partner == r.name or partner not in names:
                    raise PlanError(f"TMEM region {r} is over {partner!r}; other regions: {names}")
                if not _meet(r, self[partner]):
                    raise PlanError(
                        f"TMEM region {r} is over {self[partner]}, but they share no column"
                    )
        for i, a in enumerate(self.regions):
            for b in self.regions[i + 1 :]:
                if _meet(a, b) and not self.may_overlap(a.name, b.name):
                    raise PlanError(
                        f"TMEM regions {a} and {b} overlap; declare over={a.name!r} if they are "
                        "never live together"
                    )

    def __getitem__(self, name: str) -> TmemRegion:
        for r in self.regions:
            if r.name == name:
                return r
        raise PlanError(f"no TMEM region {name!r}; regions: {[r.name for r in self.regions]}")

    def may_overlap(self, a: str, b: str) -> bool:
        """Whether one of two regions is declared over the other, or both over the same third."""
        of_a, of_b = set(self[a].partners), set(self[b].partners)
        return b in of_a or a in of_b or bool(of_a & of_b)

    def aliases(self, name: str) -> tuple[str, ...]:
        """Other regions that share a column with this one."""
        return tuple(r.name for r in self.regions if r.name != name and _meet(r, self[name]))

    @property
    def used_cols(self) -> int:
        return max((r.stop for r in self.regions), default=0)

    @property
    def alloc_cols(self) -> int:
        """What ``tcgen05.alloc`` takes: a power of two from 32 to 512 (PTX ISA)."""
        cols = ALLOC_MIN
        while cols < self.used_cols:
            cols *= 2
        return cols


def _meet(a: TmemRegion, b: TmemRegion) -> bool:
    return a.start < b.stop and b.start < a.stop
