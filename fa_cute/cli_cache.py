"""The commands about compiled kernels: warmup, cache ls, info, clear and verify."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from . import arch as archs
from . import cache, compile
from .errors import ArgumentError

OK, FOUND = 0, 1


def add_commands(commands) -> None:
    """Their options, added to the parser of `cli`."""
    warm = commands.add_parser("warmup", help="compile kernels before they are needed")
    warm.add_argument(
        "--arch", help="sm_100a, sm_90a, ...; default: this machine's, else simulated"
    )
    warm.add_argument("--target", choices=("cuda", "sim"), help="default: cuda where there is one")
    warm.add_argument("--dtype", nargs="+", choices=("bf16", "fp16"), default=["bf16"])
    warm.add_argument("--head-dim", type=int, nargs="+", help="default: those of the table")
    warm.add_argument("--head-dim-v", type=int, help="default: --head-dim")
    warm.add_argument("--mask", nargs="+", choices=("causal", "full"), default=["causal", "full"])
    warm.add_argument(
        "--window",
        nargs="+",
        choices=tuple(compile.WINDOWS.values()),
        default=["none"],
        help="which sides of a window have a limit; default: none",
    )
    warm.add_argument(
        "--varlen",
        nargs="+",
        choices=compile.LENGTHS,
        metavar="LENGTHS",
        help=f"kernels of flash_attn_varlen_func for these lengths: {', '.join(compile.LENGTHS)}",
    )
    warm.add_argument("--negative-scale", action="store_true", help="a softmax_scale below 0")
    warm.add_argument(
        "--pass",
        dest="kinds",
        nargs="+",
        choices=("forward", "backward"),
        default=["forward"],
        help="default: forward",
    )
    warm.add_argument("--gqa", type=int, default=1, help="heads / heads_kv of the backward")
    warm.add_argument("--deterministic", action="store_true", help="the repeatable backward")
    warm.add_argument("--lse-grad", action="store_true", help="a gradient of the LSE comes in")
    warm.add_argument("--workers", type=int, help="processes; 0: compile in this one")
    warm.set_defaults(run=run_warmup)

    kept = commands.add_parser("cache", help="kernels on disk")
    actions = kept.add_subparsers(required=True, metavar="ACTION")
    for name, run, text in (
        ("ls", run_ls, "one line per kernel"),
        ("info", run_info, "where, how many, how large"),
        ("verify", run_verify, "read and load every kernel; exit 1 if one is bad"),
    ):
        actions.add_parser(name, help=text).set_defaults(run=run)
    clear = actions.add_parser("clear", help="remove kernels")
    clear.add_argument("--stale", action="store_true", help="only those that nothing here loads")
    clear.set_defaults(run=run_clear)


def run_warmup(args) -> int:
    """Compile what was asked for."""
    from tqdm import tqdm

    from . import warmup
    from .api import default_arch
    from .dispatch import arch_of

    on_gpu = None in (args.target, args.arch) and _has_gpu()
    target = args.target or ("cuda" if on_gpu else "sim")
    if args.arch is not None:
        arch = archs.get(args.arch)
    else:
        arch = arch_of(_cuda_device()) if on_gpu and target == "cuda" else default_arch()
    dims = tuple((d, args.head_dim_v or d) for d in args.head_dim or ())
    if args.head_dim_v and not dims:
        raise ArgumentError("--head-dim-v needs --head-dim")
    wanted = warmup.Wanted(
        head_dims=dims,
        dtypes=tuple(args.dtype),
        masks=tuple(mask == "causal" for mask in args.mask),
        windows=tuple(sides for sides, name in compile.WINDOWS.items() if name in args.window),
        lengths=args.varlen and tuple(name in args.varlen for name in compile.LENGTHS),
        negative_scale=args.negative_scale,
        kinds=tuple(args.kinds),
        gqa=args.gqa,
        deterministic=args.deterministic,
        lse_grad=args.lse_grad,
    )
    found = warmup.requests(arch, wanted)
    workers = warmup.default_workers() if args.workers is None else args.workers
    if workers == 0:
        outcomes = (warmup.here(request, target) for request in found)
    else:
        outcomes = warmup.in_processes(found, target, workers)
    failed = 0
    with tqdm(total=len(found), unit="kernel", disable=None, file=sys.stderr) as bar:
        for outcome in outcomes:
            bar.update()
            bar.write(f"{outcome.state} in {outcome.seconds:.1f} s: {outcome.request}", sys.stdout)
            failed += outcome.state == "failed"
            if outcome.message:
                bar.write(outcome.message, sys.stderr)
    return FOUND if failed else OK


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _cuda_device():
    import torch

    return torch.device("cuda", torch.cuda.current_device())


def described(path: Path) -> dict[str, str]:
    """One line of `cache ls`: what a file says about itself."""
    line = {"kernel": path.name, "KiB": "", "made": "", "state": "bad"}
    data = cache.read_file(path)
    if data is None:
        return {**line, "state": "not ours"}
    status = path.stat()
    line["KiB"] = f"{status.st_size / 1024:.0f}"
    line["made"] = time.strftime("%Y-%m-%d %H:%M", time.localtime(status.st_mtime))
    try:
        header, _ = cache.unpack(data)
        made_of = header["made_of"]
        request = made_of["parts"][0][1]
        spec = request["spec"][1]
        words = ["causal" if spec["causal"] else "full"]
        if any(spec["window"]):
            words.append(f"window {compile.WINDOWS[tuple(spec['window'])]}")
        words += ["varlen"] * spec["varlen"]
        line["kernel"] = " ".join(
            (
                request["arch"][1]["name"],
                request["kind"],
                f"d{spec['head_dim']}",
                spec["dtype"],
                *words,
                made_of["target"],
            )
        )
        line["state"] = "current" if is_current(made_of) else "stale"
    except (cache.BadEntryError, KeyError, IndexError, TypeError):
        pass
    return line


def is_current(made_of: dict) -> bool:
    """Whether these sources and versions made an entry."""
    return made_of["sources"] == cache.source_hash() and made_of["versions"] == cache.versions()


def run_ls(args) -> int:
    """Print every kernel."""
    from .cli import text_table

    lines = [described(path) for path in cache.entries()]
    print(text_table(lines) if lines else f"no kernels in {cache.root()}")
    return OK


def run_info(args) -> int:
    """Print where the kernels lie and how many there are."""
    files = cache.entries()
    size = sum(path.stat().st_size for path in files)
    states = [described(path)["state"] for path in files]
    counts = {state: states.count(state) for state in dict.fromkeys(states)}
    print(f"folder   {cache.root()}")
    print(f"mode     {cache.mode()}")
    print(f"kernels  {len(files)}{' ' + json.dumps(counts) if counts else ''}")
    print(f"size     {size / 2**20:.1f} MiB")
    return OK


def run_clear(args) -> int:
    """Remove kernels."""
    removed = 0
    for path in cache.entries():
        if not args.stale or described(path)["state"] in ("stale", "bad"):
            path.unlink(missing_ok=True)
            removed += 1
    print(f"removed {removed} of {cache.root()}")
    return OK


def run_verify(args) -> int:
    """Read and load every kernel of these sources and versions."""
    faults = 0
    for path in cache.entries():
        line = described(path)
        state = line["state"]
        if state == "current":
            _, payload = cache.unpack(path.read_bytes())
            try:
                (compile.load_sim if path.suffix == ".sim" else compile.load_cuda)(payload)
            except Exception as error:  # what a bad file does to a loader is the finding
                state = f"does not load: {type(error).__name__}: {error}"
        faults += state not in ("current", "stale")
        print(f"{path.name}  {line['kernel']}  {state}")
    return FOUND if faults else OK
