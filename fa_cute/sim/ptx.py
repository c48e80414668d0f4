"""PTX text to instructions: the part of the language that compilers and inline assembly emit.

The result keeps what later stages need and nothing else: registers are already resolved to a bank
and a row (scopes of inline assembly have their own registers and labels), branch targets to
instruction indices, and `.loc` to a Python file and line.
"""

from __future__ import annotations

import bisect
import enum
import re
import struct
from dataclasses import dataclass, field
from functools import cached_property

from fa_cute.errors import SimError


class PtxSyntaxError(SimError):
    """A text that this parser can't read, with its line."""


class Bank(str, enum.Enum):
    """Where a register lives: one row of 32 lanes in `r32` or `r64`, one lane mask in `pred`."""

    R32 = "r32"
    R64 = "r64"
    PRED = "pred"


@dataclass(frozen=True, slots=True)
class Reg:
    bank: Bank
    index: int
    name: str
    type: str  # as declared: ".b16", ".f32", ".pred", ".b128" (two consecutive rows of r64)

    @property
    def bits(self) -> int:
        """Declared width; a predicate counts as 1."""
        return 1 if self.bank is Bank.PRED else _TYPE_BITS[self.type]


@dataclass(frozen=True, slots=True)
class Imm:
    """A constant: `bits` is the value in 64-bit two's complement, or the float's own pattern."""

    bits: int
    is_float: bool
    text: str

    @property
    def signed(self) -> int:
        return self.bits - (1 << 64) if self.bits >> 63 else self.bits


@dataclass(frozen=True, slots=True)
class Sym:
    """A name that is no register: a parameter, a shared or global variable, or the sink `_`."""

    name: str
    offset: int = 0

    @property
    def is_sink(self) -> bool:
        return self.name == "_"


@dataclass(frozen=True, slots=True)
class Special:
    """A special register, with its dot: `%tid.x`, `%laneid`, `%cluster_ctarank`."""

    name: str


@dataclass(frozen=True, slots=True)
class Label:
    name: str
    target: int  # index of the instruction that it stands before


@dataclass(frozen=True, slots=True)
class Not:
    """A negated predicate operand, `!%p1`."""

    reg: Reg


@dataclass(frozen=True, slots=True)
class Vec:
    items: tuple


@dataclass(frozen=True, slots=True)
class Pair:
    """`d|p`, the two results of elect, shfl and setp."""

    first: object
    second: object


@dataclass(frozen=True, slots=True)
class Mem:
    """`[base + offset]`, or `[base, {coords}]` for a tensor map."""

    base: Reg | Sym | Imm
    offset: int = 0
    coords: Vec | None = None


@dataclass(frozen=True, slots=True)
class Instr:
    op: str
    parts: tuple[str, ...]
    operands: tuple
    guard: tuple[Reg, bool] | None  # (register, negated)
    line: int
    loc: tuple[str, int] | None

    def starts(self, *parts: str) -> bool:
        return self.parts[: len(parts)] == parts

    def has(self, part: str) -> bool:
        return part in self.parts

    @property
    def where(self) -> str:
        """`PTX line 12 (softmax.py:34)`, for messages."""
        if self.loc is None:
            return f"PTX line {self.line}"
        return f"PTX line {self.line} ({self.loc[0].rsplit('/', 1)[-1]}:{self.loc[1]})"


@dataclass(frozen=True, slots=True)
class Param:
    name: str
    align: int
    size: int
    offset: int


@dataclass(frozen=True, slots=True)
class Var:
    """A `.shared`, `.global`, `.const` or `.local` variable; `extern` of size 0 is dynamic."""

    name: str
    space: str
    align: int
    size: int
    extern: bool
    init: bytes = b""


@dataclass
class Kernel:
    name: str
    params: tuple[Param, ...]
    instrs: list[Instr]
    labels: dict[str, int]
    n32: int
    n64: int
    npred: int
    shared: dict[str, Var]
    maxntid: tuple[int, int, int] | None
    reqntid: tuple[int, int, int] | None
    cluster: tuple[int, int, int] | None
    target: str
    text: str = field(repr=False, default="")
    regs: dict[str, Reg] = field(repr=False, default_factory=dict)
    globals: dict[str, Var] = field(repr=False, default_factory=dict)
    local: dict[str, Var] = field(repr=False, default_factory=dict)

    @property
    def param_bytes(self) -> int:
        return self.params[-1].offset + self.params[-1].size if self.params else 0

    @cached_property
    def param(self) -> dict[str, Param]:
        return {p.name: p for p in self.params}


@dataclass
class Module:
    version: str
    target: str
    kernels: dict[str, Kernel]
    files: dict[int, str]
    variables: dict[str, Var]


_TYPE_BITS = {
    f".{kind}{width}": width
    for kind, widths in {
        "b": (8, 16, 32, 64, 128),
        "u": (8, 16, 32, 64),
        "s": (8, 16, 32, 64),
    }.items()
    for width in widths
} | {".f16": 16, ".bf16": 16, ".f16x2": 32, ".bf16x2": 32, ".f32": 32, ".f64": 64, ".pred": 1}

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_LABEL = re.compile(r"([%$\w]+)\s*:(?!:)")
_SPACE = re.compile(r"[\s;]*")
_LINE_DIRECTIVE = re.compile(r"\.(loc|file)\b([^\n]*)")
_LOC = re.compile(r"\s*(\d+)\s+(\d+)")
_FILE = re.compile(r'\s*(\d+)\s+"([^"]*)"')
_NUMBER = re.compile(
    r"-?(0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+|\d+\.\d*|\d+)U?$"
)
_SPECIAL = re.compile(
    r"%(n?tid|n?ctaid|(n?cluster|cluster_n?cta)id|laneid|n?warpid|n?smid|gridid|is_explicit_cluster"
    r"|cluster_n?ctarank|lanemask_\w+|clock(_hi)?(64)?|globaltimer(_lo|_hi)?"
    r"|dynamic_smem_size|total_smem_size|aggr_smem_size|pm\d+|envreg\d+)(\.[xyzw])?$"
)
_VAR = re.compile(
    r"((?:\.(?:extern|visible|weak|common)\s+)*)\.(shared|global|const|local)\b\s*"
    r"((?:\.\w+\s+|\.align\s+\d+\s+)*?)\.(\w+)\s+([\w$%]+)\s*((?:\[[^\]]*\])*)\s*(?:=\s*(.*))?$",
    re.S,
)
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)(?:\s+\.ptr\b.*?)?\s+([\w$%]+)\s*(?:\[(\d+)\])?$",
    re.S,
)
_ENTRY = re.compile(r"((?:\.(?:visible|weak|extern)\s+)*)\.(entry|func)\b")
_TRIPLE = re.compile(
    r"\.(maxntid|reqntid|reqnctapercluster)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?"
)


def _number(text: str) -> Imm | None:
    if not _NUMBER.match(text):
        return None
    negative, body = text.startswith("-"), text.lstrip("-").rstrip("U")
    kind = body[:2].lower()
    if kind == "0f" and len(body) == 10:
        bits = int(body[2:], 16)
        return Imm(bits ^ (0x80000000 if negative else 0), True, text)
    if kind == "0d" and len(body) == 18:
        bits = int(body[2:], 16)
        return Imm(bits ^ (1 << 63 if negative else 0), True, text)
    if "." in body:
        bits = struct.unpack("<I", struct.pack("<f", float(body)))[0]
        return Imm(bits ^ (0x80000000 if negative else 0), True, text)
    base = 16 if kind == "0x" else 8 if len(body) > 1 and body[0] == "0" and body.isdigit() else 10
    value = int(body, base)
    return Imm((-value if negative else value) & 0xFFFFFFFFFFFFFFFF, False, text)


def split_operands(text: str) -> list[str]:
    """Split at top-level commas; brackets of every kind nest."""
    if "{" not in text and "[" not in text and "(" not in text:
        return [item.strip() for item in text.split(",")] if text else []
    items, depth, start = [], 0, 0
    for i, char in enumerate(text):
        if char in "{[(":
            depth += 1
        elif char in "}])":
            depth -= 1
        elif char == "," and depth == 0:
            items.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*items, last] if last else items


class _Scope:
    """Names of one `{ }`: registers, ranges of registers (`%r<40>`), labels."""

    def __init__(self, parent: _Scope | None, number: int):
        self.parent, self.number = parent, number
        self.regs: dict[str, Reg] = {}
        self.single: dict[str, str] = {}
        self.ranges: dict[str, str] = {}
        self.labels: dict[str, int] = {}


class _Body:
    """One kernel body while it is being read."""

    def __init__(self, text: str, line_of, shared: dict[str, Var]):
        self.text, self.line_of, self.shared = text, line_of, shared
        self.local: dict[str, Var] = {}
        self.counts = {Bank.R32: 0, Bank.R64: 0, Bank.PRED: 0}
        self.regs: dict[str, Reg] = {}
        self.scope = _Scope(None, 0)
        self.scopes = 1
        self.raw: list[tuple] = []  # (op, operands text, guard text, line, loc, scope)
        self.loc: tuple[int, int] | None = None

    # ---- names ----
    def declare(self, text: str) -> None:
        """`.reg .b32 %r<40>, a;`"""
        match = re.match(r"\.reg\s+(?:\.v[24]\s+)?(\.\w+)\s+(.*)", text, re.S)
        if not match or match[1] not in _TYPE_BITS:
            raise PtxSyntaxError(f"unreadable register declaration {text!r}")
        for name in match[2].split(","):
            name = name.strip()
            ranged = re.match(r"(.*?)\s*<\s*(\d+)\s*>$", name)
            if ranged:
                self.scope.ranges[ranged[1]] = match[1]
            else:
                self.scope.single[name] = match[1]

    def find(self, name: str, scope: _Scope) -> Reg | None:
        level: _Scope | None = scope
        stem = name.rstrip("0123456789")
        while level is not None:
            reg = level.regs.get(name)
            if reg is not None:
                return reg
            kind = level.single.get(name)
            if kind is None and stem != name:
                kind = level.ranges.get(stem)
            if kind is not None:
                return self.create(name, kind, level)
            level = level.parent
        return None

    def create(self, name: str, kind: str, scope: _Scope) -> Reg:
        bank = Bank.PRED if kind == ".pred" else Bank.R64 if _TYPE_BITS[kind] >= 64 else Bank.R32
        reg = Reg(bank, self.counts[bank], name, kind)
        self.counts[bank] += 2 if kind == ".b128" else 1
        scope.regs[name] = reg
        self.regs[name if scope.number == 0 else f"{name}#{scope.number}"] = reg
        return reg

    # ---- operands ----
    def operand(self, text: str, scope: _Scope):
        reg = self.find(text, scope)
        if reg is not None:
            return reg
        first = text[0]
        if first == "[":
            return self.memory(text[1:-1].strip(), scope)
        if first in "{(":
            return Vec(tuple(self.operand(t, scope) for t in split_operands(text[1:-1].strip())))
        if first == "!":
            return Not(self.operand(text[1:].strip(), scope))
        if "|" in text:
            first_text, second = text.split("|", 1)
            return Pair(
                self.operand(first_text.strip(), scope), self.operand(second.strip(), scope)
            )
        number = _number(text)
        if number is not None:
            return number
        if first == "%" and _SPECIAL.match(text):
            return Special(text)
        if first == "%" and re.match(r"%\w+\.[xyzw]$", text):
            raise PtxSyntaxError(f"unknown register {text!r}")
        return self.symbol(text)

    def symbol(self, text: str) -> Sym:
        match = re.match(r"([%$\w]+)\s*(?:\+\s*(-?\w+)\s*)?$", text)
        if not match:
            raise PtxSyntaxError(f"unreadable operand {text!r}")
        return Sym(match[1], int(match[2], 0) if match[2] else 0)

    def memory(self, text: str, scope: _Scope) -> Mem:
        items = split_operands(text)
        coords = self.operand(items[1], scope) if len(items) > 1 else None
        match = re.match(r"([%$\w.]+)\s*(?:([+-])\s*(-?\s*\w+))?$", items[0])
        if not match:
            raise PtxSyntaxError(f"unreadable address [{text}]")
        offset = int(match[3].replace(" ", ""), 0) if match[3] else 0
        base = self.operand(match[1], scope)
        return Mem(base, -offset if match[2] == "-" else offset, coords)

    def target(self, name: str, scope: _Scope) -> int | None:
        level: _Scope | None = scope
        while level is not None:
            if name in level.labels:
                return level.labels[name]
            level = level.parent
        return None

    # ---- statements ----
    def statement(self, text: str, line: int) -> None:
        if text.startswith("."):
            word = text.split(None, 1)[0]
            if word == ".reg":
                self.declare(text)
            elif word in (".shared", ".extern") or ".shared" in text.split("=")[0]:
                var = _variable(text)
                self.shared[var.name] = var
            elif word == ".local":
                var = _variable(text)
                self.local[var.name] = var
            elif word not in (
                ".pragma",
                ".param",
                ".branchtargets",
                ".calltargets",
                ".callprototype",
            ):
                raise PtxSyntaxError(f"PTX line {line}: unknown directive {text!r}")
            return
        guard = None
        if text.startswith("@"):
            guard, text = re.match(r"@\s*(!?\s*[%$\w]+)\s*(.*)", text, re.S).groups()
        op, _, rest = text.replace("\n", " ").replace("\t", " ").strip().partition(" ")
        self.raw.append((op, rest.strip(), guard, line, self.loc, self.scope))

    def finish(self, files: dict[int, str]) -> list[Instr]:
        out = []
        for op, rest, guard, line, loc, scope in self.raw:
            try:
                out.append(self.instruction(op, rest, guard, line, loc, scope, files))
            except PtxSyntaxError as error:
                raise PtxSyntaxError(f"PTX line {line}: {error} in {op} {rest}") from None
        return out

    def instruction(self, op, rest, guard, line, loc, scope, files) -> Instr:
        parts = tuple(op.split("."))
        if parts[0] == "bra":
            target = self.target(rest, scope)
            if target is None:
                raise PtxSyntaxError(f"no label {rest!r}")
            operands: tuple = (Label(rest, target),)
        else:
            operands = tuple(self.operand(text, scope) for text in split_operands(rest))
        test = None
        if guard is not None:
            negated = guard.startswith("!")
            reg = self.find(guard.lstrip("! "), scope)
            if reg is None or reg.bank is not Bank.PRED:
                raise PtxSyntaxError(f"guard {guard!r} is no predicate register")
            test = (reg, negated)
        where = (files.get(loc[0], f"file {loc[0]}"), loc[1]) if loc else None
        return Instr(op, parts, operands, test, line, where)


def _variable(text: str) -> Var:
    match = _VAR.match(text.strip())
    if not match:
        raise PtxSyntaxError(f"unreadable variable {text!r}")
    linkage, space, attrs, kind, name, dims, init = match.groups()
    width = _TYPE_BITS.get("." + kind)
    if width is None:
        raise PtxSyntaxError(f"unknown type .{kind} in {text!r}")
    align = re.search(r"\.align\s+(\d+)", attrs)
    size = width // 8
    for dim in re.findall(r"\[([^\]]*)\]", dims):
        size *= int(dim) if dim.strip() else 0
    data = b""
    if init:
        values = [int(v, 0) for v in re.findall(r"-?\w+", init)]
        data = b"".join((v & ((1 << width) - 1)).to_bytes(width // 8, "little") for v in values)
    return Var(name, space, int(align[1]) if align else width // 8, size, "extern" in linkage, data)


def _params(text: str) -> tuple[Param, ...]:
    params, offset = [], 0
    for item in split_operands(text):
        match = _PARAM.match(item)
        if not match:
            raise PtxSyntaxError(f"unreadable parameter {item!r}")
        size = _TYPE_BITS["." + match[2]] // 8 * int(match[4] or 1)
        align = int(match[1]) if match[1] else _TYPE_BITS["." + match[2]] // 8
        offset = -(-offset // align) * align
        params.append(Param(match[3], align, size, offset))
        offset += size
    return tuple(params)


def _blank(match: re.Match) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def _read_body(body: _Body, text: str, pos: int) -> int:
    """Read statements from just after the opening brace; the position after the closing one."""
    while True:
        pos = _SPACE.match(text, pos).end()
        if pos >= len(text):
            raise PtxSyntaxError("the kernel has no closing brace")
        char = text[pos]
        if char == "{":
            body.scope = _Scope(body.scope, body.scopes)
            body.scopes += 1
            pos += 1
            continue
        if char == "}":
            pos += 1
            if body.scope.parent is None:
                return pos
            body.scope = body.scope.parent
            continue
        directive = _LINE_DIRECTIVE.match(text, pos)
        if directive:
            loc = _LOC.match(directive[2]) if directive[1] == "loc" else None
            # Inside a block of inline assembly the compiler counts on by the lines of its text.
            if loc and body.scope.parent is None:
                body.loc = (int(loc[1]), int(loc[2]))
            pos = directive.end()
            continue
        label = _LABEL.match(text, pos)
        if label:
            if label[1] in body.scope.labels:
                raise PtxSyntaxError(f"PTX line {body.line_of(pos)}: label {label[1]!r} twice")
            body.scope.labels[label[1]] = len(body.raw)
            pos = label.end()
            continue
        end = text.find(";", pos)
        if end < 0:
            raise PtxSyntaxError(f"PTX line {body.line_of(pos)}: statement without an end")
        body.statement(text[pos:end], body.line_of(pos))
        pos = end + 1


def parse(text: str) -> Module:
    """Parse one PTX file."""
    source = text.rstrip("\0")
    text = _COMMENT.sub(_blank, source)
    newlines = [m.start() for m in re.finditer("\n", text)]
    files = {int(m[1]): m[2] for m in re.finditer(r'\.file\s+(\d+)\s+"([^"]*)"', text)}
    version = re.search(r"\.version\s+([\d.]+)", text)
    target = re.search(r"\.target\s+(\w+)", text)
    if not version or not target:
        raise PtxSyntaxError("this is no PTX text: .version or .target is missing")

    def line_of(pos: int) -> int:
        return bisect.bisect_right(newlines, pos - 1) + 1 if pos else 1

    variables: dict[str, Var] = {}
    kernels: dict[str, Kernel] = {}
    pos = 0
    while pos < len(text):
        pos = _SPACE.match(text, pos).end()
        if pos >= len(text):
            break
        entry = _ENTRY.match(text, pos)
        if entry:
            brace, semicolon = text.find("{", pos), text.find(";", pos)
            if entry[2] == "func":
                if brace < 0 or 0 <= semicolon < brace:
                    pos = semicolon + 1
                    continue
                raise PtxSyntaxError(f"PTX line {line_of(pos)}: device functions can't be executed")
            kernel, pos = _read_kernel(
                text, source, pos, brace, (line_of, files, target[1], variables)
            )
            kernels[kernel.name] = kernel
            continue
        word = re.compile(r"\.(\w+)").match(text, pos)
        if word and word[1] in ("shared", "global", "const", "extern", "visible", "weak"):
            end = text.find(";", pos)
            var = _variable(text[pos:end])
            variables[var.name] = var
            pos = end + 1
        elif word and word[1] == "section":
            pos = text.find("}", pos) + 1 or len(text)
        else:
            pos = text.find("\n", pos) + 1 or len(text)
    return Module(version[1], target[1], kernels, files, variables)


def _read_kernel(text: str, source: str, pos: int, brace: int, around) -> tuple[Kernel, int]:
    line_of, files, target, variables = around
    header = text[pos:brace]
    name = re.search(r"\.entry\s+([\w$]+)", header)[1]
    open_paren, close_paren = header.find("("), header.rfind(")")
    params = _params(header[open_paren + 1 : close_paren]) if open_paren >= 0 else ()
    triples = {
        m[1]: tuple(int(v or 1) for v in m.groups()[1:])
        for m in _TRIPLE.finditer(header[close_paren:])
    }
    shared = {n: v for n, v in variables.items() if v.space == "shared"}
    body = _Body(text, line_of, shared)
    end = _read_body(body, text, brace + 1)
    instrs = body.finish(files)
    kernel = Kernel(
        name=name,
        params=params,
        instrs=instrs,
        labels=dict(body.scope.labels),
        n32=body.counts[Bank.R32],
        n64=body.counts[Bank.R64],
        npred=body.counts[Bank.PRED],
        shared=shared,
        maxntid=triples.get("maxntid"),
        reqntid=triples.get("reqntid"),
        cluster=triples.get("reqnctapercluster"),
        target=target,
        text=source[pos:end],
        regs=body.regs,
        globals={n: v for n, v in variables.items() if v.space != "shared"},
        local=body.local,
    )
    return kernel, end
