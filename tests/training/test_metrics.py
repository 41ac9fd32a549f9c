"""Histories, results of ``evaluate`` and of single batches are those of plain Python."""

from __future__ import annotations

import pytest

from tests.training.cases import assert_reported

CASES = ("outputs_sum", "beside_few_rows", "nested", "on_batch")
MORE = (
    "outputs_weighted",
    "outputs",
    "outputs_eagerly",
    "outputs_few_rows",
    "outputs_masked",
    "sum_alone",
    "guide",
    "guide_few_rows",
    "beside",
    "aggregations",
    "many_classes",
    "weights_and_split",
    "on_single_batches",
)
SIZES = [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
VALIDATION = ("/val_loss", "/val_a_loss", "/val_b_loss", "/val_total", "/val_spread", "/val_deep", "/evaluated/")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_numbers_of_plain_python(case: str, size: int) -> None:
    assert_reported(size, CASES, case, VALIDATION)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("case", MORE)
def test_more_numbers_of_plain_python(case: str, size: int) -> None:
    assert_reported(size, MORE, case, VALIDATION)
