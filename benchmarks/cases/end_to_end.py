"""The case from opening a file to a trained network, on two ranks with one core each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

from benchmarks.cases.reading import Goal, Measured, Setup, best_peer
from benchmarks.harness import data
from benchmarks.harness.data import Task
from benchmarks.harness.measure import Reader, Result, interleaved_afresh
from benchmarks.readers.end_to_end import HELD_OUT

SAMPLES = 32_768
RANKS = 2
WORKERS = (0, 1, 2)  # of PyTorch's loader; the best is taken
ACCURACY = 0.02  # that a reader may lack of the best one
ENVIRONMENT = {"TF_ENABLE_ONEDNN_OPTS": "1"}  # PyTorch always uses oneDNN, TensorFlow on some processors


def _ours(network: str) -> Reader:
    options = {"network": network}
    return Reader(
        "matex_data", "ours", "end_to_end.ours", options, ranks=RANKS, threads=1, pinned=True, environment=ENVIRONMENT
    )


def _peers(network: str, order: str) -> list[Reader]:
    options, shuffled = {"network": network, "order": order}, f"by {order[:-1]}"
    pytorch = [
        Reader(
            f"PyTorch DDP, {workers} workers", "peer", "end_to_end_torch.distributed", options | {"workers": workers}
        )
        for workers in WORKERS
    ]
    others = [
        Reader("MultiWorkerMirroredStrategy", "peer", "end_to_end.mirrored", options),
        Reader("Horovod", "peer", "end_to_end.horovod", options),
    ]
    pinned = [replace(reader, ranks=RANKS, threads=1, pinned=True) for reader in (*pytorch, *others)]
    keras = Reader("Keras, one process", "peer", "end_to_end.one_process", options)
    return [replace(reader, name=f"{reader.name}, {shuffled}", environment=ENVIRONMENT) for reader in (*pinned, keras)]


def reading(setup: Setup) -> Measured:
    """Train a small network, whose steps take less time than the reading of their samples."""
    task = data.gratings(setup.folder, SAMPLES, setup.quick)
    results = _measured(task, [_ours("small"), *_peers("small", "blocks")], setup.repetitions)
    slow = _measured(task, _peers("small", "samples"), 1)
    goals = [_against(results, 3), _against([results[0], *slow], 3), _accurate(results + slow)]
    return _outcome("Reading bounds it: a small CNN", results + slow, goals)


def computing(setup: Setup) -> Measured:
    """Train a larger network on the same file."""
    task = data.gratings(setup.folder, SAMPLES, setup.quick)
    results = _measured(task, [_ours("large"), *_peers("large", "blocks")], setup.repetitions)
    return _outcome("Computing bounds it: a larger CNN", results, [_against(results, 1), _accurate(results)])


def _measured(task: Task, readers: Sequence[Reader], repetitions: int) -> list[Result]:
    """Measure the readers in turn, after the first round only the best of those that differ in their workers."""
    first = interleaved_afresh(task, readers, 1)
    alike = groupby(first, key=lambda result: result.reader.function)
    kept = [max(results, key=lambda result: result.rate) for _, results in alike]
    more = interleaved_afresh(task, [result.reader for result in kept if result.answers], repetitions - 1)
    for result, later in zip([result for result in kept if result.answers], more, strict=True):
        result.answers += later.answers
    return kept


def _against(results: list[Result], limit: float) -> Goal:
    best = best_peer(results)
    return Goal(f"matex_data / best peer ({best.reader.name})", results[0].over(best), limit)


def _accurate(results: Sequence[Result]) -> Goal:
    found = [_accuracy(result) for result in results if result.answers]
    return Goal("accuracy less that of the best", found[0] - max(found), -ACCURACY, unit="")


def _accuracy(result: Result) -> float:
    return result.figure("correct") / HELD_OUT


def _outcome(text: str, results: list[Result], goals: list[Goal]) -> Measured:
    measured = [result for result in results if result.answers]
    rows = [
        [
            result.reader.name,
            f"{result.figure('seconds'):.1f} s",
            f"{result.figure('waiting') / result.reader.ranks / result.figure('seconds'):.0%}",
            f"{_accuracy(result):.3f}",
        ]
        for result in measured
    ]
    columns = ["", "from open to trained", "waiting for data", "accuracy"]
    megabytes = results[0].task.samples * results[0].task.sample_bytes / 1e6
    title = f"{text}, one epoch over {megabytes:.0f} MB of shuffled gzip chunks, two ranks"
    return Measured(title, results, goals, columns, rows, scale="linear")


CASES: dict[str, list[Callable[[Setup], Measured]]] = {"end_to_end": [reading, computing]}
