"""Data sets that all ranks of a pool open and load, compared with what another library has of the files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import matex_data as md
from tests.support.ranks import Pool

Shapes = Mapping[str, tuple[int | None, ...]]


def _load(comm: Any, paths: Any, options: dict[str, Any]) -> tuple[Shapes, dict[str, list[Any]], int]:
    """Return the shapes of the samples, all samples of each field in order, and how many a shuffled epoch has."""
    data = md.open_dataset(paths, comm=comm, **options)
    shapes = {name: field.sample_shape for name, field in data.schema.items()}
    by_rank = comm.allgather(data.load())
    batches = data.batches(3, shuffle=True, seed=1, remainder="keep")
    counts = comm.allgather(sum(len(next(iter(batch.values()))) for batch in batches))
    return shapes, {name: [row for loaded in by_rank for row in loaded[name]] for name in shapes}, sum(counts)


def check_samples(
    pool: Pool, paths: Any, wanted: Mapping[str, Sequence[Any]], shapes: Shapes | None = None, **options: Any
) -> None:
    """Check that all ranks open files with these samples, and with no other field.

    Parameters
    ----------
    pool : of 1 or 3 ranks: batches have 3 samples.
    paths, options : of ``open_dataset``.
    wanted : all samples of each field, in order.
    shapes : of a sample of each field, with None for axes that vary; None: whatever they are.
    """
    for found, rows, count in pool.run(_load, paths, options, timeout=60):
        assert sorted(found) == sorted(wanted)
        assert shapes is None or found == shapes
        for name, samples in wanted.items():
            assert len(rows[name]) == len(samples) == count, name
            for row, sample in zip(rows[name], samples, strict=True):
                np.testing.assert_array_equal(row, sample, err_msg=name)
