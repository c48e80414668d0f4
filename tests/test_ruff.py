"""Every file passes the linter and is formatted; nothing is excluded."""

from __future__ import annotations

import subprocess
import sys

import pytest

from . import tree


@pytest.mark.parametrize("command", [("check",), ("format", "--check")], ids=lambda c: c[0])
def test_ruff(command: tuple[str, ...]) -> None:
    folders = [f for f in tree.FOLDERS if (tree.ROOT / f).exists()]
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command, "--no-cache", *folders],
        cwd=tree.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_file_is_excluded() -> None:
    text = (tree.ROOT / "pyproject.toml").read_text()
    assert "exclude" not in text.partition("[tool.ruff]")[2].partition("[tool.pytest")[0]
