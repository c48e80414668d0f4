"""What the documents say is what the package does."""

from __future__ import annotations

import json
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


def speed_cell(runs: list[dict], names: tuple[str, ...]) -> str:
    """TFLOP/s of some contenders in one run, the fastest in bold."""
    (run,) = runs
    found = [run["contenders"][name]["tflops"] for name in names]
    return " / ".join(f"**{x:.0f}**" if x == max(found) else f"{x:.0f}" for x in found)


def test_the_speed_table_is_what_was_measured():
    text = (ROOT / "README.md").read_text()
    runs = json.loads((ROOT / "benchmarks" / "results" / "h200.json").read_text())
    assert {run["gpu"] for run in runs} == {"NVIDIA H200"} and "an NVIDIA H200" in text
    (commit,) = {run["commit"] for run in runs}
    assert f"commit {commit}" in text
    three, two = ("fa_cute", "flash-attn-4", "cuDNN"), ("fa_cute", "flash-attn-4")
    rows = re.findall(r"^\| (\d+) \| (full|causal) \| ([\d,]+) \| (.*) \|$", text, re.M)
    assert len(rows) >= 18
    for head_dim, mask, seqlen, cells in rows:
        shape = (int(head_dim), mask == "causal", int(seqlen.replace(",", "")))
        of_shape = [r for r in runs if (r["head_dim"], r["causal"], r["seqlen"]) == shape]
        kinds = {(r["pass"], r["deterministic"]): [r] for r in of_shape}
        columns = ((("fwd", False), three), (("bwd", False), three), (("bwd", True), two))
        wanted = [speed_cell(kinds[kind], names) for kind, names in columns]
        assert cells.split(" | ") == wanted, (shape, wanted)
