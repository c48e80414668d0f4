"""One compile per kind of problem, none in a second process, and no trust in bad files."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fa_cute
from fa_cute import arch, cache, compile, tune
from fa_cute.fwd.args import FwdSpec

from .a_request import REQUEST

pytest.importorskip("cutlass", reason="the kernel is compiled by NVIDIA's CuTe DSL")

ROOT = Path(__file__).parent.parent
PROGRAM = """
import sys, torch
from fa_cute import compile, flash_attn_func
builds = []
build = compile.build
compile.build = lambda *args, **kw: builds.append(1) or build(*args, **kw)
def call(batch, seqlen, heads):
    x = torch.ones(batch, seqlen, heads, 64, dtype=torch.bfloat16)
    assert (flash_attn_func(x, x, x, backend="sim") == 1).all()
for shape in ((1, 1, 1), (2, 3, 1), (1, 5, 2)):
    call(*shape)
print(len(builds), "cutlass" in sys.modules)
"""


def run(folder, **environment):
    """builds, whether the DSL was imported, warnings."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        env={**os.environ, "FA_CUTE_CACHE_DIR": str(folder), **environment},
    )
    assert done.returncode == 0, done.stderr
    builds, imported = done.stdout.split()
    return int(builds), imported == "True", done.stderr.count("rebuilt") + done.stderr.count("read")


def test_processes_share_the_disk_cache(tmp_path):
    folder = tmp_path / "kernels"
    assert run(folder) == (1, True, 0), "three shapes of one kind are one compile"
    (entry,) = folder.glob("forward-*.sim")
    assert not list(folder.glob(".new-*"))
    if hasattr(os, "getuid"):
        assert folder.stat().st_mode & 0o777 == 0o700 and entry.stat().st_mode & 0o077 == 0
    assert run(folder) == (0, False, 0), "a second process neither compiles nor imports the DSL"

    whole = entry.read_bytes()
    entry.write_bytes(whole[: len(whole) // 2])
    assert run(folder) == (1, True, 1), "a truncated file is rebuilt with one warning"
    # The header tells how long the compile took: its length is not always the same.
    assert abs(entry.stat().st_size - len(whole)) < 32
    assert run(folder) == (0, False, 0), "and is whole again"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache of this test, with warnings that nobody has seen yet."""
    folder = tmp_path / "kernels"
    monkeypatch.setenv("FA_CUTE_CACHE_DIR", str(folder))
    monkeypatch.setenv("FA_CUTE_LOCK_DIR", str(tmp_path / "locks"))
    monkeypatch.setattr(cache, "_warned", set())
    monkeypatch.setattr(compile, "_memory", {})
    return folder


ENTRY = compile.entry(REQUEST, "sim")


@pytest.fixture
def builds(monkeypatch):
    """Kernels of three bytes; the list has one item per compile."""
    done = []

    def build(request):
        done.append(request)
        return "fn", b"abc"

    monkeypatch.setattr(compile, "build_sim", build)
    monkeypatch.setattr(compile, "load_sim", lambda payload: "fn" if payload == b"abc" else None)
    return done


def again():
    """As in a second process."""
    compile.clear()
    return compile.get(REQUEST, "sim")


def give_away(path):
    """The file or folder of somebody else."""
    os.chown(path, 12345, -1)


DAMAGE = {
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "cut in its header": lambda file: file.write_bytes(file.read_bytes()[:40]),
    "empty": lambda file: file.write_bytes(b""),
    "another format": lambda file: file.write_bytes(b"GIF89a" * 30),
    "a changed byte": lambda file: file.write_bytes(file.read_bytes()[:-1] + b"X"),
    "of another architecture": lambda file: file.write_bytes(
        cache.pack(compile.entry(replace(REQUEST, arch=arch.get("sm_103a")), "sim").made_of, b"abc")
    ),
    "writable by others": lambda file: file.chmod(0o666),
}
ALIEN = {
    "a folder that others can write in": lambda file: file.parent.chmod(0o777),
    "somebody else's file": give_away,
    "somebody else's folder": lambda file: give_away(file.parent),
}


@pytest.mark.parametrize("name", [*DAMAGE, *ALIEN])
def test_a_bad_entry_costs_one_compile_and_one_warning(name, folder, builds, caplog):
    assert compile.get(REQUEST, "sim") == "fn" == again() and len(builds) == 1
    assert not caplog.records
    if name in ALIEN and "somebody" in name and os.getuid() != 0:
        pytest.skip("only root can give a file away")
    {**DAMAGE, **ALIEN}[name](ENTRY.path)
    assert again() == "fn" and len(builds) == 2
    assert len(caplog.records) == 1, [r.message for r in caplog.records]
    if name in ALIEN and "folder" in name:
        return  # it stays as it is
    assert again() == "fn" and len(builds) == 2, "the entry is good again"
    assert ENTRY.path.stat().st_uid == os.getuid() and ENTRY.path.stat().st_mode & 0o077 == 0


def test_a_link_is_not_followed(folder, builds, tmp_path, caplog):
    again()
    ENTRY.path.rename(tmp_path / "elsewhere")
    ENTRY.path.symlink_to(tmp_path / "elsewhere")
    assert again() == "fn" and len(builds) == 2 and len(caplog.records) == 1
    assert not ENTRY.path.is_symlink()


def test_a_folder_that_cannot_be_written_is_one_warning(folder, builds, caplog, monkeypatch):
    def refuse(*args, **kw):
        raise PermissionError(13, "read-only")

    folder.mkdir(mode=0o700)
    monkeypatch.setattr(cache.tempfile, "mkstemp", refuse)
    assert again() == again() == "fn" and len(builds) == 2
    assert [r for r in caplog.records if "cannot be written" in r.message] == caplog.records
    assert len(caplog.records) == 1


@pytest.mark.parametrize("mode,stored", [("rw", True), ("ro", False), ("off", False)])
def test_modes(mode, stored, folder, builds, monkeypatch):
    monkeypatch.setenv("FA_CUTE_CACHE", mode)
    again()
    assert ENTRY.path.exists() == stored
    monkeypatch.setenv("FA_CUTE_CACHE", "rw")
    again()
    monkeypatch.setenv("FA_CUTE_CACHE", mode)
    before = len(builds)
    again()
    assert len(builds) - before == (mode == "off")


def test_an_edit_or_an_upgrade_is_another_entry(monkeypatch):
    names = {ENTRY.name}
    for part in ("source_hash", "versions"):
        monkeypatch.setattr(cache, part, lambda: {"torch": "0"})
        names.add(compile.entry(REQUEST, "sim").name)
        monkeypatch.undo()
    names.add(compile.entry(REQUEST, "cuda").name)
    assert len(names) == 4
    assert compile.entry(REQUEST, "sim") == ENTRY


COLD = """
import sys, time
from pathlib import Path
from fa_cute import compile
from tests.a_request import REQUEST
def build(request):
    Path(sys.argv[1]).open("a").write("built\\n")
    time.sleep(0.5)
    return "fn", b"abc"
compile.build_sim, compile.load_sim = build, lambda payload: "fn" if payload == b"abc" else None
print("ready", flush=True)
sys.stdin.readline()
assert compile.get(REQUEST, "sim") == "fn"
"""


def test_eight_processes_at_once_compile_once(folder, tmp_path):
    log = tmp_path / "builds"
    crowd = [
        subprocess.Popen(
            [sys.executable, "-c", COLD, str(log)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for _ in range(8)
    ]
    for process in crowd:
        assert process.stdout.readline() == "ready\n"
    for process in crowd:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in crowd:
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert log.read_text() == "built\n"
    assert [p.name for p in folder.iterdir()] == [ENTRY.name], "one good entry, nothing else"
    assert cache.find(ENTRY) == b"abc"


def test_who_waits_too_long_compiles_for_himself(folder, builds, monkeypatch, caplog):
    monkeypatch.setenv("FA_CUTE_COMPILE_TIMEOUT", "0.2")
    filelock = pytest.importorskip("filelock")
    (folder.parent / "locks").mkdir(mode=0o700)
    with filelock.FileLock(str(folder.parent / "locks" / f"{ENTRY.name}.lock")):
        assert again() == "fn" and len(builds) == 1
    assert len(caplog.records) == 1 and "0.2 s" in caplog.records[0].message


HANGS = """
import ctypes
from fa_cute import compile
from tests.a_request import REQUEST
compile.build_sim = lambda request: ctypes.PyDLL(None).sleep(60)  # holds the interpreter lock
compile.get(REQUEST, "sim")
"""


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_compile_that_hangs_ends_with_the_command(folder, monkeypatch):
    monkeypatch.setenv("FA_CUTE_COMPILE_TIMEOUT", "0.5")
    done = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, cwd=ROOT, timeout=50
    )
    assert done.returncode < 0
    assert "not done after 0.5 s" in done.stderr and REQUEST.command("sim") in done.stderr


@pytest.mark.parametrize("name", ["FA_CUTE_COMPILE_TIMEOUT", "FA_CUTE_JIT_MONITOR"])
def test_wrong_environment(name, folder, builds, monkeypatch):
    monkeypatch.setenv(name, "soon")
    with pytest.raises(fa_cute.ArgumentError, match=name):
        again()


def test_jit_monitor(folder, builds, caplog):
    assert fa_cute.jit_monitor("warn") == "off"
    try:
        again()
        again()
        assert len(caplog.records) == 1 and "warmup --arch sm_100a" in caplog.records[0].message
        assert fa_cute.jit_monitor("error") == "warn"
        again()  # from disk: no compile
        ENTRY.path.unlink()
        with pytest.raises(compile.CompileError, match="jit_monitor"):
            again()
    finally:
        fa_cute.jit_monitor("off")
    with pytest.raises(fa_cute.ArgumentError, match="loud"):
        fa_cute.jit_monitor("loud")


def test_no_compile_during_a_capture(folder, builds, monkeypatch):
    monkeypatch.setattr(compile, "capturing", lambda: True)
    assert again() == "fn", "the simulator knows no captures"
    with pytest.raises(fa_cute.CompileDuringCaptureError, match="once before the capture"):
        compile.get(REQUEST, "cuda")
    monkeypatch.setitem(compile._memory, (REQUEST, "cuda"), "loaded")
    assert compile.get(REQUEST, "cuda") == "loaded"
    assert issubclass(fa_cute.CompileDuringCaptureError, fa_cute.CompileError)


SECOND = """
import sys
from fa_cute import compile
from tests.a_request import REQUEST
compile.build = None
fn = compile.get(REQUEST, "cuda")
assert "cutlass" not in sys.modules
import torch
from fa_cute import launch
x = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16)
try:
    fn(x, x, x, x, torch.zeros(1, 1, 1), *launch.rest(1.0, 1))
except ValueError as error:
    print(error)
"""


def test_kernels_for_cuda_are_kept_too(folder):
    """Built, linked and called as far as is possible without a GPU: it refuses CPU tensors."""
    assert callable(compile.get(REQUEST, "cuda"))
    (file,) = folder.iterdir()
    assert file.suffix == ".cuda" and file.stat().st_mode & 0o077 == 0
    done = subprocess.run([sys.executable, "-c", SECOND], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "expected device_type=cuda" in done.stdout


def test_the_key_depends_on_what_is_compiled():
    sm100 = arch.get("sm_100a")

    def name(*parts):
        return cache.entry("forward", "sim", *parts).name

    specs = [
        FwdSpec("bf16", 128, 128, True, 1),
        FwdSpec("fp16", 128, 128, True, 1),
        FwdSpec("bf16", 128, 128, False, 1),
        FwdSpec("bf16", 128, 128, True, 4),
    ]
    keys = {name(tune.forward(spec, sm100), spec, sm100) for spec in specs}
    assert len(keys) == len(specs)
    cfg = tune.forward(specs[0], sm100)
    assert name(cfg, specs[0], sm100) in keys
    other = arch.get("sm_103a")
    assert name(cfg, specs[0], other) not in keys


def test_only_plain_values_are_keys():
    with pytest.raises(TypeError, match="Tensor"):
        cache.entry("forward", "sim", torch.ones(1))
    assert cache.plain({"b": (1, None), "a": 0.5}) == {"a": 0.5, "b": [1, None]}


def test_a_kernel_that_does_not_compile_is_an_error(monkeypatch):
    spec = FwdSpec("bf16", 128, 128, True, 1)
    sm100 = arch.get("sm_100a")

    class Broken:
        def __init__(self, cfg, spec):
            raise RuntimeError("no such thing")

    from fa_cute.fwd.sm100 import kernel

    monkeypatch.setattr(kernel, "FwdSm100", Broken)
    with pytest.raises(compile.CompileError, match="no such thing"):
        compile.build_forward(tune.forward(spec, sm100), spec, sm100)
