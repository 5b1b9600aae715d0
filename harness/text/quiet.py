"""Ranks that are made to wait or to differ on purpose: nobody wants to be warned of that."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator

__all__ = ["quiet"]


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Nothing below CRITICAL is logged by kvpact inside."""
    logger = logging.getLogger("kvpact")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
