"""A kernel to compile, for tests and the processes that they start: needs no torch."""

from __future__ import annotations

from fa_cute import arch, compile, tune
from fa_cute.fwd.args import FwdSpec

SM100 = arch.get("sm_100a")
SPEC = FwdSpec("bf16", 64, 64, False, 1)
REQUEST = compile.Request("forward", tune.forward(SPEC, SM100), SPEC, SM100)
