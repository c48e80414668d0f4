"""The SM100 forward's protocol, event by event as its roles do it, against its plan.

Two query tiles, several tiles of work in a row with different numbers of KV blocks, also none.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_cute.fwd.sm100.plan import Q_TILES, FwdConfig
from fa_cute.plan.check import check
from fa_cute.plan.events import (
    Event,
    ProtocolError,
    acquire,
    claim,
    commit,
    read,
    release,
    sync,
    tail,
    use,
    wait,
    write,
)

TILES = range(Q_TILES)
CONFIG = FwdConfig()
HEAD = (0, CONFIG.p_head // 2)  # two 16-bit keys in a column
REST = (CONFIG.p_head // 2, CONFIG.tile_n // 2)


class Ring:
    """Slot numbers of the KV ring in the order of its use."""

    def __init__(self, slots: int) -> None:
        self.slots, self.at = slots, 0

    def next(self) -> int:
        slot = self.at % self.slots
        self.at += 1
        return slot


def load(work: list[int], slots: int) -> list[Event]:
    ring, out = Ring(slots), []

    def kv() -> list[Event]:
        return [acquire("load_kv"), write("sKV", ring.next()), commit("load_kv")]

    for blocks in work:
        for i in range(blocks):
            if i == 0:
                for t in TILES:
                    out += [acquire("load_q", t), write("sQ", t), commit("load_q", t)]
                    out += kv() if t == 0 else []
                out += kv()
            else:
                out += [*kv(), *kv()]
    return [*out, *tail("load_q", TILES), *tail("load_kv", range(slots))]


def mma(work: list[int], slots: int) -> list[Event]:
    ring, out = Ring(slots), [sync("tmem")]

    def scores(t: int, k: int) -> list[Event]:
        return [use("load_q", t), read("sQ", t), read("sKV", k), write(f"S{t}"), commit("mma_s", t)]

    def output(t: int, v: int) -> list[Event]:
        o = [read(f"O{t}"), write(f"O{t}"), read("sKV", v)]
        head = [wait("softmax_p", t), read(f"P{t}", span=HEAD), *o]
        return [*head, wait("softmax_p_tail", t), read(f"P{t}", span=REST), *o]

    for blocks in work:
        if blocks == 0:
            continue
        k = ring.next()
        out.append(wait("load_kv"))
        for t in TILES:
            out += [wait("load_q", t), *scores(t, k)]
        out.append(release("load_kv"))
        for _ in range(blocks - 1):
            v, k = ring.next(), ring.next()
            out.append(wait("load_kv"))
            for t in TILES:
                out += output(t, v)
                out += [release("load_kv")] if t == Q_TILES - 1 else []
                out += [wait("load_kv")] if t == 0 else []
                out += scores(t, k)
            out.append(release("load_kv"))
        out += [release("load_q", t) for t in TILES]
        v = ring.next()
        out.append(wait("load_kv"))
        for t in TILES:
            out += [*output(t, v), commit("mma_o", t)]
        out.append(release("load_kv"))
    return [*out, sync("tmem")]


def softmax(work: list[int], t: int) -> list[Event]:
    out = [sync("tmem")]
    stats = [write("sStats", t), commit("softmax_stats", t)]
    for blocks in work:
        for i in range(blocks):
            out += [wait("mma_s", t), read(f"S{t}")]
            # Correction read the last factor before it let mma accumulate, hence before this S.
            out += [claim("softmax_stats", t), *stats] if i > 0 else []
            out += [write(f"P{t}", span=HEAD), commit("softmax_p", t)]
            out += [write(f"P{t}", span=REST), commit("softmax_p_tail", t)]
        out += [acquire("softmax_stats", t), *stats] if blocks else []
    return [*out, *tail("softmax_stats", [t]), sync("tmem")]


def correction(work: list[int]) -> list[Event]:
    out = [sync("tmem"), *(commit("softmax_p", t) for t in TILES)]

    def stat(t: int) -> list[Event]:
        return [wait("softmax_stats", t), read("sStats", t), release("softmax_stats", t)]

    for blocks in work:
        for _ in range(blocks - 1):
            for t in TILES:
                out += [*stat(t), read(f"O{t}"), write(f"O{t}"), commit("softmax_p", t)]
        for t in TILES:
            if blocks:
                out += [*stat(t), wait("mma_o", t), acquire("correction_o", t)]
                out += [read(f"O{t}"), write("sO", t), commit("softmax_p", t)]
            else:
                out += [acquire("correction_o", t), write("sO", t)]
            out.append(commit("correction_o", t))
    return [*out, *tail("correction_o", TILES), sync("tmem")]


def epilogue(work: list[int]) -> list[Event]:
    """The copy engine reads a slot until the wait before its release."""
    out = []
    for _ in work:
        out += [wait("correction_o", t) for t in TILES]
        for t in TILES:
            out += [read("sO", t), release("correction_o", t)]
    return out


def scripts(work: list[int], slots: int = CONFIG.ring) -> dict[str, list[Event]]:
    """All roles; ``work`` is the number of KV blocks of each tile that the CTA gets."""
    return {
        "load": load(work, slots),
        "mma": mma(work, slots),
        **{f"softmax[{t}]": softmax(work, t) for t in TILES},
        "correction": correction(work),
        "epilogue": epilogue(work),
    }


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_no_deadlock_overrun_or_race(work: list[int]) -> None:
    check(CONFIG, scripts(work), seeds=1)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_other_ring_lengths(head_dim: int) -> None:
    cfg = FwdConfig(head_dim=head_dim, head_dim_v=head_dim)
    assert cfg.ring >= 3
    check(cfg, scripts([1, 2, 3, 4, 5], cfg.ring), seeds=1)
    two = FwdConfig(head_dim=head_dim, head_dim_v=head_dim, kv_stages=2)
    check(two, scripts([3, 2], 2), seeds=1)


def test_one_kv_slot_is_too_few() -> None:
    """mma holds the V of a block while it waits for the next K."""
    one = FwdConfig(kv_stages=1)
    with pytest.raises(ProtocolError, match="deadlock") as caught:
        check(one, scripts([2], 1), seeds=0)
    text = str(caught.value)
    assert "acquire load_kv.empty[0] phase 1; 1 complete, missing mma" in text
    assert "wait load_kv.full[0] phase 2; 2 complete, missing load" in text


def test_every_missing_event_is_reported() -> None:
    """Each acquire, commit, wait and release of each role is needed, but for one kind: what lets a
    next tile begin, where none does.
    """
    right = scripts([2, 1])
    missed, dropped = [], 0
    for agent, script in right.items():
        for at, event in enumerate(script):
            if event.verb not in ("acquire", "commit", "wait", "release", "sync"):
                continue
            dropped += 1
            try:
                check(CONFIG, {**right, agent: [*script[:at], *script[at + 1 :]]}, seeds=0)
            except ProtocolError:
                continue
            last = at == max(i for i, e in enumerate(script) if e == event)
            if not (agent == "correction" and event.name == "softmax_p" and last):
                missed.append(f"{agent} without event {at}: {event}")
    assert dropped > 80
    assert not missed, "\n".join(missed)


def test_every_wait_for_an_output_slot_is_needed() -> None:
    """Taken without a wait, it races with the copy of the tile before; the first ones are free."""
    right = scripts([1, 1, 2])
    script = right["correction"]
    taken = [i for i, e in enumerate(script) if e == acquire("correction_o", e.slot)]
    for at in taken:
        claimed = claim("correction_o", script[at].slot)
        broken = {**right, "correction": [*script[:at], claimed, *script[at + 1 :]]}
        if at in taken[:Q_TILES]:
            check(CONFIG, broken, seeds=0)
        else:
            with pytest.raises(ProtocolError, match="race: SMEM sO"):
                check(CONFIG, broken, seeds=0)


def test_rescaling_without_waiting_for_the_factor_races_with_the_product() -> None:
    broken = scripts([3])
    stat = wait("softmax_stats", 0)
    broken["correction"] = [e for e in broken["correction"] if e != stat]
    with pytest.raises(ProtocolError):
        check(CONFIG, broken, seeds=0)
