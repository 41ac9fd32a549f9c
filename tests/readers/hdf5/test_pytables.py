"""Files that PyTables writes: tables, arrays, and what it keeps beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tables

from matex_data.errors import FormatError
from matex_data.readers.hdf5.reader import index
from tests.support.serial import every_row, random_rows, same

ROWS = 40


class Inner(tables.IsDescription):
    u = tables.Float64Col(pos=0)
    v = tables.Time64Col(pos=1)


class Record(tables.IsDescription):
    a = tables.Int32Col(pos=0)
    seen = tables.Time64Col(pos=1)
    x = tables.Float32Col(shape=(2,), pos=2)
    begun = tables.Time32Col(pos=3)
    name = tables.StringCol(8, pos=4)
    color = tables.EnumCol({"red": 1, "green": 2}, "red", base="uint8", pos=5)
    good = tables.BoolCol(pos=6)
    c = tables.ComplexCol(16, pos=7)
    inner = Inner()


TIMES = ["table/seen", "table/begun", "table/inner/v"]


def _records() -> np.ndarray[Any, Any]:
    random = np.random.default_rng(3)
    records = np.zeros(ROWS, tables.description.dtype_from_descr(Record))
    records["a"], records["seen"] = np.arange(ROWS), 1.5e9 + np.arange(ROWS)
    records["x"], records["good"] = random.normal(size=(ROWS, 2)), random.random(ROWS) < 0.5
    records["name"], records["color"] = [f"n{i}" for i in range(ROWS)], random.integers(1, 3, ROWS)
    records["c"], records["inner"]["u"] = random.normal(size=ROWS) * 1j, random.normal(size=ROWS)
    return records


@pytest.fixture(params=[None, "zlib", "blosc"])
def table(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / "a.h5"
    filters = None if request.param is None else tables.Filters(5, request.param)
    with tables.open_file(path, "w") as file:
        made = file.create_table("/", "table", Record, filters=filters, chunkshape=(16,))
        made.append(_records())
    return path


def test_members_of_types_without_reader_do_not_hinder_others(table: Path) -> None:
    with pytest.warns(UserWarning, match="3 fields cannot be read") as caught:
        found = index(str(table))
    (warning,) = caught
    assert all(repr(name) in str(warning.message) for name in TIMES)
    records, random = _records(), np.random.default_rng(0)
    assert list(found.fields) == ["table"]
    dtype = found.fields["table"].dtype
    assert dtype.names == ("a", "x", "name", "color", "good", "c", "inner") and dtype["inner"].names == ("u",)
    rows, numbers = random_rows(found, "table", random)
    for name in ("a", "x", "name", "color", "c"):
        assert same(rows[name], records[name][numbers])
        single = index(str(table), [f"table/{name}"])
        assert same(every_row(single, f"table/{name}"), records[name])
        rows_of_it, own = random_rows(single, f"table/{name}", random)
        assert same(rows_of_it, records[name][own])
    assert same(rows["inner"]["u"], records["inner"]["u"][numbers])
    assert same(every_row(index(str(table), ["table/inner/u"]), "table/inner/u"), records["inner"]["u"])


@pytest.mark.parametrize("name", TIMES)
def test_a_member_without_reader_is_an_error_that_names_it(table: Path, name: str) -> None:
    with pytest.raises(FormatError, match="type that h5py cannot read") as caught:
        index(str(table), [name])
    assert (caught.value.file, caught.value.field) == (str(table), name)


def test_a_pattern_selects_the_readable_members(table: Path) -> None:
    with pytest.warns(UserWarning, match="'table/seen'"):
        found = index(str(table), ["table/*"])
    assert set(found.fields) == {f"table/{name}" for name in ("a", "x", "name", "color", "good", "c", "inner/u")}


def test_indexes_of_tables_are_skipped_and_arrays_are_fields(tmp_path: Path) -> None:
    path, random = tmp_path / "a.h5", np.random.default_rng(0)
    texts, lists = [f"é{i}" * (i % 3) for i in range(ROWS)], [random.integers(0, 9, i % 4) for i in range(ROWS)]
    matrix, blocks = random.normal(size=(ROWS, 3)), random.integers(0, 99, (ROWS, 2))
    with tables.open_file(path, "w") as file:
        columns = {"pt": tables.Float64Col(), "id": tables.Int32Col()}
        table = file.create_table("/run", "table", columns, createparents=True)
        table.append([(i, float(i)) for i in range(ROWS)])
        table.flush()
        table.cols.id.create_csindex()
        file.create_array("/", "array", matrix)
        file.create_carray("/", "carray", obj=blocks, filters=tables.Filters(5, "blosc:lz4"))
        file.create_earray("/", "earray", tables.Float64Atom(), (0, 3)).append(matrix)
        file.create_earray("/", "seconds", tables.Time64Atom(), (0,)).append(np.arange(ROWS * 1.0))
        for name, atom, rows in (
            ("lists", tables.Int64Atom(), lists),
            ("texts", tables.VLUnicodeAtom(), texts),
            ("bytes", tables.VLStringAtom(), [text.encode("utf-16") for text in texts]),
            ("objects", tables.ObjectAtom(), [[i] for i in range(ROWS)]),
        ):
            made = file.create_vlarray("/", name, atom)
            for row in rows:
                made.append(row)
    with pytest.warns(UserWarning, match="'seconds'") as caught:
        found = index(str(path))
    assert "'objects'" in str(caught[0].message)
    assert set(found.fields) == {"run/table", "array", "carray", "earray", "lists", "texts", "bytes"}
    assert same(every_row(found, "array"), matrix) and same(every_row(found, "earray"), matrix)
    assert same(every_row(found, "carray"), blocks)
    assert all(same(a, b) for a, b in zip(every_row(found, "lists"), lists, strict=True))
    assert [text.decode() for text in every_row(found, "texts")] == texts
    assert [text.decode("utf-16") for text in every_row(found, "bytes")] == texts
    rows, numbers = random_rows(found, "texts", random)
    assert [text.decode() for text in rows] == [texts[i] for i in numbers]
