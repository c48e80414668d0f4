"""The SM100 forward, executed from its PTX, against float64."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from fa_cute import flash_attn_func, launch

from . import tolerance

HEAD_DIMS = (64, 96, 128)
UNEQUAL = (192, 128)  # head_dim, head_dim_v
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HEADS = {"mha": (2, 2), "gqa4": (8, 2), "mqa": (3, 1)}
SMALL = [
    *((1, 1), (3, 3), (64, 32), (64, 128), (64, 1), (128, 128), (128, 192), (255, 256)),
    *((239, 1), (113, 203), (113, 128), (128, 217), (113, 211), (108, 256), (1, 128), (1, 339)),
]
MIDDLE = [
    *((256, 256), (799, 3), (256, 512), (384, 256), (640, 128), (512, 256), (511, 1), (3, 513)),
    *((307, 256), (3, 1024), (64, 800), (64, 256), (3, 799)),
]
LARGE = [(1024, 1024), (1023, 1024), (1024, 1023)]
SCHEDULES = ("early", "late", *(f"random:{seed}" for seed in range(8)))

pytest.importorskip("cutlass", reason="the kernel is compiled by NVIDIA's CuTe DSL")


@pytest.fixture(autouse=True)
def poisoned_outputs():
    """torch.empty gives NaN, so an element that is not written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)


def qkv(seqlens, heads, head_dim, dtype, batch=1, seed=0):
    """Random inputs of a size that makes the softmax neither flat nor a maximum; `head_dim` is one
    number or those of q and v.
    """
    g = torch.Generator().manual_seed(seed + 1000 * seqlens[0] + seqlens[1])
    d, dv = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)

    def draw(seqlen, heads, d):
        return torch.randn(batch, seqlen, heads, d, generator=g).to(dtype)

    (sq, sk), (h, h_kv) = seqlens, heads
    return draw(sq, h, d), draw(sk, h_kv, d), draw(sk, h_kv, dv)


def check(seqlens, heads, head_dim, dtype, causal, batch=1):
    q, k, v = qkv(seqlens, heads, head_dim, dtype, batch)
    out, lse = flash_attn_func(q, k, v, causal=causal, return_lse=True, backend="sim")
    return tolerance.assert_close_to_reference(out, lse, q, k, v, causal=causal)


matrix = [
    pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"]),
    pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES),
    pytest.mark.parametrize("head_dim", HEAD_DIMS),
]


def over_matrix(test):
    for mark in matrix:
        test = mark(test)
    return test


@over_matrix
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("seqlens", SMALL, ids=lambda s: f"{s[0]}x{s[1]}")
def test_small(seqlens, heads, head_dim, dtype, causal):
    check(seqlens, heads, head_dim, dtype, causal)


@over_matrix
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("seqlens", MIDDLE, ids=lambda s: f"{s[0]}x{s[1]}")
def test_middle(seqlens, heads, head_dim, dtype, causal):
    check(seqlens, heads, head_dim, dtype, causal)


@over_matrix
@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (2, 1)], ids=["mha", "gqa4", "mqa"])
@pytest.mark.parametrize("seqlens", LARGE, ids=lambda s: f"{s[0]}x{s[1]}")
def test_large(seqlens, heads, head_dim, dtype, causal):
    check(seqlens, heads, head_dim, dtype, causal)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    "seqlens", [*SMALL[::2], *MIDDLE[::2], LARGE[1]], ids=lambda s: f"{s[0]}x{s[1]}"
)
def test_unequal_head_dims(seqlens, dtype, causal):
    check(seqlens, (4, 1), UNEQUAL, dtype, causal)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_unequal_head_dims_walk_several_tiles(causal, monkeypatch):
    """On a machine of few SMs: the next tile's Q takes the place of an output; some see no key."""
    monkeypatch.setenv("FA_CUTE_ARCH", "sm_103a")
    monkeypatch.setattr(launch, "num_sms", lambda *_: 2)
    check((600, 300), (3, 1), UNEQUAL, torch.bfloat16, causal, batch=2)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_batches(causal, arch, monkeypatch):
    monkeypatch.setenv("FA_CUTE_ARCH", arch)
    check((200, 300), (4, 2), 64, torch.bfloat16, causal, batch=3)


@cache
def one_result(head_dim, causal, schedule):
    q, k, v = qkv((300, 400), (2, 1), head_dim, torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FA_CUTE_SIM_SCHEDULE", schedule)
        return flash_attn_func(q, k, v, causal=causal, return_lse=True, backend="sim")


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, UNEQUAL], ids=str)
def test_same_bits_in_every_schedule(head_dim, causal):
    want_out, want_lse = one_result(head_dim, causal, SCHEDULES[0])
    for schedule in SCHEDULES[1:]:
        out, lse = one_result(head_dim, causal, schedule)
        assert torch.equal(out, want_out), schedule
        assert torch.equal(lse, want_lse), schedule


def views(t: torch.Tensor):
    """The same values in memory of another order, with neighbours that must not be read."""
    batch, seqlen, heads, head_dim = t.shape
    by_head = t.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.full((batch, seqlen, heads, head_dim + 8), float("nan"), dtype=t.dtype)
    padded = wide[..., :head_dim].copy_(t)
    packed = torch.full((batch, seqlen, 3, heads, head_dim), float("nan"), dtype=t.dtype)
    of_three = packed[:, :, 1].copy_(t)
    backwards = torch.empty(seqlen, heads, batch, head_dim, dtype=t.dtype).permute(2, 0, 1, 3)
    return {
        "heads first": by_head,
        "wide rows": padded,
        "one of three": of_three,
        "batch inside": backwards.copy_(t),
    }


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kind", ["heads first", "wide rows", "one of three", "batch inside"])
def test_views_give_the_bits_of_contiguous_tensors(kind, causal):
    q, k, v = qkv((130, 200), (4, 2), 64, torch.bfloat16, batch=2)
    want = flash_attn_func(q, k, v, causal=causal, return_lse=True, backend="sim")
    got = flash_attn_func(
        *(views(t)[kind] for t in (q, k, v)), causal=causal, return_lse=True, backend="sim"
    )
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_expanded_keys():
    q, k, v = qkv((130, 200), (4, 1), 64, torch.bfloat16, batch=1)
    want = flash_attn_func(q, k, v, backend="sim")
    got = flash_attn_func(q, k.expand(1, 200, 4, 64), v.expand(1, 200, 4, 64), backend="sim")
    assert torch.equal(got, want)


@pytest.mark.parametrize("scale", [0.01, 1.0, 3.0, 0.0, -0.5])
def test_scales(scale):
    q, k, v = qkv((140, 260), (1, 1), 64, torch.bfloat16)
    out, lse = flash_attn_func(q, k, v, scale, True, return_lse=True, backend="sim")
    tolerance.assert_close_to_reference(out, lse, q, k, v, scale, causal=True)


def test_growing_maxima_rescale():
    """Each KV block has a larger maximum than the one processed before it."""
    q, k, v = qkv((128, 512), (1, 1), 64, torch.bfloat16)
    growing = torch.linspace(0.2, 4, 512)
    for step in (growing, growing.flip(0)):
        scaled = (k.float() * step[None, :, None, None]).bfloat16()
        out, lse = flash_attn_func(q, scaled, v, 1.0, return_lse=True, backend="sim")
        tolerance.assert_close_to_reference(out, lse, q, scaled, v, 1.0)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("size", [1e4, 1e6, 1e12])
def test_huge_scores_leave_one_key(size, causal):
    """Where a product of score and scale has a last place of thousands. Scores of both signs."""
    q, k, v = qkv((140, 300), (1, 1), 64, torch.bfloat16)
    q = q * size
    for keys in (k * size, k.abs() * size, k.abs() * -size):
        queries = q if keys.min() < 0 < keys.max() else q.abs()
        out, lse = flash_attn_func(queries, keys, v, causal=causal, return_lse=True, backend="sim")
        tensors = (t.double() for t in (queries, keys, v))
        want_out, want_lse = flash_attn_func(
            *tensors, causal=causal, return_lse=True, backend="reference"
        )
        torch.testing.assert_close(out.double(), want_out, rtol=0, atol=0)
        torch.testing.assert_close(lse, want_lse.float(), rtol=1e-6, atol=0)


def test_a_nan_in_a_key_reaches_out_and_lse():
    q, k, v = qkv((20, 130), (1, 1), 64, torch.bfloat16)
    k[0, 70, 0, 5] = float("nan")  # its exponential is one of those by polynomial
    out, lse = flash_attn_func(q, k, v, return_lse=True, backend="sim")
    assert out.isnan().all() and lse.isnan().all()
