"""Pairs of images and masks: known names, given names, several masks for an image; expected values by Pillow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from matex_data import DecodeError, FormatError, open_dataset
from tests.support.ranks import Pool

SIZE = (12, 10)
KNOWN = [
    ("images", "masks"),
    ("imagesTr", "labelsTr"),
    ("CameraRGB", "CameraMask"),
    ("CameraRGB", "CameraSeg"),
    ("train_images", "train_masks"),
    ("images_train", "annotations_train"),
    ("JPEGImages", "SegmentationClass"),
    ("Images", "GroundTruth"),
    ("retina_images", "vessel_masks"),
    ("imgs", "ground_truth"),
]


def numbers(seed: int, shape: tuple[int, ...] = SIZE) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 4, shape, np.uint8)


def save(path: Path, array: NDArray[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


def write(folder: Path, images: str, masks: str, count: int = 3, ends: tuple[str, str] = ("", "")) -> None:
    for i in range(count):
        save(folder / images / f"scan{i}{ends[0]}.png", numbers(i, (*SIZE, 3)))
        save(folder / masks / f"scan{i}{ends[1]}.png", numbers(100 + i))


def check(data: Any, count: int = 3) -> None:
    found = data.load()
    np.testing.assert_array_equal(found["image"], [numbers(i, (*SIZE, 3)) for i in range(count)])
    np.testing.assert_array_equal(found["mask"], [numbers(100 + i) for i in range(count)])
    assert "label" not in found


@pytest.mark.parametrize(("images", "masks"), KNOWN)
def test_known_names(tmp_path: Path, images: str, masks: str) -> None:
    write(tmp_path, images, masks)
    check(open_dataset(tmp_path))


@pytest.mark.parametrize("ends", [("_0000", ""), ("", "_mask"), ("_0000", "_seg")])
def test_ends_of_file_names(tmp_path: Path, ends: tuple[str, str]) -> None:
    write(tmp_path, "imagesTr", "labelsTr", ends=ends)
    check(open_dataset(tmp_path))


def test_images_without_masks_lie_beside(tmp_path: Path) -> None:
    write(tmp_path, "imagesTr", "labelsTr")
    save(tmp_path / "imagesTs" / "scan9.png", numbers(9, (*SIZE, 3)))
    with pytest.warns(UserWarning, match="lie beside.*'imagesTs/scan9.png'"):
        check(open_dataset(tmp_path))


def test_two_pairs_are_named_by_an_option(tmp_path: Path) -> None:
    write(tmp_path, "imagesTr", "labelsTr")
    write(tmp_path, "imagesTs", "labelsTs", 2)
    with pytest.raises(FormatError, match=r"not clear[\s\S]*'imagesTs'[\s\S]*pairs=\('imagesTr', 'labelsTr'\)"):
        open_dataset(tmp_path)
    with pytest.warns(UserWarning, match="4 files lie beside"):
        check(open_dataset(tmp_path, pairs=("imagesTr", "labelsTr")))
    with pytest.warns(UserWarning, match="6 files lie beside"):
        check(open_dataset(tmp_path, pairs=["imagesTs", "labelsTs"], layout="pairs"), 2)


def test_unknown_names_are_classes_or_pairs_only_if_the_user_says_so(tmp_path: Path) -> None:
    write(tmp_path, "left", "wanted")
    with pytest.raises(FormatError, match=r"layout='classes', or pairs=\('left', 'wanted'\)"):
        open_dataset(tmp_path)
    check(open_dataset(tmp_path, pairs=("left", "wanted")))
    classes = open_dataset(tmp_path, layout="classes", mode="gray").load()
    assert classes["label"].tolist() == [0] * 3 + [1] * 3
    (tmp_path / "wanted" / "scan1.png").rename(tmp_path / "wanted" / "scan7.png")  # no longer one to one
    assert open_dataset(tmp_path, mode="gray").schema["label"].attributes["class_names"] == ("left", "wanted")


def test_ends_of_file_names_do_not_hide_that_they_match(tmp_path: Path) -> None:
    write(tmp_path, "left", "wanted", ends=("", "_mask"))
    with pytest.raises(FormatError, match="layout='classes'"):
        open_dataset(tmp_path)
    check(open_dataset(tmp_path, pairs=("left", "wanted")))


def test_numbered_folders_are_classes(tmp_path: Path) -> None:
    write(tmp_path, "class0", "class1")
    assert len(open_dataset(tmp_path, mode="gray", inputs="image", targets="label")) == 6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pairs": ("left", "wantd")}, "no folder of that name[\\s\\S]*'wanted'[\\s\\S]*'wantd'"),
        ({"pairs": ("left",)}, "two folders"),
        ({"pairs": "left"}, "two folders"),
        ({"pairs": ("left", "wanted"), "layout": "classes"}, "layout 'pairs'"),
        ({"layout": "pairs"}, "not clear[\\s\\S]*pairs="),
    ],
)
def test_wrong_names(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    write(tmp_path, "left", "wanted")
    with pytest.raises(FormatError, match=words):
        open_dataset(tmp_path, **options)


def test_pairs_are_in_folders(tmp_path: Path) -> None:
    save(tmp_path / "a.png", numbers(1))
    (tmp_path / "table.csv").write_text("file,label\na.png,1\n")
    for path in ("table.csv", "a.png"):
        with pytest.raises(FormatError, match=r"pairs|'pairs'"):
            open_dataset(tmp_path / path, pairs=("images", "masks"))


# A folder for each image


def nuclei(folder: Path, shapes: list[tuple[int, int]], masks: tuple[str, str] = ("images", "masks")) -> list[Any]:
    """Write images with a mask for each nucleus, as of the Data Science Bowl 2018, and return the joined masks."""
    joined = []
    for i, shape in enumerate(shapes):
        labels = np.random.default_rng(i).integers(0, 3 + i, shape).astype("u2")
        save(folder / f"id{i}" / masks[0] / f"id{i}.png", numbers(i, (*shape, 3)))
        for number in range(1, 3 + i):
            nucleus = np.where(labels == number, 255, 0).astype("u1")
            save(folder / f"id{i}" / masks[1] / f"nucleus{number}.png", nucleus)
        joined.append(labels)
    return joined


def test_several_masks_of_an_image(tmp_path: Path) -> None:
    joined = nuclei(tmp_path, [SIZE] * 12)
    data = open_dataset(tmp_path, inputs="image", targets="mask")
    assert data.schema["mask"].dtype == np.uint16 and data.schema["mask"].attributes == {"mode": "instances"}
    images, masks = next(iter(data.batches(12)))
    np.testing.assert_array_equal(masks, joined)  # with id10 behind id9, and nucleus10 behind nucleus9
    np.testing.assert_array_equal(images, [numbers(i, (*SIZE, 3)) for i in range(12)])
    assert open_dataset(tmp_path).load()["path"][1] == b"id1/images/id1.png"


def test_several_masks_of_images_of_different_sizes(tmp_path: Path) -> None:
    joined = nuclei(tmp_path, [(8, 9), (20, 5), (6, 6)])
    for found, wanted in zip(open_dataset(tmp_path, ragged=True).load()["mask"], joined, strict=True):
        np.testing.assert_array_equal(found, wanted)
    small = open_dataset(tmp_path, size=(4, 3), mode="rgb").load()["mask"]
    for found, labels in zip(small, joined, strict=True):
        wanted = Image.fromarray(labels.astype("u1")).resize((3, 4), Image.Resampling.NEAREST)
        np.testing.assert_array_equal(found, np.asarray(wanted))


def _masks(comm: Any, folder: str) -> list[list[NDArray[Any]]]:
    data = open_dataset(folder, inputs="mask", comm=comm)
    return [list(batch) for batch in data.batches(6, shuffle=True, seed=3)]


@pytest.mark.rank_counts(1, 3, slow=(2,))  # which divide the batch
def test_several_masks_on_ranks(pool: Pool, tmp_path: Path) -> None:
    joined = nuclei(tmp_path, [SIZE] * 12)
    found = pool.run(_masks, str(tmp_path))
    read = sorted(mask.tobytes() for rank in found for batch in rank for mask in batch)
    assert read == sorted(mask.tobytes() for mask in joined)


def test_one_mask_of_each_image_is_as_it_is_stored(tmp_path: Path) -> None:
    for i in range(3):
        save(tmp_path / f"id{i}" / "images" / f"{i}.png", numbers(i, (*SIZE, 3)))
        save(tmp_path / f"id{i}" / "masks" / f"nucleus{i}.png", numbers(100 + i))
    check(open_dataset(tmp_path))
    check(open_dataset(tmp_path, pairs=("images", "masks")))


def test_several_images_in_each_folder_are_matched_by_name(tmp_path: Path) -> None:
    for part, ids in (("a", (0, 1)), ("b", (2,))):
        for i in ids:
            save(tmp_path / part / "left" / f"{i}.png", numbers(i, (*SIZE, 3)))
            save(tmp_path / part / "wanted" / f"{i}.png", numbers(100 + i))
    check(open_dataset(tmp_path, pairs=("left", "wanted")))


def test_a_folder_lacks_masks(tmp_path: Path) -> None:
    nuclei(tmp_path, [SIZE] * 3)
    save(tmp_path / "id7" / "images" / "id7.png", numbers(7, (*SIZE, 3)))
    with pytest.raises(FormatError, match=r"as others have[\s\S]*'id0/masks'[\s\S]*'id7'"):
        open_dataset(tmp_path)


@pytest.mark.parametrize("fault", ["overlap", "size", "colours", "pages"])
def test_masks_that_cannot_be_joined(tmp_path: Path, fault: str) -> None:
    nuclei(tmp_path, [SIZE] * 3)
    path = tmp_path / "id1" / "masks" / "nucleus3.png"
    options: dict[str, Any] = {"ragged": True} if fault == "size" else {}
    if fault == "pages":
        path = path.with_suffix(".tif")
        Image.fromarray(numbers(0)).save(path, save_all=True, append_images=[Image.fromarray(numbers(1))])
    elif fault == "colours":
        for mask in tmp_path.glob("*/masks/*"):
            save(mask, numbers(0, (*SIZE, 3)))
    else:
        save(path, np.ones(SIZE if fault == "overlap" else (5, 5), "u1"))
    words = {"overlap": "overlap", "size": "differ in size", "colours": "cannot be joined", "pages": "several pages"}
    with pytest.raises((DecodeError, FormatError), match=words[fault]):
        open_dataset(tmp_path, **options).load()
