"""Values that were found for tensors of one kind, told from others by torch's own comparison.

A key made of shapes, strides, dtypes and devices takes 2 us to make and look up for three tensors;
the check that torch.compile guards its graphs with compares them, in C++, in 0.3 us.
"""

from __future__ import annotations

from torch._C._dynamo.guards import TensorGuards


class Alike(dict):
    """what -> a few pairs (check, value): the kinds of tensors that were seen first.

    Alike are tensors of the same Python type, dispatch keys (neither is a lazy negative, a zero
    without memory, of another device type), dtype, device, shape, strides and, where grad mode is
    on, requires_grad. Where their memory starts is not compared.
    """

    KINDS = 8  # a check that fails costs as much as one that does not

    def find(self, what, *tensors):
        """The value; None where there is none."""
        for check, value in self.get(what, ()):
            if check(*tensors):
                return value
        return None

    def add(self, what, value, *tensors) -> None:
        """Find the value for such tensors from now on, if there is room."""
        kinds = self.setdefault(what, [])
        if len(kinds) < self.KINDS:
            guards = TensorGuards(
                *tensors,
                dynamic_dims_sizes=[list(t.shape) for t in tensors],
                dynamic_dims_strides=[list(t.stride()) for t in tensors],
            )
            kinds.append((guards.check, value))
