"""Benchmark data sets come in files for training and for testing: which of them are meant."""

from __future__ import annotations

import re
from pathlib import Path

from matex_data.errors import FormatError

SUBSETS = ("train", "test")


def chosen(path: str, subset: str | None) -> bool:
    """Whether a file belongs to the subset, told by its name; all do if that is None.

    Raises
    ------
    FormatError : there is no such subset.
    """
    if subset is None:
        return True
    if subset not in SUBSETS:
        raise FormatError("there is no such subset", file=path, expected=f"one of {SUBSETS}", found=repr(subset))
    found = "test" if re.search(r"t10k|test", Path(path).name.lower()) else "train"
    return found == subset
