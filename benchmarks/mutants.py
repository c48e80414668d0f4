"""Break the SM100 forward's synchronisation, one instruction at a time, and see who notices.

    python -m benchmarks.mutants [--schedules N]

The launch is small and visits every loop of every role: one CTA walks three causal tiles, one of
them without a key, and the scores grow towards the keys that are visited last, so that O is
rescaled.  What a mutant is, and what catches it, says `fa_cute.sim.mutants`.  A mutant that nobody
catches is looked up in `REDUNDANT`: waits whose condition another wait implies, with the reason.
"""

from __future__ import annotations

import argparse
import linecache
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

import fa_cute
from fa_cute import arch, compile, launch, tune
from fa_cute.fwd.args import FwdSpec
from fa_cute.sim import host, machine, mutants
from fa_cute.sim.host_tensors import Extent
from fa_cute.sim.schedule import Schedule

SEQLEN_Q, SEQLEN_K, HEAD_DIM = 700, 300, 128
SCHEDULES = ("early", "late", "random:0", *(f"priority:{seed}" for seed in range(4)))
# Wait of the forward -> (how many of its mutants may be missed, why).
REDUNDANT = {
    "load q.acquire": (
        1,
        "mma frees both Q slots by two commits in a row: the wait for slot 0 covers slot 1",
    ),
    "load kv.acquire": (
        2,
        "the first K and V of a tile: mma freed Q after the last product that read their slots",
    ),
    "load tail": (5, "nothing follows; it keeps the CTA until the last release has landed"),
    "correction tail": (2, "nothing follows; it keeps the CTA until the last release has landed"),
    "softmax tail": (1, "nothing follows; it keeps the CTA until the last release has landed"),
}
VERB = re.compile(r"(\w+)\.(acquire|wait|tail)\w*\(")
# The compiler reports some lines of a role a little further down.
LINE_SLACK = 4


def forward_launch() -> mutants.Launch:
    """The small launch, as the machine gets it."""
    target = arch.get("sm_100a")
    spec = FwdSpec("bf16", HEAD_DIM, HEAD_DIM, causal=True)
    cfg = replace(tune.forward(spec, target), scheduler="lpt_persistent")
    kernel = compile.forward(cfg, spec, target, "sim")
    q, k, v = _inputs()
    out, lse = torch.empty_like(q), torch.empty(1, 1, SEQLEN_Q)
    calls, run = [], machine.run
    machine.run = lambda *args: calls.append(args) or run(*args)
    try:
        with host.session(target, dsl=False, progress=False, plan=launch.plan_names(cfg)):
            kernel(q, k, v, out, lse, *launch.rest(HEAD_DIM**-0.5, sms=1))
    finally:
        machine.run = run
    code, grid, block, cluster, smem, params, memory, _, options = calls[-1]
    extents = [Extent(e.start, e.stop - e.start, e.name) for e in memory.extents if e.writable]
    outputs = [t.view(torch.uint8).numpy().reshape(-1) for t in (out, lse)]
    options = replace(options, races=True)
    made = mutants.Launch(code, grid, block, cluster, smem, params, extents, outputs, options)
    made.keep = (q, k, v, out, lse)  # the launch holds their addresses
    return made


def _inputs():
    """q, k, v; the keys that are visited last score highest."""
    g = torch.Generator().manual_seed(3)
    q = torch.randn(1, SEQLEN_Q, 1, HEAD_DIM, generator=g)
    k, v = (torch.randn(1, SEQLEN_K, 1, HEAD_DIM, generator=g) for _ in "kv")
    k[:, :128] *= 12
    return tuple(x.bfloat16() for x in (q, k, v))


def wait_of(mutant: mutants.Mutant) -> str:
    """Role and wait that a mutant's instruction comes from, as `REDUNDANT` names them."""
    match = re.search(r"\((\w+)\.py:(\d+)\)", mutant.where)
    if match is None:
        return mutant.where
    role, line = match.group(1), int(match.group(2))
    source = str(Path(fa_cute.__file__).parent / "fwd" / "sm100" / f"{role}.py")
    for above in range(LINE_SLACK):
        verb = VERB.search(linecache.getline(source, line - above))
        if verb is not None:
            end, what = verb.groups()
            return f"{role} tail" if what == "tail" else f"{role} {end}.{what}"
    return f"{role}:{line}"


def unexplained(result: mutants.Campaign) -> list[str]:
    """Missed mutants beyond those that `REDUNDANT` accounts for."""
    missed = Counter(wait_of(m) for m in result.missed())
    return [
        f"{count} of {wait}"
        for wait, count in missed.items()
        if count > REDUNDANT.get(wait, (0, ""))[0]
    ]


def main() -> None:
    """Run the campaign; print its table and what nobody noticed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--schedules", type=int, default=len(SCHEDULES))
    given = parser.parse_args()
    schedules = [Schedule.of(s) for s in SCHEDULES[: given.schedules]]
    result = mutants.campaign(forward_launch(), schedules)
    print(result.table())
    for mutant in result.missed():
        wait = wait_of(mutant)
        print(f"missed: {wait}, {mutant}: {REDUNDANT.get(wait, (0, 'why?'))[1]}")
    for line in unexplained(result):
        print(f"not explained: {line}")


if __name__ == "__main__":
    main()
