"""``predict`` returns the rows of all samples in order, for any prefetching and any batch sizes."""

from __future__ import annotations

import pytest

from tests.support.cases import assert_reported

CASES = ("predictions", "predictions_several_steps", "predictions_stopped", "predictions_ragged")
SIZES = [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_rows_equal_plain_python(case: str, size: int) -> None:
    assert_reported(size, CASES, case)
