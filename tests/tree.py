"""The source tree as the tests of structure see it: files, functions, imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "fa_cute"
FOLDERS = (PACKAGE, "tests", "examples", "benchmarks", "docs")
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def sources(*folders: str) -> tuple[Path, ...]:
    """Python files under folders of the repository (those that exist), sorted."""
    found = [p for folder in folders for p in (ROOT / folder).rglob("*.py")]
    return tuple(sorted(p for p in found if "__pycache__" not in p.parts))


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(), str(path))


def shown(path: Path) -> str:
    """A path as reports name it."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def module_name(path: Path) -> str:
    """``fa_cute/ops/mask.py`` -> ``fa_cute.ops.mask``; a package's ``__init__`` keeps that name."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def functions(tree: ast.Module) -> Iterator[tuple[FunctionNode, ast.ClassDef | None]]:
    """Every function, nested ones too, with the class that it is a method of."""
    owner = {
        id(child): node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for child in node.body
    }
    for node in ast.walk(tree):
        if isinstance(node, FunctionNode):
            yield node, owner.get(id(node))


@dataclass(frozen=True)
class Import:
    """One imported module; ``lazy`` if it is imported when a function runs."""

    module: str
    line: int
    lazy: bool


def imports(tree: ast.Module, name: str) -> list[Import]:
    """Modules that ``name`` imports, absolute; names of a package are taken for its modules."""
    found: list[Import] = []
    inside = {id(n) for fn, _ in functions(tree) for n in ast.walk(fn)}
    typing_only = {
        id(n)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test).endswith("TYPE_CHECKING")
        for stmt in block.body
        for n in ast.walk(stmt)
    }
    for node in ast.walk(tree):
        lazy = id(node) in inside or id(node) in typing_only
        if isinstance(node, ast.Import):
            found += [Import(alias.name, node.lineno, lazy) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name.split(".")[: -node.level]
                base = ".".join([*package, base] if base else package)
            for alias in node.names:
                target = f"{base}.{alias.name}" if _is_module(base, alias.name) else base
                found.append(Import(target, node.lineno, lazy))
    return found


def _is_module(base: str, name: str) -> bool:
    if base.split(".")[0] != PACKAGE:
        return False
    at = ROOT.joinpath(*base.split("."))
    return (at / f"{name}.py").exists() or (at / name).is_dir()
