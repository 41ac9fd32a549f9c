"""Patches of images and volumes: a grid, and random ones, compared with NumPy."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from mpi4py import MPI
from PIL import Image

import matex_data as md
from tests.support.ranks import Pool, Pools

IMAGES, HEIGHT, WIDTH, PATCH = 10, 50, 70, (16, 20)
X = np.random.default_rng(0).integers(0, 255, (IMAGES, HEIGHT, WIDTH, 3), np.uint8)
MASK, LABEL = X[..., 0] > 100, np.arange(IMAGES) % 3
CHUNKED = {"chunks": (2, 16, 16, 3), "compression": "gzip", "shuffle": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the images in files of several layouts."""
    folder = tmp_path_factory.mktemp("patches")
    for name, options in {"contiguous": {}, "chunked": CHUNKED, "whole": {"chunks": (1, *X.shape[1:])}}.items():
        (folder / name).mkdir()
        for number, rows in enumerate((slice(0, 7), slice(7, IMAGES))):
            with h5py.File(folder / name / f"{number}.h5", "w") as file:
                file.create_dataset("x", data=X[rows], **options)
                file["mask"], file["label"] = MASK[rows], LABEL[rows]
                file["name"] = [f"image {n}" for n in range(IMAGES)[rows]]
    (folder / "png").mkdir()
    for number, image in enumerate(X):
        Image.fromarray(image).save(folder / "png" / f"{number:02}.png")
    return folder


def _corners() -> list[tuple[int, int]]:
    return list(product((0, 16, 32, HEIGHT - 16), (0, 20, 40, WIDTH - 20)))


def _grid(images: Any) -> Any:
    height, width = PATCH
    return np.stack([image[y : y + height, x : x + width] for image in images for y, x in _corners()])


def _loaded(comm: Any, path: Path, **options: Any) -> Any:
    data = md.open_dataset(path, comm=comm, patch=PATCH, **options)
    return data.load(), list(data.batches(12, shuffle=True, seed=3, remainder="keep"))


@pytest.mark.rank_counts(3, slow=(1,))
@pytest.mark.parametrize("name", ["contiguous", "chunked", "whole"])
def test_a_grid_is_all_of_each_image(pool: Pool, folder: Path, name: str) -> None:
    by_rank = pool.run(_loaded, folder / name)
    count = len(_corners())
    found = {key: np.concatenate([loaded[key] for loaded, _ in by_rank]) for key in by_rank[0][0]}
    np.testing.assert_array_equal(found["x"], _grid(X))
    np.testing.assert_array_equal(found["mask"], _grid(MASK))
    np.testing.assert_array_equal(found["label"], np.repeat(LABEL, count))
    assert found["name"].tolist() == [f"image {n}".encode() for n in np.repeat(np.arange(IMAGES), count)]
    batches = [batch for _, of_rank in by_rank for batch in of_rank]
    shuffled = np.concatenate([batch["x"] for batch in batches])
    assert sorted(map(bytes, shuffled)) == sorted(map(bytes, _grid(X)))
    for batch in batches:
        np.testing.assert_array_equal(batch["mask"], batch["x"][..., 0] > 100)


def test_a_grid_of_images_of_files(folder: Path) -> None:
    found = md.open_dataset(folder / "png", comm=MPI.COMM_SELF, patch=PATCH).load()
    np.testing.assert_array_equal(found["image"], _grid(X))


def _drawn(comm: Any, path: Path) -> Any:
    data = md.open_dataset(path, comm=comm, inputs="x", targets="mask", patch=PATCH, patches_per_image=6)
    batches = data.batches(12, shuffle=True, seed=1)
    return len(data), [[(x, y) for x, y in batches] for _ in range(2)], data.load()["x"]


def _joined(outcomes: list[Any], epoch: int) -> list[Any]:
    steps = zip(*(epochs[epoch] for _, epochs, _ in outcomes), strict=True)
    return [sorted(bytes(x) for of_rank, _ in step for x in of_rank) for step in steps]


@pytest.mark.parametrize("name", ["contiguous", "chunked", "whole"])
def test_random_patches_are_the_same_on_any_number_of_ranks(ranks: Pools, folder: Path, name: str) -> None:
    alone, shared = (ranks(size).run(_drawn, folder / name) for size in (1, 3))
    assert alone[0][0] == 6 * IMAGES
    for epoch in range(2):
        assert _joined(alone, epoch) == _joined(shared, epoch)
    assert _joined(alone, 0) != _joined(alone, 1)
    for x, y in alone[0][1][0]:
        np.testing.assert_array_equal(y, x[..., 0] > 100)
    corners = {
        (image, y, x)
        for number, patch in enumerate(alone[0][2])
        for image in [number // 6]
        for y in range(HEIGHT - 15)
        for x in range(WIDTH - 19)
        if patch[0, 0].tolist() == X[image, y, x].tolist() and np.array_equal(patch, X[image, y : y + 16, x : x + 20])
    }
    assert len(corners) >= 6 * IMAGES  # each patch is one of its image
    assert len({(y, x) for _, y, x in corners}) > 30


def test_chunks_without_a_part_of_a_patch_are_not_read(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 255, (4, 512, 512), np.uint8)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=data, chunks=(1, 32, 32), compression="gzip")
    drawn = md.open_dataset(tmp_path / "a.h5", comm=MPI.COMM_SELF, inputs="x", patch=(32, 32), patches_per_image=2)
    assert sum(len(x) for x in drawn.batches(4, shuffle=True, seed=1)) == 8
    assert drawn.profile.bytes < 0.05 * data.nbytes
    grid = md.open_dataset(tmp_path / "a.h5", comm=MPI.COMM_SELF, inputs="x", patch=(48, 48))
    assert len(grid.load()["x"]) == 4 * 11 * 11
    assert grid.profile.bytes < 1.2 * data.nbytes  # each chunk once, though up to four patches have a part of it


def test_patches_of_an_image_stay_in_one_set(folder: Path) -> None:
    data = md.open_dataset(folder / "chunked", comm=MPI.COMM_SELF, inputs="x", patch=PATCH, where="mean(x) > 0")
    assert data.value_counts("label") == {
        int(n): int(c) * 16 for n, c in zip(*np.unique(LABEL, return_counts=True), strict=True)
    }
    for parts in (data.split(0.5, 0.5, seed=1), data.split(0.3, 0.7)):
        names = [set(part.load(fields=["name"])["name"].tolist()) for part in parts]
        assert not names[0] & names[1] and len(names[0] | names[1]) == IMAGES
        assert all(len(part) == 16 * len(of_part) for part, of_part in zip(parts, names, strict=True))


def test_volumes_and_whole_axes(tmp_path: Path) -> None:
    volume = np.arange(2 * 6 * 8 * 10.0).reshape(2, 6, 8, 10)
    np.save(tmp_path / "a.npy", volume)
    found = md.open_dataset(tmp_path / "a.npy", comm=MPI.COMM_SELF, patch=(3, 4, 5)).load()
    (name,) = found
    corners = list(product((0, 3), (0, 4), (0, 5)))
    expected = [v[z : z + 3, y : y + 4, x : x + 5] for v in volume for z, y, x in corners]
    np.testing.assert_array_equal(found[name], expected)
    levels = md.open_dataset(tmp_path / "a.npy", comm=MPI.COMM_SELF, patch=(None, 4, 5)).load()[name]
    np.testing.assert_array_equal(levels[1], volume[0, :, :4, 5:])
    np.save(tmp_path / "empty.npy", np.zeros((3, 0, 4)))
    empty = md.open_dataset(tmp_path / "empty.npy", comm=MPI.COMM_SELF, patch=(None, 2)).load()
    assert [values.shape for values in empty.values()] == [(6, 0, 2)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch": (60, 20)}, "smaller than a patch"),
        ({"patch": (4, 4, 3, 1)}, "no field has axes"),
        ({"patch": (0, 4)}, "too small"),
        ({"patches_per_image": 3}, "needs patch="),
        ({"patch": (4, 4), "flatten": "x"}, "excludes"),
    ],
)
def test_what_is_no_patch_is_an_error(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(md.DataError, match=message):
        md.open_dataset(folder / "chunked", comm=MPI.COMM_SELF, **options)


def test_patches_of_files_of_different_numbers_of_images(tmp_path: Path) -> None:
    images = np.arange(8 * 56.0).reshape(8, 8, 7)
    for number, rows in enumerate((slice(0, 2), slice(2, 8))):
        np.savez(tmp_path / f"{number}.npz", x=images[rows])
    found = md.open_dataset(tmp_path, patch=(1, 1), comm=MPI.COMM_SELF).load()["x"]
    np.testing.assert_array_equal(found.ravel(), images.ravel())
    assert len(md.open_dataset(tmp_path, patch=(2, 2), patches_per_image=300, comm=MPI.COMM_SELF)) == 8 * 300


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("option", ["patch", "flatten"])
def test_sets_of_selected_patches_and_objects_share_no_image(option: str, seed: int | None) -> None:
    images = np.random.default_rng(0).normal(size=(40, 8, 8))
    x = images if option == "patch" else [image.ravel()[: number % 7 * 3] for number, image in enumerate(images)]
    how: dict[str, Any] = {"patch": (2, 2)} if option == "patch" else {"flatten": "x"}
    data = md.open_dataset({"x": x, "n": np.arange(40)}, comm=MPI.COMM_SELF, **how)
    data = data.where("max(x) > 0.4" if option == "patch" else "x > 0.4")
    for sets in (data.split(0.5, 0.3, 0.2, seed=seed), *data.kfold(3, seed=seed)):
        numbers = [part.load(fields="n")["n"] for part in sets]
        np.testing.assert_array_equal(np.sort(np.concatenate(numbers)), data.load()["n"])
        assert sum(len(set(part)) for part in numbers) == len(set(data.load()["n"]))
