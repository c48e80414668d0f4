"""One thread for numpy's matrix products while a simulation runs.

The products are small (128 x 128 x 64 or so). Several BLAS threads gain nothing on them, and when
other processes want the cores too, their barriers make each product a hundred times slower.
"""

from __future__ import annotations

import contextlib
import ctypes
from functools import cache

_PREFIXES = ("scipy_openblas", "openblas")
_SUFFIXES = ("64_", "")


@cache
def _functions():
    """(get, set) of the thread count of the OpenBLAS that numpy has loaded, or None."""
    try:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            paths = {line.split()[-1] for line in maps if "openblas" in line}
    except OSError:
        return None
    for path in sorted(paths):
        library = ctypes.CDLL(path)
        for prefix in _PREFIXES:
            for suffix in _SUFFIXES:
                names = (f"{prefix}_get_num_threads{suffix}", f"{prefix}_set_num_threads{suffix}")
                if all(hasattr(library, name) for name in names):
                    get, set_ = (getattr(library, name) for name in names)
                    get.restype, set_.argtypes = ctypes.c_int, [ctypes.c_int]
                    return get, set_
    return None


@contextlib.contextmanager
def single_thread():
    """Within it numpy's BLAS has one thread; without OpenBLAS nothing changes."""
    functions = _functions()
    if functions is None:
        yield
        return
    get, set_ = functions
    before = get()
    set_(1)
    try:
        yield
    finally:
        set_(before)
