"""A mask in one class: causal, except that everybody sees the prompt, which is read both ways.

The class says which keys a query sees, in plain arithmetic. Which blocks are visited, and which of
them need no element mask, follows; the kernel is the one that runs every other call.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import torch

from fa_cute import compile, dispatch, launch, tune
from fa_cute.ops.arith import at_most, hi, lo
from fa_cute.ops.mask import Band
from fa_cute.problem import AttnProblem


@dataclass(frozen=True)
class Prefix(Band):
    """Keys up to the query's own, and the first ``prefix`` ones."""

    right: int = 0
    prefix: int = 0

    def k_bounds(self, q, seqlen_q, seqlen_k):
        k_lo, k_hi = super().k_bounds(q, seqlen_q, seqlen_k)
        return k_lo, hi(k_hi, lo(self.prefix, seqlen_k))

    def q_bounds(self, k, seqlen_q, seqlen_k):
        q_lo, q_hi = super().q_bounds(k, seqlen_q, seqlen_k)
        return q_lo * at_most(self.prefix, k), q_hi  # of the prompt: from query 0 on


def attention(q, k, v, mask):
    """(out, lse) of one forward with a mask of one's own."""
    arch = dispatch.arch_of(q.device)
    problem = AttnProblem.of(q, k, v, causal=mask.right is not None)
    spec = replace(tune.forward_spec(problem, arch), custom=mask)
    cfg = tune.forward(spec, arch)
    kernel = compile.forward(cfg, spec, arch, "cuda" if q.is_cuda else "sim")
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
    rest = launch.rest(problem.softmax_scale, launch.num_sms(q.device, arch))
    launch.forward((q, k, v, out, lse), (kernel, cfg), rest, arch)
    return out, lse


def in_torch(q, k, v, mask, dtype):
    """The same with an explicit matrix of which query sees which key."""
    seqlen = q.shape[1]
    rows = [[mask.keep(i, j, seqlen, seqlen) for j in range(seqlen)] for i in range(seqlen)]
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    seen = torch.tensor(rows, device=q.device)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    return out.transpose(1, 2)


def main() -> float:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seqlen", type=int, default=300)
    parser.add_argument("--prefix", type=int, default=140)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (1, args.seqlen, 2, 64)
    q, k, v = (torch.randn(shape).to(device, torch.bfloat16) for _ in range(3))
    mask = Prefix(prefix=args.prefix)
    out, _ = attention(q, k, v, mask)
    exact = in_torch(q, k, v, mask, torch.float64)
    error, torch_error = (
        (x.double() - exact).abs().max().item()
        for x in (out, in_torch(q, k, v, mask, torch.bfloat16))
    )
    print(f"largest error {error:.1e} against float64; torch in bf16: {torch_error:.1e}")
    return error / torch_error


if __name__ == "__main__":
    main()
