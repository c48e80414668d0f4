"""MLIR text -> object file -> functions of this process, with a cache of object files on disk."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import platform
import tempfile
from functools import cache
from pathlib import Path

from fa_cute import log
from fa_cute.errors import SimError
from fa_cute.sim import mlir

# Straight-line functions need no passes before instruction selection, and compile twice as fast
# without; loops with variables in memory need them.
STRAIGHT, LOOPS = 0, 1


def cache_dir() -> Path:
    root = os.environ.get("FA_CUTE_CACHE_DIR")
    return (Path(root) if root else Path.home() / ".cache" / "fa_cute") / "sim"


@cache
def toolchain_key() -> str:
    """What besides the text decides the object code: the sources here, the wheel, the processor."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    digest.update(importlib.metadata.version("nvidia-cutlass-dsl").encode())
    digest.update(f"{platform.machine()} {_processor()}".encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """Model and instruction sets: object code is for the machine that compiled it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    first: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in wanted:
            first.setdefault(name.strip(), value.strip())
    return repr(sorted(first.items()))


@cache
def has_predicated_stores() -> bool:
    return "avx512f" in _processor()


def compile_object(text: str, opt_level: int) -> bytes:
    """Compile LLVM-dialect text for this processor."""
    engines = mlir.extension()._mlirExecutionEngine
    from cutlass._mlir import ir

    with tempfile.TemporaryDirectory() as folder, ir.Context(), ir.Location.unknown():
        path = os.path.join(folder, "ops.o")
        try:
            engines.dump_object_file_pic(ir.Module.parse(text), path, "table", opt_level)
        except RuntimeError as error:
            raise SimError(
                f"the simulator's native functions can't be compiled for this processor ({error}); "
                "FA_CUTE_SIM_JIT=0 selects the slower engine in numpy"
            ) from error
        return Path(path).read_bytes()


def write_atomically(path: Path, blob: bytes) -> None:
    """A reader sees the old file or the new one; a full or read-only disk costs only the cache."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(handle, "wb") as out:
                out.write(blob)
            os.replace(temporary, path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise


def seal(blob: bytes) -> bytes:
    return hashlib.sha256(blob).digest() + blob


def unseal(blob: bytes) -> bytes | None:
    """The content, or None if the file was cut or changed."""
    digest, body = blob[:32], blob[32:]
    return body if hashlib.sha256(body).digest() == digest else None


def cached_object(name: str, make_text, opt_level: int) -> bytes:
    """The object file `name` of this tool chain, from disk or compiled now."""
    path = cache_dir() / toolchain_key() / f"{name}.o"
    with contextlib.suppress(OSError):
        body = unseal(path.read_bytes())
        if body is not None:
            return body
        log.logger.warning("%s is damaged and is built again", path)
    body = compile_object(make_text(), opt_level)
    write_atomically(path, seal(body))
    return body


class Loaded:
    """An object file linked into this process for as long as it lives."""

    def __init__(self, blob: bytes):
        self.engine = mlir.binary_engine(blob)

    def address(self, symbol: str) -> int:
        return int(self.engine.lookup(symbol))
