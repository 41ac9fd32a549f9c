"""Hyperstacks: samples by time or depth, compared with tifffile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from matex_data import FormatError, open_dataset
from tests.support.ranks import Pool

tifffile = pytest.importorskip("tifffile")
SHAPE = (6, 3, 2, 20, 24)  # time, depth, channel, height, width


def _images() -> Any:
    return np.random.default_rng(2).integers(0, 60000, SHAPE, np.uint16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a hyperstack as ImageJ, OME and nobody describes it."""
    folder, images = tmp_path_factory.mktemp("hyperstacks"), _images()
    tifffile.imwrite(folder / "imagej.tif", images, imagej=True, metadata={"axes": "TZCYX"})
    tifffile.imwrite(folder / "ome.tif", images, ome=True, metadata={"axes": "TZCYX"}, compression="zlib")
    tifffile.imwrite(folder / "plain.tif", images.reshape(-1, *SHAPE[3:]), metadata=None, compression="zlib")
    assert tifffile.imread(folder / "ome.tif").shape == SHAPE
    return folder


AXES: dict[str, Any] = {"imagej": None, "ome": "TZCYX", "plain": {"T": 6, "Z": 3, "C": 2}}
ORDERS = {"T": (0, 1, 2, 3, 4), "Z": (1, 0, 2, 3, 4), "TZ": (0, 1, 2, 3, 4), "CT": (2, 0, 1, 3, 4)}


@pytest.mark.parametrize("samples", ORDERS)
@pytest.mark.parametrize("kind", AXES)
def test_samples_by_any_axes(folder: Path, kind: str, samples: str) -> None:
    data = open_dataset(folder / f"{kind}.tif", inputs="image", axes=AXES[kind], samples=samples)
    moved = _images().transpose(ORDERS[samples])
    expected = moved.reshape(-1, *moved.shape[len(samples) :])
    assert data.schema["image"].shape == expected.shape[1:]
    assert data.schema["image"].attributes["axes"] == "".join(a for a in "TZC" if a not in samples) + "YX"
    np.testing.assert_array_equal(data[:], expected)
    np.testing.assert_array_equal(data[[len(data) - 1, 0]], expected[[-1, 0]])


@pytest.mark.parametrize("axes", ["TZCYX", "TCYX", "TZCYXS", {"T": 6, "Z": 1, "C": 2}, None])
def test_an_axis_of_one_plane_may_be_named(tmp_path: Path, axes: Any) -> None:
    images = _images()[:, :1]
    tifffile.imwrite(tmp_path / "a.tif", images, imagej=True, metadata={"axes": "TZCYX"})
    found = open_dataset(tmp_path / "a.tif", inputs="image", axes=axes, samples="T", comm=MPI.COMM_SELF)[:]
    np.testing.assert_array_equal(found, images if axes is not None and "Z" in axes else images[:, 0])


def _epoch(comm: MPI.Intracomm, folder: Path, start: Any = None) -> Any:
    paths = [folder / "imagej.tif", folder / "imagej.tif"]
    data = open_dataset(paths, inputs="image", samples="Z", comm=comm)
    batches = data.batches(3, shuffle=True, seed=1, start=start)
    return [x.copy() for x in batches], data.profile.bytes, batches.state(1)


@pytest.mark.rank_counts(1, 3)  # which divide the batch
def test_ranks_share_the_samples(folder: Path, pool: Pool) -> None:
    by_rank = pool.run(_epoch, folder)
    found = np.concatenate([batch for batches, *_ in by_rank for batch in batches])
    expected = np.concatenate([_images().transpose(1, 0, 2, 3, 4)] * 2)
    assert sorted(x.tobytes() for x in found) == sorted(x.tobytes() for x in expected)
    assert sum(nbytes for _, nbytes, _ in by_rank) == expected.nbytes
    (_, second), _, state = _epoch(MPI.COMM_SELF, folder)
    resumed = np.concatenate([batches[0] for batches, *_ in pool.run(_epoch, folder, state)])
    assert sorted(x.tobytes() for x in resumed) == sorted(x.tobytes() for x in second)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"axes": "TCYX"}, "T: 6, Z: 3, C: 2, Y: 20, X: 24"),
        ({"samples": "Q"}, "an axis 'Q'"),
        ({"axes": "TTZYX"}, "no axes"),
        ({"samples": "Y"}, "no axes"),
        ({"axes": {"T": 4}}, "planes: 36"),
        ({"samples": "T", "ragged": True}, "as they are stored"),
    ],
)
def test_other_axes_are_errors(folder: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(FormatError, match=text):
        open_dataset(folder / "imagej.tif", inputs="image", **options)
