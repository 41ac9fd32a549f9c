"""Training of the examples on image files: a folder for each class, and pairs of images and masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from sample_data.make import write_cells, write_photos
from tests.support.ranks import Pools


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    write_photos(folder / "photos")
    write_cells(folder / "cells")
    return folder


def _photos(comm: MPI.Intracomm, folder: str, **options: Any) -> dict[str, Any]:
    import keras

    from examples.photos import train

    keras.backend.clear_session()
    return train(folder, **options)


def _cells(comm: MPI.Intracomm, folder: str, **options: Any) -> dict[str, Any]:
    import keras

    from examples.cells import train

    keras.backend.clear_session()
    return train(folder, **options)


@pytest.mark.parametrize("example", [pytest.param(_photos, marks=pytest.mark.slow), _cells])
def test_two_ranks_train_as_one_process(folders: Path, ranks: Pools, example: Any) -> None:
    folder = str(folders / example.__name__.strip("_"))
    (alone,) = ranks(1).run(example, folder, epochs=1, timeout=240)
    for found in ranks(2).run(example, folder, epochs=1, timeout=240):
        np.testing.assert_allclose(
            found["weights"], alone["weights"], rtol=0, atol=1e-4 * np.abs(alone["weights"]).max()
        )
        for name in ("loss", "val_loss", "val_accuracy"):
            np.testing.assert_allclose(found[name], alone[name], rtol=1e-4)


def test_a_network_learns_classes_from_augmented_images(folders: Path, ranks: Pools) -> None:
    first, second = ranks(2).run(_photos, str(folders / "photos"), epochs=3, augment=True, timeout=240)
    np.testing.assert_array_equal(first["weights"], second["weights"])
    assert list(first["classes"]) == ["flower", "temple"]
    assert first["val_accuracy"][-1] > 0.9


def test_a_u_net_learns_masks(folders: Path, ranks: Pools) -> None:
    (result,) = ranks(1).run(_cells, str(folders / "cells"), epochs=2, timeout=240)
    assert result["val_accuracy"][-1] > 0.95
