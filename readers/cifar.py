"""CIFAR-10 and CIFAR-100, the binary and the Python version: https://www.cs.toronto.edu/~kriz/cifar.html."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from matex_data._types import Array
from matex_data.declared import declared
from matex_data.errors import FormatError
from matex_data.fields import Field
from matex_data.index.library import MemoryRows
from matex_data.index.model import Layout
from matex_data.index.strided import Strided
from matex_data.machine import check_fits
from matex_data.readers import pickles
from matex_data.readers.catalogue import Catalogue, of_subset
from matex_data.readers.kept import KeptRows
from matex_data.storage.files import open_binary, read_bytes, size_of, undecodable

IMAGE_SHAPE = (3, 32, 32)  # as stored: one plane per colour
IMAGE_BYTES = 3072
LABELS = {1: ("label",), 2: ("coarse_label", "fine_label")}  # by the label bytes of a record, in the order of the file
CLASSES = {"label": 10, "coarse_label": 20, "fine_label": 100}
CHECKED_RECORDS = 2048  # per read of the label check
BYTE = np.dtype(np.uint8)


def index(path: str, *, subset: str | None = None) -> Catalogue:
    """Index a file of CIFAR-10 (fields "image", "label") or CIFAR-100 ("image", "coarse_label", "fine_label").

    Images are uint8 of shape (32, 32, 3), labels uint8.

    Parameters
    ----------
    subset : "train" or "test"; files of the other subset have no samples. None: both.

    Raises
    ------
    FormatError : the file is not a CIFAR file.
    """
    with open_binary(path) as file:
        pickled = file.read(1) == b"\x80" and not path.lower().endswith(".bin")
    layouts = _pickled_layouts(path) if pickled else _binary_layouts(path)
    entries = {
        name: (Field(name, (32, 32, 3) if name == "image" else (), BYTE), partial(layouts.__getitem__, name))
        for name in layouts
    }
    return Catalogue.of(path, entries, finish=of_subset(path, subset))


def _binary_layouts(path: str) -> dict[str, Layout]:
    size = size_of(path)
    label_bytes = [count for count in LABELS if size % (count + IMAGE_BYTES) == 0]
    if len(label_bytes) != 1 or not size:
        raise FormatError(
            "the file is not a CIFAR file",
            file=path,
            expected="a multiple of 3073 bytes (CIFAR-10) or of 3074 bytes (CIFAR-100)",
            found=f"{size} bytes",
        )
    names = LABELS[label_bytes[0]]
    record_bytes = len(names) + IMAGE_BYTES
    rows = size // record_bytes
    _check_binary_labels(path, names)
    image = Strided(rows, len(names), record_bytes, BYTE, IMAGE_SHAPE, convert=to_pixels)
    return {"image": image, **{name: Strided(rows, i, record_bytes, BYTE, ()) for i, name in enumerate(names)}}


def _check_binary_labels(path: str, names: Sequence[str]) -> None:
    """Check the labels of all records, which reads the whole file: 10 ms for the 30 MB of a CIFAR-10 file."""
    record_bytes, row = len(names) + IMAGE_BYTES, 0
    with open_binary(path) as file:
        while stored := file.read(CHECKED_RECORDS * record_bytes):
            records = np.frombuffer(stored, BYTE, len(stored) // record_bytes * record_bytes).reshape(-1, record_bytes)
            for i, name in enumerate(names):
                wrong = np.flatnonzero(records[:, i] >= CLASSES[name])
                if len(wrong):
                    _raise_label_error(path, name, row + int(wrong[0]), records[wrong[0], i])
            row += len(records)


def _raise_label_error(path: str, name: str, row: int, label: object) -> NoReturn:
    raise FormatError(
        "a label is not a class of CIFAR",
        file=path,
        field=name,
        row=row,
        expected=f"an integer from 0 to {CLASSES[name] - 1}",
        found=repr(label)[:80],
        remedy="get the file again from its source, or name another format with format=",
    )


@declared
def to_pixels(stored: Array, out: Array) -> None:
    """Convert colour planes, (rows, 3, 32, 32), to pixels, (rows, 32, 32, 3)."""
    np.copyto(out, stored.reshape(-1, *IMAGE_SHAPE).transpose(0, 2, 3, 1))


def _unpickle(path: str) -> dict[bytes, Any]:
    size = size_of(path)
    remedy = "use the binary version, of which each rank reads only its own rows"
    check_fits(3 * size, "the unpickled file", file=path, remedy=remedy)
    try:
        content = pickles.load(read_bytes(path), encoding="bytes")
        images = content[b"data"]
        if not isinstance(images, np.ndarray) or images.dtype != BYTE or images.shape[1:] != (IMAGE_BYTES,):
            raise ValueError("its data are no images")
    except Exception as error:  # a damaged pickle may raise any kind
        raise undecodable(
            FormatError,
            "the file is not a CIFAR file",
            path,
            error,
            expected="a pickled dict with uint8 images of 3072 bytes and their labels",
            remedy="get the file again from its source; pickles of other objects than arrays are never read",
        ) from error
    return dict(content)


def _pickled_layouts(path: str) -> dict[str, Layout]:
    content = _unpickle(path)
    rows = len(content[b"data"])
    keys = {"label": b"labels", "coarse_label": b"coarse_labels", "fine_label": b"fine_labels"}
    layouts: dict[str, Layout] = {"image": PickledImages(path, rows)}
    for name, key in keys.items():
        if key in content:
            layouts[name] = MemoryRows(_check_labels(path, name, content[key]))
    return layouts


def _check_labels(path: str, name: str, labels: Any) -> NDArray[np.uint8]:
    """Return the labels of the Python version as uint8, after a check that each is a class of the format."""
    if not isinstance(labels, list | tuple | np.ndarray):
        raise FormatError("the labels are no list", file=path, field=name, found=type(labels).__name__)
    for row, label in enumerate(labels):
        integer = isinstance(label, int | np.integer) and not isinstance(label, bool)
        if not integer or not 0 <= label < CLASSES[name]:
            _raise_label_error(path, name, row, label)
    return np.array([int(label) for label in labels], BYTE)


@declared
@dataclass(frozen=True, eq=False)
class PickledImages(KeptRows):
    """Images of the Python version: each rank unpickles the whole file."""

    rows: int
    row_bytes = IMAGE_BYTES

    def decode(self) -> Array:
        images: Array = _unpickle(self.path)[b"data"]
        return images.reshape(-1, *IMAGE_SHAPE).transpose(0, 2, 3, 1)
