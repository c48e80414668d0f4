"""``python -m fa_cute``: what is printed, and the exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from fa_cute import arch as archs
from fa_cute import cli
from fa_cute.bwd.args import BwdSpec
from fa_cute.compile import Request
from fa_cute.fwd.args import FwdSpec


def run(capsys, *argv):
    code = cli.main(list(argv))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_plan_prints_every_part(capsys):
    code, out, _ = run(capsys, "plan", "sm100", "fwd", "--head-dim", "128")
    assert code == cli.OK
    for word in ("softmax", "correction", "load_kv", "mma_s", "TENSOR MEMORY", "sKV", "registers"):
        assert word in out, word


def test_plan_as_json(capsys):
    code, out, _ = run(capsys, "plan", "sm_100a", "fwd", "--causal", "--json")
    assert code == cli.OK
    assert json.loads(out)["kernel"] == "sm_100a-fwd-d128-causal"


def test_plan_of_what_is_not_there(capsys):
    code, out, err = run(capsys, "plan", "sm100", "fwd", "--head-dim", "7")
    assert (code, out) == (cli.FOUND, "")
    assert "head_dim 7" in err and "head_dim 64" in err


def test_plan_of_a_backward(capsys):
    argv = ("plan", "sm_90a", "bwd", "--causal", "--deterministic", "--gqa", "4")
    code, out, _ = run(capsys, *argv)
    assert code == cli.OK and "BwdSm90 sm_90a-bwd-d128-causal-gqa4-deterministic" in out
    assert "dq" in out.lower() and "SHARED MEMORY" in out


def test_plan_of_a_window(capsys):
    argv = ("plan", "sm_90a", "fwd", "--head-dim", "256", "--causal", "--window", "left")
    code, out, _ = run(capsys, *argv)
    assert code == cli.OK and "FwdSm90 sm_90a-fwd-d256-causal-window_left" in out
    code, _, err = run(capsys, *argv[:-1], "right")
    assert code != cli.OK and "causal" in err


def test_unknown_architecture(capsys):
    code, _, err = run(capsys, "plan", "sm_42", "fwd")
    assert code == cli.FOUND and "sm_42" in err and "sm_100a" in err


@pytest.mark.parametrize("argv", [[], ["nothing"], ["plan"], ["plan", "sm100", "sideways"]])
def test_wrong_usage(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == cli.USAGE
    capsys.readouterr()


def test_support(capsys):
    code, out, _ = run(capsys, "support")
    assert code == cli.OK and "sm_100a  128" in out
    code, out, _ = run(capsys, "support", "--arch", "sm_100a", "--json")
    assert code == cli.OK and {r["arch"] for r in json.loads(out)} == {"sm_100a"}
    code, _, err = run(capsys, "support", "--head-dim", "7")
    assert code == cli.FOUND and "pad to head_dim 64" in err


def test_doctor(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("FA_CUTE_CACHE_DIR", str(tmp_path / "kernels"))
    code, out, _ = run(capsys, "doctor", "--no-compile")
    assert code == cli.OK
    for word in ("torch", "nvidia-cutlass-dsl", "driver: ", "devices", str(tmp_path / "kernels")):
        assert word in out, word
    monkeypatch.setenv("FA_CUTE_TYPO", "1")
    code, out, _ = run(capsys, "doctor", "--no-compile")
    assert code == cli.FOUND and "FA_CUTE_TYPO=1  UNKNOWN NAME" in out


def test_doctor_reports_a_cache_that_cannot_be_written(capsys, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("FA_CUTE_CACHE_DIR", str(tmp_path / "file"))
    code, out, _ = run(capsys, "doctor", "--no-compile")
    assert code == cli.FOUND and "cannot be written" in out


def test_regs_of_two_days(capsys, tmp_path):
    def rows(name, **changes):
        path = tmp_path / name
        row = {"kernel": "sm_90a-fwd-d64-full", "part": "main", "regs": 96, "stack": 0, "smem": 5}
        path.write_text(json.dumps([{**row, **changes}]))
        return str(path)

    old = rows("old")
    assert run(capsys, "regs", "--diff", old, old)[:2] == (cli.OK, "no difference\n")
    code, out, _ = run(capsys, "regs", "--diff", old, rows("new", stack=8, smem=6))
    assert code == cli.FOUND and [line.split()[2:] for line in out.splitlines()[1:]] == [
        ["stack", "0", "8"],
        ["smem", "5", "6"],
    ]
    assert run(capsys, "regs", "--diff", rows("new", stack=8), old)[0] == cli.OK


def test_output_that_nobody_reads_to_the_end():
    command = f"{sys.executable} -m fa_cute support --json | head -c 1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[", "")


def test_labels_say_what_differs():
    arch = archs.get("sm_90a")
    forward, backward = FwdSpec("bf16", 192, 128, True), BwdSpec("fp16", 64, 64, False)
    for kind, spec, lse, label in (
        ("forward", forward, False, "sm_90a-fwd-d192_128-causal"),
        ("forward", replace(forward, window=(True, False)), False, "causal-window_left"),
        ("backward", replace(backward, qhead_per_kvhead=4), True, "d64-full-gqa4-lse_grad"),
        ("backward", replace(backward, varlen=True, deterministic=True), False, "deterministic"),
    ):
        assert Request(kind, None, spec, arch, lse).label.endswith(label)


def test_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "fa_cute", "--version"], capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.startswith("fa_cute 0.")


def test_regs(capsys):
    pytest.importorskip("cutlass", reason="compiling needs the DSL")
    argv = ("regs", "--head-dim", "64", "--mask", "full", "--json")
    code, out, _ = run(capsys, *argv, "--arch", "sm_100a", "--pass", "forward")
    assert code == cli.OK
    (row,) = json.loads(out)
    assert (row["kernel"], row["part"]) == ("sm_100a-fwd-d64-full", "main")
    assert row["regs"] == 128 and row["threads"] == 512 and row["stack"] == 0
    code, out, _ = run(capsys, *argv, "--arch", "sm_90a", "--pass", "backward", "--deterministic")
    assert code == cli.OK
    rows = json.loads(out)
    assert {r["kernel"] for r in rows} == {"sm_90a-bwd-d64-full-deterministic"}
    assert len(rows) >= 3
    assert (rows[0]["part"], rows[0]["threads"]) == ("main", 384)
