"""One compile per kind of problem, none in a second process, and no trust in bad files."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from fa_cute import arch, cache, compile, tune
from fa_cute.fwd.args import FwdSpec

pytest.importorskip("cutlass", reason="the kernel is compiled by NVIDIA's CuTe DSL")

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
    assert entry.stat().st_size == len(whole)


def test_what_others_can_write_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setenv("FA_CUTE_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    cache.store("entry", lambda path: path.write_bytes(b"x"))
    assert cache.find("entry") == tmp_path / "entry"
    tmp_path.chmod(0o777)
    assert cache.find("entry") is None
    tmp_path.chmod(0o700)
    (tmp_path / "entry").chmod(0o666)
    assert cache.find("entry") is None


@pytest.mark.parametrize("mode,stored", [("rw", True), ("ro", False), ("off", False)])
def test_modes(mode, stored, tmp_path, monkeypatch):
    monkeypatch.setenv("FA_CUTE_CACHE_DIR", str(tmp_path / "new"))
    monkeypatch.setenv("FA_CUTE_CACHE", mode)
    cache.store("entry", lambda path: path.write_bytes(b"x"))
    assert (tmp_path / "new" / "entry").exists() == stored
    assert (cache.find("entry") is not None) == stored


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FA_CUTE_CACHE_DIR", str(tmp_path / "file"))
    cache.store("entry", lambda path: path.write_bytes(b"x"))
    cache.store("entry", lambda path: path.write_bytes(b"x"))
    assert sum("cannot be written" in r.message for r in caplog.records) == 1


def test_the_key_depends_on_what_is_compiled():
    sm100 = arch.get("sm_100a")
    specs = [
        FwdSpec("bf16", 128, 128, True, 1),
        FwdSpec("fp16", 128, 128, True, 1),
        FwdSpec("bf16", 128, 128, False, 1),
        FwdSpec("bf16", 128, 128, True, 4),
    ]
    keys = {cache.key(tune.forward(spec, sm100), spec, sm100) for spec in specs}
    assert len(keys) == len(specs)
    cfg = tune.forward(specs[0], sm100)
    assert cache.key(cfg, specs[0], sm100) in keys
    other = arch.get("sm_103a")
    assert cache.key(cfg, specs[0], other) not in keys


def test_only_plain_values_are_keys():
    with pytest.raises(TypeError, match="Tensor"):
        cache.key(torch.ones(1))
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
