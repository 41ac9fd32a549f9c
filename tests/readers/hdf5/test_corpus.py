"""Every HDF5 file of the corpus: each dataset equals that of h5py, or raises a clear error."""

from __future__ import annotations

import zlib
from importlib import import_module
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from matex_data.errors import DataError, FormatError
from matex_data.readers.hdf5.reader import index
from tests.support.corpus import CORPUS, needs_corpus
from tests.support.serial import every_row, random_rows, read_rows, same

FOLDER = CORPUS / "hdf5"
FILES = sorted(path for path in FOLDER.rglob("*") if path.is_file() and path.name != "MANIFEST.json")
DECODED = 300_000_000  # bytes; of a larger dataset only a few rows are compared

import_module("hdf5plugin")  # h5py is the reference for its filters too

pytestmark = needs_corpus


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_every_dataset_against_h5py(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)  # where raw data files are looked for
    try:
        file = h5py.File(path, locking=False)
    except OSError:
        with pytest.raises(FormatError):
            index(str(path), None)
        return
    with file:
        for name in names(file):
            if has_other_form(file, name):
                continue  # test_matlab.py and test_pytables.py compare these
            expected, rows = expectation(file, name)
            if expected is None and rows is None:
                with pytest.raises(DataError) as caught:
                    every_row(index(str(path), [name]), name)
                assert str(path) in str(caught.value)
            else:
                check(path, file, name, expected)


def has_other_form(file: h5py.File, name: str) -> bool:
    """Return whether MATLAB or PyTables means other rows than h5py delivers."""
    try:
        marks = {*file[name].attrs, *file[name].parent.attrs}
        return not marks.isdisjoint({"MATLAB_class", "PSEUDOATOM"})
    except (OSError, RuntimeError, ValueError, TypeError, KeyError):
        return False


def names(file: h5py.File) -> list[str]:
    """Return the names of all datasets that h5py can list."""
    found: list[str] = []

    def visit(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset):
            found.append(name)

    try:
        file.visititems(visit)
    except (RuntimeError, KeyError, OSError):
        return found
    return found


def expectation(file: h5py.File, name: str) -> tuple[Any, int | None]:
    """Return values and number of rows; None for too many values, None twice for a dataset h5py cannot read."""
    try:
        dataset = file[name]
        if not dataset.shape:
            return None, None
        if dataset.size * dataset.dtype.itemsize > DECODED:
            return None, len(dataset)
        return dataset[...], len(dataset)
    except (OSError, RuntimeError, ValueError, TypeError, KeyError):
        if dataset_is_opaque(file, name):
            return None, len(file[name])
        return None, None


def dataset_is_opaque(file: h5py.File, name: str) -> bool:
    """Read opaque values with their own tag as bytes, which h5py does not."""
    try:
        return bool(file[name].dtype.kind == "V" and file[name].dtype.names is None and file[name].shape)
    except (OSError, RuntimeError, ValueError, TypeError, KeyError):
        return False


def check(path: Path, file: h5py.File, name: str, expected: Any) -> None:
    found = index(str(path), [name])
    assert len(found) == len(file[name])
    if expected is None:
        return
    assert same(every_row(found, name), expected, file), name
    if len(found):
        rows, numbers = random_rows(found, name, np.random.default_rng(zlib.crc32(name.encode())))
        assert same(rows, expected[numbers], file), name


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_whole_files_open_or_raise_a_clear_error(path: Path) -> None:
    try:
        found = index(str(path), None)
    except FormatError as error:
        assert error.file == str(path)
        assert error.found is not None
    else:
        assert all(layout.rows == len(found) for layout in found.files[0].layouts.values())


@pytest.mark.parametrize("name", ["tbigdims.h5", "tiny_huge_1d_over_maxint.hdf5", "100B_max_dimension_size.hdf5"])
def test_the_last_rows_of_huge_datasets(name: str) -> None:
    for path in (path for path in FILES if path.name == name):
        with h5py.File(path, locking=False) as file:
            for field in names(file):
                found = index(str(path), [field])
                assert len(found) == len(file[field])
                last = np.array([len(found) - 1], np.int64)
                assert same(read_rows(found, field, last, np.zeros(1, np.int64)), file[field][-1:])
