"""What a kernel's plan says is what its PTX does: barriers, bytes, registers, columns, parities."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from fa_cute import arch as archs

from . import ptx_waits

NAME = re.compile(r"\.visible \.entry ([\w$]+)")


@dataclass(frozen=True)
class Kernel:
    """A kernel to compile: ``build()`` gives its configuration and its PTX."""

    name: str
    build: Callable[[], tuple[Any, str]]


def forward(family: str, head_dim: int, causal: bool, **options) -> tuple[Any, str]:
    """Configuration and PTX of a forward; `options` of the configuration."""
    import tempfile

    from fa_cute import compile as compiler
    from fa_cute.fwd.args import FwdSpec

    if family == "sm100":
        from fa_cute.fwd.sm100.plan import FwdConfig
    else:
        from fa_cute.fwd.sm90.plan import FwdConfig
    cfg = FwdConfig(**{"head_dim": head_dim, "head_dim_v": head_dim, **options})
    spec = FwdSpec("bf16", head_dim, cfg.head_dim_v, causal, 1)
    with tempfile.TemporaryDirectory() as folder:
        options = f"--keep-ptx --dump-dir {folder}"
        compiled = compiler.build_forward(cfg, spec, archs.get(cfg.arch), options)
        return cfg, compiled.artifacts.PTX


def backward(
    arch: str, head_dims: tuple[int, int], causal: bool, deterministic: bool, **changes
) -> tuple[Any, str]:
    """Configuration and PTX of a backward; `changes` to the row of the table."""
    import dataclasses
    import tempfile

    from fa_cute import compile as compiler
    from fa_cute import tune
    from fa_cute.bwd.args import BwdSpec

    spec, target = BwdSpec("bf16", *head_dims, causal, 1, deterministic), archs.get(arch)
    cfg = dataclasses.replace(tune.backward(spec, target), **changes)
    with tempfile.TemporaryDirectory() as folder:
        options = f"--keep-ptx --dump-dir {folder}"
        compiled = compiler.build_backward(cfg, spec, target, options)
        return cfg, compiled.artifacts.PTX


PAIR = {"pair": True, "multicast": True, "do_stages": 1}
STAY = {"persistent": True}
UNEQUAL = {"head_dim_v": 128, "kv_parts": (3, 2), "o_over_q": True}
KERNELS = (
    Kernel("sm100-128-causal", lambda: forward("sm100", 128, True)),
    Kernel("sm100-64", lambda: forward("sm100", 64, False)),
    Kernel("sm100-192-128", lambda: forward("sm100", 192, False, **UNEQUAL)),
    Kernel("sm90-128-causal", lambda: forward("sm90", 128, True)),
    Kernel("sm90-128-backward-spt", lambda: backward("sm_90a", (128, 128), True, True)),
    Kernel("sm90-256-backward", lambda: backward("sm_90a", (256, 256), False, False)),
    Kernel("sm90-256-backward-pair", lambda: backward("sm_90a", (256, 256), False, False, **PAIR)),
    Kernel("sm90-128-persistent", lambda: backward("sm_90a", (128, 128), True, True, **STAY)),
    Kernel(
        "sm90-256-persistent",
        lambda: backward("sm_90a", (256, 256), True, False, pair=False, **STAY),
    ),
    Kernel("sm100-64-backward", lambda: backward("sm_100a", (64, 64), False, False)),
    Kernel("sm100-128-backward-spt", lambda: backward("sm_100a", (128, 128), True, True)),
    Kernel("sm100-192-backward", lambda: backward("sm_100a", (192, 128), False, False)),
)


@cache
def built(kernel: Kernel) -> tuple[Any, str]:
    """Configuration and the kernel whose warps have roles; others are pre- and postwork."""
    cfg, ptx = kernel.build()
    header = ptx.partition(".visible .entry ")[0]
    entries = [x for x in ptx.split(".visible .entry ") if "setmaxnreg" in x]
    assert len(entries) == 1
    return cfg, f"{header}.visible .entry {entries[0]}"


@pytest.fixture(params=KERNELS, ids=lambda k: k.name)
def case(request: pytest.FixtureRequest) -> tuple[Any, str]:
    pytest.importorskip("cutlass")
    return built(request.param)


def values(ptx: str, pattern: str) -> list[int]:
    """The numbers that an operand has, in the order of the text."""
    known = ptx_waits.constants(ptx)
    operands = [x.strip() for x in re.findall(pattern, ptx)]
    return [known[x] if x.startswith("%") else int(x, 0) for x in operands]


def test_barriers_expect_what_the_plan_derives(case: tuple[Any, str]) -> None:
    """One mbarrier per slot and side, in the order of the edges, each with its arrivals."""
    cfg, ptx = case
    want = []
    for edge in cfg.topology.edges:
        producer, consumer = edge.arrivals(cfg.warps)
        want += [producer] * edge.stages
        want += [] if edge.one_way else [consumer] * edge.stages
    assert values(ptx, r"mbarrier\.init\.\S+\s+\[[^\]]*\],\s*([^;]+);") == want


def test_loads_announce_the_bytes_of_their_fields(case: tuple[Any, str]) -> None:
    cfg, ptx = case
    want = {e.tx_bytes(cfg.smem) for e in cfg.topology.edges if e.tx}
    found = values(ptx, r"mbarrier\.arrive\.expect_tx\.\S+\s+[^,]+,\s*\[[^\]]*\],\s*([^;]+);")
    assert set(found) == want


def test_registers_and_threads(case: tuple[Any, str]) -> None:
    cfg, ptx = case
    changes = {
        ("inc" if r.regs > cfg.warps.launch_regs else "dec", r.regs) for r in cfg.warps.roles
    }
    found = re.findall(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32\s+(\d+);", ptx)
    assert {(way, int(n)) for way, n in found} == changes
    assert values(ptx, r"\.(?:req|max)ntid (\d+)") == [cfg.warps.threads]


def test_named_barriers_have_the_threads_of_their_roles(case: tuple[Any, str]) -> None:
    """Where the number of a barrier is known in the text; 0 is all threads."""
    cfg, ptx = case
    topology = cfg.topology
    want = {topology.barrier_id(b.name): b.num_threads(cfg.warps) for b in topology.barriers}
    found = re.findall(
        r"^\s*(?:bar|barrier)\.(?:cta\.)?(?:sync|arrive)\s+(\S+),\s*(\d+);", ptx, re.M
    )
    assert {int(n) for _, n in found} <= set(want.values())
    for number, threads in found:
        if number.isdigit():
            assert want[int(number)] == int(threads)


def test_tensor_memory(case: tuple[Any, str]) -> None:
    cfg, ptx = case
    found = values(ptx, r"tcgen05\.alloc\.\S+\s+\[[^\]]*\],\s*([^;]+);")
    tmem = getattr(cfg, "tmem", None)
    assert found == ([] if tmem is None else [tmem.alloc_cols])


def test_no_release_overtakes_a_tensor_memory_load(case: tuple[Any, str]) -> None:
    from fa_cute.sim import lint, ptx

    _, text = case
    assert not [str(f) for f in lint.overtaken_loads(ptx.parse(text).kernels[NAME.search(text)[1]])]


def test_no_wait_in_a_loop_has_a_constant_parity(case: tuple[Any, str]) -> None:
    """Else the DSL did not carry the state of a pipeline end. But where two operands take turns in
    one slot, each of them has the same phase in every block: two loads, and two products.
    """
    cfg, ptx = case
    assert ptx_waits.waits_in_loops(ptx) >= 5
    assert len(ptx_waits.constant_waits(ptx)) == (4 if getattr(cfg, "tight", False) else 0)
