"""What every test finds as it was before the one before it."""

from __future__ import annotations

import pytest

from fa_cute import compile


@pytest.fixture(autouse=True)
def jit_monitor_as_it_was():
    """What a test sets is not what the next one starts with: the environment is asked again."""
    before = compile._monitor[:]
    yield
    compile._monitor[:] = before
