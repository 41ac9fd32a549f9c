"""IDX, the format of MNIST and its relatives, plain or gzipped: http://yann.lecun.com/exdb/mnist."""

from __future__ import annotations

import gzip
import re
import struct
import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import numpy as np

from matex_data._types import Array
from matex_data.errors import DataError, FormatError
from matex_data.fields import Field
from matex_data.index.library import MemoryRows
from matex_data.index.model import Index, Layout
from matex_data.index.stamps import Stamp
from matex_data.readers.arrays import MAX_DEFLATE_RATIO, StoredArray, check_shape
from matex_data.readers.catalogue import Catalogue, Entry, of_subset
from matex_data.readers.text.unpacked import UnpackedFile, UnpackedRows
from matex_data.storage.files import exists, open_binary, read_into, size_of_open, undecodable

TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
GZIP_MAGIC = b"\x1f\x8b"
MAX_LABEL_BYTES = 64 << 20  # that the index carries


def index(path: str, *, subset: str | None = None) -> Catalogue:
    """Index an IDX file. An image file comes with the labels in the file beside it, if there is one.

    The field is "image" in a file with "images" in its name, "label" in one with "labels", else "data". The labels of
    ``train-images-idx3-ubyte.gz`` are in ``train-labels-idx1-ubyte``, gzipped or not.

    Parameters
    ----------
    subset : "train" or "test" (also named t10k); files of the other subset have no samples. None: both.

    Raises
    ------
    FormatError : the file is no IDX file, is damaged, or has another number of labels than of images.
    """
    name = next((kind for kind in ("image", "label") if f"{kind}s" in Path(path).name.lower()), "data")
    label_path = _label_file(path) if name == "image" else None
    stamp = None if label_path is None else Stamp.of(path, [f"../{label_path.rpartition('/')[2]}"])  # before any read
    array = _read_header(path)
    entries: dict[str, Entry] = {name: (array.field(name), array.layout)}
    if label_path is not None:
        try:
            labels = _read_header(label_path)
            entries["label"] = labels.field("label"), partial(_label_rows, labels, array.shape[0], path)
        except DataError as error:
            entries["label"] = error
    finish = of_subset(path, subset)

    def stamped(fields: Mapping[str, Field], layouts: Mapping[str, Layout]) -> Index:
        found = finish(fields, layouts)
        return found.with_stamps({path: stamp}) if stamp is not None and "label" in fields else found

    return Catalogue.of(path, entries, finish=stamped)


@dataclass(frozen=True)
class _IdxArray(StoredArray):
    """Array in an IDX file, as its header describes it.

    Parameters
    ----------
    gzipped : the offset counts in the decompressed file.
    """

    path: str
    gzipped: bool

    @property
    def file(self) -> UnpackedFile:
        return UnpackedFile(self.path, "gzip", self.end, is_told=False)

    def layout(self) -> Layout:
        return UnpackedRows(super().layout(), self.file) if self.gzipped else super().layout()

    def values(self) -> Array:
        if self.gzipped:
            return self.file.content()[self.offset :].view(self.dtype).reshape(self.shape)
        found = np.empty(self.shape, self.dtype)
        count = read_into(self.path, self.offset, found.reshape(-1).view(np.uint8))
        if count != found.nbytes:
            raise _error(self.path, "the file is damaged", f"{found.nbytes} bytes of numbers", f"{count} bytes")
        return found


def _read_header(path: str) -> _IdxArray:
    try:
        with ExitStack() as opened:
            stored = opened.enter_context(open_binary(path))
            size = size_of_open(stored)
            gzipped = stored.read(2) == GZIP_MAGIC
            stored.seek(0)
            file = opened.enter_context(gzip.GzipFile(fileobj=stored)) if gzipped else stored
            head = file.read(4)
            if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in TYPES or not 1 <= head[3] <= 32:
                raise _error(path, "the file is no IDX file", "0, 0, a type and a number of axes", repr(head))
            lengths = file.read(4 * head[3])
            if len(lengths) < 4 * head[3]:
                raise _error(path, "the file ends within its header", f"{head[3]} lengths", f"{len(lengths)} bytes")
    except (EOFError, OSError, struct.error, zlib.error) as error:
        raise undecodable(FormatError, "the file does not decompress", path, error) from error
    shape = struct.unpack(f">{head[3]}I", lengths)
    array = _IdxArray(np.dtype(TYPES[head[2]]), shape, False, 4 + len(lengths), path, gzipped)
    expected = array.end
    if expected > MAX_DEFLATE_RATIO * size if gzipped else size != expected:
        found = f"{size} bytes, gzipped" if gzipped else f"{size} bytes"
        raise _error(path, "the file is not as long as its header says", f"{expected} bytes", found)
    check_shape(path, None, array.shape, array.dtype)
    if gzipped and not prod(array.shape):
        array.file.content()  # no later read would find that a damaged header hides the data
    return array


def _error(path: str, problem: str, expected: str, found: str) -> FormatError:
    remedy = "get the file again from its source"
    return FormatError(problem, file=path, expected=expected, found=found, remedy=remedy)


def _label_file(path: str) -> str | None:
    """Return the label file beside an image file, gzipped or not; None if there is none."""
    folder, slash, own = path.rpartition("/")
    name = re.sub(r"images([-.])idx\d", r"labels\1idx1", own)
    for candidate in (name, name.removesuffix(".gz"), f"{name}.gz"):
        sibling = f"{folder}{slash}{candidate}"
        if candidate != own and exists(sibling):
            return sibling
    return None


def _label_rows(labels: _IdxArray, images: int, path: str) -> MemoryRows:
    if labels.shape[0] != images or prod(labels.shape) * labels.dtype.itemsize > MAX_LABEL_BYTES:
        raise FormatError(
            "the labels do not fit the images",
            file=labels.path,
            expected=f"{images} labels, the number of images in {path!r}",
            found=f"{labels.shape[0]} labels",
            remedy="put the labels of these images beside them",
        )
    return MemoryRows(labels.values().astype(labels.dtype.newbyteorder("=")))
