"""Snippets and commands of the pages in docs/ are run, or at least parsed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fa_cute
from fa_cute import cli, cli_kernels

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))


@pytest.mark.parametrize("page", PAGES)
def test_snippets_run(page, capsys):
    snippets = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.S)
    if any("flash_attn_func" in snippet for snippet in snippets):
        pytest.importorskip("cutlass", reason="a snippet compiles a kernel")
    scope: dict = {}
    try:
        for snippet in snippets:
            exec(compile(snippet, page, "exec"), scope)
    finally:
        fa_cute.jit_monitor("off")
    assert "False" not in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_commands(page):
    for line in re.findall(r"^python -m fa_cute ([^#\n]*)", (DOCS / page).read_text(), re.M):
        assert callable(cli.parser().parse_args(line.split()).run)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", (DOCS / page).read_text()):
        assert target.startswith("http") or (DOCS / target).exists(), target


def test_the_pages_of_the_kernels_are_current():
    written = {path.name: path.read_text() for path in (DOCS / "kernels").glob("*.md")}
    assert written == cli_kernels.pages(), "renew them by `make pages`"
