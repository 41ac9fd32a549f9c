"""Errors as a user wants to see them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from matex_data import errors


@contextlib.contextmanager
def unwrapped_errors() -> Iterator[None]:
    """Raise the ``DataError`` itself where TensorFlow wraps one in its own error."""
    try:
        yield
    except Exception as error:  # of any class of TensorFlow, which is not imported here
        found = re.search(r"^matex_data\.errors\.(\w+): (.+?)\n\n", str(error), re.DOTALL | re.MULTILINE)
        if found is None or isinstance(error, errors.DataError):
            raise
        raise getattr(errors, found[1])(found[2]) from error.__cause__
