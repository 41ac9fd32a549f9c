"""The peers of the case ``end_to_end`` read each sample once, and its figures are complete."""

from __future__ import annotations

from collections.abc import Sequence

import h5py
import pytest

from benchmarks.cases import end_to_end as case
from benchmarks.cases.reading import Setup
from benchmarks.harness import data
from benchmarks.harness.data import Task
from benchmarks.harness.measure import Reader, Result
from benchmarks.readers import batches, end_to_end

SAMPLES = 2048


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return data.gratings(tmp_path_factory.mktemp("gratings"), SAMPLES)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("order", batches.ORDERS)
def test_each_sample_is_read_once_with_its_label(task: Task, order: str, size: int) -> None:
    with h5py.File(task.path) as file:
        stored = [(x.tobytes(), y) for x, y in zip(file["image"][...], file["label"][...], strict=True)]
    found = []
    for rank in range(size):
        for images, labels in batches.ORDERS[order](task, rank, size):
            assert len(images) == task.batch_size // size
            found += [(x.tobytes(), y) for x, y in zip(images, labels, strict=True)]
    assert found != stored and sorted(found) == sorted(stored)


def test_figures_of_an_epoch(task: Task) -> None:
    figures = end_to_end.one_process(task, "small", "blocks")()
    assert figures["samples"] == SAMPLES
    assert 0 < figures["waiting"] < figures["seconds"]
    assert 0 <= figures["correct"] <= end_to_end.HELD_OUT


def test_the_best_number_of_workers_is_measured_again(monkeypatch: pytest.MonkeyPatch, task: Task) -> None:
    seconds = {"matex_data": 1.0, "1 workers": 3.0, "workers": 4.0, "Keras": 5.0, "Mirrored": 6.0}
    rounds = []

    def interleaved(task: Task, readers: Sequence[Reader], repetitions: int) -> list[Result]:
        rounds.append(repetitions)
        results = [Result(reader, task) for reader in readers]
        for result in results:
            if "Horovod" in result.reader.name:
                result.missing = "No module named 'horovod'"
                continue
            found = next(value for name, value in seconds.items() if name in result.reader.name)
            answer = {"samples": SAMPLES, "seconds": found, "cpu": 1.0, "waiting": 0.5, "correct": 1900.0}
            result.answers = [answer] * repetitions
        return results

    monkeypatch.setattr(case, "interleaved_afresh", interleaved)
    monkeypatch.setattr(data, "gratings", lambda *arguments: task)
    measured = case.computing(Setup(None, 3, True))  # type: ignore[arg-type]  # the folder is not used
    assert rounds == [1, 2]
    names = [result.reader.name for result in measured.results]
    assert [name for name in names if "PyTorch" in name] == ["PyTorch DDP, 1 workers, by block"]
    assert {len(result.answers) for result in measured.results if not result.missing} == {3}
    assert len(measured.rows) == 4 and [goal.found for goal in measured.goals] == [3.0, 0.0]
