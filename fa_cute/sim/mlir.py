"""The MLIR extension module of the DSL's wheel, without the DSL.

`import cutlass` takes more than a second; a process that only links cached object files needs
just the extension module (0.1 s). The module must be loaded once per process, whoever asks first,
so it is loaded the way the package itself loads it, and a later `import cutlass` finds it in
`sys.modules` and goes on from there.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types

_NAME = "cutlass._mlir._mlir_libs._cutlass_ir"


def extension():
    """The populated module `_cutlass_ir`: of the imported DSL, or else loaded alone."""
    if _NAME not in sys.modules:
        _load_alone()
    return sys.modules[_NAME]


def _load_alone() -> None:
    spec = importlib.util.find_spec("cutlass")
    if spec is None:
        raise ImportError(
            "nvidia-cutlass-dsl is not installed: pip install nvidia-cutlass-dsl==4.8.1"
        )
    # A parent without the package's own __init__, so that its sub-package imports nothing else.
    stand_in = types.ModuleType("cutlass")
    stand_in.__path__ = list(spec.submodule_search_locations)
    stand_in.__spec__ = spec
    sys.modules["cutlass"] = stand_in
    try:
        importlib.import_module("cutlass._mlir._mlir_libs")
        module = sys.modules[_NAME]
        module.populate(module)
    finally:
        del sys.modules["cutlass"]

    def already_populated(_module) -> None:
        """Stands for `populate` (which works once) when the package's own __init__ runs later."""
        sys.modules["cutlass"]._mlir = sys.modules["cutlass._mlir"]

    module.populate = already_populated


def binary_engine(blob: bytes, shared_libs: list[str] | None = None):
    """An engine that links an object file into this process; `engine.lookup(symbol)` is an
    address.
    """
    return extension()._execution_engine.BinaryExecutionEngine(blob, shared_libs or [], True)
