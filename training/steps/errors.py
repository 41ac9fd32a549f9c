"""Errors of the data path, in place of those in which TensorFlow wraps them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from matex_data import errors


@contextlib.contextmanager
def unwrapped_errors() -> Iterator[None]:
    """Context manager: raise the ``DataError`` that TensorFlow has wrapped in an error of its own."""
    try:
        yield
    except Exception as error:
        found = re.search(r"^matex_data\.errors\.(\w+): (.+?)\n\n", str(error), re.DOTALL | re.MULTILINE)
        if found is None or isinstance(error, errors.DataError):
            raise
        raise getattr(errors, found[1])(found[2]) from error.__cause__
