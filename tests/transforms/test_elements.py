"""Elements of lists in expressions: by position, and by a condition."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cftime
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

import matex_data as md
from matex_data.fields import Field
from matex_data.transforms import evaluation
from matex_data.transforms.evaluation import Values, evaluate
from matex_data.transforms.expressions import parse

NAN = float("nan")
EVENTS = st.lists(st.lists(st.tuples(st.integers(-50, 50), st.floats(-9, 9)), max_size=4), min_size=1, max_size=8)
EXPECTED: dict[str, Any] = {
    "pt[0]": lambda pt, eta: pt[0] if pt else NAN,
    "eta[1]": lambda pt, eta: eta[1] if len(eta) > 1 else NAN,
    "eta[-1]": lambda pt, eta: eta[-1] if eta else NAN,
    "count(pt[eta < 2])": lambda pt, eta: sum(e < 2 for e in eta),
    "sum(pt[pt > 10])": lambda pt, eta: sum(p for p in pt if p > 10),
    "sum(pt[(pt > 10) & (eta < 2)] * 2)": lambda pt, eta: sum(
        2 * p for p, e in zip(pt, eta, strict=True) if p > 10 > 5 * e
    ),
    "pt[eta > 0][0]": lambda pt, eta: next((p for p, e in zip(pt, eta, strict=True) if e > 0), NAN),
    "where(count(pt) > 1, n, nan)": lambda pt, eta: 7 if len(pt) > 1 else NAN,
    "any(eta[pt > 0] > 1)": lambda pt, eta: any(e > 1 for p, e in zip(pt, eta, strict=True) if p > 0),
}


@given(EVENTS)
def test_elements_are_those_of_python(events: list[list[tuple[int, float]]]) -> None:
    lengths = np.array([len(event) for event in events])
    pt = np.array([p for event in events for p, _ in event], np.int64)
    eta = np.array([e for event in events for _, e in event], np.float64)
    fields = {"pt": Values(pt, lengths), "eta": Values(eta, lengths), "n": Values(np.full(len(events), 7))}
    for text, function in EXPECTED.items():
        found = evaluate(parse(text, "derive="), fields)
        expected = [function([p for p, _ in event], [e for _, e in event]) for event in events]
        np.testing.assert_allclose(found.content, expected, err_msg=text)


def _events() -> md.Dataset:
    pt = [np.array([30.0, 10.0]), np.array([]), np.array([5.0, 50.0, 40.0])]
    vector = np.arange(12.0).reshape(3, 4)
    return md.open_dataset({"pt": pt, "v": vector, "run": np.arange(3)}, comm=MPI.COMM_SELF)


def test_lists_and_numbers_of_elements_are_fields() -> None:
    made = {"hard": "pt[pt > 20]", "leading": "pt[0]", "third": "v[2]", "large": "v[v > 5]", "last": "v[-1]"}
    found = _events().derive(made).load()
    assert [list(event) for event in found["hard"]] == [[30.0], [], [50.0, 40.0]]
    np.testing.assert_array_equal(found["leading"], [30.0, NAN, 5.0])
    assert found["third"].tolist() == [2.0, 6.0, 10.0] and found["last"].tolist() == [3.0, 7.0, 11.0]
    assert [list(event) for event in found["large"]] == [[], [6.0, 7.0], [8.0, 9.0, 10.0, 11.0]]
    assert _events().where("count(pt[pt > 20]) > 0").load()["run"].tolist() == [0, 2]


def test_a_list_of_thousands_of_values_is_a_condition() -> None:
    found = evaluate(parse(f"run in {list(range(3, 3000))}"), {"run": Values(np.arange(5))})
    assert found.content.tolist() == [False, False, False, True, True]


class _Texts(list[str]):
    """Texts of categories that count how often they are looked through."""

    passes = 0

    def __iter__(self) -> Iterator[str]:
        self.passes += 1
        return super().__iter__()


def test_what_an_expression_has_many_times_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    species, dates = _Texts("abc"), []
    of_date = lambda *arguments: dates.append(arguments) or cftime.num2date(*arguments)  # noqa: E731
    monkeypatch.setattr(evaluation, "num2date", of_date)
    since = {"units": "days since 2000-01-01", "calendar": "noleap"}
    days = Field("t", (), np.dtype("f8"), attributes=since)
    codes = Field("s", (), np.dtype("i4"), attributes={"categories": species})
    fields = {"t": Values(np.arange(365.0), field=days), "s": Values(np.arange(365) % 4 - 1, field=codes)}
    found = evaluate(parse("(month(t) in [6, 7, 8]) & (s in ['a', 'b', ''])"), fields).content
    assert len(dates) == species.passes == 1 and found.sum() == np.sum(np.arange(365)[151:243] % 4 < 3)


def test_operators_within_operators_are_as_many_as_python_can_follow() -> None:
    with pytest.raises(md.FormatError, match=r"x in \[1, 2, 3\]"):
        parse(" | ".join(f"(run == {number})" for number in range(1000)))


@pytest.mark.parametrize(
    "text", ["v[4]", "run[0]", "pt[v > 3]", "pt[pt]", "pt[1:]", "v[run > 0]", "pt[0.5]", "nan", "pt['a']"]
)
def test_elements_that_there_are_not(text: str) -> None:
    with pytest.raises(md.FormatError, match="cannot be evaluated"):
        _events().derive({"made": text}).load()
