"""Counters in global memory that let CTAs pass in a fixed order.

A turnstile is an int32 that starts at 0. Whoever has rank ``r`` waits until it equals ``r``, does
its work, and adds 1. Ranks count from 0 without gaps, and nobody waits for a CTA that is launched
later than itself, so no set of resident CTAs can wait for one that has not started.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def wait_turn(counter: cute.Pointer, rank: Int32):
    """Spin until the counter equals ``rank``; one thread. What earlier ranks did before `pass_turn`
    is visible after.
    """
    now = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
    while now != rank:
        now = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")


@cute.jit
def wait_first(counter: cute.Pointer):
    """Spin until somebody has passed; one thread. What it did before is visible after."""
    now = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
    while now == 0:
        now = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")


def pass_turn(counter: cute.Pointer):
    """Let the next rank in; one thread, after everything that it publishes has completed."""
    cute.arch.red(counter, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")


def int32_at(pointer: cute.Pointer) -> cute.Pointer:
    """The int32 at a pointer into global memory."""
    return cute.make_ptr(Int32, pointer.toint(), cute.AddressSpace.gmem, assumed_align=4)


def first_of(dq: cute.Tensor, lengths, head, row) -> cute.Pointer:
    """A mark for the dQ tile that begins with a row: 1 once somebody has stored to it. It lies
    where that row of the gradient comes at last, in its first 4 bytes, so it takes no memory.
    """
    return int32_at(cute.domain_offset((row, 0), lengths.plain(dq, "q", head)).iterator)
