"""flash-attn-4 on the simulator: it expects CUDA tensors, Triton and a device to ask."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import sys
from unittest import mock

import torch

from fa_cute.sim import host

NUM_SMS = 148


def is_installed() -> bool:
    """Asked without importing it, which only works inside a session."""
    try:
        importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _import_interface():
    """Its imports want Triton (which it uses for other kernels only), unavailable without CUDA."""
    import torch._dynamo
    import torch._inductor.runtime.hints  # noqa: F401  before the stand-ins are visible

    names = ("triton", "triton.language", "triton.runtime", "triton.testing")
    missing = {n: mock.MagicMock(__spec__=None) for n in names if n not in sys.modules}
    with mock.patch.dict(sys.modules, missing):
        from flash_attn.cute import interface

        loaded = dict(sys.modules)
    for name, module in loaded.items():
        if name not in missing:
            sys.modules.setdefault(name, module)
    return interface


@contextlib.contextmanager
def flash_attn4(arch: str, kernels: str | None = None, **options):
    """Yields (its interface module, the simulator session); torch is as before after it.

    `kernels` chooses its kernels of another architecture (those of sm_120 run on sm_80 too).

    Line information is off: it doubles the time that its kernels take to compile.
    """
    options.setdefault("lineinfo", False)
    environ = {
        "FLASH_ATTENTION_ARCH": kernels or arch.rstrip("a"),
        "FLASH_ATTENTION_NUM_SMS": str(NUM_SMS),
        "CUTE_DSL_ARCH": arch,
    }
    with mock.patch.dict(os.environ, environ), host.session(arch, **options) as session:
        interface = _import_interface()
        interface._get_device_arch.cache_clear()
        torch.Tensor.is_cuda = property(lambda self: True)
        try:
            yield interface, session
        finally:
            del torch.Tensor.is_cuda
            interface._get_device_arch.cache_clear()
