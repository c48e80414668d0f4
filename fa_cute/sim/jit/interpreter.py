"""The native loop that executes records, and control flow: branches, divergence, leaving.

Lanes that take different ways form groups. The group with the lowest pc runs, and groups that meet
at an instruction merge: for the reducible, topologically ordered code of the compiler this
reconverges as early as possible.
"""

from __future__ import annotations

from fa_cute.sim.jit.context import (
    KIND_BUDGET,
    KIND_ERROR,
    KIND_EXIT,
    KIND_STOP,
    PARTIAL_WARP,
    RECORD_BYTES,
    RECORD_FLIP,
    RECORD_GUARD,
    RECORD_IMM,
    RECORD_SLOTS,
    TRAPPED,
    offset_of,
)
from fa_cute.sim.jit.ir import BRANCH, CONVERGE, ERROR, LEAVE, NEXT, PTR, STOP, Fn, Val
from fa_cute.sim.jit.registry import Form, Spec, op

_FAR = 0xFFFFFFFF


@op("bra")
def branch(form: Form) -> Spec:
    form.rest("uni")
    return Spec(("label",), lambda f: f.done(BRANCH))


@op("ret", "exit")
def leave(form: Form) -> Spec:
    form.rest("uni")
    return Spec((), lambda f: f.done(LEAVE))


@op("trap")
def trap(form: Form) -> Spec:
    """The kernel's own assertion failed."""

    def emit(f: Fn) -> None:
        lane = f.intrinsic("cttz", [f.mask], "i32", "<{is_zero_poison = true}>")
        f.fail(TRAPPED, lane, f.const(0, "i64"))

    return Spec((), emit)


@op("stop")
def stop(form: Form) -> Spec:
    """Not PTX: an instruction that Python executes."""
    return Spec((), lambda f: f.done(STOP))


def _entry(f: Fn, name: str, index: Val) -> Val:
    return f.ctx.gep(offset_of(name)[0]).gep(index.int("i64").shl(2))


def _push(f: Fn, pc: Val, mask: Val, parked: int) -> None:
    count = f.field("n_groups")
    f.store(pc, _entry(f, "group_pc", count))
    f.store(mask, _entry(f, "group_mask", count))
    f.store(f.const(parked, "i32"), _entry(f, "group_parked", count))
    f.set_field("n_groups", count + 1)


def _each_group(f: Fn, body) -> None:
    """`body(index)` for each other group."""
    index = f.alloca("i32")
    f.store(f.const(0, "i32"), index)
    head, inside, after = f.block(), f.block(), f.block()
    f.br(head)
    f.at(head)
    current = f.load(index, "i32")
    f.cond(current.cmp("ult", f.field("n_groups")), inside, after)
    f.at(inside)
    body(current)
    f.store(current + 1, index)
    f.br(head)
    f.at(after)


def regroup_text() -> str:
    """`i32 regroup(ctx)`: choose the group that runs; 1 if all wait for each other."""
    f = Fn("regroup", args=f"%ctx: {PTR}")
    with f.when(f.field("mask").ne(0)):
        _push(f, f.field("pc"), f.field("mask"), 0)
    best, mask = f.alloca("i32"), f.alloca("i32")
    kept, limit = f.alloca("i32"), f.alloca("i32")
    f.store(f.const(_FAR, "i32"), best)
    f.store(f.const(_FAR, "i32"), limit)
    f.store(f.const(0, "i32"), mask)
    f.store(f.const(0, "i32"), kept)

    def find(index: Val) -> None:
        ready = f.load(_entry(f, "group_parked", index), "i32").eq(0)
        pc = f.load(_entry(f, "group_pc", index), "i32")
        with f.when(ready):
            f.store(f.load(best, "i32").call("umin", pc), best)

    def take(index: Val) -> None:
        pc = f.load(_entry(f, "group_pc", index), "i32")
        lanes = f.load(_entry(f, "group_mask", index), "i32")
        parked = f.load(_entry(f, "group_parked", index), "i32")
        mine, other, after = f.block(), f.block(), f.block()
        f.cond(pc.eq(f.load(best, "i32")), mine, other)
        f.at(mine)
        f.store(f.load(mask, "i32") | lanes, mask)
        f.br(after)
        f.at(other)
        to = f.load(kept, "i32")
        f.store(pc, _entry(f, "group_pc", to))
        f.store(lanes, _entry(f, "group_mask", to))
        f.store(parked, _entry(f, "group_parked", to))
        f.store(to + 1, kept)
        f.store(f.load(limit, "i32").call("umin", pc), limit)
        f.br(after)
        f.at(after)

    _each_group(f, find)
    with f.when(f.load(best, "i32").eq(_FAR)):
        # All wait for each other; what they wait for may have left since they looked.
        live = f.field("live")
        with f.when(f.field("parked_live").eq(live)):
            f.done(1)
        f.set_field("parked_live", live)
        _each_group(f, lambda i: f.store(f.const(0, "i32"), _entry(f, "group_parked", i)))
        _each_group(f, find)
    _each_group(f, take)
    f.set_field("n_groups", f.load(kept, "i32"))
    f.set_field("pc", f.load(best, "i32"))
    f.set_field("mask", f.load(mask, "i32"))
    f.set_field("limit", f.load(limit, "i32"))
    f.done(0)
    return f.text("internal ")


class _Loop:
    """Writer of `i64 run(ctx)`."""

    def __init__(self):
        self.f = f = Fn("run", args=f"%ctx: {PTR}", ret="i64")
        self.pc, self.mask, self.count = f.alloca("i32"), f.alloca("i32"), f.alloca("i64")
        self.limit = f.alloca("i32")
        self.head, self.execute, self.next = f.block(), f.block(), f.block()
        self.reload_and_go, self.pick = f.block(), f.block()

    def reload(self) -> None:
        f = self.f
        for name, cell in (("pc", self.pc), ("mask", self.mask), ("limit", self.limit)):
            f.store(f.field(name), cell)

    def finish(self, kind: int, pc: Val, mask: Val) -> None:
        """Return `kind`; the group's state goes back to the context."""
        f = self.f
        f.set_field("mask", f.load(self.mask, "i32"))
        f.set_field("limit", f.load(self.limit, "i32"))
        result = pc.int("i64").shl(32) | mask.int("i64") | (kind << 60)
        f.give(result)

    def text(self) -> str:
        f = self.f
        base, code = f.field("base", PTR), f.field("code", PTR)
        with f.when(f.field("live").eq(0)):  # it has left before
            f.give(f.const(KIND_EXIT << 60, "i64"))
        self.reload()
        start = f.field("count")
        f.store(start, self.count)
        last = start + f.field("budget")
        f.br(self.head)

        f.at(self.head)
        pc = f.load(self.pc, "i32")
        behind, ahead, over, go = (f.block() for _ in range(4))
        f.cond(pc.cmp("uge", f.load(self.limit, "i32")), behind, ahead)
        f.at(behind)
        f.set_field("pc", pc)
        f.set_field("mask", f.load(self.mask, "i32"))
        f.emit(f"llvm.call @regroup(%ctx) : ({PTR}) -> i32", "i32")
        f.br(self.reload_and_go)
        f.at(self.reload_and_go)
        self.reload()
        f.br(self.execute)
        f.at(ahead)
        f.cond(f.load(self.count, "i64").cmp("uge", last), over, go)
        f.at(over)
        f.set_field("pc", pc)
        self.finish(KIND_BUDGET, pc, f.const(0, "i32"))
        f.at(go)
        f.br(self.execute)

        f.at(self.execute)
        self.instruction(base, code)

        f.at(self.next)
        f.store(f.load(self.pc, "i32") + 1, self.pc)
        f.br(self.head)
        self.pick_other()
        return regroup_text() + f.text("")

    def instruction(self, base: Val, code: Val) -> None:
        f = self.f
        pc, mask = f.load(self.pc, "i32"), f.load(self.mask, "i32")
        record = code.gep(pc.int("i64") * RECORD_BYTES)
        guard = f.load(record.gep(RECORD_GUARD), "i32").int("i64")
        flip = f.load(record.gep(RECORD_FLIP), "i32")
        lanes = mask & (f.load(base.gep(guard), "i32") ^ flip)
        count = f.load(self.count, "i64") + 1
        f.store(count, self.count)
        f.set_field("count", count)
        f.set_field("pc", pc)
        call, special = f.block(), f.block()
        f.cond(lanes.ne(0), call, self.next)
        f.at(call)
        target = f.load(record, PTR, 8)
        text = (
            f"llvm.call {target.name}({base.name}, {record.name}, {lanes.name}, %ctx) : "
            f"{PTR}, ({PTR}, {PTR}, i32, {PTR}) -> i32"
        )
        result = f.emit(text, "i32")
        f.cond(result.eq(NEXT), self.next, special)
        f.at(special)
        cases = {
            BRANCH: self.branch,
            STOP: self.stop,
            LEAVE: self.leave,
            CONVERGE: self.converge,
            ERROR: self.error,
        }
        for value, body in cases.items():
            yes, no = f.block(), f.block()
            f.cond(result.eq(value), yes, no)
            f.at(yes)
            body(record, pc, mask, lanes)
            f.at(no)
        self.error(record, pc, mask, lanes)

    def branch(self, record: Val, pc: Val, mask: Val, lanes: Val) -> None:
        f = self.f
        target = f.load(record.gep(RECORD_SLOTS), "i32")
        together, apart = f.block(), f.block()
        f.cond(lanes.eq(mask), together, apart)
        f.at(together)
        f.store(target, self.pc)
        f.br(self.head)
        f.at(apart)
        _push(f, target, lanes, 0)
        f.store(mask & ~lanes, self.mask)
        f.store(f.load(self.limit, "i32").call("umin", target), self.limit)
        f.br(self.next)

    def stop(self, record: Val, pc: Val, mask: Val, lanes: Val) -> None:
        """To Python; an instruction for whole warps first waits for the lanes of other groups."""
        f = self.f
        park, alone, deliver = f.block(), f.block(), f.block()
        whole = f.load(record.gep(RECORD_IMM), "i64").ne(0)
        f.cond(whole & f.field("n_groups").ne(0), park, deliver)
        f.at(park)
        _push(f, pc, mask, 1)
        f.set_field("mask", 0)
        stuck = f.emit(f"llvm.call @regroup(%ctx) : ({PTR}) -> i32", "i32")
        f.cond(stuck.ne(0), alone, self.reload_and_go)
        f.at(alone)
        f.set_field("n_groups", f.field("n_groups") - 1)
        f.br(deliver)
        f.at(deliver)
        f.set_field("pc", pc + 1)
        self.finish(KIND_STOP, pc, lanes)

    def leave(self, record: Val, pc: Val, mask: Val, lanes: Val) -> None:
        f = self.f
        left = mask & ~lanes
        f.set_field("live", f.field("live") & ~lanes)
        f.store(left, self.mask)
        gone, last = f.block(), f.block()
        f.cond(left.ne(0), self.next, gone)
        f.at(gone)
        f.set_field("mask", 0)
        f.cond(f.field("n_groups").eq(0), last, self.pick)
        f.at(last)
        self.finish(KIND_EXIT, pc, f.const(0, "i32"))

    def pick_other(self) -> None:
        """Let another group run, or report that each of them waits for the others."""
        f = self.f
        f.at(self.pick)
        waiting = f.field("pc")
        stuck = f.emit(f"llvm.call @regroup(%ctx) : ({PTR}) -> i32", "i32")
        bad = f.block()
        f.cond(stuck.ne(0), bad, self.reload_and_go)
        f.at(bad)
        f.set_field("error", PARTIAL_WARP)
        f.set_field("error_lane", 0)
        f.set_field("error_addr", 0)
        self.finish(KIND_ERROR, waiting, f.const(0, "i32"))

    def converge(self, record: Val, pc: Val, mask: Val, lanes: Val) -> None:
        f = self.f
        _push(f, pc, mask, 1)
        f.set_field("mask", 0)
        f.br(self.pick)

    def error(self, record: Val, pc: Val, mask: Val, lanes: Val) -> None:
        self.finish(KIND_ERROR, pc, lanes)


def run_text() -> str:
    return _Loop().text()
