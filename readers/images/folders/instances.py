"""Masks of single objects, several for an image, as one mask with a number for each object."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from matex_data._types import Array, Bytes, Integers
from matex_data.declared import declared
from matex_data.errors import DataError, DecodeError, FormatError
from matex_data.fields import Field
from matex_data.index.cache import ChunkCache
from matex_data.index.model import EMPTY, Layout, ReadRequest, RowSelection
from matex_data.readers.images.folders.files import ImageFiles
from matex_data.readers.images.folders.headers import read_file

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

    def borders(self) -> Integers | None:
        return None

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
        """Return the joined masks of an image; ``seed`` is that of the image.

        Raises
        ------
        DataError : a mask does not decode, differs from the others in size, or overlaps one of them.
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
