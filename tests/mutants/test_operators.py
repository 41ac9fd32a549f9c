"""Each operator changes the code as its examples say."""

from __future__ import annotations

import pytest
from cosmic_ray.mutating import mutate_code

from tests.mutants.operators import OPERATORS, Rewriting

EXAMPLES = [(cls, *change) for cls in Rewriting.__subclasses__() for change in cls.changes.items()]


@pytest.mark.parametrize(("operator", "before", "after"), EXAMPLES)
def test_examples(operator: type[Rewriting], before: str, after: str) -> None:
    assert mutate_code(before, operator(), 0) == after


def test_every_operator_has_an_example() -> None:
    assert all(cls.changes for cls in Rewriting.__subclasses__())
    assert {cls.__name__ for cls in Rewriting.__subclasses__()} < set(OPERATORS)
