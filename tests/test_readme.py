"""What the documents say is what the package does."""

from __future__ import annotations

import re
from pathlib import Path

from fa_cute import cli, cli_kernels

ROOT = Path(__file__).parent.parent


def test_the_support_table_is_current():
    text = (ROOT / "README.md").read_text()
    assert text == cli_kernels.with_table(text), "renew it by `make pages`"


def test_every_environment_variable_is_documented():
    text = (ROOT / "docs" / "environment.md").read_text()
    documented = set(re.findall(r"^\| `(FA_CUTE_\w+)`", text, re.M))
    assert documented == set(cli.VARIABLES)
    used = set()
    for file in (ROOT / "fa_cute").rglob("*.py"):
        used |= set(re.findall(r'environ[^\n]*"(FA_CUTE_\w+)"', file.read_text()))
    assert used <= documented, used - documented


def test_every_exception_is_documented():
    from fa_cute import errors

    text = (ROOT / "docs" / "errors.md").read_text()
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, errors.FaCuteError):
            assert f"`{name}`" in text or name == "FaCuteError", name
