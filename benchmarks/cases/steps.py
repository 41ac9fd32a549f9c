"""The case of training steps on two ranks: what they cost beside a lone step, and why."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.cases.reading import Goal, Measured, Setup
from benchmarks.harness.measure import Reader, Result, interleaved
from benchmarks.readers import steps

WANTED = {"mlp": 0.82, "cnn": 0.94, "deep": 0.92}
TITLES = {
    "mlp": "MLP 784-1024-1024-10, batch 64 of each rank, 7.5 MB of gradients",
    "cnn": "CNN of 32 x 32 x 3, Conv 32, Conv 64, Dense 128, batch 32 of each rank",
    "deep": "60 x (Dense 64, BatchNormalization), batch 32 of each rank, 242 gradients",
}
RANKS = 2
OURS, ALONE = "matex run", "MPI.Allreduce alone"
WITHOUT, COPIES, FOUR_BYTES = "without communication", "copies instead of it", "four bytes of each bucket"
LONE = Reader("two lone copies", "ceiling", "steps.fit", ranks=RANKS, pinned=True)
CAUSES = {
    "data of the whole batch, ends of epochs": (LONE.name, WITHOUT),
    "packing, copies to and from NumPy": (WITHOUT, COPIES),
    "waiting for the other rank": (COPIES, FOUR_BYTES),
    "bytes through MPI": (FOUR_BYTES, OURS),
}
"""Readers whose steps differ by one cause only: without it, and with it."""


def _launched(name: str, *arguments: str, replaced: str = "") -> Reader:
    kind = "reference" if replaced else "ours"
    options = {"ranks": RANKS, "replaced": replaced}
    return Reader(name, kind, "steps.fit", options, ranks=RANKS, pinned=True, launcher=("run", *arguments))


READERS = [
    LONE,
    _launched(OURS),
    _launched("matex run, funneled", "--strategy", "funneled"),
    _launched("matex run, concurrent", "--strategy", "concurrent"),
    _launched("matex run, TensorFlow's collectives", "--collectives", "tensorflow"),
    # Without its reduction, the self-check of fit would find the gradients wrong and train on whole batches.
    _launched(WITHOUT, "--no-verify", replaced="nothing"),
    _launched(COPIES, "--no-verify", replaced="copy"),
    _launched(FOUR_BYTES, "--no-verify", replaced="four bytes"),
    Reader("MaTEx's way", "peer", "steps.by_tensor", ranks=RANKS, pinned=True),
    Reader("MultiWorkerMirroredStrategy", "peer", "steps.mirrored", ranks=RANKS, pinned=True),
    Reader("Horovod", "peer", "steps.horovod", ranks=RANKS, pinned=True, polls=True),
    Reader(ALONE, "reference", "steps.reduction_alone", ranks=RANKS, pinned=True),
]


def training(setup: Setup, model: str) -> Measured:
    """Measure the steps of a model on two ranks, one core each, beside two lone copies on the same cores."""
    results = interleaved(steps.task_of(model), READERS, setup.repetitions)
    lone, ours = results[:2]
    rows = [_row(result, lone) for result in results if result.answers]
    seconds = {result.reader.name: RANKS / result.rate for result in results if result.answers}
    for cause, (without, with_it) in CAUSES.items():
        rows.append([f"cause: {cause}", "", "", f"{1e3 * (seconds[with_it] - seconds[without]):.2f}", ""])
    rows.append(["achieved overlap", "", "", "", f"{_overlap(seconds):.2f}"])
    columns = ["", "steps/s of a rank", "ms a step", "ms beyond a lone step", "of the lone copies"]
    return Measured(TITLES[model], [], [Goal("matex run / lone copies", ours.over(lone), WANTED[model])], columns, rows)


def _overlap(seconds: dict[str, float]) -> float:
    """Return the fraction of the shorter of communication and computation that took place during the other one."""
    computation, communication, step = seconds[WITHOUT], seconds[ALONE], seconds[OURS]
    return (computation + communication - step) / min(computation, communication)


def _row(result: Result, lone: Result) -> list[str]:
    step, alone = RANKS / result.rate, RANKS / lone.rate
    beyond = "" if result.reader.function == "steps.reduction_alone" else f"{1e3 * (step - alone):.2f}"
    return [result.reader.name, f"{1 / step:.1f}", f"{1e3 * step:.2f}", beyond, f"{result.over(lone):.2f}"]


CASES: dict[str, list[Callable[[Setup], Measured]]] = {"training": [partial(training, model=model) for model in WANTED]}
