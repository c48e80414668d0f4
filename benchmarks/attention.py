"""Attention on one GPU beside its peers: ours, flash-attn-4, cuDNN and FA2 (both through torch),
a GEMM.

    python -m benchmarks.attention [--rows d64,causal] [--passes fwd,bwd,det] [--rounds 5]
    python -m benchmarks.attention --plot DIR/h200.json  (all with [--out DIR])

A row is (head_dim, mask, seqlen) at 32,768 tokens and heads x head_dim = 2048. Contenders take
turns (A B C A B C ...), each for some 20 ms a round; a cell is the median over the rounds. Every
result is compared with fp32 before it is timed. Each (head_dim, mask) is a process: they compile
side by side and then use the GPU one after the other.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time

HEAD_DIMS, SEQLENS, PASSES = (64, 128, 256), (1024, 4096, 16384), ("fwd", "bwd", "det")
TOKENS, WIDTH = 32768, 2048
GEMM = 8192
BURST_MS = 20.0
LIMIT_S = 150.0  # of one process on the GPU


def contenders(which: str, q, k, v, causal: bool) -> dict:
    """Forward functions by name; those of ``det`` are deterministic backwards."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import fa_cute

    det = which == "det"

    def ours():
        return fa_cute.flash_attn_func(q, k, v, causal=causal, deterministic=det)

    found = {"fa_cute": ours}
    try:
        from flash_attn.cute.interface import flash_attn_func as peer
    except ImportError as error:
        print(f"no flash-attn-4: {error}", file=sys.stderr)
    else:

        def theirs():
            result = peer(q, k, v, causal=causal, deterministic=det)
            return result[0] if isinstance(result, tuple) else result

        found["flash-attn-4"] = theirs
    Q, K, V = (x.transpose(1, 2) for x in (q, k, v))

    def sdpa(backend):
        def call():
            with sdpa_kernel(backend):
                out = torch.nn.functional.scaled_dot_product_attention(Q, K, V, is_causal=causal)
            return out.transpose(1, 2)

        return call

    if not det:
        found["cuDNN"] = sdpa(SDPBackend.CUDNN_ATTENTION)
        found["FA2"] = sdpa(SDPBackend.FLASH_ATTENTION)
    return found


def exact(q, k, v, dout, causal: bool) -> dict:
    """out, dq, dk, dv of the first head in fp32."""
    import torch

    Q, K, V = (x[0, :, 0].float().requires_grad_() for x in (q, k, v))
    S = (Q @ K.T) * q.shape[-1] ** -0.5
    if causal:
        rows, keys = torch.arange(S.shape[0])[:, None], torch.arange(S.shape[1])[None]
        S = S.masked_fill((keys > rows).to(S.device), -float("inf"))
    out = torch.softmax(S, -1) @ V
    out.backward(dout[0, :, 0].float())
    return {"out": out.detach(), "dq": Q.grad, "dk": K.grad, "dv": V.grad}


def distance(got, want) -> float:
    """Relative Frobenius distance; NaN counts as infinite."""
    d = ((got.float() - want).norm() / want.norm()).item()
    return d if d == d else float("inf")


def tell(**what) -> None:
    """One line of progress."""
    print(json.dumps(what), file=sys.stderr, flush=True)


def steps(which: str, functions: dict, tensors, dout) -> dict:
    """What is timed, by contender: forwards, or backwards over a graph that is kept."""
    import torch

    if which == "fwd":
        return functions
    calls = {}
    for name, forward in functions.items():
        out = forward()

        def backward(out=out):
            torch.autograd.grad(out, tensors, dout, retain_graph=True)

        calls[name] = backward
    return calls


def check(which: str, functions: dict, tensors, dout, want: dict) -> dict:
    """Distances of each contender from fp32; a contender that fails or is wrong leaves the race."""
    import torch

    found = {}
    for name, forward in list(functions.items()):
        try:
            out = forward()
            got = {"out": out}
            if which != "fwd":
                got |= zip(("dq", "dk", "dv"), torch.autograd.grad(out, tensors, dout), strict=True)
            found[name] = {x: distance(t[0, :, 0], want[x]) for x, t in got.items()}
            bad = max(found[name].values()) > 0.02
        except Exception as error:
            found[name], bad = {"failed": f"{type(error).__name__}: {error}"[:300]}, True
        if bad:
            tell(wrong=name, why=found[name])
            del functions[name]
    return found


def race(calls: dict, rounds: int) -> dict:
    """ms per call, clock and power of each contender, round by round; another one begins each
    round, since whoever follows the plain product finds the chip at a lower clock.
    """
    import torch

    from . import gpu

    def burst(call, n: int) -> tuple[float, dict]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(n):
            call()
        end.record()
        state = gpu.sample()  # while the GPU works
        end.synchronize()
        return start.elapsed_time(end) / n, state

    counts = {}
    for name, call in calls.items():
        burst(call, 2)
        counts[name] = max(2, round(BURST_MS / burst(call, 3)[0]))
    table = {name: {"rounds_ms": [], "mhz": [], "watt": []} for name in calls}
    for r in range(rounds):
        for name in gpu.in_turn(calls, r):
            ms, state = burst(calls[name], counts[name])
            table[name]["rounds_ms"].append(round(ms, 5))
            table[name]["mhz"].append(state["mhz"])
            table[name]["watt"].append(state["watt"])
    return table


def gemm():
    """A plain matrix product through torch."""
    import torch

    a, b = (torch.randn(GEMM, GEMM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return lambda: a @ b


def cell(task: dict, seqlen: int, which: str, versions: dict) -> dict:
    """One row of one pass: checked, then timed."""
    import torch

    from . import gpu

    d, causal = task["head_dim"], task["causal"]
    batch, heads = TOKENS // seqlen, WIDTH // d
    q, k, v = gpu.inputs((batch, seqlen, seqlen), (heads, heads), (d, d), torch.bfloat16)
    dout = gpu.inputs((batch, seqlen, seqlen), (heads, heads), (d, d), torch.bfloat16, seed=1)[0]
    if which != "fwd":
        for x in (q, k, v):
            x.requires_grad_()
    functions = contenders(which, q, k, v, causal)
    want = exact(q.detach(), k.detach(), v.detach(), dout, causal)
    checks = check(which, functions, (q, k, v), dout, want)
    del want
    calls = steps(which, functions, (q, k, v), dout)
    calls["gemm"] = gemm()
    table = race(calls, task["rounds"])
    forward = gpu.flops(batch, heads, (seqlen, seqlen), (d, d), causal)
    for name, row in table.items():
        row["ms"] = statistics.median(row["rounds_ms"])
        work = 2.0 * GEMM**3 if name == "gemm" else forward * (1.0 if which == "fwd" else 2.5)
        row["tflops"] = round(work / row["ms"] / 1e9, 1)
        row["error"] = checks.get(name)
    for name, value in ratios(table).items():
        table[name]["ratio"] = value
    return {
        "pass": "fwd" if which == "fwd" else "bwd",
        "deterministic": which == "det",
        "head_dim": d,
        "causal": causal,
        "seqlen": seqlen,
        "contenders": table,
        "left_out": {n: e for n, e in checks.items() if n not in table},
        **versions,
    }


def ratios(table: dict) -> dict[str, float]:
    """How many times as long as ours each peer takes: median over the rounds of what two neighbours
    in time took, since the power limit moves the clock from round to round.
    """
    ours = table.get("fa_cute", {}).get("rounds_ms", [])
    return {
        name: round(
            statistics.median(b / a for a, b in zip(ours, row["rounds_ms"], strict=True)), 3
        )
        for name, row in table.items()
        if ours and name not in ("fa_cute", "gemm")
    }


def compile_all(task: dict) -> None:
    """First calls, on short sequences: everything that is compiled at run time."""
    import torch

    from . import gpu

    d = task["head_dim"]
    for which in task["passes"]:
        q, k, v = gpu.inputs((1, 256, 256), (2, 2), (d, d), torch.bfloat16)
        for x in (q, k, v):
            x.requires_grad_(which != "fwd")
        for name, forward in contenders(which, q, k, v, task["causal"]).items():
            try:
                out = forward()
                if which != "fwd":
                    out.sum().backward()
            except Exception as error:
                tell(compile=name, which=which, failed=f"{type(error).__name__}: {error}"[:500])
    torch.cuda.synchronize()


def run_one(task: dict) -> None:
    """All rows of one head dim and mask in this process; one JSON line per cell."""
    import torch

    from . import gpu

    versions = gpu.versions() | {"commit": task["commit"]}
    compile_all(task)
    torch.cuda.empty_cache()
    tell(compiled=[task["head_dim"], task["causal"]])
    everybody(task)
    with gpu.gpu(LIMIT_S):
        for seqlen, which in itertools.product(task["seqlens"], task["passes"]):
            try:
                print(json.dumps(cell(task, seqlen, which, versions)), flush=True)
            except Exception as error:
                tell(
                    cell=[task["head_dim"], task["causal"], seqlen, which], failed=str(error)[:500]
                )
            torch.cuda.empty_cache()


def everybody(task: dict) -> None:
    """Wait until every process has compiled, so that nobody's first calls disturb a measurement."""
    folder = task["meet"]
    open(os.path.join(folder, f"{task['head_dim']}-{task['causal']}"), "w").close()
    end = time.monotonic() + task["patience_s"]
    while len(os.listdir(folder)) < task["processes"] and time.monotonic() < end:
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--rows", default="", help="comma list of d64 d128 d256 causal full s1024 ..."
    )
    parser.add_argument("--passes", default=",".join(PASSES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default="benchmarks/results")
    parser.add_argument("--commit", default="")
    parser.add_argument(
        "--patience", type=float, default=120.0, help="seconds to wait for compiling"
    )
    parser.add_argument("--plot", help="draw the charts of a result file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run_one(json.loads(options.one))
    elif options.plot:
        from .charts import draw

        draw(options.plot)
    else:
        drive(options)


def chosen(rows: str) -> tuple[list, list, list]:
    """Head dims, masks and lengths that a row list names; a kind that it does not name is whole."""
    words = [w for w in rows.split(",") if w]
    dims = [d for d in HEAD_DIMS if f"d{d}" in words] or list(HEAD_DIMS)
    masks = [c for c in (False, True) if ("causal" if c else "full") in words] or [False, True]
    lengths = [s for s in SEQLENS if f"s{s}" in words] or list(SEQLENS)
    return dims, masks, lengths


def drive(options) -> None:
    """Start the processes, collect their cells, print and save."""
    import tempfile

    dims, masks, lengths = chosen(options.rows)
    jobs = list(itertools.product(dims, masks))
    os.makedirs(options.out, exist_ok=True)
    cells = []
    path = os.path.join(options.out, "attention.log")
    with tempfile.TemporaryDirectory() as meet, open(path, "a") as log:
        running = []
        for d, causal in jobs:
            task = {
                "head_dim": d,
                "causal": causal,
                "seqlens": lengths,
                "passes": options.passes.split(","),
                "rounds": options.rounds,
                "commit": options.commit,
                "meet": meet,
                "processes": len(jobs),
                "patience_s": options.patience,
            }
            command = [sys.executable, "-m", "benchmarks.attention", "--one", json.dumps(task)]
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True))
        for process in running:
            for line in process.stdout:
                if line.startswith("{"):
                    cells.append(json.loads(line))
                    print(summary(cells[-1]), flush=True)
                    save(options.out, cells)
            process.wait()


def save(folder: str, cells: list) -> None:
    """All cells so far: a run that is stopped leaves what it has."""
    with open(os.path.join(folder, "h200.json"), "w") as f:
        json.dump(cells, f, indent=1)


def summary(c: dict) -> str:
    """One line of the table: TFLOP/s, ours over the best peer, and that round by round."""
    kind = "det" if c["deterministic"] else c["pass"]
    head = f"{kind} d{c['head_dim']:<3d} {'causal' if c['causal'] else 'full':6s} {c['seqlen']:5d}"
    table = c["contenders"]
    speeds = "  ".join(f"{n} {r['tflops']:.0f}@{r['mhz'][-1]}" for n, r in table.items())
    peers = [r["tflops"] for n, r in table.items() if n not in ("fa_cute", "gemm")]
    if "fa_cute" not in table or not peers:
        return f"{head}  {speeds}  {c['left_out']}"
    by_round = min(r["ratio"] for r in table.values() if "ratio" in r)
    ratio = table["fa_cute"]["tflops"] / max(peers)
    return f"{head}  {speeds}  ratio {ratio:.3f}, by round {by_round:.3f}"


if __name__ == "__main__":
    main()
