"""Thousands of fields: opening and reading take as much longer as there are more of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mpi4py import MPI

from matex_data import open_dataset
from matex_data._types import Array
from tests.support.ranks import Pools

FEW, MANY = 250, 2000  # fields
ROWS = 64


def _csv(path: Path, names: list[str], values: Array) -> None:
    pd.DataFrame(values, columns=names).to_csv(path, index=False)


def _parquet(path: Path, names: list[str], values: Array) -> None:
    pq.write_table(pa.table(dict(zip(names, values.T, strict=True))), path)


def _npz(path: Path, names: list[str], values: Array) -> None:
    np.savez(path, **dict(zip(names, values.T, strict=True)))


def _written(folder: Path, write: Callable[[Path, list[str], Array], None], count: int) -> tuple[str, Array]:
    path = folder / f"{count}.{write.__name__.removeprefix('_')}"
    values = np.random.default_rng(0).normal(size=(ROWS, count)).astype(np.float32)
    write(path, [f"gene{i}" for i in range(count)], values)
    return str(path), values


@pytest.mark.slow  # a time, so that other work on the machine may disturb it
@pytest.mark.parametrize("write", [_csv, _parquet, _npz])
def test_time_grows_with_the_number_of_fields(tmp_path: Path, write: Callable[[Path, list[str], Array], None]) -> None:
    """Where it grew with its square, eight times the fields took 45 to 60 times as long."""

    def seconds(count: int) -> float:
        path, values = _written(tmp_path, write, count)
        Path(f"{path}.index").unlink(missing_ok=True)
        names, begin = [f"gene{i}" for i in range(count)], time.process_time()
        data = open_dataset(path, inputs=names[:-1], targets=names[-1], comm=MPI.COMM_SELF)
        assert data.statistics(names[0]).mean == pytest.approx(values[:, 0].mean(), rel=1e-4)
        for _ in range(2):  # the second time from the stored index
            whole = open_dataset(path, index=f"{path}.index", comm=MPI.COMM_SELF)
            assert list(whole.schema) == names
        return time.process_time() - begin

    seconds(10)  # imports
    assert min(seconds(MANY) for _ in range(2)) < 20 * min(seconds(FEW) for _ in range(2))


def _loaded(comm: MPI.Intracomm, path: str) -> Array:
    data = open_dataset(path, inputs=[f"gene{i}" for i in range(MANY)], stack=True, comm=comm)
    return np.concatenate(list(data.batches(6, remainder="keep")))


def test_rows_of_a_wide_table_on_ranks(ranks: Pools, tmp_path: Path) -> None:
    """Blocks of one or two records are parsed many at a time, and have the types of all of them."""
    path, values = _written(tmp_path, _csv, MANY)
    (whole,) = ranks(1).run(_loaded, path)
    np.testing.assert_allclose(whole, values, rtol=1e-6)
    parts = ranks(3).run(_loaded, path)
    assert sorted(map(tuple, np.concatenate(parts)[:, :3])) == sorted(map(tuple, whole[:, :3]))
