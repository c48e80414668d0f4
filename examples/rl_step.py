"""A policy-gradient step whose log-probabilities and gradients repeat bit for bit.

Reinforcement learning divides the probability that the policy gives a token now by the one that it
gave when the token was sampled. Where both come from the same kernel that ratio is exactly 1 on the
first step, and where the gradient repeats too, a run can be replayed. On CPU tensors every pass is
simulated with asynchronous work and thread blocks in another random order.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch's own matrix products

import torch
from torch import nn

from fa_cute import flash_attn_func

TOKENS, HEADS, HEAD_DIM = 32, 2, 64
WIDTH = HEADS * HEAD_DIM


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(TOKENS, WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens):
        """The log-probability of each token after the first."""
        x = self.embed(tokens)
        q, k, v = self.qkv(self.norm(x)).bfloat16().unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
        x = x + flash_attn_func(q, k, v, causal=True).flatten(2).float()
        logp = self.head(x).log_softmax(-1)[:, :-1]
        return logp.gather(-1, tokens[:, 1:, None]).squeeze(-1)


def step(policy, tokens, old, advantage, seed):
    """Log-probabilities and gradients of one pass."""
    os.environ["FA_CUTE_SIM_SCHEDULE"] = f"random:{seed}"  # of simulated kernels
    policy.zero_grad()
    logp = policy(tokens)
    ratio = (logp - old).exp()
    clipped = ratio.clamp(0.8, 1.2)
    torch.minimum(ratio * advantage, clipped * advantage).mean().neg().backward()
    return logp.detach(), [p.grad.clone() for p in policy.parameters()]


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seqlen", type=int, default=300)
    parser.add_argument("--passes", type=int, default=3)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.use_deterministic_algorithms(True)  # fa_cute follows it, like deterministic=True
    torch.manual_seed(0)
    policy = Policy().to(device)
    tokens = torch.randint(TOKENS, (2, args.seqlen)).to(device)  # what a rollout sampled
    advantage = torch.tensor([[1.0], [-1.0]], device=device)
    with torch.no_grad():
        old = policy(tokens)
    first = step(policy, tokens, old, advantage, 0)
    ratio_is_one = torch.equal(first[0], old)
    print(f"rollout and training give the same log-probabilities, bit for bit: {ratio_is_one}")
    repeats = True
    for seed in range(1, args.passes):
        logp, grads = step(policy, tokens, old, advantage, seed)
        repeats &= torch.equal(logp, first[0]) and all(map(torch.equal, grads, first[1]))
    print(f"{args.passes} passes give the same log-probabilities and gradients: {repeats}")
    if not (ratio_is_one and repeats):
        raise SystemExit("not bitwise repeatable")
    return True


if __name__ == "__main__":
    main()
