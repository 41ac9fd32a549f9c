"""The core chooses among what a reader finds: by names, by patterns, or all of it; layouts are made for these alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from matex_data import abc
from matex_data.errors import DataError, FieldNotFound, FormatError
from matex_data.readers import formats, reader
from matex_data.readers.catalogue import of_subset

MADE: list[str] = []


def _entry(name: str, values: Sequence[float]) -> tuple[abc.Field, Callable[[], abc.Layout]]:
    rows = abc.MemoryRows(np.array(values))

    def make() -> abc.Layout:
        MADE.append(name)
        return rows

    return abc.Field(name, (), rows.values.dtype), make


def _entries(path: str) -> Mapping[str, Any]:
    found = {name: _entry(name, [1.0, 2.0]) for name in ("x1", "x2", "y")}
    return {**found, "map": "it has no fields of its own", "broken": FormatError("the array is damaged", file=path)}


def _index(path: str, *, without: Sequence[str] = ()) -> Mapping[str, Any]:
    return {name: entry for name, entry in _entries(path).items() if name not in without}


def _of_today(path: str, names: Sequence[str] | None = None, *, rows: int = 2) -> abc.Index:
    known = {name: abc.Field(name, (), np.dtype(float)) for name in ("x1", "x2")}
    for name in names or ():
        if name not in known:
            raise FieldNotFound("the file has no such field", file=path, field=name)
    layouts = {name: abc.MemoryRows(np.zeros(rows)) for name in (known if names is None else names)}
    return abc.Index({name: known[name] for name in layouts}, [abc.FileIndex(path, rows, layouts)])


@pytest.fixture(autouse=True)
def _formats(monkeypatch: pytest.MonkeyPatch) -> None:
    MADE.clear()
    for name, function in {"found": _index, "today": _of_today}.items():
        monkeypatch.setitem(formats.FORMATS, name, formats.KnownFormat(function))


@pytest.mark.parametrize(
    ("names", "expected"), [(["y"], ["y"]), (["x*"], ["x1", "x2"]), (["y", "x*", "x1"], ["y", "x1", "x2"])]
)
def test_layouts_are_made_of_chosen_fields_alone(names: list[str], expected: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(reader("found")("a.dat", names).fields) == MADE == expected


def test_what_cannot_be_read_is_left_out_with_a_warning_or_an_error() -> None:
    with pytest.warns(UserWarning, match=r"a\.dat: 1 field cannot be read and is left out\n.*'map': it has no fields"):
        assert list(reader("found")("a.dat", without=["broken"]).fields) == ["x1", "x2", "y"]
    with pytest.raises(FormatError, match="the array is damaged"), pytest.warns(UserWarning, match="map"):
        reader("found")("a.dat")
    with pytest.raises(FormatError, match="it has no fields of its own"):
        reader("found")("a.dat", ["x1", "map"])
    with pytest.warns(UserWarning, match="map"):
        assert list(reader("found")("a.dat", ["[mx]*"]).fields) == ["x1", "x2"]
    with pytest.raises(FormatError, match="no field that can be read"):
        reader("found")("a.dat", without=["x1", "x2", "y", "broken"])


@pytest.mark.parametrize("name", ["x3", "z*"])
def test_a_field_that_is_not_there_has_near_matches(name: str) -> None:
    with pytest.raises(FieldNotFound, match=r"(?s)a\.dat.*one of '.*5 fields"):
        reader("found")("a.dat", [name])
    assert not MADE


def test_readers_that_choose_themselves_work_as_before() -> None:
    assert list(reader("today")("a.dat").fields) == ["x1", "x2"]
    assert list(reader("today")("a.dat", ["x2"], rows=5).fields) == ["x2"]
    assert list(reader("today")("a.dat", ["x*"]).fields) == ["x1", "x2"]
    with pytest.raises(FieldNotFound, match="no such field"):
        reader("today")("a.dat", ["z"])
    with pytest.raises(FormatError, match="has no option 'row'"):
        reader("today")("a.dat", row=1)
    with pytest.raises(FormatError, match="has no option 'names'"):
        reader("found")("a.dat", names=["x1"])


@pytest.mark.parametrize(
    ("name", "subset"),
    [
        ("t10k-images-idx3-ubyte", "test"),
        ("emnist-letters-test-images-idx3-ubyte.gz", "test"),
        ("mnistTest-images-idx3-ubyte", "test"),
        ("test_batch.bin", "test"),
        ("latest-images-idx3-ubyte", "train"),
        ("contest.bin", "train"),
    ],
)
def test_files_of_a_subset_are_told_by_their_names(name: str, subset: str) -> None:
    field, make_layout = _entry("x", [1.0, 2.0])
    for wanted in ("train", "test"):
        index = of_subset(f"/tests/{name}", wanted)({"x": field}, {"x": make_layout()})
        assert len(index) == (2 if wanted == subset else 0)


@pytest.mark.parametrize("name", [name for name in formats.FORMATS if name not in ("images", "raw", "zarr")])
def test_what_the_system_does_not_read_is_no_damage(name: str, tmp_path: Path) -> None:
    for path, problem in ((tmp_path, "Is a directory"), (tmp_path / "absent", "No such file or directory")):
        with pytest.raises(
            DataError, match=rf"the file cannot be read .*\n  found: .*{problem}: .*\n  remedy: check the path"
        ) as caught:
            reader(name)(str(path))
        assert type(caught.value) is DataError
