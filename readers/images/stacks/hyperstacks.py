"""Hyperstacks: TIFF files whose planes have several axes (time, depth, channel), some of which count the samples.

The axes are those of ImageJ's or OME's metadata, which tifffile reads, or those that the user names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from matex_data._types import Array, Integers
from matex_data.declared import declared
from matex_data.errors import FormatError
from matex_data.fields import Field
from matex_data.index.cache import ChunkCache
from matex_data.index.model import Layout, ReadRequest, RowSelection, call_after_last
from matex_data.index.runs import compress
from matex_data.locks import cached_property
from matex_data.storage.files import open_binary
from matex_data.storage.objects import is_url

IN_PLANE = "YXS"
"""Axes within a plane: height, width, samples of a pixel."""


@dataclass(frozen=True)
class Hyperstack:
    """Axes of the planes of a file.

    Parameters
    ----------
    axes : names, such as "TZCYX", in the order of the file; or sizes by name, such as ``{"T": 10, "Z": 5}``, without
        those of a plane. None: as the metadata say.
    samples : axes that count the samples, such as "T" or "TZ"; None: the first one.

    Raises
    ------
    FormatError : these are no axes.
    """

    axes: str | Mapping[str, int] | None = None
    samples: str | None = None

    def __post_init__(self) -> None:
        names = self.axes or ""
        chosen = self.samples or ""
        distinct = all(len(set(text)) == len(text) for text in ("".join(names), chosen))
        if not distinct or set(chosen) & set(IN_PLANE) or (names and not set(chosen) <= set(names)):
            raise FormatError(
                "these are no axes of a hyperstack",
                expected='axes="TZCYX" in the order of the file, and samples= of some of them, other than "Y" and "X"',
                found=f"axes={self.axes!r}, samples={self.samples!r}",
            )

    def applied(self, path: str, field: Field, pages: Layout) -> tuple[Field, Layout]:
        """Return field and layout of the samples of a file, given those of its planes.

        Raises
        ------
        FormatError : the file has other axes.
        """
        sizes = self._sizes(path, pages.rows)
        chosen = self.samples or next(iter(sizes), "")
        if not set(chosen) <= set(sizes):
            raise _other_axes(path, f"an axis {chosen!r}", sizes)
        others = [axis for axis in sizes if axis not in chosen]
        order = tuple(list(sizes).index(axis) for axis in [*chosen, *others])
        attributes = {**field.attributes, "axes": "".join(others) + IN_PLANE[: len(field.shape)]}
        shape = (*(sizes[axis] for axis in others), *field.shape)
        layout = Planes(pages, tuple(sizes.values()), order, len(chosen), field.shape, field.dtype)
        return replace(field, shape=shape, attributes=attributes), layout

    def _sizes(self, path: str, planes: int) -> dict[str, int]:
        """Return the sizes of the axes of the planes, by name, in the order of the file."""
        if isinstance(self.axes, Mapping):
            sizes = {axis: int(size) for axis, size in self.axes.items() if axis not in IN_PLANE}
            if prod(sizes.values()) != planes:
                raise _other_axes(path, f"axes={dict(self.axes)} of {prod(sizes.values())} planes", {"planes": planes})
            return sizes
        stored = list(_stored_axes(path))
        every = zip(*stored[-1], strict=True)
        named = {axis: size for axis, size in every if size > 1 or axis in (self.axes or "")}
        for axes, shape in (*stored, ("".join(named), tuple(named.values()))):
            if self.axes is None or len(self.axes) == len(axes):
                pairs = zip(self.axes or axes, shape, strict=True)
                sizes = {axis: size for axis, size in pairs if axis not in IN_PLANE}
                if prod(sizes.values()) == planes:
                    return sizes
        axes, shape = stored[0]
        raise _other_axes(path, f"axes={self.axes!r}", dict(zip(axes, shape, strict=True)))


def _stored_axes(path: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield axes and shape of the images of a file, without and with axes of length 1."""
    import tifffile

    with open_binary(path) as stored, tifffile.TiffFile(stored if is_url(path) else path, _multifile=False) as file:
        series = file.series[0]
        for squeeze in (True, False):
            yield series.get_axes(squeeze), series.get_shape(squeeze)


def _other_axes(path: str, expected: str, sizes: Mapping[str, int]) -> FormatError:
    return FormatError(
        "the axes of the hyperstack are others",
        file=path,
        expected=expected,
        found=", ".join(f"{axis}: {size}" for axis, size in sizes.items()),
        remedy='name all axes in the order of the file, axes="TZCYX", or give sizes: axes={"T": 10, "Z": 5}',
    )


@declared
@dataclass(frozen=True, eq=False)
class Planes(Layout):
    """Samples of several planes each, which need not follow one another in the file.

    Parameters
    ----------
    pages : layout of the planes.
    sizes : lengths of the axes of the planes, in the order of the file.
    order : numbers of these axes, those of the samples first.
    leading : number of axes of the samples.
    shape, dtype : of a plane.
    """

    pages: Layout
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    leading: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    block_rows = 1

    @property
    def rows(self) -> int:  # type: ignore[override]
        return prod(self.sizes[axis] for axis in self.order[: self.leading])

    @cached_property
    def _planes(self) -> Integers:
        """Planes of each sample, int64[rows, planes]."""
        numbers: Integers = np.arange(prod(self.sizes), dtype=np.int64).reshape(self.sizes)
        return numbers.transpose(self.order).reshape(self.rows, -1)

    def stored_bytes(self) -> int:
        return self.pages.stored_bytes()

    def end(self) -> int:
        return self.pages.end()

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        planes = self._planes[rows.numbers]
        depth = planes.shape[1]
        direct = out.flags.c_contiguous
        first = rows.destination if direct else np.arange(len(planes))
        destination = (first[:, None] * depth + np.arange(depth)).reshape(-1)
        target = out if direct else np.empty((len(planes), *out.shape[1:]), self.dtype)
        order = np.argsort(planes, axis=None)
        runs = compress(planes.reshape(-1)[order])
        requests = self.pages.requests(runs.selection(destination[order]), target.reshape(-1, *self.shape), cache)
        yield from requests if direct else call_after_last(requests, partial(_copy, out, rows, target))


def _copy(out: Array, rows: RowSelection, planes: Array) -> None:
    out[rows.destination] = planes
