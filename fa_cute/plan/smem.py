"""Shared memory as a byte map."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import PlanError

# Largest pattern of a 128-byte swizzle: 8 rows of 128 bytes. TMA and UMMA operands start on it.
SWIZZLE_ALIGN = 1024


@dataclass(frozen=True)
class SmemField:
    """``stages`` buffers of ``bytes`` each.

    ``over`` names the field whose memory this one reuses, from its start and inside it; the plan
    says why the two are never live together.
    """

    name: str
    bytes: int
    stages: int = 1
    align: int = SWIZZLE_ALIGN
    over: str | None = None

    @property
    def size(self) -> int:
        """Bytes of all stages."""
        return self.bytes * self.stages


@dataclass(frozen=True)
class SmemPlan:
    """Fields in the order of their addresses.

    ``reserved_bytes`` is what else the kernel takes: barriers, pointers, and what rounds them up
    to the alignment of the first field.
    """

    fields: tuple[SmemField, ...]
    reserved_bytes: int = 0

    def __post_init__(self) -> None:
        names = [f.name for f in self.fields]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise PlanError(f"SMEM fields {twice} are declared twice")
        if self.reserved_bytes < 0:
            raise PlanError(f"SMEM reserved_bytes is {self.reserved_bytes}; at least 0")
        for f in self.fields:
            if f.bytes <= 0 or f.stages <= 0:
                raise PlanError(
                    f"SMEM field {f.name!r} has {f.stages} stages of {f.bytes} bytes; both are "
                    "positive"
                )
            if f.align <= 0 or f.align & (f.align - 1):
                raise PlanError(f"SMEM field {f.name!r} has align {f.align}; a power of two")
            if f.stages > 1 and f.bytes % f.align:
                raise PlanError(
                    f"SMEM field {f.name!r}: {f.bytes} bytes a stage are no multiple of its align "
                    f"{f.align}"
                )
            if f.over is not None:
                self._check_reuse(f)

    def _check_reuse(self, f: SmemField) -> None:
        base = self[f.over]
        if base.over is not None:
            raise PlanError(
                f"SMEM field {f.name!r} is over {base.name!r}, itself over {base.over!r}; name "
                "that one"
            )
        if f.size > base.size:
            raise PlanError(
                f"SMEM field {f.name!r} needs {f.size} bytes, {base.name!r} that it reuses has "
                f"{base.size}"
            )
        if self.offset(base.name) % f.align:
            raise PlanError(
                f"SMEM field {f.name!r} has align {f.align}, {base.name!r} that it reuses starts "
                "at "
                f"{self.offset(base.name)}"
            )

    def __getitem__(self, name: str) -> SmemField:
        for f in self.fields:
            if f.name == name:
                return f
        raise PlanError(f"no SMEM field {name!r}; fields: {[f.name for f in self.fields]}")

    def bytes(self, name: str) -> int:
        """Bytes of one stage: what one TMA load of it brings."""
        return self[name].bytes

    @property
    def offsets(self) -> dict[str, int]:
        """First byte of each field."""
        at, found = 0, {}
        for f in self.fields:
            if f.over is None:
                at = -(-at // f.align) * f.align
                found[f.name] = at
                at += f.size
        for f in self.fields:
            if f.over is not None:
                found[f.name] = found[f.over]
        return found

    def offset(self, name: str) -> int:
        """First byte of a field."""
        return self.offsets[self[name].name]

    def aliases(self, name: str) -> tuple[str, ...]:
        """Other fields that share a byte with this one."""
        at, end = self.offset(name), self.offset(name) + self[name].size
        return tuple(
            f.name
            for f in self.fields
            if f.name != name and self.offset(f.name) < end and at < self.offset(f.name) + f.size
        )

    @property
    def field_bytes(self) -> int:
        """Bytes of the fields with their padding."""
        return max((self.offsets[f.name] + f.size for f in self.fields), default=0)

    @property
    def total(self) -> int:
        """Bytes that the kernel takes."""
        return self.field_bytes + self.reserved_bytes
