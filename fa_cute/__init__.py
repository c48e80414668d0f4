"""Attention for PyTorch in NVIDIA's CuTe DSL, with a PTX simulator that runs it anywhere."""

from __future__ import annotations

from .errors import (
    ArgumentError,
    CompileDuringCaptureError,
    CompileError,
    DeterminismError,
    FaCuteError,
    PlanError,
    SimError,
    UnsupportedError,
)

__version__ = "0.1.0"

_PUBLIC = {
    "Support": "api",
    "can_use": "api",
    "flash_attn_func": "api",
    "flash_attn_varlen_func": "api",
    "jit_monitor": "compile",
    "merge_attention": "merge",
    "supports": "api",
}

__all__ = [
    "ArgumentError",
    "CompileDuringCaptureError",
    "CompileError",
    "DeterminismError",
    "FaCuteError",
    "PlanError",
    "SimError",
    "Support",
    "UnsupportedError",
    "can_use",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "jit_monitor",
    "merge_attention",
    "supports",
]


def __getattr__(name: str):
    """Import the modules that need torch when a public name is first used."""
    if name in _PUBLIC:
        from importlib import import_module

        found = getattr(import_module(f".{_PUBLIC[name]}", __name__), name)
        globals()[name] = found  # asked once: this takes longer than a call of the kernel
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
