"""Headers of many image files: their shapes, dtypes and pages, read in parallel by all ranks, each a part."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from math import prod
from typing import Any

import numpy as np

from matex_data._types import Array, Integers
from matex_data.declared import declared
from matex_data.errors import DataError, FormatError
from matex_data.machine import Waiting, reading_threads
from matex_data.readers.collective import IndexingRanks, agreed, on_root
from matex_data.readers.images.decoding import ImageInfo, ImageOptions, image_info
from matex_data.readers.images.texts import Texts
from matex_data.sampling.schedule import rank_range
from matex_data.storage import objects
from matex_data.storage.objects import is_url

BEGIN_BYTES = 64 << 10  # of a file that is longer: nearly all headers end before
PAGED = (b".tif", b".tiff", b".gif", b".webp", b".apng")  # suffixes of files that may have several pages
BEGINS_WITH_HEADER = (b".jpg", b".jpeg", b".jpe", b".jfif", b".png", b".bmp", b".ppm", b".pgm", b".pbm")
SAMPLED = 32  # files by which the size of images of different sizes is estimated
PART = 64  # files of one task of a thread
FIRST = 16  # files whose reads tell how long the storage keeps one waiting


def read_file(path: bytes, most: int = -1) -> bytes:
    """Return the bytes of a file, the first ``most`` of them or all; raise ``DataError`` if it cannot be read."""
    try:
        if is_url(path):
            return objects.read(os.fsdecode(path), most if most >= 0 else None)
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 (a Path takes twice as long)
            size = os.fstat(file.fileno()).st_size if most < 0 else most
            data = file.read(size)  # a read without a size makes another one at the end of the file
            return data if len(data) == size or most >= 0 else data + file.read()
    except OSError as error:
        problem = "the file does not exist" if isinstance(error, FileNotFoundError) else "the file cannot be read"
        remedy = "do not remove files while they are read; open the data set again"
        raise DataError(problem, file=os.fsdecode(path), found=error, remedy=remedy) from error


def read_info(path: bytes, options: ImageOptions, count_pages: bool) -> ImageInfo:
    """Return the shape, dtype and pages of the image in a file.

    Raises
    ------
    DataError : it is no image, or cannot be read.
    """
    name = os.fsdecode(path)
    if not count_pages and path.lower().endswith(BEGINS_WITH_HEADER):
        begin = read_file(path, BEGIN_BYTES)
        try:
            return image_info(begin, options, name, count_pages=False)
        except DataError:
            if len(begin) < BEGIN_BYTES:
                raise
    return image_info(read_file(path), options, name, count_pages=count_pages)


@dataclass
@declared
class Headers:
    """Summary of the headers of some files.

    Parameters
    ----------
    kinds : the first file of each kind of image, by what must be equal: at most two are kept.
    nbytes, count : size of the images in memory, and their number.
    pages : number of pages of files that have several, by the number of the file.
    error : of the first file whose header cannot be read.
    """

    kinds: dict[Any, tuple[int, ImageInfo]] = field(default_factory=dict)
    nbytes: int = 0
    count: int = 0
    pages: dict[int, int] = field(default_factory=dict)
    error: DataError | None = None

    def add(self, number: int, info: ImageInfo, fixed: tuple[int, ...]) -> None:
        """Add an image; ``fixed`` are the lengths of its axes that must be equal for all."""
        if len(self.kinds) < 2:
            self.kinds.setdefault((fixed, len(info.shape), info.dtype), (number, info))
        self.nbytes += prod(info.shape) * info.dtype.itemsize
        self.count += 1
        if info.pages > 1:
            self.pages[number] = info.pages


@dataclass(frozen=True)
class ImageFacts:
    """Images of one field of a data set, as their headers describe them.

    Parameters
    ----------
    info : of one of them.
    pages : uint32[files], pages of each file; None: one each.
    mean_bytes : size of an image in memory.
    """

    info: ImageInfo
    pages: Integers | None
    mean_bytes: int


def read_facts(
    root: str, names: Texts, options: ImageOptions, ranks: IndexingRanks, ragged: bool, pages: str, only_pages: bool
) -> ImageFacts | None:
    """Return what must be known of image files before they are read. *Collective*.

    Headers are read where sizes or pages are not known otherwise. A file whose header cannot be read counts as one
    image, which fails when it is read.

    Parameters
    ----------
    ragged : images may differ in height and width.
    pages : "all", or "first": of files with several.
    only_pages : the images themselves are not read.

    Returns
    -------
    the facts; None if ``only_pages`` and each file has one page.

    Raises
    ------
    FormatError : the images differ in size or kind.
    DataError : no header can be read.
    """
    paged = _paged_files(names, pages)
    if only_pages and not len(paged):
        return None
    all_needed = not only_pages and (options.mode == "native" or (options.size is None and not ragged))
    sampled = np.unique(np.linspace(0, len(names) - 1, SAMPLED if ragged else 1).astype(np.int64))
    needed = np.arange(len(names)) if all_needed else np.union1d(sampled, paged)
    start, stop = rank_range(len(needed), ranks.rank, ranks.size)
    reading = _Reading(root, names, options, ragged, frozenset(paged.tolist()))
    merged = _merge(ranks.allgather(agreed(ranks, lambda: reading.summary(needed[start:stop]))))
    if not merged.kinds:
        merged = _first_readable(replace(reading, paged=frozenset()), ranks, merged)
    kinds = list(merged.kinds.values())
    if len(kinds) > 1 and not only_pages:
        (first, one), (second, other) = kinds
        both = names.text(first), names.text(second)
        raise differ(f"{root}/{both[1]}", both, one, other, ragged)
    return ImageFacts(kinds[0][1], _page_counts(len(names), merged), merged.nbytes // merged.count)


def _paged_files(names: Texts, pages: str) -> Integers:
    """Return the numbers of the files that may have several pages; a single file is looked at whatever its name."""
    if pages == "first":
        return np.empty(0, np.int64)
    if len(names) == 1:
        return np.zeros(1, np.int64)
    return np.array([number for number, name in enumerate(names) if name.lower().endswith(PAGED)], np.int64)


@dataclass(frozen=True)
class _Reading:
    root: str
    names: Texts
    options: ImageOptions
    ragged: bool
    paged: frozenset[int]

    def summary(self, numbers: Integers) -> Headers:
        """Return the summary of the headers of these files; read in threads if the storage keeps one waiting.

        Threads would take twice as long for files in memory: each waits for Python's lock after each file.
        """
        parts = [part.tolist() for part in np.split(numbers, range(FIRST, len(numbers), PART))]
        waiting = Waiting()
        first = [waiting.measured(self._read, part) for part in parts[:1]]
        if not waiting.is_long(FIRST):
            return _merge(chain(first, map(self._read, parts[1:])))
        with ThreadPoolExecutor(reading_threads(), thread_name_prefix="matex-headers") as pool:
            return _merge(chain(first, pool.map(self._read, parts[1:])))

    def _read(self, numbers: Sequence[int]) -> Headers:
        found = Headers()
        for number in numbers:
            try:
                info = read_info(self.names.path(self.root, number), self.options, number in self.paged)
            except DataError as error:
                found.error = found.error or error
                continue
            found.add(number, info, info.shape[2:] if self.ragged else info.shape)
        return found


def _merge(summaries: Iterable[Headers]) -> Headers:
    """Return the summary of all; they are in the order of the files."""
    merged = Headers()
    for other in summaries:
        for key, kind in other.kinds.items():
            if len(merged.kinds) < 2:
                merged.kinds.setdefault(key, kind)
        merged.nbytes += other.nbytes
        merged.count += other.count
        merged.pages.update(other.pages)
        merged.error = merged.error or other.error
    return merged


def _first_readable(reading: _Reading, ranks: IndexingRanks, merged: Headers) -> Headers:
    """Return the summary with the first header that rank 0 can read. *Collective*. Raise ``DataError`` if there is
    none.
    """
    summaries = (reading.summary(np.array([number])) for number in range(len(reading.names)))
    shared = on_root(ranks, lambda: next((summary for summary in summaries if summary.kinds), merged))
    ranks.agree(None if shared.kinds else merged.error)
    return replace(shared, pages=merged.pages)


def _page_counts(files: int, headers: Headers) -> Integers | None:
    if not headers.pages:
        return None
    counts: Array = np.ones(files, np.uint32)
    counts[list(headers.pages)] = list(headers.pages.values())
    return counts


def differ(file: str, names: tuple[str, str], one: ImageInfo, other: ImageInfo, ragged: bool) -> DataError:
    """Return the error for images that cannot be stacked, with two of them.

    Parameters
    ----------
    file : of the other one, or with both.
    names : of the images.
    """
    of_one_kind = one.shape[2:] == other.shape[2:] and one.dtype == other.dtype and len(one.shape) == len(other.shape)
    convert = "open them with mode='rgb' or mode='gray', and with dtype= if they differ in that"
    if one.shape[:2] != other.shape[:2] and not ragged:
        problem = "the images differ in size"
        remedy = "resize them by size=(height, width), or open them with ragged=True as they are"
        remedy += "" if of_one_kind else f"; {convert}"
    else:
        problem, remedy = "the images differ in their channels or dtype", convert
    expected, found = f"{_describe(one)}, as in {names[0]!r}", f"{_describe(other)} in {names[1]!r}"
    return FormatError(problem, file=file, expected=expected, found=found, remedy=remedy)


def _describe(info: ImageInfo) -> str:
    height, width, *channels = info.shape
    colours = f", {channels[0]} channels" if channels else ""
    return f"height {height}, width {width}{colours}, {info.dtype}"
