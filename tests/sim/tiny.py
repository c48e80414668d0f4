"""Hand-written PTX kernels: a body becomes a kernel, arrays become its parameters."""

from __future__ import annotations

import struct

import numpy as np

from fa_cute.sim import machine, ptx
from fa_cute.sim.memory import GlobalMemory

HEAD = """.version 8.8
.target {target}
.address_size 64
{shared}
.visible .entry k({params})
{bounds}{{
"""
REGS = """
.reg .pred %p<40>; .reg .b16 %h<40>; .reg .b32 %r<99>; .reg .b64 %rd<99>; .reg .f32 %f<99>;
.reg .b128 %q<9>;
"""
DYNAMIC = ".extern .shared .align 1024 .b8 dyn[];"

# Thread index in %r0, first array in %rd0, address of element [tid] of 4 bytes in %rd1.
PROLOGUE = """
mov.u32 %r0, %tid.x;
ld.param.u64 %rd0, [a0];
mul.wide.u32 %rd1, %r0, 4;
add.s64 %rd1, %rd0, %rd1;
"""


def kernel(body: str, arrays: int = 1, target: str = "sm_100a", bounds: str = "") -> ptx.Kernel:
    params = ", ".join(f".param .u64 a{i}" for i in range(arrays))
    head = HEAD.format(target=target, shared=DYNAMIC, params=params, bounds=bounds)
    return ptx.parse(head + REGS + body + "\nret;\n}\n").kernels["k"]


def run(
    body: str,
    *arrays: np.ndarray,
    grid=1,
    block=32,
    cluster=1,
    smem=0,
    schedule="early",
    target="sm_100a",
    **options,
):
    """Launch a body with arrays as parameters `a0`, `a1`, ...; the report."""
    memory = GlobalMemory()
    addresses = [memory.add_array(a, f"a{i}") for i, a in enumerate(arrays)]
    code = kernel(body, len(arrays), target)
    params = struct.pack(f"<{len(addresses)}Q", *addresses)
    return machine.run(code, grid, block, cluster, smem, params, memory, schedule, options)
