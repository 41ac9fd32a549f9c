"""Tests that a run has: each value of two parameters, each pair of values of more; parts that are disjoint, and all."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import choosing
from tests.support.ranks import Pool


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_cover_has_every_pair_of_values_and_no_test_twice(sizes: list[int]) -> None:
    tests = [frozenset(enumerate(values)) for values in product(*map(range, sizes))]
    kept = [sorted(tests[number]) for number in choosing.cover(tests)]
    size = 1 if len(sizes) < 3 else 2
    assert {subset for test in kept for subset in combinations(test, size)} == {
        subset for test in tests for subset in combinations(sorted(test), size)
    }
    assert len({tuple(test) for test in kept}) == len(kept)
    if len(sizes) == 2:
        assert len(kept) == max(sizes)


def test_parts_are_disjoint_and_share_slow_tests_alone_of_a_file() -> None:
    def item(number: int) -> Any:
        shared = SimpleNamespace(args=("script",)) if 60 <= number < 80 else None
        markers = {"slow": number % 4 == 0, "repeated": number % 4 == 1, "shares_jobs": shared}
        fixtures = ["pool"] if number % 3 else []
        path = f"{number % 7}.py"
        return SimpleNamespace(
            path=path,
            nodeid=f"{path}::{number}",
            fixturenames=fixtures,
            get_closest_marker=lambda name: markers[name],
            callspec=SimpleNamespace(params={"script": number % 2}),
        )

    items = [item(number) for number in range(100)]
    parts = [choosing.part(items, number, 3)[0] for number in (1, 2, 3)]
    assert sorted(map(id, [item for part in parts for item in part])) == sorted(map(id, items))
    slow = [[item for item in part if int(item.nodeid.partition("::")[2]) % 4 < 2] for part in parts]
    assert [len(part) for part in slow] == [17, 17, 16]
    units = [{(i.path, i.callspec.params["script"]) for i in of_part if 60 <= items.index(i) < 80} for of_part in slow]
    assert all(a.isdisjoint(b) for a, b in combinations(units, 2)) and any(units)
    files = [{item.path for item in part if item not in of_part} for part, of_part in zip(parts, slow, strict=True)]
    assert all(a.isdisjoint(b) for a, b in combinations(files, 2)) and all(files)


@pytest.mark.rank_counts(1, 2)
@pytest.mark.parametrize("letter", ["a", "b"])
@pytest.mark.parametrize(("number", "double"), [(1, 2), (2, 4)])
def test_values_of_one_parametrize_belong_together(
    pool: Pool, letter: str, number: int, double: int, request: pytest.FixtureRequest
) -> None:
    """Of the eight tests of this function, four have every pair of values: those that `make test` runs."""
    own = [item for item in request.session.items if item.nodeid.startswith(request.node.nodeid.partition("[")[0])]
    option = request.config.option
    if len(own) > 1 and "not slow" in option.markexpr and not option.rank_counts:
        assert len(own) == 4
    assert double == 2 * number and letter in "ab" and pool.size in (1, 2)
