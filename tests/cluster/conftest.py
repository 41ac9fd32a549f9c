"""One emulated cluster for all tests of this folder, which run with ``-m cluster`` alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.cluster.slurm import ROOT, Cluster, Mpi, NoCluster, cluster, mpi_libraries

ROWS = 480


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, and leave them out unless the marker is asked for."""
    own = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in own:
        item.add_marker(pytest.mark.cluster)
    if "cluster" not in config.getoption("markexpr"):
        config.hook.pytest_deselected(items=own)
        items[:] = [item for item in items if item not in own]


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield a cluster with two nodes; skip where it cannot be emulated, unless ``MATEX_CLUSTER`` is set."""
    needed = "MATEX_CLUSTER" in os.environ
    try:
        with cluster(tmp_path_factory.mktemp("cluster"), install_missing=needed) as made:
            yield made
    except NoCluster as error:
        if needed:
            raise
        pytest.skip(f"no cluster can be emulated: {error}")


@pytest.fixture(scope="session")
def table(slurm: Cluster) -> Path:
    """Return the path of a file that both nodes see."""
    path = slurm.folder / "table.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.arange(ROWS * 6, dtype="float32").reshape(ROWS, 6), chunks=(8, 6))
    return path


@pytest.fixture(scope="module", params=["mpich", "openmpi"])
def mpi(request: pytest.FixtureRequest) -> Mpi:
    """Return each of the MPI libraries in turn."""
    found = mpi_libraries(ROOT)
    if request.param not in found:
        pytest.skip(f"{request.param} is not installed")
    return found[request.param]
