"""The SM100 backward's protocol, event by event as its roles do it, against its plan.

Of a pair the leader is told. What the other CTA's first team writes into the leader's dS, the
leader's second team stands for: both do the same.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa_cute import arch as archs
from fa_cute.bwd.args import BwdSpec
from fa_cute.bwd.sm100.plan import HEAD_DIMS, TEAMS, WORD, BwdConfig, config
from fa_cute.plan.check import check
from fa_cute.plan.events import (
    Event,
    ProtocolError,
    acquire,
    commit,
    read,
    release,
    sync,
    tail,
    wait,
    write,
)

SM100 = archs.get("sm_100a")
CONFIGS = [config(BwdSpec("bf16", *dims, causal=False), SM100) for dims in HEAD_DIMS]
IDS = [str(cfg.head_dim) for cfg in CONFIGS]


def brought(edge: str, *writes: Event) -> list[Event]:
    return [acquire(edge), *writes, commit(edge)]


def dot_in_q(cfg: BwdConfig) -> tuple[int, int]:
    """Bytes of Q's place that dO^T takes, where it follows Q; dO in Q^T's likewise."""
    return 0, cfg.smem.bytes("sdOt")


def load(cfg: BwdConfig, steps: int) -> list[Event]:
    if cfg.tight:
        return load_in_turn(cfg, steps)
    out = brought("load_k", write("sK"))
    for m in range(steps):
        do = m % cfg.do_stages
        out += brought("load_q", write("sQ", m % cfg.q_stages))
        out += brought("load_lse", write("sLse", m % 2))
        out += brought("load_v", write("sV")) if m == 0 else []
        turned = [write("sdOt", do)] if cfg.pair else []
        out += brought("load_do", write("sdO", do), *turned)
        out += brought("load_delta", write("sDelta", do))
        if cfg.pair:
            out += brought("load_qt", write("sQt"))
            out += brought("load_kt", write("sKt")) if m == 0 else []
    out += [*tail("load_q", range(cfg.q_stages)), *tail("load_do", range(cfg.do_stages))]
    out += [*tail("load_lse", range(2)), *tail("load_delta", range(cfg.do_stages))]
    return [*out, *(tail("load_qt", [0]) + tail("load_kt", [0]) if cfg.pair else [])]


def load_in_turn(cfg: BwdConfig, steps: int) -> list[Event]:
    out = brought("load_k", write("sK"))
    out += brought("load_q", write("sQ")) + brought("load_lse", write("sLse", 0))
    out += brought("load_v", write("sV"))
    for m in range(steps):
        out += brought("load_q", write("sQ", 0, dot_in_q(cfg)))
        out += brought("load_do", write("sdO"))
        out += brought("load_delta", write("sDelta"))
        out += brought("load_kt", write("sKt")) if m == 0 else []
        if m < steps - 1:
            out += brought("load_q", write("sQ"))
            out += brought("load_lse", write("sLse", (m + 1) % 2))
        # As the copy engine of load_do: Q^T lies from the same byte on.
        out += brought("load_do", write("sdO"))
    out += [*tail("load_q", [0]), *tail("load_do", [0]), *tail("load_lse", range(2))]
    return [*out, *tail("load_delta", [0]), *tail("load_kt", [0])]


def mma(cfg: BwdConfig, steps: int) -> list[Event]:
    return (in_turn if cfg.tight else ahead)(cfg, steps)


P, DS = [read(f"P{t}") for t in range(TEAMS)], [read(f"dS{t}") for t in range(TEAMS)]
DQ = [read("sdS"), write("dQ")]


def ahead(cfg: BwdConfig, steps: int) -> list[Event]:
    pair = cfg.pair
    out = [sync("tmem"), wait("load_k")]

    def scores(m: int) -> list[Event]:
        slot = m % cfg.q_stages
        s = [wait("load_q"), read("sK"), read("sQ", slot), write("S"), commit("mma_s")]
        return [*s, *([release("load_q")] if pair else [])]

    out += [*scores(0), wait("load_v")]
    for m in range(steps):
        do = m % cfg.do_stages
        out += [wait("load_do"), acquire("mma_dq"), read("sV"), read("sdO", do), write("dP")]
        out += [commit("mma_dp"), wait("compute_p"), *P, read("sdOt" if pair else "sdO", do)]
        out += [write("dV"), release("load_do")]
        out += scores(m + 1) if m < steps - 1 else [commit("mma_dkv", 0)]
        out += [wait("load_qt")] if pair else []
        out += [wait("load_kt")] if pair and m == 0 else []
        out += [wait("compute_ds"), *DS, read("sQt") if pair else read("sQ", m % cfg.q_stages)]
        out += [write("dK"), release("load_qt" if pair else "load_q")]
        out += [read("sKt" if pair else "sK"), *DQ, commit("mma_dq")]
    out += [commit("mma_dkv", 1), *([release("load_kt")] if pair else [])]
    return [*out, *tail("mma_dq", [0]), sync("tmem")]


def in_turn(cfg: BwdConfig, steps: int) -> list[Event]:
    scores = [wait("load_q"), read("sK"), read("sQ"), write("S"), commit("mma_s")]
    scores.append(release("load_q"))
    out = [sync("tmem"), wait("load_k"), *scores, wait("load_v"), wait("compute_s")]
    for m in range(steps):
        out += [wait("compute_p"), wait("load_q"), *P, read("sQ", 0, dot_in_q(cfg)), write("dV")]
        out += [release("load_q"), acquire("mma_dq"), wait("load_do"), read("sV"), read("sdO")]
        out += [write("dP"), commit("mma_dp"), release("load_do"), wait("compute_ds")]
        out += scores if m < steps - 1 else [commit("mma_dkv", 0)]
        out += [wait("load_do"), *DS, read("sdO"), write("dK"), release("load_do")]
        out += [wait("load_kt")] if m == 0 else []
        out += [wait("compute_s")] if m < steps - 1 else []
        out += [read("sKt"), *DQ, commit("mma_dq")]
    return [*out, commit("mma_dkv", 1), release("load_kt"), *tail("mma_dq", [0]), sync("tmem")]


def compute(cfg: BwdConfig, steps: int, team: int) -> list[Event]:
    to_team, to_word = cfg.team_rows
    firsts = [team * to_team + w * to_word for w in range(TEAMS)]
    spans = [(first, first + WORD) for first in firsts]
    half = cfg.smem.bytes("sdS") // TEAMS
    out = [sync("tmem")]
    for m in range(steps):
        out += [wait("load_lse"), wait("mma_s"), *(read("S", None, s) for s in spans)]
        out += [read("sLse", m % 2), *([commit("compute_s")] if cfg.tight else [])]
        out += [release("load_lse"), write(f"P{team}"), commit("compute_p")]
        out += [wait("load_delta"), wait("mma_dp"), *(read("dP", None, s) for s in spans)]
        out += [read("sDelta", m % cfg.do_stages), release("load_delta"), write(f"dS{team}")]
        out += [write("sdS", None, (team * half, (team + 1) * half)), commit("compute_ds")]
    result = ("dV", "dK")[team]
    out += [wait("mma_dkv", team), read(result), write(f"s{result}"), sync(f"epilogue_{team}")]
    return [*out, read(f"s{result}"), sync("tmem")]


def reduce(cfg: BwdConfig, steps: int) -> list[Event]:
    out = [sync("tmem")]
    for _ in range(steps):
        out += [wait("mma_dq"), read("dQ"), release("mma_dq")]
        for piece in range(cfg.tmem["dQ"].cols // cfg.dq_cols):
            slot = piece % cfg.dq_buffers
            out += [write("sdQ", slot), sync("reduce"), read("sdQ", slot)]
    return [*out, sync("tmem")]


def scripts(cfg: BwdConfig, steps: int) -> dict[str, list[Event]]:
    """All roles, for a number of query blocks."""
    return {
        "load": load(cfg, steps),
        "mma": mma(cfg, steps),
        **{f"compute/{t}": compute(cfg, steps, t) for t in range(TEAMS)},
        "reduce": reduce(cfg, steps),
    }


@pytest.mark.parametrize("cfg", CONFIGS, ids=IDS)
@settings(max_examples=5, deadline=None)
@given(st.integers(1, 6))
def test_no_deadlock_overrun_or_race(cfg: BwdConfig, steps: int) -> None:
    check(cfg, scripts(cfg, steps), seeds=1)


@pytest.mark.parametrize("cfg", [CONFIGS[0], CONFIGS[2], CONFIGS[3]], ids=["64", "128", "192"])
def test_every_missing_event_is_reported(cfg: BwdConfig) -> None:
    """But for barriers among the threads of one agent, whose accesses are not told apart."""
    right = scripts(cfg, 3)
    missed, dropped = [], 0
    for agent, script in right.items():
        for at, event in enumerate(script):
            if event.verb not in ("acquire", "commit", "wait", "release", "sync"):
                continue
            if event.verb == "sync" and event.name != "tmem":
                continue
            dropped += 1
            try:
                check(cfg, {**right, agent: [*script[:at], *script[at + 1 :]]}, seeds=0)
            except ProtocolError:
                continue
            missed.append((agent, str(event)))
    assert dropped > 100
    # dV comes before the last dP there, whose commit covers it.
    excused = [("compute/0", "wait mma_dkv[0]")] if cfg.tight else []
    assert missed == excused, missed


def test_dq_before_the_next_scores_were_read_is_a_race() -> None:
    """Where S and dQ share columns."""
    cfg = CONFIGS[3]
    broken = scripts(cfg, 3)
    at = [i for i, e in enumerate(broken["mma"]) if e == wait("compute_s")][1]
    script = broken["mma"]
    dq = script.index(write("dQ"), at)
    broken["mma"] = [*script[:at], *script[at + 1 : dq + 1], script[at], *script[dq + 1 :]]
    with pytest.raises(ProtocolError, match="race: TMEM"):
        check(cfg, broken, seeds=0)
