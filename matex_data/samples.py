"""Small data sets for a first look at the library."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from matex_data.errors import DataError


def sample_data(name: str = "digits", folder: str | os.PathLike[str] | None = None) -> str:
    """Write a small data set, unless it has been written, and return its folder.

    Ranks may call at the same time. A data set is written to a folder of its own, which then gets its name.

    Parameters
    ----------
    name : "digits" (HDF5: images of handwritten digits, and labels), "jets" (HDF5: particles of simulated jets),
        "photos" (JPEG tiles in a folder for each class), "cells" (PNG images and masks), "weather" (netCDF),
        "collisions" (ROOT: simulated signal and background), or "passengers" (CSV: texts and missing values).
    folder : path. Folder that holds the data sets. None: ``matex_data`` in the user's cache, ``$XDG_CACHE_HOME`` or
        ``~/.cache``.

    Returns
    -------
    str. Path of the folder, which ``open_dataset`` takes.

    Raises
    ------
    DataError : there is no such data set; a package that writes it is missing; the folder cannot be written.

    Examples
    --------
    >>> md.open_dataset(md.sample_data("digits"), inputs="image", targets="label")
    Dataset(1,797 samples of 4 files; image: uint8[8, 8, 1], label: int64[])
    """
    from matex_data._sample_data.make import WRITERS

    if name not in WRITERS:
        raise DataError("there are no such sample data", expected=f"one of {sorted(WRITERS)}", found=repr(name))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "matex_data"
    whole = Path(cache if folder is None else folder) / name
    try:
        if not whole.is_dir():
            whole.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=whole.parent, prefix=f".{name}-") as made:
                WRITERS[name](Path(made) / name)
                _rename(Path(made) / name, whole)
    except ModuleNotFoundError as error:
        remedy = f"pip install {'scikit-learn' if error.name == 'sklearn' else error.name}"
        problem = f"a package is missing that writes the sample data {name!r}"
        raise DataError(problem, found=error, remedy=remedy) from error
    except OSError as error:
        problem = "the sample data cannot be written"
        raise DataError(problem, file=str(whole), found=error, remedy="give folder=") from error
    return str(whole)


def _rename(made: Path, whole: Path) -> None:
    """Rename a folder, unless another process was first."""
    try:
        made.rename(whole)
    except OSError:
        if not whole.is_dir():
            raise
        shutil.rmtree(made)
