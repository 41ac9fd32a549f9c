"""Data sets whose opened files differ in what only tests choose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import matex_data as md


def with_source(data: md.Dataset, **changes: Any) -> md.Dataset:
    """Return a data set with other attributes of its opened files."""
    source = replace(data._source, **changes)
    return md.Dataset._of(replace(data._selected, source=source))
