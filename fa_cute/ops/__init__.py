"""Building blocks that kernels of several architectures share.

`fa_cute.ops.flash_fwd`, `flash_bwd` and their varlen forms, the stable low-level pairs on torch
tensors, are imported when first used: the device blocks need no torch.
"""

from __future__ import annotations

_MODULES = {
    "flash_bwd": "operators",
    "flash_fwd": "operators",
    "flash_varlen_bwd": "operators_varlen",
    "flash_varlen_fwd": "operators_varlen",
}
__all__ = ["flash_bwd", "flash_fwd", "flash_varlen_bwd", "flash_varlen_fwd"]


def __getattr__(name: str):
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(f"fa_cute.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
