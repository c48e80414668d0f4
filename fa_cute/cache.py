"""Compiled kernels on disk: where they lie, what their name says, how one is written and trusted.

An entry is a file named after the hash of everything that its content depends on, which it also
holds as text, beside a hash of the kernel itself. It is written elsewhere and renamed, so a reader
sees all of it or nothing; one process makes it while others wait. Nothing in it is unpickled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import hashlib
import inspect
import json
import os
import platform
import struct
import tempfile
from dataclasses import dataclass
from functools import cache as once
from importlib import metadata
from pathlib import Path

from . import log
from .errors import ArgumentError

MODES = ("rw", "ro", "off")
KERNEL_SOURCES = ("plan", "ops", "sched", "fwd", "bwd", "arch.py", "compile.py", "cache.py")
HOST_SOURCES = "sim/host*.py"
MAGIC = b"fa_cute kernel 1\n"
SUFFIXES = (".sim", ".cuda")
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
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
        return [_class_name(type(value)), fields]
    if isinstance(value, type):
        return [value.__module__, value.__qualname__]
    raise TypeError(f"{type(value).__qualname__} cannot be part of a cache key")


def _class_name(cls: type) -> str:
    """A class by name; one from outside this package with a hash of the files that it and what it
    inherits from come from.
    """
    outside = [c for c in cls.__mro__[:-1] if c.__module__.split(".")[0] != __package__]
    if not outside:
        return cls.__qualname__
    if any("<locals>" in c.__qualname__ for c in outside):
        raise ArgumentError(
            f"{cls.__qualname__} is part of a kernel and made inside a function, whose variables "
            "no key can know: define the class at the top of a file, what varies as its fields"
        )
    digest = hashlib.sha256()
    for one in outside:
        try:
            digest.update(Path(inspect.getfile(one)).read_bytes())
        except (TypeError, OSError) as error:
            raise ArgumentError(
                f"{one.__qualname__} is part of a kernel and its source cannot be read ({error}): "
                "a kernel on disk is named after the sources that made it; define the class in a "
                "file"
            ) from error
    return f"{cls.__module__}.{cls.__qualname__} {digest.hexdigest()}"


@dataclass(frozen=True)
class Entry:
    """A kernel's place in the cache, and what it is compiled from."""

    name: str  # of the file
    made_of: dict  # what the name is a hash of, as JSON

    @property
    def path(self) -> Path:
        return root() / self.name


def entry(kind: str, target: str, *parts) -> Entry:
    """The entry of these parts, these sources and these versions."""
    made_of = {"parts": plain(parts), "target": target, "versions": versions()}
    made_of["sources"] = source_hash()
    text = json.dumps(made_of, sort_keys=True)
    return Entry(f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:40]}.{target}", made_of)


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


class BadEntryError(Exception):
    """A file that is not a whole entry, or not the one that its name says."""


def pack(made_of: dict, payload: bytes, **notes) -> bytes:
    """An entry's file: magic, length of the header, header as JSON, the kernel."""
    header = {
        "made_of": made_of,
        "sha256": hashlib.sha256(payload).hexdigest(),
        "bytes": len(payload),
        **notes,
    }
    head = json.dumps(header).encode()
    return MAGIC + struct.pack("<I", len(head)) + head + payload


def unpack(data: bytes) -> tuple[dict, bytes]:
    """Header and kernel; raises BadEntryError unless all of it is there, unchanged."""
    start = len(MAGIC) + 4
    if not data.startswith(MAGIC) or len(data) < start:
        raise BadEntryError("no entry of this version")
    end = start + struct.unpack("<I", data[len(MAGIC) : start])[0]
    try:
        header = json.loads(data[start:end])
        digest = header["sha256"]
    except (ValueError, TypeError, KeyError) as error:
        raise BadEntryError(f"its header cannot be read: {error}") from error
    if hashlib.sha256(data[end:]).hexdigest() != digest:
        raise BadEntryError("it is truncated or was changed")
    return header, data[end:]


def is_ours(path: Path, status: os.stat_result) -> bool:
    """Whether nobody but this user can have written a file or can write in a folder."""
    if not hasattr(os, "getuid"):
        return True
    if status.st_uid == os.getuid() and not status.st_mode & 0o022:
        return True
    warn_once(f"{path} belongs to or can be written by somebody else; it is not used")
    return False


def read_file(path: Path) -> bytes | None:
    """A file that this user alone can have written; None where there is none."""
    try:
        if not is_ours(path.parent, path.parent.stat()):
            return None
        with os.fdopen(os.open(path, os.O_RDONLY | NO_FOLLOW), "rb") as file:
            if not is_ours(path, os.fstat(file.fileno())):
                return None
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        warn_once(f"{path} cannot be read: {error}")
        return None


def find(entry: Entry) -> bytes | None:
    """The kernel of an entry; one that is damaged or is another's is dropped with one warning."""
    data = None if mode() == "off" else read_file(entry.path)
    if data is None:
        return None
    try:
        header, payload = unpack(data)
        if header["made_of"] != entry.made_of:
            raise BadEntryError("it holds another kernel")
    except BadEntryError as error:
        drop(entry, error)
        return None
    return payload


def store(entry: Entry, payload: bytes, **notes) -> None:
    """Keep a kernel; a folder that cannot be written costs one warning."""
    if mode() != "rw":
        return
    folder = root()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not is_ours(folder, folder.stat()):
            return
        number, name = tempfile.mkstemp(prefix=".new-", dir=folder)  # with mode 0600
        try:
            with os.fdopen(number, "wb") as file:
                file.write(pack(entry.made_of, payload, **notes))
            os.replace(name, entry.path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        warn_once(f"the kernel cache {folder} cannot be written: {error}")


def drop(entry: Entry, why: BaseException) -> None:
    """Remove an entry that cannot be loaded."""
    warn_once(f"cache entry {entry.name} is rebuilt: {why}")
    if mode() == "rw":
        with contextlib.suppress(OSError):
            entry.path.unlink(missing_ok=True)


def entries() -> list[Path]:
    """The files of all entries, by name."""
    try:
        return sorted(p for p in root().iterdir() if p.suffix in SUFFIXES)
    except OSError:
        return []


def lock_seconds() -> float:
    """FA_CUTE_COMPILE_TIMEOUT: how long to wait for a compile, here or in another process."""
    given = os.environ.get("FA_CUTE_COMPILE_TIMEOUT", "").strip() or "600"
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise ArgumentError(f"FA_CUTE_COMPILE_TIMEOUT is {given!r}; it must be a number of seconds")
    return seconds


def _lock_folder() -> Path:
    """FA_CUTE_LOCK_DIR, or a folder of this user for temporary files: local, where locks work."""
    given = os.environ.get("FA_CUTE_LOCK_DIR", "").strip()
    if given:
        return Path(given).expanduser()
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"fa_cute-locks-{user}"


@contextlib.contextmanager
def lock(entry: Entry):
    """One process at a time makes an entry. Who waited too long makes it too, for itself."""
    held = _acquire(entry) if mode() == "rw" else None
    try:
        yield
    finally:
        if held is not None:
            held.release()


def _acquire(entry: Entry):
    try:
        from filelock import FileLock, Timeout
    except ImportError:  # without it two processes may compile one kernel, no more
        return None
    folder = _lock_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not is_ours(folder, folder.lstat()):
            return None
        held = FileLock(str(folder / f"{entry.name}.lock"), mode=0o600)
        held.acquire(timeout=lock_seconds(), poll_interval=0.1)
        return held
    except Timeout:
        warn_once(f"another process has been compiling {entry.name} for {lock_seconds():g} s")
    except (OSError, NotImplementedError) as error:
        warn_once(f"no lock in {folder}: {error}")
    return None


def warn_once(message: str) -> None:
    """One warning per message and process."""
    if message not in _warned:
        _warned.add(message)
        _log.warning(message)
