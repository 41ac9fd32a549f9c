"""CIFAR-10 and CIFAR-100, the binary and the Python version: https://www.cs.toronto.edu/~kriz/cifar.html."""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from matex_data.errors import FieldNotFound, FormatError
from matex_data.fields import Field
from matex_data.index.interleaved import group_interleaved
from matex_data.index.library import LibraryRows, MemoryRows
from matex_data.index.model import FileIndex, Index, Layout
from matex_data.index.strided import Strided
from matex_data.machine import check_fits
from matex_data.readers.subsets import chosen

IMAGE = (3, 32, 32)  # as stored: the colours one after the other
PIXELS = 3072
LABELS = {1: ("label",), 2: ("coarse_label", "fine_label")}  # of CIFAR-10 and CIFAR-100, in the order of the file
CLASSES = {"label": 10, "coarse_label": 20, "fine_label": 100}  # labels are smaller
LABELS_TOGETHER = 2048  # records that are read in one go to look at their labels
BYTE = np.dtype(np.uint8)
BLOCK_ROWS = 64
ALLOWED = {("_codecs", "encode"), ("numpy", "ndarray"), ("numpy", "dtype")}


def index(path: str, names: Sequence[str] | None = None, *, subset: str | None = None) -> Index:
    """The images of a file of CIFAR-10 (fields "image", "label") or CIFAR-100 ("image", "coarse_label", "fine_label").

    Images are uint8 of shape (32, 32, 3), labels uint8.

    Parameters
    ----------
    names : of the fields that are wanted; None: all.
    subset : "train" or "test"; files of the other one have no samples. None: both.

    Raises
    ------
    FieldNotFound : there is no such field.
    FormatError : the file is not one of CIFAR's.
    """
    with Path(path).open("rb") as file:
        pickled = file.read(1) == b"\x80" and not path.lower().endswith(".bin")
    parts = _pickled(path) if pickled else _binary(path)
    fields = {name: Field(name, (32, 32, 3) if name == "image" else (), BYTE) for name in parts}
    for name in names or ():
        if name not in fields:
            raise FieldNotFound("the file has no such field", file=path, field=name, expected=f"one of {list(fields)}")
    wanted = list(fields) if names is None else list(names)
    rows, parts = parts["image"].rows, group_interleaved({name: parts[name] for name in wanted})
    files = [FileIndex(path, rows, parts)] if chosen(path, subset) else []
    return Index({name: fields[name] for name in wanted}, files)


def _binary(path: str) -> dict[str, Layout]:
    size = Path(path).stat().st_size
    labels = [count for count in LABELS if size % (count + PIXELS) == 0]
    if len(labels) != 1 or not size:
        raise FormatError(
            "the file is not one of CIFAR's",
            file=path,
            expected="a multiple of 3073 bytes (CIFAR-10) or of 3074 bytes (CIFAR-100)",
            found=f"{size} bytes",
        )
    record = labels[0] + PIXELS
    rows = size // record
    _check_binary_labels(path, labels[0])
    parts: dict[str, Layout] = {"image": Strided(rows, labels[0], record, BYTE, IMAGE, convert=pixels)}
    for at, name in enumerate(LABELS[labels[0]]):
        parts[name] = Strided(rows, at, record, BYTE, ())
    return parts


def _check_binary_labels(path: str, labels: int) -> None:
    """Look at the labels of all records; ``labels`` is how many each has.

    They lie so densely that this reads the whole file: 10 ms for the 30 MB of a file of CIFAR-10.
    """
    record, row = labels + PIXELS, 0
    with Path(path).open("rb") as file:
        while len(records := np.fromfile(file, BYTE, LABELS_TOGETHER * record)):
            stored = records[: len(records) // record * record].reshape(-1, record)
            for at, name in enumerate(LABELS[labels]):
                wrong = np.flatnonzero(stored[:, at] >= CLASSES[name])
                if len(wrong):
                    _refuse_label(path, name, row + int(wrong[0]), stored[wrong[0], at])
            row += len(stored)


def _refuse_label(path: str, name: str, row: int, label: object) -> NoReturn:
    raise FormatError(
        "a label is none of the format's",
        file=path,
        field=name,
        row=row,
        expected=f"an integer from 0 to {CLASSES[name] - 1}",
        found=repr(label)[:80],
        remedy="get the file again from its source; read another format's with format=",
    )


def pixels(stored: NDArray[Any], out: NDArray[Any]) -> None:
    """Three planes of colour, (rows, 3, 32, 32), as pixels (rows, 32, 32, 3)."""
    np.copyto(out, stored.reshape(-1, *IMAGE).transpose(0, 2, 3, 1))


class _Arrays(pickle.Unpickler):
    """Unpickler that makes arrays, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        array = module in ("numpy.core.multiarray", "numpy._core.multiarray") and name in ("_reconstruct", "scalar")
        if not array and (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it wants {module}.{name}")
        return super().find_class(module.replace("numpy.core", "numpy._core") if hasattr(np, "_core") else module, name)


def _unpickled(path: str) -> dict[bytes, Any]:
    size = Path(path).stat().st_size
    check_fits(3 * size, "the unpickled file", file=path, remedy="use the binary version: ranks read their rows of it")
    try:
        stored = Path(path).read_bytes()
        _check_numbers(stored)
        found = _Arrays(io.BytesIO(stored), encoding="bytes").load()
        images = found[b"data"]
        if not isinstance(images, np.ndarray) or images.dtype != BYTE or images.shape[1:] != (PIXELS,):
            raise ValueError("its data are no images")
    except Exception as error:  # a damaged pickle may raise anything
        raise FormatError(
            "the file is not one of CIFAR's",
            file=path,
            expected="a pickled dict with uint8 images of 3072 bytes and their labels",
            found=f"{type(error).__name__}: {error}",
            remedy="get the file again from its source; pickles of anything but arrays are never read",
        ) from error
    return dict(found)


def _check_numbers(stored: bytes) -> None:
    """Raise ``ValueError`` if the pickle numbers its objects higher than it can have any.

    The unpickler makes a table of that length, which took 34 GB for a damaged file.
    """
    for opcode, number, _ in pickletools.genops(stored):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(number or 0) > len(stored):
            raise ValueError(f"object number {number} in {len(stored)} bytes")


def _pickled(path: str) -> dict[str, Layout]:
    found = _unpickled(path)
    rows = len(found[b"data"])
    stored = {"label": b"labels", "coarse_label": b"coarse_labels", "fine_label": b"fine_labels"}
    parts: dict[str, Layout] = {"image": PickledImages(path, rows, min(rows, BLOCK_ROWS))}
    for name, key in stored.items():
        if key in found:
            parts[name] = MemoryRows(_labels(path, name, found[key]))
    return parts


def _labels(path: str, name: str, stored: Any) -> NDArray[np.uint8]:
    """Return the labels of the Python version, each of which must be a class of the format."""
    if not isinstance(stored, list | tuple | np.ndarray):
        raise FormatError("the labels are no list", file=path, field=name, found=type(stored).__name__)
    for row, label in enumerate(stored):
        whole = isinstance(label, int | np.integer) and not isinstance(label, bool)
        if not whole or not 0 <= label < CLASSES[name]:
            _refuse_label(path, name, row, label)
    return np.array([int(label) for label in stored], BYTE)


@dataclass(frozen=True, eq=False)
class PickledImages(LibraryRows):
    """Images of the Python version: each rank reads the whole file once, and keeps it."""

    path: str
    rows: int
    block_rows: int

    def read(self, start: int, stop: int) -> NDArray[Any]:
        if self not in _kept:
            _kept[self] = _unpickled(self.path)[b"data"].reshape(-1, *IMAGE)
        return _kept[self][start:stop].transpose(0, 2, 3, 1)


_kept: WeakKeyDictionary[PickledImages, NDArray[Any]] = WeakKeyDictionary()
