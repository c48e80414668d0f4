"""Second guard against lost pipeline state, on PTX: a wait inside a loop has a parity that changes.

Loops are strongly connected blocks of the control flow; the spin of a single wait does not count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_LABEL = re.compile(r"^([\w$]+):")
_BRANCH = re.compile(r"^(@!?%?\w+\s+)?bra(?:\.uni)?\s+([\w$]+)\s*;")
_END = re.compile(r"^(?:ret|exit|trap)\s*;")
_WAIT = re.compile(r"mbarrier\.try_wait\.parity\S*\s+%?\w+,\s*\[[^\]]*\],\s*([^,;]+)")
_MOVE = re.compile(r"^mov\.(?:b|u|s)32\s+(%r\d+),\s*([^;]+);")
_WRITES = re.compile(r"^(?:@!?%p\d+\s+)?[a-z][\w.:]*\s+(\{[^}]*\}|%r\d+)")
_IMMEDIATE = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|\d+)U?")
# What a loop that only waits consists of, besides the wait.
_WAITING = re.compile(r"^(@!?%?\w+\s+)?(bra|nanosleep|setp|selp|mov)\b")


@dataclass
class Block:
    """Straight code; ``follows`` are the numbers of the blocks that may run next."""

    lines: list[tuple[int, str]] = field(default_factory=list)
    follows: list[int] = field(default_factory=list)


def constant_waits(ptx: str) -> list[str]:
    """``line: text`` of each wait inside a loop whose parity is a constant."""
    values = _values(ptx)
    found = []
    for at, line in _waits(ptx):
        parity = _WAIT.search(line).group(1).strip()
        if _IMMEDIATE.fullmatch(parity) or len(values.get(parity, ())) == 1:
            found.append(f"{at}: {line}")
    return found


def constants(ptx: str) -> dict[str, int]:
    """Registers that only ever hold one constant."""
    return {
        register: int(next(iter(values)).rstrip("U"), 0)
        for register, values in _values(ptx).items()
        if len(values) == 1
    }


def waits_in_loops(ptx: str) -> int:
    """How many waits lie inside a loop: a check that found nothing should have looked at some."""
    return len(_waits(ptx))


def _waits(ptx: str) -> list[tuple[int, str]]:
    found = []
    for entry in re.split(r"^\.visible \.entry ", "\n" + ptx, flags=re.M):
        offset = ptx.find(entry) if entry else 0
        first = ptx.count("\n", 0, max(offset, 0))
        blocks = _blocks(entry, first)
        for loop in _loops(blocks):
            lines = [x for b in loop for x in blocks[b].lines]
            if not all(_WAITING.match(t) or _WAIT.search(t) for _, t in lines):
                found += [x for x in lines if _WAIT.search(x[1])]
    return sorted(found)


def _blocks(text: str, first: int) -> list[Block]:
    """Blocks of one function; labels inside braces (inline assembly) are seen only there."""
    blocks, labels, jumps = [Block()], {}, []
    scope, scopes = [0], 0
    for at, raw in enumerate(text.splitlines(), first + 1):
        line = raw.strip()
        if not line or line.startswith(("//", ".")):
            continue
        if line in "{}":
            scopes += line == "{"
            scope = [*scope, scopes] if line == "{" else scope[:-1]
            continue
        if label := _LABEL.match(line):
            blocks[-1].follows.append(len(blocks))
            labels[(*scope, label.group(1))] = len(blocks)
            blocks.append(Block())
            continue
        blocks[-1].lines.append((at, line))
        if branch := _BRANCH.match(line):
            jumps.append((len(blocks) - 1, tuple(scope), branch.group(2)))
            if branch.group(1):
                blocks[-1].follows.append(len(blocks))
            blocks.append(Block())
        elif _END.match(line):
            blocks.append(Block())
    for block, path, name in jumps:
        keys = [(*path[:n], name) for n in range(len(path), 0, -1)]
        blocks[block].follows += [labels[k] for k in keys if k in labels][:1]
    blocks[-1].follows = [b for b in blocks[-1].follows if b < len(blocks)]
    return blocks


def _loops(blocks: list[Block]) -> list[list[int]]:
    """Strongly connected sets of blocks that a program can stay in (Tarjan, without recursion)."""
    index, low, stack, on, found = {}, {}, [], set(), []
    for root in range(len(blocks)):
        if root in index:
            continue
        work = [(root, iter(blocks[root].follows))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on.add(root)
        while work:
            block, rest = work[-1]
            for after in rest:
                if after not in index:
                    index[after] = low[after] = len(index)
                    stack.append(after)
                    on.add(after)
                    work.append((after, iter(blocks[after].follows)))
                    break
                if after in on:
                    low[block] = min(low[block], index[after])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[block])
                if low[block] == index[block]:
                    at = stack.index(block)
                    members, stack = stack[at:], stack[:at]
                    on.difference_update(members)
                    if len(members) > 1 or block in blocks[block].follows:
                        found.append(members)
    return found


def _values(ptx: str) -> dict[str, set[str]]:
    """Register -> what it is set to: one constant is a set of one, anything else has more."""
    values: dict[str, set[str]] = {}
    for raw in ptx.splitlines():
        line = raw.strip()
        if (move := _MOVE.match(line)) and _IMMEDIATE.fullmatch(move.group(2).strip()):
            values.setdefault(move.group(1), set()).add(move.group(2).strip())
        elif written := _WRITES.match(line):
            for register in re.findall(r"%r\d+", written.group(1)):
                values.setdefault(register, set()).update(("computed", line))
    return values
