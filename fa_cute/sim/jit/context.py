"""The memory that native code and Python share: a `Context` per warp, a record per instruction."""

from __future__ import annotations

import ctypes

MAX_RANKS = 16  # CTAs of a cluster

# A record: function pointer, guard (offset of a predicate, xor value), ten operands, an immediate
# (or the address of a table with the operands beyond ten).
RECORD_BYTES = 64
RECORD_FN, RECORD_GUARD, RECORD_FLIP, RECORD_SLOTS, RECORD_IMM = 0, 8, 12, 16, 56
RECORD_NUM_SLOTS = 10

# What `Context.error` says.
OUT_OF_BOUNDS, MISALIGNED, WRONG_CTA, PARTIAL_WARP, TRAPPED = range(1, 6)

# Kinds of stop: the top four bits of what `run` returns.
KIND_STOP, KIND_EXIT, KIND_ERROR, KIND_BUDGET = range(4)

# Address windows of generic addresses (bits 60 and up).
SHARED_WINDOW, LOCAL_WINDOW = 1, 2


class Context(ctypes.Structure):
    """State of one warp. Addresses are of this process; native code never frees or keeps them."""

    _fields_ = [
        ("base", ctypes.c_uint64),  # register file
        ("code", ctypes.c_uint64),  # records
        ("pc", ctypes.c_uint32),  # next instruction of the current group
        ("mask", ctypes.c_uint32),  # its lanes
        ("limit", ctypes.c_uint32),  # lowest pc of the other groups
        ("n_groups", ctypes.c_uint32),  # other groups
        ("count", ctypes.c_uint64),  # warp instructions executed since start()
        ("budget", ctypes.c_uint64),  # most instructions of one run()
        ("error", ctypes.c_uint32),
        ("error_lane", ctypes.c_uint32),
        ("error_addr", ctypes.c_uint64),
        ("unset_count", ctypes.c_uint64),  # lanes that loaded a shared byte never stored
        ("unset_pc", ctypes.c_uint32),  # the first such instruction
        ("unset_addr", ctypes.c_uint32),
        ("mma_flops", ctypes.c_uint64),  # operations of mma.sync
        ("params", ctypes.c_uint64),
        ("extents", ctypes.c_uint64),  # sorted pairs (first byte, one after the last)
        ("n_extents", ctypes.c_uint32),
        ("last_extent", ctypes.c_uint32),
        ("local", ctypes.c_uint64),  # local memory, one slice per lane
        ("local_size", ctypes.c_uint32),
        ("params_size", ctypes.c_uint32),
        ("smem_lo", ctypes.c_uint32),
        ("smem_hi", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("n_ranks", ctypes.c_uint32),
        ("track_valid", ctypes.c_uint32),  # 0: smem_valid isn't there
        ("parked_live", ctypes.c_uint32),  # `live` when parked groups last looked again
        ("carry", ctypes.c_uint32),  # of add.cc, a bit per lane
        ("live", ctypes.c_uint32),  # lanes that haven't left
        ("smem", ctypes.c_uint64 * MAX_RANKS),  # + low 24 bits of an address = the byte
        ("smem_valid", ctypes.c_uint64 * MAX_RANKS),
        ("mark", ctypes.c_uint64),  # eight times the byte that a store leaves in smem_valid
        ("group_pc", ctypes.c_uint32 * 32),
        ("group_mask", ctypes.c_uint32 * 32),
        ("group_parked", ctypes.c_uint32 * 32),  # waits for other lanes before this instruction
    ]


_FIELDS = {name: getattr(Context, name) for name, _ in Context._fields_}


def offset_of(name: str) -> tuple[int, int]:
    """(offset, size) of a field."""
    field = _FIELDS[name]
    return field.offset, field.size
