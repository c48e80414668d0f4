"""mbarrier objects and the mbarrier.* instructions."""

from __future__ import annotations

from fa_cute.errors import MisuseError
from fa_cute.sim import operands as ops
from fa_cute.sim.handlers import FULL, Signal, Wait, handles
from fa_cute.sim.memory import place
from fa_cute.sim.ptx import Imm, Instr, Sym

MAX_COUNT = (1 << 20) - 1
PROXY_WORDS = ("shared", "shared::cta", "shared::cluster")


class MBarrier(Signal):
    """Phase, pending arrivals and outstanding bytes of one barrier."""

    __slots__ = (
        "clock",
        "expected",
        "gathered",
        "known",
        "last",
        "offset",
        "pending",
        "phase",
        "races",
        "rank",
        "time",
        "tx",
    )

    def __init__(self, count: int, rank: int = 0, offset: int = 0, clock=(0,)):
        super().__init__()
        self.expected = self.pending = count
        self.tx = 0
        self.phase = 0
        self.rank, self.offset = rank, offset
        self.clock = clock  # the machine's [step], for the timeline
        self.races = self.known = self.gathered = None  # of the race checker
        self.last = self.time = 0  # step of the latest arrival, and of the last completed phase

    def passed(self, parity: int) -> bool:
        """Has the phase of this parity completed?"""
        return (self.phase & 1) != parity

    def _check(self) -> None:
        if self.last < self.clock[0]:
            self.last = self.clock[0]
        if self.pending == 0 and self.tx == 0:
            self.phase += 1
            self.time = self.last
            if self.races is not None:
                self.races.completed(self)
            self.pending = self.expected
            if self.waiters:
                self.fire()

    def arrive(self, n: int = 1, ins: Instr | None = None) -> None:
        if n > self.pending:
            raise MisuseError(
                f"{place(ins)}{n} arrivals on {self}, which expects only {self.pending} more "
                f"in this phase"
            )
        if self.races is not None:
            self.races.arrive(self)
        self.pending -= n
        self._check()

    def expect_tx(self, n: int, ins: Instr | None = None) -> None:
        self.tx += n
        if abs(self.tx) > MAX_COUNT:
            raise MisuseError(f"{place(ins)}the transaction count of {self} leaves its 20 bits")
        if self.tx == 0 and self.pending == 0:
            raise MisuseError(f"{place(ins)}expect_tx completes {self} without an arrival")

    def complete_tx(self, n: int, ins: Instr | None = None) -> None:
        if self.races is not None:
            self.races.bytes_done(self)
        self.tx -= n
        if abs(self.tx) > MAX_COUNT:
            raise MisuseError(f"{place(ins)}the transaction count of {self} leaves its 20 bits")
        self._check()

    def arrive_expect_tx(self, n: int, ins: Instr | None = None) -> None:
        if not self.pending:
            self.arrive(1, ins)
        self.tx += n
        if abs(self.tx) > MAX_COUNT:
            raise MisuseError(f"{place(ins)}the transaction count of {self} leaves its 20 bits")
        self.arrive(1, ins)

    def arrive_drop(self, n: int = 1, ins: Instr | None = None) -> None:
        if n > self.expected:
            raise MisuseError(f"{place(ins)}dropping {n} of {self.expected} arrivals of {self}")
        self.expected -= n
        self.arrive(n, ins)

    def state(self) -> dict:
        return {
            "on": "mbarrier",
            "rank": self.rank,
            "offset": self.offset,
            "phase": self.phase,
            "pending": self.pending,
            "expected": self.expected,
            "tx": self.tx,
        }

    def __str__(self) -> str:
        return (
            f"mbarrier smem+{self.offset - ops.SMEM_START} of CTA {self.rank} (phase {self.phase}, "
            f"pending {self.pending}/{self.expected}, tx {self.tx})"
        )


def _has_state(ins: Instr) -> bool:
    return "parity" not in ins.parts


@handles("mbarrier.init")
def bind_init(ins: Instr, k):
    address, count = ops.shared_address(ins.operands[0], k), ops.uniform32(ins.operands[1])

    def init(warp, mask):
        addr, n = address(warp, mask), count(warp, mask)
        if addr & 7:
            raise MisuseError(f"{ins.where}: {ins.op}: address {addr:#x} is not 8-byte aligned")
        if not 1 <= n <= MAX_COUNT:
            raise MisuseError(f"{ins.where}: {ins.op}: count {n}; allowed are 1..{MAX_COUNT}")
        warp.cta.mbarrier_init(addr, n, ins)

    return init


@handles("mbarrier.inval")
def bind_inval(ins: Instr, k):
    address = ops.shared_address(ins.operands[0], k)

    def inval(warp, mask):
        addr = address(warp, mask)
        barrier = warp.cta.mbarrier(addr, ins)
        if barrier.waiters:
            raise MisuseError(f"{ins.where}: {barrier} is invalidated while a warp waits on it")
        del warp.cta.mbarriers[addr & ops.OFFSET_MASK]

    return inval


def _count_operand(ins: Instr, at: int):
    """The optional count of an arrive (1 when it is missing)."""
    if len(ins.operands) > at:
        return ops.uniform32(ins.operands[at])
    return lambda warp, mask: 1


def _destination(ins: Instr) -> tuple[object | None, int]:
    """(state register or None, index of the address operand)."""
    first = ins.operands[0]
    if isinstance(first, Sym) and first.is_sink:
        return None, 1
    return (first, 1) if hasattr(first, "bank") else (None, 0)


def _arrival(ins: Instr, k, act):
    """Shared shape of the arriving instructions: `act(barrier, n, lanes)` for each address.

    Almost always all lanes name one barrier; then `act` runs once for all of them.
    """
    dst, at = _destination(ins)
    address = ops.shared_address(ins.operands[at], k)
    each, differ = ops.addresses(ins.operands[at], k), ops.differs(ins.operands[at])
    amount = _count_operand(ins, at + 1)
    write = ops.write64(dst) if dst is not None else None

    def arrive(warp, mask):
        cta = warp.cta
        if mask & (mask - 1) and differ(warp, mask):
            _arrive_each(warp, mask, each(warp))
            return
        barrier = cta.mbarrier(address(warp, mask), ins)
        if write is not None:
            write(warp, mask, barrier.phase)
        act(barrier, amount(warp, mask), mask.bit_count() if mask else 0)

    def _arrive_each(warp, mask, addrs):
        for lane in ops.lanes_of(mask):
            bit = 1 << lane
            barrier = warp.cta.mbarrier(int(addrs[lane]) & FULL, ins)
            if write is not None:
                write(warp, bit, barrier.phase)
            act(barrier, amount(warp, bit), 1)

    return arrive


@handles("mbarrier.arrive")
def bind_arrive(ins: Instr, k):
    if ins.has("expect_tx"):

        def act(barrier, n, lanes):
            for _ in range(lanes):
                barrier.arrive_expect_tx(n, ins)
    else:

        def act(barrier, n, lanes):
            barrier.arrive(n * lanes, ins)

    return _arrival(ins, k, act)


@handles("mbarrier.arrive_drop")
def bind_arrive_drop(ins: Instr, k):
    if ins.has("expect_tx"):

        def act(barrier, n, lanes):
            for _ in range(lanes):
                barrier.expect_tx(n, ins)
                barrier.arrive_drop(1, ins)
    else:

        def act(barrier, n, lanes):
            barrier.arrive_drop(n * lanes, ins)

    return _arrival(ins, k, act)


@handles("mbarrier.expect_tx")
def bind_expect_tx(ins: Instr, k):
    return _arrival(ins, k, lambda barrier, n, lanes: barrier.expect_tx(n * lanes, ins))


@handles("mbarrier.complete_tx")
def bind_complete_tx(ins: Instr, k):
    return _arrival(ins, k, lambda barrier, n, lanes: barrier.complete_tx(n * lanes, ins))


@handles("mbarrier.pending_count")
def bind_pending_count(ins: Instr, k):
    raise MisuseError(f"{ins.where}: {ins.op} is not modelled (the state is opaque here)")


def _own(warp, addr: int, ins: Instr):
    """The barrier of a wait, which must lie in the waiting CTA."""
    if addr >> ops.RANK_SHIFT != warp.cta.rank:
        raise MisuseError(
            f"{ins.where}: {ins.op}: waits on a barrier of CTA {addr >> ops.RANK_SHIFT}; "
            f"only barriers of the own CTA ({warp.cta.rank}) can be waited on"
        )
    return warp.cta.mbarrier(addr, ins)


@handles("mbarrier.try_wait", "mbarrier.test_wait")
def bind_wait(ins: Instr, k):
    """`try_wait` blocks until the answer is true; `test_wait` answers, and lets others run."""
    blocks = ins.parts[1] == "try_wait"
    address = ops.shared_address(ins.operands[1], k)
    dst = ins.operands[0]
    write = ops.write_pred(dst)
    state_form = _has_state(ins)
    phase_of = ops.uniform64(ins.operands[2]) if state_form else ops.uniform32(ins.operands[2])
    constant = ins.operands[2].bits & 1 if isinstance(ins.operands[2], Imm) else None
    index = getattr(dst, "index", None)

    def wait(warp, mask):
        if warp.flush is not None:
            warp.flush()  # whether it must wait or not: results don't depend on the schedule
        addr = address(warp, mask)
        cta = warp.cta
        barrier = cta.mbarriers.get(addr & ops.OFFSET_MASK)
        if barrier is None or addr >> ops.RANK_SHIFT != cta.rank:
            barrier = _own(warp, addr, ins)
        if state_form:
            want = phase_of(warp, mask)
            done = barrier.phase != want
            test = lambda: barrier.phase != want  # noqa: E731
        else:
            want = constant if constant is not None else phase_of(warp, mask) & 1
            done = (barrier.phase & 1) != want
            test = lambda: (barrier.phase & 1) != want  # noqa: E731
        if done:
            if warp.time < barrier.time:
                warp.time = barrier.time
            if barrier.races is not None:
                barrier.races.observed(warp, barrier)
            if mask == FULL and index is not None:
                warp.vp[index] = FULL
            else:
                write(warp, mask, mask)
            return None
        if not blocks:
            write(warp, mask, 0)
            return warp.machine.spin(warp)

        return Wait(
            test,
            lambda: barrier.state() | {"parity": want},
            barrier,
            lambda warp: write(warp, mask, mask),
        )

    return wait


@handles("cp.async.mbarrier.arrive")
def bind_cp_async_arrive(ins: Instr, k):
    """Arrive when the cp.async operations that this warp issued before are done."""
    address = ops.shared_address(ins.operands[0], k)
    extra = 0 if ins.has("noinc") else 1

    def arrive(warp, mask):
        barrier, lanes = warp.cta.mbarrier(address(warp, mask), ins), mask.bit_count()
        barrier.pending += lanes * extra
        groups = warp.groups("cp_async")
        if barrier.races is not None:
            barrier.races.group_arrives(groups, barrier)
        groups.after(lambda: barrier.arrive(lanes, ins))

    return arrive
