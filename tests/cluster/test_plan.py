"""Steps on emulated nodes take what ``matex plan --train`` predicts, where the links between them are slow."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from matex_data import machine
from matex_data.cli.planning import measured
from matex_data.cli.scaling import Network, predict
from tests.cluster.slurm import ROOT, Cluster, NoCluster, cluster, facts_of, mpi_libraries

NODES = 4
BATCH, STEPS, FIRST = 128, 30, 5
SLEEPING, NETWORK, LATENCY = (Path(__file__).with_name(f"{name}.py") for name in ("sleeping", "network", "latency"))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield four nodes; skip where they cannot be emulated, unless ``MATEX_CLUSTER`` is set."""
    needed = "MATEX_CLUSTER" in os.environ
    try:
        with cluster(tmp_path_factory.mktemp("nodes"), needed, NODES) as made:
            yield made
    except NoCluster as error:
        if needed:
            raise
        pytest.skip(f"no cluster can be emulated: {error}")


def _printed(nodes: Cluster, count: int, *words: object) -> dict[str, Any]:
    """Run a command with a rank on each of so many nodes; return what rank 0 prints."""
    mpi, out = mpi_libraries(ROOT)["mpich"], nodes.folder / f"out-{time.monotonic_ns()}"
    script = f"#!/bin/bash\nsrun --mpi={mpi.srun} $PYTHON {' '.join(map(str, words))}\n"
    options = (f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", "--output", str(out))
    assert nodes.wait(nodes.submit(script, *options), 240).state == "COMPLETED", out.read_text()
    (found,) = facts_of(out.read_text())
    return found


def _steps(nodes: Cluster, count: int, seconds: float, units: int) -> Any:
    """Return the seconds of steps on so many nodes, without the first ones."""
    words = "-m", "matex_data", "run", "--verify", "never", SLEEPING, seconds, units, BATCH, STEPS
    return np.array(_printed(nodes, count, *words)["steps"][FIRST:])


@pytest.mark.slow
@pytest.mark.parametrize("units", [512, 1024, 2048])
@pytest.mark.parametrize(("count", "bits"), [(2, 1e9), (NODES, 2e8)])
def test_a_step_takes_what_was_predicted(nodes: Cluster, count: int, bits: float, units: int) -> None:
    """Computing is a sleep as long as the steps that were measured, since there are more nodes than cores.

    The cores also do the work of the network, which predictions do not count: steps took 1.1 to 1.6 times as long here.
    """
    costs = measured(NETWORK, [str(units), str(BATCH)], machine.cores(), machine.cores() * count)
    nodes.shape_links(bits)
    link = _printed(nodes, 2, LATENCY)
    assert link["bandwidth"] == pytest.approx(bits / 8, rel=0.2)
    expected = predict(costs, count, 1, Network(bits / 8, link["latency"]))
    computing = expected.seconds["computing"]
    steps = _steps(nodes, count, max(0.0, computing - np.median(_steps(nodes, 1, 0.0, units))), units)
    print(f"{count} nodes, {bits / 1e9:g} Gb/s, {sum(nbytes for nbytes, _ in costs.buckets) / 1e6:.1f} MB", end=": ")
    print(f"computing {computing:.4f}, predicted {expected.step:.4f}, measured {np.median(steps):.4f}", end=" ")
    print(f"({steps.min():.4f} to {steps.max():.4f}) s, latency {link['latency']:.2g} s")
    assert 0.8 < np.median(steps) / expected.step < 2
