"""Which native function executes an instruction: generators by the first part of the opcode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fa_cute.sim.jit.ir import Fn

INT_TYPES = {f"{k}{w}": (f"i{w}", k == "s") for k in "bsu" for w in (8, 16, 32, 64)}
FLOAT_TYPES = ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2", "f32x2")


class Unsupported(Exception):
    """No native function for this form; the machine may still handle it."""


@dataclass(frozen=True)
class Form:
    """What selects a native function: the opcode's parts and the operands' number and widths."""

    parts: tuple[str, ...]
    count: int  # operands after flattening vectors and pairs; 0 where it doesn't matter
    bits: tuple[int, ...] = ()  # declared width of each register, 0 for others; () if it's all one

    @property
    def op(self) -> str:
        return self.parts[0]

    @property
    def mods(self) -> tuple[str, ...]:
        return self.parts[1:]

    @property
    def type(self) -> str:
        return self.parts[-1]

    def has(self, *parts: str) -> bool:
        return any(p in self.parts for p in parts)

    def rest(self, *known: str) -> None:
        """Every modifier must be one of `known` (a typo must not be executed as something else)."""
        for part in self.parts[1:]:
            if part not in known:
                raise Unsupported(f".{part}")

    @property
    def key(self) -> str:
        text = ".".join(self.parts)
        if self.count:
            text += f"/{self.count}"
        return text + (";" + ",".join(map(str, self.bits)) if self.bits else "")

    @staticmethod
    def of(key: str) -> Form:
        head, _, bits = key.partition(";")
        head, _, count = head.partition("/")
        widths = tuple(int(b) for b in bits.split(",")) if bits else ()
        return Form(tuple(head.split(".")), int(count or 0), widths)


@dataclass(frozen=True)
class Spec:
    """A native function: the kinds of its operands in order and the writer of its body.

    Kinds: an element type of `ir` for a source row, `=type` for a destination row, `pred`, `=pred`,
    `imm` (a constant in the slot), `mem` (row of the base address; offset in the immediate),
    `=pair` stands for a predicate that the instruction may leave out.
    """

    sig: tuple[str, ...]
    emit: Callable[[Fn], None] = field(repr=False)


@dataclass(frozen=True)
class _Family:
    make: Callable[[Form], Spec]
    counted: bool
    sized: bool


_FAMILIES: dict[str, _Family] = {}


def op(*names: str, counted: bool = False, sized: bool = False):
    """Register a generator; `counted`/`sized` forms differ by the number/widths of operands too."""

    def register(make: Callable[[Form], Spec]):
        for name in names:
            _FAMILIES[name] = _Family(make, counted, sized)
        return make

    return register


def form_of(parts: tuple[str, ...], count: int, bits: tuple[int, ...]) -> Form:
    family = _FAMILIES.get(parts[0])
    if family is None:
        raise Unsupported(parts[0])
    return Form(parts, count if family.counted else 0, bits if family.sized else ())


def spec_of(form: Form) -> Spec:
    family = _FAMILIES.get(form.op)
    if family is None:
        raise Unsupported(form.op)
    return family.make(form)


def int_type(name: str) -> tuple[str, bool]:
    """(element, signed) of an integer type."""
    if name not in INT_TYPES:
        raise Unsupported(f".{name}")
    return INT_TYPES[name]


def float_type(name: str) -> str:
    if name not in FLOAT_TYPES:
        raise Unsupported(f".{name}")
    return name


def names() -> list[str]:
    """First parts of the opcodes that have a generator."""
    return sorted(_FAMILIES)
