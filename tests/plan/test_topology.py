"""Edges: arrivals follow from the mechanism and the warps; what does not fit is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fa_cute import arch
from fa_cute.errors import PlanError
from fa_cute.plan import (
    Arrive,
    Barrier,
    Edge,
    Role,
    SmemField,
    SmemPlan,
    TmemPlan,
    TmemRegion,
    Topology,
    Via,
    WarpPlan,
    show,
    verify,
)

WARPS = WarpPlan(
    (
        Role("softmax", 0, 8, 192, teams=2),
        Role("correction", 8, 12, 72),
        Role("mma", 12, 13, 56),
        Role("load", 13, 14, 56),
        Role("idle", 14, 16, 56),
    ),
    128,
)
SMEM = SmemPlan((SmemField("sQ", 32768, 2), SmemField("sK", 16384, 3)), reserved_bytes=1024)


@pytest.mark.parametrize(
    ("edge", "arrivals"),
    [
        (Edge("e", Via.TMA_UMMA, "load", "mma", tx=("sQ",)), (1, 1)),
        (Edge("e", Via.TMA_ASYNC, "load", "correction", tx=("sQ",)), (1, 4)),
        (Edge("e", Via.TMA_ASYNC, "load", "correction", tx=("sQ",), dst_ctas=2), (1, 8)),
        (
            Edge("e", Via.TMA_ASYNC, "load", "correction", tx=("sQ",), dst_by=Arrive.THREADS),
            (1, 128),
        ),
        (Edge("e", Via.UMMA_ASYNC, "mma", "correction", dst_by=Arrive.THREADS), (1, 128)),
        (Edge("e", Via.UMMA_ASYNC, "mma", "correction"), (1, 4)),
        (Edge("e", Via.UMMA_ASYNC, "mma", "softmax", 2), (1, 4)),
        (Edge("e", Via.ASYNC_UMMA, "softmax", "mma", 2, src_by=Arrive.WARPS), (4, 1)),
        (Edge("e", Via.ASYNC_UMMA, ("softmax", "correction"), "mma", 2), (8, 1)),
        (Edge("e", Via.ASYNC_UMMA, "correction", "mma", src_ctas=2), (8, 1)),
        (Edge("e", Via.ASYNC, "correction", ("mma", "load")), (4, 2)),
        (Edge("e", Via.ASYNC, "correction", "mma", src_by=Arrive.ONE), (1, 1)),
        (Edge("e", Via.ASYNC, "correction", "mma", src_by=Arrive.THREADS), (128, 1)),
    ],
)
def test_arrivals(edge: Edge, arrivals: tuple[int, int]) -> None:
    assert edge.arrivals(WARPS) == arrivals


def test_bytes_of_a_phase() -> None:
    edge = Edge("e", Via.TMA_UMMA, "load", "mma", 2, tx=("sQ", "sK"))
    assert edge.tx_bytes(SMEM) == 32768 + 16384
    pair = Edge("e", Via.TMA_UMMA, "load", "mma", 2, tx=("sQ",), cta_group=2)
    assert pair.tx_bytes(SMEM) == 65536
    assert Edge("e", Via.ASYNC, "load", "mma").tx_bytes(SMEM) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tx": ()}, r"via tma_umma: tx is \(\); tx names the SMEM fields"),
        ({"via": Via.ASYNC}, "tx is for TMA edges only"),
        ({"stages": 0}, "stages is 0"),
        ({"cta_group": 4}, "cta_group is 4; 1 or 2"),
        ({"dst_ctas": 0}, "at least 1"),
        ({"src": ()}, r"src is \(\); at least one role"),
        ({"src": ("load", "mma")}, "one producer role"),
        ({"dst": ("mma", "softmax")}, "one consumer role"),
        ({"dst": ("mma", "mma")}, "each once"),
        ({"dst_by": Arrive.WARPS}, "tcgen05.commit arrives once"),
        ({"src_by": Arrive.WARPS}, "no threads produce"),
    ],
)
def test_edges_refused(arguments: dict, words: str) -> None:
    base = {"name": "e", "via": Via.TMA_UMMA, "src": "load", "dst": "mma", "tx": ("sQ",)}
    Edge(**base)
    with pytest.raises(PlanError, match=words):
        Edge(**{**base, **arguments})


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        (Topology((Edge("e", Via.ASYNC, "load", "epilogue"),)), "no role 'epilogue'"),
        (
            Topology((Edge("e", Via.TMA_UMMA, "load", "mma", tx=("sV",)),)),
            "no SMEM field 'sV'",
        ),
        (
            Topology((Edge("e", Via.TMA_UMMA, "load", "mma", 4, tx=("sK",)),)),
            "'e' has 4 stages, its field 'sK' has 3",
        ),
        (
            Topology((Edge("e", Via.ASYNC, "softmax", "mma", 3),)),
            "3 stages; role 'softmax' has 2 teams",
        ),
        (
            Topology((Edge("e", Via.ASYNC, "load", "mma", ordered_by="f"),)),
            "no edge 'f'",
        ),
        (
            Topology((Edge("e", Via.ASYNC, "correction", "mma", src_ctas=300_000),)),
            "an mbarrier counts to 1048575",
        ),
        (
            Topology(barriers=(Barrier("b", ("mma",), 64),)),
            "64 threads; a multiple of 32 up to the 32",
        ),
        (Topology(barriers=(Barrier("b", ("mma", "load"), 48),)), "48 threads"),
    ],
)
def test_topologies_refused(topology: Topology, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        topology.check(WARPS, SMEM)


def test_names_are_unique_and_barriers_few() -> None:
    e = Edge("e", Via.ASYNC, "load", "mma")
    with pytest.raises(PlanError, match=r"\['e'\] are declared twice"):
        Topology((e, e))
    with pytest.raises(PlanError, match="declared twice"):
        Topology((e,), (Barrier("e", ("mma",)),))
    many = tuple(Barrier(f"b{i}", ("mma",)) for i in range(16))
    assert Topology(barriers=many[:15]).barrier_id("b14") == 15
    with pytest.raises(PlanError, match="16 named barriers; a CTA has 15"):
        Topology(barriers=many)


def whole(**parts) -> SimpleNamespace:
    edges = (
        Edge("load_q", Via.TMA_UMMA, "load", "mma", 2, tx=("sQ",)),
        Edge("mma_s", Via.UMMA_ASYNC, "mma", "softmax", 2, ordered_by="softmax_p"),
        Edge("softmax_p", Via.ASYNC_UMMA, ("softmax", "correction"), "mma", 2, src_by=Arrive.WARPS),
    )
    base = {
        "warps": WARPS,
        "topology": Topology(edges, (Barrier("stats", ("softmax", "correction")),)),
        "smem": SMEM,
        "tmem": TmemPlan((TmemRegion("S", 0, 128), TmemRegion("P", 64, 64, over="S"))),
    }
    return SimpleNamespace(**{**base, **parts})


def test_a_plan_on_a_machine() -> None:
    verify(whole(), arch.get("sm_100a"))
    with pytest.raises(PlanError, match="TMEM 128 columns; sm_90a has 0"):
        verify(whole(), arch.get("sm_90a"))
    verify(whole(tmem=None), arch.get("sm_90a"))
    big = SmemPlan((SmemField("sQ", 32768, 7), SmemField("sK", 16384, 3)), 1024)
    with pytest.raises(PlanError, match=r"SMEM 279552 bytes .* sm_100a has 232448, 47104 too many"):
        verify(whole(smem=big), arch.get("sm_100a"))
    with pytest.raises(PlanError, match="SMEM reserves 16 bytes; the mbarriers take 80"):
        verify(whole(smem=SmemPlan(SMEM.fields, 16)), arch.get("sm_100a"))


SHOWN = """\
demo

WARPS
role        warps  teams  threads  regs  setmaxnreg  registers
softmax     0-7        2      256   192  inc             49152
correction  8-11       1      128    72  dec              9216
mma         12         1       32    56  dec              1792
load        13         1       32    56  dec              1792
idle        14-15      1       64    56  dec              3584
512 threads, 128 registers each at launch; 65536 of 65536 used

EDGES (full / empty arrivals per phase)
                                           stages  via         arrivals
              load ----load_q---> mma      x2      tma_umma    1 / 1     32768 B of sQ
               mma ----mma_s----> softmax  x2      umma_async  1 / -     one-way, ordered by \
softmax_p
softmax+correction --softmax_p--> mma      x2      async_umma  8 / 1
80 bytes of mbarriers

NAMED BARRIERS
id  barrier  threads  roles
 1  stats        384  softmax correction
"""


def test_text() -> None:
    text = show.text(whole(), "demo")
    assert text.startswith(SHOWN)
    lines = text.splitlines()
    assert "TENSOR MEMORY: 128 of 128 columns allocated" in lines
    p = next(x for x in lines if x.startswith("P "))
    assert p.split()[:4] == ["P", "[64,", "128)", "64"] and p.endswith(
        "|" + " " * 32 + "#" * 32 + "|"
    )
    assert "SHARED MEMORY: 115712 bytes (114688 in fields, 1024 reserved)" in lines


def test_heading_of_a_page() -> None:
    from fa_cute.fwd.sm100.plan import FwdConfig

    start = show.heading(FwdConfig(), "SM100 forward")
    lines = start.splitlines()
    assert lines[0] == "# SM100 forward"
    assert lines[2].startswith("The map of the SM100 forward kernel")
    assert start.count("```") == 2 and "TMEM columns" in start


def test_dict_is_json() -> None:
    import json

    d = show.to_dict(whole())
    assert json.loads(json.dumps(d)) == d
    edges = {e["name"]: e for e in d["edges"]}
    assert edges["softmax_p"]["producer_arrivals"] == 8
    assert edges["mma_s"]["consumer_arrivals"] == 0 and edges["load_q"]["tx_bytes"] == 32768
    assert d["roles"][0] == {"name": "softmax", "start": 0, "stop": 8, "regs": 192, "teams": 2}
    assert d["barriers"] == [
        {"name": "stats", "id": 1, "threads": 384, "roles": ["softmax", "correction"]}
    ]
    assert d["tmem"]["regions"][1] == {"name": "P", "start": 64, "stop": 128, "over": ["S"]}
    assert show.to_dict(whole(tmem=None))["tmem"] is None
