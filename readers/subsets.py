"""Training and test files of benchmark data sets, told apart by their names."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from matex_data.errors import FormatError
from matex_data.index.model import Index
from matex_data.readers.catalogue import Finish, file_of_rows

SUBSETS = ("train", "test")


def of_subset(path: str, subset: str | None) -> Finish:
    """Return the function that makes the index of a file, without samples unless it is of the subset; None: of any.

    Raises
    ------
    FormatError : there is no such subset.
    """
    if subset not in (None, *SUBSETS):
        raise FormatError("there is no such subset", file=path, expected=f"one of {SUBSETS}", found=repr(subset))
    found = "test" if re.search(r"t10k|test", Path(path).name.lower()) else "train"
    return partial(file_of_rows, path) if subset in (None, found) else lambda fields, _: Index(fields, [])
