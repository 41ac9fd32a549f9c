"""Readers of a Zarr store: one field on a grid, of which a sample is the time of a step."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np

import matex_data as md
from benchmarks.harness.counting import counting
from benchmarks.harness.data import SMALL, Array, Task
from benchmarks.readers.ceiling import Pass
from benchmarks.readers.ours import SEED

FIELD, TIME = "t2m", "time"
GRID = (128, 256)  # 131 KB
DEPTH, INNER_DEPTH, SHARD = 16, 4, 64  # times of a chunk, of a chunk within a shard, of a shard
BATCH = 32
WINDOW = 256  # samples that a peer reads chunk by chunk and shuffles


def chunked(folder: Path, quick: bool = False) -> Task:
    """Write a store of version 2 as xarray does: chunks of 16 times, 2.1 MB, in Blosc's LZ4 with shuffle; 537 MB."""
    from numcodecs import Blosc

    return _store(folder, "blosc", quick, zarr_format=2, chunks=(DEPTH, *GRID), compressors=Blosc("lz4", 5))


def sharded(folder: Path, quick: bool = False) -> Task:
    """Write a store of version 3 with zarr's own compression (Zstandard): 16 chunks of 4 times in a shard; 537 MB."""
    return _store(folder, "shards", quick, zarr_format=3, chunks=(INNER_DEPTH, *GRID), shards=(SHARD, *GRID))


def _store(folder: Path, name: str, quick: bool, zarr_format: Any, **stored: Any) -> Task:
    import zarr

    count = 4096 // (SMALL if quick else 1)
    path = folder / f"{name}-{count}.zarr"
    if not path.exists():
        part = path.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        group = zarr.create_group(part, zarr_format=zarr_format)
        axes: dict[str, tuple[int, ...]] = {TIME: (count,), "lat": GRID[:1], "lon": GRID[1:]}
        for axis, shape in axes.items():
            coordinate = group.create_array(axis, shape=shape, dtype="f8", **_named(zarr_format, (axis,)))
            coordinate[...] = np.arange(shape[0])
        field = group.create_array(
            FIELD, shape=(count, *GRID), dtype="f4", **stored, **_named(zarr_format, tuple(axes))
        )
        rng = np.random.default_rng(0)
        for start in range(0, count, SHARD):
            waves = rng.normal(0, 3, (SHARD, *GRID)).cumsum(axis=2) / 4
            field[start : start + SHARD] = np.round(273 + waves, 1)
        part.rename(path)
    return Task(str(path), FIELD, "", BATCH, count, 4 * GRID[0] * GRID[1], min(count, 640))


def _named(zarr_format: int, axes: tuple[str, ...]) -> dict[str, Any]:
    """Return the options that name the axes of an array for xarray."""
    return {"dimension_names": axes} if zarr_format == 3 else {"attributes": {"_ARRAY_DIMENSIONS": axes}}


def tensors(task: Task) -> Pass:
    """Read shuffled batches from ``tf_dataset``."""
    return counting(md.open_dataset(task.path, inputs=FIELD).tf_dataset(task.batch_size, shuffle=True, seed=SEED))


def arrays(task: Task) -> Pass:
    """Read shuffled batches from ``batches``."""
    batches = md.open_dataset(task.path, inputs=FIELD).batches(task.batch_size, shuffle=True, seed=SEED)
    return lambda: sum(len(batch) for batch in batches)


def decoding(task: Task) -> Pass:
    """Decode the chunks, which are in memory, in the threads that matex_data has, into memory that is used again."""
    stored = _chunks_of_shards(task) if "shards" in task.path else _chunk_files(task)
    nbytes = task.samples * task.sample_bytes // len(stored)
    threads = int(os.environ["MATEX_THREADS"])
    pool = ThreadPoolExecutor(threads)

    def decode(chunks: list[bytes]) -> None:
        out = np.empty(nbytes, np.uint8)
        for chunk in chunks:
            if "shards" in task.path:
                imagecodecs.zstd_decode(chunk, out=out)
            else:
                imagecodecs.blosc_decode(chunk, out=out, numthreads=1)

    def run() -> int:
        for _ in pool.map(decode, [stored[thread::threads] for thread in range(threads)]):
            pass
        return task.samples

    return run


def _chunk_files(task: Task) -> list[bytes]:
    return [Path(task.path, FIELD, f"{number}.0.0").read_bytes() for number in range(-(-task.samples // DEPTH))]


def _chunks_of_shards(task: Task) -> list[bytes]:
    """Return the chunks of all shards: an index of offsets and sizes, and its checksum, ends each file."""
    found = []
    for number in range(task.samples // SHARD):
        shard = Path(task.path, FIELD, "c", str(number), "0", "0").read_bytes()
        index = np.frombuffer(shard[-4 - 16 * (SHARD // INNER_DEPTH) : -4], "<u8").reshape(-1, 2)
        found += [shard[offset : offset + nbytes] for offset, nbytes in index.tolist()]
    return found


def slices(task: Task) -> Pass:
    """Read slices of zarr-python in the order of the store."""
    array = _opened(task)

    def run() -> int:
        return sum(len(array[start : start + task.batch_size]) for start in range(0, task.samples, task.batch_size))

    return run


def xarray_batches(task: Task) -> Pass:
    """Read slices of xarray in the order of the store; dask's threads decode the chunks."""
    field = _dataset(task)[FIELD]

    def run() -> int:
        starts = range(0, task.samples, task.batch_size)
        return sum(len(field[start : start + task.batch_size].values) for start in starts)

    return run


def xarray_load(task: Task) -> Pass:
    """Load the whole field by xarray and dask's threads."""
    return lambda: len(_dataset(task)[FIELD].load())


def xbatcher_batches(task: Task) -> Pass:
    """Read the batches of xbatcher's ``BatchGenerator`` in the order of the store, with dask behind it."""
    from xbatcher import BatchGenerator

    batches = BatchGenerator(_dataset(task)[[FIELD]], _dimensions(task.batch_size))
    return lambda: sum(len(batch[FIELD].values) for batch in batches)


def xbatcher_torch(task: Task, workers: int) -> Pass:
    """Read samples of a random order by xbatcher's ``MapDataset`` and PyTorch's ``DataLoader``."""
    from torch.utils.data import DataLoader, RandomSampler
    from xbatcher import BatchGenerator
    from xbatcher.loaders.torch import MapDataset

    samples = MapDataset(BatchGenerator(_dataset(task)[FIELD], _dimensions(1)))
    loader: DataLoader[Any] = DataLoader(
        samples,
        task.batch_size,
        sampler=RandomSampler(samples, num_samples=task.limit),  # type: ignore[arg-type]
        num_workers=workers,
        persistent_workers=workers > 0,
        multiprocessing_context="forkserver" if workers else None,  # dask has threads
    )
    return lambda: sum(len(batch) for batch in loader)


def _dataset(task: Task) -> Any:
    """Return the store as xarray opens it, with dask arrays of its chunks."""
    from xarray import open_zarr

    return open_zarr(task.path, consolidated=False)


def _dimensions(times: int) -> dict[str, int]:
    return {TIME: times, "lat": GRID[0], "lon": GRID[1]}


def _opened(task: Task) -> Any:
    import zarr

    return zarr.open_array(task.path, path=FIELD, mode="r")


class _Samples:
    """Map-style dataset; the first process or thread that reads opens the store."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._array: Any = None

    @property
    def array(self) -> Any:
        self._array = self._array or _opened(self.task)
        return self._array

    def __len__(self) -> int:
        return self.task.samples

    def __getitem__(self, number: int) -> Array:
        return np.asarray(self.array[number])


class _Batches(_Samples):
    """Like ``_Samples``, with the batched access that PyTorch's fetcher looks for."""

    def __getitems__(self, numbers: list[int]) -> Array:
        return np.asarray(self.array.oindex[np.sort(numbers)])


def torch_samples(task: Task, batched: bool, workers: int) -> Pass:
    """Read samples of a random order with PyTorch's ``DataLoader``, one by one or by a selection for each batch."""
    from torch import from_numpy
    from torch.utils.data import DataLoader, RandomSampler

    samples: Any = _Batches(task) if batched else _Samples(task)
    loader: DataLoader[Any] = DataLoader(
        samples,
        task.batch_size,
        sampler=RandomSampler(samples, num_samples=task.limit),
        num_workers=workers,
        persistent_workers=workers > 0,
        collate_fn=from_numpy if batched else None,
    )
    return lambda: sum(len(batch) for batch in loader)


def torch_chunks(task: Task, workers: int) -> Pass:
    """Read with PyTorch's ``DataLoader`` chunks of a random order, and shuffle the samples of ``WINDOW``."""
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info

    class Chunks(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Array]:
            info: Any = get_worker_info()
            return _by_chunk(task, *((info.id, info.num_workers) if info else (0, 1)))

    loader: DataLoader[Any] = DataLoader(Chunks(), batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    return lambda: sum(len(batch) for batch in loader)


def _by_chunk(task: Task, number: int, size: int) -> Iterator[Array]:
    """Yield the shuffled samples of every ``size``-th chunk, some chunks at a time."""
    array, rng = _opened(task), np.random.default_rng(SEED)
    depth = array.chunks[0]
    starts = rng.permutation(np.arange(0, task.samples, depth))[number::size]
    for first in range(0, len(starts), WINDOW // depth):
        chunks = [array[start : start + depth] for start in starts[first : first + WINDOW // depth].tolist()]
        window = np.concatenate(chunks)
        for chosen in rng.permutation(len(window)).reshape(-1, task.batch_size):
            yield window[chosen]


def grain_samples(task: Task, threads: int) -> Pass:
    """Read samples of a random order with Grain's ``MapDataset``, in threads."""
    grain: Any = import_module("grain.python")  # it has no types
    source: Any = _Samples(task)
    dataset = grain.MapDataset.source(source).shuffle(seed=SEED)[: task.limit]
    batches = dataset.to_iter_dataset(grain.ReadOptions(num_threads=threads)).batch(task.batch_size)
    return lambda: sum(len(batch) for batch in batches)
