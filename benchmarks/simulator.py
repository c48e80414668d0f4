"""How fast the simulator runs the SM100 forward: `python -m benchmarks.simulator`.

Each row is a process of its own, so that the memory is its own; the kernel is compiled once before
(and found in the cache). "first" is the first call of the process, with everything that is loaded
or built on the way; "again" the best of three later ones.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from argparse import ArgumentParser

ROWS = ((256, True), (1024, True), (1024, False), (2048, True), (4096, True))


def measure(seqlen: int, causal: bool) -> dict:
    """One row, in this process."""
    start = time.perf_counter()
    import torch

    from fa_cute import flash_attn_func

    torch.set_num_threads(1)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, seqlen, 1, 128, dtype=torch.bfloat16) for _ in range(3))
    imported = time.perf_counter()
    times = []
    for _ in range(4):
        before = time.perf_counter()
        flash_attn_func(q, k, v, causal=causal, backend="sim")
        times.append(time.perf_counter() - before)
    return {
        "seqlen": seqlen,
        "causal": causal,
        "import_s": imported - start,
        "first_s": times[0],
        "again_s": min(times[1:]),
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--row", help=argparse_row.__doc__)
    args = parser.parse_args()
    if args.row:
        print(json.dumps(measure(*argparse_row(args.row))))
        return
    os.environ.setdefault("FA_CUTE_ARCH", "sm_100a")
    print("| seqlen | causal | import s | first call s | again s | peak GiB |")
    print("|---|---|---|---|---|---|")
    for seqlen, causal in ROWS:
        row = run_row(seqlen, causal)
        row = run_row(seqlen, causal) if seqlen == ROWS[0][0] else row  # the caches are warm now
        print(
            f"| {seqlen} | {'yes' if causal else 'no'} | {row['import_s']:.2f} | "
            f"{row['first_s']:.2f} | {row['again_s']:.3f} | {row['peak_gib']:.2f} |",
            flush=True,
        )


def argparse_row(text: str) -> tuple[int, bool]:
    """SEQLEN:causal or SEQLEN:full"""
    seqlen, _, mask = text.partition(":")
    return int(seqlen), mask == "causal"


def run_row(seqlen: int, causal: bool) -> dict:
    command = [sys.executable, "-m", "benchmarks.simulator", "--row"]
    done = subprocess.run(
        [*command, f"{seqlen}:{'causal' if causal else 'full'}"], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
