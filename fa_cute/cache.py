"""Compiled kernels on disk: where they lie, what their name says, how one is written and trusted.

An entry is a file named after the hash of everything that its content depends on. It is written
elsewhere and renamed, so a reader sees all of it or nothing. Nothing in it is unpickled.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable
from functools import cache as once
from importlib import metadata
from pathlib import Path

from . import log
from .errors import ArgumentError

MODES = ("rw", "ro", "off")
KERNEL_SOURCES = ("plan", "ops", "sched", "fwd", "bwd", "arch.py", "compile.py", "cache.py")
HOST_SOURCES = "sim/host*.py"
_log = log.get("cache")
_warned: set[str] = set()


def root() -> Path:
    """The cache's folder: FA_CUTE_CACHE_DIR, or fa_cute in the user's cache directory."""
    given = os.environ.get("FA_CUTE_CACHE_DIR", "").strip()
    if given:
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(base) if base else Path.home() / ".cache") / "fa_cute"


def mode() -> str:
    """FA_CUTE_CACHE: "rw" (default), "ro" or "off"."""
    value = os.environ.get("FA_CUTE_CACHE", "").strip().lower() or "rw"
    if value not in MODES:
        raise ArgumentError(f"FA_CUTE_CACHE is {value!r}; allowed: {', '.join(MODES)}")
    return value


def plain(value):
    """A value as JSON with a fixed spelling; only what cannot differ between two processes."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, enum.Enum):
        return [type(value).__qualname__, value.name]
    if isinstance(value, (tuple, list)):
        return [plain(v) for v in value]
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in sorted(value.items())}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return [type(value).__qualname__, fields]
    if isinstance(value, type):
        return [value.__module__, value.__qualname__]
    raise TypeError(f"{type(value).__qualname__} cannot be part of a cache key")


def key(*parts) -> str:
    """The name of the entry for these parts, these sources and these versions."""
    text = json.dumps([plain(parts), versions(), source_hash()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


@once
def versions() -> dict[str, str]:
    """What an entry depends on outside this package."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi", "torch"):
        found[name] = _version(name)
    for libs in ("cu12", "cu13"):  # the set that is installed decides the PTX version
        found[libs] = _version(f"nvidia-cutlass-dsl-libs-{libs}")
    return found


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


@once
def source_hash() -> str:
    """A hash of the sources that a compiled kernel comes from."""
    here = Path(__file__).parent
    files = [f for part in KERNEL_SOURCES for f in _python_files(here / part)]
    digest = hashlib.sha256()
    for file in sorted([*files, *here.glob(HOST_SOURCES)]):
        digest.update(f"{file.relative_to(here)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _python_files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def find(name: str) -> Path | None:
    """The entry's file, if there is one that this user alone could have written."""
    if mode() == "off":
        return None
    file = root() / name
    try:
        for path in (file.parent, file):
            status = path.stat()
            if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
                warn_once(f"{path} belongs to or can be written by somebody else; it is not read")
                return None
    except OSError:
        return None
    return file


def store(name: str, write: Callable[[Path], None]) -> None:
    """Make the entry by ``write(path)``; a folder that cannot be written costs one warning."""
    if mode() != "rw":
        return
    try:
        root().mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=root()) as folder:
            file = Path(folder) / name
            write(file)
            file.chmod(0o600)
            os.replace(file, root() / name)
    except OSError as error:
        warn_once(f"the kernel cache {root()} cannot be written: {error}")


def drop(name: str, why: BaseException) -> None:
    """Remove an entry that could not be loaded."""
    warn_once(f"cache entry {name} is rebuilt: {why}")
    if mode() == "rw":
        (root() / name).unlink(missing_ok=True)


def warn_once(message: str) -> None:
    """One warning per message and process."""
    if message not in _warned:
        _warned.add(message)
        _log.warning(message)
