"""A file that the tests of communicators and of deadlines read."""

from __future__ import annotations

import h5py
import numpy as np
import pytest

ROWS = 960


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return an HDF5 file with the dataset ``x``, float64[960, 8]."""
    path = str(tmp_path_factory.mktemp("mpi") / "x.h5")
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(ROWS * 8.0).reshape(ROWS, 8)
    return path
