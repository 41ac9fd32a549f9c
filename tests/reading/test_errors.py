"""An error of a read is one object: where the plan knows its file and field, these are added to it."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from matex_data.errors import DecodeError, FunctionError
from matex_data.fields import Field
from matex_data.index.cache import Chunk, ChunkCache
from matex_data.index.jagged import Content, jagged_columns
from matex_data.index.model import EMPTY, FileIndex, Index, Layout, ReadRequest
from matex_data.index.runs import Runs
from matex_data.reading.buffers import BufferPool
from matex_data.reading.plan import plan_reads


@dataclass(frozen=True, eq=False)
class Failing(Layout):
    """Rows of which each read fails with the same error."""

    rows: int
    error: DecodeError
    block_rows: int = 1

    def requests(self, *_: Any) -> Any:
        def fail(_: Any) -> None:
            raise self.error

        yield ReadRequest(EMPTY, EMPTY, on_complete=fail)


def _raised(index: Index) -> DecodeError:
    """Return the error of reading all samples."""
    arrays = {name: field.empty(len(index)) for name, field in index.fields.items()}
    runs = Runs(np.array([0]), np.array([len(index)]))
    plan = plan_reads(index, runs, np.arange(len(index)), arrays, ChunkCache(1 << 20), BufferPool())
    ((_, complete),) = plan.completions
    with pytest.raises(DecodeError) as caught:
        complete()
    return caught.value


def test_the_plan_adds_file_and_field_to_the_error_itself() -> None:
    error = DecodeError("a chunk does not decode", row=5)
    index = Index({"x": Field("x", (), np.dtype("f4"))}, [FileIndex("a.h5", 9, {"x": Failing(9, error)})])
    found = _raised(index)
    assert found is error and found.__cause__ is None
    assert str(found) == "a chunk does not decode (file 'a.h5', field 'x', row 5)"
    again = pickle.loads(pickle.dumps(found))
    assert str(again) == str(found) and type(again) is DecodeError


def test_an_element_of_a_list_becomes_its_sample() -> None:
    error = DecodeError("a chunk does not decode", file="given.h5", row=5)
    layouts = jagged_columns(np.array([0, 2, 4, 9]), {"x": Content(Failing(9, error), np.dtype("f4"))})
    index = Index({"x": Field("x", (), np.dtype("f4"), ragged=True)}, [FileIndex("a.h5", 3, layouts)])
    assert _raised(index) is error
    assert (error.file, error.row) == ("given.h5", 2)


def test_all_who_need_a_chunk_have_errors_of_their_own() -> None:
    """The row of an element of one field is no row of another field."""
    chunk, error, found = Chunk(), DecodeError("a chunk does not decode", row=7), []
    error.__cause__ = OSError("a checksum")
    chunk.fail(error)
    error.at_row(0)
    for row in (1, 2):
        try:
            _ = chunk.value
        except DecodeError as own:
            assert own.row == 7 and own.__cause__ is error.__cause__
            found.append(own.at("a.h5", f"field {row}").at_row(row))
    assert [(one.field, one.row) for one in found] == [("field 1", 1), ("field 2", 2)] and error.file is None


def test_what_is_added_is_in_the_text(tmp_path: Path) -> None:
    error = FunctionError("a function fails", found="ValueError")
    assert error.of_rows(2, 4, "b.h5").at("a.h5", "x") is error
    assert str(error) == (
        "a function fails, given samples of rows 2 to 4 of 'b.h5' (file 'a.h5', field 'x')\n  found: ValueError"
    )
    damaged = DecodeError("a header is damaged", byte=512)
    assert damaged.within("the unpacked shard") is damaged
    assert "byte counted in the unpacked shard (byte 512)" in str(damaged)
