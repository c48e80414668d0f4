"""Units of the exponent: kernels compute powers of two, users think in natural logarithms."""

from __future__ import annotations

import math
from typing import Any

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


def scale_log2(softmax_scale: Any) -> Any:
    """Factor on ``q . k`` under ``exp2``: ``exp(scale * s) == exp2(scale_log2 * s)``."""
    return softmax_scale * LOG2_E


def lse_log2(lse: Any) -> Any:
    """A natural-log LSE (as returned to users) in units of ``exp2``."""
    return lse * LOG2_E
