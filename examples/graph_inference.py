"""Inference from a CUDA graph: one launch for everything between static buffers.

Needs a CUDA device. Without one it runs the layer once through the simulator, says what is missing,
and ends well.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

import fa_cute

HEADS, HEAD_DIM = 8, 64
WIDTH = HEADS * HEAD_DIM


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
        return x + self.out(fa_cute.flash_attn_func(q, k, v, causal=True).flatten(2))


def captured(model, x):
    """A graph of ``model(x)`` and its output; x and the output are its static buffers."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model(x)  # compiles or loads the kernels, which a capture cannot do
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(x)
    return graph, out


def microseconds(call, repeats=100):
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats * 1e6


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seqlen", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(*(Layer() for _ in range(args.layers))).to(device, torch.bfloat16)
    x = torch.randn(1, args.seqlen, WIDTH, device=device, dtype=torch.bfloat16)
    eager = model(x)
    fa_cute.jit_monitor("error")  # from here on nothing may compile
    if device == "cpu":
        same = torch.equal(model(x), eager)
        print(f"the second pass compiled nothing and gives the same bits: {same}")
        print("a CUDA graph needs a CUDA device, and there is none; this was the simulator")
        return
    graph, out = captured(model, x)
    graph.replay()
    print(f"the graph gives the bits of eager: {torch.equal(out, eager)}")
    x.copy_(torch.randn_like(x))  # another input into the same buffer
    graph.replay()
    print(f"and so with another input: {torch.equal(out, model(x))}")
    eager_us, graph_us = microseconds(lambda: model(x)), microseconds(graph.replay)
    print(f"{args.layers} layers: {eager_us:.0f} us eager, {graph_us:.0f} us from the graph")


if __name__ == "__main__":
    main()
