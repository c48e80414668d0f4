"""From an instruction to the native function that executes it and its flat list of operands."""

from __future__ import annotations

import re
from functools import cache

from fa_cute.sim.jit.library import spec
from fa_cute.sim.jit.registry import Form, Unsupported, form_of
from fa_cute.sim.ptx import Bank, Imm, Instr, Label, Mem, Not, Pair, Reg, Special, Sym, Vec

CLOCKS = ("%clock", "%clock64", "%clock_hi", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi")


class _Sink:
    """Operand that nothing reads."""


SINK = _Sink()
_PAIRED = frozenset(("setp", "shfl", "match", "elect"))
_EFFECTLESS = frozenset(("fence", "prefetch", "prefetchu", "griddepcontrol", "membar"))
_SIGN_FREE = frozenset(("add", "sub", "neg"))
_MEMORY = frozenset(("ld", "ldu", "st", "atom", "red"))
# Qualifiers of memory accesses that mean nothing on a machine that orders everything.
HINTS = frozenset(
    (
        *("relaxed", "acquire", "release", "volatile", "weak", "acq_rel", "cta", "cluster"),
        *("gpu", "sys", "mmio", "nc", "ca", "cg", "cs", "cv", "lu", "wb", "wt", "unified"),
        *("L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last"),
        *("L1::no_allocate", "L2::evict_normal", "L2::evict_first", "L2::evict_last"),
        *("L2::64B", "L2::128B", "L2::256B", "L2::cache_hint", "noftz"),
    )
)
_BITS = {"u8": "b8", "u16": "b16", "u32": "b32", "u64": "b64", "f16": "b16", "bf16": "b16"}
_BITS |= {"s32": "b32", "f32": "b32", "s64": "b64", "f64": "b64", "f16x2": "b32", "bf16x2": "b32"}
_BITS |= {"s16": "b16", "s8": "b8"}


def flatten(instr: Instr) -> list:
    """Operands in the order of the native function: pairs, vectors and .b128 spread out."""
    op = instr.parts[0]
    operands = instr.operands
    flat: list = []
    for operand in operands:
        kind = type(operand)
        if kind is Pair:
            flat += (operand.first, operand.second)
        elif kind is Vec:
            flat += operand.items
        else:
            flat.append(operand)
    if op in _PAIRED and type(operands[0]) is not Pair:
        flat.insert(1, SINK)
    if op in _MEMORY and "L2::cache_hint" in instr.parts:
        flat.pop()
    if op == "mov" and instr.parts[-1] == "b128":
        flat = [piece for operand in flat for piece in _halves(operand)]
    return flat


def _halves(operand) -> list:
    if isinstance(operand, Reg) and operand.type == ".b128":
        return [operand, _high_half(operand)]
    return [operand]


@cache  # for ever: registers are told apart by identity while a kernel is encoded
def _high_half(reg: Reg) -> Reg:
    return Reg(reg.bank, reg.index + 1, reg.name, reg.type)


def _width(operand) -> int:
    """Declared width of a register; 0 for anything else, and for a memory operand its base's."""
    if type(operand) is Mem:
        operand = operand.base
    return operand.bits if type(operand) is Reg else 0


def canonical(parts: tuple[str, ...]) -> tuple[str, ...]:
    """One name for opcodes that do the same: most types only say how many bits there are."""
    op, last = parts[0], parts[-1]
    if op in _SIGN_FREE and last in ("u16", "u32", "u64") and "sat" not in parts:
        return (*parts[:-1], "s" + last[1:])
    if op in ("mul", "mad") and "lo" in parts and last[0] == "u":
        return (*parts[:-1], "s" + last[1:])
    if op in ("mov", "selp") and last in _BITS:
        return (*parts[:-1], _BITS[last])
    if op == "setp" and parts[1] in ("eq", "ne") and last[0] in "us":
        return (*parts[:-1], _BITS[last])
    if op in _MEMORY:
        kept = tuple(p for p in parts if p not in HINTS)
        signed_load = op in ("ld", "ldu") and last[0] == "s"
        if op in ("ld", "ldu", "st") and last in _BITS and not signed_load:
            kept = (*kept[:-1], _BITS[last])
        return ("ld", *kept[1:]) if op == "ldu" else kept
    return parts


def _shape(operand) -> tuple[type, int]:
    """What of an operand decides the form."""
    return type(operand), _width(operand)


_FORMS: dict[tuple, tuple[str, tuple[str, ...]]] = {}


def form_for(instr: Instr) -> tuple[str, tuple[str, ...], list]:
    """(key of the native function, its signature, flat operands); raises Unsupported."""
    flat = flatten(instr)
    op = instr.parts[0]
    if op == "mov" and type(flat[-1]) is Special and flat[-1].name in CLOCKS:
        half = ("hi",) if flat[-1].name.endswith("_hi") else ()
        instr_parts, flat = ("clock", *half, instr.parts[-1]), flat[:1]
    elif op in _EFFECTLESS:
        instr_parts, flat = (op,), []
    else:
        instr_parts = instr.parts
        if op in ("bar", "barrier"):
            flat = flat[:1]
    shape = (instr_parts, *map(_shape, flat))
    known = _FORMS.get(shape)
    if known is None:
        known = _FORMS[shape] = _find(instr_parts, flat)
    return *known, flat


def _find(parts: tuple[str, ...], flat: list) -> tuple[str, tuple[str, ...]]:
    parts = canonical(parts)
    op = parts[0]
    widths = tuple(_width(o) for o in flat)
    if op == "st":
        value = 64 if parts[-1] == "b64" else 32
        widths = (widths[0], *(64 if w == 64 else value for w in widths[1:]))
    elif op == "cvt":
        wide = flat and widths[0] > max(16, _type_width(parts[-2]))
        widths = (widths[0],) if wide else ()
    elif op == "mov" and len(flat) == 2:
        widths = ()
    form: Form = form_of(parts, len(flat), widths)
    signature = spec(form.key).sig
    if len(signature) != len(flat):
        raise Unsupported(f"{len(flat)} operands instead of {len(signature)}")
    for kind, operand in zip(signature, flat, strict=True):
        _check(kind, operand)
    return form.key, signature


def _type_width(name: str) -> int:
    digits = re.match(r"[bsu](\d+)$", name)
    return int(digits[1]) if digits else 64


_WIDE = ("i64", "f64", "f32x2")


def _check(kind: str, operand) -> None:
    """A register of the wrong bank would be read as its neighbours; a form must fit its operand."""
    name = kind.lstrip("=")
    fits = True
    if name == "mem":
        fits = type(operand) is Mem and operand.coords is None
    elif name == "label":
        fits = type(operand) is Label
    elif name == "imm":
        fits = type(operand) is Imm
    elif isinstance(operand, (Reg, Not)):
        bank = operand.bank if isinstance(operand, Reg) else operand.reg.bank
        wanted = Bank.PRED if name == "pred" else Bank.R64 if name in _WIDE else Bank.R32
        fits = bank is wanted
    elif kind[0] == "=":
        fits = operand is SINK or (isinstance(operand, Sym) and operand.is_sink)
    else:
        fits = isinstance(operand, (Imm, Special, Sym))
    if not fits:
        what = getattr(operand, "name", operand)
        raise Unsupported(f"operand {what} as {name}")


def supports(instr: Instr) -> bool:
    """Whether native code can execute the instruction."""
    try:
        form_for(instr)
    except Unsupported:
        return False
    return True
