"""Compile kernels before they are needed: each in a process of its own, several at once."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, replace
from itertools import product
from typing import IO

from . import cache, compile, tune
from .arch import Arch
from .bwd.args import BwdSpec
from .compile import Request
from .errors import ArgumentError, UnsupportedError
from .fwd.args import FwdSpec

POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Wanted:
    """Which kernels: all combinations."""

    head_dims: tuple[tuple[int, int], ...] = ()  # () for those of the table
    dtypes: tuple[str, ...] = tune.DTYPES
    masks: tuple[bool, ...] = (False, True)  # causal
    kinds: tuple[str, ...] = ("forward", "backward")
    gqa: int = 1  # heads / heads_kv of the backward; the forward takes any
    deterministic: bool = False
    lse_grad: bool = False
    windows: tuple[tuple[bool, bool], ...] = ((False, False),)  # sides with a limit
    lengths: tuple[bool, bool, bool, bool] | None = None  # which of compile.LENGTHS; None: dense
    negative_scale: bool = False


@dataclass(frozen=True)
class Outcome:
    """What became of one kernel."""

    request: Request
    state: str  # "compiled", "cached" or "failed"
    seconds: float
    message: str = ""


def requests(arch: Arch, wanted: Wanted) -> list[Request]:
    """The kernels that there are for what is wanted; raises UnsupportedError where one is not."""
    rows = [r for r in tune.FWD if arch.name in r.arches]
    dims = wanted.head_dims or tuple(dict.fromkeys((r.head_dim, r.head_dim_v) for r in rows))
    found = []
    for head_dim, head_dim_v in dims:
        for dtype in wanted.dtypes:
            for causal, window in product(wanted.masks, wanted.windows):
                if causal and window[1]:  # causal is that limit
                    continue
                shape = (dtype, head_dim, head_dim_v, causal)
                found += [_request(kind, shape, window, arch, wanted) for kind in wanted.kinds]
    return found


def _request(kind: str, shape: tuple, window: tuple, arch: Arch, wanted: Wanted) -> Request:
    varlen = wanted.lengths is not None
    lengths = wanted.lengths or (False,) * len(compile.LENGTHS)
    if kind == "forward":
        ratio = 1 if arch.family in tune.RATIO_AT_RUN_TIME else wanted.gqa
        negative = wanted.negative_scale and arch.family in tune.STATIC_SIGN
        spec = FwdSpec(*shape, ratio, window, varlen, negative)
    else:
        spec = BwdSpec(*shape, wanted.gqa, wanted.deterministic, window, varlen)
        spec = tune.preferred(spec, arch)
    missing = tune.beyond(kind, arch, any(window), varlen, wanted.negative_scale)
    if missing:
        raise UnsupportedError(f"{arch.name}: the {kind} kernel does not do: {', '.join(missing)}")
    if kind == "forward":
        return Request(kind, tune.forward(spec, arch), spec, arch, lengths=lengths)
    return Request(kind, tune.backward(spec, arch), spec, arch, wanted.lse_grad, lengths)


def here(request: Request, target: str) -> Outcome:
    """Compile in this process, unless the kernel is on disk."""
    state = "cached" if cache.find(compile.entry(request, target)) is not None else "compiled"
    start = time.perf_counter()
    with compile.wanted():
        compile.get(request, target)
    return Outcome(request, state, time.perf_counter() - start)


def default_workers() -> int:
    """FA_CUTE_COMPILE_WORKERS, or as many as this process may use cores."""
    given = os.environ.get("FA_CUTE_COMPILE_WORKERS", "").strip()
    if given:
        if not given.isdigit() or int(given) < 1:
            raise ArgumentError(f"FA_CUTE_COMPILE_WORKERS is {given!r}; it must be a positive int")
        return int(given)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count())
    return max(1, len(cores))


@dataclass
class _Running:
    request: Request
    process: subprocess.Popen
    log: IO[str]
    start: float


def in_processes(found: list[Request], target: str, workers: int):
    """Yield an Outcome per kernel as they come in.

    A process that takes longer than FA_CUTE_COMPILE_TIMEOUT is killed, and the outcome has the
    command that repeats it.
    """
    waiting, running, limit = deque(found), [], cache.lock_seconds()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(_start(waiting.popleft(), target))
            time.sleep(POLL_SECONDS)
            for job in list(running):
                if (outcome := _outcome(job, target, limit)) is not None:
                    running.remove(job)
                    yield outcome
    finally:
        for job in running:
            job.process.kill()
            job.process.wait()


def _start(request: Request, target: str) -> _Running:
    words = request.command(target).split()[1:]
    log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  closed by _outcome
    process = subprocess.Popen(
        [sys.executable, *words, "--workers", "0"], stdout=log, stderr=log, text=True
    )
    return _Running(request, process, log, time.perf_counter())


def _outcome(job: _Running, target: str, limit: float) -> Outcome | None:
    """What a process ended with; None while it runs."""
    seconds = time.perf_counter() - job.start
    code = job.process.poll()
    if code is None and seconds < limit:
        return None
    if code is None:
        job.process.kill()
        job.process.wait()
    with job.log:
        job.log.seek(0)
        text = job.log.read()
    done = Outcome(job.request, "failed", seconds)
    if code == 0:
        return replace(done, state="cached" if text.startswith("cached") else "compiled")
    why = f"not done after {limit:g} s (FA_CUTE_COMPILE_TIMEOUT)" if code is None else text.strip()
    command = job.request.command(target)
    return replace(done, message=why if command in why else f"{why}\n  to repeat it: {command}")
