"""The commands that look at kernels: plan, regs, and pages, which writes docs/kernels."""

from __future__ import annotations

import json
from dataclasses import fields
from itertools import product
from pathlib import Path

from . import arch as archs
from . import tune
from .compile import WINDOWS, Request
from .errors import ArgumentError, UnsupportedError
from .plan import show

OK, FOUND = 0, 1
KINDS = {"fwd": "forward", "bwd": "backward"}
TABLE_BEGIN = "<!-- support table: make pages -->"
TABLE_END = "<!-- end of support table -->"
SPILLS = ("stack", "spill loads", "spill stores")
PACKED = (True, True, False, False)  # of compile.LENGTHS
HELPERS = ("Preprocess", "Postprocess", "Prepare")  # kernels that are launched beside a main one


def add_commands(commands) -> None:
    """Their options, added to the parser of `cli`."""
    plan = commands.add_parser("plan", help="a kernel's warps, registers, pipelines, memory maps")
    plan.add_argument("arch", help="sm_100a, sm100, sm_90a, ...")
    plan.add_argument("direction", choices=tuple(KINDS), help="which kernel")
    plan.add_argument("--head-dim", type=int, default=128)
    plan.add_argument("--head-dim-v", type=int, default=None, help="default: --head-dim")
    plan.add_argument("--causal", action="store_true", help="the causal configuration")
    plan.add_argument("--gqa", type=int, default=1, help="heads / heads_kv of the backward")
    plan.add_argument("--deterministic", action="store_true", help="the repeatable backward")
    plan.add_argument("--window", choices=tuple(WINDOWS.values()), default="none")
    plan.add_argument("--json", action="store_true")
    plan.set_defaults(run=run_plan)

    regs = commands.add_parser("regs", help="compile: registers, spills, shared memory")
    regs.add_argument("--arch", help="only this one; default: all")
    regs.add_argument("--head-dim", type=int, help="only this one")
    regs.add_argument("--dtype", choices=tune.DTYPES, default="bf16")
    regs.add_argument("--mask", nargs="+", choices=("causal", "full"), default=["causal", "full"])
    regs.add_argument("--pass", dest="kinds", nargs="+", choices=tuple(KINDS.values()))
    regs.add_argument("--gqa", type=int, default=1, help="heads / heads_kv of the backward")
    regs.add_argument("--deterministic", action="store_true", help="the repeatable backward")
    regs.add_argument("--window", nargs="+", choices=tuple(WINDOWS.values()), default=["none"])
    regs.add_argument("--varlen", action="store_true", help="sequences packed by cu_seqlens")
    regs.add_argument("--json", action="store_true")
    regs.add_argument(
        "--diff", nargs=2, type=Path, metavar=("OLD", "NEW"), help="compare two outputs of --json"
    )
    regs.set_defaults(run=run_regs)

    pages = commands.add_parser("pages", help="write a page per kernel from the plans")
    pages.add_argument("folder", type=Path, help="where to: docs/kernels")
    pages.add_argument(
        "--table", type=Path, help="a file whose support table is renewed: README.md"
    )
    pages.set_defaults(run=run_pages)


def sides(names: list[str]) -> tuple[tuple[bool, bool], ...]:
    """Which sides of the mask have a limit, by their names on the command line."""
    return tuple(found for found, name in WINDOWS.items() if name in names)


def run_plan(args) -> int:
    """Print one kernel's plan."""
    from . import warmup

    arch, kind = archs.get(args.arch), KINDS[args.direction]
    dims = (args.head_dim, args.head_dim if args.head_dim_v is None else args.head_dim_v)
    wanted = warmup.Wanted(
        head_dims=(dims,),
        dtypes=("bf16",),
        masks=(args.causal,),
        kinds=(kind,),
        gqa=args.gqa,
        deterministic=args.deterministic,
        windows=sides([args.window]),
    )
    try:
        found = warmup.requests(arch, wanted)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{arch.name} has no {kind} kernel for head_dim {dims[0]} with head_dim_v {dims[1]}; "
            f"implemented: {tune.summary(arch)}"
        ) from error
    if not found:
        raise ArgumentError("--causal is the limit on the right, 0; --window left or none with it")
    (request,) = found
    if args.json:
        print(json.dumps({"kernel": request.label, **show.to_dict(request.cfg)}, indent=2))
    else:
        print(show.text(request.cfg, f"{request.where[1]} {request.label}"), end="")
    return OK


def requests(
    arch: str | None = None, head_dim: int | None = None, kinds=None, **options
) -> list[Request]:
    """The kernels that the tables have and the filters leave; ``options`` as in warmup.Wanted."""
    from . import warmup

    names = list(archs.ARCHS) if arch is None else [archs.get(arch).name]
    found = []
    for target in map(archs.get, names):
        for kind in kinds or KINDS.values():
            for dims in dict.fromkeys((r.head_dim, r.head_dim_v) for r in tune.FWD):
                if head_dim not in (None, dims[0]):
                    continue
                try:
                    wanted = warmup.Wanted(head_dims=(dims,), kinds=(kind,), **options)
                    found += warmup.requests(target, wanted)
                except UnsupportedError:
                    pass  # this architecture lacks it
    return found


def run_regs(args) -> int:
    """Compile kernels and print what the assembler gave them."""
    if args.diff:
        return run_diff(*(json.loads(path.read_text()) for path in args.diff))
    wanted = {
        "dtypes": (args.dtype,),
        "masks": tuple(mask == "causal" for mask in args.mask),
        "gqa": args.gqa,
        "deterministic": args.deterministic,
        "windows": sides(args.window),
        "lengths": PACKED if args.varlen else None,
    }
    found = []
    for request in requests(args.arch, args.head_dim, args.kinds, **wanted):
        for part, usage in parts(request):
            found.append(
                {
                    "kernel": request.label,
                    "part": part,
                    "regs": usage.regs,
                    "threads": usage.threads,
                    "stack": usage.stack_bytes,
                    "spill loads": usage.local_loads,
                    "spill stores": usage.local_stores,
                    "smem": request.cfg.smem.total if part == "main" else usage.static_smem_bytes,
                    "instructions": usage.instructions,
                }
            )
    if not found:
        raise UnsupportedError("no configuration fits --arch and --head-dim")
    from .cli import text_table

    print(json.dumps(found, indent=2) if args.json else text_table(found))
    return FOUND if any(r["stack"] or r["spill loads"] for r in found) else OK


def run_diff(old: list[dict], new: list[dict]) -> int:
    """Print what two outputs of regs differ in; exit 1 if a kernel spills that did not."""
    from .cli import text_table

    before, after = ({(r["kernel"], r["part"]): r for r in rows} for rows in (old, new))
    lines, worse = [], 0
    for key in dict.fromkeys((*before, *after)):
        a, b = before.get(key, {}), after.get(key, {})
        for what in dict.fromkeys((*a, *b)):
            if a.get(what) != b.get(what) and what not in ("kernel", "part"):
                line = {"kernel": key[0], "part": key[1], "what": what}
                lines.append({**line, "old": a.get(what, "-"), "new": b.get(what, "-")})
                worse += what in SPILLS and (b.get(what) or 0) > (a.get(what) or 0)
    print(text_table(lines) if lines else "no difference")
    return FOUND if worse else OK


def parts(request: Request) -> list[tuple[str, object]]:
    """Compile: (name, resources) of each kernel that a call launches, the main one first."""
    from . import compile, resources

    found = []
    for usage in resources.of_cubin(compile.cubin(request)):
        helper = [name.lower() for name in HELPERS if name in usage.kernel]
        found.append((helper[0] if helper else "main", usage))
    return sorted(found, key=lambda part: part[0] != "main")


def run_pages(args) -> int:
    """Write the page of every kernel."""
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (args.folder / name).write_text(text)
        print(args.folder / name)
    if args.table is not None:
        args.table.write_text(with_table(args.table.read_text()))
        print(args.table)
    return OK


def with_table(text: str) -> str:
    """A page with its support table renewed."""
    from .cli import markdown_table, support_rows

    before, begin, rest = text.partition(TABLE_BEGIN)
    _, end, after = rest.partition(TABLE_END)
    if not begin or not end:
        raise ArgumentError(f"no support table: it stands between {TABLE_BEGIN} and {TABLE_END}")
    return f"{before}{begin}\n{markdown_table(support_rows())}\n{end}{after}"


def pages() -> dict[str, str]:
    """File name -> text, one page per kernel class."""
    kernels: dict[str, list[Request]] = {}
    told = set()
    kinds = (("none", None), ("left", None), ("none", PACKED))  # windows, lengths
    for (window, lengths), deterministic in product(kinds, (False, True)):
        wanted = {"windows": sides([window]), "deterministic": deterministic, "lengths": lengths}
        for request in requests(dtypes=("bf16",), **wanted):
            if (window != "none" or lengths) and request.cfg in told:
                continue  # it changes the configuration in few cases
            told.add(request.cfg)
            if request.kind == "backward" or not deterministic:  # a forward always is
                file = f"{request.label.split('-')[1]}_{request.arch.family}.md"
                kernels.setdefault(file, []).append(request)
    return {file: page(found) for file, found in kernels.items()}


def page(found: list[Request]) -> str:
    """A kernel's documentation: what its plan's module says, its configurations, their plans."""
    from .cli import markdown_table

    rows = [{f.name: getattr(r.cfg, f.name) for f in fields(r.cfg)} for r in found]
    told = [column for column in rows[0] if len({str(row[column]) for row in rows}) > 1]
    table = [
        {"kernel": request.label, **{column: row[column] for column in told}}
        for request, row in zip(found, rows)
    ]
    same = [f"`{column}={value}`" for column, value in rows[0].items() if column not in told]
    plans: dict[tuple, str] = {}  # of each head dim the first one
    for request in found:
        dims = (request.spec.head_dim, request.spec.head_dim_v)
        text = f"### {request.label}\n\n```text\n{show.text(request.cfg)}```\n"
        plans.setdefault(dims, text)
    command = "`python -m fa_cute plan ARCH fwd|bwd --head-dim N --causal --deterministic`"
    return "\n".join(
        (
            show.heading(found[0].cfg, found[0].where[1]),
            "<!-- written by `make pages` -->\n",
            f"## Configurations\n\n{markdown_table(table)}\n",
            f"In all of them: {', '.join(same)}.\n",
            f"## Plans\n\nOne per head dim; {command} prints the others.\n",
            "\n".join(plans.values()),
        )
    )
