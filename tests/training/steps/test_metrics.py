"""Histories, and results of ``evaluate`` and of single batches, equal those of plain Python."""

from __future__ import annotations

import pytest

from tests.support.cases import assert_reported

GROUPS = {
    "few": ("outputs_sum", "beside_few_rows", "nested", "on_batch"),
    "outputs": ("outputs_weighted", "outputs", "outputs_eagerly", "outputs_few_rows", "outputs_masked", "sum_alone"),
    "steps": ("guide", "guide_few_rows", "beside", "weights_and_split", "on_single_batches"),
    "metrics": ("aggregations", "many_classes", "own_metrics", "own_metrics_equal_batches"),
}
"""Cases by the job that runs them; tracing each takes seconds."""
JOBS = [
    pytest.param(group, size, case, marks=[] if (group, size) == ("few", 2) else pytest.mark.slow)
    for group, cases in GROUPS.items()
    for size in (1, 2, 3)
    for case in cases
]


@pytest.mark.parametrize(("group", "size", "case"), JOBS)
def test_numbers_equal_plain_python(group: str, size: int, case: str) -> None:
    assert_reported(size, GROUPS[group], case)
