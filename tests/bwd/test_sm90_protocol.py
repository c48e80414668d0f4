"""The Hopper backward's protocol, event by event as its roles do it, against its plan.

A script takes the query blocks of all tiles of its CTA, ``(first block, end)`` each: one tile, or
several of a persistent kernel.

Both warpgroups do the same for half of the keys each (dQ a step late, or in step), or one makes P
and dV and the other dS and dK, in turns on the tensor core.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_cute.bwd.args import BwdSpec
from fa_cute.bwd.sm90.plan import (
    CONSUMERS,
    EVERY,
    LESS_DS,
    ORDERED,
    STAY,
    TILE_STAGES,
    TILES,
    UNORDERED,
    BwdSm90Config,
    config,
)
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
LOCKSTEP_ROW = {**KEYS_ROW, "schedule": "lockstep", "ds_stages": 2}
VARIANTS = (
    *TILES,
    *({**row, **ORDERED, "scheduler": "ascending"} for row in TILES),
    *({**row, **UNORDERED[row["head_dim"]]} for row in TILES if row["head_dim"] in UNORDERED),
    {**KEYS_ROW, "late_do": True, "few_fences": True},
    {**KEYS_ROW, **ORDERED, "scheduler": "ascending", "store_warps": 3},
    {**KEYS_ROW, "dq_direct": True, "q_stages": 3, "do_stages": 3},
    {**KEYS_ROW, **ORDERED, "scheduler": "ascending", "schedule": "lockstep", "ds_stages": 2},
    LOCKSTEP_ROW,
    {**KEYS_ROW, "ds_stages": 2},
    {**KEYS_ROW, **ORDERED, "scheduler": "ascending", "ds_stages": 2, "store_warps": 3},
    *({**row, "persistent": True} for row in TILES),
    *({**row, **ORDERED, "scheduler": "ascending", "persistent": True} for row in TILES),
    *(
        {**row, **UNORDERED.get(row["head_dim"], {}), "persistent": True}
        for row in TILES
        if row is not KEYS_ROW
    ),
    {**KEYS_ROW, **UNORDERED[128], **STAY},
    {**KEYS_ROW, **ORDERED, **STAY, "scheduler": "ascending", "ds_stages": 2},
    # tiles of two blocks and less are staggered, longer ones are not
    {**KEYS_ROW, **LESS_DS, "stagger_rows": 128},
    {**KEYS_ROW, **ORDERED, "scheduler": "ascending", "stagger_rows": EVERY},
)
CONFIGS = [BwdSm90Config(**row) for row in VARIANTS]
# And those of the table, for lists of sequences and windows too; test_sm90_pair_protocol.py has the
# pairs.
KINDS = {
    "dense": {},
    "list": {"varlen": True},
    "list, shared": {"varlen": True, "qhead_per_kvhead": 2},
    "window": {"window": (True, False)},
    "window, list": {"window": (True, False), "varlen": True},
}
TABLE = {
    f"{d}-{'causal' if causal else 'full'}-{'in order' if order else 'any order'}-{kind}": config(
        BwdSpec("bf16", d, d, causal, deterministic=order, **options)
    )
    for d in (64, 96, 128)
    for causal, order in itertools.product((False, True), (False, True))
    for kind, options in KINDS.items()
}
CONFIGS += [c for c in dict.fromkeys(TABLE.values()) if c not in CONFIGS]
LOCKSTEP = VARIANTS.index(LOCKSTEP_ROW)
ONE_TILE = [c for c in CONFIGS if not c.persistent]
STAYING = [c for c in CONFIGS if c.persistent]


Tiles = tuple[tuple[int, int], ...]


def name(cfg: BwdSm90Config) -> str:
    """Of a test: the row that a config was made of."""
    index = CONFIGS.index(cfg)
    if index < len(VARIANTS):
        return "-".join(str(x) for x in VARIANTS[index].values())
    return next(row for row, c in TABLE.items() if c == cfg)


def load(cfg: BwdSm90Config, tiles: Tiles) -> list[Event]:
    k = [acquire("load_k"), write("sK"), commit("load_k")]
    v = [acquire("load_v"), write("sV"), commit("load_v")]
    out, step = [] if cfg.persistent else k, 0
    for number, (first, end) in enumerate(tiles):
        out += hand_out(cfg, number)
        out += [*k, *v] if cfg.persistent and first == end else []
        for m in range(first, end):
            q, do = step % cfg.q_stages, step % cfg.do_stages
            out += [acquire("load_q"), write("sQ", q), write("sLse", q), commit("load_q")]
            out += v if m == first and not cfg.persistent else []
            out += [acquire("load_do"), write("sdO", do), write("sDelta", do), commit("load_do")]
            out += [*k, *v] if m == first and cfg.persistent else []
            step += 1
    out += hand_out(cfg, len(tiles))
    stages = {"load_q": cfg.q_stages, "load_do": cfg.do_stages}
    if cfg.persistent:
        stages = {"load_k": 1, "load_v": 1, **stages, "load_tile": TILE_STAGES}
    return [*out, *(event for edge, num in stages.items() for event in tail(edge, range(num)))]


def hand_out(cfg: BwdSm90Config, number: int) -> list[Event]:
    """The load warp's: which tile is next, or that none is."""
    put = [acquire("load_tile"), write("sTile", number % TILE_STAGES), commit("load_tile")]
    return put if cfg.persistent else []


def handed(cfg: BwdSm90Config, number: int) -> list[Event]:
    """Everybody else's."""
    got = [wait("load_tile"), read("sTile", number % TILE_STAGES)]
    return got if cfg.persistent else []


def done(cfg: BwdSm90Config) -> list[Event]:
    return [release("load_tile")] if cfg.persistent else []


class Warpgroup:
    """Script of consumer warpgroup ``w``."""

    def __init__(self, cfg: BwdSm90Config, w: int, shared: bool = False) -> None:
        self.cfg, self.w, self.shared = cfg, w, shared  # whether kv heads are
        half = cfg.smem.bytes("sdS") // CONSUMERS
        self.own = None if cfg.by_role else (w * half, (w + 1) * half)
        self.early = cfg.waits_early
        self.before = 0  # query blocks of the tiles before, less the first block of this one

    def slots(self, m: int) -> tuple[int, int, int]:
        """Stages of Q, dO and dS of a query block."""
        step, c = self.before + m, self.cfg
        return step % c.q_stages, step % c.do_stages, m % c.ds_stages

    def hand_over(self, m: int) -> list[Event]:
        if self.cfg.dq_direct:
            return []
        buffer, full = self.w % self.cfg.dq_buffers, f"dq_full_{self.w}{m % self.cfg.full_barriers}"
        return [sync(f"dq_empty_{self.w}"), write("sdQ", buffer), arrive(full)]

    def ready(self, m: int) -> list[Event]:
        """By role, before the turn with dQ of a step."""
        return []

    def other_ds(self, m: int) -> list[Event]:
        """The other's dS of a step is there; by role, turns say that."""
        return [] if self.cfg.by_role else [sync(f"ds_{1 - self.w}{m % 2}")]

    def dq(self, m: int) -> list[Event]:
        """dQ of a step."""
        return [read("sdS", self.slots(m)[2]), read("sK")]

    def write_ds(self, m: int) -> list[Event]:
        return [write("sdS", self.slots(m)[2], self.own)]

    def signal_ds(self, m: int) -> list[Event]:
        return [arrive(f"ds_{self.w}{m % 2}")]

    def staggered(self, first: int, end: int) -> bool:
        """Whether warpgroup 1 begins such a tile behind warpgroup 0."""
        return end - first <= self.cfg.stagger_rows // self.cfg.tile_m

    def scores(self, m: int, first: int) -> list[Event]:
        q, do, _ = self.slots(m)
        product = [read("sK"), read("sQ", q)]
        if self.cfg.schedule == "lagged" and m == first:
            both = [wait("load_q"), *product, wait("load_v"), wait("load_do"), read("sV")]
        elif self.cfg.late_do:
            both = [wait("load_q"), *product, wait("load_do"), read("sV")]
        else:
            both = [wait("load_q"), wait("load_do"), *product, read("sV")]
        return [*both, read("sdO", do), read("sLse", q)]

    def lagged(self, first: int, end: int) -> list[Event]:
        out = []
        for m in range(first, end):
            q, do, _ = self.slots(m)
            ready = self.other_ds(m - 1) if m > first else []
            begin = self.scores(m, first)
            if m == first and self.staggered(first, end):
                begin = [begin[0], sync("lead"), *begin[1:]] if self.w else [*begin, arrive("lead")]
            out += [*begin, read("sDelta", do)]
            out += [*ready, *self.write_ds(m)] if self.early else [*self.write_ds(m), *ready]
            out += self.dq(m - 1) if m > first else []
            out += [read("sdO", do), read("sQ", q), *self.signal_ds(m)]
            out += self.hand_over(m - 1) if m > first else []
            out += [release("load_do"), release("load_q")]
        out += [*self.other_ds(end - 1), *self.dq(end - 1)]
        return [*out, *self.freed(True), *self.hand_over(end - 1)]

    def lockstep(self, first: int, end: int) -> list[Event]:
        out = []
        for m in range(first, end):
            q, do, _ = self.slots(m)
            out += self.scores(m, first)
            out += [read("sDelta", do), *self.write_ds(m), *self.signal_ds(m), read("sdO", do)]
            out += [*self.other_ds(m), *self.dq(m), read("sQ", q), release("load_do")]
            out += self.hand_over(m)
            out.append(release("load_q"))
        return [*out, *self.freed(True)]

    def by_role(self, first: int, end: int) -> list[Event]:
        take, give = sync(f"turn_{self.w}"), arrive(f"turn_{1 - self.w}")
        out = [wait("load_k")] if self.w == 0 else [give, wait("load_k"), wait("load_v")]
        for m in range(first, end):
            q, do, _ = self.slots(m)
            out += [wait("load_q" if self.w == 0 else "load_do"), take]
            if self.w == 0:
                out += [read("sK"), read("sQ", q), give, read("sLse", q), release("load_q")]
                out += [write("sP"), arrive("p_full")]
            else:
                out += [read("sV"), read("sdO", do), give, sync("p_full"), read("sP")]
                out += [read("sDelta", do), release("load_do"), *self.write_ds(m)]
            out += [wait("load_do" if self.w == 0 else "load_q")]
            out += [*self.ready(m - 1), take, *(self.dq(m - 1) if m > first else [])]
            out += [read("sdO", do) if self.w == 0 else read("sQ", q), give]
            out += self.hand_over(m - 1) if m > first else []
            out.append(release("load_do" if self.w == 0 else "load_q"))
        out += [*self.ready(end - 1), take, *([give] if self.w == 0 else [])]
        if self.w == 0 and self.cfg.persistent:
            out.append(wait("load_v"))
        return [*out, *self.dq(end - 1), *self.hand_over(end - 1), *self.freed(True)]

    def tile(self, first: int, end: int) -> list[Event]:
        if self.cfg.by_role:
            return self.by_role(first, end)
        if first == end:  # of a sequence without queries
            return [wait("load_k"), wait("load_v"), *self.freed(True)]
        if self.cfg.schedule == "lagged":
            return [wait("load_k"), *self.lagged(first, end)]
        return [wait("load_k"), wait("load_v"), *self.lockstep(first, end)]

    def script(self, steps: int | Tiles) -> list[Event]:
        tiles = ((0, steps),) if isinstance(steps, int) else steps
        out = []
        for number, (first, end) in enumerate(tiles):
            self.before -= first
            out += [*handed(self.cfg, number), *self.tile(first, end)]
            out += self.sums() if self.shared else self.results(number)
            out += done(self.cfg)
            self.before += end
        return [*out, *handed(self.cfg, len(tiles)), *done(self.cfg)]

    def freed(self, before: bool) -> list[Event]:
        """K and V that go back to the load warp before results are out, or after."""
        first = {"load_k": self.shared or self.cfg.dk_over_ds, "load_v": self.shared}
        return [release(x) for x in first if first[x] == before and self.cfg.persistent]

    def sums(self) -> list[Event]:
        """Shared kv heads: dK and dV from the registers, in any order."""
        meet = self.cfg.persistent and not self.cfg.by_role
        return [sync("epilogue")] if meet else []

    def results(self, number: int) -> list[Event]:
        """dK and dV over K and V, which nobody reads any more."""
        again = [read("sTile", number % TILE_STAGES)] if self.cfg.persistent else []
        return [*again, *self.over_operands(), *self.freed(False)]

    def over_operands(self) -> list[Event]:
        out = [sync("epilogue")]
        if self.cfg.by_role:
            out.append(write(("sdV", "sdK")[self.w]))
            return [*out, sync("epilogue"), read(("sdV", "sdK")[self.w])]
        for field in ("sdV", "sdK"):
            n = self.cfg.smem.bytes(field) // CONSUMERS
            out.append(write(field, 0, (self.w * n, (self.w + 1) * n)))
        return [*out, sync("epilogue"), *([read("sdK"), read("sdV")] if self.w == 0 else [])]


def dq_store(cfg: BwdSm90Config, tiles: Tiles, s: int) -> list[Event]:
    """The warp of the query blocks m with m % store_warps == s, or of warpgroup s."""
    shared, who = cfg.dq_buffers == 1, range(cfg.dq_chunks.num)
    out = [arrive(f"dq_empty_{w}") for w in range(cfg.dq_buffers)] if s == 0 else []
    for number, (first, end) in enumerate(tiles):
        out += handed(cfg, number)
        for m in range(first, end):
            if cfg.own_store:
                out += [sync(f"dq_full_{s}0"), read("sdQ", s), arrive(f"dq_empty_{s}")]
                continue
            if m % cfg.store_warps != s:
                continue
            for w in who:
                out += [sync(f"dq_full_{w}{s}"), read("sdQ", w % cfg.dq_buffers)]
                out += [arrive(f"dq_empty_{1 - w}")] if shared else []
            out += [] if shared else [arrive(f"dq_empty_{w}") for w in who]
        out += done(cfg)
    return [*out, *handed(cfg, len(tiles)), *done(cfg)]


def scripts(cfg: BwdSm90Config, steps: int | Tiles, shared: bool = False) -> dict[str, list[Event]]:
    """``steps``: query blocks of one tile, or those of several; ``shared``: kv heads are."""
    tiles = ((0, steps),) if isinstance(steps, int) else steps
    names = ("values", "keys") if cfg.by_role else ("consumer/0", "consumer/1")
    stores = {} if cfg.dq_direct else {_store(cfg, s): s for s in range(cfg.store_warps)}
    return {
        "load": load(cfg, tiles),
        **{name: Warpgroup(cfg, w, shared).script(tiles) for w, name in enumerate(names)},
        **{name: dq_store(cfg, tiles, s) for name, s in stores.items()},
    }


def _store(cfg: BwdSm90Config, s: int) -> str:
    return "dq_store" if cfg.store_warps == 1 else f"dq_store/{s}"


@pytest.mark.parametrize("cfg", ONE_TILE, ids=name)
@settings(max_examples=6, deadline=None)
@given(st.integers(1, 7))
def test_no_deadlock_overrun_or_race(cfg: BwdSm90Config, steps: int) -> None:
    check(cfg, scripts(cfg, steps), seeds=1)


@pytest.mark.parametrize("cfg", STAYING, ids=name)
@settings(max_examples=6, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=4), st.booleans())
def test_tile_after_tile(cfg: BwdSm90Config, tiles, shared: bool) -> None:
    """Of any first block and number of blocks, an odd one too, or none, which only lists have; kv
    heads shared or not.
    """
    if cfg.by_role or cfg.schedule != "lagged":
        tiles = [(lo, max(n, 1)) for lo, n in tiles]
    check(cfg, scripts(cfg, tuple((lo, lo + n) for lo, n in tiles), shared), seeds=1)


def unnoticed(cfg: BwdSm90Config, right: dict[str, list[Event]], of=lambda event: True):
    """Events, of those that somebody may wait for, without which the check says nothing; and how
    many were left out in turn."""
    missed, dropped = [], 0
    for agent, script in right.items():
        for at, event in enumerate(script):
            if event.verb not in ("acquire", "commit", "wait", "release", "sync", "arrive"):
                continue
            if not of(event):
                continue
            dropped += 1
            try:
                check(cfg, {**right, agent: [*script[:at], *script[at + 1 :]]}, seeds=0)
            except ProtocolError:
                continue
            missed.append((agent, str(event)))
    return missed, dropped


@pytest.mark.parametrize(
    "cfg",
    [
        *(CONFIGS[i] for i in (2, 3, LOCKSTEP, LOCKSTEP - 1, LOCKSTEP + 1, len(TILES) + 5)),
        next(c for c in CONFIGS if c.own_store and not c.persistent),
    ],
    ids=lambda c: f"{c.split}-{c.schedule}-{c.store_warps}",
)
def test_every_missing_event_is_reported(cfg: BwdSm90Config) -> None:
    """But for what something else orders already."""
    right = scripts(cfg, 3)
    missed, dropped = unnoticed(cfg, right)
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


@pytest.mark.parametrize("shared", [False, True], ids=["store", "add"])
@pytest.mark.parametrize(
    "cfg",
    [STAYING[2], STAYING[1], STAYING[5], *(c for c in STAYING if c.waits_early)],
    ids=name,
)
def test_every_missing_event_between_tiles_is_reported(cfg: BwdSm90Config, shared: bool) -> None:

    def between(event: Event) -> bool:
        return event.name in ("load_k", "load_v", "load_tile", "epilogue")

    missed, dropped = unnoticed(cfg, scripts(cfg, ((0, 2), (1, 2), (1, 3)), shared), between)
    assert dropped > 40
    assert not missed


@pytest.mark.parametrize(
    "schedule, early, needed",
    [("lagged", False, 3), ("lagged", True, 2), ("lockstep", False, 2)],
)
def test_stages_of_ds(schedule: str, early: bool, needed: int) -> None:
    """As many as the plan asks for hold; with one less, a warpgroup writes what the other reads."""
    with pytest.raises(PlanError, match="would overwrite dS"):
        BwdSm90Config(**{**KEYS_ROW, "schedule": schedule, "ds_stages": 1})
    cfg = BwdSm90Config(**{**KEYS_ROW, "schedule": schedule, "ds_stages": needed})
    assert cfg.waits_early == early

    class Room(BwdSm90Config):
        """The same, with room for more."""

        waits_early = early

    cfg = Room(**{**KEYS_ROW, "schedule": schedule, "ds_stages": 8})
    for stages in (needed, needed - 1):
        right = {
            agent: [
                replace(e, slot=m % stages) if (m := e.slot) is not None and e.name == "sdS" else e
                for e in script
            ]
            for agent, script in scripts(cfg, 7).items()
        }
        if stages == needed:
            check(cfg, right)
        else:
            with pytest.raises(ProtocolError, match=r"race: SMEM sdS"):
                check(cfg, right)
