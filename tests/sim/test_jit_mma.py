"""Native mma.sync against fp64, fragments as the ISA's tables give them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from fa_cute.errors import MisuseError
from fa_cute.sim import jit
from tests.sim import jit_tools as t

LANE = np.arange(32)
DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}


def pair(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.stack([first, second], 1)).view(np.uint32)[:, 0]


def line(name: str, k: int, c: str = "{%r10, %r11, %r12, %r13}") -> str:
    a = "{%r4, %r5, %r6, %r7}" if k == 16 else "{%r4, %r5}"
    b = "{%r8, %r9}" if k == 16 else "{%r8}"
    kind = f"m16n8k{k}.row.col.f32.{name}.{name}.f32"
    return f"mma.sync.aligned.{kind} {{%r0, %r1, %r2, %r3}}, {a}, {b}, {c};"


def fill(warp, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    k = a.shape[1]
    for q in range(k // 4):
        row, col = LANE // 4 + 8 * (q % 2), 2 * (LANE % 4) + 8 * (q // 2)
        t.set_rows(warp, f"%r{4 + q}", pair(a[row, col], a[row, col + 1]))
    for q in range(k // 8):
        depth, col = 2 * (LANE % 4) + 8 * q, LANE // 4
        t.set_rows(warp, f"%r{8 + q}", pair(b[depth, col], b[depth + 1, col]))
    for q in range(4):
        if f"%r{10 + q}" in warp.program.kernel.regs:
            values = c[LANE // 4 + 8 * (q // 2), 2 * (LANE % 4) + q % 2]
            t.set_rows(warp, f"%r{10 + q}", values.view(np.uint32))


def result(warp) -> np.ndarray:
    out = np.full((16, 8), np.nan, np.float32)
    for q in range(4):
        found = t.rows_of(warp, f"%r{q}").view(np.float32)
        out[LANE // 4 + 8 * (q // 2), 2 * (LANE % 4) + q % 2] = found
    return out


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("k", [8, 16])
@pytest.mark.parametrize("exact", [True, False])
def test_products(name, k, exact):
    gen = np.random.default_rng(k)

    def draw(*shape):
        return gen.integers(-8, 9, shape) if exact else gen.standard_normal(shape)

    a, b = (draw(*s).astype(DTYPES[name]) for s in ((16, k), (k, 8)))
    c = draw(16, 8).astype(np.float32)
    warp = t.program(line(name, k)).warp()
    fill(warp, a, b, c)
    assert warp.run() >> 60 == jit.KIND_EXIT
    want = a.astype(np.float64) @ b.astype(np.float64) + c
    assert np.abs(result(warp) - want).max() <= (0 if exact else 3e-6)
    assert warp.ctx.mma_flops == 2 * 16 * 8 * k


def test_the_sum_may_start_from_a_constant_or_its_own_registers():
    gen = np.random.default_rng(0)
    a, b = (gen.integers(-8, 9, s).astype(np.float16) for s in ((16, 16), (16, 8)))
    product = a.astype(np.float64) @ b.astype(np.float64)
    body = line("f16", 16, "{0f3F800000, 0f3F800000, 0f3F800000, 0f3F800000}")
    body += line("f16", 16, "{%r0, %r1, %r2, %r3}")
    warp = t.program(body).warp()
    fill(warp, a, b, np.zeros((16, 8), np.float32))
    assert warp.run() >> 60 == jit.KIND_EXIT
    assert (result(warp) == 2 * product + 1).all()


def test_a_partial_warp_is_an_error():
    warp = t.program(line("bf16", 16)).warp()
    warp.start(0x7FFFFFFF)
    assert warp.run() >> 60 == jit.KIND_ERROR and isinstance(warp.error(), MisuseError)
