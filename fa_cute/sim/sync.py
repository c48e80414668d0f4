"""Barriers, fences, register reallocation and the other instructions that order warps."""

from __future__ import annotations

from fa_cute.errors import MisuseError
from fa_cute.sim import mbarrier as _mbarrier  # noqa: F401  (registers its handlers)
from fa_cute.sim import operands as ops
from fa_cute.sim.handlers import FULL, Signal, Wait, handles
from fa_cute.sim.proxy import is_proxy_fence
from fa_cute.sim.ptx import Imm, Instr

MIN_REGS, MAX_REGS = 24, 256  # of setmaxnreg


class NamedBarrier(Signal):
    """One of the 16 barriers of a CTA: counts threads, 32 for each warp that arrives."""

    __slots__ = (
        "arrived",
        "gathered",
        "generation",
        "id",
        "known",
        "need",
        "races",
        "reduced",
        "result",
        "time",
        "whole",
    )

    def __init__(self, number: int, races=None):
        super().__init__()
        self.id = number
        self.need = 0  # threads of the phase that is being collected; 0 before the first arrival
        self.arrived = 0
        self.generation = 0
        self.reduced = None
        self.result = None
        self.time = 0
        self.races = races
        self.known = self.gathered = None  # of the race checker
        self.whole = False  # for all threads of the CTA, so exits lower the count

    def arrive(self, threads: int, need: int, ins: Instr) -> None:
        if self.arrived == 0 or self.whole:
            self.need = need
        elif self.need != need:
            raise MisuseError(
                f"{ins.where}: {ins.op}: barrier {self.id} with {need} threads, but others came "
                f"for {self.need} in the same phase"
            )
        if self.races is not None:
            self.races.arrive(self)
        self.arrived += threads
        if self.arrived > self.need:
            raise MisuseError(
                f"{ins.where}: {ins.op}: {self.arrived} threads at barrier {self.id}, "
                f"which is for {self.need}"
            )
        if self.arrived == self.need:
            self.complete()

    def complete(self) -> None:
        self.arrived = 0
        self.generation += 1
        if self.races is not None:
            self.races.completed(self)
        self.result, self.reduced = self.reduced, None
        self.fire()

    def state(self) -> dict:
        return {
            "on": "named barrier",
            "id": self.id,
            "arrived": self.arrived,
            "expected": self.need,
        }


def _threads(warp, mask: int, ins: Instr, aligned: bool) -> int:
    """Threads that this arrival stands for."""
    if mask == warp.live:
        return 32
    if aligned:
        raise MisuseError(
            f"{ins.where}: {ins.op}: only lanes {mask:#010x} of {warp.live:#010x} execute it"
        )
    return mask.bit_count()


def _barrier_operands(ins: Instr, first: int):
    """(id, thread count or None) closures."""
    number = ops.uniform32(ins.operands[first])
    count = ops.uniform32(ins.operands[first + 1]) if len(ins.operands) > first + 1 else None
    for operand in ins.operands[first + 1 : first + 2]:
        if isinstance(operand, Imm) and operand.bits % 32:
            raise MisuseError(f"{ins.where}: {ins.op}: {operand.bits} threads; a multiple of 32")
    return number, count


def _join(ins: Instr, number, count, aligned: bool):
    """Closure that arrives and returns (barrier, generation before)."""

    def join(warp, mask):
        index = number(warp, mask)
        if index > 15:
            raise MisuseError(f"{ins.where}: {ins.op}: barrier {index}; allowed are 0..15")
        cta = warp.cta
        need = count(warp, mask) if count else cta.live_warps() * 32
        if need % 32 or need <= 0:
            raise MisuseError(f"{ins.where}: {ins.op}: {need} threads; a multiple of 32")
        barrier = cta.barrier(index)
        if barrier.time < warp.time:
            barrier.time = warp.time
        generation = barrier.generation
        barrier.whole = count is None
        barrier.arrive(_threads(warp, mask, ins, aligned), need, ins)
        return barrier, generation

    return join


def _meet(warp, barrier, generation: int) -> Wait | None:
    if barrier.generation != generation:
        if warp.time < barrier.time:
            warp.time = barrier.time
        if barrier.races is not None:
            barrier.races.observed(warp, barrier)
        return None

    return Wait(lambda: barrier.generation != generation, barrier.state, barrier)


@handles("bar.sync", "barrier.sync", "barrier.cta.sync", "bar.cta.sync")
def bind_bar_sync(ins: Instr, k):
    aligned = ins.parts[0] == "bar" or ins.has("aligned")
    join = _join(ins, *_barrier_operands(ins, 0), aligned)

    def sync(warp, mask):
        barrier, generation = join(warp, mask)
        return _meet(warp, barrier, generation)

    return sync


@handles("bar.arrive", "barrier.arrive", "barrier.cta.arrive", "bar.cta.arrive")
def bind_bar_arrive(ins: Instr, k):
    aligned = ins.parts[0] == "bar" or ins.has("aligned")
    if len(ins.operands) < 2:
        raise MisuseError(f"{ins.where}: {ins.op} needs the number of threads")
    join = _join(ins, *_barrier_operands(ins, 0), aligned)

    def arrive(warp, mask):
        join(warp, mask)

    return arrive


@handles("bar.red", "barrier.red", "barrier.cta.red", "bar.cta.red")
def bind_bar_red(ins: Instr, k):
    aligned = ins.parts[0] == "bar" or ins.has("aligned")
    has_count = len(ins.operands) == 4
    number = ops.uniform32(ins.operands[1])
    count = ops.uniform32(ins.operands[2]) if has_count else None
    source = ops.predicate(ins.operands[-1])
    how = next(p for p in ins.parts if p in ("popc", "and", "or"))
    write = ops.write32(ins.operands[0]) if how == "popc" else ops.write_pred(ins.operands[0])
    join = _join(ins, number, count, aligned)

    def red(warp, mask):
        barrier = warp.cta.barrier(number(warp, mask))
        bits = source(warp, mask) & mask
        value = {"popc": bits.bit_count(), "and": bits == mask, "or": bits != 0}[how]
        before = barrier.reduced
        if before is None:
            barrier.reduced = value
        else:
            barrier.reduced = (
                before + value
                if how == "popc"
                else before and value
                if how == "and"
                else before or value
            )
        _, generation = join(warp, mask)

        def finish(warp):
            result = barrier.result
            write(warp, mask, result if how == "popc" else (FULL if result else 0))

        if barrier.generation != generation:
            finish(warp)
            return None
        return Wait(lambda: barrier.generation != generation, barrier.state, barrier, finish)

    return red


class ClusterBarrier(Signal):
    """Every live warp of the cluster arrives once per phase, then waits."""

    __slots__ = ("arrived", "cluster", "gathered", "generation", "known", "races", "time")

    def __init__(self, cluster) -> None:
        super().__init__()
        self.cluster = cluster
        self.races = cluster.machine.races
        self.known = self.gathered = None  # of the race checker
        self.arrived: dict[object, int] = {}  # warp -> lanes that came
        self.generation = 0
        self.time = 0

    def arrive(self, warp, mask: int, ins: Instr) -> None:
        before = self.arrived.get(warp, 0)
        if before & mask:
            raise MisuseError(
                f"{ins.where}: {ins.op}: second arrival of warp {warp.index} of CTA "
                f"{warp.cta.rank} in one phase"
            )
        self.arrived[warp] = before | mask
        if self.races is not None:
            self.races.arrive(self)
        if self.time < warp.time:
            self.time = warp.time
        self.check()

    def check(self) -> None:
        """Complete when every live lane of every warp is here (also after a warp's exit)."""
        if not self.arrived:
            return
        for cta in self.cluster.ctas:
            for warp in cta.warps:
                if warp.live and self.arrived.get(warp, 0) & warp.live != warp.live:
                    return
        self.arrived = {}
        self.generation += 1
        if self.races is not None:
            self.races.completed(self)
        self.fire()

    def state(self) -> dict:
        missing = [
            f"{warp.cta.rank}:{warp.index}"
            for cta in self.cluster.ctas
            for warp in cta.warps
            if warp.live and self.arrived.get(warp, 0) & warp.live != warp.live
        ]
        return {"on": "cluster barrier", "missing": ", ".join(missing)}


@handles("barrier.cluster.arrive")
def bind_cluster_arrive(ins: Instr, k):
    def arrive(warp, mask):
        barrier = warp.cta.cluster.barrier
        warp.cluster_generation = barrier.generation
        barrier.arrive(warp, mask, ins)

    return arrive


@handles("barrier.cluster.wait")
def bind_cluster_wait(ins: Instr, k):
    def wait(warp, mask):
        barrier = warp.cta.cluster.barrier
        generation = warp.cluster_generation
        if generation is None:
            raise MisuseError(f"{ins.where}: {ins.op} without an arrive before")
        return _meet(warp, barrier, generation)

    return wait


@handles("bar.warp.sync")
def bind_warp_sync(ins: Instr, k):
    """Lanes of the mask meet; a diverged warp first runs its other paths to the same place."""
    members = ops.uniform32(ins.operands[0])

    def sync(warp, mask):
        wanted = members(warp, mask) & warp.live
        if wanted & ~mask == 0:
            return None
        return warp.converge(mask, wanted, ins)

    return sync


@handles("fence", "membar")
def bind_fence(ins: Instr, k):
    """Memory is coherent here; only what the asynchronous proxy may see is kept track of."""
    if is_proxy_fence(ins):
        return lambda warp, mask: warp.cta.cluster.proxy.fence(warp)
    return lambda warp, mask: None


@handles("griddepcontrol")
def bind_griddepcontrol(ins: Instr, k):
    return lambda warp, mask: None


@handles("nanosleep")
def bind_nanosleep(ins: Instr, k):
    return lambda warp, mask: warp.machine.spin(warp)


@handles("setmaxnreg")
def bind_setmaxnreg(ins: Instr, k):
    """Register counts per warp against the CTA's pool; `inc` waits until the pool has them."""
    regs = ins.operands[0].bits
    up = ins.parts[1] == "inc"
    if not MIN_REGS <= regs <= MAX_REGS or regs % 8:
        raise MisuseError(
            f"{ins.where}: {ins.op}: {regs} registers; allowed are multiples of 8 from 24 to 256"
        )

    def setmaxnreg(warp, mask):
        if mask != warp.live:
            raise MisuseError(f"{ins.where}: {ins.op} in a diverged warp")
        pool = warp.cta.registers
        if up and regs < warp.regs:
            raise MisuseError(f"{ins.where}: {ins.op}: the warp has {warp.regs} registers already")
        if not up and regs > warp.regs:
            raise MisuseError(f"{ins.where}: {ins.op}: the warp has only {warp.regs} registers")
        if pool.free >= (regs - warp.regs) * 32:
            pool.take(warp, regs)
            return None
        return Wait(
            lambda: pool.free >= (regs - warp.regs) * 32,
            lambda: {
                "on": "registers",
                "wanted": (regs - warp.regs) * 32,
                "free": pool.free,
                "of": pool.total,
            },
            pool,
            lambda warp: pool.take(warp, regs),
        )

    return setmaxnreg


class RegisterPool(Signal):
    """32-bit registers that a CTA owns; what `setmaxnreg.dec` gave back is free."""

    __slots__ = ("free", "total")

    def __init__(self, total: int):
        super().__init__()
        self.total = total
        self.free = 0

    def take(self, warp, regs: int) -> None:
        self.free -= (regs - warp.regs) * 32
        warp.regs = regs
        self.fire()
