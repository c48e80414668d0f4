"""Hand-written PTX on the machine: kernels from text, parameters from Python values."""

from __future__ import annotations

import numpy as np

from fa_cute.sim import machine, ptx
from fa_cute.sim.memory import GlobalMemory

SMEM_BASE = 0x400  # where dynamic shared memory starts

_TYPES = {np.ndarray: ".u64", int: ".u64", bytes: ".align 64 .b8"}


class Program:
    """PTX statements between `start` (declarations, tid, parameters) and `ret`."""

    def __init__(self, target: str, body: str, params: dict, regs: dict[str, int] | None = None):
        """`params`: name -> array (its address), int (64 bits) or bytes (a tensor map).

        In the body a parameter `x` is the register `%x` (for a map: its address), `%t` is tid.x,
        `%warp` and `%lane` are what they say, `smem` is dynamic shared memory. `regs` declares
        numbered registers: {"r": 8} is %r0..%r7 (prefix r, f: b32; d: b64; p: pred).
        """
        self.memory = GlobalMemory()
        declared, loads, values = [], [], []
        for name, value in params.items():
            if isinstance(value, bytes):
                declared.append(f".param .align 64 .b8 p_{name}[{len(value)}]")
                loads.append(f"mov.b64 %{name}, p_{name}; cvta.param.u64 %{name}, %{name};")
                values.append((64, value))
            else:
                declared.append(f".param .u64 p_{name}")
                loads.append(f"ld.param.b64 %{name}, [p_{name}];")
                if isinstance(value, np.ndarray):
                    value = self.memory.add_array(value, name)
                values.append((8, int(value).to_bytes(8, "little")))
        self.blob = b""
        for align, raw in values:
            self.blob += bytes(-len(self.blob) % align) + raw
        kinds = {"r": ".b32", "f": ".b32", "d": ".b64", "p": ".pred", "h": ".b16"}
        counts = {"r": 64, "f": 8, "d": 16, "p": 8, "h": 4, **(regs or {})}
        banks = "\n".join(f".reg {kinds[k]} %{k}<{n}>;" for k, n in counts.items())
        names = " ".join(f".reg .b64 %{name};" for name in params)
        self.text = f"""
.version 8.8
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry k({", ".join(declared)})
{{
{banks}
.reg .b32 %t, %lane, %warp, %rank, %base;
{names}
mov.u32 %t, %tid.x;
and.b32 %lane, %t, 31;
shr.u32 %warp, %t, 5;
mov.u32 %rank, %cluster_ctarank;
mov.b32 %base, smem;
{chr(10).join(loads)}
{body}
ret;
}}
"""

    def run(self, threads=128, ctas=1, cluster=1, smem=65536, schedule="early", **options):
        kernel = ptx.parse(self.text).kernels["k"]
        return machine.run(
            kernel,
            ctas,
            threads,
            cluster,
            smem,
            self.blob,
            self.memory,
            schedule,
            machine.Options(**options),
        )


def mbarrier_wait(address: str, parity: int, label: str, predicate: str = "%p7") -> str:
    return f"""
{label}:
mbarrier.try_wait.parity.shared.b64 {predicate}, [{address}], {parity};
@!{predicate} bra {label};
"""


def load_image(nbytes: str | int, source: str, barrier: int = 0, at: int = 1024) -> str:
    """Bulk-copy `nbytes` from `source` to dynamic shared memory + `at`; all threads wait for it."""
    return f"""
setp.eq.u32 %p6, %t, 0;
@%p6 mbarrier.init.shared.b64 [smem+{barrier}], 1;
@%p6 mbarrier.init.shared.b64 [smem+{barrier + 8}], 1;
bar.sync 0;
@%p6 mbarrier.arrive.expect_tx.shared.b64 _, [smem+{barrier}], {nbytes};
@%p6 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes
    [smem+{at}], [{source}], {nbytes}, [smem+{barrier}];
{mbarrier_wait(f"smem+{barrier}", 0, "LOADED")}
"""
