"""Object files on disk: hits, damage, concurrent and unwritable directories, a second process."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fa_cute.sim.jit import engine, library
from fa_cute.sim.jit.packs import PACKS
from fa_cute.sim.jit.registry import Form


@pytest.fixture
def builds(tmp_path, monkeypatch):
    """Counts compilations; the cache is an empty directory."""
    made: list[str] = []

    def compile_object(text: str, opt_level: int) -> bytes:
        made.append(text)
        return f"object of {text} at {opt_level}".encode()

    monkeypatch.setenv("FA_CUTE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(engine, "compile_object", compile_object)
    return made


def get(name: str = "a", text: str = "text") -> bytes:
    return engine.cached_object(name, lambda: text, 1)


def only_file(root: Path) -> Path:
    (path,) = (p for p in root.rglob("*") if p.is_file())
    return path


def test_the_second_request_is_served_from_disk(builds, tmp_path):
    first = get()
    assert get() == first == b"object of text at 1" and len(builds) == 1
    get("b", "other")
    assert len(builds) == 2
    assert not list(tmp_path.rglob("*.tmp*")) and len(list(tmp_path.rglob("*.o"))) == 2


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "garbage"])
def test_a_damaged_file_is_built_again(builds, tmp_path, damage, caplog):
    want = get()
    path = only_file(tmp_path)
    blob = path.read_bytes()
    path.write_bytes(
        {
            "cut": blob[:-3],
            "flip": blob[:40] + bytes([blob[40] ^ 1]) + blob[41:],
            "empty": b"",
            "garbage": os.urandom(100),
        }[damage]
    )
    with caplog.at_level(logging.WARNING, "fa_cute"):
        assert get() == want and len(builds) == 2
    assert "damaged" in caplog.text and str(path) in caplog.text
    assert get() == want and len(builds) == 2


def test_an_unusable_directory_costs_only_the_cache(builds, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("FA_CUTE_CACHE_DIR", str(blocked))
    assert get() == get() == b"object of text at 1"
    assert len(builds) == 2


def test_other_sources_or_processors_have_other_entries(builds, tmp_path, monkeypatch):
    get()
    monkeypatch.setattr(engine, "toolchain_key", lambda: "another")
    get()
    assert len(builds) == 2 and len(list(tmp_path.rglob("*.o"))) == 2


def test_the_key_covers_sources_wheel_and_processor():
    assert len(engine.toolchain_key()) == 16
    assert "flags" in engine._processor() or "Features" in engine._processor()


def test_packs_hold_each_form_once_and_spelled_as_the_encoder_does():
    seen: set[str] = set()
    for pack in PACKS.values():
        for key in pack:
            assert key not in seen, key
            seen.add(key)
            assert Form.of(key).key == key
            assert library.known(key), key


_PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from fa_cute.sim.jit import engine
compiled = []
inner = engine.compile_object
def spy(text, level):
    compiled.append(level)
    return inner(text, level)
engine.compile_object = spy
from tests.sim import jit_tools as t
import numpy as np
x = np.arange(32, dtype=np.uint32)
found = t.evaluate("bfi.b32 %r0, %r1, %r1, 3, 5;", {{"%r1": x}}, "%r0")
assert (found == (x & 0x07 | x << 3)).all()
print(len(compiled))
"""


def test_a_second_process_compiles_nothing(tmp_path):
    root = str(Path(__file__).resolve().parents[2])
    environment = os.environ | {"FA_CUTE_CACHE_DIR": str(tmp_path)}
    counts = []
    for turn in range(3):
        if turn == 2:  # a form that no pack has lives in a file of its own
            for path in tmp_path.rglob("extra-*.o"):
                path.write_bytes(path.read_bytes()[:100])
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM.format(root=root)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        counts.append(int(done.stdout))
    assert counts == [2, 0, 1]  # the loop and the form; nothing; the form again
