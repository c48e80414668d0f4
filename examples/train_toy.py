"""Train two layers of attention on CPU tensors, the kernels simulated, beside the same in torch.

The task: say at every position what the token before it was. Run it by
``python examples/train_toy.py``; the kernels compile on the first step and are cached.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch import nn

from fa_cute import flash_attn_func, reference

TOKENS, HEADS, HEAD_DIM, BATCH = 16, 2, 64, 4
WIDTH = HEADS * HEAD_DIM


def in_torch(q, k, v):
    return reference.attention(q, k, v, causal=True, dtype=None)[0]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x, attention):
        q, k, v = self.qkv(self.norm(x)).bfloat16().unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
        return x + self.out(attention(q, k, v).flatten(2).float())


class Model(nn.Module):
    def __init__(self, seqlen):
        super().__init__()
        self.embed, self.place = nn.Embedding(TOKENS, WIDTH), nn.Embedding(seqlen, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens, attention):
        x = self.embed(tokens) + self.place.weight
        for layer in self.layers:
            x = layer(x, attention)
        return self.head(x)


def train(attention, steps, seqlen):
    """The loss of every step."""
    torch.manual_seed(0)
    model, losses = Model(seqlen), []
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(steps):
        tokens = torch.randint(TOKENS, (BATCH, seqlen))
        logits = model(tokens, attention)[:, 1:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, :-1].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seqlen", type=int, default=32)
    args = parser.parse_args()
    ours = train(partial(flash_attn_func, causal=True), args.steps, args.seqlen)
    theirs = train(in_torch, args.steps, args.seqlen)
    for step, (a, b) in enumerate(zip(ours, theirs)):
        print(f"step {step:3}  loss {a:.4f} simulated  {b:.4f} torch")
    worst = max(abs(a - b) / b for a, b in zip(ours, theirs))
    print(f"largest relative difference {worst:.1e}")


if __name__ == "__main__":
    main()
