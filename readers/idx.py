"""IDX, the format of MNIST and its kin, also gzipped: http://yann.lecun.com/exdb/mnist."""

from __future__ import annotations

import gzip
import re
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from matex_data.errors import FieldNotFound, FormatError
from matex_data.fields import Field
from matex_data.index.library import MemoryRows
from matex_data.index.model import FileIndex, Index, Layout
from matex_data.index.strided import Strided
from matex_data.readers.arrays import check_shape
from matex_data.readers.netcdf.cf import Decoding
from matex_data.readers.subsets import chosen
from matex_data.readers.whole_file import UnpackedRows, most_unpacked

TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
GZIP = b"\x1f\x8b"
LABEL_BYTES = 64 << 20  # of labels that the index carries


def index(path: str, names: Sequence[str] | None = None, *, subset: str | None = None) -> Index:
    """The rows of an IDX file; of a file of images together with its labels, if these lie beside it.

    The field is "image" in a file with "images" in its name, "label" in one with "labels", else "data". The labels of
    ``train-images-idx3-ubyte.gz`` are those of ``train-labels-idx1-ubyte``, gzipped or not.

    Parameters
    ----------
    names : of the fields that are wanted; None: all there are.
    subset : "train" or "test" (also called t10k); files of the other one have no samples. None: both.

    Raises
    ------
    FieldNotFound : there is no such field.
    FormatError : the file is no IDX file, is damaged, or has another number of labels than of images.
    """
    array = _array(path)
    own = next((kind for kind in ("image", "label") if f"{kind}s" in Path(path).name.lower()), "data")
    fields = {own: array.field(own)}
    parts: dict[str, Layout] = {own: array.part()}
    labels = _labels_of(path) if own == "image" and (names is None or "label" in names) else None
    if labels is not None:
        other = _array(labels)
        fields["label"], parts["label"] = other.field("label"), _held(other, array.shape[0], path)
    for name in names or ():
        if name not in fields:
            raise FieldNotFound("the file has no such field", file=path, field=name, expected=f"one of {list(fields)}")
    wanted = list(fields) if names is None else list(names)
    files = [FileIndex(path, array.shape[0], {name: parts[name] for name in wanted})] if chosen(path, subset) else []
    return Index({name: fields[name] for name in wanted}, files)


@dataclass(frozen=True)
class _Idx:
    """What the header of an IDX file says."""

    path: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    packed: bool

    @property
    def offset(self) -> int:
        return 4 + 4 * len(self.shape)

    @property
    def native(self) -> np.dtype[Any]:
        return self.dtype.newbyteorder("=")

    def field(self, name: str) -> Field:
        return Field(name, self.shape[1:], self.native)

    def packed_rows(self) -> UnpackedRows:
        return UnpackedRows(self.path, None, self.shape, self.dtype, self.offset)

    def part(self) -> Layout:
        if self.packed:
            return self.packed_rows()
        row = self.shape[1:]
        convert = None if self.dtype.isnative else Decoding(self.native)
        return Strided(self.shape[0], self.offset, prod(row) * self.dtype.itemsize, self.dtype, row, convert=convert)


def _array(path: str) -> _Idx:
    with Path(path).open("rb") as file:
        packed = file.read(2) == GZIP
    try:
        with gzip.open(path) if packed else Path(path).open("rb") as file:
            head = file.read(4)
            if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in TYPES or not 1 <= head[3] <= 32:
                raise _error(path, "the file is no IDX file", "0, 0, a type and a number of axes", repr(head))
            sizes = file.read(4 * head[3])
            if len(sizes) < 4 * head[3]:
                raise _error(path, "the file ends within its header", f"{head[3]} lengths", f"{len(sizes)} bytes")
    except (EOFError, OSError, struct.error, zlib.error) as error:
        raise FormatError("the file cannot be read", file=path, found=error) from error
    found = _Idx(path, np.dtype(TYPES[head[2]]), struct.unpack(f">{head[3]}I", sizes), packed)
    expected = found.offset + prod(found.shape) * found.dtype.itemsize
    size = Path(path).stat().st_size
    if expected > most_unpacked(size) if packed else size != expected:
        found_bytes = f"{size} bytes, packed" if packed else f"{size} bytes"
        raise _error(path, "the file is not as long as its header says", f"{expected} bytes", found_bytes)
    check_shape(path, None, found.shape, found.dtype)
    if packed and not prod(found.shape):
        found.packed_rows().unpacked()  # nobody will read what a damaged header denies
    return found


def _error(path: str, problem: str, expected: str, found: str) -> FormatError:
    remedy = "get the file again from its source"
    return FormatError(problem, file=path, expected=expected, found=found, remedy=remedy)


def _labels_of(path: str) -> str | None:
    """The file of labels beside a file of images, gzipped or not."""
    name = re.sub(r"images([-.])idx\d", r"labels\1idx1", Path(path).name)
    for candidate in (name, name.removesuffix(".gz"), f"{name}.gz"):
        beside = Path(path).with_name(candidate)
        if candidate != Path(path).name and beside.is_file():
            return str(beside)
    return None


def _held(labels: _Idx, images: int, path: str) -> MemoryRows:
    if labels.shape[0] != images or prod(labels.shape) * labels.dtype.itemsize > LABEL_BYTES:
        raise FormatError(
            "the labels do not fit the images",
            file=labels.path,
            expected=f"{images} labels, as there are images in {path!r}",
            found=f"{labels.shape[0]} labels",
        )
    stored = labels.packed_rows().unpacked() if labels.packed else _stored(labels)
    return MemoryRows(stored.astype(labels.native))


def _stored(labels: _Idx) -> NDArray[Any]:
    """Return all labels of a file that is not packed."""
    found = np.fromfile(labels.path, labels.dtype, offset=labels.offset)
    if found.size != prod(labels.shape):
        raise _error(labels.path, "the file is damaged", f"{labels.shape[0]} labels", f"{found.size} numbers")
    return found.reshape(labels.shape)
