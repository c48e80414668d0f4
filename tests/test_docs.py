"""What README, CONTRIBUTING and docs/ show is run: each snippet of Python, and each command.

A block of ``python`` is executed, after those before it on the page. A block without a language is
commands, one a line: ``python -m fa_cute`` is run, ``make`` asked what it would do, examples are
looked up (tests/test_examples.py runs them). ``text`` is for what is only read.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

from fa_cute import cli, cli_kernels, sched
from fa_cute import compile as compiler

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = ["README.md", "CONTRIBUTING.md", "fa_cute/sim/README.md"]
PAGES += sorted(str(path.relative_to(ROOT)) for path in DOCS.glob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text()
    return [body for found, body in BLOCK.findall(text) if found == language]


def commands() -> list[tuple[str, str]]:
    """(page, command without its comment) of every line, each once."""
    found = {}
    for page in PAGES:
        for line in "".join(blocks(page, "")).splitlines():
            if command := line.split("  #")[0].strip():
                found.setdefault(command, page)
    return [(page, command) for command, page in found.items()]


COMMANDS = commands()


@pytest.mark.parametrize("page", PAGES)
def test_blocks_have_a_language_that_is_run_or_is_text(page):
    found = {language for language, _ in BLOCK.findall((ROOT / page).read_text())}
    assert found <= {"", "python", "text", "mermaid"}


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_snippets_run(page, capsys, monkeypatch, tmp_path):
    snippets = blocks(page, "python")
    if any("flash_attn_func" in snippet for snippet in snippets):
        pytest.importorskip("cutlass", reason="a snippet compiles a kernel")
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("a_page")
    monkeypatch.setitem(sys.modules, "a_page", module)
    scope = vars(module)
    try:
        for snippet in snippets:
            exec(compile(padded(snippet, page), page, "exec", dont_inherit=True), scope)
    finally:
        sched.NAMES.pop("pairs", None)  # of docs/write-a-scheduler.md
    assert "False" not in capsys.readouterr().out.splitlines()


def padded(snippet: str, page: str) -> str:
    """With empty lines before it, so that a traceback has the page's line."""
    return "\n" * (ROOT / page).read_text().split(snippet)[0].count("\n") + snippet


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """A kernel cache of these tests' own: they clear it."""
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize("page,command", COMMANDS, ids=[command for _, command in COMMANDS])
def test_commands_run(page, command, kernels, monkeypatch, capsys):
    words = shlex.split(command)
    if words[:3] == ["python", "-m", "fa_cute"]:
        pytest.importorskip("cutlass", reason="commands compile kernels")
        monkeypatch.setenv("FA_CUTE_CACHE_DIR", str(kernels))
        monkeypatch.setattr(compiler, "_memory", {})
        args = cli.parser().parse_args(words[3:])
        if words[3] == "pages":
            return  # is compared below
        assert args.run(args) == cli.OK, capsys.readouterr()
        assert capsys.readouterr().out
    elif words[0] == "python" and words[1].startswith("examples/"):
        text = (ROOT / words[1]).read_text()
        assert all(f'"{word}"' in text for word in words[2:] if word.startswith("-"))
    elif words[0] == "make":
        if shutil.which("make") is None:
            pytest.skip("no make")
        done = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    else:
        assert words[:2] == ["pip", "install"], f"{page}: what is {command!r}?"
        extras = re.findall(r"\[(\w+)\]", command)
        assert all(f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text() for extra in extras)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#\s]+)\)", text):
        assert target.startswith("http") or (ROOT / page).parent.joinpath(target).exists(), target


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page):
    text = (ROOT / page).read_text()
    for name in re.findall(r"`((?:fa_cute|tests|examples|docs|benchmarks)/[\w/.]+)`", text):
        assert (ROOT / name).exists(), name


def test_every_page_is_listed():
    text = (ROOT / "README.md").read_text()
    for path in DOCS.glob("*.md"):
        assert f"docs/{path.name}" in text, path.name


def test_the_pages_of_the_kernels_are_current():
    written = {path.name: path.read_text() for path in (DOCS / "kernels").glob("*.md")}
    assert written == cli_kernels.pages(), "renew them by `make pages`"
