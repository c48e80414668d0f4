"""Instructions in which the lanes of a warp see each other."""

from __future__ import annotations

from fa_cute.sim.jit import math
from fa_cute.sim.jit.ir import CONVERGE, LANES, NEXT, Fn, Val, vec
from fa_cute.sim.jit.registry import INT_TYPES, Form, Spec, Unsupported, op


def _first(f: Fn, mask: Val | None = None) -> Val:
    return f.intrinsic("cttz", [mask or f.mask], "i32", "<{is_zero_poison = true}>")


def _uniform(f: Fn, slot: int) -> Val:
    """The operand of the first executing lane."""
    return f.load(f.row(slot).gep(_first(f).int("i64").shl(2)), "i32")


def _need_members(f: Fn, slot: int) -> None:
    """All live lanes of the member mask must be here; else wait for them (or report)."""
    members = _uniform(f, slot)
    absent = members & f.field("live") & ~f.mask
    with f.when(absent.ne(0)):
        f.done(CONVERGE)


@op("shfl")
def shfl(form: Form) -> Spec:
    """shfl.sync.mode.b32 d|p, a, b, c, members."""
    form.rest("sync", "idx", "up", "down", "bfly", "b32")
    mode = form.mods[1]
    if form.mods[0] != "sync":
        raise Unsupported("shfl without .sync")

    def emit(f: Fn) -> None:
        _need_members(f, 5)
        source, b, c = f.args(2, 3, 4)
        lane = f.lanes(list(range(LANES)))
        b = b & 31
        segment, clamp = c.lshr(8) & 31, c & 31
        low = lane & segment
        bound = low | (clamp & ~segment)
        if mode == "up":
            target = lane - b
            good = target.cmp("sge", bound)
        else:
            target = {
                "down": lambda: lane + b,
                "bfly": lambda: lane ^ b,
                "idx": lambda: low | (b & ~segment),
            }[mode]()
            good = target.cmp("sle", bound)
        target = good.select(target, lane) & 31
        buffer, picks, result = (f.alloca(vec("i32")) for _ in range(3))
        f.store(source, buffer, 64)
        f.store(target, picks, 64)
        with f.each_lane() as index:
            offset = index.int("i64").shl(2)
            pick = f.load(picks.gep(offset), "i32").int("i64").shl(2)
            f.store(f.load(buffer.gep(pick), "i32"), result.gep(offset))
        f.out(0, f.load(result, vec("i32"), 64))
        f.out(1, good)
        f.done()

    return Spec(("=i32", "=pred", "i32", "i32", "i32", "i32"), emit)


@op("vote")
def vote(form: Form) -> Spec:
    form.rest("sync", "all", "any", "uni", "ballot", "pred", "b32")
    kind = form.mods[1]

    def emit(f: Fn) -> None:
        _need_members(f, 2)
        yes = f.arg(1) & f.mask & _uniform(f, 2)
        members = f.mask & _uniform(f, 2)
        if kind == "ballot":
            f.out(0, f.splat(yes))
        else:
            every, some = yes.eq(members), yes.ne(0)
            holds = {"all": every, "any": some, "uni": every | ~some}[kind]
            f.out(0, holds.select(f.const(-1, "i32"), 0))
        f.done()

    return Spec(("=i32" if kind == "ballot" else "=pred", "pred", "i32"), emit)


@op("match")
def match(form: Form) -> Spec:
    form.rest("sync", "any", "all", "b32", "b64")
    elem = INT_TYPES[form.type][0]
    shift = 2 if elem == "i32" else 3

    def emit(f: Fn) -> None:
        _need_members(f, 3)
        members = f.mask & _uniform(f, 3)
        value = f.arg(2)
        row = f.alloca(vec(elem))
        result = f.alloca(vec("i32"))
        f.store(value, row, 64)
        if form.has("all"):
            first = f.load(row.gep(_first(f, members).int("i64").shl(shift)), elem)
            same = f.to_mask(value.eq(f.splat(first))) & members
            every = same.eq(members)
            f.out(0, f.splat(every.select(members, 0)))
            f.out(1, every.select(f.const(-1, "i32"), 0))
        else:
            with f.each_lane() as lane:
                mine = f.load(row.gep(lane.int("i64").shl(shift)), elem)
                same = f.to_mask(f.load(row, vec(elem), 64).eq(f.splat(mine))) & members
                f.store(same, result.gep(lane.int("i64").shl(2)))
            f.out(0, f.load(result, vec("i32"), 64))
            f.out(1, f.const(-1, "i32"))
        f.done()

    return Spec(("=i32", "=pred", elem, "i32"), emit)


@op("activemask")
def activemask(form: Form) -> Spec:
    form.rest("b32")

    def emit(f: Fn) -> None:
        f.out(0, f.splat(f.mask))
        f.done()

    return Spec(("=i32",), emit)


@op("elect")
def elect(form: Form) -> Spec:
    """elect.sync d|p, members: the lowest lane."""
    form.rest("sync")

    def emit(f: Fn) -> None:
        _need_members(f, 2)
        lane = _first(f)
        f.out(0, f.splat(lane))
        f.out(1, f.const(1, "i32").shl(lane))
        f.done()

    return Spec(("=i32", "=pred", "i32"), emit)


_REDUX = {
    "add": ("add", 0),
    "and": ("and", -1),
    "or": ("or", 0),
    "xor": ("xor", 0),
}


@op("redux")
def redux(form: Form) -> Spec:
    form.rest("sync", "add", "min", "max", "and", "or", "xor", "abs", "NaN", form.type)
    kind = form.mods[1]
    if form.type == "f32":
        return _redux_float(form, kind)
    signed = form.type == "s32"
    if kind in _REDUX:
        name, identity = _REDUX[kind]
    else:
        name = ("s" if signed else "u") + kind
        ends = {"smin": 0x7FFFFFFF, "smax": -0x80000000, "umin": -1, "umax": 0}
        identity = ends[name]

    def emit(f: Fn) -> None:
        _need_members(f, 2)
        value = f.lane_mask().select(f.arg(1), identity)
        result = f.intrinsic(f"vector.reduce.{name}", [value], "i32")
        f.out(0, f.splat(result))
        f.done()

    return Spec(("=i32", "i32", "i32"), emit)


def _redux_float(form: Form, kind: str) -> Spec:
    def emit(f: Fn) -> None:
        _need_members(f, 2)
        value = f.arg(1)
        if form.has("abs"):
            value = value.call("fabs")
        # Other lanes repeat the first one's value, so that they change nothing.
        row = f.alloca(vec("f32"))
        f.store(value, row, 64)
        first = f.load(row.gep(_first(f).int("i64").shl(2)), "f32")
        value = f.lane_mask().select(value, f.splat(first))
        width = LANES // 2
        while width:
            order = ", ".join(str((i + width) % LANES) for i in range(LANES))
            text = f"llvm.shufflevector {value.name}, {value.name} [{order}] : {value.ty}"
            other = f.emit(text, value.ty)
            value = math.min_max(value, other, kind, form.has("NaN"))
            width //= 2
        f.out(0, value)
        f.done()

    return Spec(("=f32", "f32", "i32"), emit)


@op("clock")
def clock(form: Form) -> Spec:
    """Not PTX: a move from a clock or timer, which counts the warp's instructions."""
    form.rest("hi", "u32", "u64", "b32", "b64")
    elem = INT_TYPES[form.type][0]

    def emit(f: Fn) -> None:
        count = f.field("count")
        f.out(0, f.splat((count.lshr(32) if form.has("hi") else count).int(elem)))
        f.done()

    return Spec((f"={elem}",), emit)


def _converged(f: Fn) -> None:
    _need_members(f, 0)
    f.done(NEXT)


@op("bar", "barrier")
def warp_barrier(form: Form) -> Spec:
    """Only bar.warp.sync; CTA and cluster barriers belong to the machine."""
    if form.mods != ("warp", "sync"):
        raise Unsupported(form.key)
    return Spec(("i32",), _converged)


def _nothing(f: Fn) -> None:
    f.done(NEXT)


@op("fence", "membar", "nanosleep", "discard", "applypriority", "griddepcontrol", "pmevent")
def nothing(form: Form) -> Spec:
    """Without effect on a machine that orders everything (the machine may still handle them)."""
    return Spec((), _nothing)


@op("prefetch", "prefetchu")
def prefetch(form: Form) -> Spec:
    return Spec((), _nothing)
