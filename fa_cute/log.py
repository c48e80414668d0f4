"""The one logger of the package; ``FA_CUTE_LOG`` sets its level (default warning)."""

from __future__ import annotations

import logging
import os

LEVELS = ("debug", "info", "warning", "error")
logger = logging.getLogger("fa_cute")


def configure() -> None:
    """Set the level from the environment; add a handler only when a level was asked for."""
    wanted = os.environ.get("FA_CUTE_LOG", "").strip().lower()
    if not wanted:
        return
    if wanted not in LEVELS:
        logger.warning("FA_CUTE_LOG=%r is not a level; allowed: %s", wanted, ", ".join(LEVELS))
        return
    logger.setLevel(wanted.upper())
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("fa_cute %(levelname)s %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False


def get(name: str) -> logging.Logger:
    """A child of the package's logger: ``get("sim")`` logs as ``fa_cute.sim``."""
    return logger.getChild(name)


configure()
