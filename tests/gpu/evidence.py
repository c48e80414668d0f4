"""Everything that only a GPU can show, in one run: `python -m tests.gpu.evidence [--phases ...]`.

Not collected by pytest. Phases, in this order, each with jobs that run side by side (they compile
on the CPU most of the time) or alone (those that time):

    numbers   forward and gradients against fp64, 1,000 deterministic runs under load, memory
              checker, operators (graphs, streams), bytes allocated, results for the simulator
    speed     benchmarks.attention, all rows
    host      host time of a warm call
    varlen    sequences of any lengths beside flash-attn-4
    counters  ncu per row

Writes `$OUT/evidence.json` (per job: command, exit code, seconds, what it wrote, its last lines)
after every job, `h200.json` and `h200.npz`. Jobs that would start after `--limit` seconds are
recorded as not run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

PY = (sys.executable, "-W", "ignore")
OUT = Path(os.environ.get("OUT", "."))
KEPT = ("h200.json", "h200.npz", "binds.json")  # copied to $OUT as they are
TAIL = 3000  # characters
VARLEN_DIMS = os.environ.get("VARLEN_DIMS", "64:96:128:192,128:256").split(":")


@dataclass
class Job:
    """A command with its own folder for what it writes."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    folder: str = field(default_factory=lambda: tempfile.mkdtemp(prefix="fa_cute_evidence_"))

    def start(self) -> tuple[subprocess.Popen, float]:
        environment = os.environ | {
            "OUT": self.folder,
            "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        }
        command = [part.replace("{out}", self.folder) for part in self.command]
        with open(os.path.join(self.folder, "log.txt"), "w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        return process, time.monotonic()

    def result(self, code, seconds: float) -> dict:
        """What the job left."""
        folder = Path(self.folder)
        wrote = {}
        for file in sorted(folder.iterdir()):
            if file.name in KEPT:
                (OUT / file.name).write_bytes(file.read_bytes())
            elif file.suffix == ".json":
                wrote[file.name] = json.loads(file.read_text() or "null")
            elif file.suffix == ".jsonl":
                wrote[file.name] = [json.loads(line) for line in file.read_text().splitlines()]
        log = (folder / "log.txt").read_text(errors="replace")
        return {
            "job": self.name,
            "command": " ".join(self.command),
            "code": code,
            "seconds": round(seconds, 1),
            "wrote": wrote,
            "log": log[-TAIL:],
        }


def numbers() -> list[Job]:
    """What may run side by side."""
    # Asking the driver whether a function has an attribute is an "API error" too.
    checker = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9")
    checker += ("--report-api-errors", "no")
    jobs = [
        Job(
            "against the simulator",
            (*PY, "-m", "tests.gpu.against_sim", "record", "{out}/h200.npz"),
            150,
        )
    ]
    for dims in ("64", "128", "256", "96", "192"):
        jobs.append(Job(f"forward {dims}", (*PY, "-m", "tests.gpu.fwd", dims), 200))
    for dims in ("64", "96", "128", "192,128", "192", "256"):
        jobs.append(Job(f"backward {dims}", (*PY, "-m", "tests.gpu.bwd", "numbers", dims), 200))
    for dims in ("64", "128", "256"):
        jobs.append(Job(f"repeat {dims}", (*PY, "-m", "tests.gpu.bwd", "repeat", dims), 240))
        small = (*PY, "-m", "tests.gpu.bwd", "small", dims)
        jobs.append(Job(f"memcheck {dims}", (*checker, *small), 240))
    # It does not know that an mbarrier orders what the copy engine writes: it is to be read.
    races = ("compute-sanitizer", "--tool", "racecheck", "--racecheck-report", "all")
    small = (*PY, "-m", "tests.gpu.bwd", "small", "128")
    jobs.append(Job("racecheck 128", (*races, "--report-api-errors", "no", *small), 100))
    for dims in VARLEN_DIMS:
        numbers_of = (*PY, "-m", "tests.gpu.varlen", "numbers", dims)
        jobs.append(Job(f"varlen {dims}", numbers_of, 240))
    for which in ("fwd", "bwd", "det"):
        jobs.append(Job(f"warm {which}", (*PY, "-m", "tests.gpu.varlen", "warm", which), 150))
    jobs.append(Job("repeat varlen", (*PY, "-m", "tests.gpu.varlen", "repeat"), 240))
    jobs.append(Job("operators", (*PY, "-m", "tests.gpu.front"), 200))
    jobs.append(Job("memory", (*PY, "-m", "tests.gpu.memory"), 150))
    return jobs


def alone(phase: str, commit: str) -> list[Job]:
    """What needs the GPU for itself."""
    attention = (*PY, "-m", "benchmarks.attention")
    rows = ("--rounds", "11", "--patience", "90", "--commit", commit, "--out", "{out}")
    return {
        "speed": [Job("speed", (*attention, *rows), 280)],
        "varlen": [Job("speed of varlen", (*PY, "-m", "tests.gpu.varlen", "speed"), 280)],
        "host": [Job("host", (*PY, "-m", "benchmarks.host_time", "--out", "{out}"), 60)],
        "counters": [Job("counters", (*PY, "-m", "benchmarks.binds", "--out", "{out}"), 240)],
    }[phase]


class Record:
    """evidence.json, as far as it has come."""

    def __init__(self):
        self.lines: list[dict] = []

    def add(self, line: dict) -> None:
        self.lines.append(line)
        print(f"{line['job']}: code {line['code']}, {line['seconds']} s", flush=True)
        (OUT / "evidence.json").write_text(json.dumps(self.lines, indent=1))


def together(jobs: list[Job], record: Record) -> None:
    """All at once; each is stopped at its limit."""
    running = [(job, *job.start()) for job in jobs]
    while running:
        time.sleep(0.2)
        for item in list(running):
            job, process, began = item
            seconds = time.monotonic() - began
            if process.poll() is None and seconds > job.limit_s:
                process.kill()
                process.wait()
            if process.poll() is not None:
                running.remove(item)
                record.add(job.result(process.returncode, seconds))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--phases", default="numbers,speed,host,varlen,counters")
    parser.add_argument("--limit", type=float, default=580.0, help="seconds in all")
    parser.add_argument("--commit", default="")
    parser.add_argument("--skip", default="", help="jobs whose names begin so, comma separated")
    options = parser.parse_args()
    began, record = time.monotonic(), Record()
    skipped = tuple(filter(None, options.skip.split(",")))
    for phase in options.phases.split(","):
        jobs = numbers() if phase == "numbers" else alone(phase, options.commit)
        jobs = [job for job in jobs if not job.name.startswith(skipped)]
        if time.monotonic() - began > options.limit:
            for job in jobs:
                record.add(_not_run(job))
            continue
        if phase == "numbers":
            together(jobs, record)
        else:
            for job in jobs:
                together([job], record)
    return 1 if any(line["code"] != 0 for line in record.lines) else 0


def _not_run(job: Job) -> dict:
    return {"job": job.name, "command": " ".join(job.command), "code": "not run", "seconds": 0.0}


if __name__ == "__main__":
    sys.exit(main())
