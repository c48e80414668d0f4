"""The machine: clusters of CTAs of warps, run until all are done or none can go on."""

from __future__ import annotations

import collections
import random
import time
from dataclasses import dataclass

import numpy as np

from fa_cute.errors import ArgumentError, MisuseError, OutOfBoundsError, SimError
from fa_cute.sim import blas
from fa_cute.sim import operands as ops
from fa_cute.sim.cta import Cluster, Cta, Launch
from fa_cute.sim.handlers import Wait
from fa_cute.sim.memory import GlobalMemory, aligned_zeros
from fa_cute.sim.program import Program, load_program
from fa_cute.sim.ptx import Kernel
from fa_cute.sim.races import Races
from fa_cute.sim.report import LaunchReport, Names, deadlock
from fa_cute.sim.schedule import AsyncQueue, Schedule
from fa_cute.sim.timeline import Timeline
from fa_cute.sim.warp import Warp

CTA_OVERHEAD = 1024  # bytes of shared memory that the system takes of each CTA


@dataclass(frozen=True)
class Options:
    """How a launch is run, apart from the schedule.

    `resident`: clusters that run at the same time; None starts with one (one to four in a random
    schedule) and adds the next in launch order when those that run can only poll memory. `plan`:
    names for reports (see report.Names).
    """

    resident: int | None = None
    trace: bool = False
    races: bool = False  # look for unordered accesses (slow)
    progress: bool | None = None
    plan: dict | None = None
    budget: int = 1_000_000  # warp instructions of one time slice
    limit: int | None = None  # warp instructions of one warp, after which a run is given up
    unset: str = "report"  # reads of memory that nothing wrote: "report", "raise" or "ignore"
    engine: str | None = None  # "jit", "python", or None: FA_CUTE_SIM_JIT decides
    sums: str = "fast"  # of wgmma: in fp32, or as "hopper" adds (see sums.py)

    def __post_init__(self) -> None:
        if self.sums not in ("fast", "hopper"):
            raise ArgumentError(f"sums is {self.sums!r}; allowed: fast, hopper")


class Machine:
    """One launch while it runs."""

    def __init__(
        self,
        program: Program,
        launch: Launch,
        params: np.ndarray,
        memory: GlobalMemory,
        schedule: Schedule,
        options: Options,
    ):
        self.program, self.launch, self.memory = program, launch, memory
        self.schedule, self.options = schedule, options
        self.arch = program.arch
        self.params = params
        self.param_address = params.ctypes.data
        self.globals_address = program.globals_address
        self.queue = AsyncQueue(schedule)
        self.rng = random.Random(schedule.seed ^ 0x5EED)
        self.preempt = False  # the running warp is to stop after its instruction
        self.random_warps = schedule.warps == "random"
        self.warp_ranks = {
            (slot, rank, index): self.rng.random()
            for slot in range(SLOTS)
            for rank in range(launch.cluster_size)
            for index in range(launch.warps)
        }
        self.counters: collections.Counter = collections.Counter()
        self.unset: dict[tuple, list] = {}
        self.warnings: dict[str, int] = {}
        self.ready: collections.deque[Warp] = collections.deque()
        self.asking: list[Warp] = []  # blocked without a Signal: asked again when things happened
        self.spinning: list[Warp] = []  # poll memory: run again when something else happened
        self.looks = 0  # how often who polls may still look
        self.fresh_progress = False  # something other than polling happened since the last round
        self.slices = 0  # whole time slices since some warp last reached a wait
        self.next_cluster = 0
        self.cancelled: set[int] = set()
        self.running: list[Cluster] = []
        self.pool: list[list[Cta]] = []
        self.instructions = 0
        self.clock = [0]  # simulated step of whatever happens now; only a trace moves it
        self.timeline = None
        if options.trace:
            self.timeline = self.queue.timeline = Timeline(Names(options.plan))
            self.queue.trace(self.clock, self.counters)
        self.extents = memory.table()
        self.races = Races(self) if options.races else None
        self.bar = None

    # ---- what handlers call ----
    def note_unset(self, space: str, ins, address: int, count: int = 1) -> None:
        """A read of memory that nothing wrote."""
        if self.options.unset == "ignore":
            return
        key = (space, ins.line)
        entry = self.unset.get(key)
        if entry is None:
            self.unset[key] = [ins, address, count]
        else:
            entry[2] += count

    def explain(self, error: SimError, ctx) -> SimError:
        """An engine's error, in the terms of the memory that was meant."""
        if not isinstance(error, OutOfBoundsError):
            return error
        ins, addr = self.program.kernel.instrs[ctx.pc], ctx.error_addr
        nbytes = access_bytes(ins)
        what = "read" if ins.parts[0].startswith("ld") else "write"
        if any(p.startswith("shared") for p in ins.parts) or addr >> 60 == 1:
            size = self.program.static_smem + self.launch.dynamic_smem
            return OutOfBoundsError(
                f"{ins.where}: {ins.op}: {what} of {nbytes} bytes by lane {ctx.error_lane} at "
                f"shared offset {(addr & ops.OFFSET_MASK) - ops.SMEM_START} is outside the {size} "
                f"bytes that the launch has"
            )
        outside = self.memory.outside(addr, nbytes, ins, f"{what} by lane {ctx.error_lane}")
        return outside if ins.parts[1] != "param" else error

    def wrote(self, warp: Warp) -> None:
        """Memory that others may poll has changed."""
        self.fresh_progress = True

    def warn(self, text: str) -> None:
        """Something that works on hardware, but that the ISA does not promise."""
        self.warnings[text] = self.warnings.get(text, 0) + 1

    def spin(self, warp: Warp) -> Wait:
        """The warp polls: let everything else run before it looks again."""
        return Spin(warp)

    # ---- warps ----
    def blocked(self, warp: Warp, wait: Wait) -> None:
        if type(wait) is Spin:
            self.spinning.append(warp)
            return
        self.slices = 0
        if wait.source is not None:
            wait.source.waiters.append(warp)
        else:
            self.asking.append(warp)

    def preempted(self, warp: Warp) -> None:
        """The warp used up its time slice without meeting a handled instruction."""
        self.slices += 1
        warp.wait = Spin(warp)
        self.spinning.append(warp)

    def woken(self, warp: Warp) -> None:
        """A warp can go on; whoever woke it may have to let it go first."""
        self.ready.append(warp)
        if self.random_warps:
            if self.queue.ranks is None:
                self.preempt = self.rng.random() < PREEMPT
            elif self.rank(warp) > self.queue.running:
                self.preempt = True

    def rank(self, warp: Warp) -> float:
        """Priority of a warp."""
        cta = warp.cta
        return self.warp_ranks[cta.cluster.index % SLOTS, cta.rank, warp.index]

    def ask(self) -> None:
        """Look again at the warps that wait on something without a Signal."""
        if self.asking:
            asking, self.asking = self.asking, []
            for warp in asking:
                if warp.wait is not None and warp.wait.ready():
                    warp.wake()
                elif warp.wait is not None:
                    self.asking.append(warp)

    def release_spinning(self) -> None:
        spinning, self.spinning = self.spinning, []
        for warp in spinning:
            warp.wait = None
            self.ready.append(warp)

    def start_cluster(self) -> bool:
        """Start the next cluster in launch order; False when none is left."""
        launch = self.launch
        while self.next_cluster in self.cancelled:
            self.next_cluster += 1
        if self.next_cluster >= launch.clusters:
            return False
        index = self.next_cluster
        self.next_cluster += 1
        ctas = self.pool.pop() if self.pool else self.program.make_ctas(self)
        cluster = Cluster(self, ctas, index)
        self.running.append(cluster)
        self.program.start(self, cluster, launch.cluster_id(index))
        for cta in ctas:
            self.ready.extend(cta.warps)
        return True

    def cluster_left(self, cluster: Cluster) -> None:
        self.running.remove(cluster)
        for cta in cluster.ctas:
            for warp in cta.warps:
                self.instructions += self.program.executed(self, warp)
        self.pool.append(cluster.ctas)
        if self.bar is not None:
            self.bar.update(1)

    def cancel_next(self) -> int | None:
        """Cluster launch control: take the next cluster that has not started."""
        while self.next_cluster in self.cancelled:
            self.next_cluster += 1
        if self.next_cluster >= self.launch.clusters:
            return None
        self.cancelled.add(self.next_cluster)
        return self.next_cluster

    # ---- the loop ----
    def loop(self) -> None:
        limit = self.options.resident or 1
        if self.options.resident is None and self.random_warps:
            limit = min(self.rng.randint(1, SLOTS), self.max_resident())
        grow = self.options.resident is None
        ready, queue = self.ready, self.queue
        while True:
            while len(self.running) < limit and self.start_cluster():
                pass
            if not self.running:
                while queue.run_one():
                    pass
                return
            if ready:
                if queue.ranks is None:
                    self.run_ready()
                else:
                    self.run_highest()
                continue
            if queue.run_one():
                self.fresh_progress = True
                self.ask()
                continue
            self.ask()
            if ready:
                continue
            if self.fresh_progress:
                self.fresh_progress, self.looks = False, LOOKS
            if self.spinning and self.looks:
                self.looks -= 1
                self.release_spinning()
                continue
            if grow and self.spinning and limit < self.max_resident() and self.start_cluster():
                limit += 1
                self.fresh_progress = True
                continue
            raise deadlock(self)

    def run_ready(self) -> None:
        ready, queue = self.ready, self.queue
        random_warps, lazy, run_one = self.random_warps, not queue.early, self.run_one
        while ready:
            if random_warps:
                ready.rotate(-self.rng.randrange(len(ready)))
            run_one(ready.popleft())
            if lazy:
                queue.between_warps()
            if self.asking:
                self.ask()

    def run_one(self, warp: Warp) -> None:
        """Run a warp until it waits; note whether that was more than a look at some memory."""
        ctx = warp.core.ctx
        before = ctx.count
        if self.races is not None:
            self.races.enter(warp)
        if self.timeline is None:
            warp.run()
        else:
            warp.run_traced()
        limit = self.options.limit
        if limit is not None and ctx.count > limit:
            raise SimError(f"warp {warp.index} has executed more than {limit} instructions")
        if type(warp.wait) is not Spin or (
            ctx.count - before > SPIN_INSTRUCTIONS and self.slices < MAX_SLICES
        ):
            self.fresh_progress = True

    def run_highest(self) -> None:
        """The ready warp or the operation with the highest rank; now and then a rank changes."""
        queue, ranks = self.queue, self.warp_ranks
        warp = max(self.ready, key=self.rank)
        rank = self.rank(warp)
        agent = queue.highest()
        if self.rng.random() < CHANGE_OF_RANK:
            key = self.rng.choice([*ranks, *queue.ranks])
            (ranks if key in ranks else queue.ranks)[key] = self.rng.random()
        if agent is not None and queue.rank(agent) > rank:
            queue.run_agent(agent)
            self.fresh_progress = True
            self.ask()
            return
        self.ready.remove(warp)
        queue.running, self.preempt = rank, False
        self.run_one(warp)
        queue.running = 1.0
        if self.asking:
            self.ask()

    def max_resident(self) -> int:
        """Clusters that fit on the device at once."""
        arch, launch = self.arch, self.launch
        per_sm = max(
            1,
            min(
                arch.smem_bytes_per_sm // (launch.dynamic_smem + CTA_OVERHEAD),
                arch.max_threads_per_sm // launch.threads,
            ),
        )
        return max(1, arch.num_sms * per_sm // launch.cluster_size)


SLOTS = 4  # clusters that a random schedule may run at once
PREEMPT = 0.25  # probability that a woken warp goes before the one that woke it (random schedule)
CHANGE_OF_RANK = 0.005  # probability per step of a priority schedule
MAX_SLICES = 100  # time slices with nothing but computing, after which it counts as polling
LOOKS = 2  # a poll goes on with what it loaded before it waited: only the next look is at news
SPIN_INSTRUCTIONS = 64  # a polling loop is shorter than this


class Spin(Wait):
    """The wait of a warp that polls; it never becomes ready by itself."""

    __slots__ = ("warp",)

    def __init__(self, warp: Warp):
        super().__init__(lambda: False, {"on": "polling"})
        self.warp = warp


def access_bytes(ins) -> int:
    """Bytes that one lane's load or store touches."""
    count = next((int(p[1:]) for p in ins.parts if p in ("v2", "v4", "v8")), 1)
    digits = "".join(c for c in ins.parts[-1] if c.isdigit())
    return count * int(digits or 32) // 8


def _triple(value) -> tuple[int, int, int]:
    value = (value,) if isinstance(value, int) else tuple(int(v) for v in value)
    return (*value, *([1] * (3 - len(value))))


def run(
    kernel: Kernel,
    grid,
    block,
    cluster=(1, 1, 1),
    dynamic_smem: int = 0,
    params: bytes = b"",
    memory: GlobalMemory | None = None,
    schedule: Schedule | str | None = None,
    options: Options | dict | None = None,
) -> LaunchReport:
    """Execute one kernel launch; raises a SimError when the program goes wrong."""
    options = Options(**options) if isinstance(options, dict) else options or Options()
    memory = memory or GlobalMemory()
    launch = Launch(_triple(grid), _triple(block), _triple(cluster or 1), dynamic_smem)
    program = load_program(kernel, options)
    arch = program.arch
    if dynamic_smem + program.static_smem > arch.smem_bytes:
        raise MisuseError(
            f"{kernel.name} wants {dynamic_smem + program.static_smem} bytes of shared memory; "
            f"{arch.name} has {arch.smem_bytes}"
        )
    if launch.threads > arch.max_threads or launch.threads < 1:
        raise MisuseError(f"{launch.threads} threads per CTA; {arch.name} has {arch.max_threads}")
    if kernel.reqntid and kernel.reqntid != launch.block:
        raise MisuseError(f"block {launch.block}, but the kernel requires {kernel.reqntid}")
    if len(params) < kernel.param_bytes:
        raise MisuseError(
            f"{len(params)} bytes of parameters; {kernel.name} has {kernel.param_bytes}"
        )
    buffer = aligned_zeros(max(kernel.param_bytes, 16), 128)
    buffer[: len(params)] = np.frombuffer(params, np.uint8)
    memory.add(buffer.ctypes.data, buffer.nbytes, "launch parameters", writable=False)
    for array, name in program.global_arrays:
        memory.add(array.ctypes.data, array.nbytes, name)
    machine = Machine(program, launch, buffer, memory, Schedule.of(schedule or Schedule()), options)
    started = time.perf_counter()
    with np.errstate(all="ignore"), blas.single_thread():
        from fa_cute.sim import progress

        with progress.bar(launch.clusters, kernel.name, options.progress) as machine.bar:
            try:
                machine.loop()
            except SimError as error:
                error.machine = machine
                raise
    return LaunchReport.of(machine, time.perf_counter() - started)
