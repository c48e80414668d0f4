"""The ratios that `benchmarks.attention` writes."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.attention import ratios

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "h200.json"


def test_a_slow_round_of_both_changes_nothing() -> None:
    ours, theirs = [1.0, 2.0, 1.0, 1.0, 4.0], [1.1, 2.2, 1.1, 1.2, 4.4]
    table = {"fa_cute": {"rounds_ms": ours}, "peer": {"rounds_ms": theirs}}
    assert ratios(table) == {"peer": 1.1}
    assert ratios({"peer": {"rounds_ms": theirs}, "gemm": {"rounds_ms": ours}}) == {}


def test_the_ratios_of_the_results_are_those_of_their_rounds() -> None:
    for cell in json.loads(RESULTS.read_text()):
        written = {n: row["ratio"] for n, row in cell["contenders"].items() if "ratio" in row}
        assert written == ratios(cell["contenders"])
        assert written
