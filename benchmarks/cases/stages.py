"""The case of models in stages on two ranks, beside one process on one core and beside data parallel."""

from __future__ import annotations

from functools import partial

from benchmarks.cases.reading import Goal, Measured, Setup
from benchmarks.harness.measure import Reader, interleaved, interleaved_afresh
from benchmarks.readers import stages

WANTED = {"resnet": 1.5, "mlp": 1.5}
TITLES = {
    "resnet": "ResNet-20, 32 x 32 x 3, batch 256 in 8 micro-batches, two stages",
    "mlp": "MLP of 16 layers of 1024, batch 1024 in 4 micro-batches, two stages",
    "deep": "ResNet-1001-v2, 32 x 32 x 3, batch 8 in 4 micro-batches, deferred, each in new processes",
    "memory": "Memory of MLP of 32 layers of 1024, Adam, batch 128 in 4 micro-batches, two stages",
}
OF_ONE, OF_DATA, OF_DEEP = 0.7, 0.5, 0.7
RANKS = 2
DEEP_LIMIT = 1800.0  # seconds to build and trace a network of 1,001 layers and take its steps


def _readers(function: str) -> list[Reader]:
    return [
        Reader("two stages", "ours", function, {"way": "stages"}, ranks=RANKS, pinned=True),
        Reader("data parallel", "reference", function, {"way": "data"}, ranks=RANKS, pinned=True),
        Reader("one process, one core", "ceiling", function, {"way": "one"}, pinned=True),
    ]


def speed(setup: Setup, model: str) -> Measured:
    """Measure the steps of a model on two ranks, one core each, and in one process on one core."""
    results = interleaved(stages.task_of(model), _readers("stages.fit"), setup.repetitions)
    alone = results[-1]
    rows = [[x.reader.name, f"{1e3 / x.rate:.0f}", f"{x.over(alone):.2f}"] for x in results if x.answers]
    goal = Goal("two stages / one process", results[0].over(alone), WANTED[model])
    return Measured(TITLES[model], [], [goal], ["", "ms a step", "of one process"], rows)


def memory(setup: Setup) -> Measured:
    """Measure the largest memory of a rank above that of the imports, each in new processes."""
    results = interleaved_afresh(stages.task_of("memory"), _readers("stages.memory"), min(3, setup.repetitions))
    found = [result.figure("megabytes") for result in results]
    rows = [
        [x.reader.name, f"{figure:.0f}", f"{figure / found[-1]:.2f}"] for x, figure in zip(results, found, strict=True)
    ]
    goals = [
        Goal("two stages / one process", found[0] / found[2], OF_ONE, most=True),
        Goal("two stages / data parallel", found[0] / found[1], OF_DATA, most=True),
    ]
    return Measured(TITLES["memory"], [], goals, ["", "MB of a rank", "of one process"], rows)


def deep(setup: Setup) -> Measured:
    """Measure the first steps of a ResNet of 1,001 layers on two and four ranks, and in one process."""
    readers = [
        Reader("two stages", "ours", "stages.memory", {"way": "stages"}, ranks=2, pinned=True, limit=DEEP_LIMIT),
        Reader("four stages", "ours", "stages.memory", {"way": "stages"}, ranks=4, pinned=True, limit=DEEP_LIMIT),
        Reader("one process, one core", "ceiling", "stages.memory", {"way": "one"}, pinned=True, limit=DEEP_LIMIT),
    ]
    results = interleaved_afresh(stages.task_of("deep"), readers, 1)
    names = ("megabytes", "built", "first", "later")
    found = [[result.figure(name) for name in names] for result in results]
    rows = [
        [x.reader.name, *(f"{figure:.3g}" for figure in figures)] for x, figures in zip(results, found, strict=True)
    ]
    goals = [Goal("memory of a rank, two stages / one process", found[0][0] / found[2][0], OF_DEEP, most=True)]
    head = ["", "MB of a rank", "s to build", "s of the first step", "s of a step"]
    return Measured(TITLES["deep"], [], goals, head, rows)


CASES = {"stages": [*(partial(speed, model=model) for model in WANTED), memory, deep]}
