"""A functional simulator of CUDA kernels at the level of PTX; see README.md beside this file.

    with sim.session("sm_100a", schedule="late") as s:
        out = compiled_function(q, k, v)  # torch CPU tensors
    print(s.launches[-1])

`run` executes a parsed kernel directly.
"""

from __future__ import annotations

import importlib

_HOMES = {
    "session": "host",
    "current": "host",
    "compiling": "host",
    "save": "host",
    "load": "host",
    "run": "machine",
    "Options": "machine",
    "GlobalMemory": "memory",
    "Schedule": "schedule",
    "LaunchReport": "report",
    "Timeline": "timeline",
    "parse": "ptx",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str):
    """Import what is asked for: a reader of PTX doesn't need the DSL's host side."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
