"""Sequences of any lengths on a real GPU: `python -m tests.gpu.varlen PART [WORD]`.

Not collected by pytest. Writes `$OUT/varlen_<part>.json`.

    numbers  forward and gradients of a head dim ("192,128": of k and v) against fp64, bit for bit
             the dense call of each sequence; compiles two dozen kernels, so one process each
    warm     compiles what `speed` of a pass (fwd, bwd, det) needs, into the caches on disk
    repeat   1,000 deterministic runs of a mixed batch under load: the same bits
    speed    beside flash-attn-4 in the same run: equal lengths (and our dense call of the same), a
             mixed batch of 64 to 16k, causal; a window of 1024 at 16k; 8,192 sequences of 34
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass, replace

import torch

from benchmarks.gpu import gpu, in_turn, milliseconds, mixed_lengths, versions
from fa_cute import flash_attn_func, flash_attn_varlen_func
from tests.varlen_cases import (
    BF16,
    FP16,
    NAMES,
    Case,
    Side,
    check_each_by_itself,
    check_numbers,
    make,
)

RUNS, ROUNDS, BURST_MS = 1000, 9, 15.0
LIMIT_S = 500.0


def cases(dims: tuple[int, int]) -> dict[str, Case]:
    """What `numbers` runs."""
    rng, found = random.Random(0), {}

    def lengths(count: int, longest: int) -> tuple[int, ...]:
        return tuple(rng.choice((0, 1, rng.randint(1, longest))) for _ in range(count))

    masks = {"full": {}, "causal": {"causal": True}, "window": {"window": (100, 40)}}
    for name, mask in masks.items():
        heads = (4, 2) if dims[0] < 256 else (2, 1)
        sides = [Side(lengths(12, 700), before=5, after=9) for _ in range(2)]
        found[f"packed {dims} {name}"] = Case(*sides, heads, dims, BF16, **mask)
        found[f"any order {dims} {name}"] = replace(
            found[f"packed {dims} {name}"], deterministic=False
        )
        rooms = tuple(rng.randint(1, 500) for _ in range(6))
        used = tuple(rng.randint(0, room) for room in rooms)
        padded = Side((400,) * 6, tuple(rng.randint(0, 400) for _ in range(6)), packed=False)
        found[f"used {dims} {name}"] = Case(Side(rooms, used), padded, heads, dims, FP16, **mask)
    found["many"] = Case(Side((34,) * 600), Side((34,) * 600), (2, 2), dims, BF16)
    found["one"] = Case(Side((3000,)), Side((3000,)), (2, 1), dims, BF16, causal=True)
    return found


def numbers(dims: tuple[int, int]) -> dict:
    """Errors as shares of the bar, or what failed."""
    result = {}
    for name, case in cases(dims).items():
        start = time.time()
        try:
            call = make(case, "cuda", "auto")
            got = call.run()
            found = check_numbers(call, got)
            if name.startswith("packed"):
                check_each_by_itself(call, got)
        except Exception as error:  # the other cases are to run all the same
            found = {"error": repr(error)[:300]}
        result[name] = {**found, "seconds": round(time.time() - start, 2)}
        print(name, result[name], flush=True)
    return result


def repeat() -> dict:
    """Equal bits, while another stream multiplies matrices."""
    lengths = (2000, 0, 64, 700, 1, 4096, 333)
    case = Case(Side(lengths), Side(lengths), (4, 2), (128, 128), BF16, causal=True)
    call, load = make(case, "cuda", "auto"), torch.cuda.Stream()
    a = torch.randn(2048, 2048, device="cuda", dtype=BF16)
    want, differ = call.run(), 0
    for i in range(RUNS):
        if i % 3 == 0:
            with torch.cuda.stream(load):
                a @ a
        differ += not all(torch.equal(x, y) for x, y in zip(call.run(), want, strict=True))
    torch.cuda.synchronize()
    return {"runs": RUNS, "differ": differ}


@dataclass(frozen=True)
class Race:
    """A batch that is timed; ``window`` (-1, -1) is none."""

    lengths: tuple[int, ...]
    heads: tuple[int, int]
    head_dim: int = 128
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    dense: bool = False  # also our dense call, for equal lengths

    @property
    def equal(self) -> bool:
        return len(set(self.lengths)) == 1


def races() -> dict[str, Race]:
    """The batches of the issue."""
    mixed = mixed_lengths()
    found = {
        "mixed 64..16k causal": Race(mixed, (16, 16), causal=True),
        "mixed 64..16k causal gqa": Race(mixed, (32, 8), causal=True),
        "window 1024 at 16k": Race(
            (16384,) * 2, (16, 16), window=(1024, 0), causal=True, dense=True
        ),
        "window 1024 both ways": Race((16384,) * 2, (16, 16), window=(1024, 1024), dense=True),
        "8192 x 34": Race((34,) * 8192, (16, 16)),
        "8192 x 34 causal": Race((34,) * 8192, (16, 16), causal=True),
    }
    for length, causal in itertools.product((1024, 4096, 16384), (False, True)):
        name = f"{32768 // length} x {length} {'causal' if causal else 'full'}"
        found[name] = Race((length,) * (32768 // length), (16, 16), causal=causal, dense=True)
    return found


def contenders(race: Race, which: str) -> dict:
    """Functions to time: forwards, or backwards over a graph that is kept."""
    total, d = sum(race.lengths), race.head_dim
    q, k, v = (
        torch.randn(total, h, d, device="cuda", dtype=BF16, requires_grad=True)
        for h in (race.heads[0], race.heads[1], race.heads[1])
    )
    ends = [0, *itertools.accumulate(race.lengths)]
    cu, longest = torch.tensor(ends, device="cuda", dtype=torch.int32), max(race.lengths)
    det = which == "det"
    mask = {"causal": race.causal, "deterministic": det}
    ours_window, theirs_window = race.window, tuple(None if n < 0 else n for n in race.window)

    def ours():
        return flash_attn_varlen_func(
            q, k, v, cu, cu, longest, longest, window_size=ours_window, **mask
        )

    def dense():
        rows = (t.view(len(race.lengths), longest, *t.shape[1:]) for t in (q, k, v))
        return flash_attn_func(*rows, window_size=ours_window, **mask)

    found = {"fa_cute": ours}
    if race.dense:
        found["fa_cute dense"] = dense
    try:
        from flash_attn.cute.interface import flash_attn_varlen_func as peer
    except ImportError as error:
        print(f"no flash-attn-4: {error}", file=sys.stderr)
    else:

        def theirs():
            lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
            lengths |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
            result = peer(q, k, v, **lengths, window_size=theirs_window, **mask)
            return result[0] if isinstance(result, tuple) else result

        found["flash-attn-4"] = theirs
    if which == "fwd":
        return found
    calls, dout = {}, torch.randn(total, race.heads[0], d, device="cuda", dtype=BF16)
    for name, forward in found.items():
        try:
            out = forward()
        except Exception as error:
            if name == "fa_cute":
                raise
            print(f"{name}: {error!r:.300}", file=sys.stderr)
            continue

        def backward(out=out):
            torch.autograd.grad(out, (q, k, v), dout.view(out.shape), retain_graph=True)

        calls[name] = backward
    return calls


def warm(which: str) -> dict:
    """One call of every kernel that `speed` times, on short sequences of the same kind."""
    seen = {}
    for race in races().values():
        kind = (race.heads[0] != race.heads[1], race.causal, race.window)
        if kind not in seen:
            seen[kind] = None
            try:
                for call in contenders(replace(race, lengths=(1024, 1024)), which).values():
                    call()
            except Exception as error:
                seen[kind] = repr(error)[:300]
    torch.cuda.synchronize()
    return {str(kind): error for kind, error in seen.items()}


def speed() -> dict:
    """Milliseconds of each contender, in turn, and how we compare; one process has the GPU."""
    result = {"machine": versions()}
    for (name, race), which in itertools.product(races().items(), ("fwd", "bwd", "det")):
        calls = {}
        try:
            calls = contenders(race, which)
            calls["fa_cute"]()
        except Exception as error:
            result[f"{name} {which}"] = {"error": repr(error)[:300]}
            continue
        for label in [label for label in calls if label != "fa_cute"]:
            try:
                calls[label]()
            except Exception as error:  # another one that cannot does not take part
                print(f"{name} {which} {label}: {error!r:.300}", file=sys.stderr)
                del calls[label]
        with torch.no_grad() if which == "fwd" else torch.enable_grad():
            times = {label: [] for label in calls}
            for r in range(ROUNDS):
                for label in in_turn(calls, r):
                    times[label].append(milliseconds(calls[label], BURST_MS))
        found = {label: round(statistics.median(ms), 4) for label, ms in times.items()}
        for label in ("fa_cute dense", "flash-attn-4"):
            if label in found:
                found[f"{label} / ours"] = round(found[label] / found["fa_cute"], 3)
        result[f"{name} {which}"] = found
        print(name, which, found, flush=True)
        torch.cuda.empty_cache()
    return result


def main() -> None:
    part, words = sys.argv[1], sys.argv[2:]
    if part == "numbers":
        head_dims = [int(word) for word in (words or ["128"])[0].split(",")]
        result = numbers((head_dims[0], head_dims[-1]))
    elif part == "repeat":
        result = repeat()
    elif part == "warm":
        result = warm(words[0])
    else:
        with gpu(LIMIT_S):
            result = speed()
    name = "_".join(["varlen", part, *words]) + ".json"
    with open(os.path.join(os.environ.get("OUT", "."), name), "w") as file:
        json.dump(result, file, indent=1)
    wrong = [name for name, found in result.items() if isinstance(found, dict) and "error" in found]
    print(f"{part}: {'failed ' + str(wrong) if wrong else 'done'}", NAMES)
    sys.exit(bool(wrong and part == "numbers") or bool(result.get("differ")))


if __name__ == "__main__":
    main()
