"""The README's table of instructions is what the simulator really registers."""

from __future__ import annotations

from pathlib import Path

import fa_cute.sim
from fa_cute.sim import table
from fa_cute.sim.handlers import handles
from fa_cute.sim.handlers import table as handler_table

README = Path(fa_cute.sim.__file__).with_name("README.md")


def test_readme_has_the_current_table():
    text = README.read_text()
    shown = text.split(table.BEGIN)[1].split(table.END)[0].strip()
    assert shown == table.markdown(), "run `python -m fa_cute.sim.table`"


def test_every_file_of_the_simulator_is_in_the_readme():
    text = README.read_text()
    for path in README.parent.glob("*.py"):
        stem = "host*.py" if path.name.startswith("host") else path.name
        assert stem in text or path.name in (
            "__init__.py",
            "table.py",
            "handlers.py",
            "operands.py",
        )


def test_a_prefix_has_one_handler():
    before = handler_table()
    try:
        handles("mbarrier.init")(lambda ins, k: None)
    except ValueError as error:
        assert "two handlers" in str(error)
    else:
        raise AssertionError("a second handler was accepted")
    assert handler_table() == before
