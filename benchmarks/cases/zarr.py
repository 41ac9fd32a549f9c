"""The cases of Zarr stores: shuffled batches beside peers that read in order, and that shuffle."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.cases.reading import Goal, Measured, Setup, best_peer
from benchmarks.harness.data import Task
from benchmarks.harness.measure import Reader, interleaved
from benchmarks.readers import zarr

OURS = (
    Reader("matex_data, tf.data", "ours", "zarr.tensors"),
    Reader("matex_data, NumPy", "ours", "zarr.arrays"),
    Reader("decompression alone", "ceiling", "zarr.decoding"),
)
IN_ORDER = (
    Reader("zarr-python, slices", "peer", "zarr.slices"),
    Reader("xarray with dask, slices", "peer", "zarr.xarray_batches"),
    Reader("xarray with dask, all at once", "peer", "zarr.xarray_load"),
    Reader("xbatcher", "peer", "zarr.xbatcher_batches"),
)
BY_SAMPLE = (
    *(
        Reader(f"PyTorch {access}, {n} workers", "peer", "zarr.torch_samples", {"batched": batched, "workers": n})
        for access, batched in (("DataLoader", False), ("__getitems__", True))
        for n in (0, 2)
    ),
    *(Reader(f"xbatcher, PyTorch, {n} workers", "peer", "zarr.xbatcher_torch", {"workers": n}) for n in (0, 2)),
    *(Reader(f"Grain, {n} threads", "peer", "zarr.grain_samples", {"threads": n}) for n in (4, 16)),
)
BY_CHUNK = tuple(Reader(f"PyTorch, chunks, {n} workers", "peer", "zarr.torch_chunks", {"workers": n}) for n in (0, 2))


def field(setup: Setup, make: Callable[[Path, bool], Task], title: str) -> Measured:
    """Measure one field of a store."""
    results = interleaved(make(setup.folder, setup.quick), (*OURS, *IN_ORDER, *BY_SAMPLE, *BY_CHUNK), setup.repetitions)
    ours = results[0]
    ordered, by_sample, by_chunk = (
        best_peer([found for found in results if found.reader in readers])
        for readers in (IN_ORDER, BY_SAMPLE, BY_CHUNK)
    )
    goals = [
        Goal(f"tf.data, shuffled / best peer in order ({ordered.reader.name})", ours.over(ordered), 1),
        Goal(f"tf.data / best peer that shuffles samples ({by_sample.reader.name})", ours.over(by_sample), 5),
        Goal(f"tf.data / best peer that shuffles chunks ({by_chunk.reader.name})", ours.over(by_chunk), 5),
    ]
    return Measured(f"{title}, float32 samples of 131 KB, batches of {zarr.BATCH}", results, goals)


CASES: dict[str, list[Callable[[Setup], Measured]]] = {
    "zarr": [
        partial(field, make=zarr.chunked, title="Zarr version 2, Blosc, chunks of 16"),
        partial(field, make=zarr.sharded, title="Zarr version 3, shards of 16 chunks of 4"),
    ]
}
