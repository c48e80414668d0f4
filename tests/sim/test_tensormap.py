"""Tensor maps: decoding, clipping of boxes, and the reductions."""

from __future__ import annotations

import numpy as np
import pytest

from fa_cute.errors import MisuseError, OutOfBoundsError
from fa_cute.sim import tensormap
from fa_cute.sim.memory import GlobalMemory
from fa_cute.sim.reduce import flush, reduce_into
from fa_cute.sim.tma import clip, load_box


def make(array: np.ndarray, box, swizzle="none", dtype="f16"):
    dims = tuple(reversed(array.shape))
    strides = tuple(reversed(array.strides))
    return tensormap.TensorMap(
        array.ctypes.data, array.ndim, dtype, array.itemsize, swizzle, dims, strides, tuple(box)
    )


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_decode_is_the_inverse_of_encode(rank):
    made = tensormap.TensorMap(
        0x7F0012345670, rank, "bf16", 2, "128B",
        (64, 3000, 17, 5, 1 << 31)[:rank], (2, 128, 1 << 20, (1 << 37) + 16, 1 << 38)[:rank],
        (64, 128, 1, 2, 1)[:rank],
    )  # fmt: skip
    assert tensormap.decode(tensormap.encode(made)) == made


def test_garbage_is_no_tensor_map():
    with pytest.raises(MisuseError, match="not a tensor map"):
        tensormap.decode(bytes(64))


def test_a_box_wider_than_its_swizzle_is_refused():
    wide = tensormap.TensorMap(0x1000, 2, "bf16", 2, "64B", (64, 8), (2, 128), (64, 8))
    with pytest.raises(MisuseError, match="128 bytes wide"):
        tensormap.decode(tensormap.encode(wide))


@pytest.mark.parametrize(
    "coords", [(0, 0, 0), (-3, 4, 1), (8, -2, 2), (16, 8, 3), (100, 0, 0), (0, 9, 0)]
)
def test_boxes_are_cut_to_the_tensor_and_padded_with_zeros(coords):
    array = np.arange(3 * 10 * 24, dtype=np.uint16).reshape(3, 10, 24) + 1
    memory = GlobalMemory()
    memory.add_array(array, "x")
    tmap = make(array, (16, 4, 2))
    got = load_box(memory, tmap, clip(tmap, coords), None).view(np.uint16).reshape(2, 4, 16)
    want = np.zeros((2, 4, 16), np.uint16)
    for i, j, k in np.ndindex(want.shape):
        z, y, x = i + coords[2], j + coords[1], k + coords[0]
        if 0 <= z < 3 and 0 <= y < 10 and 0 <= x < 24:
            want[i, j, k] = array[z, y, x]
    np.testing.assert_array_equal(got, want)


def test_a_map_that_reaches_outside_every_tensor_is_an_error():
    array = np.zeros((8, 32), np.uint16)
    memory = GlobalMemory()
    memory.add_array(array[:4], "half")
    tmap = make(array, (32, 8))
    with pytest.raises(OutOfBoundsError, match="half"):
        load_box(memory, tmap, clip(tmap, (0, 0)), None)


def test_float_reduction_flushes_subnormals_and_keeps_their_sign():
    tiny = np.array([1e-40, -1e-40, 1.0, 1.2e-38, 2.0], np.float32)
    np.testing.assert_array_equal(np.signbit(flush(tiny[:2])), [False, True])
    assert not flush(tiny[:2]).any()
    target = np.array([1.0, 1.0, 2.0, -1.3e-38, 1e-41], np.float32)
    reduce_into(target.view(np.uint32), tiny.view(np.uint32), "add", "f32", None)
    np.testing.assert_array_equal(target, np.array([1, 1, 3, 0, 2], np.float32))


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_half_reductions_round_once(dtype):
    import torch

    kind = {"f16": torch.float16, "bf16": torch.bfloat16}[dtype]
    a, b = torch.randn(512).to(kind), torch.randn(512).to(kind)
    for operation, want in (
        ("add", (a.float() + b.float()).to(kind)),
        ("max", torch.maximum(a, b)),
    ):
        target = a.clone().view(torch.int16).numpy().view(np.uint16)
        reduce_into(target, b.view(torch.int16).numpy().view(np.uint16), operation, dtype, None)
        np.testing.assert_array_equal(target, want.view(torch.int16).numpy().view(np.uint16))


def test_integer_reductions_wrap():
    target = np.array([0xFFFFFFFF, 5, 7], np.uint32)
    reduce_into(target, np.array([2, 5, 9], np.uint32), "inc", "u32", None)
    assert target.tolist() == [0, 0, 8]
    with pytest.raises(MisuseError, match="allowed"):
        reduce_into(target, target.copy(), "min", "f32", None)
