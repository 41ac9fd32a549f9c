"""Patches: samples that are parts of images or volumes. Of chunked and uncompressed arrays only those parts are read.

A grid covers the whole of each image; random patches are drawn anew in each epoch, from the number of the sample and of
the epoch, so that they are the same on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from numbers import Integral
from typing import Any

import numpy as np

from matex_data._types import Array, Integers
from matex_data.errors import FormatError, PartitionError
from matex_data.fields import LISTED, RANDOM, Field
from matex_data.index.cache import ChunkCache
from matex_data.index.chunked import Chunked
from matex_data.index.combined import Converted
from matex_data.index.files import DerivedFiles
from matex_data.index.model import FileIndex, Index, Layout, ReadRequest, RowSelection, call_after_last
from matex_data.index.runs import Chosen, compress
from matex_data.index.strided import BLOCK_BYTES, Strided, Transposed
from matex_data.index.subset import Picked, subset, taken_shape
from matex_data.locks import cached_property
from matex_data.sampling.permutation import sample_seeds
from matex_data.sampling.split import Ties

COUNT = "patches of an image"  # fact of an index
WHOLE = 0.25  # share of the bytes of an image, from which on it is read as a whole and cut in memory
LINE_BYTES = 8192  # lines up to this length are read as a whole: a read of a part takes as long
TILE = 1 << 20  # samples that are looked at together


@dataclass(frozen=True)
class PatchShape:
    """Extent and number of the patches.

    Parameters
    ----------
    extent : lengths along the first axes of an image; None: the whole axis.
    drawn : number of random patches of an image; None: a grid of all of it.
    count : patches of an image, once it is known.
    """

    extent: tuple[int | None, ...]
    drawn: int | None = None
    count: int | None = None


def patch_shape(patch: Sequence[int | None] | int | None, patches_per_image: int | None) -> PatchShape | None:
    """Return what these options of ``open_dataset`` mean; None without patches.

    Raises
    ------
    PartitionError : an extent is too small; there is a number of patches, and no extent.
    """
    lengths = () if patch is None else (patch,) if isinstance(patch, int | Integral) else tuple(patch)
    if any(length is not None and length < 1 for length in (*lengths, patches_per_image)):
        raise PartitionError(
            "an extent or a number of patches is too small",
            expected="patch= with lengths of 1 or more, and patches_per_image= of 1 or more",
            found=f"patch={patch!r}, patches_per_image={patches_per_image!r}",
        )
    extent = tuple(None if length is None else int(length) for length in lengths)
    if not extent and patches_per_image is None:
        return None
    if not any(extent):
        raise PartitionError("patches_per_image= needs patch=", expected="patch=(256, 256)", found=f"patch={patch!r}")
    return PatchShape(extent, None if patches_per_image is None else int(patches_per_image))


def patched(index: Index, shape: PatchShape) -> Index:
    """Return an index whose samples are patches of those of another one; fields without these axes are repeated.

    Parameters
    ----------
    index : of files.
    shape : of the patches.

    Raises
    ------
    FormatError : no field has the axes; a field is smaller than a patch, or two have other images.
    """
    images = {name: field for name, field in index.fields.items() if not _lacks_axes(field, shape)}
    axes = _axes(index, images, shape)
    if shape.count is None and not images:
        raise FormatError(
            "no field has axes that patches could be of",
            file=next(iter(index.files.paths), None),
            expected=f"a field with {len(shape.extent)} axes at least, and samples of one shape",
            found="; ".join(f"{name!r}: {field.description}" for name, field in index.fields.items()),
            remedy="give patch= a length for each axis that is cut; size= makes images of one shape",
        )
    begins = [_begins(length, size) for length, size in axes]
    count = shape.count or shape.drawn or prod(map(len, begins))
    fields = {name: _cut(field, axes, shape) if name in images else field for name, field in index.fields.items()}
    cut = partial(_patched_file, index.fields, frozenset(images), tuple(axes), shape, count, index.first_row)
    rows = index.files.rows.astype(np.int64) * count  # they may be in the smallest dtype that holds them
    files = DerivedFiles(index.files, cut, rows)
    facts = {name: text for name, text in index.facts.items() if name != LISTED}
    return Index(fields, files, index.static, {**facts, COUNT: str(count)})


def ties_of(index: Index) -> Ties:
    """Return what keeps the patches of an image in one set of a split."""
    total, count = len(index), int(index.facts[COUNT])
    bits = np.empty(-(-total // 8), np.uint8)
    for low in range(0, total, TILE):  # a bit for each sample, and never a byte
        bits[low // 8 : (low + TILE) // 8] = np.packbits(np.arange(low, min(low + TILE, total)) % count == 0)
    return Ties(events=Chosen.of_bits(bits))


def _lacks_axes(field: Field, shape: PatchShape) -> bool:
    return field.ragged or field.dtype.hasobject or len(field.shape) < len(shape.extent)


def _axes(index: Index, images: Mapping[str, Field], shape: PatchShape) -> list[tuple[int, int]]:
    """Return lengths of the axes of an image, and of a patch; raise ``FormatError`` if a field is smaller than a patch,
    or two have other images.
    """
    first: tuple[str, tuple[int, ...]] | None = None
    for name, field in images.items():
        lengths = field.shape[: len(shape.extent)]
        small = any(size is not None and size > length for length, size in zip(lengths, shape.extent, strict=True))
        if small or (first is not None and lengths != first[1]):
            expected = f"{first[1]}, as of {first[0]!r}" if first and not small else f"{shape.extent} or more"
            raise FormatError(
                "a field has images of another size" if not small else "a field is smaller than a patch",
                file=next(iter(index.files.paths), None),
                field=name,
                expected=expected,
                found=f"{lengths}",
                remedy="select the fields with inputs= and targets=, or give another patch=",
            )
        first = first or (name, lengths)
    sizes = zip(first[1] if first else (), shape.extent, strict=False)
    return [(length, length if size is None else size) for length, size in sizes]


def _cut(field: Field, axes: Sequence[tuple[int, int]], shape: PatchShape) -> Field:
    attributes = field.attributes if shape.drawn is None else {**field.attributes, RANDOM: True}
    return replace(field, shape=(*(size for _, size in axes), *field.shape[len(axes) :]), attributes=attributes)


def _begins(length: int, size: int) -> Integers:
    """Return where the patches of a grid begin along an axis; the last one ends with the axis.

    >>> _begins(10, 4).tolist(), _begins(8, 4).tolist()
    ([0, 4, 6], [0, 4])
    """
    begins = np.arange(0, length - size + 1, max(1, size))
    return begins if begins[-1] + size == length else np.append(begins, length - size)


def _patched_file(
    fields: Mapping[str, Field],
    images: frozenset[str],
    axes: tuple[tuple[int, int], ...],
    shape: PatchShape,
    count: int,
    first_row: Integers,
    number: int,
    file: FileIndex,
) -> FileIndex:
    """Return the index of a file with patches as samples."""
    first = int(first_row[number]) * count if shape.drawn else None
    layouts: dict[str, Layout] = {}
    for name, layout in file.layouts.items():
        if name in images:
            layouts[name] = Patches(layout, count, fields[name], axes, first)
        else:
            layouts[name] = Repeated(layout, count, fields[name])
    return replace(file, rows=file.rows * count, layouts=layouts)


@dataclass(frozen=True, eq=False)
class Repeated(Converted):
    """Rows of another layout, each several times.

    Parameters
    ----------
    layout : the other one.
    count : number of times.
    field : of the rows.
    """

    count: int
    field: Field

    @property
    def rows(self) -> int:  # type: ignore[override]
        return self.layout.rows * self.count

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return self.layout.block_rows * self.count

    def borders(self) -> Integers | None:
        borders = self.layout.borders()
        return None if borders is None else borders * self.count

    def inner_bytes(self) -> int:
        return self.layout.inner_bytes() * self.count

    def requests(self, rows: RowSelection, out: Any, cache: ChunkCache) -> Iterator[ReadRequest]:
        different, position = np.unique(rows.numbers // self.count, return_inverse=True)
        whole = self.field.empty(len(different))
        yield from self.read_whole(different, whole, cache, partial(self._copy, whole, position, rows.destination, out))

    def read_whole(self, numbers: Integers, whole: Array, cache: ChunkCache, finish: Any) -> Sequence[ReadRequest]:
        """Return the reads of whole rows, after the last of which ``finish`` is called."""
        runs = compress(numbers)
        requests = self.layout.requests(runs.selection(), whole, cache) if len(numbers) else ()
        return call_after_last(requests, finish)

    def _copy(self, whole: Array, position: Integers, destination: Integers, out: Any) -> None:
        out[destination] = whole[position]


@dataclass(frozen=True, eq=False)
class Patches(Repeated):
    """Patches of the rows of another layout.

    Parameters
    ----------
    axes : lengths of the first axes of a row, and of a patch.
    first : number of the first patch among those of all files, by which random ones are drawn; None: a grid.
    """

    axes: tuple[tuple[int, int], ...]
    first: int | None

    def requests(self, rows: RowSelection, out: Any, cache: ChunkCache) -> Iterator[ReadRequest]:
        numbers, corners = rows.numbers // self.count, self._corners(rows.numbers, cache.epoch)
        covered = self._share * len(numbers) / max(1, len(np.unique(numbers)))  # of the bytes of each row
        if covered < WHOLE and isinstance(self.layout, Strided | Transposed | Chunked):
            for corner, at in self._by_corner(rows.numbers, corners):
                part = RowSelection(numbers[at], numbers[at] + 1, rows.destination[at])
                yield from self._part(corner).requests(part, out, cache)
            return
        step = max(1, BLOCK_BYTES // max(1, self.field.row_bytes)) * self.count
        for low in range(0, len(numbers), step):
            high = low + step
            different, position = np.unique(numbers[low:high], return_inverse=True)
            whole = self.field.empty(len(different))
            cut = partial(self._cut, whole, position, corners[low:high], rows.destination[low:high], out)
            yield from self.read_whole(different, whole, cache, cut)

    @property
    def _share(self) -> float:
        """Share of a row that a patch has."""
        return prod(size / max(1, length) for length, size in self.axes)

    @cached_property
    def _shared(self) -> Layout:
        """Layout of whole rows, whose chunks the patches decode for one another."""
        return replace(self.layout, owner=self.layout) if isinstance(self.layout, Chunked) else self.layout

    @cached_property
    def _grid(self) -> Integers:
        """Corner of each patch of a grid, int64[patches, axes]."""
        begins = np.meshgrid(*(_begins(length, size) for length, size in self.axes), indexing="ij")
        return np.stack(begins, axis=-1).reshape(-1, len(self.axes))

    def _corners(self, numbers: Integers, epoch: int) -> Integers:
        """Return where patches begin in their rows, int64[patches, axes]."""
        if self.first is None:
            return self._grid[numbers % self.count]
        seeds = [sample_seeds(axis, epoch, numbers + self.first) for axis in range(len(self.axes))]
        drawn = [seed % (length - size + 1) for seed, (length, size) in zip(seeds, self.axes, strict=True)]
        return np.stack(drawn, axis=-1)

    def _by_corner(self, numbers: Integers, corners: Integers) -> Iterator[tuple[tuple[int, ...], Integers]]:
        """Yield corners, and the positions of the patches that begin there, each of another row."""
        if self.first is not None:
            yield from ((tuple(corner), np.array([at])) for at, corner in enumerate(corners.tolist()))
            return
        of_grid = numbers % self.count
        for patch in np.unique(of_grid).tolist():
            yield tuple(self._grid[patch].tolist()), np.flatnonzero(of_grid == patch)

    def _part(self, corner: tuple[int, ...]) -> Layout:
        """Return the layout of the part of each row that begins at a corner."""
        pairs = zip(corner, self.axes, strict=True)
        parts: list[range | None] = [range(at, at + size) if size < length else None for at, (length, size) in pairs]
        shape = self.field.shape
        parts += [None] * (len(shape) - len(parts))
        if isinstance(self.layout, Chunked):
            return subset(self._shared, shape, parts)
        lines = [prod(shape[axis:]) * self.field.dtype.itemsize for axis in range(len(shape))]
        read = [part if nbytes > LINE_BYTES else None for part, nbytes in zip(parts, lines, strict=True)]
        layout, later = subset(self.layout, shape, read), [None if r else p for r, p in zip(read, parts, strict=True)]
        return layout if all(part is None for part in later) else Picked(layout, taken_shape(shape, read), tuple(later))

    def _cut(self, whole: Array, position: Integers, corners: Integers, destination: Integers, out: Any) -> None:
        """Copy patches of whole rows."""
        for row, corner, to in zip(position.tolist(), corners.tolist(), destination.tolist(), strict=True):
            pairs = zip(corner, self.axes, strict=True)
            out[to] = whole[(row, *(slice(begin, begin + size) for begin, (_, size) in pairs))]
