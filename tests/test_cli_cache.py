"""``python -m fa_cute warmup`` and ``cache``."""

from __future__ import annotations

import os

import pytest

from fa_cute import arch, cache, cli, compile, tune, warmup

from .a_request import REQUEST

WARMUP = ("warmup", "--arch", "sm_100a", "--target", "sim", "--head-dim", "64", "--mask", "full")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    folder = tmp_path / "kernels"
    monkeypatch.setenv("FA_CUTE_CACHE_DIR", str(folder))
    monkeypatch.setenv("FA_CUTE_LOCK_DIR", str(tmp_path / "locks"))
    monkeypatch.setattr(cache, "_warned", set())
    monkeypatch.setattr(compile, "_memory", {})
    return folder


def run(capsys, *argv):
    code = cli.main(list(argv))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_warmup_then_look(folder, capsys, monkeypatch):
    monkeypatch.setenv("FA_CUTE_JIT_MONITOR", "error")  # is about other compiles
    pytest.importorskip("cutlass", reason="compiling needs the DSL")
    code, out, err = run(capsys, *WARMUP, "--workers", "1")
    assert code == cli.OK and out.startswith("compiled in "), err
    assert compile.entry(REQUEST, "sim").path.exists(), "what flash_attn_func will look for"
    code, out, _ = run(capsys, *WARMUP, "--workers", "0")
    assert code == cli.OK and out.startswith("cached in ")

    code, out, _ = run(capsys, "cache", "ls")
    assert code == cli.OK and "sm_100a forward d64 bf16 full sim" in out and "current" in out
    code, out, _ = run(capsys, "cache", "info")
    assert code == cli.OK and '1 {"current": 1}' in out and str(folder) in out
    assert run(capsys, "cache", "verify")[0] == cli.OK
    (file,) = cache.entries()
    file.write_bytes(file.read_bytes()[:-1])
    code, out, _ = run(capsys, "cache", "verify")
    assert code == cli.FOUND and "bad" in out
    assert run(capsys, "cache", "clear")[:2] == (cli.OK, f"removed 1 of {folder}\n")
    assert run(capsys, "cache", "ls")[1] == f"no kernels in {folder}\n"
    monkeypatch.undo()
    assert compile._mode() == os.environ.get("FA_CUTE_JIT_MONITOR", "off"), "as before warmup"


def test_a_compile_that_hangs_ends_with_the_command(monkeypatch, capsys):
    monkeypatch.setenv("FA_CUTE_COMPILE_TIMEOUT", "0.2")
    code, out, err = run(capsys, *WARMUP, "--workers", "1")
    assert code == cli.FOUND and out.startswith("failed in ")
    assert "not done after 0.2 s" in err and REQUEST.command("sim") in err


def test_stale_entries(folder, capsys, monkeypatch):
    place = compile.entry(REQUEST, "sim")
    cache.store(place, b"abc")
    assert "current" in run(capsys, "cache", "ls")[1]
    assert run(capsys, "cache", "clear", "--stale")[1].startswith("removed 0")
    assert run(capsys, "cache", "verify")[0] == cli.FOUND, "three bytes are no kernel"
    monkeypatch.setattr(cache, "source_hash", lambda: "after an edit")
    assert "stale" in run(capsys, "cache", "ls")[1]
    assert run(capsys, "cache", "verify")[0] == cli.OK
    assert run(capsys, "cache", "clear", "--stale")[1].startswith("removed 1")


def test_what_is_warmed_is_what_a_call_asks_for(monkeypatch):
    sm90 = arch.get("sm_90a")
    wanted = warmup.Wanted(
        head_dims=((128, 128),), dtypes=("fp16",), masks=(True,), gqa=4, deterministic=True
    )
    forward, backward = warmup.requests(sm90, wanted)
    assert forward.spec == tune.FwdSpec("fp16", 128, 128, True, 1)
    assert backward.spec == tune.BwdSpec("fp16", 128, 128, True, 4, True)
    assert backward.cfg == tune.backward(backward.spec, sm90)
    windows = ((True, False), (True, True))
    monkeypatch.setattr(tune, "FORWARD_DOES", {"sm90": (tune.WINDOW,)})
    banded = warmup.Wanted(head_dims=((64, 64),), kinds=("forward",), windows=windows)
    specs = [r.spec for r in warmup.requests(sm90, banded) if r.spec.dtype == "bf16"]
    assert [(s.causal, s.window) for s in specs] == [(False, w) for w in windows] + [
        (True, windows[0])
    ], "causal with a limit on the right is causal"
    every = warmup.requests(sm90, warmup.Wanted())
    assert len({str(r) for r in every}) == len(every) == 6 * 2 * 2 * 2


@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"windows": ((True, False),)},
        {"lengths": (True, True, False, True)},
        {"negative_scale": True},
    ],
    ids=["dense", "window", "varlen", "negative scale"],
)
def test_the_command_of_a_request_asks_for_that_request(kind, causal, more, monkeypatch):
    """So the command in an error repeats the compile that failed."""
    every = {"sm90": (tune.WINDOW, tune.VARLEN, tune.NEGATIVE_SCALE)}
    monkeypatch.setattr(tune, "FORWARD_DOES", every)
    monkeypatch.setattr(tune, "BACKWARD_DOES", every)
    wanted = warmup.Wanted(
        head_dims=((192, 128),), dtypes=("bf16",), masks=(causal,), kinds=(kind,), gqa=2, **more
    )
    (request,) = warmup.requests(arch.get("sm_90a"), wanted)
    asked = []

    def here(found, target):
        asked.append((found, target))
        return warmup.Outcome(found, "cached", 0.0)

    monkeypatch.setattr(warmup, "here", here)
    words = request.command("sim").split()
    assert words[:3] == ["python", "-m", "fa_cute"]
    assert cli.main([*words[3:], "--workers", "0"]) == cli.OK
    assert asked == [(request, "sim")]


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (("warmup", "--arch", "sm_100a", "--head-dim", "7"), cli.FOUND),
        (("warmup", "--arch", "sm_42"), cli.FOUND),
        (("warmup", "--arch", "sm_100a", "--head-dim-v", "64"), cli.USAGE),
    ],
)
def test_wrong_wishes(argv, code, capsys):
    assert run(capsys, *argv, "--target", "sim")[0] == code


def test_workers_from_the_environment(monkeypatch):
    monkeypatch.setenv("FA_CUTE_COMPILE_WORKERS", "3")
    assert warmup.default_workers() == 3
    monkeypatch.setenv("FA_CUTE_COMPILE_WORKERS", "many")
    with pytest.raises(cli.FaCuteError, match="many"):
        warmup.default_workers()
    monkeypatch.delenv("FA_CUTE_COMPILE_WORKERS")
    assert warmup.default_workers() >= 1
