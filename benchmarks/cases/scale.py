"""Costs of epochs on up to 10,000 ranks, by ``Dataset.read_plan`` on indexes of files that do not exist."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np

from benchmarks.cases.reading import Goal, Measured, Setup
from benchmarks.harness import data
from benchmarks.harness.measure import Reader, interleaved_afresh
from matex_data._types import Integers
from matex_data.codecs.pipeline import Pipeline
from matex_data.dataset import Dataset
from matex_data.epochs.costs import GOOD_AMPLIFICATION
from matex_data.fields import ElementSpec, Field
from matex_data.index.chunked import Chunked
from matex_data.index.model import FileIndex, Index, Layout
from matex_data.index.runs import Runs
from matex_data.index.strided import Strided
from matex_data.io.sessions import read_sessions
from matex_data.mpi.library import MPI
from matex_data.opening.open import open_dataset
from matex_data.reading.source import ReadOptions, open_source
from matex_data.sampling.split import Ties
from matex_data.transforms.chained import Selected

RANKS = (8, 256, 1024, 10_000)
ROWS_PER_RANK = 64  # of a batch
REAL_RANKS = (2, 8, 16, 32)
REAL_BATCH = 64
SAME = 0.02  # part by which the bytes that real ranks read may differ from those of the plan
FILE_RANKS = 16  # that open many files
FILE_BYTES = 500  # most of memory for each of many files, on a node
SIZES: dict[str, dict[str, int]] = {"windows of 128 MiB": {"window_bytes": 128 << 20}, "by default": {}}
"""Options of ``open_dataset`` to compare, by their names in the table."""


@dataclass(frozen=True)
class Stored:
    """File of rows of float32.

    Parameters
    ----------
    total_bytes : of all rows, about.
    row_bytes : of a row.
    chunk_bytes : of a chunk, about; None: rows lie one after the other.
    """

    total_bytes: int
    row_bytes: int
    chunk_bytes: int | None = None

    @property
    def text(self) -> str:
        """Return the size, and how the rows are stored."""
        rows = f"{_size(self.total_bytes)}, rows of {_size(self.row_bytes)}"
        return f"{rows}, contiguous" if self.chunk_bytes is None else f"{rows}, chunks of {_size(self.chunk_bytes)}"

    def batch_size(self, ranks: int) -> int:
        """Return the samples of a batch: 64 for each rank, less if an epoch had fewer than eight steps."""
        return ranks * max(1, min(ROWS_PER_RANK, self.total_bytes // self.row_bytes // (8 * ranks)))

    def layout(self) -> Layout:
        """Return the layout of the file."""
        rows, width, dtype = self.total_bytes // self.row_bytes, self.row_bytes // 4, np.dtype("f4")
        if self.chunk_bytes is None:
            return Strided(rows, 0, self.row_bytes, dtype, (width,))
        depth = max(1, self.chunk_bytes // self.row_bytes)
        number = np.arange(-(-rows // depth))
        chunk = depth * self.row_bytes
        pipeline = Pipeline((), 4, chunk)
        size, mask = (_constant(value, len(number)) for value in (chunk, 0))
        shape, chunk_shape = (rows, width), (depth, width)
        return Chunked(shape, chunk_shape, dtype, pipeline, number, number * chunk, size, mask, np.float32(0))


def _constant(value: int, count: int) -> Integers:
    """Return int64[count] of equal numbers in the memory of one."""
    return np.broadcast_to(np.int64(value), count)


def _size(nbytes: int) -> str:
    power = (len(str(nbytes)) - 1) // 3
    return f"{nbytes / 1000**power:g} {('B', 'KB', 'MB', 'GB', 'TB')[power]}"


MB, GB, TB = 10**6, 10**9, 10**12
FILES = (
    *(Stored(total, 160_000, chunk) for total, chunk in product((10 * GB, 10 * TB), (None, 2_560_000, 40 * MB))),
    *(Stored(total, 10_000, chunk) for total, chunk in product((10 * GB, 10 * TB), (None, 2_500_000, 40 * MB))),
    *(Stored(total, 112, chunk) for total, chunk in product((10 * GB, 1 * TB), (None, 64_000, 2_500_000, 40 * MB))),
)


def opened(file: Stored, window_bytes: int | None = None) -> Dataset:
    """Return a data set of a file that does not exist, on this process alone."""
    layout = file.layout()
    field = Field("x", (file.row_bytes // 4,), np.dtype("f4"))
    index = Index({"x": field}, [FileIndex("rows.h5", layout.rows, {"x": layout})])
    options = ReadOptions("independent", window_bytes)
    source = open_source(read_sessions(MPI.COMM_SELF), index, options)
    return Dataset(Selected(source, ElementSpec(), Runs.between(0, len(index)), Ties()))


def planned(setup: Setup) -> Measured:
    """Compute what an epoch costs on up to 10,000 ranks."""
    columns = ["file", "sizes", "ranks", "batch", "read / needed", "reads of a rank", "MB a read"]
    columns += ["MB of memory", "messages a step", "at most"]
    rows: list[list[str]] = []
    worst = dict.fromkeys(SIZES, 0.0)
    for file in FILES[:: 2 if setup.quick else 1]:
        for name, sizes in SIZES.items():
            dataset = opened(file, **sizes)
            for ranks in RANKS:
                batch_size = file.batch_size(ranks)
                costs = dataset.read_plan(batch_size, ranks=ranks)
                worst[name] = max(worst[name], costs.amplification)
                figures = (f"{costs.amplification:.2f}", f"{costs.reads_per_rank:,.0f}")
                megabytes = (f"{costs.mean_read_bytes / MB:.3g}", f"{costs.bytes_per_rank / MB:,.0f}")
                messages = [f"{n:,.0f}" for n in (costs.messages_per_step, costs.most_messages_per_step)]
                rows.append([file.text, name, f"{ranks:,}", f"{batch_size:,}", *figures, *megabytes, *messages])
    goals = [Goal("bytes read / needed, by default", worst["by default"], GOOD_AMPLIFICATION, most=True)]
    return Measured("Shuffled epochs on many ranks, computed from their schedules", [], goals, columns, rows)


def real(setup: Setup) -> Measured:
    """Compare the bytes that real ranks read with those of the plan."""
    columns = ["file", "ranks", "MB read", "MB planned", "read / needed", "shared"]
    rows: list[list[str]] = []
    goals: list[Goal] = []
    tasks = {"chunks of 0.4 MB": data.chunks, "chunks of 6 MB": data.large_chunks}
    for (text, write), ranks in product(tasks.items(), REAL_RANKS):
        task = write(setup.folder, setup.quick)
        dataset = open_dataset(task.path, inputs=task.inputs, comm=MPI.COMM_SELF)
        reader = Reader(f"{ranks} ranks", "ours", "scale.bytes_of_epoch", {"batch_size": REAL_BATCH}, ranks=ranks)
        (result,) = interleaved_afresh(task, [reader], 1)
        read, costs = result.figure("bytes"), dataset.read_plan(REAL_BATCH, ranks=ranks, seed=1)
        megabytes = (f"{read / MB:,.1f}", f"{costs.bytes_read / MB:,.1f}")
        rows.append([text, f"{ranks}", *megabytes, f"{costs.amplification:.3f}", "yes" if costs.shared else "no"])
        name = f"bytes read / planned - 1, {text}, {ranks} ranks"
        goals.append(Goal(name, abs(read / costs.bytes_read - 1), SAME, most=True))
        goals.append(
            Goal(f"bytes read / needed, {text}, {ranks} ranks", costs.amplification, GOOD_AMPLIFICATION, most=True)
        )
    return Measured("Bytes that real ranks read in an epoch", [], goals, columns, rows)


def many_files(setup: Setup) -> Measured:
    """Open 100,000 files of a row each on 16 ranks."""
    task = data.many_files(setup.folder, setup.quick)
    reader = Reader(f"{FILE_RANKS} ranks", "ours", "scale.opening", {}, ranks=FILE_RANKS)
    (result,) = interleaved_afresh(task, [reader], 1)
    seconds, index, memory = (result.figure(name) for name in ("seconds", "index", "memory"))
    columns = ["files", "ranks", "seconds to open", "minutes for a million", "bytes of the index a file", "of memory"]
    million = seconds / task.samples * 10**6 / 60
    figures = [f"{seconds:.1f}", f"{million:.1f}", *(f"{nbytes / task.samples:.0f}" for nbytes in (index, memory))]
    goals = [
        Goal("bytes of memory of a node for each file", memory / task.samples, FILE_BYTES, most=True, unit=" B"),
        Goal("minutes to open a million files, by these", million, 10, most=True, unit=" min"),
    ]
    rows = [[f"{task.samples:,}", f"{FILE_RANKS}", *figures]]
    return Measured("Many files, opened by ranks that share two cores", [], goals, columns, rows)


CASES: dict[str, list[Callable[[Setup], Measured]]] = {"scale": [planned, real, many_files]}
