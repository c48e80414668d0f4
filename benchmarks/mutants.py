"""Break the SM100 forward's synchronisation, one instruction at a time, and see who notices.

    python -m benchmarks.mutants [--kinds try_wait,arrive,...] [--schedules N] [--list]

A mutant is the kernel's PTX with one statement removed or falsified.  It runs on a small causal shape
that visits every role's every loop (three query tiles on one CTA, one of them without a key, factors
that force a rescale).  It is caught when, in some schedule, the simulator raises (deadlock, misuse,
an access out of bounds), reports a read of memory that nothing wrote, or the bits of out or lse
differ from the intact kernel's, which are the same in all schedules.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fa_cute import arch, compile, launch, tune
from fa_cute.errors import DeadlockError, SimError, UninitializedReadError
from fa_cute.fwd.args import FwdSpec
from fa_cute.sim import host

# What a statement becomes; a kind may give several mutants of one statement.
NEVER_BLOCKS = "setp.eq.u32 {0}, 0, 0;"
RULES = (
    ("try_wait", r"mbarrier\.try_wait[^ ]* *\t*(\S+), .*;", (NEVER_BLOCKS,)),
    ("arrive", r"mbarrier\.arrive\.shared\S* .*;", ("",)),
    ("expect_tx", r"(mbarrier\.arrive\.expect_tx\S* .*, )(\S+);", ("{0}{less};", "{0}{more};", "")),
    ("bar.sync", r"(?<!m)(?:bar|barrier)\.(?:sync|arrive)\S* .*;", ("",)),
    ("wait::st", r"tcgen05\.wait::st\S*;", ("",)),
    ("wait::ld", r"tcgen05\.wait::ld\S*;", ("",)),
    ("commit", r"tcgen05\.commit\S* .*;", ("",)),
    ("bulk wait", r"cp\.async\.bulk\.wait_group\S* .*;", ("",)),
)
# Those that the issue of a synchronisation bug is about; the others are reported beside them.
MAIN = ("try_wait", "arrive", "expect_tx", "bar.sync", "wait::st")
SCHEDULES = ("early", "late", "random:0", *(f"priority:{seed}" for seed in range(16)))
SHAPE = {"seqlen_q": 600, "seqlen_k": 300, "head_dim": 128}


@dataclass(frozen=True)
class Mutant:
    """One falsified statement."""

    kind: str
    line: int  # in the PTX, from 1
    before: str
    after: str

    def apply(self, ptx: str) -> str:
        """The kernel with this one fault."""
        lines = ptx.split("\n")
        lines[self.line - 1] = lines[self.line - 1].replace(self.before, self.after)
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{self.kind} at {self.line}: {self.before} -> {self.after or 'nothing'}"


@dataclass(frozen=True)
class Verdict:
    """What noticed a mutant first; `how` is empty when nothing did."""

    mutant: Mutant
    how: str
    schedule: str = ""
    detail: str = ""


def mutants(ptx: str, kinds=MAIN) -> list[Mutant]:
    """Every fault of these kinds, in the order of the text."""
    found = []
    for number, line in enumerate(ptx.split("\n"), 1):
        for kind, pattern, changes in RULES:
            match = re.search(pattern, line) if kind in kinds else None
            if match is None:
                continue
            for change in changes:
                words = {}
                if "{less}" in change or "{more}" in change:
                    amount = _amount(ptx, match.group(2), number)
                    words = {"less": amount - 16, "more": amount + 16}
                after = change.format(*match.groups(), **words) if change else ""
                found.append(Mutant(kind, number, match.group(0), after))
    return found


def _amount(ptx: str, operand: str, line: int) -> int:
    """The number behind an operand: itself, or what the register was last set to."""
    if not operand.startswith("%"):
        return int(operand, 0)
    above = "\n".join(ptx.split("\n")[:line])
    return int(re.findall(rf"mov\.\w+\s+{operand}, (\w+);", above)[-1], 0)


class Campaign:
    """The intact kernel, its inputs, and its answer."""

    def __init__(self, schedules=SCHEDULES):
        target = arch.get("sm_100a")
        spec = FwdSpec("bf16", SHAPE["head_dim"], SHAPE["head_dim"], causal=True)
        row = tune.forward(spec, target)
        self.cfg = replace(row, scheduler="lpt_persistent", num_sms=1)
        self.arch, self.schedules = target, schedules
        self.inputs = _inputs()
        self.folder = tempfile.TemporaryDirectory(prefix="fa_cute_mutants_")
        kernel = compile.forward(self.cfg, spec, target, "sim")
        path = Path(self.folder.name) / "intact.sim"
        kernel.save(path)
        self.saved = path.read_bytes()
        self.ptx = kernel.ptx
        self.answer = self.run(self.ptx, "early")

    def run(self, ptx: str, schedule: str):
        """(out, lse) of a kernel text; raises what the simulator raises."""
        path = Path(self.folder.name) / "mutant.sim"
        path.write_bytes(_with_ptx(self.saved, ptx))
        kernel = host.load(path)
        q, k, v = self.inputs
        out = torch.full_like(q, torch.nan)
        lse = torch.full(q.shape[:2], torch.nan).reshape(1, 1, -1)
        options = {"schedule": schedule, "plan": launch.plan_names(self.cfg), "unset": "raise"}
        with host.session(self.arch, dsl=False, progress=False, **options):
            kernel(q, k, v, out, lse, SHAPE["head_dim"] ** -0.5)
        return out, lse

    def judge(self, mutant: Mutant) -> Verdict:
        """Run a mutant until something notices."""
        text = mutant.apply(self.ptx)
        for schedule in self.schedules:
            try:
                answer = self.run(text, schedule)
            except DeadlockError as error:
                return Verdict(mutant, "deadlock", schedule, _first(error))
            except UninitializedReadError as error:
                return Verdict(mutant, "unwritten", schedule, _first(error))
            except SimError as error:
                return Verdict(mutant, "misuse", schedule, _first(error))
            if not all(torch.equal(a, b) for a, b in zip(answer, self.answer, strict=True)):
                return Verdict(mutant, "numbers", schedule)
        return Verdict(mutant, "")


def _inputs():
    """q, k, v whose later visited keys score higher, so that O is rescaled."""
    g = torch.Generator().manual_seed(3)
    q = torch.randn(1, SHAPE["seqlen_q"], 1, SHAPE["head_dim"], generator=g)
    k, v = (torch.randn(1, SHAPE["seqlen_k"], 1, SHAPE["head_dim"], generator=g) for _ in "kv")
    k[:, :128] *= 12  # visited last
    return tuple(x.bfloat16() for x in (q, k, v))


def _with_ptx(saved: bytes, ptx: str) -> bytes:
    """A saved host function with another kernel text (the format of `fa_cute.sim.host.save`)."""
    start = saved.index(b"{")
    (head_bytes,) = struct.unpack("<I", saved[start - 4 : start])
    header = json.loads(saved[start : start + head_bytes])
    blob = saved[start + head_bytes + header["ptx_bytes"] :]
    text = ptx.encode()
    head = json.dumps(header | {"ptx_bytes": len(text)}).encode()
    return saved[: start - 4] + struct.pack("<I", len(head)) + head + text + blob


def _first(error: Exception) -> str:
    return str(error).split("\n", 1)[0]


def table(verdicts: list[Verdict]) -> str:
    """Caught by what, per kind, as text."""
    ways = ("numbers", "deadlock", "unwritten", "misuse", "")
    lines = [f"{'':10} {'all':>4} " + " ".join(f"{way or 'uncaught':>9}" for way in ways)]
    for kind in dict.fromkeys(v.mutant.kind for v in verdicts):
        of_kind = [v for v in verdicts if v.mutant.kind == kind]
        count = Counter(v.how for v in of_kind)
        cells = " ".join(f"{count[way]:9}" for way in ways)
        lines.append(f"{kind:10} {len(of_kind):4} {cells}")
    return "\n".join(lines)


def main() -> None:
    """Run the campaign and print its table and what nobody noticed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--kinds", default=",".join(MAIN), help="comma-separated; also 'all'")
    parser.add_argument("--schedules", type=int, default=len(SCHEDULES))
    parser.add_argument("--list", action="store_true", help="print every verdict")
    given = parser.parse_args()
    kinds = [r[0] for r in RULES] if given.kinds == "all" else given.kinds.split(",")
    campaign = Campaign(SCHEDULES[: given.schedules])
    verdicts = []
    for mutant in mutants(campaign.ptx, kinds):
        verdict = campaign.judge(mutant)
        verdicts.append(verdict)
        if given.list or not verdict.how:
            print(f"{verdict.how or 'UNCAUGHT':9} {verdict.schedule:9} {mutant}  {verdict.detail}")
    print(table(verdicts))


if __name__ == "__main__":
    main()
