"""The simulator's numbers beside a real GPU's, on the same inputs.

    python -m tests.gpu.against_sim record FILE.npz     on a machine with a Hopper GPU
    python -m tests.gpu.against_sim compare FILE.npz    anywhere, in the simulator

Forward, LSE and deterministic gradients of short problems. The simulator adds products as the
chip's tensor core does (`sim/sums.py`) and rounds exp2 correctly, which the chip's unit does not:
after rounding to bf16 all or nearly all results have the same bits.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch

# batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, causal
CASES = [
    (1, 256, 256, 2, 1, 64, False),
    (1, 256, 256, 2, 1, 64, True),
    (1, 200, 330, 1, 1, 64, True),
    (1, 256, 256, 2, 1, 128, False),
    (1, 256, 256, 2, 1, 128, True),
    (1, 192, 160, 1, 1, 256, True),
]
NAMES = ("out", "dq", "dk", "dv")
SAME_BITS, LSE_APART = 0.995, 2e-6


def inputs(case, seed: int) -> list[torch.Tensor]:
    """q, k, v, dout on the CPU."""
    batch, sq, sk, heads, heads_kv, d, _ = case
    g = torch.Generator().manual_seed(seed)
    shapes = ((sq, heads), (sk, heads_kv), (sk, heads_kv), (sq, heads))
    return [torch.randn(batch, s, h, d, generator=g).to(torch.bfloat16) for s, h in shapes]


def results(case, tensors, device: str) -> dict:
    """Output, LSE and gradients as numpy arrays; bf16 as its bits."""
    import fa_cute

    q, k, v, dout = (t.to(device) for t in tensors)
    for t in (q, k, v):
        t.requires_grad_()
    out, lse = fa_cute.flash_attn_func(
        q, k, v, causal=case[-1], deterministic=True, return_lse=True
    )
    grads = torch.autograd.grad(out, (q, k, v), dout)
    named = dict(zip(NAMES, (out.detach(), *grads), strict=True))
    found = {name: t.contiguous().view(torch.int16).cpu().numpy() for name, t in named.items()}
    return found | {"lse": lse.detach().float().cpu().numpy()}


def record(path: str) -> None:
    """What this GPU computes, with the inputs."""
    saved = {}
    for i, case in enumerate(CASES):
        tensors = inputs(case, i)
        for name, t in zip(("q", "k", "v", "dout"), tensors, strict=True):
            saved[f"{i}.{name}"] = t.view(torch.int16).numpy()
        for name, a in results(case, tensors, "cuda").items():
            saved[f"{i}.{name}"] = a
    saved["gpu"] = np.array(torch.cuda.get_device_name())
    np.savez_compressed(path, **saved)


def compare(path: str) -> bool:
    """Print one line per case; True if all are within the bars."""
    from fa_cute import sim

    good = True
    with np.load(path) as saved:
        for i, case in enumerate(CASES):
            tensors = [
                torch.from_numpy(saved[f"{i}.{n}"]).view(torch.bfloat16)
                for n in ("q", "k", "v", "dout")
            ]
            with sim.session("sm_90a", dsl=False, sums="hopper"):
                mine = results(case, tensors, "cpu")
            same = {n: float((mine[n] == saved[f"{i}.{n}"]).mean()) for n in NAMES}
            unequal = mine["lse"] != saved[f"{i}.lse"]  # -inf where a row sees nothing
            apart = float(np.abs(mine["lse"] - saved[f"{i}.lse"])[unequal].max(initial=0.0))
            good &= min(same.values()) >= SAME_BITS and apart <= LSE_APART
            print(json.dumps({"case": case, "same_bits": same, "lse_apart": apart}), flush=True)
    return good


if __name__ == "__main__":
    if sys.argv[1] == "record":
        record(sys.argv[2])
    else:
        sys.exit(0 if compare(sys.argv[2]) else 1)
