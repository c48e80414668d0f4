"""Arithmetic that reads the same on Python ints (plans, tests) and on DSL integers (kernels).

Everything in ``ops/{mask,seqlen}`` and ``sched`` is written with ``+ - * // %`` and the few helpers
below, so a property test runs the very code that a kernel is traced from. The DSL is imported only
when a traced value arrives: with ints nothing but Python is needed.
"""

from __future__ import annotations

from typing import Any


def lo(a: Any, b: Any) -> Any:
    """The smaller: the built-in of Python ints, ``cutlass.min`` of traced integers."""
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    import cutlass

    return cutlass.min(a, b)


def hi(a: Any, b: Any) -> Any:
    """The larger, like :func:`lo`."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    import cutlass

    return cutlass.max(a, b)


def ceil_div(a: Any, b: Any) -> Any:
    """``a / b`` rounded up, for ``a >= 0`` and ``b > 0``."""
    return (a + b - 1) // b


def at_most(a: Any, limit: Any) -> Any:
    """1 where ``a <= limit``, else 0: an integer without a branch or a conversion."""
    return lo(hi(limit - a + 1, 0), 1)
