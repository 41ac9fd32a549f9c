"""``micro_batches="auto"``: chosen by the times of the first steps, the same on all ranks, with the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from matex_data.training.model_parallel.mesh import Mesh
from matex_data.training.model_parallel.stages import micro_batches
from matex_data.training.model_parallel.stages.micro_batches import CHOICE, STEPS, Trial
from matex_data.training.model_parallel.stages.model import StagedModel
from matex_data.training.trainer import fit
from tests.support.logs import logged
from tests.support.ranks import Pool, Pools
from tests.training.model_parallel.stages.problems import BATCH, accumulated, build, dataset, weights_of

EPOCHS = 6
"""Epochs of three batches, which are enough to try 2, 4, 8 and 16 micro-batches."""


class _Clock:
    """Clock of a process in which steps with so many micro-batches take known seconds."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self._seconds, self.now = seconds, 0.0

    def perf_counter(self) -> float:
        return self.now

    def step(self, tried: Trial, rows: int, first: bool) -> None:
        with tried.step(rows, rows):
            self.now += 9.0 if first else self._seconds(tried.count or 1)


@pytest.fixture
def world() -> Any:
    communicator = SimpleNamespace(maximum=lambda *numbers: numbers)
    return SimpleNamespace(communicator=communicator, rank=0, size=2)


def _counts(clock: _Clock, tried: Trial, rows: int, steps: int) -> Iterator[int | None]:
    for number in range(steps):
        yield tried.count
        clock.step(tried, rows, first=number % STEPS == 0)


@pytest.mark.parametrize(
    ("seconds", "rows", "tried", "best"),
    [
        (lambda count: 1 + 1 / count, 64, [2, 4, 8, 16, 32, 64], 64),
        (lambda count: abs(count - 8) + 1, 64, [2, 4, 8, 16], 8),
        (lambda count: float(count), 64, [2, 4], 2),
        (lambda count: 1 / count, 7, [2, 4], 4),
        (lambda count: 1 / count, 1, [2], 2),
        (lambda count: 1 - 0.001 * count, 64, [2, 4], 4),
    ],
)
def test_numbers_are_doubled_as_long_as_steps_get_faster(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    world: Any,
    seconds: Callable[[int], float],
    rows: int,
    tried: list[int],
    best: int,
) -> None:
    clock, model = _Clock(seconds), SimpleNamespace()
    monkeypatch.setattr(micro_batches, "time", clock)
    counts = list(_counts(clock, Trial(model, world, 2, False), rows, STEPS * (len(tried) + 1)))
    assert counts == [count for count in (*tried, best) for _ in range(STEPS)]
    (line,) = caplog.messages
    assert line.startswith(f'micro_batches="auto": {best}; steps took 2: ') and line.count(" ms") == len(tried)
    assert vars(model)[CHOICE] == [2, rows, 2, best]
    again = Trial(model, world, 2, False)
    assert list(_counts(clock, again, rows, 2)) == [2, best] and caplog.messages[-1].endswith(f"{best}; as before")
    other = Trial(model, world, 2, False)
    assert list(_counts(clock, other, rows + 1, 2)) == [2, 2]  # other batches


@pytest.mark.parametrize("damaged", [[2, 8, 2, 0], [2, 8, 2, -3], [2, 8, 2, "4"], [2, 8, 2, 99], ["x"]])
def test_a_damaged_choice_is_made_again(world: Any, damaged: list[Any]) -> None:
    clock = _Clock(lambda count: 1.0)
    tried = Trial(SimpleNamespace(**{CHOICE: damaged}), world, 2, False)
    assert list(_counts(clock, tried, 8, 2)) == [2, 2]


def _automatic(comm: Any, name: str, stages: int, **options: Any) -> tuple[Any, list[Any], list[int], list[str]]:
    """Return weights, choice, the number of micro-batches of each step, and what this rank has said."""
    mesh, counts = Mesh(stages=stages, comm=comm), []
    model = build(name)
    original = StagedModel._count

    def count(staged: Any, batch: Any) -> int:
        counts.append(original(staged, batch))
        return counts[-1]

    data = dataset(name, mesh.coordinates.replica, mesh.shape[0])
    StagedModel._count = count  # type: ignore[method-assign]
    try:
        with logged() as said:
            fit(model, data, verbose=0, mesh=mesh, micro_batches="auto", **{"epochs": EPOCHS, **options})
    finally:
        StagedModel._count = original  # type: ignore[method-assign]
    return weights_of(model), vars(model).get(CHOICE, []), counts, [text for text in said if "auto" in text]


@pytest.mark.parametrize("replicated", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.rank_counts(2, slow=(4,))
def test_weights_are_those_of_one_process_and_all_ranks_choose_alike(pool: Pool, replicated: bool) -> None:
    stages = 2 if replicated else pool.size
    weights, _ = accumulated("chain", "sgd", 1, pool.size // stages, EPOCHS)
    results = pool.run(_automatic, "chain", stages, timeout=120)
    for found, choice, counts, _ in results:
        assert (choice, counts) == results[0][1:3]
        for one, other in zip(found, weights, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    _, (*batch, count), counts, said = results[0]
    assert batch == [stages, BATCH, pool.size]
    assert counts[:STEPS] == [stages] * STEPS and counts[STEPS] == 2 * stages and counts[-1] == count
    assert len(said) == 1 and not any(texts for *_, texts in results[1:])


@pytest.mark.rank_counts(2)
def test_the_number_is_not_chosen_where_weights_depend_on_it(pool: Pool) -> None:
    weights, _ = accumulated("normalized", "sgd", 1, 1, 2)  # a batch of 23 rows is one micro-batch without a choice
    results = pool.run(_automatic, "normalized", 2, epochs=2, timeout=120)
    for found, choice, counts, _ in results:
        assert (choice, set(counts)) == ([], {1})
        for one, other in zip(found, weights, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    assert "changes moving statistics or seeds" in results[0][3][0]


def test_a_run_that_resumes_keeps_the_number(ranks: Pools, tmp_path: Path) -> None:
    (_, choice, *_), _ = ranks(2).run(_automatic, "chain", 2, checkpoint=str(tmp_path), timeout=120)
    options = {"checkpoint": str(tmp_path), "epochs": EPOCHS + 1}
    (_, again, counts, said), _ = ranks(2).run(_automatic, "chain", 2, **options, timeout=120)
    assert again == choice and set(counts) == {choice[-1]}
    assert said == [f'micro_batches="auto": {choice[-1]}; as before']
