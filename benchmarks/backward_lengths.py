"""The SM100 backward over the lengths of the reference implementation's tests, in the simulator.

`python -m benchmarks.backward_lengths [--head-dim 64 ...]`: every length up to 1024, full and
causal, MHA, GQA and MQA, against float64; the bar is twice torch's own error in the same dtype. Of
each kind the worst gradient is printed, as a part of its bar; results/sm100_backward_lengths.md is
what it printed. Tests run a choice of these.
"""

from __future__ import annotations

import argparse
from itertools import product

from tests.bwd.test_sm100 import Case, errors, run

LENGTHS = (
    *((1, 1), (3, 3), (64, 32), (64, 128), (64, 1), (128, 128), (128, 192), (256, 256)),
    *((255, 256), (239, 1), (799, 3), (113, 203), (113, 128), (128, 217), (113, 211)),
    *((108, 256), (256, 512), (384, 256), (640, 128), (512, 256), (64, 129), (200, 129)),
    *((1024, 1024), (1023, 1024), (1024, 1023)),
)
HEADS = {"MHA": (1, 1), "GQA": (4, 2), "MQA": (2, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    dims = (64, 96, 128, 192)
    parser.add_argument("--head-dim", type=int, nargs="+", choices=dims, default=dims)
    print("| head_dim | mask | heads | lengths | worst error, of its bar | where |")
    print("|---|---|---|---|---|---|")
    for d, causal, kind in product(parser.parse_args().head_dim, (False, True), HEADS):
        worst = (0.0, "-")
        for seqlens in LENGTHS:
            # Both dtypes, and both orders of the sums, in turns.
            turn = sum(seqlens)
            case = Case(
                seqlens,
                HEADS[kind],
                head_dim=d,
                causal=causal,
                dtype=("bf16", "fp16")[turn % 2],
                deterministic=turn % 3 == 0,
            )
            for which, (error, bar) in errors(case, run(case)[0]).items():
                worst = max(worst, (error / bar, f"{which} of {seqlens}, {case.dtype}"))
        mask = "causal" if causal else "full"
        print(
            f"| {d} | {mask} | {kind} | {len(LENGTHS)} | {worst[0]:.2f} | {worst[1]} |", flush=True
        )


if __name__ == "__main__":
    main()
