"""Training of the example with JAX, on two ranks as on one, where JAX is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from sample_data.make import write_digits
from tests.support.frameworks import needs
from tests.support.ranks import Pools


def _train(comm: MPI.Intracomm, files: str) -> dict[str, Any]:
    from examples.jax_loop import train

    return train(files, epochs=4)


@needs("jax")
def test_two_ranks_train_as_one_process(ranks: Pools, tmp_path: Path) -> None:
    files = str(write_digits(tmp_path)[0].parent / "*.h5")
    (alone,) = ranks(1).run(_train, files, timeout=120)
    assert alone["accuracy"] > 0.9
    for found in ranks(2).run(_train, files, timeout=120):
        np.testing.assert_allclose(found["parameters"], alone["parameters"], rtol=0, atol=1e-4)
        assert found["accuracy"] == alone["accuracy"]
