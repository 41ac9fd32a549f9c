"""Which tests a run has: parts of the files, values of parameters in place of their product, no long test twice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations
from pathlib import Path

import pytest

REPEATED = Path(__file__).with_name("repeated.txt")
"""Names of tests and of functions that execute nothing alone, written by ``python -m tests.mutants.repeated``."""

Values = frozenset[tuple[int, int]]
"""Parameters with the number of their value: all of a test, or a few that have to occur together."""


def function(test: str) -> str:
    """Return the name of the function of a test: its own name without the values of parameters."""
    return test.partition("[")[0]


def mark_repeated(items: Iterable[pytest.Item]) -> None:
    """Mark tests that repeat what faster tests execute."""
    names = set(REPEATED.read_text().splitlines())
    for item in items:
        if item.nodeid in names or function(item.nodeid) in names:
            item.add_marker(pytest.mark.repeated)


def mark_products(items: Iterable[pytest.Item]) -> None:
    """Mark tests as slow whose values of parameters occur in other tests of the same function.

    Of a function that runs on ranks and has two parameters, `make test` runs each value of both; with more parameters,
    each pair of values. ``@pytest.mark.product`` on a function keeps all.
    """
    by_function: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        runs_ranks = {"pool", "ranks"} & set(getattr(item, "fixturenames", ()))
        if isinstance(item, pytest.Function) and runs_ranks and hasattr(item, "callspec"):
            by_function[function(item.nodeid)].append(item)
    for functions in by_function.values():
        quick = [item for item in functions if not item.get_closest_marker("slow")]
        if quick and not quick[0].get_closest_marker("product"):
            kept = cover(_values(quick))
            for number in sorted(set(range(len(quick))) - set(kept)):
                quick[number].add_marker(pytest.mark.slow)


def _values(items: Sequence[pytest.Function]) -> list[Values]:
    """Return the values of each test. Parameters whose values go together count as one."""
    columns: dict[tuple[int, ...], None] = {}
    for name in items[0].callspec.params:
        numbers: dict[str, int] = {}
        values = [repr(item.callspec.params[name]) for item in items]
        columns[tuple(numbers.setdefault(value, len(numbers)) for value in values)] = None
    return [frozenset(enumerate(row)) for row in zip(*columns, strict=True)]


def cover(tests: Sequence[Values]) -> list[int]:
    """Return the numbers of tests that have each value of two parameters, or each pair of values of more of them."""
    size = min(len(tests[0]), 2) if len(tests[0]) != 2 else 1
    needed = [set(combinations(sorted(test), size)) for test in tests]
    left, kept = set().union(*needed), []
    while left:
        best = max(range(len(tests)), key=lambda number: len(needed[number] & left))
        left -= needed[best]
        kept.append(best)
    return sorted(kept)


def part(items: Sequence[pytest.Item], number: int, parts: int) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the tests of one of several parts, numbered from 1, and all others.

    What `make test` leaves out is dealt out by tests, since those of one file may take longer than all others; the rest
    by files. Tests with ``@pytest.mark.shares_jobs("name")`` of one file, and of equal values of these parameters, are
    in one part: what one of them has started, the others need, too.
    """
    left_out, rest = defaultdict(list), defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") or item.get_closest_marker("repeated"):
            left_out[_unit(item)].append(item)
        else:
            rest[str(item.path)].append(item)
    chosen = _dealt([(len(unit), unit) for unit in left_out.values()], parts)
    chosen |= _dealt([(sum(map(_weight, of_file)), of_file) for of_file in rest.values()], parts)
    inside = [item for item in items if chosen[item.nodeid] == number - 1]
    return inside, [item for item in items if chosen[item.nodeid] != number - 1]


def _unit(item: pytest.Item) -> Hashable:
    """Return what is equal for tests that have to be in one part."""
    marker = item.get_closest_marker("shares_jobs")
    if marker is None:
        return item.nodeid
    values = getattr(item, "callspec", None)
    return str(item.path), *(repr(values and values.params.get(name)) for name in marker.args)


def _dealt(units: Iterable[tuple[int, Sequence[pytest.Item]]], parts: int) -> dict[str, int]:
    """Return the part of each test, given weights and tests of units: the heaviest first, to the lightest part."""
    loads, found = [0] * parts, {}
    for weight, unit in sorted(units, key=lambda one: -one[0]):
        lightest = loads.index(min(loads))
        loads[lightest] += weight
        found |= {item.nodeid: lightest for item in unit}
    return found


def _weight(item: pytest.Item) -> int:
    """Return the weight of a test: on ranks, ten times that of one which runs in this process."""
    return 10 if {"pool", "ranks"} & set(getattr(item, "fixturenames", ())) else 1
