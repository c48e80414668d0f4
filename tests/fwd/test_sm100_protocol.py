"""The SM100 forward's protocol, event by event as its roles do it, against its plan.

Two query tiles, several tiles of work in a row with different numbers of KV blocks, also none.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_cute.fwd.sm100.plan import Q_TILES, FwdConfig
from fa_cute.plan import Edge, Via
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
PARTS = FwdConfig(head_dim=192, head_dim_v=128, kv_parts=(3, 2), o_over_q=True)
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


def load(work: list[int], cfg: FwdConfig) -> list[Event]:
    ring, out = Ring(cfg.ring), []
    k_parts, v_parts = cfg.kv_parts

    def kv(parts: int) -> list[Event]:
        one = [acquire("load_kv"), write("sKV"), commit("load_kv")]
        return [replace(e, slot=ring.next()) if e.verb == "write" else e for e in one * parts]

    for blocks in work:
        for i in range(blocks):
            if i == 0:
                for t in TILES:
                    out += [acquire("load_q", t), write("sQ", t), commit("load_q", t)]
                    out += kv(k_parts) if t == 0 else []
                out += kv(v_parts)
            else:
                out += [*kv(k_parts), *kv(v_parts)]
    return [*out, *tail("load_q", TILES), *tail("load_kv", range(cfg.ring))]


def mma(work: list[int], cfg: FwdConfig) -> list[Event]:
    ring, out = Ring(cfg.ring), [sync("tmem")]
    k_parts, v_parts = cfg.kv_parts

    def take(parts: int) -> list[int]:
        out.extend([wait("load_kv")] * parts)
        return [ring.next() for _ in range(parts)]

    def free(slots: list[int]) -> None:
        out.extend([release("load_kv")] * len(slots))

    def scores(t: int, k: list[int]) -> list[Event]:
        operands = [use("load_q", t), read("sQ", t), *(read("sKV", slot) for slot in k)]
        return [*operands, write(f"S{t}"), commit("mma_s", t)]

    def output(t: int, v: list[int]) -> list[Event]:
        o = [read(f"O{t}"), write(f"O{t}"), *(read("sKV", slot) for slot in v)]
        head = [wait("softmax_p", t), read(f"P{t}", span=HEAD), *o]
        return [*head, wait("softmax_p_tail", t), read(f"P{t}", span=REST), *o]

    for blocks in work:
        if blocks == 0:
            continue
        k = take(k_parts)
        for t in TILES:
            out += [wait("load_q", t), *scores(t, k)]
        free(k)
        for _ in range(blocks - 1):
            v = take(v_parts)
            for t in TILES:
                out += output(t, v)
                if t == Q_TILES - 1:
                    free(v)
                if t == 0:
                    k = take(k_parts)
                out += scores(t, k)
            free(k)
        out += [release("load_q", t) for t in TILES]
        v = take(v_parts)
        for t in TILES:
            out += [*output(t, v), commit("mma_o", t)]
        free(v)
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


def epilogue(work: list[int], cfg: FwdConfig) -> list[Event]:
    """The copy engine reads a slot until the wait before its release."""
    out = []
    for _ in work:
        for t in TILES:
            out += [wait("load_q", t)] if cfg.o_over_q else []
            out.append(wait("correction_o", t))
        for t in TILES:
            out += [read("sO", t), release("correction_o", t)]
            out += [release("load_q", t)] if cfg.o_over_q else []
    return out


def scripts(work: list[int], cfg: FwdConfig = CONFIG) -> dict[str, list[Event]]:
    """All roles; ``work`` is the number of KV blocks of each tile that the CTA gets."""
    return {
        "load": load(work, cfg),
        "mma": mma(work, cfg),
        **{f"softmax[{t}]": softmax(work, t) for t in TILES},
        "correction": correction(work),
        "epilogue": epilogue(work, cfg),
    }


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_no_deadlock_overrun_or_race(work: list[int]) -> None:
    check(CONFIG, scripts(work), seeds=1)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_other_ring_lengths(head_dim: int) -> None:
    cfg = FwdConfig(head_dim=head_dim, head_dim_v=head_dim)
    assert cfg.ring >= 3
    check(cfg, scripts([1, 2, 3, 4, 5], cfg), seeds=1)
    two = FwdConfig(head_dim=head_dim, head_dim_v=head_dim, kv_stages=2)
    check(two, scripts([3, 2], two), seeds=1)


@settings(max_examples=6, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_blocks_in_parts_and_output_over_queries(work: list[int]) -> None:
    """Every tile visits a block there: its Q has been brought."""
    check(PARTS, scripts(work, PARTS), seeds=1)


@pytest.mark.parametrize("slots", [5, 6, 7])
def test_parts_need_the_slots_of_a_k_and_a_v(slots: int) -> None:
    cfg = replace(PARTS, kv_stages=slots)
    check(cfg, scripts([3, 2], cfg), seeds=1)
    with pytest.raises(ProtocolError, match="deadlock"):
        four = replace(PARTS, kv_stages=4)
        check(four, scripts([2], four), seeds=0)


def test_the_next_q_waits_for_the_output_that_lies_there() -> None:
    """Freed by mma alone, Q would be loaded over an output that is being copied."""
    alone = Edge("load_q", Via.TMA_UMMA, "load", "mma", Q_TILES, tx=("sQ",))
    edges = tuple(alone if e.name == "load_q" else e for e in PARTS.topology.edges)
    plan = SimpleNamespace(
        warps=PARTS.warps,
        smem=PARTS.smem,
        tmem=PARTS.tmem,
        topology=replace(PARTS.topology, edges=edges),
    )
    broken = scripts([1, 1], PARTS)
    broken["epilogue"] = [e for e in broken["epilogue"] if e.name != "load_q"]
    with pytest.raises(ProtocolError, match=r"race: SMEM s[OQ], s[OQ]"):
        check(plan, broken, seeds=0)


def test_one_kv_slot_is_too_few() -> None:
    """mma holds the V of a block while it waits for the next K."""
    one = FwdConfig(kv_stages=1)
    with pytest.raises(ProtocolError, match="deadlock") as caught:
        check(one, scripts([2], one), seeds=0)
    text = str(caught.value)
    assert "acquire load_kv.empty[0] phase 1; 1 complete, missing mma" in text
    assert "wait load_kv.full[0] phase 2; 2 complete, missing load" in text


@pytest.mark.parametrize("cfg", [CONFIG, PARTS], ids=["plain", "parts"])
def test_every_missing_event_is_reported(cfg: FwdConfig) -> None:
    """Each acquire, commit, wait and release of each role is needed, but for one kind: what lets a
    next tile begin, where none does.
    """
    right = scripts([2, 1], cfg)
    missed, dropped = [], 0
    for agent, script in right.items():
        for at, event in enumerate(script):
            if event.verb not in ("acquire", "commit", "wait", "release", "sync"):
                continue
            dropped += 1
            try:
                check(cfg, {**right, agent: [*script[:at], *script[at + 1 :]]}, seeds=0)
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
