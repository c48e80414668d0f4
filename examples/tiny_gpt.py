"""Train a tiny GPT until it can recite a sentence: on a GPU, or simulated on CPU tensors.

``python examples/tiny_gpt.py``; ``--backend reference`` trains the same in plain torch.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch import nn

from fa_cute import flash_attn_func

TEXT = "a kernel is a small program that runs on many threads at once. "
CHARACTERS = sorted(set(TEXT))
HEADS, HEAD_DIM, LAYERS, BATCH = 2, 64, 2, 8
WIDTH = HEADS * HEAD_DIM


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.norm2 = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, attention):
        q, k, v = self.qkv(self.norm(x)).bfloat16().unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
        x = x + self.out(attention(q, k, v).flatten(2).float())
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, context):
        super().__init__()
        self.embed, self.place = nn.Embedding(len(CHARACTERS), WIDTH), nn.Embedding(context, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, len(CHARACTERS))

    def forward(self, tokens, attention):
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, attention)
        return self.head(x)


def main() -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--context", type=int, default=48)
    parser.add_argument("--recite", type=int, default=40, help="characters")
    parser.add_argument("--backend", default="auto")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    attention = partial(flash_attn_func, causal=True, backend=args.backend)
    torch.manual_seed(0)
    model, losses = Gpt(args.context).to(device), []
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    data = torch.tensor([CHARACTERS.index(c) for c in TEXT * 3])
    for step in range(args.steps):
        starts = torch.randint(len(TEXT), (BATCH, 1))
        rows = data[starts + torch.arange(args.context + 1)].to(device)
        logits = model(rows[:, :-1], attention)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print(f"step {step:3}  loss {losses[-1]:.4f}")
    tokens = [CHARACTERS.index(c) for c in "a kernel"]
    with torch.no_grad():
        for _ in range(args.recite):
            logits = model(torch.tensor([tokens[-args.context :]], device=device), attention)
            tokens.append(logits[0, -1].argmax().item())
    print("".join(CHARACTERS[t] for t in tokens))
    return losses  # a test looks at them


if __name__ == "__main__":
    main()
