"""The Hopper backward's protocol, event by event as its roles do it, against its plan.

Two forms: both warpgroups do the same for half of the keys each, or one makes P and dV and the
other dS and dK. Turns on the tensor core order nearly everything.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_cute.bwd.sm90.plan import CONSUMERS, TILES, BwdSm90Config
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

CONFIGS = [BwdSm90Config(**row) for row in TILES]
IDS = [f"{c.head_dim}-{c.head_dim_v}" for c in CONFIGS]


def load(cfg: BwdSm90Config, steps: int) -> list[Event]:
    out = [acquire("load_k"), write("sK"), commit("load_k")]
    for m in range(steps):
        q, do = m % cfg.q_stages, m % cfg.do_stages
        out += [acquire("load_q"), write("sQ", q), write("sLse", q), commit("load_q")]
        out += [acquire("load_v"), write("sV"), commit("load_v")] if m == 0 else []
        out += [acquire("load_do"), write("sdO", do), write("sDelta", do), commit("load_do")]
    return [*out, *tail("load_q", range(cfg.q_stages)), *tail("load_do", range(cfg.do_stages))]


class Warpgroup:
    """Script of consumer warpgroup ``w``."""

    def __init__(self, cfg: BwdSm90Config, w: int) -> None:
        self.cfg, self.w = cfg, w
        self.in_turns = cfg.dq_split == "turns"
        half = cfg.smem.bytes("sdS") // CONSUMERS
        self.own = None if cfg.by_role else (w * half, (w + 1) * half)

    def take(self) -> list[Event]:
        return [sync(f"turn_{self.w}")] if self.cfg.turns else []

    def give(self) -> list[Event]:
        return [arrive(f"turn_{1 - self.w}")] if self.cfg.turns else []

    def wait_ds(self, m: int) -> list[Event]:
        """Without turns: the other's dS of step m is there."""
        return [] if self.cfg.turns else [sync(f"ds_{1 - self.w}{m % 2}")]

    def signal_ds(self, m: int) -> list[Event]:
        """Without turns: ours of step m is there, and we have read that of the step before."""
        return [] if self.cfg.turns else [arrive(f"ds_{self.w}{m % 2}")]

    def hand_over(self) -> list[Event]:
        buffer = self.w % self.cfg.dq_buffers
        if self.in_turns:
            buffer = self.w
        return [sync(f"dq_empty_{self.w}"), write("sdQ", buffer), arrive(f"dq_full_{self.w}")]

    def dq(self, m: int) -> list[Event]:
        return [read("sdS", m % self.cfg.ds_stages), read("sK")]

    def p(self, m: int) -> int:
        """Stage of P."""
        return m % self.cfg.smem["sP"].stages

    def mine(self, m: int) -> bool:
        """Whether this warpgroup computes (a part of) dQ of step m."""
        return not self.in_turns or m % 2 == self.w

    def second_turn(self, m: int, operands: list[Event]) -> list[Event]:
        """dQ of the step before and the last products of this one."""
        issued = [*self.give(), *self.signal_ds(m)]
        if m == 0:
            return [*self.take(), *operands, *issued]
        out = [*self.take(), *self.wait_ds(m - 1)]
        if self.in_turns:
            dq = self.dq(m - 1) if self.mine(m - 1) else []
            out += [*operands, *dq, *issued]
            return out + (self.hand_over() if self.mine(m - 1) else [])
        return [*out, *self.dq(m - 1), *operands, *issued, *self.hand_over()]

    def step_of_keys_split(self, m: int) -> list[Event]:
        q, do = m % self.cfg.q_stages, m % self.cfg.do_stages
        out = [wait("load_q"), wait("load_do"), *self.take()]
        out += [read("sK"), read("sQ", q), read("sV"), read("sdO", do), *self.give()]
        out += [read("sLse", q), read("sDelta", do), write("sdS", m % self.cfg.ds_stages, self.own)]
        out += self.second_turn(m, [read("sdO", do), read("sQ", q)])
        return [*out, release("load_do"), release("load_q")]

    def step_of_values(self, m: int) -> list[Event]:
        q, do = m % self.cfg.q_stages, m % self.cfg.do_stages
        out = [wait("load_q"), wait("load_do"), *self.take(), read("sK"), read("sQ", q)]
        out += [
            *self.give(),
            read("sLse", q),
            release("load_q"),
            write("sP", self.p(m)),
            arrive(f"p_full_{m % 2}"),
        ]
        out += self.second_turn(m, [read("sdO", do)])
        return [*out, release("load_do")]

    def step_of_keys(self, m: int) -> list[Event]:
        q, do = m % self.cfg.q_stages, m % self.cfg.do_stages
        out = [wait("load_q"), wait("load_do"), *self.take(), read("sV"), read("sdO", do)]
        out += [
            *self.give(),
            sync(f"p_full_{m % 2}"),
            read("sP", self.p(m)),
            read("sDelta", do),
            release("load_do"),
        ]
        out += [write("sdS", m % self.cfg.ds_stages), *self.second_turn(m, [read("sQ", q)])]
        return [*out, release("load_q")]

    def script(self, steps: int) -> list[Event]:
        step = self.step_of_keys_split
        loads = ("load_k", "load_v")
        if self.cfg.by_role:
            step = (self.step_of_values, self.step_of_keys)[self.w]
            loads = loads[: self.w + 1]
        out = self.give() if self.w == 1 else []
        out += [wait(edge) for edge in loads]
        for m in range(steps):
            out += step(m)
        out += [*self.take(), *self.wait_ds(steps - 1)]
        out += self.give() if self.w == 0 else []
        if self.mine(steps - 1):
            out += [*self.dq(steps - 1), *self.hand_over()]
        return out + self.results()

    def results(self) -> list[Event]:
        out = [sync("epilogue")]
        if self.cfg.by_role:
            out.append(write(("sdV", "sdK")[self.w]))
            return [*out, sync("epilogue"), read(("sdV", "sdK")[self.w])]
        for field in ("sdV", "sdK"):
            n = self.cfg.smem.bytes(field) // CONSUMERS
            out.append(write(field, 0, (self.w * n, (self.w + 1) * n)))
        return [*out, sync("epilogue"), *([read("sdK"), read("sdV")] if self.w == 0 else [])]


def dq_store(cfg: BwdSm90Config, steps: int) -> list[Event]:
    shared = cfg.dq_buffers == 1
    out = [arrive(f"dq_empty_{w}") for w in range(cfg.dq_buffers)]
    for m in range(steps):
        who = [m % 2] if cfg.dq_split == "turns" else range(cfg.dq_chunks.num)
        for w in who:
            out += [sync(f"dq_full_{w}"), read("sdQ", w % cfg.dq_buffers)]
            out += [arrive(f"dq_empty_{1 - w}")] if shared else []
        out += [] if shared else [arrive(f"dq_empty_{w}") for w in who]
    return out


def scripts(cfg: BwdSm90Config, steps: int) -> dict[str, list[Event]]:
    names = ("values", "keys") if cfg.by_role else ("consumer/0", "consumer/1")
    return {
        "load": load(cfg, steps),
        **{name: Warpgroup(cfg, w).script(steps) for w, name in enumerate(names)},
        "dq_store": dq_store(cfg, steps),
    }


@pytest.mark.parametrize("cfg", CONFIGS, ids=IDS)
@settings(max_examples=6, deadline=None)
@given(st.integers(1, 7))
def test_no_deadlock_overrun_or_race(cfg: BwdSm90Config, steps: int) -> None:
    check(cfg, scripts(cfg, steps), seeds=1)


@pytest.mark.parametrize("cfg", CONFIGS[1:4], ids=IDS[1:4])
def test_every_missing_event_is_reported(cfg: BwdSm90Config) -> None:
    """But for what something else orders already."""
    right = scripts(cfg, 3)
    missed, dropped = [], 0
    for agent, script in right.items():
        for at, event in enumerate(script):
            if event.verb not in ("acquire", "commit", "wait", "release", "sync", "arrive"):
                continue
            dropped += 1
            try:
                check(cfg, {**right, agent: [*script[:at], *script[at + 1 :]]}, seeds=0)
            except ProtocolError:
                continue
            missed.append((agent, str(event)))
    assert dropped > 70
    second = ("consumer/1", "keys")  # its first turn comes after the other one has waited for these
    excused = {(agent, f"wait load_{x}") for agent in second for x in "kv"}
    excused |= {
        ("dq_store", f"arrive dq_empty_{w}") for w in range(CONSUMERS)
    }  # to nobody, at last
    turns = [m for m in missed if m[1].startswith("sync turn")]
    assert set(missed) <= excused | set(turns), missed
    # After the last step nobody writes what a turn would protect.
    assert len(turns) <= 4, turns


def test_turns_need_two_stages_of_ds() -> None:
    """With one, the other warpgroup may still read it for its last dQ."""
    row = TILES[IDS.index("128-128")]
    one = BwdSm90Config(**row | {"ds_stages": 1})
    with pytest.raises(ProtocolError, match=r"race: SMEM sdS"):
        check(one, scripts(one, 3))


@pytest.mark.parametrize("stages", [2, 3])
def test_without_turns_ds_needs_three_stages(stages: int) -> None:
    """What tells us that the other has read stage m comes a step later than with turns."""
    row = TILES[IDS.index("128-128")]
    cfg = BwdSm90Config(**row | {"turns": False, "offset": False, "ds_stages": stages})
    if stages == 3:
        check(cfg, scripts(cfg, 7))
    else:
        with pytest.raises(ProtocolError, match=r"race: SMEM sdS"):
            check(cfg, scripts(cfg, 7))
