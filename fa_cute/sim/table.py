"""The table of instructions in README.md: `python -m fa_cute.sim.table` brings it up to date."""

from __future__ import annotations

from pathlib import Path

from fa_cute.sim import handlers
from fa_cute.sim.jit import registry

BEGIN, END = (
    "<!-- instructions: begin (python -m fa_cute.sim.table) -->",
    "<!-- instructions: end -->",
)

_TITLES = {
    "mbarrier": "mbarriers",
    "sync": "barriers, fences, registers",
    "atomics": "atomics and ordered accesses",
    "clc": "cluster launch control",
    "tma": "tensor copies",
    "bulk": "bulk copies",
    "cp_async": "cp.async",
    "umma": "tcgen05 in the tensor pipe",
    "tmem_ops": "tensor memory",
    "wgmma": "wgmma",
    "mma": "mma.sync",
    "matrix": "matrix fragments",
}


def rows() -> list[tuple[str, str, list[str]]]:
    """(what, file, opcode prefixes)."""
    handlers.load()
    from fa_cute.sim import jit  # noqa: F401  (fills the registry)

    by_file: dict[str, list[str]] = {}
    for prefix, bind in handlers.table().items():
        by_file.setdefault(bind.__module__.rsplit(".", 1)[-1], []).append(prefix)
    out = [(_TITLES.get(f, f), f"{f}.py", sorted(p)) for f, p in sorted(by_file.items())]
    native = sorted({*registry.names(), "bra", "ret", "exit"})
    return [*out, ("plain instructions, native code", "jit/", native)]


def markdown() -> str:
    lines = ["| what | file | opcodes |", "|---|---|---|"]
    for what, file, prefixes in rows():
        lines.append(f"| {what} | `{file}` | {' '.join(f'`{p}`' for p in prefixes)} |")
    return "\n".join(lines)


def update(readme: Path) -> None:
    """Replace what stands between the two markers."""
    before, rest = readme.read_text().split(BEGIN)
    readme.write_text(f"{before}{BEGIN}\n{markdown()}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    update(Path(__file__).with_name("README.md"))
