"""Instructions per tile of the SM100 backward's loops, beside flash-attn-4's from the same DSL.

`python -m benchmarks.backward_sass [--causal] [--head-dim 192]` compiles both for pairs of CTAs
(head_dim_v is 128), disassembles them (nvdisasm must be in PATH), and counts each role's loop over
query blocks: what one warp issues per block, times the role's warps. Waits are counted as if they
succeeded at once. results/sm100_backward_sass.md is what it printed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

ARCH, HEAD_DIM_V = "sm_100a", 128
# Role: its warps in both kernels, and what its loop over query blocks has at least: 64 elements of
# P a thread; dQ read and added; the K steps of four products; Q and dO, each in two ways.
ROLES = {
    "compute": (8, {"MUFU.EX2": 64}),
    "reduce": (4, {"LDTM": 1, "UBLKRED": 1}),
    "mma": (1, {"UTCHMMA": 40}),  # theirs has an inner loop, counted as if it ran once
    "load": (1, {"UTMALDG": 4}),
}
PIPES = (
    ("tensor", r"UTCHMMA|UTCBAR|UTCATOM"),
    ("XU", r"MUFU"),
    ("FMA", r"FFMA2?|FMUL2?|FADD2?|IMAD|F2FP"),
    ("uniform", r"U[A-Z0-9]+|R2UR|S2UR|VOTEU|REDUX"),
    ("LSU", r"LD[A-Z]*|ST[A-Z]*|RED|ATOM.*"),
    ("barrier", r"SYNCS|BAR|WARPSYNC|ELECT|FENCE|MEMBAR|NANOSLEEP|DEPBAR|CCTL|ERRBAR"),
    ("branch", r"BRA|BSSY|BSYNC|EXIT|CALL|RET|BREAK|YIELD|NOP"),
)


@dataclass(frozen=True)
class Code:
    """The instructions of one kernel, and its loops as [first, last]."""

    ops: list[str]
    loops: list[tuple[int, int]]

    @classmethod
    def of(cls, text: str) -> Code:
        ops, labels, jumps = [], {}, []
        for line in text.splitlines():
            if label := re.match(r"\s*(\.L_x_\d+):", line):
                labels[label[1]] = len(ops)
            elif found := re.match(
                r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([\w.]+)(.*?);", line
            ):
                if found[1].startswith("BRA") and (to := re.search(r"\.L_x_\d+", found[2])):
                    jumps.append((len(ops), to[0]))
                ops.append(found[1])
        loops = [(labels[to], at) for at, to in jumps if labels[to] <= at]
        return cls(ops, loops)

    def loop(self, least: dict[str, int]) -> list[str]:
        """The shortest loop with these instructions: one without an element mask."""
        bodies = (self.ops[a : b + 1] for a, b in self.loops)
        right = [
            body
            for body in bodies
            if all(sum(name in op for op in body) >= n for name, n in least.items())
        ]
        return min(right, key=len)


def pipe(op: str) -> str:
    """Where an instruction is executed."""
    name = op.split(".")[0]
    for pipe_name, pattern in PIPES:
        if re.fullmatch(pattern, name):
            return pipe_name
    return "ALU"


def ours(head_dim: int, causal: bool) -> bytes:
    from fa_cute import arch, compile, tune
    from fa_cute.bwd.args import BwdSpec

    spec, target = BwdSpec("bf16", head_dim, HEAD_DIM_V, causal), arch.get(ARCH)
    return compile.cubin(
        compile.Request("backward", tune.backward(spec, target), spec, target, False)
    )


def theirs(head_dim: int, causal: bool) -> bytes:
    """Compiled by running it once on a small problem in the simulator."""
    from cutlass.base_dsl.dsl import DSLSingletonMeta

    from tests.sim.peer import flash_attn4

    dims = (head_dim, head_dim, HEAD_DIM_V, HEAD_DIM_V)
    q, k, v, dout = (torch.randn(1, 256, 1, d).bfloat16() for d in dims)
    with tempfile.TemporaryDirectory() as folder, flash_attn4(ARCH) as (fa4, _):
        for dsl in DSLSingletonMeta._instances.values():
            dsl.envar.keep_tokens = frozenset(dsl.envar.keep_tokens | {"cubin"})
            dsl.envar.keep_cubin, dsl.envar.dump_dir = True, folder
        fa4._flash_attn_bwd(q, k, v, dout, dout, torch.zeros(1, 1, 256), causal=causal)
        files = Path(folder).rglob("*.cubin")
        return max(files, key=lambda f: f.stat().st_size).read_bytes()


def disassemble(cubin: bytes) -> Code:
    """The kernel with roles: the one that changes its registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(["nvdisasm", "-c", file.name], capture_output=True, text=True)
    done.check_returncode()
    sections = re.split(r"\n//-+ \.text\.", done.stdout)
    return Code.of(next(s for s in sections if "USETMAXREG" in s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--head-dim", type=int, choices=(128, 192), default=128)
    args = parser.parse_args()
    case = args.head_dim, args.causal
    code = {"ours": disassemble(ours(*case)), "flash-attn-4": disassemble(theirs(*case))}
    names = [name for name, _ in PIPES] + ["ALU"]
    print(f"| warp instructions per block of 128 rows | {' | '.join(names)} | total |")
    print("|---" * (len(names) + 2) + "|")
    for who, kernel in code.items():
        total = Counter()
        for role, (warps, least) in ROLES.items():
            count = Counter(pipe(op) for op in kernel.loop(least))
            row = {name: warps * count[name] for name in names}
            total.update(row)
            cells = " | ".join(str(row[name]) for name in names)
            print(f"| {who}, {role} ({warps} warps) | {cells} | {sum(row.values())} |")
        cells = " | ".join(str(total[name]) for name in names)
        print(f"| **{who}** | {cells} | **{sum(total.values())}** |")


if __name__ == "__main__":
    main()
