"""`alike.Alike` finds a value for tensors that differ in nothing that a kernel or autograd asks."""

from __future__ import annotations

import pytest
import torch

from fa_cute.alike import Alike


def tensor(*shape):
    return torch.zeros(shape or (2, 64, 2, 64), dtype=torch.bfloat16)


OTHERS = {
    "shape": lambda t: t[:, :32],
    "fewer dimensions": lambda t: t[0],
    "head_dim": lambda t: torch.zeros(2, 64, 2, 32, dtype=t.dtype),
    "strides": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "stride of a dimension of 1": lambda t: t[:1].as_strided((1, 64, 2, 64), (7, 128, 64, 1)),
    "dtype": lambda t: t.half(),
    "device": lambda t: t.to("meta"),
    "lazy negative": torch._neg_view,
    "no memory": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "gradient": lambda t: t.clone().requires_grad_(),
    "subclass": lambda t: t.as_subclass(type("Sub", (torch.Tensor,), {})),
    "no tensor": lambda t: None,
}


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_tensors_of_another_kind_are_not_alike(other, place):
    first = tensor(1, 64, 2, 64) if other is OTHERS["stride of a dimension of 1"] else tensor()
    given = [first.clone() for _ in range(3)]
    found = Alike()
    for _ in range(2):
        found.add("what", 1, *given)
    assert found.find("what", *given) == found.find("what", *map(torch.clone, given)) == 1
    assert found.find("else", *given) is None
    given[place] = other(tensor() if first.shape[0] == 2 else given[place])
    assert found.find("what", *given) is None


def test_the_last_kinds_are_kept():
    found = Alike()
    kinds = [tensor(1, n, 1, 8) for n in range(1, 12)]
    for n, t in enumerate(kinds):
        found.add("what", n, t)
        found.add("what", n, t)
    assert [found.find("what", t) for t in kinds] == [None] * 5 + [*range(5, 11)]
    found.clear()
    assert found.find("what", kinds[-1]) is None


def test_a_tensor_that_comes_twice_is_not_checked():
    found, t = Alike(), tensor()
    for _ in range(3):
        found.add("what", 1, t, t)
    assert found.find("what", t, t) is None


def test_kinds_that_take_turns_cost_no_checks():
    found, kinds = Alike(), [tensor(1, n, 1, 8) for n in (1, 2)]
    for _ in range(3):
        for n, t in enumerate(kinds):
            found.add("what", n, t)
    assert [found.find("what", t) for t in kinds] == [None, None]
