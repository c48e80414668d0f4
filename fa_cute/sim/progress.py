"""A progress bar for launches that take long enough to wonder."""

from __future__ import annotations

import time
from contextlib import contextmanager

PATIENCE = 1.5  # seconds without a bar


class _Later:
    """Shows a tqdm bar once the launch has taken `patience` seconds."""

    def __init__(self, total: int, name: str, patience: float):
        self.total, self.name, self.patience = total, name, patience
        self.started = time.perf_counter()
        self.done = 0
        self.bar = None

    def update(self, n: int) -> None:
        self.done += n
        if self.bar is not None:
            self.bar.update(n)
        elif time.perf_counter() - self.started > self.patience and self.done < self.total:
            from tqdm import tqdm

            self.bar = tqdm(
                total=self.total,
                initial=self.done,
                desc=self.name[:40],
                unit="cluster",
                leave=False,
            )

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


@contextmanager
def bar(total: int, name: str, wanted: bool | None):
    """`wanted`: True at once, False never, None after some patience."""
    if wanted is False:
        yield None
        return
    later = _Later(total, name, 0.0 if wanted else PATIENCE)
    try:
        yield later
    finally:
        later.close()
