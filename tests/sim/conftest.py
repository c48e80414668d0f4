from __future__ import annotations

import pytest


@pytest.fixture(params=["python", "jit"])
def engine(request) -> str:
    """Both engines: numpy, one instruction at a time, and native code."""
    return request.param
