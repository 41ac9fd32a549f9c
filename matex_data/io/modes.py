"""Choice between collective and independent reads, with its reason. Nothing here calls MPI."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matex_data.io.mounts import PARALLEL, mount_of, mount_table
from matex_data.storage.objects import is_url

MOST_SHARED_FILES = 64  # that all ranks open with ``io="auto"``; of more files, each rank opens those that it reads


class Mode(NamedTuple):
    """Choice whether the ranks make the reads of a file as one.

    Attributes
    ----------
    collective : they do; otherwise each rank reads by itself.
    reason : why, as the end of a sentence.
    """

    collective: bool
    reason: str

    def __str__(self) -> str:
        how = "all ranks as one, by MPI-IO" if self.collective else "each rank by itself"
        return f"{how}: {self.reason}"


def choose(io: str, paths: Sequence[str], ranks: int = 2) -> Mode:
    """Return the mode in which ranks read files, as far as one of them can tell.

    Parameters
    ----------
    io : "auto", "collective" or "independent".
    paths : of the files.
    ranks : number of them.

    Examples
    --------
    >>> print(choose("collective", ["events.h5"]))
    all ranks as one, by MPI-IO: as io= says
    """
    if ranks == 1:
        return Mode(False, "there is one")
    if len(paths) and is_url(paths[0]):
        return Mode(False, "MPI does not read from a store of objects")
    if io != "auto":
        return Mode(io == "collective", "as io= says")
    if len(paths) > MOST_SHARED_FILES:
        return Mode(False, f"there are more than {MOST_SHARED_FILES} files")
    if os.environ.get("MATEX_IO_HINTS"):
        return Mode(True, "MATEX_IO_HINTS is set")
    table = mount_table()
    mounts = [mount_of(folder, table) for folder in dict.fromkeys(str(Path(path).parent) for path in paths)]
    types = sorted({"unknown" if mount is None else mount.type for mount in mounts})
    parallel = bool(types) and PARALLEL.issuperset(types)
    return Mode(parallel, f"the type of the file system is {', '.join(types)}" if types else "there are no files")
