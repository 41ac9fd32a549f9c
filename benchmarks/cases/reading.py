"""The cases: which readers meet on which file, and what must come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from benchmarks.harness import data
from benchmarks.harness.data import Task
from benchmarks.harness.measure import Reader, Result, afresh, interleaved

TENSORS = Reader("matex_data, tf.data", "ours", "ours.tensors")
ARRAYS = Reader("matex_data, NumPy", "ours", "ours.arrays")
MOVING = Reader("preadv, 8 MiB buffer", "ceiling", "ceiling.moving")
KEEPING = Reader("preadv, 24 buffers of 8 MiB", "reference", "ceiling.moving", {"buffers": 24})
DECODING = Reader("inflate + unshuffle alone", "ceiling", "ceiling.decoding")
ONE_BY_ONE = Reader("the same, a call for each chunk", "reference", "ceiling.decoding", {"together": 0})
IN_ORDER = Reader("h5py, in order, by batch", "reference", "peers.blocks_in_order")
PER_BATCH = Reader("h5py + from_generator, by batch", "peer", "peers.from_generator_batches")
PEERS = (
    Reader("h5py + from_generator, by sample", "peer", "peers.from_generator_samples"),
    PER_BATCH,
    Reader("PyTorch DataLoader, 0 workers", "peer", "peers.torch_loader", {"batched": False, "workers": 0}),
    Reader("PyTorch DataLoader, 2 workers", "peer", "peers.torch_loader", {"batched": False, "workers": 2}),
    Reader("PyTorch __getitems__, 0 workers", "peer", "peers.torch_loader", {"batched": True, "workers": 0}),
    Reader("PyTorch __getitems__, 2 workers", "peer", "peers.torch_loader", {"batched": True, "workers": 2}),
    Reader("Grain, 4 threads", "peer", "peers.grain_dataset", {"threads": 4}),
    Reader("Grain, 16 threads", "peer", "peers.grain_dataset", {"threads": 16}),
)
ROUNDS = 3  # for each that is asked for, where no reader is slow: two ranks on two cores vary most
GAIN = 1.6  # of a second rank, or what the ceiling gains if that is less


@dataclass(frozen=True)
class Goal:
    """A figure and its limit.

    Parameters
    ----------
    text : what is measured.
    found : the figure.
    limit : the least, or the most, that it may be.
    most : whether ``limit`` is the most.
    unit : of both.
    """

    text: str
    found: float
    limit: float
    most: bool = False
    unit: str = "x"

    @property
    def holds(self) -> bool:
        """Return whether the figure keeps to the limit."""
        return self.found <= self.limit if self.most else self.found >= self.limit


@dataclass(frozen=True)
class Measured:
    """Outcome of a case: results of its readers, goals, and a table of other figures where it has one.

    Parameters
    ----------
    scale : of the rates in the picture, "log" or "linear".
    """

    title: str
    results: list[Result] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    scale: str = "log"


@dataclass(frozen=True)
class Setup:
    """Settings of a run: folder of the files, repetitions of each reader, and whether the files are small."""

    folder: Path
    repetitions: int
    quick: bool


def contiguous(setup: Setup) -> Measured:
    """Measure uncompressed samples of 48 KB."""
    task = data.contiguous(setup.folder, setup.quick)
    results = interleaved(task, (TENSORS, ARRAYS, MOVING, *PEERS), setup.repetitions)
    by = _by_reader(results)
    ours, best = by[TENSORS.name], best_peer(results)
    goals = [
        Goal("tf.data / preadv", ours.over(by[MOVING.name]), 0.5),
        Goal("tf.data / h5py + from_generator by batch", ours.over(by[PER_BATCH.name]), 5),
        Goal(f"tf.data / best peer ({best.reader.name})", ours.over(best), 2),
    ]
    return Measured("Contiguous HDF5, float32 samples of 48 KB, shuffled, batch 64", results, goals)


def chunks(setup: Setup) -> Measured:
    """Measure compressed chunks of 16 samples."""
    task = data.chunks(setup.folder, setup.quick)
    results = interleaved(task, (TENSORS, ARRAYS, DECODING, ONE_BY_ONE, IN_ORDER, *PEERS), setup.repetitions)
    by = _by_reader(results)
    ours, best = by[TENSORS.name], best_peer(results)
    goals = [
        Goal("tf.data / inflate + unshuffle alone", ours.over(by[DECODING.name]), 0.7),
        Goal(f"tf.data / best peer ({best.reader.name})", ours.over(best), 20),
        Goal(f"NumPy / best peer ({best.reader.name})", by[ARRAYS.name].over(best), 20),
        Goal("tf.data shuffled / h5py in order", ours.over(by[IN_ORDER.name]), 2),
    ]
    return Measured("gzip-1 + shuffle, chunks of 16 int16 samples of 24 KB, shuffled, batch 64", results, goals)


def rows(setup: Setup) -> Measured:
    """Measure many small samples."""
    task = data.rows(setup.folder, setup.quick)
    results = interleaved(task, (TENSORS, ARRAYS, MOVING, *PEERS), setup.repetitions)
    by = _by_reader(results)
    ours, best = by[TENSORS.name], best_peer(results)
    least = min(3.0, 0.3 * by[MOVING.name].rate / 1e6)
    goals = [
        Goal("tf.data", ours.rate / 1e6, least, unit=" million samples/s"),
        Goal(f"tf.data / best peer ({best.reader.name})", ours.over(best), 10),
    ]
    return Measured(f"{task.samples / 1e6:g} million samples of 28 float32, shuffled, batch 1024", results, goals)


def globally(setup: Setup) -> Measured:
    """Measure ``shuffle="global"`` on compressed chunks, after the epoch that reads them."""
    task = data.chunks(setup.folder, setup.quick)
    ours = [
        Reader(f'shuffle="global", {n} rank{"s" * (n > 1)}', "ours", "ours.everywhere", ranks=n, threads=1)
        for n in (1, 2, 4)
    ]
    torch = [reader for reader in PEERS if reader.name.startswith("PyTorch")]
    results = interleaved(task, (*ours, *torch), setup.repetitions)
    best = best_peer(results)
    goals = [Goal(f"{found.reader.name} / {best.reader.name}", found.over(best), 5) for found in results[:3]]
    return Measured("A uniform permutation of gzip-1 + shuffle chunks, after the first epoch", results, goals)


def ranks(setup: Setup, make: Callable[[Path, bool], Task], ceiling: Reader) -> Measured:
    """Measure one rank and two, each with one core and one decoding thread."""
    task = make(setup.folder, setup.quick)
    kinds = (TENSORS, ARRAYS, ceiling, *([KEEPING] if ceiling is MOVING else []))
    readers = [
        replace(kind, name=f"{kind.name}, {n} rank{'s' * (n > 1)}", ranks=n, threads=1, pinned=True)
        for kind in kinds
        for n in (1, 2)
    ]
    results = interleaved(task, readers, ROUNDS * setup.repetitions)
    tensors, arrays, scales = (two.over(one) for one, two in zip(results[:6:2], results[1:6:2], strict=True))
    least = min(GAIN, scales)
    goals = [
        Goal(f"tf.data, 2 ranks / 1 rank (the ceiling: {scales:.2f}x)", tensors, least),
        Goal("NumPy, 2 ranks / 1 rank", arrays, least),
    ]
    return Measured(f"The case {make.__name__!r} on 2 ranks, one core a rank", results, goals)


def collective(setup: Setup) -> Measured:
    """Compare ``io="collective"`` with ``io="independent"``."""
    task = data.contiguous(setup.folder, setup.quick)
    readers = [
        Reader(f"{io}, {n} rank{'s' * (n > 1)}", "ours", TENSORS.function, {"io": io}, ranks=n)
        for n in (1, 2)
        for io in ("collective", "independent")
    ]
    results = interleaved(task, readers, ROUNDS * setup.repetitions)
    goals = [
        Goal(f"collective / independent, {together.reader.ranks} rank(s)", together.over(alone), 0.9)
        for together, alone in (results[:2], results[2:])
    ]
    return Measured("Collective and independent reading, contiguous HDF5", results, goals)


def huge(setup: Setup) -> Measured:
    """Measure a sparse file of 1 TiB."""
    task = data.sparse(setup.folder)
    found = afresh(task, Reader("sparse", "ours", "probes.first_batch"), setup.repetitions)
    goals = [
        Goal("opened after", found.figure("open"), 1, most=True, unit=" s"),
        Goal("first shuffled batch after", found.figure("first"), 2, most=True, unit=" s"),
        Goal("memory over TensorFlow's, at most", found.figure("memory"), 2**30 / 1e6, most=True, unit=" MB"),
    ]
    return Measured("A sparse contiguous HDF5 file of 1 TiB", goals=goals)


def epochs(setup: Setup) -> Measured:
    """Measure memory, descriptors and threads over many epochs of a small file."""
    count = 60 if setup.quick else 200
    options = {"epochs": count}
    found = afresh(data.small(setup.folder), Reader("epochs", "ours", "probes.many_epochs", options), 1)
    goals = [
        Goal("resident memory, largest less smallest", found.figure("memory"), 40, most=True, unit=" MB"),
        Goal("resident memory, last less first", abs(found.figure("drift")), 20, most=True, unit=" MB"),
        Goal("file descriptors, most less fewest", found.figure("descriptors"), 0, most=True, unit=""),
        Goal("threads, most less fewest", found.figure("threads"), 0, most=True, unit=""),
        Goal("reading threads of a pass that was left", found.figure("left"), 0, most=True, unit=""),
    ]
    return Measured(f"{count} epochs over a small file", goals=goals)


CASES: dict[str, list[Callable[[Setup], Measured]]] = {
    "contiguous": [contiguous],
    "chunks": [chunks],
    "rows": [rows],
    "ranks": [
        partial(ranks, make=data.contiguous, ceiling=MOVING),
        partial(ranks, make=data.chunks, ceiling=DECODING),
        partial(ranks, make=data.rows, ceiling=MOVING),
    ],
    "global": [globally],
    "collective": [collective],
    "huge": [huge],
    "epochs": [epochs],
}


def _by_reader(results: list[Result]) -> dict[str, Result]:
    return {result.reader.name: result for result in results}


def best_peer(results: list[Result]) -> Result:
    """Return the fastest peer."""
    return max((result for result in results if result.reader.kind == "peer"), key=lambda result: result.rate)
