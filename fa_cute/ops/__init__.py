"""Building blocks that kernels of several architectures share.

`fa_cute.ops.flash_fwd` and `flash_bwd`, the stable low-level pair on torch tensors, are imported
when first used: the device blocks need no torch.
"""

from __future__ import annotations

__all__ = ["flash_bwd", "flash_fwd"]


def __getattr__(name: str):
    if name in __all__:
        from importlib import import_module

        return getattr(import_module("fa_cute.operators"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
