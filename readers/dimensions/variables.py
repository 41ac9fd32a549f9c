"""Model of both kinds of netCDF files: variables over named dimensions, one of which counts the samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from matex_data._types import Array
from matex_data.errors import FormatError, shortened
from matex_data.fields import Field
from matex_data.index.chunked import Chunked
from matex_data.index.library import LibraryRows, MemoryRows
from matex_data.index.model import Layout
from matex_data.index.strided import Strided, Transposed
from matex_data.readers.decoding import decode_layout
from matex_data.readers.dimensions.cf import CfDecoding, time_origin
from matex_data.readers.text.unpacked import UnpackedRows

HDF5_SUFFIXES = (".h5", ".hdf5", ".hdf", ".he5")
MAX_SHOWN = 24  # dimensions in an error


@dataclass(frozen=True)
class Variable(ABC):
    """Array over named dimensions.

    Parameters
    ----------
    name : with its groups, for example ``"forecast/t2m"``.
    dimensions, shape : name and length of each axis.
    dtype : as stored.
    attributes : numbers, arrays and texts.
    """

    name: str
    dimensions: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    attributes: Mapping[str, Any]

    @abstractmethod
    def stored_rows(self, axis: int) -> tuple[Field, Layout]:
        """Return field and layout of the rows along an axis, in native byte order, but not decoded."""

    def rows(self, axis: int, decoding: CfDecoding) -> tuple[Field, Layout]:
        """Return field and layout of the rows along an axis, decoded.

        Letters along the last axis become texts, unless a text lies in more than one chunk.
        """
        field, layout = self.stored_rows(axis)
        texts = _joined(layout, decoding) if decoding.letters else None
        if texts is not None:
            return replace(field, shape=field.shape[:-1], dtype=decoding.dtype), texts
        if field.ragged or decoding.dtype.kind not in "iufb":
            return field, layout
        decoded = replace(field, dtype=decoding.dtype, attributes=decoding.attributes)
        return decoded, layout if decoding.convert is None else decode_layout(layout, decoding.convert, decoding)

    @abstractmethod
    def values(self) -> Array:
        """Read all values, as stored."""

    def is_coordinate(self, dimension: str) -> bool:
        """Return whether the variable has a value for each entry of a dimension, maybe as the letters of a text."""
        first, others = self.dimensions[:1], self.dimensions[1:]
        is_text = self.dtype == "S1" and len(others) == 1
        return self.name.strip("/") == dimension and first == (dimension,) and (is_text or not others)

    @property
    def nbytes(self) -> int:
        """Size of all values as stored, in bytes."""
        return prod(self.shape) * self.dtype.itemsize


def _joined(layout: Layout, decoding: CfDecoding) -> Layout | None:
    """Return the layout of texts, given that of their letters along the last axis; None if one has several chunks."""
    dtype = decoding.dtype
    if isinstance(layout, Strided):
        return replace(layout, dtype=dtype, shape=layout.shape[:-1])
    if isinstance(layout, Transposed):
        return replace(layout, dtype=dtype, after=layout.after[:-1], order=layout.order[:-1])
    if isinstance(layout, Chunked) and layout.chunk_shape[-1] == dtype.itemsize:
        fill = bytes(layout.fill) * dtype.itemsize
        return replace(layout, dtype=dtype, shape=layout.shape[:-1], chunk_shape=layout.chunk_shape[:-1], fill=fill)
    if isinstance(layout, UnpackedRows):
        inner = _joined(layout.layout, decoding)
        return None if inner is None else replace(layout, layout=inner)
    return decode_layout(layout, decoding.convert, decoding) if isinstance(layout, MemoryRows | LibraryRows) else None


def _units(variable: Variable) -> tuple[Any, Any]:
    return variable.attributes.get("units"), variable.attributes.get("calendar")


def _is_time(variable: Variable) -> bool:
    return time_origin(*_units(variable)) is not None


@dataclass(frozen=True)
class FileContent:
    """Variables and dimensions of one file.

    Parameters
    ----------
    dimensions : length of each dimension.
    unlimited : names of the dimensions that may grow.
    """

    path: str
    variables: Sequence[Variable]
    dimensions: Mapping[str, int]
    unlimited: Sequence[str]

    def sample_dimension(self, selected: Sequence[Variable], requested: str | None) -> str:
        """Return the dimension that counts the samples.

        Parameters
        ----------
        selected : variables that are to have it.
        requested : its name; None: the one whose coordinate is a time by its units, else the unlimited dimension, else
            the first one that all selected variables have in common.

        Raises
        ------
        FormatError : there is no such dimension, or more than one candidate.
        """
        if requested is not None:
            return self._find(requested)
        times = self._times(selected)
        growing = [name for name in times if name in self.unlimited]
        for candidates in (times, growing, [name for name in times if "/" not in name]):
            if len(candidates) == 1:
                return candidates[0]
        if len({name.rpartition("/")[2] for name in times}) == 1:
            return times[0]  # of several groups; those of equal values are one dimension
        having = {name: sum(name in v.dimensions for v in selected) for name in self.unlimited}
        # An empty one that few variables have, such as the history of Argo's profiles, counts no samples.
        used = [name for name, n in having.items() if n and (self.dimensions[name] or 2 * n > len(selected))]
        for candidates in (used, [name for name in used if "/" not in name]):
            if len(candidates) == 1:
                return candidates[0]
        data = [v for v in selected if v.dimensions and v.dimensions != (v.name,)]
        first = Counter(v.dimensions[0] for v in data or selected if v.dimensions)
        if not used and len(first) == 1:
            return next(iter(first))
        if not first:
            raise self._error("the file has no samples", "a variable with a dimension", None)
        problem = "more than one dimension of the file may count the samples"
        raise self._error(problem, "one unlimited or one common first dimension", next(iter(first)))

    def _times(self, selected: Sequence[Variable]) -> list[str]:
        """Return the dimensions of the selected variables whose coordinate is a time by its units."""
        used = {name for variable in selected for name in variable.dimensions}
        return [v.name for v in self.variables if v.name in used and v.dimensions == (v.name,) and _is_time(v)]

    def alike(self, dimension: str) -> set[str]:
        """Return the dimension, and those of other groups with the same name and coordinate: each may have its own."""
        coordinates = {v.name: v for v in self.variables if v.dimensions == (v.name,)}
        found, last, own = {dimension}, dimension.rpartition("/")[2], coordinates.get(dimension)
        for name, length in self.dimensions.items():
            other = coordinates.get(name)
            if name == dimension or name.rpartition("/")[2] != last or length != self.dimensions[dimension]:
                continue
            if own is None or other is None or _units(own) != _units(other):
                continue
            if np.array_equal(own.values(), other.values()):
                found.add(name)
        return found

    def _find(self, requested: str) -> str:
        name = requested.strip("/")
        exact = [n for n in self.dimensions if n == name]
        matches = exact or [n for n in self.dimensions if n.rpartition("/")[2] == name]
        if len(matches) == 1:
            return matches[0]
        problem = "more than one dimension has that name" if matches else "the file has no such dimension"
        raise self._error(problem, f"sample_dim= one of the file's, not {requested!r}", None)

    def _error(self, problem: str, expected: str, example: str | None) -> FormatError:
        """Return an error that lists the dimensions; ``example``: a dimension to suggest for ``sample_dim=``."""
        remedy = None
        if example is not None:
            remedy = f"name it, for example with sample_dim={example!r}, or select fields with inputs="
            if self.path.lower().endswith(HDF5_SUFFIXES):
                remedy += ", or read the file as plain HDF5 with format='hdf5'"
        return FormatError(problem, file=self.path, expected=expected, found=self._describe_dimensions(), remedy=remedy)

    def _describe_dimensions(self) -> str:
        shown = shortened((f"{name} ({length})" for name, length in self.dimensions.items()), MAX_SHOWN)
        return f"the dimensions {', '.join(shown)}" if shown else "no dimensions"
