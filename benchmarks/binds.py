"""What binds each row on a GPU, by hardware counters: `python -m benchmarks.binds [--rows ...]`.

Runs ncu over one call of each row's forward and backward (rows as in `benchmarks.attention`) and
writes `binds.json`, a line for each main kernel: its time and the share of peak of the tensor,
exponential, FMA and load/store pipes, the issue slots, shared memory, L2 and DRAM. Clocks are left
alone.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import json
import os
import re
import subprocess
import sys

from .attention import PASSES, TOKENS, WIDTH, chosen

KERNELS = "regex:kernel_Maincfg|kernelFwdSm90"  # the main kernels of a backward, of a forward
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "LaunchStats")
# What a line of binds.json says, and the ncu metric that it comes from (names differ by version).
WANTED = {
    "time_us": r"gpu__time_duration\.sum",
    "tensor_pct": r"sm__.*pipe_tensor.*\.avg\.pct_of_peak_sustained_(active|elapsed)",
    "exp_pct": r"sm__.*pipe_xu.*\.avg\.pct_of_peak_sustained_active",
    "fma_pct": r"sm__.*pipe_fma(heavy|)?[._].*pct_of_peak_sustained_active",
    "alu_pct": r"sm__.*pipe_alu.*\.avg\.pct_of_peak_sustained_active",
    "lsu_pct": r"sm__.*pipe_lsu.*\.avg\.pct_of_peak_sustained_active",
    "issue_pct": r"sm__inst_issued.*\.avg\.pct_of_peak_sustained_active",
    "smem_pct": r"l1tex__data_pipe.*\.avg\.pct_of_peak_sustained_elapsed",
    "l1_pct": r"l1tex__throughput\.avg\.pct_of_peak_sustained_active",
    "l2_pct": r"lts__throughput\.avg\.pct_of_peak_sustained_elapsed",
    "dram_pct": r"(gpu__)?dram__?throughput.*pct_of_peak_sustained_elapsed",
    "sm_pct": r"sm__throughput\.avg\.pct_of_peak_sustained_elapsed",
    "mhz": r"(smsp|sm)__cycles_elapsed\.avg\.per_second",
    "registers": r"launch__registers_per_thread$",
}


def rows_of(task: dict):
    """(sequence length, pass) in the order of the calls."""
    return itertools.product(task["seqlens"], task["passes"])


def one(task: dict) -> None:
    """The calls of one (head_dim, mask), each profiled once after a first call."""
    import torch

    import fa_cute

    from . import gpu

    d = task["head_dim"]
    for seqlen, which in rows_of(task):
        batch, heads = TOKENS // seqlen, WIDTH // d
        shape = (batch, seqlen, seqlen), (heads, heads), (d, d)
        q, k, v = gpu.inputs(*shape, torch.bfloat16)
        dout = gpu.inputs(*shape, torch.bfloat16, seed=1)[0]
        for x in (q, k, v):
            x.requires_grad_(which != "fwd")

        def forward(tensors=(q, k, v), det=which == "det"):
            return fa_cute.flash_attn_func(*tensors, causal=task["causal"], deterministic=det)

        def call(forward=forward, tensors=(q, k, v), dout=dout, backward=which != "fwd"):
            if not backward:
                return profiled(forward)
            out = forward()
            return profiled(lambda: torch.autograd.grad(out, tensors, dout, retain_graph=True))

        call()


def profiled(call) -> None:
    """Once to compile and warm up, once for the profiler."""
    import torch

    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def lines_of(text: str) -> list[dict]:
    """The kernels in ncu's raw CSV: name and what WANTED finds."""
    start = text.find('"ID"')
    if start < 0:
        return []
    rows = list(csv.DictReader(io.StringIO(text[start:])))
    found = []
    for row in rows:
        if not row.get("Kernel Name"):
            continue  # the line of units
        line = {"kernel": short(row["Kernel Name"])}
        for name, pattern in WANTED.items():
            values = {k: v for k, v in row.items() if k and re.search(pattern, k)}
            numbers = [number(v) for v in values.values() if number(v) is not None]
            if numbers:
                line[name] = max(numbers)
        found.append(line)
    return found


def number(text: str) -> float | None:
    """A number of ncu's, which may have commas."""
    try:
        return float(text.replace(",", ""))
    except (ValueError, AttributeError):
        return None


def short(kernel: str) -> str:
    """Which of ours a kernel is."""
    # The backward's helpers carry its config in their names: they are looked for first.
    for name in ("Preprocess", "Postprocess", "Prepare", "FwdSm90", "BwdSm90"):
        if name.lower() in kernel.lower().replace("_", ""):
            return name
    return kernel[:80]


def profile(tasks: list[dict], folder: str) -> list[dict]:
    """ncu over one process that does all tasks; a line for each row."""
    command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv"]
    command += ["--kernel-name", KERNELS]
    command += ["--page", "raw", *itertools.chain(*(("--section", s) for s in SECTIONS))]
    command += [sys.executable, "-m", "benchmarks.binds", "--one", json.dumps(tasks)]
    done = subprocess.run(command, capture_output=True, text=True)
    name = f"ncu_d{tasks[0]['head_dim']}.csv"
    with open(os.path.join(folder, name), "w") as file:
        file.write(done.stdout + done.stderr[-4000:])
    rows = [
        {"head_dim": t["head_dim"], "causal": t["causal"], "seqlen": seqlen, "pass": which}
        for t in tasks
        for seqlen, which in rows_of(t)
    ]
    found = lines_of(done.stdout)
    if len(found) != len(rows):
        print(f"{len(found)} kernels for {len(rows)} rows\n{done.stderr[-1000:]}", file=sys.stderr)
    return [row | line for row, line in zip(rows, found)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", default="", help="as in benchmarks.attention")
    parser.add_argument("--passes", default=",".join(PASSES))
    parser.add_argument("--out", default="benchmarks/results")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        for task in json.loads(options.one):
            one(task)
        return 0
    dims, masks, lengths = chosen(options.rows)
    os.makedirs(options.out, exist_ok=True)
    table, wanted = [], 0
    for d in dims:
        common = {"head_dim": d, "seqlens": lengths, "passes": options.passes.split(",")}
        tasks = [common | {"causal": causal} for causal in masks]
        wanted += sum(len(list(rows_of(task))) for task in tasks)
        table += profile(tasks, options.out)
        print(json.dumps(table[-len(tasks) :]), flush=True)
        with open(os.path.join(options.out, "binds.json"), "w") as file:
            json.dump(table, file, indent=1)
    return 0 if len(table) == wanted else 1


if __name__ == "__main__":
    sys.exit(main())
