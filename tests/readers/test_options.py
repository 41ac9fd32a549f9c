"""Options of readers: errors for unknown options, and for values of another type, of every format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from matex_data import DataError, FormatError, open_dataset
from matex_data.index.model import Index
from matex_data.readers import FORMATS, collective_reader, formats, reader
from matex_data.readers.collective import SingleRank
from tests.support.ranks import Pools

NEAR = {"csv": ("delimeter", "delimiter"), "netcdf": ("sample_dims", "sample_dim"), "npy": ("feild", "field")}
NEAR |= {
    "npz": ("shapes", "shape"),
    "raw": ("ofset", "offset"),
    "idx": ("subsets", "subset"),
    "cifar": ("sub", "subset"),
}


@pytest.mark.parametrize("format", FORMATS)
def test_errors_for_an_unknown_option_list_the_nearest_ones(tmp_path: Path, format: str) -> None:
    wrong, right = NEAR.get(format, ("chunks", ""))
    path = tmp_path / "x"
    path.write_bytes(b"")
    with pytest.raises(FormatError) as caught:
        open_dataset(str(path), format=format, comm=MPI.COMM_SELF, **{wrong: 1})
    lines = str(caught.value).splitlines()
    assert f"the reader of {format!r} files has no option {wrong!r}" in lines[0]
    if right:
        assert lines[1].startswith(f"  expected: one of {right!r}")
    for function, arguments in (
        (reader(format), (str(path),)),
        (collective_reader(format), ([str(path)], None, SingleRank())),
    ):
        if function is not None:
            with pytest.raises(FormatError, match=f"has no option {wrong!r}"):
                function(*arguments, **{wrong: 1})


def test_all_options_are_listed(tmp_path: Path) -> None:
    with pytest.raises(FormatError) as caught:
        reader("raw")(str(tmp_path), dtypes="f4")
    assert "one of 'dtype', 'field', 'offset', 'sample', 'shape'" in str(caught.value)
    with pytest.raises(FormatError) as caught:
        reader("csv")(str(tmp_path), usecol=[1])
    assert "'usecols', " in str(caught.value)
    assert "'skiprows'" in str(caught.value)


@pytest.mark.parametrize(
    ("format", "option", "value", "expected"),
    [
        ("netcdf", "sample_dim", 3, "a text or None"),
        ("netcdf", "decode", "no", "True or False"),
        ("raw", "offset", "4", "an integer"),
        ("raw", "shape", "3", "a list of: an integer"),
        ("idx", "subset", 1, "a text or None"),
        ("csv", "sep", 1, "a text or None"),
        ("csv", "names", "abc", "a list of: a text or None"),
        ("csv", "encoding", b"utf-8", "a text or None"),
        ("csv", "skiprows", [1], "an integer"),
        ("csv", "header", True, "an integer, a text, or None"),
        ("csv", "na_values", {"a": [1]}, "a text, a number, a list.* or None"),
        ("csv", "header", [0, 1], "an integer, a text, or None"),
    ],
)
def test_a_value_of_another_type_is_refused(
    tmp_path: Path, format: str, option: str, value: Any, expected: str
) -> None:
    with pytest.raises(FormatError, match=f"option {option}= has no such value(.|\n)*expected: {expected}\n"):
        reader(format)(str(tmp_path), **{option: value})


class _Entry:
    def __init__(self, function: Any) -> None:
        self.name = "mine"
        self.load = lambda: function


def _plug(patch: pytest.MonkeyPatch, function: Any) -> None:
    entry = _Entry(function)
    patch.setattr(formats, "entry_points", lambda group, name="mine": [entry] if name == "mine" else [])


def test_options_of_readers_in_other_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "x.npy")
    np.save(path, np.arange(12).reshape(4, 3))

    def index(path: str, names: Any = None, *, tree: str, scale: float = 1.0, more: Unseen = None) -> Index:  # type: ignore[name-defined]  # noqa: F821
        return reader("npy")(path, names)

    _plug(monkeypatch, index)
    with pytest.raises(FormatError, match=r"'mine' files has no option 'tre'(.|\n)*one of 'tree', "):
        reader("mine")(path, tre="t")
    with pytest.raises(FormatError, match="'mine' files needs the option tree="):
        reader("mine")(path)
    found = reader("mine")(path, tree="t", more=3)
    assert len(found) == 4
    assert found.files[0].stamp is not None
    with pytest.raises(FormatError, match=r"no reader of that format(.|\n)*mine"):
        reader("mina")

    def loose(path: str, names: Any = None, **options: Any) -> Index:
        if options != {"anything": 1}:
            raise TypeError(options)
        return reader("npy")(path, names)

    _plug(monkeypatch, loose)
    assert len(reader("mine")(path, anything=1)) == 4


def _open(comm: MPI.Intracomm, path: str, **options: Any) -> None:
    open_dataset(path, comm=comm, **options)


@pytest.mark.parametrize("suffix", ["csv", "npy"])
def test_all_ranks_raise_the_same_error(ranks: Pools, tmp_path: Path, suffix: str) -> None:
    path = str(tmp_path / f"x.{suffix}")
    np.savetxt(path, np.ones((9, 2)), delimiter=",") if suffix == "csv" else np.save(path, np.ones(9))
    outcomes = ranks(3).outcomes(_open, path, shapes=1)
    assert all(isinstance(error, DataError) for error in outcomes)
    assert len({str(error) for error in outcomes}) == 1
    assert "no option 'shapes'" in str(outcomes[0])
