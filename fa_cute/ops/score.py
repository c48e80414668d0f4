"""Units of the exponent: kernels compute powers of two, users think in natural logarithms.

``exp(scale * s) == exp2(scale * LOG2_E * s)``, and an LSE in units of ``exp2`` times ``LN_2`` is
the one that users see.
"""

from __future__ import annotations

import math

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
