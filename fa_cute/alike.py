"""Values that were found for tensors of one kind, told from others by torch's own comparison.

A key made of shapes, strides, dtypes and devices takes 2 us to make and look up for three tensors;
the check that torch.compile guards its graphs with compares them, in C++, in 0.3 us.
"""

from __future__ import annotations

from torch._C._dynamo.guards import TensorGuards


class Alike:
    """what -> a few pairs (check, value): the kinds of tensors that came last.

    Alike are tensors of the same Python type, dispatch keys (neither is a lazy negative, a zero
    without memory, of another device type), dtype, device, shape, strides and, where grad mode is
    on, requires_grad. Where their memory starts is not compared.
    """

    KINDS = 6  # a check that fails takes half as long as one that does not

    def __init__(self):
        self._kinds: dict = {}
        self._asked: dict = {}  # what -> the value that was last looked for elsewhere

    def find(self, what, *tensors):
        """The value; None where there is none."""
        for check, value in self._kinds.get(what, ()):
            if check(*tensors):
                return value
        return None

    def add(self, what, value, *tensors) -> None:
        """Find the value for such tensors from now on, if it is wanted twice in a row (making a
        check takes as long as ten) and no tensor comes twice (no check is for those).
        """
        if self._asked.get(what) is not value:
            self._asked[what] = value
            return
        if len({id(t) for t in tensors}) < len(tensors):
            return
        guards = TensorGuards(
            *tensors,
            dynamic_dims_sizes=[list(t.shape) for t in tensors],
            dynamic_dims_strides=[list(t.stride()) for t in tensors],
        )
        kinds = self._kinds.get(what, ())
        self._kinds[what] = ((guards.check, value), *kinds[: self.KINDS - 1])

    def clear(self) -> None:
        """Forget all."""
        self._kinds.clear()
        self._asked.clear()
