"""Pipeline state lives in local names; see tests/state_lint.py for the rules and why."""

from __future__ import annotations

import pytest

from . import ptx_waits, state_lint, tree

FOLDERS = tuple(f"{tree.PACKAGE}/{part}" for part in ("fwd", "bwd", "ops", "sched"))
TRAPS = tree.ROOT / "tests" / "fixtures" / "state_traps.py"
# (file, start of the message) -> why it is right all the same.
ONCE = "filled once per CTA, so no slot comes back; consumers wait for the bytes before they end"
EXCUSED: dict[tuple[str, str], str] = {
    (f"fa_cute/bwd/{sm}/load.py", f"producer {end} never ends"): ONCE
    for sm in ("sm90", "sm100")
    for end in ("k", "v")
}


def test_no_kernel_loses_state() -> None:
    bad = []
    for path in tree.sources(*FOLDERS):
        for line, what in state_lint.findings(path.read_text()):
            if not any(
                tree.shown(path) == file and what.startswith(start) for file, start in EXCUSED
            ):
                bad.append(f"{tree.shown(path)}:{line} {what}")
    assert not bad, "\n".join(bad)


def test_every_trap_is_found_and_nothing_else() -> None:
    text = TRAPS.read_text()
    marked = {i + 1 for i, line in enumerate(text.splitlines()) if "# trap" in line}
    assert {line for line, _ in state_lint.findings(text)} == marked


RIGHT = """
class Mma:
    @cute.jit
    def run(self, cx):
        q, kv = cx.pipes.q.make_consumer(), cx.pipes.kv.make_consumer()
        out = cx.pipes.out.make_producer()
        sched = cx.scheduler()
        tile = sched.tile()
        while tile.valid:
            q_full = q.wait_and_advance()
            for i in cutlass.range(cx.n, unroll=1):
                out, total = self.block(cx, (out, total))
                kv.wait_and_advance().release()
            sched = sched.next()
            tile = sched.tile()
        out.tail()

    @cute.jit
    def block(self, cx, state):
        out, total = state
        free = out.acquire_and_advance()
        free.commit()
        return out, total

@cute.jit
def gemm(op, accumulate):
    atom = cute.make_mma_atom(op)
    atom.set(tcgen05.Field.ACCUMULATE, accumulate)

@dataclass(frozen=True)
class Clc:
    def next(self):
        work = self.work.clone()
        slot = work.wait_and_advance()
        slot.release()
        return replace(self, work=work)
"""


def test_right_code_is_left_alone() -> None:
    assert not state_lint.findings(RIGHT)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("return replace", "skip(work)\n        return replace", "work goes to skip"),
        ("out, total = self.block(", "state = self.block(", "out goes to self.block"),
        ("return out, total", "return total", "is advanced, but not returned"),
        ("        out.tail()\n", "", "producer out never ends with out.tail()"),
        ("sched = sched.next()", "sched.next()", "bind it to sched"),
        ("atom = cute.make_mma_atom(op)", "atom = op", "ACCUMULATE is state"),
        ("work = self.work.clone()\n        slot = work", "slot = self.work", "not a local name"),
    ],
)
def test_each_rule_by_breaking_right_code(old: str, new: str, words: str) -> None:
    broken = RIGHT.replace(old, new)
    assert broken != RIGHT
    assert any(words in what for _, what in state_lint.findings(broken))


def wait(parity: str) -> str:
    """A wait as the DSL emits it."""
    return f"""
    {{
    .reg .pred       P1;
    LAB_WAIT:
    mbarrier.try_wait.parity.shared.b64 P1, [%r1], {parity}, 10000000;
    @P1 bra.uni DONE;
    bra.uni     LAB_WAIT;
    DONE:
    }}"""


def loop(body: str) -> str:
    """``body`` in a loop, with a phase that flips in ``%r9``."""
    return f"""
    mov.b32 %r9, 0;
$L__BB0_1:{body}
    xor.b32 %r9, %r9, 1;
    mov.b32 %r5, 1;
    add.s32 %r2, %r2, 1;
    @%p1 bra $L__BB0_1;
    ret;
"""


@pytest.mark.parametrize(
    ("ptx", "inside", "constant"),
    [
        (loop(wait("%r9")), 1, 0),
        (loop(wait("1")), 1, 1),
        (loop(wait("0x1") + wait("%r9")), 2, 1),
        (loop(wait("%r5")), 1, 1),
        (wait("1"), 0, 0),
        (wait("1") + loop(""), 0, 0),
    ],
    ids=["flips", "immediate", "one-of-two", "constant-register", "no-loop", "before-a-loop"],
)
def test_constant_parity_in_a_loop(ptx: str, inside: int, constant: int) -> None:
    assert ptx_waits.waits_in_loops(ptx) == inside
    assert len(ptx_waits.constant_waits(ptx)) == constant
