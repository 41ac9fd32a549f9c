"""Sections of images: those of Keras and torchvision, and the same for an image and its mask in every epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from PIL import Image

from matex_data import FormatError, PartitionError, open_dataset
from matex_data.readers.images.decoding import ImageOptions, decode_image
from matex_data.readers.images.decoding.framing import random_box
from tests.support.ranks import Pool


def _bytes(pixels: Any, tmp_path: Path, kind: str = "png") -> bytes:
    path = tmp_path / f"image.{kind}"
    Image.fromarray(pixels).save(path)
    return path.read_bytes()


def _pixels(*shape: int) -> Any:
    return np.random.default_rng(1).integers(0, 256, shape, np.uint8)


@pytest.mark.parametrize("shape", [(60, 91, 3), (91, 60, 3), (64, 64, 3), (7, 200, 3)])
@pytest.mark.parametrize("option", ["crop_to_aspect_ratio", "pad_to_aspect_ratio"])
def test_aspect_ratios_are_those_of_keras(tmp_path: Path, shape: tuple[int, ...], option: str) -> None:
    import keras

    pixels = _pixels(*shape)
    for size in ((48, 48), (90, 60), (33, 71)):
        image = pixels[None].astype("f4")
        expected = keras.ops.image.resize(image, size, interpolation="bilinear", antialias=True, **{option: True})[0]
        found = decode_image(_bytes(pixels, tmp_path), ImageOptions("rgb", size, **{option: True}))
        assert np.abs(found - np.asarray(expected)).max() <= 2


def test_a_center_of_the_size_itself_is_cut_out(tmp_path: Path) -> None:
    pixels = _pixels(60, 90, 3)
    for kind in ("png", "jpg"):
        data = _bytes(pixels, tmp_path, kind)
        whole = decode_image(data, ImageOptions("rgb")).copy()
        found = decode_image(data, ImageOptions("rgb", (60, 60), crop_to_aspect_ratio=True))
        np.testing.assert_array_equal(found, whole[:, 15:75])
        padded = decode_image(data, ImageOptions("rgb", (90, 90), pad_to_aspect_ratio=True))
        np.testing.assert_array_equal(padded[15:75], whole)
        assert not padded[:15].any() and not padded[75:].any()


def test_random_sections_are_distributed_as_those_of_torchvision() -> None:
    scale, ratio = (0.2, 0.6), (3 / 4, 4 / 3)
    boxes = [random_box(120, 200, scale, ratio, np.random.default_rng(seed)) for seed in range(2000)]
    rows = np.array([box.bottom - box.top for box in boxes])
    columns = np.array([box.right - box.left for box in boxes])
    area, aspect = rows * columns / (120 * 200), columns / rows
    assert 0.19 < area.min() < 0.21 and 0.55 < area.max() < 0.61
    assert 0.73 < aspect.min() < 0.77 and 1.30 < aspect.max() < 1.36
    assert abs(np.log(aspect).mean()) < 0.05  # uniform in its logarithm, but for sections that leave the image
    tops = np.array([box.top / (120 - box.bottom + box.top) for box in boxes if box.bottom - box.top < 120])
    assert abs(tops.mean() - 0.5) < 0.03
    assert random_box(10, 1000, (0.9, 1.0), ratio, np.random.default_rng(0)) == (0, 493, 10, 506)  # torchvision: center


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of 24 images and masks, of equal but for a factor, with a table of them."""
    folder, rng = tmp_path_factory.mktemp("pairs"), np.random.default_rng(3)
    (folder / "scans").mkdir()
    (folder / "drawn").mkdir()
    lines = ["picture,segmentation,patient"]
    for number in range(24):
        mask = rng.integers(0, 4, (40, 50), np.uint8)
        Image.fromarray(mask * 60).save(folder / "scans" / f"{number}.png")
        Image.fromarray(mask).save(folder / "drawn" / f"m{number}.png")
        lines.append(f"scans/{number}.png,drawn/m{number}.png,{number % 5}")
    (folder / "table.csv").write_text("\n".join(lines) + "\n")
    return folder


RANDOM = {"size": (16, 20), "resample": "nearest", "random_resized_crop": (0.2, 1)}
RANDOM |= {"random_flip": "horizontal_and_vertical", "augment_seed": 4}


def _epochs(comm: MPI.Intracomm, pairs: Path, shuffle: bool, start: Any) -> Any:
    data = open_dataset(pairs / "table.csv", inputs="image", targets="mask", comm=comm, **RANDOM)
    batches = data.batches(12, shuffle=shuffle, seed=1, start=start)
    return [(x.copy(), y.copy()) for _ in range(2) for x, y in batches], batches.state(2)


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_image_and_its_mask_are_cut_alike_on_any_number_of_ranks(pairs: Path, pool: Pool, shuffle: bool) -> None:
    expected, state = _epochs(MPI.COMM_SELF, pairs, shuffle, None)
    for image, mask in expected:
        np.testing.assert_array_equal(image, mask * 60)
        assert len({sample.tobytes() for sample in mask}) == len(mask)
    if not shuffle:
        assert all((one != other).any() for (one, _), (other, _) in zip(expected[:2], expected[2:], strict=True))
    by_rank = pool.run(_epochs, pairs, shuffle, state)
    for step, (image, mask) in enumerate(expected[2:]):
        np.testing.assert_array_equal(np.concatenate([found[step][0] for found, _ in by_rank]), image)
        np.testing.assert_array_equal(np.concatenate([found[step][1] for found, _ in by_rank]), mask)


@pytest.mark.parametrize(
    ("flip", "axes"), [("horizontal", [1]), ("vertical", [0]), ("horizontal_and_vertical", [0, 1])]
)
def test_images_of_any_size_are_mirrored_half_of_the_time(tmp_path: Path, flip: str, axes: list[int]) -> None:
    pixels = _pixels(5, 8, 3)
    data, options = _bytes(pixels, tmp_path), ImageOptions("rgb", None, random_flip=flip)
    found = [decode_image(data, options, seed=seed).tobytes() for seed in range(200)]
    mirrored = {np.flip(pixels, chosen).tobytes() for chosen in ([], axes[:1], axes[-1:], axes)}
    assert set(found) == mirrored
    shares = [found.count(image) / len(found) for image in mirrored]
    assert all(abs(share - 1 / len(mirrored)) < 0.12 for share in shares), shares


def test_a_table_with_two_columns_of_files(pairs: Path) -> None:
    data = open_dataset(pairs / "table.csv")
    assert list(data.schema) == ["image", "mask", "patient", "path"]
    for number in (7, 20):
        sample = data[number]
        np.testing.assert_array_equal(sample["mask"], np.asarray(Image.open(pairs / f"drawn/m{number}.png")))
        np.testing.assert_array_equal(sample["image"], np.asarray(Image.open(pairs / f"scans/{number}.png")))
        assert sample["patient"] == number % 5
    table = pairs / "three.csv"
    table.write_text("scans/1.png,drawn/m1.png,scans/2.png\n")
    with pytest.raises(FormatError, match="3 columns"):
        open_dataset(table)
    table.write_text("scans/1.png,drawn/m1.png\nscans/2.png,drawn/none.png\n")
    with pytest.raises(Exception, match=r"none\.png"):
        open_dataset(table)


def test_random_sections_are_not_kept_in_memory(pairs: Path) -> None:
    data = open_dataset(pairs / "table.csv", inputs="image", targets="mask", **RANDOM)
    with pytest.raises(PartitionError, match="the same random numbers in every epoch"):
        data.batches(12, shuffle="global")
    kept = open_dataset(pairs / "table.csv", inputs="image", targets="mask", cache="memory", **RANDOM)
    with pytest.raises(PartitionError, match="the same random numbers in every epoch"):
        kept.batches(12, shuffle=True)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"crop_to_aspect_ratio": True}, "size=None"),
        ({"size": (9, 9), "crop_to_aspect_ratio": True, "pad_to_aspect_ratio": True}, "and pad_to_aspect_ratio"),
        ({"size": (9, 9), "random_resized_crop": (0.5, 2)}, r"\(0.5, 2\)"),
        ({"size": (9, 9), "random_resized_crop": (0, 1)}, r"\(0, 1\)"),
        ({"random_flip": "horisontal"}, "one of 'horizontal'"),
        ({"image_size": (9, 9)}, r"remedy: the size of images is size="),
        ({"validation_split": 0.2}, r"remedy: split the data set: train, valid = data\.split"),
        ({"transform": print}, r"remedy: give the data set a function"),
        ({"label_mode": None}, r"remedy: labels are integers"),
        ({"interpolation": "nearest"}, r"remedy: the method is resample="),
    ],
)
def test_options_of_others_are_explained(pairs: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(FormatError, match=text):
        open_dataset(pairs / "scans", **options)
