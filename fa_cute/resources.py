"""What the assembler gave a kernel, read from its cubin: registers, stack, local memory traffic.

A cubin is an ELF file. Its sections ``.nv.info`` and ``.nv.info.<kernel>`` are lists of attributes;
their numbers below were checked against what ``ptxas -v`` prints.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from .errors import CompileError

_SECTION = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr
_SYMBOL = struct.Struct("<IBBHQQ")  # Elf64_Sym
_SYMTAB = 2
_WITH_SIZE = (
    4  # attribute format: a 16-bit size and that many bytes; the other formats are 4 bytes long
)
_REGCOUNT, _FRAME_SIZE, _REQNTID = 0x2F, 0x11, 0x10
_OPCODE_MASK = 0xFFF  # low bits of a 16-byte instruction, sm_70 and later
_LOAD_LOCAL, _STORE_LOCAL = 0x983, 0x387
_INSTRUCTION_BYTES = 16


@dataclass(frozen=True)
class Resources:
    """One kernel's use of a streaming multiprocessor."""

    kernel: str
    regs: int  # per thread at launch
    stack_bytes: int  # per thread: spilled registers and indexed local arrays; 0 is what we want
    local_loads: int  # instructions in the code, not executed counts
    local_stores: int
    static_smem_bytes: int
    threads: int | None  # of a CTA, where the kernel fixes it
    instructions: int

    @property
    def spills(self) -> bool:
        """Whether a register (or an indexed array) lives in local memory."""
        return bool(self.stack_bytes or self.local_loads or self.local_stores)


def of_cubin(image: bytes) -> tuple[Resources, ...]:
    """The resources of every kernel in a cubin, in the order of its code sections."""
    if image[:4] != b"\x7fELF":
        raise CompileError(f"not a cubin: it starts with {image[:4]!r}, not with the ELF mark")
    sections = _sections(image)
    symbols = _symbols(sections)
    per_symbol: dict[int, dict[str, int]] = {}
    for attr, payload in _attributes(sections.get(".nv.info", (0, b""))[1]):
        if attr in (_REGCOUNT, _FRAME_SIZE):
            symbol, value = struct.unpack_from("<II", payload)
            per_symbol.setdefault(symbol, {})[attr] = value
    found = []
    for section, (_, code) in sections.items():
        if not section.startswith(".text."):
            continue
        kernel = section.removeprefix(".text.")
        facts = per_symbol.get(symbols.get(kernel, -1), {})
        found.append(_resources(kernel, code, facts, sections))
    return tuple(found)


def _resources(kernel: str, code: bytes, facts: dict, sections: dict) -> Resources:
    own = dict(_attributes(sections.get(f".nv.info.{kernel}", (0, b""))[1]))
    threads = None
    if _REQNTID in own:
        x, y, z = struct.unpack_from("<III", own[_REQNTID])
        threads = x * y * z
    opcodes = [
        struct.unpack_from("<H", code, at)[0] & _OPCODE_MASK
        for at in range(0, len(code), _INSTRUCTION_BYTES)
    ]
    return Resources(
        kernel=kernel,
        regs=facts.get(_REGCOUNT, 0),
        stack_bytes=facts.get(_FRAME_SIZE, 0),
        local_loads=opcodes.count(_LOAD_LOCAL),
        local_stores=opcodes.count(_STORE_LOCAL),
        static_smem_bytes=sections.get(f".nv.shared.{kernel}", (0, b""))[0],
        threads=threads,
        instructions=len(opcodes),
    )


def _sections(image: bytes) -> dict[str, tuple[int, bytes]]:
    """name -> (size in memory, bytes in the file)."""
    at = struct.unpack_from("<Q", image, 0x28)[0]
    size, count, names_at = struct.unpack_from("<HHH", image, 0x3A)
    headers = [_SECTION.unpack_from(image, at + i * size) for i in range(count)]
    names = headers[names_at]
    table = image[names[4] : names[4] + names[5]]
    nobits = 8
    out = {}
    for header in headers:
        name = table[header[0] : table.index(b"\0", header[0])].decode()
        body = b"" if header[1] == nobits else image[header[4] : header[4] + header[5]]
        out[name] = (header[5], body)
    return out


def _symbols(sections: dict) -> dict[str, int]:
    """name -> index in the symbol table."""
    table, strings = sections[".symtab"][1], sections[".strtab"][1]
    out = {}
    for index in range(len(table) // _SYMBOL.size):
        start = _SYMBOL.unpack_from(table, index * _SYMBOL.size)[0]
        out[strings[start : strings.index(b"\0", start)].decode()] = index
    return out


def _attributes(info: bytes):
    """(attribute, payload) of a .nv.info section."""
    at = 0
    while at + 4 <= len(info):
        form, attr, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _WITH_SIZE:
            yield attr, info[at : at + size]
            at += size
        else:
            yield attr, struct.pack("<H", size)
