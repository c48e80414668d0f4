"""Every example runs, at its smallest, through the simulator."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass", reason="the examples compile kernels")
EXAMPLES = Path(__file__).parent.parent / "examples"
LINES = {"tiny_kernel": 110}  # a whole kernel, and its plan
MOST = 90


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run ``main()`` of an example as from the command line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FA_CUTE_SIM_SCHEDULE", "early")  # what an example sets goes away again
    monkeypatch.setenv("FA_CUTE_ARCH", "")
    monkeypatch.delenv("FA_CUTE_ARCH")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    deterministic = torch.are_deterministic_algorithms_enabled()

    def main(name: str, *argv: str):
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)  # a class finds its source by it
        spec.loader.exec_module(module)
        monkeypatch.setattr(sys, "argv", [name, *argv])
        return module.main()

    yield main
    torch.use_deterministic_algorithms(deterministic)


def test_every_example_is_short_and_run_here():
    source = Path(__file__).read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f'run("{path.stem}"' in source, path.name
        text = path.read_text()
        assert "def main()" in text and len(text.splitlines()) <= LINES.get(path.stem, MOST)


def test_attention(run, tmp_path, capsys):
    run("attention", "--seqlen", "100", "--head-dim", "64", "--out", str(tmp_path))
    out = capsys.readouterr().out
    assert "largest error" in out and "WARPS" in out
    if not torch.cuda.is_available():
        assert (tmp_path / "attention.json").stat().st_size > 0


def test_tiny_gpt(run):
    losses = run("tiny_gpt", "--steps", "4", "--context", "24", "--recite", "1")
    assert len(losses) == 4 and losses[-1] < 0.8 * losses[0]
    theirs = run("tiny_gpt", "--steps", "4", "--context", "24", "--backend", "reference")
    assert losses == pytest.approx(theirs, rel=0.02)


def test_packed_documents(run):
    assert run("packed_documents", "--lengths", "70", "0", "131")


def test_rl_step(run):
    assert run("rl_step", "--seqlen", "200", "--passes", "2")


def test_custom_mask(run):
    assert run("custom_mask", "--seqlen", "270", "--prefix", "140") <= 2  # times torch's error


@pytest.mark.parametrize(
    "forget,words",
    [
        ("", ["no race"]),
        ("release", ["deadlock", "load (warp 0) waits on mbarrier x.empty[0]", "missing 2 of 2"]),
        ("wait", ["a read by warp", "races with a write by copies"]),
    ],
)
def test_tiny_kernel(run, forget, words):
    report = run("tiny_kernel", *(["--forget", forget] if forget else []))
    for word in words:
        assert word in report, report


def test_graph_inference(run, capsys):
    run("graph_inference", "--seqlen", "16", "--layers", "2")
    out = capsys.readouterr().out
    assert "True" in out and "False" not in out
