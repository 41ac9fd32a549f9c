"""Every HDF5 file of the corpus through ``open_dataset``, on one rank and on three."""

from __future__ import annotations

import os
from pathlib import Path

import h5py
import pytest
from mpi4py import MPI

from matex_data import DataError, open_dataset
from matex_data.sampling.schedule import rank_range
from tests.readers.hdf5.test_corpus import FILES, expectation, has_other_form, names
from tests.support.corpus import needs_corpus
from tests.support.ranks import Pools
from tests.support.serial import same

FILES_PER_TASK = 12
DATASETS = 40
"""Datasets of a file that are read on ranks, spread over the file; ``test_corpus.py`` reads all."""

pytestmark = needs_corpus


def _compare(comm: MPI.Intracomm, paths: list[Path]) -> tuple[int, list[str]]:
    """Return the number of datasets whose rows of this rank are those of h5py, and the names of the others."""
    equal, others = 0, []
    for path in paths:
        os.chdir(path.parent)  # where raw data files are looked for
        try:
            file = h5py.File(path, locking=False)
        except OSError:
            others += [] if _refused(comm, path, None) else [f"{path}: opened"]
            continue
        with file:
            found = [name for name in names(file) if not has_other_form(file, name)]
            for name in found[:: -(-len(found) // DATASETS) or 1]:
                expected, rows = expectation(file, name)
                if rows is None:
                    others += [] if _refused(comm, path, name) else [f"{path} {name}: opened"]
                    continue
                data = open_dataset(path, inputs=name, comm=comm)
                start, stop = rank_range(rows, comm.rank, comm.size)
                good = len(data) == rows if expected is None else same(data.load()[name], expected[start:stop], file)
                equal += good
                others += [] if good else [f"{path} {name}"]
    return equal, others


def _refused(comm: MPI.Intracomm, path: Path, name: str | None) -> bool:
    try:
        open_dataset(path, inputs=name, comm=comm).load()
    except DataError as error:
        return str(path) in str(error)
    return False


STARTS = range(0, len(FILES), FILES_PER_TASK)


@pytest.mark.product
@pytest.mark.parametrize(
    ("size", "first"),
    [
        pytest.param(size, first, marks=() if size == 3 and first % (4 * FILES_PER_TASK) == 0 else pytest.mark.slow)
        for size in (1, 3)
        for first in STARTS
    ],
)  # one process, every file: test_corpus.py
def test_every_dataset_against_h5py(ranks: Pools, size: int, first: int) -> None:
    found = ranks(size).run(_compare, FILES[first : first + FILES_PER_TASK], timeout=300)
    assert [others for _, others in found] == [[]] * size
    assert len({equal for equal, _ in found}) == 1
    assert found[0][0] > 0
