"""Formats of other packages: a toy package is installed, detected, and passes the conformance suite."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from matex_data import FormatError, open_dataset
from matex_data.readers import detect, known_formats, reader
from tests.support.format_suite import Case, FormatSuite
from tests.support.launch import ROOT
from tests.support.plugins import installed
from tests.support.ranks import Pool, Pools

RECORD = np.dtype([("id", ">i8"), ("position", ">f4", (3,)), ("label", ">i2"), ("spare", "V2")])


@pytest.fixture(scope="module", autouse=True)
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Install the toy package, for this process and for ranks that start later."""
    with installed(tmp_path_factory.mktemp("plugins"), ROOT / "tests" / "plugin") as folder:
        yield folder


@pytest.fixture(scope="module")
def ranks(site: Path) -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()


def _records(first: int, rows: int) -> np.ndarray:
    records = np.zeros(rows, RECORD)
    records["id"] = np.arange(first, first + rows)
    records["position"] = np.random.default_rng(first).normal(size=(rows, 3))
    records["label"] = records["id"] % 7
    return records


def _write(path: Path, records: np.ndarray) -> None:
    path.write_bytes(b"TOYREC\r\n" + struct.pack(">I", len(records)) + records.tobytes())


class TestToyRecords(FormatSuite):
    def write(self, folder: Path) -> Case:
        records = [_records(0, 150), _records(150, 37), _records(187, 114)]
        for number, part in enumerate(records):
            _write(folder / f"part{number}.toy", part)
        whole = np.concatenate(records)
        expected = {name: whole[name].astype(whole[name].dtype.newbyteorder("=")) for name in RECORD.names[:3]}
        return Case(str(folder), expected, "id")

    def damage(self, folder: Path) -> Case:
        case = self.write(folder)
        path = folder / "part1.toy"
        path.write_bytes(path.read_bytes()[: -RECORD.itemsize])
        return case

    @pytest.mark.rank_counts(1)  # the pools of this module import TensorFlow anew
    def test_tensors_are_the_arrays(self, case: Case, pool: Pool) -> None:
        super().test_tensors_are_the_arrays(case, pool)


def test_plugins_are_listed() -> None:
    assert {"toy", "toy_function", "hdf5"} <= set(known_formats())


@pytest.mark.parametrize("name", ["events", "events.bin", "events.csv", "events.toy"])
def test_content_tells_the_format(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    _write(path, _records(0, 9))
    assert detect(str(path), path.read_bytes()) == "toy"
    np.testing.assert_array_equal(open_dataset(path, comm=MPI.COMM_SELF).load()["label"], np.arange(9) % 7)


def test_the_suffix_tells_the_format_of_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "a.toy"
    path.write_bytes(b"nothing")
    assert detect(str(path), b"nothing") == "toy"
    with pytest.raises(FormatError, match="not a toy file"):
        open_dataset(path, comm=MPI.COMM_SELF)


def test_a_directory_stands_for_the_files_of_the_format(tmp_path: Path) -> None:
    for number in (10, 2):
        _write(tmp_path / f"a{number}.toy", _records(number, 5))
    _write(tmp_path / "a3.draft.toy", _records(3, 5))
    (tmp_path / "notes.md").write_text("made by hand\n")
    ids = open_dataset(tmp_path, comm=MPI.COMM_SELF).load()["id"]
    assert ids.tolist() == [2, 3, 4, 5, 6, 10, 11, 12, 13, 14]


@pytest.mark.parametrize("format", ["toy", "toy_function"])
def test_options_of_a_plugin_are_checked(tmp_path: Path, format: str) -> None:
    path = tmp_path / "a"
    _write(path, _records(0, 9))
    assert len(open_dataset(path, format=format, first_record=4, comm=MPI.COMM_SELF)) == 5
    with pytest.raises(FormatError, match=rf"'{format}' files has no option 'first'(.|\n)*'first_record'"):
        reader(format)(str(path), first=4)
