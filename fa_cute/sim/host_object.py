"""The host half of a compiled kernel as one relocatable object that calls us instead of CUDA.

The DSL lowers the host function to LLVM-dialect MLIR with external CUDA entry points. `redirect`
gives each of them a body that jumps through a table in the module; whoever loads the object fills
the table in. So the object needs no CUDA library, no symbol registration and, in a second
process, nothing of the DSL but its MLIR extension module (loaded by path: 20 ms, where importing
the DSL takes over a second).
"""

from __future__ import annotations

import ctypes
import re

from . import mlir

TABLE = "fa_cute_host_table"
_REDIRECTED = re.compile(
    r"^(?P<indent>\s*)llvm\.func @(?P<name>_cu\w+|cuda_dialect_\w+|CuteDSLRT_\w+)"
    r"\((?P<args>[^)]*)\)(?: -> (?P<ret>[\w.!]+))?(?: attributes \{[^\n{}]*\})?[ ]*$",
    re.MULTILINE,
)


def redirect(module_text: str) -> tuple[str, tuple[str, ...]]:
    """The module with every external CUDA function defined as a jump through the table; the
    table's names.
    """
    names: list[str] = []

    def define(match: re.Match) -> str:
        args = [a.strip() for a in match["args"].split(",") if a.strip()]
        ret = match["ret"]
        slot = len(names)
        names.append(match["name"])
        formal = ", ".join(f"%arg{i}: {a}" for i, a in enumerate(args))
        actual = ", ".join(f"%arg{i}" for i in range(len(args)))
        arrow = f" -> {ret}" if ret else ""
        call_type = f"!llvm.ptr, ({', '.join(args)}) -> {ret or '()'}"
        result = "%3 = " if ret else ""
        returned = f" %3 : {ret}" if ret else ""
        return (
            f"  llvm.func internal @{match['name']}({formal}){arrow} {{\n"
            f"    %0 = llvm.mlir.addressof @{TABLE} : !llvm.ptr\n"
            f"    %1 = llvm.getelementptr %0[{slot}] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr\n"
            f"    %2 = llvm.load %1 : !llvm.ptr -> !llvm.ptr\n"
            f"    {result}llvm.call %2({actual}) : {call_type}\n"
            f"    llvm.return{returned}\n"
            "  }"
        )

    body = _REDIRECTED.sub(define, module_text)
    end = body.rstrip().rfind("}")
    array = f"!llvm.array<{max(len(names), 1)} x ptr>"
    table = (
        f"  llvm.mlir.global internal @{TABLE}() : {array} {{\n"
        f"    %0 = llvm.mlir.zero : {array}\n    llvm.return %0 : {array}\n  }}\n"
        f"  llvm.func @{TABLE}_address() -> !llvm.ptr {{\n"
        f"    %0 = llvm.mlir.addressof @{TABLE} : !llvm.ptr\n    llvm.return %0 : !llvm.ptr\n  }}\n"
    )
    # The unload destructor would run after Python is gone; there is nothing to unload.
    body = re.sub(
        r"^\s*llvm\.mlir\.global_dtors [^\n]*$", "", body[:end] + table + body[end:], flags=re.M
    )
    # The device code in it is a cubin, which nothing here executes.
    return _without_cubin(body), tuple(names)


def _without_cubin(text: str) -> str:
    pattern = re.compile(
        r'(llvm\.mlir\.global internal constant @\w+_binary)\("P\\EDU\\BA[^\n]*"\)([^\n]*)$', re.M
    )
    return pattern.sub(r'\1("\\00")\2', text)


def to_object(module_text: str) -> bytes:
    """Native code of a host module, position independent."""
    from cutlass._mlir import ir
    from cutlass._mlir._mlir_libs._cutlass_ir import _aot_support

    with ir.Context() as context:
        context.allow_unregistered_dialects = True
        module = ir.Module.parse(module_text)
        return _aot_support.export_module_to_bytes(module, format="o", opt_level=1, enable_pic=True)


class HostObject:
    """A loaded object: `symbol(name)` is an address; its table points at the given callbacks."""

    def __init__(self, blob: bytes, names: tuple[str, ...], callbacks: dict[str, object]):
        import tvm_ffi

        self._engine = mlir.binary_engine(blob, [tvm_ffi.libinfo.find_libtvm_ffi()])
        self._callbacks = callbacks  # the table holds bare addresses: keep what they belong to
        address = ctypes.CFUNCTYPE(ctypes.c_void_p)(self.symbol(f"{TABLE}_address"))()
        table = (ctypes.c_void_p * len(names)).from_address(address)
        for slot, name in enumerate(names):
            table[slot] = ctypes.cast(callbacks[name], ctypes.c_void_p)

    def symbol(self, name: str) -> int:
        return self._engine.lookup(name)
