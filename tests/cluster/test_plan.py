"""Steps on emulated nodes take what ``matex plan --train`` predicts, where the links between them are slow."""

from __future__ import annotations

import json
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
BITS = 1e9
"""Bits a second of the link of a node."""
BATCH, STEPS, FIRST = 128, 30, 5
SLEEPING, NETWORK, LATENCY = (Path(__file__).with_name(f"{name}.py") for name in ("sleeping", "network", "latency"))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield four nodes on links of 1 Gb/s; skip where they cannot be emulated, unless ``MATEX_CLUSTER`` is set."""
    needed = "MATEX_CLUSTER" in os.environ
    try:
        with cluster(tmp_path_factory.mktemp("nodes"), needed, NODES) as made:
            made.shape_links(BITS)
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


@pytest.mark.slow
@pytest.mark.parametrize("units", [512, 1024, 2048])
@pytest.mark.parametrize("count", [2, NODES])
def test_a_step_takes_what_was_predicted(nodes: Cluster, count: int, units: int) -> None:
    """Computing is a sleep of the measured time, since there are more nodes than cores."""
    costs = measured(NETWORK, [str(units), str(BATCH)], machine.cores(), machine.cores() * count)
    link = _printed(nodes, 2, LATENCY)
    assert link["bandwidth"] == pytest.approx(BITS / 8, rel=0.2)
    expected = predict(costs, count, 1, Network(BITS / 8, link["latency"]))
    table = json.dumps({expected.rows: expected.seconds["computing"]}).replace(" ", "")
    words = "-m", "matex_data", "run", "--verify", "never", SLEEPING, f"'{table}'", units, BATCH, STEPS
    steps = np.array(_printed(nodes, count, *words)["steps"][FIRST:])
    computing, megabytes = expected.seconds["computing"], sum(nbytes for nbytes, _ in costs.buckets) / 1e6
    print(f"{count} nodes, {megabytes:.1f} MB: computing {computing:.4f}, predicted {expected.step:.4f} s", end=", ")
    print(
        f"measured {np.median(steps):.4f} s ({steps.min():.4f} to {steps.max():.4f}), latency {link['latency']:.2g} s"
    )
    assert np.median(steps) == pytest.approx(expected.step, rel=0.2)
