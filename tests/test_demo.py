"""Training of the demo on 1, 2, 3 and 4 ranks: equal weights, and each rank reads its own shard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from sample_data.make import CHUNK_ROWS, write_digits
from tests.support.ranks import Pool, Pools

EPOCHS = 2
Result = dict[str, NDArray[Any]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_digits(tmp_path_factory.mktemp("digits"))


def _train(comm: MPI.Intracomm, pattern: str) -> Result:
    import keras

    from examples.digits import train

    keras.backend.clear_session()  # names of weights count from the beginning again
    return train(pattern, EPOCHS, 48)


@pytest.fixture(scope="module")
def alone(files: list[Path], ranks: Pools) -> Result:
    (result,) = ranks(1).run(_train, str(files[0].parent / "*.h5"), timeout=240)
    return dict(result)


@pytest.mark.rank_counts(3, slow=(2, 4))
def test_weights_are_those_of_one_process(pool: Pool, files: list[Path], alone: Result) -> None:
    results = pool.run(_train, str(files[0].parent / "*.h5"), timeout=240)
    names = [name for name in alone if name.startswith(("weights/", "history/loss", "history/val_loss"))]
    assert len(names) == 8
    for name in names:
        np.testing.assert_allclose(results[0][name], alone[name], rtol=0, atol=1e-4 * np.abs(alone[name]).max())
    for result in results[1:]:
        assert all(np.array_equal(result[name], results[0][name]) for name in names)
    np.testing.assert_allclose(results[0]["history/val_accuracy"][-1], results[0]["accuracy"], rtol=1e-6)
    _check_bytes(results[0]["bytes_read"], pool.size, files)


def _check_bytes(bytes_read: NDArray[np.int64], size: int, files: list[Path]) -> None:
    """Check the bytes of each epoch: those of a rank's shard, and of one block at each of its two borders."""
    stored = 0
    for path in files:
        with h5py.File(path) as file:
            stored += sum(file[name].id.get_storage_size() for name in ("image", "label"))
    samples = sum(len(_labels(path)) for path in files)
    block = 2 * stored * CHUNK_ROWS / samples  # compressed blocks differ in size
    assert bytes_read.shape == (size, EPOCHS)
    assert bytes_read.min() > 0
    assert bytes_read.max() <= 1.05 * stored / size + 2 * block
    assert bytes_read.sum(axis=0).max() <= stored + (size - 1) * block


def _labels(path: Path) -> NDArray[np.int64]:
    with h5py.File(path) as file:
        return np.asarray(file["label"])
