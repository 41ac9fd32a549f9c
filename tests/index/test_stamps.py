"""Stamps reveal files that were replaced or modified after they were opened."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from matex_data import DataError
from matex_data.fields import ElementSpec
from matex_data.index.model import FileIndex
from matex_data.index.stamps import Stamp, changed, check_stamp
from matex_data.index.united import concatenate
from matex_data.readers import collective_reader, reader
from matex_data.transforms.sequences import sequence_shape, sliding_sequences
from matex_data.transforms.stack import stack_fields
from tests.support import simulated


def _opened(path: Path) -> FileIndex:
    np.save(path, np.arange(24.0).reshape(8, 3))
    (file,) = reader("npy")(str(path)).files
    return file


def test_unchanged_file(tmp_path: Path) -> None:
    file = _opened(tmp_path / "x.npy")
    found = Path(file.path).stat()
    assert file.stamp == Stamp(found.st_size, found.st_mtime_ns, found.st_ino)
    Path(file.path).read_bytes()
    Path(file.path).chmod(0o600)
    assert check_stamp(file.path, pickle.loads(pickle.dumps(file)).stamp) is None
    assert check_stamp("no such file", None) is None  # not indexed from a file


def _replaced(path: Path) -> None:
    content, before = path.read_bytes(), path.stat()
    beside = path.with_suffix(".new")
    beside.write_bytes(content)
    os.utime(beside, ns=(before.st_atime_ns, before.st_mtime_ns))
    beside.replace(path)


def _rewritten(path: Path) -> None:
    before = path.stat()
    np.save(path, np.ones((8, 3)))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


def _appended(path: Path) -> None:
    before = path.stat()
    with path.open("ab") as file:
        file.write(b"more")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("change", [_replaced, _rewritten, _appended, Path.unlink])
def test_changed_file(tmp_path: Path, change: Any) -> None:
    path = tmp_path / "x.npy"
    file = _opened(path)
    change(path)
    error = check_stamp(file.path, file.stamp)
    assert isinstance(error, DataError)
    assert error.file == str(path)
    assert str(file.stamp) in str(error)
    found = "No such file" if change == Path.unlink else str(Stamp.of(str(path)))
    assert found in str(error)
    assert "open it again" in str(error)


def test_another_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = _opened(Path("x.npy"))
    (tmp_path / "run").mkdir()
    monkeypatch.chdir("run")
    error = check_stamp(file.path, file.stamp)
    assert "no longer where it was opened (file 'x.npy')" in str(error)
    assert f"the working directory, now '{tmp_path}/run': open it by its whole path" in str(error)
    assert "working directory" not in str(changed("s3://data/x.npy", Stamp(1, 2, 3), FileNotFoundError()))


def test_a_state_that_the_system_does_not_tell_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = _opened(tmp_path / "x.npy")

    def refuse(*_: Any) -> Stamp:
        raise PermissionError(13, "not permitted")

    monkeypatch.setattr(Stamp, "of", refuse)
    error = check_stamp(file.path, file.stamp)
    assert "does not tell" in str(error) and "not permitted" in str(error) and "open it again" not in str(error)


def test_change_during_indexing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.arange(24.0).reshape(8, 3))
    inner = reader("npy").__wrapped__  # type: ignore[attr-defined]

    def index(path: str, **options: Any) -> Any:
        found = inner(path, **options)
        _rewritten(Path(path))
        return found

    monkeypatch.setattr("matex_data.readers.arrays.index", index)
    (file,) = reader("npy")(str(path)).files
    assert check_stamp(file.path, file.stamp) is not None


@pytest.mark.parametrize("size", (1, 2, 3))
def test_stamps_of_collective_readers(tmp_path: Path, size: int) -> None:
    paths = [str(tmp_path / f"{i}.csv") for i in range(4)]
    for path in paths:
        Path(path).write_text("a,b\n1,2\n")
    function = collective_reader("csv")
    assert function is not None
    for index in simulated.on_ranks(size, lambda ranks: function(paths, None, ranks)):
        assert [file.stamp for file in index.files] == [Stamp.of(path) for path in paths]


def test_derived_indexes_keep_the_stamps(tmp_path: Path) -> None:
    first, second = _opened(tmp_path / "a.npy"), _opened(tmp_path / "b.npy")
    stamps = [first.stamp, second.stamp]
    index = concatenate([reader("npy")(file.path) for file in (first, second)])
    for other in (
        index.select(["data"]),
        index.raw,
        sliding_sequences(index, ElementSpec(["data"]), sequence_shape(2, 1, None, 1, None))[0].index,
        stack_fields(index, ["data"], "inputs", [], "last"),
        index.with_stamps({file.path: file.stamp for file in index.files}),
    ):
        assert [file.stamp for file in other.files] == stamps
    assert replace(first, rows=0).stamp == first.stamp


def test_parts_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "store" / "x").mkdir(parents=True)
    store, part, beside = tmp_path / "store", tmp_path / "store" / "x" / "meta", tmp_path / "labels"
    names = ("x/meta", "../labels", "x/none")
    for path in (part, beside):
        path.write_bytes(b"12")
    stamp = Stamp.of(str(store), names)
    assert stamp.parts == names and stamp != Stamp.of(str(store))
    assert stamp.fits(Stamp.of(str(store), names)) and check_stamp(str(store), stamp) is None
    for path in (part, beside, store / "x" / "none"):
        path.write_bytes(b"123")
        assert not stamp.fits(Stamp.of(str(store), names))
        for own in (True, False):
            assert "x/meta, ../labels, x/none" in str(check_stamp(str(store), stamp, own))
        stamp = Stamp.of(str(store), names)
    beside.unlink()
    assert not stamp.fits(Stamp.of(str(store), names))
