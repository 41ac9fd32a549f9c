"""Quality of shuffled batches of sorted files, computed from sample numbers: no data is read.

Ten classes lie one after the other. The share of a class in a batch of n varies from batch to batch; its standard
deviation over that of drawing from all samples alike, sqrt(p (1 - p) / n), is 1 for a shuffle of the whole file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path

import numpy as np

from benchmarks.cases.reading import Goal, Measured, Setup
from matex_data._types import Array, Integers
from matex_data.fields import Field
from matex_data.index.cache import ChunkCache
from matex_data.index.model import FileIndex, Index, Layout, ReadRequest, RowSelection
from matex_data.index.runs import Runs, cut
from matex_data.sampling.schedule import Schedule
from matex_data.sampling.sizing import (
    WINDOW_LIMIT,
    block_borders,
    choose_block_bytes,
    choose_lanes,
    make_schedule,
    most_window_bytes,
)

CLASSES = 10
EPOCHS = 3
SMALL = 8  # --quick: so many times fewer samples
RANKS = (1, 2, 4)
GRAIN_SAMPLES = 200_000
NEIGHBOURS = 1.5  # times by chance that samples which are neighbours in the file may meet in a batch

SequenceCounter = Callable[[int], Integers]
"""Makes the batches of an epoch: int64[batches, batch_size], numbers of samples."""


@dataclass(frozen=True)
class Sorted:
    """A file of samples that are sorted by class.

    Parameters
    ----------
    text : what it is.
    samples : in it.
    shape, dtype : of one.
    chunk : samples that are stored together; 1: each can be read alone.
    batch_size : of a batch.
    limit : of the ratio by default.
    """

    text: str
    samples: int
    shape: tuple[int, ...]
    dtype: str
    chunk: int
    batch_size: int
    limit: float

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a sample."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize


FILES = (
    Sorted("contiguous rows of 28 float32", 2_000_000, (28,), "f4", 1, 1024, 1.25),
    Sorted("contiguous rows of 28 float32", 2_000_000, (28,), "f4", 1, 64, 1.1),
    Sorted("contiguous images of 48 KB", 16_000, (3, 64, 64), "f4", 1, 64, 1.1),
    Sorted("samples of 12 KB, gzip chunks of 16", 64_000, (48, 64), "f4", 16, 64, 1.1),
    Sorted("rows of 64 float32, gzip chunks of 1,000", 200_000, (64,), "f4", 1000, 256, 1.25),
)


@dataclass(frozen=True)
class _Stored(Layout):
    """Layout of a file that does not exist."""

    rows: int
    block_rows: int

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        raise NotImplementedError("there is nothing to read")


@dataclass(frozen=True)
class Shares:
    """Representation of the classes in the batches of a few epochs.

    Parameters
    ----------
    ratio : standard deviation of their shares over that of drawing from all samples alike.
    worst : the largest share of a class in a batch.
    neighbours : how often samples that are neighbours in the file meet in a batch, in times by chance.
    window : standard deviation of the shares in 50 batches that follow one another, over that of drawing alike.
    once : whether no sample comes twice in an epoch.
    differ : whether each epoch has an order of its own.
    """

    ratio: float
    worst: float
    neighbours: float
    window: float
    once: bool
    differ: bool


def by_default(file: Sorted, rank: int = 0, size: int = 1, seed: int = 1) -> SequenceCounter:
    """Return this package's batches with its defaults, as one rank of several gets its shard of them."""
    index = Index(
        {"x": Field("x", file.shape, np.dtype(file.dtype))},
        [FileIndex("sorted.h5", file.samples, {"x": _Stored(file.samples, file.chunk)})],
    )
    total = file.samples * file.row_bytes
    block_bytes = choose_block_bytes(file.batch_size, most_window_bytes(file.batch_size, file.row_bytes, total), total)
    every = Runs(np.array([0]), np.array([file.samples]))
    plan = make_schedule(
        every,
        block_borders(index, block_bytes),
        file.batch_size,
        file.row_bytes,
        None,
        seed=1,
        remainder="drop",
    )
    return partial(_of_schedule, plan, rank=rank, size=size)


def before(file: Sorted, seed: int = 1) -> SequenceCounter:
    """Return the batches of windows of 32 blocks of up to 1 MB."""
    total = file.samples * file.row_bytes
    depth = file.chunk * max(1, min(total // 1024, 1 << 20) // (file.chunk * file.row_bytes))
    borders = np.arange(0, file.samples, depth)
    window = min(WINDOW_LIMIT, max(8 << 20, 32 * depth * file.row_bytes))
    lanes = choose_lanes(file.batch_size, min(256, len(borders), window // (2 * depth * file.row_bytes)))
    steps = max(1, window // (file.batch_size * file.row_bytes))
    pieces = cut(Runs(np.array([0]), np.array([file.samples])), borders)
    plan = Schedule(pieces, file.batch_size, lanes, steps, seed, np.arange(len(borders)))
    return partial(_of_schedule, plan, rank=0, size=1)


def everywhere(file: Sorted) -> SequenceCounter:
    """Return the batches of ``shuffle="global"``."""
    every = Runs(np.array([0]), np.array([file.samples]))
    plan = make_schedule(
        every, np.array([0]), file.batch_size, file.row_bytes, None, seed=1, remainder="drop", uniform=True
    )
    return partial(_of_schedule, plan, rank=0, size=1)


def _of_schedule(plan: Schedule, number: int, rank: int, size: int) -> Integers:
    epoch, each = plan.epoch(number), plan.batch_size // size
    found = np.empty((plan.full_steps, each), np.int64)
    together = plan.window_steps * max(1, (1 << 20) // (plan.window_steps * plan.batch_size))
    for begin in range(0, plan.full_steps, together):
        end = min(begin + together, plan.full_steps)
        window = epoch.window(begin, end, rank, size)
        found[begin:end].reshape(-1)[window.destination] = window.runs.numbers(np.arange(window.runs.total))
    return found


def torch_sampler(file: Sorted) -> SequenceCounter:
    """Return the batches of PyTorch's ``RandomSampler``."""
    import torch
    from torch.utils.data import RandomSampler

    def epoch(number: int) -> Integers:
        generator = torch.Generator().manual_seed(number)
        order = np.fromiter(RandomSampler(range(file.samples), generator=generator), np.int64, file.samples)
        return _batched(order, file.batch_size)

    return epoch


def grain_shuffle(file: Sorted) -> SequenceCounter:
    """Return the first batches of Grain's ``MapDataset.shuffle``."""
    import grain

    def epoch(number: int) -> Integers:
        dataset = grain.MapDataset.range(file.samples).shuffle(seed=number)
        return _batched(
            np.array([dataset[i] for i in range(min(file.samples, GRAIN_SAMPLES))], np.int64), file.batch_size
        )

    return epoch


def _batched(order: Integers, batch_size: int) -> Integers:
    return order[: len(order) // batch_size * batch_size].reshape(-1, batch_size)


def shares(file: Sorted, order: SequenceCounter, epochs: int = EPOCHS) -> Shares:
    """Compute the representation of the classes in a few epochs."""
    n, every = file.batch_size, [order(number) for number in range(epochs)]
    counts = np.concatenate([_classes(batches, file.samples) for batches in every])
    chance = float(np.sqrt(1 / CLASSES * (1 - 1 / CLASSES)))
    long = min(50, len(counts))
    together = counts[: len(counts) // long * long].reshape(-1, long, CLASSES).sum(axis=1)
    met = sum(_met(batches, file.samples) for batches in every)
    by_chance = sum(batches.size * (n - 1) / (file.samples - 1) for batches in every)
    return Shares(
        float((counts / n).std() / (chance / np.sqrt(n))),
        float((counts / n).max()),
        met / by_chance,
        float((together / (n * long)).std() / (chance / np.sqrt(n * long))),
        all(len(np.unique(batches)) == batches.size for batches in every),
        len({batches[: len(batches)].tobytes() for batches in every}) == epochs,
    )


def _classes(batches: Integers, samples: int) -> Integers:
    """Return the number of samples of each class, int64[batches, CLASSES]."""
    of = batches * CLASSES // samples + np.arange(len(batches))[:, None] * CLASSES
    return np.bincount(of.reshape(-1), minlength=len(batches) * CLASSES).reshape(-1, CLASSES)


def _met(batches: Integers, samples: int) -> int:
    """Count the pairs of neighbours in the file that share a batch."""
    step = np.full(samples, -1, np.int64)
    step[batches.reshape(-1)] = np.repeat(np.arange(len(batches)), batches.shape[1])
    return int(((step[1:] == step[:-1]) & (step[1:] >= 0)).sum())


def alike(file: Sorted) -> bool:
    """Return whether 1, 2 and 4 ranks together have the same batches."""
    first: Integers | None = None
    for size in RANKS:
        batches = np.sort(np.concatenate([by_default(file, rank, size)(1) for rank in range(size)], axis=1), axis=1)
        if first is not None and not np.array_equal(first, batches):
            return False
        first = batches
    return True


READERS: dict[str, Callable[[Sorted], SequenceCounter]] = {
    "before": before,
    "matex_data, shuffle=True": by_default,
    'matex_data, shuffle="global"': everywhere,
    "PyTorch RandomSampler": torch_sampler,
    "Grain MapDataset.shuffle": grain_shuffle,
}


def shuffle(setup: Setup) -> Measured:
    """Measure every reader on every file."""
    columns, rows = ["data", "batch", "reader", "ratio", "worst share", "50 batches", "neighbours"], []
    goals: list[Goal] = []
    for file in FILES:
        if setup.quick:
            file = replace(file, samples=file.samples // SMALL)
        text, n = f"{file.samples:,} {file.text}", f"{file.batch_size:,}"
        for name, reader in READERS.items():
            try:
                order = reader(file)
            except ImportError as error:
                rows.append([text, n, name, f"not measured: {error}", "", "", ""])
                continue
            epochs = 1 if "Grain" in name else EPOCHS
            found = shares(file, order, epochs)
            figures = [f"{figure:.2f}" for figure in (found.ratio, found.worst, found.window, found.neighbours)]
            rows.append([text, n, name, *figures])
            if reader is by_default:
                what = f"{text}, batch {n}"
                sound = found.once and found.differ and alike(file)
                goals += [
                    Goal(f"ratio, {what}", found.ratio, file.limit, most=True, unit=""),
                    Goal(f"neighbours, {what}", found.neighbours, NEIGHBOURS, most=True),
                    Goal(f"samples once, epochs differ, 2 and 4 ranks alike, {what}", float(sound), 1, unit=""),
                ]
    title = "Batches of files that are sorted by class: spread of a class's share over that of drawing from all samples"
    return Measured(title, goals=goals, columns=columns, rows=rows)


CASES: dict[str, list[Callable[[Setup], Measured]]] = {"shuffle": [shuffle]}


def draw(path: Path) -> None:
    """Draw the order of the samples, and the share of a class in each batch, for the first of ``FILES``."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    file, first, shown = FILES[0], 400, 12
    orders = {
        "order of the file": lambda _: _batched(np.arange(file.samples), file.batch_size),
        "before: 32 blocks a window": before(file),
        "shuffle=True": by_default(file),
        'shuffle="global"': everywhere(file),
    }
    rng = np.random.default_rng(0)
    figure, axes = plt.subplots(2, len(orders), figsize=(11, 4.6), sharex=True, sharey="row")
    spread = 2 * np.sqrt(1 / CLASSES * (1 - 1 / CLASSES) / file.batch_size)
    for column, (name, order) in enumerate(orders.items()):
        batches, (above, below) = order(0)[:first], axes[:, column]
        some = rng.permuted(batches, axis=1)[:, :shown]
        above.plot(np.repeat(np.arange(first), some.shape[1]), some.reshape(-1) / 1e6, ",", color="#1b7837")
        above.set_title(name, fontsize=9)
        below.axhspan(1 / CLASSES - spread, 1 / CLASSES + spread, color="#d9d9d9")
        below.plot(_classes(batches, file.samples)[:, 3] / file.batch_size, color="#1b7837", linewidth=0.8)
        below.set_ylim(-0.01, 0.31)
        below.set_xlabel("batch", fontsize=8)
    axes[0, 0].set_ylabel("number in the file, millions", fontsize=8)
    axes[1, 0].set_ylabel("share of the fourth class", fontsize=8)
    for axis in axes.flat:
        axis.tick_params(labelsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
