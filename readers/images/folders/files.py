"""Rows of image files: each rank opens the files of its own rows, in the threads that decode them.

Masks of single objects, several for an image, are one mask with a number for each object.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from functools import partial

import numpy as np

from matex_data._types import Array, Bytes, Integers
from matex_data.declared import declared
from matex_data.errors import DataError, DecodeError, FormatError
from matex_data.fields import Field
from matex_data.index.cache import ChunkCache
from matex_data.index.model import EMPTY, Layout, ReadRequest, RowSelection
from matex_data.index.ragged import RaggedArray, scatter_lists
from matex_data.index.scatter import scatter
from matex_data.machine import tasks_of_window
from matex_data.readers.images.decoding import FrameFile, ImageOptions, decode_image
from matex_data.readers.images.folders.headers import read_file
from matex_data.readers.images.folders.listing import Classes
from matex_data.readers.images.folders.members import ManifestValues
from matex_data.readers.images.texts import NumberLists, Texts
from matex_data.sampling.permutation import sample_seeds

TASK_ROWS = 16  # most images of one task: its start costs as much as a tenth of the decoding of a small one
TASK_BYTES = 1 << 20  # decoded: the files of a task are in memory at once


@declared
@dataclass(frozen=True, eq=False)
class Pages:
    """Rows of files: each page of a file is a row.

    Parameters
    ----------
    files : number of files.
    first : int64[files + 1], the first row of each file, and the number of rows; None: a row per file.
    """

    files: int
    first: Integers | None = None

    @classmethod
    def of(cls, files: int, counts: Integers | None) -> Pages:
        """Return the rows of files with these numbers of pages; None: one each."""
        return cls(files, None if counts is None else np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]))

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.files if self.first is None else int(self.first[-1])

    def locate(self, rows: Integers) -> tuple[Integers, Integers]:
        """Return the file and the page of each row."""
        if self.first is None:
            return rows, np.zeros_like(rows)
        file = np.searchsorted(self.first, rows, side="right") - 1
        return file, rows - self.first[file]

    def borders(self) -> Integers | None:
        """Return the first row of each file, where files have several: such a file is read once for all its pages."""
        return None if self.first is None else self.first[:-1]


@declared
@dataclass(frozen=True, eq=False)
class ImageFiles(Layout):
    """Images that lie in files of their own.

    Parameters
    ----------
    names : of the files, relative to ``root``.
    pages : rows of the files.
    field : dtype and shape of an image.
    mean_bytes : size of a ragged image in memory.
    """

    root: str
    names: Texts
    pages: Pages
    field: Field
    options: ImageOptions
    mean_bytes: int = 0

    block_rows = 1
    separate = True

    def sources(self) -> Sequence[str]:
        return [os.fsdecode(self.names.path(self.root, number)) for number in range(len(self.names))]

    @property
    def rows(self) -> int:  # type: ignore[override]
        return self.pages.rows

    def borders(self) -> Integers | None:
        return self.pages.borders()

    def inner_bytes(self) -> int:
        return self.mean_bytes * self.rows

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        numbers = rows.numbers
        files, pages = self.pages.locate(numbers)
        begins = np.flatnonzero(np.diff(files, prepend=-1))  # a file is opened by one task
        step = max(1, min(TASK_ROWS, TASK_BYTES // max(1, self._image_bytes), len(begins) // (4 * tasks_of_window())))
        starts = begins[::step].tolist()
        for low, high in zip(starts, [*starts[1:], len(numbers)], strict=True):
            columns = (numbers[low:high], files[low:high], pages[low:high], rows.destination[low:high])
            task = _Task(self, *columns, out, cache.epoch)
            yield ReadRequest(EMPTY, EMPTY, on_complete=task.decode, fetch=task.read)

    @property
    def _image_bytes(self) -> int:
        return self.mean_bytes if self.field.ragged else self.field.row_bytes

    def seeds(self, rows: Integers, epoch: int) -> list[int | None]:
        """Return the seed of each row in an epoch; None if nothing about it is random."""
        if not self.options.is_random:
            return [None] * len(rows)
        return list(sample_seeds(self.options.augment_seed, epoch, rows).tolist())

    def decode(
        self,
        data: bytes,
        path: bytes,
        page: int,
        out: Array | None,
        seed: int | None = None,
        frames: FrameFile | None = None,
    ) -> Array:
        """Return the image of a page, in ``out`` unless that is None; see `decode_image`.

        Raises
        ------
        DataError : it does not decode, or has another dtype or shape than the others.
        """
        name = os.fsdecode(path)
        image = decode_image(data, self.options, name, page, out, seed, frames)
        expected = self.field.inner if self.field.ragged else self.field.shape
        fits = len(image.shape) == len(expected) and all(
            length in (None, found) for length, found in zip(expected, image.shape, strict=False)
        )
        if not fits or image.dtype != self.field.dtype:
            raise DecodeError(
                "the image differs from the others in shape or dtype",
                file=name,
                expected=self.field.description,
                found=f"{image.dtype} of shape {image.shape}" + (f", page {page}" if page else ""),
                remedy="open the images with size= or ragged=True, mode='rgb' or 'gray', dtype=, or with pages='first'",
            )
        return image


@dataclass(frozen=True, eq=False)
class _Task:
    """Images that one thread reads, and another one decodes, one after the other.

    Parameters
    ----------
    rows, files, pages, destination : int64[images].
    contents : of the files that are read, or the error of reading them.
    """

    layout: ImageFiles
    rows: Integers
    files: Integers
    pages: Integers
    destination: Integers
    out: Array
    epoch: int
    contents: dict[int, bytes | DataError] = dataclass_field(default_factory=dict)

    def read(self) -> None:
        """Read the files."""
        for file in dict.fromkeys(self.files.tolist()):
            try:
                self.contents[file] = read_file(self._path(file))
            except DataError as error:
                self.contents[file] = error
                return  # the task ends with it

    def decode(self, _: Bytes) -> None:
        """Decode the images straight into the output array."""
        columns = (column.tolist() for column in (self.rows, self.files, self.pages, self.destination))
        ragged, seeds, frames = self.layout.field.ragged, self.layout.seeds(self.rows, self.epoch), FrameFile()
        for row, file, page, destination, seed in zip(*columns, seeds, strict=True):
            data = self.contents[file]
            try:
                if isinstance(data, DataError):
                    raise data
                out = None if ragged else self.out[destination]
                image = self.layout.decode(data, self._path(file), page, out, seed, frames)
            except DataError as error:
                raise error.at_row(row) from error
            if ragged:  # a batch of ragged images holds the images themselves
                self.out[destination] = image if image.flags.writeable else image.copy()
        self.contents.clear()

    def _path(self, file: int) -> bytes:
        return self.layout.names.path(self.layout.root, file)


@declared
@dataclass(frozen=True, eq=False)
class FileValues(Layout):
    """Values that the index holds for each file: labels, names, columns of a manifest.

    Parameters
    ----------
    values : one for each file.
    pages : rows of the files; the pages of a file have the same value.
    """

    values: ManifestValues | Classes
    pages: Pages

    block_rows = 1

    @property
    def rows(self) -> int:  # type: ignore[override]
        return self.pages.rows

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        yield ReadRequest(EMPTY, EMPTY, on_complete=partial(self._copy, rows, out))

    def inner_bytes(self) -> int:
        return self.values.values.nbytes if isinstance(self.values, NumberLists) else 0

    def _copy(self, rows: RowSelection, out: Array, _: Bytes) -> None:
        values = self.values.take(self.pages.locate(rows.numbers)[0])
        if isinstance(values, RaggedArray):
            scatter_lists(out, rows.destination, values.offsets, values.values)
        else:
            scatter(out, rows.destination, values)


NUMBERS = np.dtype(np.uint16)
REMEDY = "write one mask for each image, with a number for each object; on_error='skip' leaves such images out"


@declared
@dataclass(frozen=True, eq=False)
class InstanceMasks(Layout):
    """Masks of objects that lie in files of their own: n where the n-th mask of an image is not zero, 0 elsewhere.

    Parameters
    ----------
    masks : the files, those of an image side by side.
    first : int64[images + 1], the first mask of each image, and the number of masks.
    field : of the joined masks.
    """

    masks: ImageFiles
    first: Integers
    field: Field

    block_rows = 1
    separate = True

    @classmethod
    def of(cls, masks: ImageFiles, counts: Integers) -> InstanceMasks:
        """Return the joined masks of images with these numbers of masks.

        Raises
        ------
        FormatError : the masks are coloured, or too many.
        """
        field = masks.field
        shape = field.inner if field.ragged else field.shape
        most = int(np.iinfo(NUMBERS).max)
        if len(shape) != 2 or counts.max() > most:
            raise FormatError(
                "the masks of an image cannot be joined",
                file=masks.root,
                field=field.name,
                expected=f"gray masks, at most {most} for an image",
                found=f"{counts.max()} masks of {field.description}",
                remedy=REMEDY,
            )
        first = np.concatenate([[0], np.cumsum(counts)])
        return cls(masks, first, replace(field, dtype=NUMBERS, attributes={"mode": "instances"}))

    @property
    def rows(self) -> int:  # type: ignore[override]
        return len(self.first) - 1

    def inner_bytes(self) -> int:
        pixels = self.masks.mean_bytes // self.masks.field.dtype.itemsize
        return pixels * NUMBERS.itemsize * self.rows

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        seeds = self.masks.seeds(rows.numbers, cache.epoch)  # of the image
        for row, destination, seed in zip(rows.numbers.tolist(), rows.destination.tolist(), seeds, strict=True):
            yield ReadRequest(EMPTY, EMPTY, on_complete=partial(self._join, row, destination, out, seed))

    def _join(self, row: int, destination: int, out: Array, seed: int | None, _: Bytes) -> None:
        try:
            joined = self._joined(range(int(self.first[row]), int(self.first[row + 1])), seed)
        except DataError as error:
            raise error.at_row(row) from error
        out[destination] = joined

    def _joined(self, numbers: Sequence[int], seed: int | None) -> Array:
        """Return the joined masks of an image; ``seed`` is that of the image. Raise ``DataError`` if a mask does not
        decode, differs from the others in size, or overlaps one of them.
        """
        joined: Array | None = None
        for number, file in enumerate(numbers, start=1):
            path = self.masks.names.path(self.masks.root, file)
            mask = self.masks.decode(read_file(path), path, 0, None, seed) != 0
            if joined is None:
                joined = np.zeros(mask.shape, NUMBERS)
            if mask.shape != joined.shape:
                raise _differs("the masks of an image differ in size", path, joined.shape, mask.shape)
            before = joined[mask]
            if before.any():
                other = self.masks.names.text(numbers[int(before.max()) - 1])
                pixels = f"{np.count_nonzero(before)} pixels of {other!r} as well"
                raise _differs("masks of an image overlap", path, "each pixel in one mask", pixels)
            joined[mask] = number
        assert joined is not None, "an image with several masks has one"
        return joined


def _differs(problem: str, path: bytes, expected: object, found: object) -> DecodeError:
    return DecodeError(problem, file=os.fsdecode(path), expected=expected, found=found, remedy=REMEDY)
