"""Documents of different lengths in one call: packed rows instead of padding.

Checks that each document's attention and gradients are, bit for bit, those of a call of its own.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("FA_CUTE_ARCH", "sm_90a")  # what CPU tensors are simulated on

import torch

from fa_cute import flash_attn_func, flash_attn_varlen_func

HEADS, HEAD_DIM = 2, 64


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[70, 3, 0, 129, 300, 12])
    parser.add_argument("--backend", default="auto")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    total, options = sum(args.lengths), {"causal": True, "backend": args.backend}

    shape = (total, HEADS, HEAD_DIM)
    q, k, v = (torch.randn(shape).to(device, torch.bfloat16).requires_grad_() for _ in range(3))
    lengths = torch.tensor([0, *args.lengths], device=device)
    cu_seqlens = lengths.cumsum(0).int()  # document i has rows cu_seqlens[i] : cu_seqlens[i + 1]
    out = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, deterministic=True, **options)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)

    same, start = True, 0
    for length in args.lengths:
        own = [x.detach()[None, start : start + length].requires_grad_() for x in (q, k, v)]
        alone = flash_attn_func(*own, deterministic=True, **options)
        wanted = torch.autograd.grad(alone, own, dout[None, start : start + length])
        found = [x[None, start : start + length] for x in (out, *grads)]
        same &= all(map(torch.equal, found, (alone.detach(), *wanted)))
        start += length
    padded = len(args.lengths) * max(args.lengths)
    print(f"{len(args.lengths)} documents, {total} rows; padded it would be {padded}")
    print(f"each has the bits of a call of its own: {same}")
    return same


if __name__ == "__main__":
    main()
