"""Files that layouts open by themselves, beside or in place of byte ranges of the file that they belong to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any


def sources_of(value: Any) -> Iterator[str]:
    """Yield the paths of the files that a layout opens, and those of all that it consists of; maybe more than once.

    Whatever names such a file has a method ``sources``, see `Layout.sources`.

    Parameters
    ----------
    value : a layout, or what one consists of: objects, and sequences and mappings of them.

    Examples
    --------
    >>> from matex_data.abc import Layout
    >>> class Rows(Layout):
    ...     rows, block_rows, requests = 1, 1, None
    ...
    ...     def sources(self):
    ...         return ["/data/other.bin"]
    >>> list(sources_of({"x": Rows()}))
    ['/data/other.bin']
    """
    own = getattr(value, "sources", None)
    if callable(own):
        yield from own()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from sources_of(getattr(value, field.name))
    elif isinstance(value, tuple | list | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from sources_of(item)
