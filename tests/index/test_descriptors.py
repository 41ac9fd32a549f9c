"""Descriptors: objects come back as they were, and nothing comes that is not declared."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn
from mpi4py import MPI

from matex_data import FormatError, open_dataset
from matex_data.codecs.pipeline import Filter, Pipeline
from matex_data.declared import declared
from matex_data.index.columns import Group
from matex_data.index.descriptors import (
    DEEPEST,
    Origin,
    Separated,
    dtype_from_json,
    dtype_to_json,
    join,
    pickled_class,
    separate,
)
from tests.support.launch import run_script

DTYPES = (
    stn.array_dtypes().filter(lambda dtype: not _has_titles(dtype))
    | stn.scalar_dtypes()
    | stn.unicode_string_dtypes()
    | stn.byte_string_dtypes()
)
SHAPES = stn.array_shapes(min_dims=0, min_side=0, max_dims=3, max_side=3)
PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary()
    | st.builds(range, st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 3))
    | st.datetimes(timezones=st.none() | st.just(UTC) | st.just(timezone(timedelta(hours=-3))))
    | st.dates()
    | st.timedeltas()
    | st.sampled_from([Path("/data"), Filter, slice(1, None, 2), "\udcff", np.str_("a"), np.dtype(object)])
    | DTYPES
    | stn.arrays(DTYPES, SHAPES)
    | stn.arrays(object, SHAPES, elements=st.text() | st.binary())
    | stn.from_dtype(np.dtype(">f8"))
)


def _has_titles(dtype: np.dtype[Any]) -> bool:
    """Return whether members of a dtype have second names, which no file format has."""
    base = dtype if dtype.subdtype is None else dtype.subdtype[0]
    return any(len(member) > 2 or _has_titles(member[0]) for member in (base.fields or {}).values())


@declared
@dataclass(frozen=True)
class _Pair:
    first: Any
    second: Any


@declared
@dataclass(frozen=True, eq=False)
class _Same:
    value: Any


@declared
class _Extent(NamedTuple):
    path: str
    offset: int


@declared
class _Custom:
    def __init__(self, numbers: Any) -> None:
        self.numbers = numbers

    def to_json(self) -> dict[str, Any]:
        return {"twice": self.numbers * 2}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> _Custom:
        return cls(values["twice"] / 2)


@declared
def _scaled(factor: float, stored: Any, out: Any) -> None:
    out[...] = factor * stored


class _Undeclared:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Undeclared)

    __hash__ = None  # type: ignore[assignment]


def _through_json(separated: Separated) -> Separated:
    return Separated(json.loads(json.dumps(separated.described)), separated.numbers, separated.arrays)


def _same(found: Any, expected: Any) -> None:
    """Check that two values are equal in type, dtype and bits."""
    assert type(found) is type(expected)
    if isinstance(expected, tuple | list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            _same(one, other)
    elif isinstance(expected, dict):
        _same(list(found.items()), list(expected.items()))
    elif isinstance(expected, _Pair):
        _same((found.first, found.second), (expected.first, expected.second))
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype and found.shape == expected.shape
        if expected.dtype == object:
            _same(found.tolist(), expected.tolist())
        else:
            assert found.tobytes() == expected.tobytes()
    elif isinstance(expected, float | complex | np.generic):
        assert pickle.dumps(found) == pickle.dumps(expected) or repr(found) == repr(expected)
    else:
        assert found == expected


@given(
    st.recursive(
        PLAIN,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(st.text() | st.integers() | st.booleans(), inner, max_size=3)
            | st.builds(_Pair, inner, inner)
        ),
        max_leaves=6,
    ),
    st.text(),
)
def test_objects_come_back_as_they_were(value: Any, text: str) -> None:
    separated = _through_json(separate([value, text], text))
    assert pickled_class(separated.described) is None
    found = join(separated, text, Origin(False))
    _same(found[0], value)
    assert join(separated, text + "x", Origin(False))[1] == text + "x"


@given(DTYPES)
def test_dtypes_come_back_as_they_were(dtype: np.dtype[Any]) -> None:
    found = dtype_from_json(json.loads(json.dumps(dtype_to_json(dtype))))
    assert found == dtype and found.str == dtype.str and found.itemsize == dtype.itemsize


def test_objects_of_declared_classes_and_functions() -> None:
    values = [_Extent("a", 3), Pipeline((Filter(1, (4,)),), 4, 16), partial(_scaled, 2.5), _Custom(np.arange(3.0))]
    separated = _through_json(separate(values))
    extent, pipeline, function, custom = join(separated, origin=Origin(False))
    assert (extent, pipeline) == tuple(values[:2])
    assert function.func is _scaled and function.args == (2.5,)
    assert custom.numbers.tolist() == [0, 1, 2]


def test_an_object_that_occurs_twice_is_one_object() -> None:
    shared = _Same(np.arange(5))
    found = join(_through_json(separate([shared, _Pair(shared, shared.value), shared])), origin=Origin(False))
    assert found[0] is found[2] is found[1].first and found[1].second is found[0].value


def test_what_is_equal_for_all_objects_of_a_group_is_made_once() -> None:
    values = [[_Pair(1, 2), _Same(1), number] for number in range(3)]
    group = Group.of([separate(value) for value in values])
    first, second = (group.made(number, "") for number in range(2))
    assert (first[2], second[2]) == (0, 1)
    assert first[0] is second[0]
    assert first[1] is not second[1]  # compared by identity


def test_what_is_not_declared_is_for_ranks_of_the_job_alone() -> None:
    separated = _through_json(separate([1, _Undeclared()]))
    assert (pickled_class(separated.described) or "").endswith("_Undeclared")
    assert join(separated) == [1, _Undeclared()]
    with pytest.raises(FormatError, match="pickled object"):
        join(separated, origin=Origin(False))


def test_an_object_within_itself_is_an_error() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ValueError, match=f"more than {DEEPEST} times"):
        separate(value)


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value.replace("_Pair", "_Undeclared"),
        lambda value: value.replace("_Pair", "_Pair.__init__"),
        lambda value: value.replace('"first"', '"third"'),
        lambda value: value.replace('"tuple"', '"again"'),
        lambda value: value.replace('"tuple"', '"nothing"'),
        lambda value: value.replace("2", "7"),
        lambda value: value.replace("[", "[[", 1).replace("]", "]]", 1),
    ],
)
def test_damaged_descriptors_are_errors(change: Callable[[str], str]) -> None:
    separated = separate(_Pair(1, (2, "a")))
    text = json.dumps(separated.described)
    assert change(text) != text
    with pytest.raises(FormatError, match="stored index is damaged"):
        join(Separated(json.loads(change(text)), separated.numbers, separated.arrays), origin=Origin(False))


@pytest.mark.parametrize("shape", [(), (2,), (0, 0), (1, 2)])
def test_arrays_of_texts_keep_their_shape(shape: tuple[int, ...]) -> None:
    _same(join(_through_json(separate(np.full(shape, "text", object)))), np.full(shape, "text", object))


def test_dates_have_descriptors() -> None:
    assert join(separate([date(2020, 1, 2), datetime(2020, 1, 2, 3)])) == [date(2020, 1, 2), datetime(2020, 1, 2, 3)]


IMPORTING = """
import sys, threading
from matex_data.declared import declared_as

module = "matex_data.readers.parquet.row_groups"
thread = threading.Thread(target=__import__, args=(module,))
thread.start()
while module not in sys.modules:
    pass
print(declared_as(f"{module}:RowGroups").__name__)
"""


def test_a_name_of_a_module_that_another_thread_imports() -> None:
    done = run_script(0, IMPORTING, timeout=60)
    assert done.stdout == "RowGroups\n", done.stderr


def test_a_package_that_another_thread_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", ModuleType("pandas"))  # without a class so far
    np.save(tmp_path / "a.npy", np.arange(3))
    assert len(open_dataset(tmp_path / "a.npy", comm=MPI.COMM_SELF)) == 3
