"""Numbers that Keras reports in ``scripts/reported.py``, in plain Python and under ``matex run``."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.support.launch import ROOT, run_script

SCRIPT = ROOT / "tests" / "training" / "launcher" / "scripts" / "reported.py"
LAUNCHER = "from matex_data.training.launcher.run import main; main()"

QUICK = ("outputs_sum", "predictions")
MORE = (
    *("on_batch", "nested", "predictions_ragged", "predictions_several_steps", "predictions_stopped"),
    *(
        "beside_few_rows",
        "outputs_weighted",
        "outputs",
        "outputs_eagerly",
        "outputs_few_rows",
        "outputs_masked",
        "sum_alone",
    ),
    *("guide", "guide_few_rows", "beside", "weights_and_split", "on_single_batches", "accumulated_on_batch"),
    *("aggregations", "many_classes", "own_metrics", "own_metrics_equal_batches", "evaluated_within_epochs"),
)
"""Cases of ``scripts/reported.py``, by the job that runs them."""


@functools.cache
def reported(ranks: int, cases: tuple[str, ...]) -> dict[str, Any]:
    """Run cases in one job, and return their printed values by name. 0 ranks: plain Python."""
    done = run_script(ranks, *([LAUNCHER, str(SCRIPT)] if ranks else [SCRIPT]), *cases, timeout=200)
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("CASE ") for line in done.stdout.splitlines() if line.startswith("CASE ")]
    assert len(lines) == len(cases), done.stderr  # rank 0 alone prints
    return dict(json.loads(line) for line in lines)


def assert_reported(ranks: int, case: str) -> None:
    """Check that every number of a case is that of plain Python."""
    cases = (case,) if case in QUICK else MORE
    expected, found = (dict(_leaves(reported(size, cases)[case])) for size in (0, ranks))
    assert set(found) == set(expected)
    for name, value in expected.items():
        if isinstance(value, str):
            assert found[name] == value
        else:
            np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=1e-6, err_msg=name)


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield numbers, arrays and texts with their paths in nested dicts and lists."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{name}/{key}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _leaves(item, f"{name}/{i}")
    else:
        yield name, value
