"""Instructions per block of the SM100 forward's loops, beside flash-attn-4's from the same DSL.

`python -m benchmarks.forward_sass [--causal] [--arch sm_103a] [--head-dim 64]` compiles both,
disassembles them (nvdisasm must be in PATH), and counts each role's loop over KV blocks: what its
warps issue for 256 query rows and 128 keys without an element mask. Waits are counted as if they
succeeded at once, the correction as if it rescaled every time.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path

import torch

from .backward_sass import PIPES, Code, disassemble, pipe

# Role: its warps in both kernels, and an instruction of its loop that the shorter loops have not.
ROLES = {
    "softmax": (8, "MUFU.EX2"),
    "correction": (4, "FMUL2"),
    "mma": (1, "UTCHMMA"),
    "load": (1, "UTMALDG"),
}


def ours(arch_name: str, head_dim: int, causal: bool) -> bytes:
    from fa_cute import arch, compile, tune
    from fa_cute.fwd.args import FwdSpec

    spec, target = FwdSpec("bf16", head_dim, head_dim, causal), arch.get(arch_name)
    return compile.cubin(compile.Request("forward", tune.forward(spec, target), spec, target))


def theirs(arch_name: str, head_dim: int, causal: bool) -> bytes:
    """Compiled by running it once on a small problem in the simulator."""
    from cutlass.base_dsl.dsl import DSLSingletonMeta

    from tests.sim.peer import flash_attn4

    q, k, v = (torch.randn(1, 512, 1, head_dim).bfloat16() for _ in range(3))
    with tempfile.TemporaryDirectory() as folder, flash_attn4(arch_name) as (fa4, _):
        for dsl in DSLSingletonMeta._instances.values():
            dsl.envar.keep_tokens = frozenset(dsl.envar.keep_tokens | {"cubin"})
            dsl.envar.keep_cubin, dsl.envar.dump_dir = True, folder
        fa4._flash_attn_fwd(q, k, v, causal=causal)
        files = Path(folder).rglob("*.cubin")
        return max(files, key=lambda f: f.stat().st_size).read_bytes()


def loop(code: Code, marker: str) -> list[str]:
    """The shortest loop with an instruction: over KV blocks, without an element mask."""
    with_it = [
        code.ops[a : b + 1]
        for a, b in code.loops
        if any(op.startswith(marker) for op in code.ops[a : b + 1])
    ]
    return min(with_it, key=len)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--arch", default="sm_100a")
    parser.add_argument("--head-dim", type=int, default=128)
    given = parser.parse_args()
    what = (given.arch, given.head_dim, given.causal)
    names = [name for name, _ in PIPES] + ["ALU"]
    print(f"| warp instructions per 256 rows x 128 keys | {' | '.join(names)} | total |")
    print("|---" * (len(names) + 2) + "|")
    for who, cubin in (("ours", ours(*what)), ("flash-attn-4", theirs(*what))):
        code, total = disassemble(cubin), Counter()
        for role, (warps, marker) in ROLES.items():
            count = Counter(pipe(op) for op in loop(code, marker))
            row = {name: warps * count[name] for name in names}
            total.update(row)
            cells = " | ".join(str(row[name]) for name in names)
            print(f"| {who}, {role} ({warps} warps) | {cells} | {sum(row.values())} |")
        cells = " | ".join(str(total[name]) for name in names)
        print(f"| **{who}** | {cells} | **{sum(total.values())}** |")


if __name__ == "__main__":
    main()
