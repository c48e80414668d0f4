"""Who may import whom: lower layers never know higher ones, and torch stays at the front door."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass

import pytest

from . import tree

BASE = ("arch", "errors", "log")
PURE_OPS = ("ops.arith", "ops.mask", "ops.score", "ops.seqlen")
PURE = (*BASE, *PURE_OPS, "plan", "sched")
ARCHES = ("sm80", "sm90", "sm100")
KERNEL = (*BASE, "plan", "ops", "sched")
FRONT = (*KERNEL, "fwd", "bwd", "problem", "tune", "compile", "resources")


@dataclass(frozen=True)
class Rule:
    """What modules under ``prefix`` may import: ours by prefix, others by top-level name.

    ``lazy`` are top-level names that only a running function may import.
    """

    prefix: str
    ours: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    lazy: tuple[str, ...] = ()


# The longest matching prefix decides; a module may always import from its own prefix.
RULES = (
    Rule("__init__", ("errors",)),
    Rule("errors"),
    Rule("log", ("errors",), lazy=("cutlass",)),
    Rule("arch", ("errors",)),
    Rule("plan", BASE),
    Rule("ops.__init__"),
    *(Rule(name, (*BASE, *PURE_OPS), lazy=("cutlass",)) for name in PURE_OPS),
    Rule("ops", (*BASE, "plan"), ("cutlass",)),
    Rule("sched", (*BASE, *PURE_OPS), lazy=("cutlass",)),
    Rule("sched.varlen_prepare", (*BASE, *PURE_OPS, "sched"), ("cutlass",)),
    Rule("sched.varlen_cta", (*BASE, *PURE_OPS, "sched"), ("cutlass",)),
    Rule("sched.varlen_sides", (*BASE, *PURE_OPS), ("cutlass",)),
    # Plans and arguments are read by tables and the command line: no DSL behind them.
    *(
        Rule(name, PURE, lazy=("cutlass",))
        for name in ("fwd.args", "bwd.args", "bwd.blocks", "bwd.chunks")
    ),
    *(
        Rule(f"{way}.{sm}.plan", (*PURE, f"{way}.args", f"{way}.chunks"), lazy=("cutlass",))
        for way in ("fwd", "bwd")
        for sm in ARCHES
    ),
    Rule("fwd", KERNEL, ("cutlass", "cuda")),
    *(Rule(f"fwd.{sm}", (*KERNEL, "fwd.args"), ("cutlass", "cuda")) for sm in ARCHES),
    Rule("bwd", KERNEL, ("cutlass", "cuda")),
    *(
        Rule(
            f"bwd.{sm}",
            (*KERNEL, "bwd.args", "bwd.call", "bwd.chunks"),
            ("cutlass", "cuda"),
        )
        for sm in ARCHES
    ),
    Rule("sim", BASE, ("numpy", "tqdm"), ("cutlass", "torch", "tvm_ffi", "matplotlib", "cuda")),
    Rule("resources", (*BASE, "plan")),
    Rule("reference", (*BASE,), ("torch",)),
    Rule("problem", (*BASE, *PURE_OPS), ("torch",)),
    Rule("lengths", ("errors", "problem"), ("torch",)),
    Rule("tune", (*KERNEL, "fwd", "bwd", "problem")),
    Rule("cache", BASE, lazy=("filelock",)),
    Rule("watchdog"),
    Rule("alike", (), ("torch",)),
    Rule("warmup", (*FRONT, "cache")),
    Rule(
        "cli_cache",
        (*BASE, "cache", "compile", "warmup", "api", "dispatch", "cli"),
        lazy=("torch", "tqdm"),
    ),
    Rule("cli_kernels", (*FRONT, "warmup", "cli")),
    # Compiled host code is saved and loaded by the simulator's intercept, so compile knows it too.
    Rule(
        "compile", (*FRONT, "cache", "watchdog", "sim"), ("torch",), ("cutlass", "tvm_ffi", "cuda")
    ),
    Rule("launch", (*FRONT, "cache", "sim"), ("torch",), ("cutlass", "tvm_ffi", "cuda")),
    Rule("dispatch", (*FRONT, "alike", "launch", "lengths", "reference"), ("torch",)),
    Rule("operators", (*BASE, "problem", "dispatch"), ("torch",)),
    Rule("operators_varlen", (*BASE, "problem", "dispatch", "lengths", "operators"), ("torch",)),
    Rule("merge", BASE, ("torch",)),
    Rule(
        "api",
        (*FRONT, "launch", "lengths", "reference", "dispatch", "operators", "operators_varlen"),
        ("torch",),
        ("cutlass",),
    ),
    Rule(
        "cli",
        (
            *FRONT,
            "cache",
            "cli_cache",
            "cli_kernels",
            "launch",
            "reference",
            "api",
            "sim",
            "__init__",
        ),
        (),
        ("torch", "cutlass", "cuda"),
    ),
    Rule("__main__", ("cli",)),
)
STDLIB = frozenset(sys.stdlib_module_names)


def under(module: str, prefix: str) -> bool:
    return module == prefix or module.startswith(prefix + ".")


def rule_of(module: str) -> Rule | None:
    fitting = [r for r in RULES if under(module, r.prefix)]
    return max(fitting, key=lambda r: len(r.prefix), default=None)


def offences(module: str, found: list[tree.Import]) -> list[str]:
    """What a module (named below the package) must not import."""
    rule = rule_of(module)
    if rule is None:
        return [f"{module} has no row in RULES: say which layer it belongs to"]
    bad = []
    for imp in found:
        top, _, rest = imp.module.partition(".")
        if top == tree.PACKAGE:
            rest = rest or "__init__"
            if any(under(rest, p) for p in (*rule.ours, rule.prefix)):
                continue
            bad.append(f"{module}:{imp.line} imports {rest}; allowed: {[*rule.ours, rule.prefix]}")
        elif top not in STDLIB and top not in rule.others:
            if top not in rule.lazy:
                bad.append(f"{module}:{imp.line} imports {imp.module}; allowed: {rule.others}")
            elif not imp.lazy:
                bad.append(
                    f"{module}:{imp.line} imports {imp.module} at import time; "
                    "only inside a function"
                )
    return bad


def test_no_module_imports_above_its_layer() -> None:
    bad = []
    for path in tree.sources(tree.PACKAGE):
        name = tree.module_name(path)
        bad += offences(name.partition(".")[2], tree.imports(tree.parsed(path), name))
    assert not bad, "\n".join(bad)


def test_tables_and_plans_need_neither_torch_nor_the_dsl() -> None:
    """Transitively: what the command line prints about kernels comes up at once, on any machine."""
    plans = [tree.module_name(p) for p in tree.sources(tree.PACKAGE) if p.name == "plan.py"]
    modules = ["fa_cute.plan", "fa_cute.sched", "fa_cute.ops.mask", "fa_cute.tune", "fa_cute.cli"]
    program = (
        f"import sys, importlib\n"
        f"for name in {[*modules, *plans]}:\n"
        f"    importlib.import_module(name)\n"
        f"    late = {{'torch', 'cutlass', 'numpy'}} & set(sys.modules)\n"
        f"    assert not late, (name, late)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tree.ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("module", "source", "words"),
    [
        ("plan.warps", "from ..fwd.sm100 import plan", "imports fwd.sm100"),
        ("plan.warps", "import cutlass", "imports cutlass"),
        ("ops.mask", "import cutlass", "only inside a function"),
        ("ops.mask", "from .softmax import Softmax", "imports ops.softmax"),
        ("fwd.sm90.plan", "import cutlass", "only inside a function"),
        ("fwd.sm90.plan", "from ...ops.wgmma import gemm", "imports ops.wgmma"),
        ("fwd.sm90.kernel", "from ..sm100.plan import Config", "imports fwd.sm100.plan"),
        ("fwd.sm90.kernel", "from fa_cute.bwd.args import A", "imports bwd.args"),
        ("fwd.sm100.load", "import torch", "imports torch"),
        ("sim.machine", "from fa_cute.plan import show", "imports fa_cute.plan"),
        ("sim.host", "import torch", "only inside a function"),
        ("api", "from .sim import session", "imports sim"),
        ("nowhere", "", "no row in RULES"),
    ],
)
def test_a_wrong_import_is_reported(module: str, source: str, words: str) -> None:
    found = tree.imports(ast.parse(source), f"{tree.PACKAGE}.{module}")
    report = offences(module, found)
    assert len(report) == 1, report
    assert words.replace("fa_cute.", "") in report[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ops.arith", "def f():\n    import cutlass"),
        (
            "fwd.sm100.kernel",
            "from ..args import FwdSpec\nfrom ...plan import verify\nimport cutlass.cute",
        ),
        ("launch", "def f():\n    from .sim import session"),
        ("sim.host", "import numpy\ndef f():\n    import torch"),
    ],
)
def test_a_right_import_is_not(module: str, source: str) -> None:
    assert not offences(module, tree.imports(ast.parse(source), f"{tree.PACKAGE}.{module}"))
