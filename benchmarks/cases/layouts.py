"""The case of layouts: wide Dense blocks on two ranks, beside one process and data parallel training."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.cases.reading import Goal, Measured, Setup
from benchmarks.harness.measure import Reader, interleaved
from benchmarks.readers import layouts

ONE = Reader("one process, one core", "ceiling", "layouts.fit", pinned=True)
CUT = Reader("layouts", "ours", "layouts.fit", {"parts": 2}, ranks=2, pinned=True)
PARALLEL = Reader("data parallel", "reference", "layouts.fit", ranks=2, pinned=True)
OWNED = Reader("data parallel, shard_optimizer", "ours", "layouts.fit", {"shard_optimizer": True}, ranks=2, pinned=True)
BOTH_CORES = Reader("one process, two cores", "reference", "layouts.fit", {"threads": 2})
READERS = [ONE, CUT, PARALLEL, OWNED, BOTH_CORES]
OVER_ONE, OVER_PARALLEL = 1.5, 1.4
TITLE = "4 x (Dense 1024-4096-1024), batch 64, AdamW, 134 MB of weights"


def training(setup: Setup) -> Measured:
    """Measure the steps on two ranks, one core each."""
    results = interleaved(layouts.task(), READERS, setup.repetitions)
    one, cut, parallel = results[:3]
    rows = [
        [result.reader.name, f"{result.rate:.2f}", f"{1e3 / result.rate:.0f}", f"{result.over(one):.2f}"]
        for result in results
        if result.answers
    ]
    goals = [
        Goal("layouts / one process of one core", cut.over(one), OVER_ONE),
        Goal("layouts / data parallel", cut.over(parallel), OVER_PARALLEL),
    ]
    return Measured(TITLE, [], goals, ["", "steps/s", "ms a step", "of one process"], rows)


CASES: dict[str, list[Callable[[Setup], Measured]]] = {"layouts": [training]}
