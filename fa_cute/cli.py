"""The command line: plan, regs, pages, support, warmup, cache, doctor.

Exit codes: 0 fine, 1 something found (unsupported, spills, a failed check), 2 wrong usage, 3 the
environment lacks what the command needs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from importlib import metadata

from . import __version__, cli_cache, cli_kernels
from . import arch as archs
from .errors import CompileError, FaCuteError, UnsupportedError

OK, FOUND, USAGE, ENVIRONMENT = 0, 1, 2, 3
VARIABLES = {
    "FA_CUTE_ARCH": "what CPU tensors are simulated on (sm_100a)",
    "FA_CUTE_BACKEND": "backend for backend='auto': cuda, sim or reference",
    "FA_CUTE_CACHE": "kernels on disk: rw, ro or off (rw)",
    "FA_CUTE_CACHE_DIR": "folder of the kernel cache (~/.cache/fa_cute)",
    "FA_CUTE_COMPILE_TIMEOUT": "seconds that a compile may take (600)",
    "FA_CUTE_COMPILE_WORKERS": "processes of warmup (cores)",
    "FA_CUTE_DETERMINISTIC": "1: deterministic=None means True",
    "FA_CUTE_JIT_MONITOR": "off, warn or error: what a compile does (off)",
    "FA_CUTE_LOCK_DIR": "local folder of the compile locks (the temporary folder)",
    "FA_CUTE_LOG": "debug, info, warning or error (warning)",
    "FA_CUTE_SIM_JIT": "0: the simulator interprets everything in Python (1)",
    "FA_CUTE_SIM_SCHEDULE": "when simulated asynchronous work completes: early, late, random:N",
}
COLUMNS = (
    "arch",
    "head_dim",
    "forward",
    "causal",
    "fp16",
    "GQA/MQA",
    "window",
    "varlen",
    "scale < 0",
    "softcap",
    "sink",
    "backward",
    "deterministic",
)
PACKAGES = (
    "torch",
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "apache-tvm-ffi",
    "cuda-python",
    "numpy",
)
OPTIONAL = {
    "matplotlib": "timeline pictures",
    "nvidia-cuda-nvdisasm": "SASS",
    "sentryward": "static proofs on PTX",
    "flash-attn-4": "comparison",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = parser().parse_args(argv)
    try:
        return args.run(args)
    except BrokenPipeError:  # who reads the output has seen enough: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except CompileError as error:
        print(f"fa_cute: {error}", file=sys.stderr)
        return ENVIRONMENT
    except FaCuteError as error:
        print(f"fa_cute: {error}", file=sys.stderr)
        return FOUND if isinstance(error, UnsupportedError) else USAGE


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    top = argparse.ArgumentParser(
        prog="fa_cute", description="Attention in CuTe DSL: look at its kernels."
    )
    top.add_argument("--version", action="version", version=f"fa_cute {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    support = commands.add_parser("support", help="what there are kernels for")
    support.add_argument("--arch", help="only this one; default: all")
    support.add_argument("--head-dim", type=int, help="only this one; exit 1 if unsupported")
    form = support.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true")
    form.add_argument("--json", action="store_true")
    support.set_defaults(run=run_support)

    cli_kernels.add_commands(commands)
    cli_cache.add_commands(commands)
    doctor = commands.add_parser("doctor", help="versions, devices, cache, a sample compile")
    doctor.add_argument("--no-compile", action="store_true", help="skip the sample compile")
    doctor.set_defaults(run=run_doctor)
    return top


def run_support(args) -> int:
    """Print the support matrix, or what part of it was asked for."""
    rows = support_rows(args.arch, args.head_dim)
    if args.json:
        print(json.dumps(rows, indent=2))
    elif args.markdown:
        print(markdown_table(rows))
    else:
        print(text_table(rows))
    asked = args.arch is not None or args.head_dim is not None
    if not asked or any(r["forward"] == "yes" for r in rows):
        return OK
    from .api import supports

    for arch in dict.fromkeys(r["arch"] for r in rows):
        for reason in supports(arch=arch, head_dim=args.head_dim or 128).reasons:
            print(f"{arch}: {reason}", file=sys.stderr)
    return FOUND


def support_rows(arch: str | None = None, head_dim: int | None = None) -> list[dict[str, str]]:
    """One row per architecture and head dim, each cell an answer of `supports`."""
    from . import tune
    from .api import supports

    names = list(archs.ARCHS) if arch is None else [archs.get(arch).name]
    dims = sorted({(r.head_dim, r.head_dim_v) for r in tune.FWD})
    if head_dim is not None:
        dims = [d for d in dims if d[0] == head_dim] or [(head_dim, head_dim)]
    rows = []
    for name in names:
        ready = any(name in r.arches for r in tune.FWD)
        if not ready and head_dim is None:
            rows.append({**dict.fromkeys(COLUMNS, "-"), "arch": name})
            continue
        own = {(r.head_dim, r.head_dim_v) for r in tune.FWD if name in r.arches}
        for d, dv in dims if head_dim is not None else sorted(own):

            def answer(name=name, d=d, dv=dv, **options) -> str:
                found = supports(arch=name, head_dim=d, head_dim_v=dv, **options)
                return "yes" if found else "-"

            def both(answer=answer, **options) -> str:
                forward = answer(**options)
                return forward if answer(backward=True, **options) == forward else "forward"

            cells = (
                name,
                str(d) if d == dv else f"{d}, {dv}",
                answer(),
                answer(causal=True),
                answer(dtype="fp16"),
                answer(qhead_per_kvhead=4),
                both(window_size=(128, 0)),
                both(varlen=True),
                both(softmax_scale=-1.0),
                answer(softcap=30.0),
                answer(sink=True),
                answer(backward=True),
                answer(backward=True, deterministic=True),
            )
            rows.append(dict(zip(COLUMNS, cells)))
    return rows


def run_doctor(args) -> int:
    """Print what this installation consists of and whether its parts work."""
    faults = missing = 0
    print(f"fa_cute {__version__}, Python {sys.version.split()[0]}, {sys.platform}")
    for name in PACKAGES:
        version = _version(name)
        optional = "-libs-" in name
        missing += version is None and not optional
        print(f"  {name:30} {version or ('-' if optional else 'MISSING')}")
    for name, use in OPTIONAL.items():
        print(f"  {name:30} {_version(name) or f'- (optional: {use})'}")
    print(f"  {'nvdisasm':30} {shutil.which('nvdisasm') or '- (optional: SASS)'}")
    print(_driver())
    print(_devices())
    for line, fault in (_cache_state(), *_environment()):
        faults += fault
        print(line)
    if not args.no_compile and not missing:
        line, fault = _sample_compile()
        faults += fault
        print(line)
    return ENVIRONMENT if missing else FOUND if faults else OK


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str:
    """The version of CUDA that the installed driver goes up to."""
    try:
        from cuda.bindings import driver

        status, version = driver.cuDriverGetVersion()
    except (ImportError, RuntimeError) as error:  # no libcuda
        return f"driver: none ({str(error).splitlines()[0]})"
    if int(status) != 0:
        return f"driver: answered {status}"
    return f"driver: CUDA {version // 1000}.{version % 1000 // 10}"


def _devices() -> str:
    try:
        import torch

        if not torch.cuda.is_available():
            return "devices: no CUDA device; CPU tensors run in the simulator"
        lines = []
        for i in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(i)
            lines.append(f"device {i}: {torch.cuda.get_device_name(i)}, sm_{major}{minor}")
        return "\n".join(lines)
    except ImportError:
        return "devices: torch is missing"


def _cache_state() -> tuple[str, bool]:
    from . import cache

    root = cache.root()
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=root):
            pass
    except OSError as error:
        return f"cache: {root} cannot be written: {error}", True
    entries = cache.entries()
    size = sum(p.stat().st_size for p in entries)
    return f"cache: {root} ({cache.mode()}), {len(entries)} kernels, {size / 2**20:.1f} MiB", False


def _environment():
    """(line, whether it is a fault) for every FA_CUTE_ variable that is set."""
    for name, value in sorted(os.environ.items()):
        if name.startswith("FA_CUTE_"):
            known = name in VARIABLES
            yield f"environment: {name}={value}" + ("" if known else "  UNKNOWN NAME"), not known


def _sample_compile() -> tuple[str, bool]:
    import time

    request = cli_kernels.requests(kinds=("forward",), dtypes=("bf16",))[0]
    name = request.label
    start = time.perf_counter()
    try:
        usage = cli_kernels.parts(request)[0][1]
    except Exception as error:  # whatever the DSL raises is the finding
        return f"sample compile: {name} failed: {type(error).__name__}: {error}", True
    seconds = time.perf_counter() - start
    return f"sample compile: {name} in {seconds:.1f} s, {usage.regs} registers at launch", False


def text_table(rows: list[dict]) -> str:
    """Columns padded to their widest cell."""
    head = list(rows[0])
    cells = [head, *([str(r[h]) for h in head] for r in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in cells)


def markdown_table(rows: list[dict]) -> str:
    """The same as a Markdown table."""
    head = list(rows[0])
    lines = [head, ["---"] * len(head), *([str(r[h]) for h in head] for r in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
