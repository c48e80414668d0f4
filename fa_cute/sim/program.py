"""A kernel made ready to run: bound handlers, the engine's form of the rest, memory layout."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from fa_cute import arch as _arch
from fa_cute.errors import MisuseError
from fa_cute.sim import handlers
from fa_cute.sim import operands as ops
from fa_cute.sim.cta import Cta
from fa_cute.sim.memory import SharedMemory, TensorMemory, aligned_zeros
from fa_cute.sim.proxy import Proxy
from fa_cute.sim.ptx import Kernel
from fa_cute.sim.sync import RegisterPool
from fa_cute.sim.warp import Warp, Warpgroup

if TYPE_CHECKING:
    from fa_cute.sim.cta import Cluster
    from fa_cute.sim.machine import Machine, Options


class KernelContext:
    """What a handler may know when it is bound: the kernel, its target, and its symbols."""

    def __init__(self, kernel: Kernel, arch, symbols: dict[str, tuple[str, int]]):
        self.kernel, self.arch, self.symbols = kernel, arch, symbols

    def symbol(self, name: str) -> tuple[str, int]:
        """("shared" | "param" | "global", byte offset); shared offsets include the system's KiB."""
        entry = self.symbols.get(name)
        if entry is None:
            raise MisuseError(f"{self.kernel.name}: unknown symbol {name!r}")
        return entry


def _align(value: int, to: int) -> int:
    return -(-value // to) * to


def layout_shared(kernel: Kernel) -> tuple[dict[str, int], int]:
    """Offsets in the shared window (static variables, then dynamic memory); static bytes."""
    offsets, at = {}, ops.SMEM_START
    for var in kernel.shared.values():
        if not var.extern:
            at = _align(at, var.align)
            offsets[var.name] = at
            at += var.size
    dynamic = [v for v in kernel.shared.values() if v.extern]
    at = _align(at, max([16, *(v.align for v in dynamic)]))
    for var in dynamic:
        offsets[var.name] = at
    return offsets, at - ops.SMEM_START


def layout_globals(kernel: Kernel) -> tuple[dict[str, int], np.ndarray]:
    """Offsets of `.global` and `.const` variables in one initialised buffer."""
    offsets, at = {}, 0
    for var in kernel.globals.values():
        at = _align(at, var.align)
        offsets[var.name] = at
        at += var.size
    data = aligned_zeros(max(at, 16), 128)
    for var in kernel.globals.values():
        data[offsets[var.name] : offsets[var.name] + len(var.init)] = np.frombuffer(var.init, "u1")
    return offsets, data


def choose_engine(name: str | None):
    """The module that executes plain instructions: `jit` (native) or `alu` (numpy)."""
    if name is None:
        name = "python" if os.environ.get("FA_CUTE_SIM_JIT", "1") == "0" else "jit"
    if name == "python":
        from fa_cute.sim import alu

        return alu
    from fa_cute.sim import jit

    return jit


class Program:
    """One kernel for one engine; launches share it."""

    def __init__(self, kernel: Kernel, engine, races: bool = False):
        handlers.load()
        self.arch = _arch.get(kernel.target)
        self.kernel = kernel = engine.compact(kernel)
        self.engine = engine
        shared, self.static_smem = layout_shared(kernel)
        global_offsets, data = layout_globals(kernel)
        self.globals_address = data.ctypes.data
        self.global_arrays = [(data, "global variables")] if kernel.globals else []
        symbols = {name: ("shared", offset) for name, offset in shared.items()}
        symbols |= {name: ("global", offset) for name, offset in global_offsets.items()}
        values = shared | {n: self.globals_address + o for n, o in global_offsets.items()}
        symbols |= {p.name: ("param", p.offset) for p in kernel.params}
        self.context = KernelContext(kernel, self.arch, symbols)
        self.steps: list = [None] * len(kernel.instrs)
        native = getattr(engine, "native", lambda ins: False)
        for i, ins in enumerate(kernel.instrs):
            bind = handlers.find(ins)
            if races and touches_shared(ins):
                bind = bind or plain_access(ins)
            elif bind is not None and native(ins):
                bind = None
            if bind is not None:
                self.steps[i] = bind(ins, self.context)
        handled = [i for i, step in enumerate(self.steps) if step is not None]
        self.code = engine.build(kernel, handled, values)
        self.uses_tmem = self.arch.has_tcgen05 and any(
            ins.parts[0] == "tcgen05" for ins in kernel.instrs
        )

    # ---- launches ----
    def make_ctas(self, machine: Machine) -> list[Cta]:
        launch, ctas = machine.launch, []
        for _ in range(launch.cluster_size):
            memory = SharedMemory(self.static_smem + launch.dynamic_smem)
            cta = Cta(machine, memory, TensorMemory() if self.uses_tmem else None)
            cta.warps = [Warp(self.code.warp()) for _ in range(launch.warps)]
            cta.fresh = True
            ctas.append(cta)
        rows = [cta.memory for cta in ctas]
        for rank, cta in enumerate(ctas):
            for warp in cta.warps:
                warp.core.bind(
                    smem=[m.bytes for m in rows],
                    valid=[m.valid for m in rows],
                    base=0,
                    rank=rank,
                    params=machine.params,
                    extents=machine.extents,
                )
                warp.core.ctx.budget = machine.options.budget
                if hasattr(warp.core, "memory"):
                    warp.core.memory = machine.memory  # it names tensors in its errors
        return ctas

    def start(self, machine: Machine, cluster: Cluster, cluster_id: tuple[int, int, int]) -> None:
        """Put every warp of a cluster at the first instruction."""
        launch = machine.launch
        for rank, cta in enumerate(cluster.ctas):
            inside = launch.cta_in_cluster(rank)
            ctaid = tuple(i * n + j for i, n, j in zip(cluster_id, launch.cluster, inside))
            cta.place(cluster, rank, ctaid)
            if not cta.fresh:
                cta.memory.reset()
                if cta.tensor_memory is not None:
                    cta.tensor_memory.reset()
            cta.fresh = False
            self._start_cta(machine, cta, cluster_id, inside)
        if machine.races is not None:
            machine.races.start(cluster)
        cluster.proxy = Proxy(cluster)

    def _start_cta(self, machine, cta, cluster_id, inside) -> None:
        launch = machine.launch
        cta.mbarriers, cta.barriers, cta.scratch = {}, {}, {}
        cta.launch_regs = min(248, 65536 // (launch.warps * 32) & ~7)
        cta.registers = RegisterPool(cta.launch_regs * launch.warps * 32)
        cta.warpgroups = [Warpgroup(i) for i in range(-(-launch.warps // 4))]
        cta.live = launch.warps
        for index, warp in enumerate(cta.warps):
            threads = min(32, launch.threads - 32 * index)
            live = (1 << threads) - 1
            for name in self.code.specials:
                value = self._special(name, machine, cta, cluster_id, inside, index)
                warp.core.special(name, value)
            warp.reset(cta, index, live, self.steps)
            cta.warpgroups[index // 4].warps.append(warp)

    def _special(self, name, machine, cta, cluster_id, inside, index):
        launch = machine.launch
        key, _, axis = name.rpartition(".")
        if not key:
            key, axis = name, "x"
        i = "xyzw".index(axis)
        if i == 3:
            return 0
        if key == "%tid":
            thread = index * 32 + np.arange(32)
            x, y, _ = launch.block
            value = (thread % x, thread // x % y, thread // (x * y))[i]
            return value.astype(np.uint32)
        one = {
            "%ntid": launch.block,
            "%ctaid": cta.ctaid,
            "%nctaid": launch.grid,
            "%clusterid": cluster_id,
            "%nclusterid": tuple(g // c for g, c in zip(launch.grid, launch.cluster)),
            "%cluster_ctaid": inside,
            "%cluster_nctaid": launch.cluster,
        }.get(key)
        if one is not None:
            return one[i]
        lanes = np.arange(32, dtype=np.uint64)
        bit = np.uint64(1) << lanes
        scalar = {
            "%laneid": lanes.astype(np.uint32),
            "%warpid": index,
            "%nwarpid": launch.warps,
            "%smid": cta.cluster.index * launch.cluster_size + cta.rank,
            "%nsmid": self.arch.num_sms,
            "%gridid": 0,
            "%cluster_ctarank": cta.rank,
            "%cluster_nctarank": launch.cluster_size,
            "%is_explicit_cluster": int(launch.cluster_size > 1),
            "%dynamic_smem_size": launch.dynamic_smem,
            "%total_smem_size": cta.smem_size,
            "%aggr_smem_size": cta.smem_size,
            "%lanemask_eq": bit.astype(np.uint32),
            "%lanemask_lt": (bit - 1).astype(np.uint32),
            "%lanemask_le": (bit * 2 - 1).astype(np.uint32),
            "%lanemask_ge": (~(bit - 1)).astype(np.uint32),
            "%lanemask_gt": (~(bit * 2 - 1)).astype(np.uint32),
        }
        if key not in scalar:
            raise MisuseError(f"special register {name!r} is not modelled")
        return scalar[key]

    def executed(self, machine: Machine, warp: Warp) -> int:
        """Warp instructions of a finished warp; also collects what native code counted."""
        ctx = warp.core.ctx
        if ctx.unset_count:
            ins = self.kernel.instrs[ctx.unset_pc]
            machine.note_unset("shared", ins, ctx.unset_addr, ctx.unset_count)
        if flops := getattr(ctx, "mma_flops", 0):
            machine.counters["mma.flops"] += flops
        return ctx.count


def load_program(kernel: Kernel, options: Options) -> Program:
    """The Program of a kernel; kept with the kernel, so that later launches find it."""
    engine = choose_engine(options.engine)
    cache = kernel.__dict__.setdefault("_programs", {})
    key = (engine.__name__, options.races)
    program = cache.get(key)
    if program is None:
        program = cache[key] = Program(kernel, engine, options.races)
    return program


def touches_shared(ins) -> bool:
    """May a plain instruction access shared memory? (The race checker wants to see it.)"""
    if ins.parts[0] in ("ldmatrix", "stmatrix"):
        return True
    if ins.parts[0] not in ("ld", "st"):
        return False
    spaces = ("global", "param", "local", "const")
    return not any(p.split("::")[0] in spaces for p in ins.parts)


def plain_access(ins):
    """The handler of an ordinary load or store."""
    from fa_cute.sim import atomics

    return atomics.bind_load if ins.parts[0] == "ld" else atomics.bind_store
