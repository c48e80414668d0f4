"""What the SM100 backward moves per tile, counted in the simulator: one CTA against a pair.

`python -m benchmarks.backward_traffic`, full mask; results/sm100_backward_traffic.md is what it
printed. A tile is 128 query rows x 128 keys. Cycles are bytes over what shared memory moves in one,
128, beside the figures of the FlashAttention-4 paper (table 3: M = 128 and M = 256 rows by N = d =
128, per CTA).
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from fa_cute import arch as archs
from fa_cute import compile as compiler
from fa_cute import launch, reference
from fa_cute.bwd.args import BwdSpec, Sizes, workspace_floats
from fa_cute.bwd.sm100.plan import config

TILE = 128
BYTES_PER_CYCLE = 128
ALONE = {"ctas": 1, "q_stages": 2, "reduce_regs": 160, "compute_regs": 136}
FORMS = {  # head dims, changes to the configuration, the paper's cycles: operands, dQ in and out
    "128, 1 CTA": ((128, 128), ALONE, (2048, 1024)),
    "128, pair": ((128, 128), {}, (1536, 512)),
    "192 with 128, pair": ((192, 128), {}, ("-", "-")),
}


def counters(form: str, seqlen: int) -> dict[str, int]:
    """Bytes by kind of one backward of one head, of its main kernel."""
    from fa_cute.sim import host

    arch = archs.get("sm_100a")
    (d, dv), changes, _ = FORMS[form]
    spec = BwdSpec("bf16", d, dv, causal=False)
    cfg = replace(config(spec, arch), **changes)
    fn = compiler.backward(cfg, spec, arch, "sim", False)
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, seqlen, 1, x).bfloat16() for x in (d, d, dv, dv))
    out, lse = reference.attention(q, k, v)
    work = torch.empty(workspace_floats(cfg, spec, Sizes(1, 1, 1, seqlen, seqlen)))
    grads = [torch.empty_like(t) for t in (q, k, v)]
    with host.session(arch, dsl=False) as session:
        rest = launch.rest(d**-0.5, arch.num_sms)
        fn(q, k, v, out.bfloat16(), lse.float(), dout, None, *grads, work, *rest)
    return max(
        (launch.counters for launch in session.launches), key=lambda c: c.get("mma.flops", 0)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seqlen", type=int, default=1024)
    seqlen = parser.parse_args().seqlen
    tiles = (seqlen // TILE) ** 2
    print(
        "| per tile | operand reads, B | cycles | paper | dQ added to memory, B | cycles | paper |"
    )
    print("|---|---|---|---|---|---|---|")
    for form in FORMS:
        moved = counters(form, seqlen)
        operands = moved["mma.smem"] / tiles
        added = next(n for kind, n in moved.items() if "reduce" in kind) / tiles
        cycles = operands / BYTES_PER_CYCLE, 2 * added / BYTES_PER_CYCLE  # dQ is written and read
        paper = FORMS[form][2]
        print(
            f"| {form} | {operands:.0f} | {cycles[0]:.0f} | {paper[0]} "
            f"| {added:.0f} | {cycles[1]:.0f} | {paper[1]} |"
        )


if __name__ == "__main__":
    main()
