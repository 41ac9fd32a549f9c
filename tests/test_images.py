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


def _equal(found: dict[str, Any], alone: dict[str, Any]) -> None:
    largest = np.abs(alone["weights"]).max()
    np.testing.assert_allclose(found["weights"], alone["weights"], rtol=0, atol=1e-4 * largest)
    for name in ("loss", "val_loss", "val_accuracy"):
        np.testing.assert_allclose(found[name], alone[name], rtol=1e-4)


@pytest.mark.slow
def test_two_ranks_train_on_photos_as_one_process(folders: Path, ranks: Pools) -> None:
    (alone,) = ranks(1).run(_photos, str(folders / "photos"), epochs=1, timeout=240)
    for found in ranks(2).run(_photos, str(folders / "photos"), epochs=1, timeout=240):
        _equal(found, alone)


@pytest.mark.slow  # a network as a whole
def test_a_network_learns_classes_from_augmented_images(folders: Path, ranks: Pools) -> None:
    first, second = ranks(2).run(_photos, str(folders / "photos"), epochs=3, augment=True, timeout=240)
    np.testing.assert_array_equal(first["weights"], second["weights"])
    assert list(first["classes"]) == ["flower", "temple"]
    assert first["val_accuracy"][-1] > 0.9


@pytest.mark.slow  # a network as a whole
def test_a_u_net_learns_masks_of_mirrored_images_on_two_ranks_as_on_one(
    folders: Path, ranks: Pools, tmp_path: Path
) -> None:
    picture = tmp_path / "cells.png"
    (alone,) = ranks(1).run(_cells, str(folders / "cells"), epochs=2, picture=str(picture), timeout=240)
    assert alone["val_accuracy"][-1] > 0.95 and picture.read_bytes()[:4] == b"\x89PNG"
    for found in ranks(2).run(_cells, str(folders / "cells"), epochs=2, timeout=240):
        _equal(found, alone)
