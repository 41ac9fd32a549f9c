"""Fields that a file has and that cannot be read, as messages show them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

MAX_SHOWN = 8  # fields in an error or a warning


def shown(unread: Mapping[str, str], separator: str = "; ") -> str:
    """Return the names of fields with the reason why each cannot be read.

    >>> shown({"map": "it has no fields of its own"})
    "'map': it has no fields of its own"
    """
    lines = [f"{name!r}: {reason}" for name, reason in list(unread.items())[:MAX_SHOWN]]
    return separator.join(lines + ([f"and {len(unread) - MAX_SHOWN} more"] if len(unread) > MAX_SHOWN else []))


def warn(what: str, unread: Mapping[str, str]) -> None:
    """Warn that fields are left out.

    Parameters
    ----------
    what : the file and the kind of fields, such as ``"a.root: 2 branches of 'events'"``.
    unread : the reason for each field, by name.
    """
    lines = shown(unread, "\n  ")
    text = f"{what} cannot be read and are left out\n  {lines}\n  select the fields with inputs= and targets="
    warnings.warn(text, stacklevel=3)
