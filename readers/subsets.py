"""Training and test files of benchmark data sets, told apart by their names."""

from __future__ import annotations

import re
from pathlib import Path

from matex_data.errors import FormatError

SUBSETS = ("train", "test")


def is_in_subset(path: str, subset: str | None) -> bool:
    """Return whether the file belongs to the subset "train" or "test"; True for None.

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
