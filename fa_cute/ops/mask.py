"""Masks as bands of keys, and the block ranges that follow from them.

A mask is one function, ``k_bounds(q) -> [lo, hi)``: the keys that a query sees. Which KV blocks a
query block visits, which of those need no element mask, and the same questions from the side of a
KV block (backward) are derived here. Everything is plain arithmetic on ints or on DSL integers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ..errors import PlanError
from .arith import at_most, ceil_div, hi, lo


@dataclass(frozen=True)
class Band:
    """Keys ``q + off - left <= k <= q + off + right``, ``off = seqlen_k - seqlen_q``.

    Aligned at the bottom right: the last query sees the last key. ``left`` and ``right`` are None
    (no limit, known while tracing), an int or a DSL integer, and not negative: then neighbouring
    rows see overlapping or adjacent keys, which the block ranges below rely on.
    """

    left: Any = None
    right: Any = None

    def k_bounds(self, q: Any, seqlen_q: Any, seqlen_k: Any) -> tuple[Any, Any]:
        """Keys ``[lo, hi)`` that query ``q`` sees (none if ``lo >= hi``); never decrease.

        A row past the last query gets bounds inside the sequence too: it sees the last key.
        """
        off = seqlen_k - seqlen_q
        k_lo = 0 if self.left is None else hi(lo(q + off - self.left, seqlen_k - 1), 0)
        k_hi = seqlen_k if self.right is None else hi(lo(q + off + self.right + 1, seqlen_k), 0)
        return k_lo, k_hi

    def k_limits(self, q: Any, seqlen_q: Any, seqlen_k: Any) -> tuple[Any, Any]:
        """`k_bounds` for an element mask; the lower one is None where no key comes too early."""
        k_lo, k_hi = self.k_bounds(q, seqlen_q, seqlen_k)
        return None if self.left is None else k_lo, k_hi

    def most_keys(self, rows: int, seqlen_k: Any) -> Any:
        """At most so many keys are seen by ``rows`` neighbouring queries together."""
        if not self.slides:
            return seqlen_k
        return lo(seqlen_k, lo(self.left, seqlen_k) + lo(self.right, seqlen_k) + rows)

    def q_bounds(self, k: Any, seqlen_q: Any, seqlen_k: Any) -> tuple[Any, Any]:
        """Queries ``[lo, hi)`` that see key ``k < seqlen_k``; never decrease."""
        off = seqlen_k - seqlen_q
        q_lo = 0 if self.right is None else lo(hi(k - off - self.right, 0), seqlen_q)
        q_hi = seqlen_q if self.left is None else hi(lo(k - off + self.left + 1, seqlen_q), 0)
        return q_lo, q_hi

    def q_limits(self, k: Any, seqlen_q: Any, seqlen_k: Any) -> tuple[Any, Any]:
        """`q_bounds` as the band alone gives them: None where it has no limit, else maybe outside
        of the tensor. A mask that has its own `q_bounds` needs no limits beside them.
        """
        if self.is_own:
            return self.q_bounds(k, seqlen_q, seqlen_k)
        off = seqlen_k - seqlen_q
        first = None if self.right is None else k - off - self.right
        end = None if self.left is None else k - off + self.left + 1
        return first, end

    @property
    def hides_keys(self) -> bool:
        """Whether there may be keys that no query sees, with any lengths above 0."""
        return self.is_own or self.left is not None

    @property
    def unlimited(self) -> bool:
        """Whether every query sees every key."""
        return not self.is_own and self.left is None and self.right is None

    @property
    def slides(self) -> bool:
        """Whether it is a window with two limits: what is seen moves on with the queries."""
        return not self.is_own and self.left is not None and self.right is not None

    @property
    def is_own(self) -> bool:
        """Whether a subclass says by itself which queries see a key."""
        return type(self).q_bounds is not Band.q_bounds

    def keep(self, q: Any, k: Any, seqlen_q: Any, seqlen_k: Any) -> Any:
        """Whether query ``q`` sees key ``k``."""
        k_lo, k_hi = self.k_bounds(q, seqlen_q, seqlen_k)
        return (k >= k_lo) & (k < k_hi)


def full() -> Band:
    """Every query sees every key."""
    return Band()


def causal() -> Band:
    """Query ``q`` sees keys up to ``q + seqlen_k - seqlen_q``."""
    return Band(right=0)


def window(left: Any = None, right: Any = None) -> Band:
    """Sliding window: keys seen before and after the diagonal; None is no limit."""
    return Band(left, right)


def limited(causal: bool, sides: tuple[bool, bool], left: Any, right: Any) -> Band:
    """The band of a call: which ``sides`` have a limit is known while tracing, the limits are not.

    ``causal`` is a limit of 0 on the right that is known.
    """
    return Band(left if sides[0] else None, 0 if causal else right if sides[1] else None)


def check(causal: bool, sides: tuple[bool, bool], custom: Band | None, backward: bool) -> None:
    """Whether the static facts of a spec fit together: ``sides`` as in `limited`; of a ``backward``
    also whether both sides of a mask agree.
    """
    if causal and sides[1]:
        raise PlanError("causal, and a window with a right side: causal is that side, 0")
    if custom is None:
        return
    more = sorted(set(vars(custom)) - {f.name for f in fields(custom)})
    if more:
        raise PlanError(
            f"mask {custom} keeps {', '.join(more)} beside its fields, by which kernels are told "
            "apart: make its class a frozen dataclass"
        )
    if any(sides) or causal != (custom.right is not None):
        raise PlanError(
            f"mask {custom} with causal={causal} and window={sides}: causal must say whether the "
            "mask has a `right`, and there is no window beside it"
        )
    for lengths in SAMPLES:
        fault = _fault(custom, *lengths, backward)
        if backward and fault is None and max(lengths) <= MOST_BLOCKED:
            fault = _fault_of_blocks(custom, *lengths)
        if fault:
            raise PlanError(
                f"mask {custom} with seqlen_q={lengths[0]}, seqlen_k={lengths[1]}: {fault}"
            )


# (seqlen_q, seqlen_k)
SAMPLES = ((1, 1), (40, 3), (3, 40), (200, 333), (333, 200), (777, 777), (70_001, 70_001))
MOST_BLOCKED = 1000  # of which all blocks are looked at
TILES = ((64, 64), (64, 128), (128, 128))  # (queries, keys)


def _fault(mask: Band, seqlen_q: int, seqlen_k: int, backward: bool) -> str | None:
    """What is wrong with a mask of the caller's, on some rows: kernels leave out what a limit that
    is None makes needless, and count on the blocks of neighbours.
    """

    def some(n: int) -> list[int]:
        places = (0, 1, n // 7, n // 3, n // 2, n // 2 + 1, n - 2, n - 1)
        return sorted({i for i in places if 0 <= i < n})

    rows, before = some(seqlen_q), (0, 0)
    for q in rows:
        k_lo, k_hi = mask.k_bounds(q, seqlen_q, seqlen_k)
        if not (before[0] <= k_lo and before[1] <= k_hi <= seqlen_k):
            return f"k_bounds of query {q} are {(k_lo, k_hi)}; they may not decrease or lie outside"
        if mask.left is None and k_lo > 0:
            return f"query {q} sees keys from {k_lo} on, so `left` may not be None"
        if mask.right is None and k_hi < seqlen_k:
            return f"query {q} sees keys below {k_hi} only, so `right` may not be None"
        before = k_lo, k_hi
    for k in some(seqlen_k) if backward else ():
        q_lo, q_hi = mask.q_bounds(k, seqlen_q, seqlen_k)
        for q in rows:
            if mask.keep(q, k, seqlen_q, seqlen_k) != (q_lo <= q < q_hi):
                return f"k_bounds and q_bounds do not agree on query {q} and key {k}"
    return None


def _fault_of_blocks(mask: Band, seqlen_q: int, seqlen_k: int) -> str | None:
    """Whether a tile of queries counts on a tile of keys that does not visit it, or is visited by
    one that it does not count: a backward waits for the one, and does not wait for the other.
    """
    for tile_m, tile_n in TILES:
        sizes = (tile_m, tile_n, seqlen_q, seqlen_k)
        counted, visited = set(), set()
        for m in range(-(-seqlen_q // tile_m)):
            blocks = kv_blocks(mask, m, *sizes)
            counted |= {(m, n) for n in range(blocks.lo, blocks.hi)}
        for n in range(-(-seqlen_k // tile_n)):
            blocks = q_blocks(mask, n, *sizes)
            visited |= {(m, n) for m in range(blocks.lo, blocks.hi)}
        if counted != visited:
            m, n = min(counted ^ visited)
            return (
                f"queries from {m * tile_m} and keys from {n * tile_n} on meet by only one of "
                "k_bounds and q_bounds; those of a row that sees nothing should lie in a tile that "
                "its neighbours see"
            )
    return None


@dataclass(frozen=True)
class Blocks:
    """Blocks ``[lo, hi)`` to visit; those in ``[full_lo, full_hi)`` need no element mask.

    ``lo <= full_lo <= full_hi <= hi``; nothing to visit is ``lo == hi``.
    """

    lo: Any
    full_lo: Any
    full_hi: Any
    hi: Any

    @property
    def count(self) -> Any:
        """How many blocks are visited."""
        return self.hi - self.lo


def _blocks(first: tuple[Any, Any], last: tuple[Any, Any], tile: int) -> Blocks:
    """Block range of lines whose bounds rise from ``first`` to ``last``."""
    b_lo = first[0] // tile
    b_hi = hi(ceil_div(last[1], tile), b_lo)
    full_lo = lo(ceil_div(last[0], tile), b_hi)
    full_hi = hi(lo(first[1] // tile, b_hi), full_lo)
    return Blocks(b_lo, full_lo, full_hi, b_hi)


def kv_blocks(
    mask: Band, m_block: Any, tile_m: int, tile_n: int, seqlen_q: Any, seqlen_k: Any, pack: int = 1
) -> Blocks:
    """KV blocks of query block ``m_block < ceil(seqlen_q * pack / tile_m)``.

    ``pack``: row ``r`` of the packed query tensor is query ``r // pack`` (query heads that share a
    kv head). Rows of the block past ``seqlen_q`` count for nothing; keys past ``seqlen_k`` make the
    last block a masked one.
    """
    first = (m_block * tile_m) // pack
    last = (lo((m_block + 1) * tile_m, seqlen_q * pack) - 1) // pack
    return _blocks(
        mask.k_bounds(first, seqlen_q, seqlen_k), mask.k_bounds(last, seqlen_q, seqlen_k), tile_n
    )


def q_blocks(
    mask: Band,
    n_block: Any,
    tile_m: int,
    tile_n: int,
    seqlen_q: Any,
    seqlen_k: Any,
    tail_rows: bool = True,
) -> Blocks:
    """Query blocks of KV block ``n_block < ceil(seqlen_k / tile_n)``.

    Both sides agree: ``m in q_blocks(n)`` if and only if ``n in kv_blocks(m)``.

    A block with keys past ``seqlen_k``, or with rows past ``seqlen_q``, is not full.
    ``tail_rows=False``: such rows do not count, for a kernel in which they vanish by themselves
    (LSE +inf); then keys that do not exist put all blocks before ``full_lo`` (see `spans`).
    """
    end = (n_block + 1) * tile_n
    first = mask.q_bounds(n_block * tile_n, seqlen_q, seqlen_k)
    last = mask.q_bounds(lo(end, seqlen_k) - 1, seqlen_q, seqlen_k)
    keys_exist = at_most(end, seqlen_k)
    if tail_rows:
        return _blocks((first[0], first[1] * keys_exist), last, tile_m)
    last_block = first[1] + at_most(seqlen_q, first[1]) * (tile_m - 1)
    every_row = hi(last[0], (1 - keys_exist) * seqlen_q)
    return _blocks((first[0], last_block), (every_row, last[1]), tile_m)


def spans(mask: Band, blocks: Blocks, tail_rows: bool = True) -> tuple[tuple[Any, Any, bool], ...]:
    """The parts ``[lo, hi)`` of a KV block's `q_blocks` in order, and whether each needs an element
    mask. Without a limit on the left, rows past the end that do not count leave no third part.
    """
    parts = (
        (blocks.lo, blocks.full_lo, True),
        (blocks.full_lo, blocks.full_hi, False),
        (blocks.full_hi, blocks.hi, True),
    )
    return parts if tail_rows or mask.hides_keys else parts[:2]


def needs_mask(mask: Band, blocks: Blocks, n_block: Any) -> Any:
    """Whether a row of the query block does not see all of the visited ``n_block``."""
    late = n_block >= blocks.full_hi
    return late if mask.left is None else late | (n_block < blocks.full_lo)


def kv_spans(mask: Band, visited: Blocks, own: Blocks) -> tuple[tuple[Any, Any, bool], ...]:
    """``(lo, hi, masked)``: how the blocks below the last one are gone through, from the top down.

    ``visited`` are those of several query blocks together, the last of which is masked in any case;
    ``own`` are those of one of them. What it does not see at either end is masked.
    """
    last = visited.hi - 1
    full_hi = hi(lo(own.full_hi, last), visited.lo)
    full_lo = visited.lo if mask.left is None else hi(lo(own.full_lo, full_hi), visited.lo)
    above = () if mask.right is None else ((full_hi, last, True),)
    below = () if mask.left is None else ((visited.lo, full_lo, True),)
    return (*above, (full_lo, full_hi, False), *below)


def visits(
    mask: Band, m_block: int, tile_m: int, tile_n: int, seqlen_q: int, seqlen_k: int
) -> list[tuple[int, bool]]:
    """``(n_block, masked)`` of a query block from the last key down (Python ints only)."""
    r = kv_blocks(mask, m_block, tile_m, tile_n, seqlen_q, seqlen_k)
    return [(n, not r.full_lo <= n < r.full_hi) for n in reversed(range(r.lo, r.hi))]
