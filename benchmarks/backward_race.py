"""Forms of the Hopper backward beside the table's row and flash-attn-4, in one process.

    python -m benchmarks.backward_race 32x1024,mixed,8192x34 --mask causal d: v: v:by_parts=True

A form is "d:" (dense batch) or "v:" (list of sequences) and changes to the config, NAME=VALUE,...
("order": whether dQ has one); the first one's gradients are what the others' must agree with. A
batch is NUMBERxLENGTH, or "mixed" (24 sequences of 64 to 16k; "v:" only). Contenders take turns,
another one begins each round; a figure is the median over the rounds of the median of a burst.
``--profile`` prints the microseconds of each kernel instead. Adds lines to
`$OUT/backward_race.jsonl`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from unittest import mock

import torch

from fa_cute import arch, flash_attn_varlen_func, launch, tune
from fa_cute.bwd.sm90 import plan
from fa_cute.lengths import Lengths
from fa_cute.problem import AttnProblem

from .gpu import gpu, in_turn, milliseconds, mixed_lengths

HOPPER = arch.get("sm_90a")
BURST_MS, LIMIT_S, FAR = 8.0, 300.0, 0.1
PROFILED = 5  # calls


@dataclass(frozen=True)
class Batch:
    """A problem: lengths of its sequences, and what is the same for all of a run."""

    lengths: tuple[int, ...]
    heads: tuple[int, int]
    head_dim: int
    window: tuple[int, int]
    deterministic: bool

    @classmethod
    def of(cls, word: str, options) -> Batch:
        """By its name."""
        if word == "mixed":
            lengths = mixed_lengths()
        else:
            number, length = map(int, word.split("x"))
            lengths = (length,) * number
        masks = {"full": (-1, -1), "causal": (-1, 0)}
        window = masks.get(options.mask) or tuple(map(int, options.mask.split(",")))
        return cls(lengths, options.heads, options.head_dim, window, options.det)

    @property
    def ends(self) -> list[int]:
        return [0, *itertools.accumulate(self.lengths)]


class Race:
    """Tensors of a batch, and what computes its gradients."""

    def __init__(self, batch: Batch):
        self.batch = b = batch
        total, (heads, heads_kv), d = sum(b.lengths), b.heads, b.head_dim
        shapes = ((total, h, d) for h in (heads, heads_kv, heads_kv, heads))
        *self.qkv, self.dout = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes)
        self.cu = torch.tensor(b.ends, device="cuda", dtype=torch.int32)
        longest = max(b.lengths)
        self.out, self.lse = flash_attn_varlen_func(
            *self.qkv, self.cu, self.cu, longest, longest, window_size=b.window, return_lse=True
        )

    def form(self, words: str):
        """A call of ours: what "d:..." or "v:..." stands for."""
        listed, changes = words[0] == "v", {}
        for part in filter(None, words[2:].split(",")):
            name, _, value = part.partition("=")
            changes[name] = {"True": True, "False": False}.get(value, value)
            changes[name] = int(value) if value.isdigit() else changes[name]
        tensors, lengths = (*self.qkv, self.out, self.lse, self.dout, None), launch.NONE
        options = (None, False, self.batch.window, 0.0)
        if listed:
            lengths = (self.cu, self.cu, None, None)
            problem = AttnProblem.of_sequences(*self.qkv, Lengths(*lengths), options)
        else:
            tensors = self.dense(tensors)
            problem = AttnProblem.of(*tensors[:3], window_size=self.batch.window)
        spec = tune.backward_spec(problem, self.batch.deterministic, HOPPER)
        spec = replace(spec, deterministic=changes.pop("order", spec.deterministic))
        cfg = changed(plan.config(spec), changes, spec)
        given = tuple(t is not None for t in lengths)
        with mock.patch.object(tune, "backward", lambda *_: cfg):
            found = launch.resolve_backward(spec, problem, HOPPER, "cuda", False, given)
        q = tensors[0]
        work = launch.scratch(q, found.ints)
        tail = launch.rest(
            problem.softmax_scale, launch.num_sms(q.device, HOPPER), problem.limits, lengths, work
        )

        def call(poison=False):
            grads = [torch.empty_like(t) for t in tensors[:3]]
            if poison:
                for grad in grads:
                    grad.fill_(float("nan"))
            launch.run_backward(tensors, grads, found, tail, HOPPER)
            return grads

        return call

    def dense(self, tensors):
        """The same tensors as a dense batch; lse as the dense forward gives it."""
        count = len(self.batch.lengths)
        q, k, v, out, lse, dout, _ = tensors
        by_batch = (x.view(count, -1, *x.shape[1:]) for x in (q, k, v, out, dout))
        q, k, v, out, dout = by_batch
        lse = lse.view(lse.shape[0], count, -1).transpose(0, 1).contiguous()
        return q, k, v, out, lse, dout, None

    def peer(self, listed: bool):
        """flash-attn-4's backward through its public call."""
        from flash_attn.cute import interface

        b, window = self.batch, tuple(None if n < 0 else n for n in self.batch.window)
        options = {"window_size": window, "deterministic": b.deterministic}
        if window == (None, 0):
            options |= {"window_size": (None, None), "causal": True}
        leaves = [x.detach().requires_grad_() for x in self.qkv]
        if not listed:
            dense = [x.view(len(b.lengths), -1, *x.shape[1:]) for x in leaves]
            out = interface.flash_attn_func(*dense, **options)
        else:
            longest = max(b.lengths)
            options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
            out = interface.flash_attn_varlen_func(
                *leaves, cu_seqlens_q=self.cu, cu_seqlens_k=self.cu, **options
            )
        out = out[0] if isinstance(out, tuple) else out
        dout = self.dout.view(out.shape)
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def changed(cfg, changes: dict, spec):
    """The row with some of it changed, launched as that wants."""
    if "store_first" in changes:
        changes = {**changes, "scheduler": plan.scheduler(spec, changes["store_first"])}
    return replace(cfg, **changes)


def contenders(batch: Batch, forms: list[str]) -> dict:
    """Calls by name, whose results agree."""
    race, calls, want = Race(batch), {}, None
    for form in forms:
        if form[0] == "d" and len(set(batch.lengths)) > 1:
            continue
        try:
            call = race.form(form)
            got = [g.float().view(-1) for g in call(poison=True)]
        except Exception as error:
            print(f"FAILED {form}: {error!r:.300}", flush=True)
            continue
        want = want or got
        off = max((a - b).abs().max().item() for a, b in zip(got, want, strict=True))
        if not off < FAR:
            print(f"WRONG {form}: {off}", flush=True)
        calls[form] = call
    try:
        calls["flash-attn-4"] = race.peer(any(form[0] == "v" for form in forms))
        calls["flash-attn-4"]()
    except Exception as error:
        print(f"flash-attn-4: {error!r:.200}", file=sys.stderr)
    torch.cuda.synchronize()
    return calls


def profiled(call) -> dict:
    """Mean microseconds of each kernel of a call, and from the first one's start to the next
    call's.
    """
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(PROFILED):
            call()
        torch.cuda.synchronize()
    events = [e for e in record.events() if e.device_type.name == "CUDA"]
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in events)
    total = defaultdict(float)
    for start, end, name in spans:
        total[name[:70]] += (end - start) / PROFILED
    each = len(spans) // PROFILED
    total["call"] = (spans[each * (PROFILED - 1)][0] - spans[0][0]) / (PROFILED - 1)
    return {name: round(us, 1) for name, us in total.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("batches", help="NUMBERxLENGTH or mixed, ...")
    parser.add_argument("forms", nargs="+", help="d:NAME=VALUE,... or v:...")
    parser.add_argument("--mask", default="full", help="full, causal, or LEFT,RIGHT (-1: no limit)")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--heads", default="16,16", help="of q, of k")
    parser.add_argument("--det", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    options.heads = tuple(map(int, options.heads.split(",")))
    words, result = options.batches.split(","), []
    contenders(Batch.of("2x256", options), options.forms)  # compile
    with gpu(LIMIT_S):
        for word in words:
            calls = contenders(Batch.of(word, options), options.forms)
            if options.profile:
                found = {name: profiled(call) for name, call in calls.items()}
            else:
                times = {name: [] for name in calls}
                for r in range(options.rounds):
                    for name in in_turn(calls, r):
                        times[name].append(milliseconds(calls[name], BURST_MS))
                found = {name: round(statistics.median(ms), 4) for name, ms in times.items()}
            line = {"batch": word, "det": options.det, "mask": options.mask}
            line |= {"head_dim": options.head_dim, "heads": options.heads}
            key = "us" if options.profile else "ms"
            result.append({**line, key: found})
            print(json.dumps(result[-1]), flush=True)
            del calls
            torch.cuda.empty_cache()
    with open(os.path.join(os.environ.get("OUT", "."), "backward_race.jsonl"), "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in result)


if __name__ == "__main__":
    main()
