"""The Hopper backward's protocol, event by event as its roles do it, against its plan.

Both warpgroups do the same for half of the keys each (dQ a step late, or in step), or one makes P
and dV and the other dS and dK, in turns on the tensor core.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_cute.bwd.sm90.plan import CONSUMERS, ORDERED, TILES, UNORDERED, BwdSm90Config
from fa_cute.errors import PlanError
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

KEYS_ROW = next(row for row in TILES if row["head_dim"] == 128)
VARIANTS = (
    *TILES,
    *({**row, **ORDERED, "scheduler": "ascending"} for row in TILES),
    *({**row, **UNORDERED[row["head_dim"]]} for row in TILES if row["head_dim"] in UNORDERED),
    {**KEYS_ROW, "late_do": True, "few_fences": True},
    {**KEYS_ROW, "dq_direct": True, "q_stages": 3, "do_stages": 3},
    {**KEYS_ROW, **ORDERED, "scheduler": "ascending", "schedule": "lockstep", "ds_stages": 2},
    {**KEYS_ROW, "schedule": "lockstep", "ds_stages": 2},
)
CONFIGS = [BwdSm90Config(**row) for row in VARIANTS]
IDS = ["-".join(str(x) for x in row.values()) for row in VARIANTS]


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
        half = cfg.smem.bytes("sdS") // CONSUMERS
        self.own = None if cfg.by_role else (w * half, (w + 1) * half)

    def slots(self, m: int) -> tuple[int, int, int]:
        """Stages of Q, dO and dS in step m."""
        return m % self.cfg.q_stages, m % self.cfg.do_stages, m % self.cfg.ds_stages

    def hand_over(self, m: int) -> list[Event]:
        if self.cfg.dq_direct:
            return []
        buffer, full = self.w % self.cfg.dq_buffers, f"dq_full_{self.w}{m % self.cfg.store_warps}"
        return [sync(f"dq_empty_{self.w}"), write("sdQ", buffer), arrive(full)]

    def ready(self, m: int) -> list[Event]:
        """By role, before the turn with dQ of a step."""
        return []

    def dq(self, m: int) -> list[Event]:
        """dQ of a step: keys split, once the other's dS is there; by role, turns say that."""
        ready = [] if self.cfg.by_role else [sync(f"ds_{1 - self.w}{m % 2}")]
        return [*ready, read("sdS", self.slots(m)[2]), read("sK")]

    def write_ds(self, m: int) -> list[Event]:
        return [write("sdS", self.slots(m)[2], self.own)]

    def signal_ds(self, m: int) -> list[Event]:
        return [arrive(f"ds_{self.w}{m % 2}")]

    def scores(self, m: int) -> list[Event]:
        q, do, _ = self.slots(m)
        first = [read("sK"), read("sQ", q)]
        if self.cfg.schedule == "lagged" and m == 0:
            both = [wait("load_q"), *first, wait("load_v"), wait("load_do"), read("sV")]
        elif self.cfg.late_do:
            both = [wait("load_q"), *first, wait("load_do"), read("sV")]
        else:
            both = [wait("load_q"), wait("load_do"), *first, read("sV")]
        return [*both, read("sdO", do), read("sLse", q)]

    def lagged(self, steps: int) -> list[Event]:
        out = []
        for m in range(steps):
            q, do, _ = self.slots(m)
            out += [*self.scores(m), read("sDelta", do), *self.write_ds(m)]
            out += self.dq(m - 1) if m > 0 else []
            out += [read("sdO", do), read("sQ", q), *self.signal_ds(m)]
            out += self.hand_over(m - 1) if m > 0 else []
            out += [release("load_do"), release("load_q")]
        return [*out, *self.dq(steps - 1), *self.hand_over(steps - 1)]

    def lockstep(self, steps: int) -> list[Event]:
        out = []
        for m in range(steps):
            q, do, _ = self.slots(m)
            out += self.scores(m)
            out += [read("sDelta", do), *self.write_ds(m), *self.signal_ds(m), read("sdO", do)]
            out += [*self.dq(m), read("sQ", q), release("load_do"), *self.hand_over(m)]
            out.append(release("load_q"))
        return out

    def by_role(self, steps: int) -> list[Event]:
        take, give = sync(f"turn_{self.w}"), arrive(f"turn_{1 - self.w}")
        out = [wait("load_k")] if self.w == 0 else [give, wait("load_k"), wait("load_v")]
        for m in range(steps):
            q, do, _ = self.slots(m)
            out += [wait("load_q" if self.w == 0 else "load_do"), take]
            if self.w == 0:
                out += [read("sK"), read("sQ", q), give, read("sLse", q), release("load_q")]
                out += [write("sP"), arrive("p_full")]
            else:
                out += [read("sV"), read("sdO", do), give, sync("p_full"), read("sP")]
                out += [read("sDelta", do), release("load_do"), *self.write_ds(m)]
            out += [wait("load_do" if self.w == 0 else "load_q")]
            out += [*self.ready(m - 1), take, *(self.dq(m - 1) if m > 0 else [])]
            out += [read("sdO", do) if self.w == 0 else read("sQ", q), give]
            out += self.hand_over(m - 1) if m > 0 else []
            out.append(release("load_do" if self.w == 0 else "load_q"))
        out += [*self.ready(steps - 1), take, *([give] if self.w == 0 else [])]
        return [*out, *self.dq(steps - 1), *self.hand_over(steps - 1)]

    def script(self, steps: int) -> list[Event]:
        if self.cfg.by_role:
            return [*self.by_role(steps), *self.results()]
        if self.cfg.schedule == "lagged":
            return [wait("load_k"), *self.lagged(steps), *self.results()]
        return [wait("load_k"), wait("load_v"), *self.lockstep(steps), *self.results()]

    def results(self) -> list[Event]:
        """dK and dV over K and V, which nobody reads any more."""
        out = [sync("epilogue")]
        if self.cfg.by_role:
            out.append(write(("sdV", "sdK")[self.w]))
            return [*out, sync("epilogue"), read(("sdV", "sdK")[self.w])]
        for field in ("sdV", "sdK"):
            n = self.cfg.smem.bytes(field) // CONSUMERS
            out.append(write(field, 0, (self.w * n, (self.w + 1) * n)))
        return [*out, sync("epilogue"), *([read("sdK"), read("sdV")] if self.w == 0 else [])]


def dq_store(cfg: BwdSm90Config, steps: int, s: int) -> list[Event]:
    """The warp of the steps m with m % store_warps == s."""
    shared, who = cfg.dq_buffers == 1, range(cfg.dq_chunks.num)
    out = [arrive(f"dq_empty_{w}") for w in range(cfg.dq_buffers)] if s == 0 else []
    for _ in range(s, steps, cfg.store_warps):
        for w in who:
            out += [sync(f"dq_full_{w}{s}"), read("sdQ", w % cfg.dq_buffers)]
            out += [arrive(f"dq_empty_{1 - w}")] if shared else []
        out += [] if shared else [arrive(f"dq_empty_{w}") for w in who]
    return out


def scripts(cfg: BwdSm90Config, steps: int) -> dict[str, list[Event]]:
    names = ("values", "keys") if cfg.by_role else ("consumer/0", "consumer/1")
    stores = {} if cfg.dq_direct else {_store(cfg, s): s for s in range(cfg.store_warps)}
    return {
        "load": load(cfg, steps),
        **{name: Warpgroup(cfg, w).script(steps) for w, name in enumerate(names)},
        **{name: dq_store(cfg, steps, s) for name, s in stores.items()},
    }


def _store(cfg: BwdSm90Config, s: int) -> str:
    return "dq_store" if cfg.store_warps == 1 else f"dq_store/{s}"


@pytest.mark.parametrize("cfg", CONFIGS, ids=IDS)
@settings(max_examples=6, deadline=None)
@given(st.integers(1, 7))
def test_no_deadlock_overrun_or_race(cfg: BwdSm90Config, steps: int) -> None:
    check(cfg, scripts(cfg, steps), seeds=1)


@pytest.mark.parametrize(
    "cfg",
    [CONFIGS[2], CONFIGS[3], CONFIGS[-1], CONFIGS[-2], CONFIGS[len(TILES) + 5]],
    ids=lambda c: f"{c.split}-{c.schedule}-{c.store_warps}",
)
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
        (agent, f"arrive dq_empty_{w}")
        for agent in ("dq_store", "dq_store/0", "dq_store/1")
        for w in range(CONSUMERS)
    }  # to nobody, at last
    turns = [m for m in missed if m[1].startswith("sync turn")]
    assert set(missed) <= excused | set(turns), missed
    # After the last step nobody writes what a turn would protect.
    assert len(turns) <= 4, turns


@pytest.mark.parametrize("schedule", ["lagged", "lockstep"])
def test_stages_of_ds(schedule: str) -> None:
    """As many as the plan asks for hold; with one less, a warpgroup writes what the other reads."""
    with pytest.raises(PlanError, match="would overwrite dS"):
        BwdSm90Config(**{**KEYS_ROW, "schedule": schedule, "ds_stages": 1})
    cfg = BwdSm90Config(**{**KEYS_ROW, "schedule": schedule, "ds_stages": 3})
    needed = cfg.ds_stages_needed
    for stages in (needed, needed - 1):
        right = {
            agent: [
                replace(e, slot=m % stages) if (m := e.slot) is not None and e.name == "sdS" else e
                for e in script
            ]
            for agent, script in scripts(replace(cfg, ds_stages=8), 7).items()
        }
        if stages == needed:
            check(replace(cfg, ds_stages=8), right)
        else:
            with pytest.raises(ProtocolError, match=r"race: SMEM sdS"):
                check(replace(cfg, ds_stages=8), right)
