"""The cases of particle data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.cases.reading import GAIN, ROUNDS, Goal, Measured, Setup
from benchmarks.harness.measure import Reader, interleaved
from benchmarks.readers import particles


def branches(setup: Setup, kind: str) -> Measured:
    """Measure flat or jagged branches of a ROOT file on one rank."""
    readers = [
        Reader("matex_data, tf.data", "ours", "particles.tensors", {"branches": kind}),
        Reader("matex_data, without TensorFlow", "ours", "particles.windows", {"branches": kind}),
        Reader("TensorFlow alone, arrays in memory", "ceiling", "particles.slicing", {"branches": kind}),
        Reader("uproot arrays, 1 thread", "peer", "particles.uproot_bulk", {"branches": kind, "threads": 1}),
        Reader("uproot arrays, 2 threads", "peer", "particles.uproot_bulk", {"branches": kind, "threads": 2}),
        Reader("uproot.iterate + from_generator", "peer", "particles.uproot_iterate", {"branches": kind}),
    ]
    ours, windows, _, one, two, iterate = results = interleaved(
        particles.events(setup.folder, setup.quick), readers, setup.repetitions
    )
    bulk = max(one, two, key=lambda result: result.rate)
    goals = [
        Goal("tf.data, shuffled / uproot's arrays", ours.over(bulk), 0.8),
        Goal("windows, shuffled / uproot's arrays", windows.over(bulk), 0.8),
        Goal("tf.data, shuffled / uproot.iterate", ours.over(iterate), 5),
    ]
    return Measured(f"ROOT, {kind} branches, batches of {particles.BATCH} events", results, goals)


def on_ranks(setup: Setup, kind: str) -> Measured:
    """Measure branches of a ROOT file on one rank and on two."""
    readers = [
        Reader(
            f"matex_data, {n} rank{'s' * (n > 1)}",
            "ours",
            "particles.tensors",
            {"branches": kind},
            ranks=n,
            threads=1,
            pinned=True,
        )
        for n in (1, 2)
    ]
    one, two = results = interleaved(particles.events(setup.folder, setup.quick), readers, ROUNDS * setup.repetitions)
    return Measured(
        f"ROOT, {kind} branches on 2 ranks, one core a rank", results, [Goal("2 ranks / 1 rank", two.over(one), GAIN)]
    )


def members(setup: Setup) -> Measured:
    """Measure the members of a compound table beside a contiguous matrix of the same numbers."""
    readers = [Reader(f"matex_data, {name}", "ours", "particles.table", {"name": name}) for name in ("table", "matrix")]
    table, matrix = results = interleaved(particles.jets(setup.folder, setup.quick), readers, setup.repetitions)
    return Measured(
        "HDF5, compound table of 8 float32", results, [Goal("members of the table / matrix", table.over(matrix), 0.8)]
    )


CASES: dict[str, list[Callable[[Setup], Measured]]] = {
    "root": [
        *(partial(branches, kind=kind) for kind in ("flat", "jagged")),
        *(partial(on_ranks, kind=kind) for kind in ("flat", "jagged")),
    ],
    "members": [members],
}
