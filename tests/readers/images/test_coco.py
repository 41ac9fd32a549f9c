"""Annotations of COCO: pycocotools writes and reads them, Pillow reads the images."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from PIL import Image

from matex_data import DataError, FieldNotFound, FormatError, concat, open_dataset
from matex_data.readers import HEAD_BYTES, detect
from tests.support.format_suite import Case, FormatSuite, same
from tests.support.ranks import Pools

coco = pytest.importorskip("pycocotools.coco")

CATEGORIES = [{"id": 18, "name": "dog"}, {"id": 3, "name": "car"}, {"id": 90, "name": "brush"}]
NAMES = ("car", "dog", "brush")  # by their ids
LEFT_OUT = "ignore:[\\s\\S]*left out:UserWarning"


def content(folder: Path, count: int, seed: int = 0) -> dict[str, Any]:
    """Write images into a folder, and return annotations of them: of some none, in no order."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    images, annotations = [], []
    for number in rng.permutation(count).tolist():
        name = f"{seed}_{number:012}.png"
        Image.fromarray(rng.integers(0, 256, (6, 8, 3), np.uint8)).save(folder / name)
        image_id = 1000 * seed + 7 * number
        images.append({"id": image_id, "file_name": name, "height": 6, "width": 8, "date_captured": "2013-11-14"})
        for _ in range(number % 4):
            x, y, width, height = rng.uniform(0, 4, 4).round(2).tolist()
            annotations.append(
                {
                    "id": len(annotations) + 10_000 * seed,
                    "image_id": image_id,
                    "category_id": int(rng.choice([3, 18, 90])),
                    "bbox": [x, y, width, height],
                    "area": width * height,
                    "iscrowd": 0,
                    "segmentation": [[x, y, x + width, y, x + width, y + height][: 4 + 2 * (number % 2)]],
                    "keypoints": rng.integers(0, 8, 6).tolist(),
                }
            )
    rng.shuffle(annotations)
    return {"info": {"year": 2017}, "images": images, "annotations": annotations, "categories": CATEGORIES}


def write(path: Path, document: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return path


def lists(arrays: list[Any], shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    found = np.empty(len(arrays), object)
    for row, array in enumerate(arrays):
        found[row] = np.array(array, dtype).reshape(-1, *shape)
    return found


def by_pycocotools(path: Path, images: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Return the fields as pycocotools and Pillow read them."""
    with contextlib.redirect_stdout(io.StringIO()):
        read = coco.COCO(str(path))
    entries = read.dataset["images"]
    of_images = [read.loadAnns(read.getAnnIds(imgIds=[entry["id"]])) for entry in entries]
    label = {category: number for number, category in enumerate(sorted(read.getCatIds()))}
    fields = {
        "image": np.stack([np.asarray(Image.open(images / entry["file_name"])) for entry in entries]),
        "image_id": np.array([entry["id"] for entry in entries]),
        "label": lists([[label[a["category_id"]] for a in some] for some in of_images], (), "i8"),
        "path": np.array([entry["file_name"].encode() for entry in entries], object),
        "date_captured": np.array([entry["date_captured"].encode() for entry in entries], object),
        "height": np.array([entry["height"] for entry in entries]),
        "width": np.array([entry["width"] for entry in entries]),
    }
    kinds = {"id": ((), "i8"), "category_id": ((), "i8"), "iscrowd": ((), "i8"), "area": ((), "f8")}
    for name, (shape, dtype) in {**kinds, "bbox": ((4,), "f8"), "keypoints": ((6,), "i8")}.items():
        own = "annotation_id" if name == "id" else name
        fields[own] = lists([[a[name] for a in some] for some in of_images], shape, dtype)
    return fields


@pytest.mark.filterwarnings(LEFT_OUT)
class TestCoco(FormatSuite):
    storable = False

    def write(self, folder: Path) -> Case:
        parts = []
        for number, rows in enumerate((61, 47, 37)):
            path = write(folder / "annotations" / f"{number}.json", content(folder / "images", rows, number))
            parts.append(by_pycocotools(path, folder / "images"))
        expected = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        options = {"root": str(folder / "images")}
        return Case(str(folder / "annotations" / "*.json"), expected, "image_id", options)

    def damage(self, folder: Path) -> Case:
        case = self.write(folder)
        path = folder / "annotations" / "1.json"
        path.write_bytes(path.read_bytes()[:-100])
        return case


@pytest.mark.filterwarnings(LEFT_OUT)
def test_fields_are_described(tmp_path: Path) -> None:
    path = write(tmp_path / "instances.json", content(tmp_path, 5))
    assert detect(str(path), path.read_bytes()[:HEAD_BYTES]) == "images"
    with pytest.warns(UserWarning, match=r"1 field[\s\S]*'segmentation': it is no number"):
        schema = open_dataset(path).schema
    assert schema["bbox"].inner == (None, 4) and schema["bbox"].dtype == np.float64
    assert schema["label"].attributes["class_names"] == NAMES
    with pytest.raises(FieldNotFound, match=r"segmentation[\s\S]*no number, nor a list"):
        open_dataset(path, inputs="segmentation")
    packed = tmp_path / "instances.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    same(open_dataset(packed, inputs="bbox").load()["bbox"], open_dataset(path, inputs="bbox").load()["bbox"])


@pytest.mark.filterwarnings(LEFT_OUT)
@pytest.mark.rank_counts(2, 3)
def test_detection_on_ranks(ranks: Pools, tmp_path: Path) -> None:
    """Padded boxes and labels of shuffled batches belong to the images, on any number of ranks."""
    path = write(tmp_path / "instances.json", content(tmp_path, 50))
    expected = by_pycocotools(path, tmp_path)
    rows = {number: row for row, number in enumerate(expected["image_id"].tolist())}
    for size in (1, 2, 3):
        found = [batch for batches in ranks(size).run(_padded, str(path), timeout=60) for batch in batches]
        numbers = np.concatenate([batch["image_id"] for batch in found])
        assert sorted(numbers.tolist()) == sorted(rows)
        for batch in found:
            columns = (batch[name] for name in ("image", "image_id", "bbox", "bbox_mask"))
            for image, number, boxes, there in zip(*columns, strict=True):
                same(image, expected["image"][rows[number]])
                same(boxes[there.reshape(len(boxes), -1)[:, 0]], expected["bbox"][rows[number]])


def _padded(comm: MPI.Intracomm, path: str) -> list[dict[str, Any]]:
    names = ["image", "image_id", "bbox", "bbox_mask", "label"]
    data = open_dataset(path, inputs=names, pad={"bbox": 4, "label": 4}, comm=comm)
    return list(data.batches(12, shuffle=True, seed=2, remainder="keep"))


def test_whole_numbers_missing_ones_and_captions(tmp_path: Path) -> None:
    document = content(tmp_path, 4)
    of = document["images"][0]["id"]
    document["annotations"] = [
        {"id": "b", "image_id": of, "caption": "two dogs", "bbox": [1, 2, 3, 4], "score": 1, "width": 5},
        {"id": "a", "image_id": of, "caption": "a car", "bbox": [1, 2, 3, 5]},
    ]
    path = write(tmp_path / "captions.json", document)
    with pytest.warns(UserWarning, match=r"2 fields[\s\S]*'annotation_id'[\s\S]*'caption': it is no number"):
        data = open_dataset(path)
    found = data.load()
    same(found["bbox"][0], np.array([[1.0, 2, 3, 4], [1, 2, 3, 5]]))
    same(found["score"][0], np.array([1, np.nan]))
    assert found["width"].tolist() == [8] * 4 and found["annotation_width"][0].tolist()[0] == 5
    assert "label" not in data.schema and [len(boxes) for boxes in found["bbox"]] == [2, 0, 0, 0]


def test_images_alone(tmp_path: Path) -> None:
    document = content(tmp_path, 4)
    path = write(tmp_path / "test.json", {"images": document["images"], "categories": CATEGORIES})
    assert set(open_dataset(path).schema) == {"image", "image_id", "height", "width", "date_captured", "path"}


def _with(document: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**document, **changes}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: _with(d, images=d["images"] + d["images"][:1]), "ids of the images are no different"),
        (lambda d: _with(d, images=[{**d["images"][0], "id": [1]}]), "ids of the images"),
        (lambda d: _with(d, images=[{"id": 1}], annotations=[]), "names no image"),
        (lambda d: _with(d, images=[]), "lists no images"),
        (lambda d: _with(d, images=[3]), "'images' is no list of objects"),
        (lambda d: _with(d, annotations={"a": 1}), "'annotations' is no list of objects"),
        (lambda d: _with(d, annotations=[{"image_id": 10**9}]), "none of the images[\\s\\S]*1000000000"),
        (lambda d: _with(d, annotations=[{"bbox": [1, 2, 3, 4]}]), "none of the images"),
        (lambda d: _with(d, categories=CATEGORIES[:1]), "none of the categories"),
        (lambda d: _with(d, categories=[*CATEGORIES, {"name": "cat"}]), "ids of the categories"),
        (
            lambda d: _with(d, images=[{**d["images"][0], "file_name": "absent.png"}]),
            "none of the images|not exist",
        ),
    ],
)
def test_damaged_annotations(tmp_path: Path, change: Any, message: str) -> None:
    path = write(tmp_path / "instances.json", change(content(tmp_path, 6)))
    with pytest.raises(DataError, match=message):
        open_dataset(path, format="images")


def test_an_image_of_a_url_has_to_be_trusted(tmp_path: Path) -> None:
    document = content(tmp_path, 2)
    document["images"][1]["file_name"] = "http://127.0.0.1:9/secret.png"
    with pytest.raises(DataError, match="not trusted"):
        open_dataset(write(tmp_path / "instances.json", document))


@pytest.mark.filterwarnings(LEFT_OUT)
def test_files_with_other_classes_are_refused(tmp_path: Path) -> None:
    first = write(tmp_path / "a.json", content(tmp_path, 5))
    document = content(tmp_path, 5)
    second = write(tmp_path / "b.json", _with(document, categories=[{**CATEGORIES[0], "name": "cat"}, *CATEGORIES[1:]]))
    with pytest.raises(FormatError, match="classes"):
        open_dataset([first, second])
    shutil.copy(first, second)
    assert len(concat([open_dataset(first), open_dataset(second)])) == 10
