"""Second guard against lost pipeline state: in PTX, a wait inside a loop has a parity that
changes.
"""

from __future__ import annotations

import re

_LABEL = re.compile(r"^\s*([\w$]+):\s*(//.*)?$")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+([\w$]+)\s*;")
_WAIT = re.compile(r"mbarrier\.try_wait\.parity\S*\s+%?\w+,\s*\[[^\]]*\],\s*([^,;]+)")
_MOVE = re.compile(r"\bmov\.(?:b|u|s)32\s+(%r\d+),\s*([^;]+);")
_WRITES = re.compile(r"^(?:@!?%p\d+\s+)?[a-z][\w.:]*\s+(\{[^}]*\}|%r\d+)")
_IMMEDIATE = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|\d+)U?")


def constant_waits(ptx: str) -> list[str]:
    """``line: text`` of each wait with a constant parity inside a loop (its own spin does not
    count).
    """
    lines = ptx.splitlines()
    loops = _loops(lines)
    values = _values(lines)
    found = []
    for at, line in enumerate(lines):
        wait = _WAIT.search(line)
        if wait and any(start < at < stop for start, stop in loops):
            parity = wait.group(1).strip()
            if _IMMEDIATE.fullmatch(parity) or len(values.get(parity, ())) == 1:
                found.append(f"{at + 1}: {line.strip()}")
    return found


def waits_in_loops(ptx: str) -> int:
    """How many waits lie inside a loop: a check that finds nothing should have had something to
    look at.
    """
    lines = ptx.splitlines()
    loops = _loops(lines)
    return sum(
        bool(_WAIT.search(line)) and any(start < at < stop for start, stop in loops)
        for at, line in enumerate(lines)
    )


def _loops(lines: list[str]) -> list[tuple[int, int]]:
    """(label, branch back to it) of each loop that is more than the spin of one wait."""
    labels, loops = {}, []
    for at, line in enumerate(lines):
        if label := _LABEL.match(line):
            labels[label.group(1)] = at  # inline assembly repeats its labels; the last one counts
        for target in _BRANCH.findall(line):
            if target in labels:
                loops.append((labels[target], at))
    return [(a, b) for a, b in loops if not _is_spin(lines[a : b + 1])]


def _is_spin(body: list[str]) -> bool:
    """Whether a loop does nothing but wait."""
    work = [x.strip() for x in body]
    work = [x for x in work if x and not x.startswith(("//", "{", "}", ".reg", ".pragma", ".loc"))]
    return all(_LABEL.match(x) or _BRANCH.search(x) or "mbarrier.try_wait" in x for x in work)


def _values(lines: list[str]) -> dict[str, set[str]]:
    """Register -> constants that it is set to; a register with another definition has two or
    more.
    """
    values: dict[str, set[str]] = {}
    for line in lines:
        text = line.strip()
        if text.startswith("//"):
            continue
        if (move := _MOVE.search(text)) and _IMMEDIATE.fullmatch(move.group(2).strip()):
            values.setdefault(move.group(1), set()).add(move.group(2).strip())
        elif written := _WRITES.search(text):
            for register in re.findall(r"%r\d+", written.group(1)):
                values.setdefault(register, set()).update(("computed", text))
    return values
