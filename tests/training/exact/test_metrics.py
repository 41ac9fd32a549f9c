"""Histories, and results of ``evaluate``, ``predict`` and of single batches, equal those of plain Python."""

from __future__ import annotations

import pytest

from tests.support.cases import MORE, QUICK, assert_reported

pytestmark = pytest.mark.shares_jobs


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 3))])
@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)])
def test_numbers_equal_plain_python(case: str, size: int) -> None:
    assert_reported(size, case)
