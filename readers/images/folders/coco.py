"""Annotations of COCO: a JSON object with lists of images, annotations and categories.

Format: https://cocodataset.org/#format-data. The annotations of an image are lists, an element for each of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from matex_data.errors import FormatError
from matex_data.readers.formats import COCO_BEGIN, JSON_SUFFIXES
from matex_data.readers.images.folders.members import ManifestValues, columns_of, values_of
from matex_data.readers.images.texts import NumberLists

OWN = ("image", "path", "mask")  # fields that are no members
FLOATS = ("bbox", "area")  # which some tools write as whole numbers
Ids = dict[int | str, int]


def read_coco(path: str, text: bytes) -> tuple[list[Any], dict[str, ManifestValues], dict[str, str]] | None:
    """Return the files of the images, their fields, and the reason for each that cannot be read; None for another text.

    ``id`` of images and annotations is "image_id" and "annotation_id"; other members that both have are named likewise.
    "label" is the position of the category among all of them, sorted by their ids.

    Raises
    ------
    FormatError : the file is damaged, an id comes twice, or an annotation names an image or category that is not there.
    """
    document = _document(path, text)
    if document is None:
        return None
    images, annotations, categories = (
        _objects(path, document, name) for name in ("images", "annotations", "categories")
    )
    of_images, of_annotations, unread = columns_of(images), columns_of(annotations), dict[str, str]()
    files = of_images.pop("file_name", [None] * len(images))
    image_ids = of_images.pop("id", [None] * len(images))
    references = of_annotations.pop("image_id", [None] * len(annotations))
    rows = _references(path, references, "images", _numbered(path, image_ids, "images"))
    order, end = np.argsort(rows, kind="stable"), np.cumsum(np.bincount(rows, minlength=len(images)))
    columns: dict[str, ManifestValues] = {"image_id": values_of(image_ids)}
    kinds = of_annotations.get("category_id", [None])
    if categories and None not in kinds:
        names = _names(path, categories)
        labels = _references(path, kinds, "categories", {category: number for number, category in enumerate(names)})
        columns["label"] = NumberLists(labels[order], end, tuple(names.values()))
    for name, column in of_images.items():
        if name in (*OWN, *columns):
            unread[name] = "another field has the name of this member of the images"
        else:
            columns[name] = values_of(column)
    for name, column in of_annotations.items():
        own = f"annotation_{name}" if name == "id" or name in (*OWN, *columns) else name
        values = _lists(name, [column[row] for row in order.tolist()], end)
        if values is None or own in columns:
            unread[own] = "it is no number, nor a list of as many numbers, of each annotation"
        else:
            columns[own] = values
    return files, columns, unread


def _document(path: str, text: bytes) -> dict[str, Any] | None:
    """Return the object of the file; None for texts of another kind."""
    if not path.lower().endswith(JSON_SUFFIXES):
        return None
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        if re.match(COCO_BEGIN, text):
            raise FormatError("the file is no object of JSON", file=path, found=error) from error
        return None
    return document if isinstance(document, dict) and isinstance(document.get("images"), list) else None


def _objects(path: str, document: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    objects = document.get(name) or []
    if not isinstance(objects, list) or not all(isinstance(one, dict) for one in objects):
        raise FormatError(f"{name!r} is no list of objects", file=path, found=f"{objects!r:.60}")
    if name == "images" and not objects:
        raise FormatError("the file lists no images", file=path, expected="an object for each image")
    return objects


def _numbered(path: str, ids: Sequence[Any], kind: str) -> Ids:
    """Return the position of each id; raise ``FormatError`` unless all of them are different numbers or texts."""
    numbers: Ids = {}
    for number, value in enumerate(ids):
        if not isinstance(value, int | str) or value in numbers:
            problem = f"the ids of the {kind} are no different numbers"
            raise FormatError(problem, file=path, expected="an id that no other one has", found=repr(value)[:60])
        numbers[value] = number
    return numbers


def _names(path: str, categories: Sequence[Mapping[str, Any]]) -> dict[int | str, str]:
    """Return the names of the categories by their ids, in the order of the ids."""
    ids = _numbered(path, [one.get("id") for one in categories], "categories")
    names = {number: str(one.get("name", number)) for number, one in zip(ids, categories, strict=True)}
    return dict(sorted(names.items(), key=lambda item: (isinstance(item[0], str), item[0])))


def _references(path: str, ids: Sequence[Any], kind: str, known: Ids) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the positions of the ids that the annotations name, int64[annotations]."""
    for number, value in enumerate(ids):
        if not isinstance(value, int | str) or value not in known:
            problem = f"an annotation names none of the {kind}"
            raise FormatError(problem, file=path, found=f"the id {value!r:.60} in annotation {number}")
    return np.array([known[value] for value in ids], np.int64)


def _lists(name: str, column: Sequence[Any], end: np.ndarray[Any, Any]) -> NumberLists | None:
    """Return a member of the annotations, sorted by image; None unless each has a number, or as many as the others."""
    values = values_of(column)
    if isinstance(values, NumberLists):
        lengths = np.diff(values.end, prepend=0)
        if not lengths[0] or (lengths != lengths[0]).any():
            return None
        values = values.values.reshape(len(column), -1, *values.values.shape[1:])
    if not isinstance(values, np.ndarray):
        return None
    return NumberLists(values.astype(np.float64) if name in FLOATS else values, end)
