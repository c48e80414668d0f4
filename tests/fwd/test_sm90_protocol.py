"""The SM90 forward's protocol, event by event as its roles do it, against its plan."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_cute.fwd.sm90.plan import FwdConfig
from fa_cute.plan.check import check
from fa_cute.plan.events import (
    Event,
    ProtocolError,
    acquire,
    arrive,
    commit,
    read,
    release,
    sync,
    tail,
    wait,
    write,
)


@dataclass(frozen=True)
class Work:
    """One tile: its KV blocks, and how many of the last ones a team does not need."""

    blocks: int
    unseen: tuple[int, ...]


class Slots:
    """Slot numbers of a ring in the order of its use."""

    def __init__(self, stages: int) -> None:
        self.stages, self.at = stages, 0

    def next(self) -> int:
        slot = self.at % self.stages
        self.at += 1
        return slot


def load(cfg: FwdConfig, tiles: list[Work]) -> list[Event]:
    slots = {"q": Slots(cfg.q_stages), "k": Slots(cfg.kv_stages), "v": Slots(cfg.kv_stages)}
    out: list[Event] = []

    def bring(what: str) -> None:
        edge = f"load_{what}"
        out.extend([acquire(edge), write(f"s{what.upper()}", slots[what].next()), commit(edge)])

    for tile in tiles:
        bring("k")
        bring("q")
        for _ in range(tile.blocks - 1):
            bring("k")
            bring("v")
        bring("v")
    for what, ring in slots.items():
        out += tail(f"load_{what}", range(ring.stages))
    return out


class Consumer:
    """Script of one warpgroup."""

    def __init__(self, cfg: FwdConfig, index: int) -> None:
        self.cfg, self.index = cfg, index
        self.k, self.v = Slots(cfg.kv_stages), Slots(cfg.kv_stages)
        self.q = Slots(cfg.q_stages)
        self.out: list[Event] = []
        slab = cfg.smem.bytes("sQ") // cfg.teams
        self.slab = (index * slab, (index + 1) * slab)

    def pass_turn(self) -> None:
        if self.cfg.teams > 1:
            self.out.append(arrive(f"turn{(self.index + 1) % self.cfg.teams}"))

    def wait_turn(self) -> None:
        if self.cfg.teams > 1:
            self.out.append(sync(f"turn{self.index}"))

    def first_scores(self, tile: Work) -> int:
        self.skip_k(tile)
        self.out += [wait("load_q"), wait("load_k")]
        q = self.q.next()
        self.turn(q, self.k.next(), None)
        self.out.append(release("load_k"))
        return q

    def turn(self, q: int | None, k: int | None, v: int | None) -> None:
        self.wait_turn()
        if v is not None:
            self.out.append(read("sV", v))
        if k is not None:
            self.out += [read("sQ", q, self.slab), read("sK", k)]
        self.pass_turn()

    def skip_k(self, tile: Work) -> None:
        for _ in range(tile.unseen[self.index]):
            self.out += [wait("load_k"), release("load_k")]
            self.k.next()
            self.wait_turn()
            self.pass_turn()

    def skip_v(self, tile: Work) -> None:
        for _ in range(tile.unseen[self.index]):
            self.out += [wait("load_v"), release("load_v")]
            self.v.next()

    def script(self, tiles: list[Work]) -> list[Event]:
        assert self.cfg.joined
        if self.index == self.cfg.teams - 1:
            self.pass_turn()
        q = self.first_scores(tiles[0])
        for i, tile in enumerate(tiles):
            after = tiles[i + 1] if i + 1 < len(tiles) else None
            self.skip_v(tile)
            if i > 0:
                self.out.append(release("load_q"))
            for _ in range(tile.blocks - tile.unseen[self.index] - 1):
                self.out += [wait("load_v"), wait("load_k")]
                self.turn(q, self.k.next(), self.v.next())
                self.out += [release("load_v"), release("load_k")]
            self.out.append(wait("load_v"))
            v, q_after = self.v.next(), None
            if after is not None:
                self.skip_k(after)
                self.out += [wait("load_q"), wait("load_k")]
                q_after = self.q.next()
                self.turn(q_after, self.k.next(), v)
                self.out.append(release("load_k"))
            else:
                self.turn(None, None, v)
            self.out.append(release("load_v"))
            self.store(q)
            q = q_after
        self.out.append(release("load_q"))
        return self.out

    def store(self, q: int) -> None:
        """O over the team's part of Q; its first warp has the copy engine read it, and releases
        ``load_q`` once that is done.
        """
        meet = sync(f"team{self.index}")
        self.out += [meet, write("sO", q, self.slab), meet]


def scripts(cfg: FwdConfig, tiles: list[Work]) -> dict[str, list[Event]]:
    teams = {name: Consumer(cfg, i).script(tiles) for i, name in enumerate(cfg.consumers)}
    return {"load": load(cfg, tiles), **teams}


def causal(teams: int, blocks: int) -> Work:
    """A tile on the diagonal: earlier teams need fewer blocks."""
    return Work(blocks, tuple(min(blocks - 1, (teams - 1 - i) // 2) for i in range(teams)))


@st.composite
def works(draw: st.DrawFn, cfg: FwdConfig) -> list[Work]:
    """As a causal mask has it: later teams need more, and nobody skips more than the ring holds."""
    tiles = []
    for blocks in draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)):
        skip = st.integers(0, min(blocks - 1, cfg.kv_stages))
        unseen = sorted((draw(skip) for _ in range(cfg.teams - 1)), reverse=True)
        tiles.append(Work(blocks, (*unseen, 0)))
    return tiles


@pytest.mark.parametrize("teams", [1, 2, 3])
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_no_deadlock_overrun_or_race(teams: int, data: st.DataObject) -> None:
    cfg = FwdConfig(head_dim=64, head_dim_v=64, teams=teams)
    check(cfg, scripts(cfg, data.draw(works(cfg))), seeds=1)


def test_a_team_that_skips_too_much_hangs() -> None:
    """It takes no V until it has given back its K slots, and load brings them in turn."""
    cfg = FwdConfig(teams=2, kv_stages=2)
    check(cfg, scripts(cfg, [Work(5, (0, 2))]))
    with pytest.raises(ProtocolError, match="deadlock") as caught:
        check(cfg, scripts(cfg, [Work(5, (0, 4))]))
    assert "load: event 21 of 39: acquire load_v.empty[0]" in str(caught.value)


def test_every_missing_event_of_a_team_is_reported() -> None:
    cfg = FwdConfig(teams=2)
    right = scripts(cfg, [causal(2, 2), causal(2, 3)])
    missed, dropped = [], 0
    for agent in ("load", "consumer1"):
        script = right[agent]
        for at, event in enumerate(script):
            if event.verb in ("read", "write", "tail"):
                continue
            dropped += 1
            try:
                check(cfg, {**right, agent: [*script[:at], *script[at + 1 :]]}, seeds=0)
            except ProtocolError:
                continue
            missed.append(f"{agent} without event {at}: {event}")
    assert dropped > 50
    # Turns are about speed: without its last ones nobody waits for anybody. A team's own meeting
    # orders its threads among themselves, which is not this check's to see.
    excused = ("turn", "team")
    assert not [m for m in missed if not any(f" {e}" in m for e in excused)], "\n".join(missed)
