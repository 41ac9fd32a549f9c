"""Messages that a rank logs, which pytest's own fixture does not see: a test runs on ranks of other processes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged(name: str = "matex_data.training") -> Iterator[list[str]]:
    """Context manager: list the messages of a logger."""
    messages: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger(name)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
