"""The contract for readers in other packages: its example runs, and a broken package does no harm."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from matex_data import FieldNotFound, FormatError, abc, open_dataset
from matex_data.readers import detect, formats, known_formats, reader

RECORD = np.dtype([("label", "<i4"), ("position", "<f4", (3,))])


class Entry:
    """Entry point that loads by a function."""

    def __init__(self, name: str, load: Callable[[], Any]) -> None:
        self.name = name
        self.value = f"my_package:{name}"
        self.load = load


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Entry]]:
    """List of the entry points that other packages register."""
    found: list[Entry] = []

    def entry_points(group: str, name: str | None = None) -> list[Entry]:
        assert group == "matex_data.readers"
        return [entry for entry in found if name in (None, entry.name)]

    monkeypatch.setattr(formats, "entry_points", entry_points)
    formats._plugin_formats.cache_clear()
    yield found
    formats._plugin_formats.cache_clear()


def _example() -> dict[str, Any]:
    """Run the example of the docstring; return its names."""
    code = re.findall(r"::\n\n((?:    .*\n|\n)+)", abc.__doc__ or "")[0]
    names: dict[str, Any] = {}
    exec(textwrap.dedent(code), names)
    return names


def _write(path: Path, rows: int, header: bytes = b"POINTS\0\1") -> np.ndarray:
    records = np.zeros(rows, RECORD)
    records["label"] = np.arange(rows)
    records["position"] = np.random.default_rng(rows).normal(size=(rows, 3))
    path.write_bytes(header + records.tobytes())
    return records


def test_the_example_reads_files_by_content_by_name_and_in_directories(tmp_path: Path, entries: list[Entry]) -> None:
    example = _example()
    entries.append(Entry("points", lambda: example["POINTS"]))
    records = _write(tmp_path / "a.points", 50)
    (tmp_path / "notes.md").write_text("made by hand\n")
    (tmp_path / "b").mkdir()
    _write(tmp_path / "b" / "c", 50)
    for path in (tmp_path, tmp_path / "a.points", tmp_path / "b" / "c"):
        data = open_dataset(path, comm=MPI.COMM_SELF).load()
        for name in RECORD.names or ():
            np.testing.assert_array_equal(data[name], records[name])
    assert "points" in known_formats()
    with pytest.raises(FieldNotFound, match="positions"):
        open_dataset(tmp_path, inputs="positions", comm=MPI.COMM_SELF)
    swapped = open_dataset(tmp_path, byteorder=">", comm=MPI.COMM_SELF).load()
    np.testing.assert_array_equal(swapped["label"], records["label"].byteswap())
    with pytest.raises(FormatError, match="has no option 'byteordre'"):
        open_dataset(tmp_path, byteordre=">", comm=MPI.COMM_SELF)
    (tmp_path / "a.points").write_bytes(b"POINTS\0\1xyz")
    with pytest.raises(FormatError, match="the file is truncated"):
        open_dataset(tmp_path, comm=MPI.COMM_SELF)


def test_a_function_is_a_format_by_its_name_alone(tmp_path: Path, entries: list[Entry]) -> None:
    entries.append(Entry("points", lambda: _example()["index"]))
    path = tmp_path / "a.points"
    _write(path, 9)
    with pytest.raises(FormatError, match="cannot tell the format"):
        detect(str(path), path.read_bytes())
    assert len(open_dataset(path, format="points", comm=MPI.COMM_SELF)) == 9


def _raise() -> Any:
    raise RuntimeError("incompatible version")


def test_a_reader_without_a_hash_has_its_options_checked(tmp_path: Path, entries: list[Entry]) -> None:
    class Reader:
        __hash__ = None  # type: ignore[assignment]  # as of a dataclass

        def __call__(self, path: str, names: Any = None, *, dtype: str = "f4") -> abc.Index:
            layout = abc.Strided(3, 0, np.dtype(dtype).itemsize, np.dtype(dtype), ())
            return abc.Index({"x": abc.Field("x", (), np.dtype(dtype))}, [abc.FileIndex(path, 3, {"x": layout})])

    entries.append(Entry("plain", lambda: abc.Format(Reader(), (".plain",))))
    np.arange(3, dtype="f8").tofile(tmp_path / "a.plain")
    assert open_dataset(tmp_path / "a.plain", dtype="f8", comm=MPI.COMM_SELF).load()["x"].tolist() == [0, 1, 2]
    with pytest.raises(FormatError, match="the option dtype= has no such value"):
        open_dataset(tmp_path / "a.plain", dtype=3, comm=MPI.COMM_SELF)


@pytest.mark.parametrize("load, found", [(_raise, "incompatible version"), (lambda: 3, "3 at 'my_package:points'")])
def test_a_broken_package_does_no_harm_to_other_formats(
    tmp_path: Path, entries: list[Entry], load: Callable[[], Any], found: str
) -> None:
    entries.append(Entry("points", load))
    np.save(tmp_path / "a.npy", np.arange(5))
    with pytest.warns(UserWarning, match=rf"the format 'points' does not load(.|\n)*{found}"):
        assert len(open_dataset(tmp_path / "a.npy", comm=MPI.COMM_SELF)) == 5
    with pytest.raises(FormatError, match=rf"the format 'points' does not load(.|\n)*{found}"):
        reader("points")


def test_built_in_formats_come_first(tmp_path: Path, entries: list[Entry]) -> None:
    greedy = abc.Format(_raise, suffixes=(".npy", ".h5x"), magic=((0, b"\x93NUMPY"), (0, b"\x89HDF\r\n\x1a\n")))
    entries += [Entry("greedy", lambda: greedy), Entry("npy", _raise)]
    np.save(tmp_path / "a.npy", np.arange(5))
    head = (tmp_path / "a.npy").read_bytes()
    assert detect(str(tmp_path / "a.npy"), head) == "npy"
    hdf5 = b"\x89HDF\r\n\x1a\n" + bytes(100)
    assert detect(str(tmp_path / "a.h5x"), hdf5) == "greedy"  # content and name together come before content alone


def test_a_missing_package_is_named_with_its_install_command(entries: list[Entry]) -> None:
    missing = abc.Format("package_that_is_nowhere.reader:index", extra="my_package[points]")
    entries.append(Entry("points", lambda: missing))
    with pytest.raises(FormatError) as caught:
        reader("points")
    lines = str(caught.value).splitlines()
    assert lines[0] == "the reader of 'points' files needs a package that is not installed"
    assert lines[1] == "  expected: the package 'package_that_is_nowhere'"
    assert lines[-1] == "  remedy: python -m pip install 'my_package[points]'"
