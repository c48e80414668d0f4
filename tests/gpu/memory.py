"""Bytes that a call allocates on a real GPU, beside flash-attn-4: `python -m tests.gpu.memory`.

Not collected by pytest. Writes `$OUT/memory.jsonl`, a line per problem. What is allowed: forward
`out` and LSE; backward the gradients, one fp32 dQ accumulator, two fp32 row vectors and, where
query heads share a kv head, fp32 dK and dV; a deterministic one its counters. The accumulators
have whole tiles, which is the slack.
"""

from __future__ import annotations

import gc
import json
import os
import sys

import torch

import fa_cute
from benchmarks import gpu

# batch, seqlen, heads, heads_kv, head_dim, causal, deterministic
CASES = [
    (2, 4096, 16, 16, 128, True, False),
    (2, 4096, 16, 4, 128, True, False),
    (2, 4096, 16, 16, 128, True, True),
    (2, 4096, 32, 32, 64, False, False),
    (2, 4096, 8, 2, 256, False, True),
    (8, 1000, 16, 16, 128, True, False),
]
FLOAT_BYTES = 4
SLACK = 1.02  # tiles at the ends


def allocated(call) -> int:
    """Peak of the bytes asked of the allocator above what was held before: its own rounding (a
    remainder of up to 1 MiB is not split off a block) would count for neither. The second call, so
    that caches are warm.
    """
    for _ in range(2):
        gc.collect()  # nothing that a cycle still holds may be freed meanwhile
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        kept = call()
        torch.cuda.synchronize()
        peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
        del kept
    return peak


def passes(forward, leaves, dout) -> dict:
    """Bytes of a forward and of the backward over its graph."""
    out = forward()
    return {
        "fwd": allocated(forward),
        "bwd": allocated(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)),
    }


def contenders(q, k, v, causal, deterministic) -> dict:
    """Forward functions by name."""
    from flash_attn.cute.interface import flash_attn_func as peer

    def theirs():
        found = peer(q, k, v, causal=causal, deterministic=deterministic)
        return found[0] if isinstance(found, tuple) else found

    def ours():
        return fa_cute.flash_attn_func(q, k, v, causal=causal, deterministic=deterministic)

    return {"fa_cute": ours, "flash-attn-4": theirs}


def allowed(case) -> dict:
    """Bytes of what a call may allocate."""
    batch, seqlen, heads, heads_kv, d, _, _ = case
    rows = batch * heads * seqlen
    q_bytes, kv_bytes = 2 * rows * d, 2 * batch * heads_kv * seqlen * d
    shared = 4 * kv_bytes if heads_kv < heads else 0  # fp32 dK and dV
    return {
        "fwd": q_bytes + rows * FLOAT_BYTES,
        "bwd": 3 * q_bytes + 2 * kv_bytes + 2 * rows * FLOAT_BYTES + shared,
    }


def measure(case) -> dict:
    """One line."""
    batch, seqlen, heads, heads_kv, d, causal, deterministic = case
    lengths = (batch, seqlen, seqlen)
    leaves = gpu.inputs(lengths, (heads, heads_kv), (d, d), torch.bfloat16)
    dout = gpu.inputs(lengths, (heads, heads_kv), (d, d), torch.bfloat16, seed=1)[0]
    for x in leaves:
        x.requires_grad_()
    line = {"case": case, "allowed": allowed(case)}
    for name, forward in contenders(*leaves, causal, deterministic).items():
        try:
            line[name] = passes(forward, leaves, dout)
        except Exception as error:
            line[name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
    line["ok"] = all(line["fa_cute"][p] <= SLACK * line["allowed"][p] for p in ("fwd", "bwd"))
    theirs = line["flash-attn-4"]
    line["not_above"] = all(line["fa_cute"][p] <= theirs.get(p, 0) for p in ("fwd", "bwd"))
    return line


def main() -> int:
    lines = []
    with open(os.path.join(os.environ.get("OUT", "."), "memory.jsonl"), "w") as file:
        for case in CASES:
            lines.append(measure(case))
            file.write(json.dumps(lines[-1]) + "\n")
            print(json.dumps(lines[-1]), flush=True)
    return 0 if all(line["ok"] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
