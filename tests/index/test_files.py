"""Tables of files, against the objects of which they were made."""

from __future__ import annotations

import gc
import pickle
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from matex_data.codecs.pipeline import Pipeline
from matex_data.fields import Field
from matex_data.index.blocks import by_part
from matex_data.index.chunked import Chunked
from matex_data.index.columns import Lists, PathTable, compact
from matex_data.index.descriptors import join, separate
from matex_data.index.files import KEPT, DerivedFiles, FileColumns, FileIndex, FileList, columns_of
from matex_data.index.model import Index
from matex_data.index.runs import Runs, compress
from matex_data.index.stamps import Stamp
from matex_data.index.strided import Strided
from matex_data.readers import reader
from tests.support.serial import every_row

STAMPS = st.none() | st.builds(Stamp, st.integers(0, 2**62), st.integers(-(2**62), 2**62), st.integers(0, 2**64 - 1))
INTEGERS = st.integers(-(2**63), 2**63 - 1)
F4 = np.dtype("<f4")


def _strided(number: int, rows: int = 10, stamp: Stamp | None = None) -> FileIndex:
    path = f"/data/run/events_{number:07d}.npy"
    layouts = {"x": Strided(rows, 128, 12, F4, (3,)), "y": Strided(rows, 128 + number, 4, np.dtype(">i4"), ())}
    return FileIndex(path, rows, layouts, stamp)


def _chunked(number: int, chunks: int) -> FileIndex:
    table = np.arange(chunks), np.arange(chunks) * 100 + number, np.full(chunks, 90), np.zeros(chunks, np.int64)
    layout = Chunked((chunks * 5, 3), (5, 3), F4, Pipeline((), 4, 60), *table, fill=np.float32(number))
    return FileIndex(f"{number}.h5", chunks * 5, {"x": layout})


@given(st.lists(INTEGERS, max_size=20) | st.lists(st.booleans(), max_size=5))
def test_columns_keep_their_numbers(numbers: list[int]) -> None:
    dtype = bool if numbers and isinstance(numbers[0], bool) else np.int64
    assert compact(np.array(numbers, dtype)).tolist() == numbers


@given(st.lists(st.lists(INTEGERS, max_size=5), min_size=1, max_size=6))
def test_lists_keep_their_numbers(lists: list[list[int]]) -> None:
    arrays = [np.array(numbers, np.int64) for numbers in lists]
    first, second = Lists.of(arrays[:1]), Lists.of(arrays)
    both = pickle.loads(pickle.dumps(Lists.joined([first, second])))
    assert [numbers.tolist() for numbers in both] == [lists[0], *lists]


@given(st.lists(st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=9), max_size=9))
def test_paths_keep_their_names(names: list[str]) -> None:
    first = [f"/data/{name}" for name in names]
    second = [f"/data/run/{name}" for name in names]
    assert list(PathTable.of(first)) == first
    assert list(PathTable.joined([PathTable.of(first), PathTable.of(second)])) == first + second
    assert list(pickle.loads(pickle.dumps(PathTable.of(second)))) == second


def test_paths_that_are_no_text() -> None:
    odd = b"/data/\xff\xfe.h5".decode(sys.getfilesystemencoding(), "surrogateescape")
    assert list(PathTable.of([odd, "/data/a.h5"])) == [odd, "/data/a.h5"]


@given(st.lists(STAMPS, max_size=6))
def test_stamps_keep_their_numbers(stamps: list[Stamp | None]) -> None:
    table = columns_of([FileIndex("a.bin", 0, {}, stamp) for stamp in stamps])
    assert [table.stamp(i) for i in range(len(stamps))] == stamps
    twice = pickle.loads(pickle.dumps(FileColumns.joined([table, table])))
    assert [twice.stamp(i) for i in range(2 * len(stamps))] == stamps * 2


VALUES: Any = st.recursive(
    INTEGERS | st.floats(allow_nan=False) | st.booleans() | st.none() | st.text(max_size=3) | st.just(10**30),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@given(VALUES, st.text(max_size=3))
def test_objects_are_joined_as_they_were(value: Any, text: str) -> None:
    separated = separate([value, text], text)
    assert repr(join(separated, text)) == repr([value, text])
    assert join(separated, "another")[1] == "another"


@pytest.mark.parametrize("dtype", ["<i8", ">i4", "u1", "u8", "f8", ">f4", "S3", "U2", "M8[ns]", "i4,f8"])
def test_dtypes_and_arrays_of_objects(dtype: str) -> None:
    array = np.arange(6).astype(dtype if "," not in dtype else "i4").astype(dtype)
    found = join(separate((array, array.reshape(2, 3), array.dtype, array[0]), ""), "")
    for one, other in zip(found, (array, array.reshape(2, 3), array.dtype, array[0]), strict=True):
        assert np.array_equal(one, other) if isinstance(other, np.ndarray) else one == other
    assert found[0].dtype == found[2] == array.dtype


@pytest.mark.parametrize("shared", [1, 3000])
def test_files_in_columns(shared: int) -> None:
    files = [_strided(i, 10 + i % 3 * (i > shared), Stamp(i, -i, i) if i % 2 else None) for i in range(3000)]
    table: FileColumns = pickle.loads(pickle.dumps(columns_of(files)))
    assert len(table) == 3000
    assert list(table.paths) == [file.path for file in files]
    assert table.rows.tolist() == [file.rows for file in files]
    assert [table.stamp(i) for i in range(3000)] == [file.stamp for file in files]
    assert list(table) == files  # Strided compares by its numbers
    assert table[-1] == files[-1]
    assert table[5:8] == files[5:8]
    with pytest.raises(IndexError):
        table[3000]


def test_tables_are_joined_in_order() -> None:
    files = [_chunked(i, 1 + i % 2) for i in range(9)]
    tables = [columns_of(files[:1]), columns_of([]), columns_of(files[1:4]), columns_of(files[4:])]
    joined = FileColumns.joined(pickle.loads(pickle.dumps(tables)))
    assert [file.path for file in joined] == [file.path for file in files]
    for found, expected in zip(joined, files, strict=True):
        one: Any = found.layouts["x"]
        other: Any = expected.layouts["x"]
        for name in ("number", "offset", "nbytes", "mask"):
            assert getattr(one, name).tolist() == getattr(other, name).tolist()
            assert getattr(one, name).dtype == getattr(other, name).dtype
        assert (one.shape, one.dtype, one.fill, one.pipeline) == (other.shape, other.dtype, other.fill, other.pipeline)
    facts = joined.facts["x"]
    assert facts.block_rows.tolist() == [5] * 9
    assert not facts.uneven.any()


def test_parts_of_stamps_in_columns() -> None:
    parts = [(), ("x/zarr.json",), (), ("y/zarr.json", "zarr.json"), ("x/zarr.json",)]
    stamps = [Stamp(i, i, 2**63 + i, names) for i, names in enumerate(parts)]
    files = [replace(_strided(i, 10), stamp=stamp) for i, stamp in enumerate(stamps)]
    tables = [columns_of(files[:1]), columns_of(files[1:3]), columns_of(files[3:])]
    for table in (columns_of(files), FileColumns.joined(pickle.loads(pickle.dumps(tables)))):
        assert [table.stamp(i) for i in range(5)] == stamps


def test_entries_are_made_once() -> None:
    """Chunks of a file are cached by its layout, so that another object for it would decode them again."""
    table = columns_of([_chunked(i, 1) for i in range(4)])
    derived = DerivedFiles(table, _renamed)
    assert table[2].layouts["x"] is table[2].layouts["x"]
    assert derived[2].layouts["z"] is table[2].layouts["x"]
    assert derived[1] is derived[1]
    again = pickle.loads(pickle.dumps(derived))
    assert [file.path for file in again] == [file.path for file in table]
    assert list(again[0].layouts) == ["z"]


def _renamed(_: int, file: FileIndex) -> FileIndex:
    return replace(file, layouts={"z": file.layouts["x"]})


def test_memory_of_many_files() -> None:
    """At most 500 bytes a file, of which the pickle is a good measure: it has nothing but the columns."""
    count = 20 * KEPT
    stamps = np.random.default_rng(0).integers(0, 2**40, (count, 2)).tolist()
    table = columns_of(_strided(i, 10, Stamp(248, *stamps[i])) for i in range(count))
    assert len(pickle.dumps(table)) < 60 * count


def test_facts_of_derived_files() -> None:
    files = FileList([_strided(i, 10 * i) for i in range(5)])
    derived = DerivedFiles(files, partial(_block, 7))
    assert derived.facts["x"].block_rows.tolist() == [7] * 5
    assert derived.facts_of([1, 2])["y"].block_rows.tolist() == [1, 1]
    assert derived.rows is files.rows


def _block(rows: int, _: int, file: FileIndex) -> FileIndex:
    layout: Any = file.layouts["x"]
    return replace(file, layouts={**file.layouts, "x": replace(layout, block_rows=rows)})


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.data())
def test_rows_by_part(rows: list[int], data: st.DataObject) -> None:
    files = [_strided(i, count) for i, count in enumerate(rows)]
    fields = {"x": Field("x", (3,), np.dtype("f4")), "y": Field("y", (), np.dtype("i4"))}
    index = Index(fields, files)
    total = sum(rows)
    numbers = np.array(sorted(data.draw(st.sets(st.integers(0, max(0, total - 1)), max_size=total))), np.int64)
    runs = compress(numbers)
    if data.draw(st.booleans()):  # a run of no samples
        runs = Runs(np.append(runs.start, total), np.append(runs.count, 0))
    destination = np.arange(len(numbers))[::-1]
    found = {}
    for number, selection in by_part(runs.selection(destination), index.first_row):
        assert number not in found
        found[number] = list(zip(selection.numbers.tolist(), selection.destination.tolist(), strict=True))
    expected: dict[int, list[tuple[int, int]]] = {}
    of_rows = [(file, row) for file, count in enumerate(rows) for row in range(count)]
    for position, number in enumerate(numbers.tolist()):
        file, row = of_rows[number]
        expected.setdefault(file, []).append((row, len(numbers) - 1 - position))
    assert found == expected


def test_files_of_a_library_in_columns(tmp_path: Path) -> None:
    """Texts, which h5py reads by the path of the file, and chunks, as h5py wrote them."""
    written: dict[str, list[Any]] = {"x": [], "text": []}
    indexes = []
    for number, rows in enumerate((7, 12, 12)):
        x = np.random.default_rng(number).integers(0, 100, (rows, 4))
        text = [f"{number}:{row}" for row in range(rows)]
        path = tmp_path / f"{number}.h5"
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=x, chunks=(5, 4), compression="gzip")
            file["text"] = text
        written["x"] += x.tolist()
        written["text"] += text
        indexes.append(reader("hdf5")(str(path)))
    files = pickle.loads(pickle.dumps(columns_of(file for index in indexes for file in index.files)))
    of_files = [Index(indexes[0].fields, [file]) for file in files]
    assert np.concatenate([every_row(index, "x") for index in of_files]).tolist() == written["x"]
    texts = np.concatenate([every_row(index, "text") for index in of_files]).tolist()
    assert [text.decode() if isinstance(text, bytes) else text for text in texts] == written["text"]


def test_entries_end_with_their_table() -> None:
    """Layouts of a library keep files open: they must not wait for the garbage collection."""
    gc.disable()
    try:
        for make in (columns_of, lambda files: DerivedFiles(columns_of(files), _renamed)):
            table = make([_chunked(0, 1)])
            (layout,) = table[0].layouts.values()
            alive = ref(layout)
            del layout, table
            assert alive() is None
    finally:
        gc.enable()
