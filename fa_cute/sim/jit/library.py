"""The native functions of this process: packs of common forms, others when a kernel needs them."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable
from functools import cache

from fa_cute.sim.jit import (  # noqa: F401  (the modules register their instructions)
    convert,
    engine,
    floats,
    integers,
    interpreter,
    math,
    matrix,
    memory,
    mma,
    moves,
    warp,
)
from fa_cute.sim.jit.ir import PTR, Fn
from fa_cute.sim.jit.packs import PACKS
from fa_cute.sim.jit.registry import Form, Spec, Unsupported, spec_of

_ARGS = f"{PTR}, {PTR}, i32, {PTR}"


@cache
def spec(key: str) -> Spec:
    return spec_of(Form.of(key))


def module_text(keys: list[str], extra: str = "") -> str:
    """One module: a function per key, the prelude functions they use, and a table of addresses."""
    Fn.predicated_stores = engine.has_predicated_stores()
    functions, needed = [], set()
    for index, key in enumerate(keys):
        form = spec(key)
        f = Fn(f"op{index}", form.sig)
        form.emit(f)
        functions.append(f.text())
        needed |= f.needs
    texts: dict[str, str] = {}
    while needed - set(texts):
        for name in needed - set(texts):
            texts[name] = math.PRELUDE[name]()
            needed = needed | {n for n in math.PRELUDE if f"@fx_{n}(" in texts[name]}
    count = len(keys)
    rows = [f"%t0 = llvm.mlir.undef : !llvm.array<{count} x ptr>"]
    for index in range(count):
        rows.append(f"%f{index} = llvm.mlir.addressof @op{index} : {PTR}")
        ty = f"!llvm.array<{count} x ptr>"
        rows.append(f"%t{index + 1} = llvm.insertvalue %f{index}, %t{index}[{index}] : {ty}")
    table = f"""llvm.mlir.global internal constant @pointers() : !llvm.array<{count} x ptr> {{
{chr(10).join(rows)}
llvm.return %t{count} : !llvm.array<{count} x ptr>
}}
llvm.func @table() -> {PTR} {{
%p = llvm.mlir.addressof @pointers : {PTR}
llvm.return %p : {PTR}
}}
"""
    return "module {\n" + "".join(texts.values()) + "".join(functions) + table + extra + "}\n"


class Library:
    """Addresses of native functions; grows by whole modules."""

    def __init__(self):
        self.addresses: dict[str, int] = {}
        self.loaded: list[engine.Loaded] = []
        self.run_address = 0

    def _load(self, name: str, keys: list[str], extra=lambda: "") -> engine.Loaded:
        loops = engine.LOOPS if name in ("loop", "memory", "warp", "matrix") else engine.STRAIGHT
        blob = engine.cached_object(name, lambda: module_text(keys, extra()), loops)
        loaded = engine.Loaded(blob)
        self.loaded.append(loaded)
        table = ctypes.CFUNCTYPE(ctypes.c_void_p)(loaded.address("table"))()
        pointers = (ctypes.c_uint64 * len(keys)).from_address(table)
        self.addresses.update(zip(keys, pointers, strict=True))
        return loaded

    def base(self) -> None:
        """The interpreter and control flow."""
        if not self.run_address:
            loaded = self._load("loop", PACKS["loop"], interpreter.run_text)
            self.run_address = loaded.address("run")

    def get(self, keys: Iterable[str]) -> dict[str, int]:
        """Addresses of native functions, compiled now where they are new."""
        self.base()
        missing = sorted(set(keys) - self.addresses.keys())
        for name, pack in PACKS.items():
            if missing and any(k in pack for k in missing):
                self._load(name, pack)
                missing = [k for k in missing if k not in self.addresses]
        if missing:
            digest = hashlib.sha256("\n".join(missing).encode()).hexdigest()[:16]
            self._load(f"extra-{digest}", missing)
        return self.addresses


@cache
def library() -> Library:
    return Library()


def known(key: str) -> bool:
    try:
        spec(key)
    except Unsupported:
        return False
    return True
