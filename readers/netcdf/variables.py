"""What both kinds of netCDF files have: variables over named dimensions, of which one counts the samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from matex_data._types import Array
from matex_data.errors import FormatError
from matex_data.fields import Field
from matex_data.index.model import Layout
from matex_data.readers.netcdf.cf import Meaning

HDF5_SUFFIXES = (".h5", ".hdf5", ".hdf", ".he5")


@dataclass(frozen=True)
class Variable(ABC):
    """An array over named dimensions.

    Parameters
    ----------
    name : with its groups, for example ``"forecast/t2m"``.
    dimensions, shape : of each axis.
    dtype : as stored.
    attributes : of single numbers, arrays and texts.
    """

    name: str
    dimensions: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    attributes: Mapping[str, Any]

    @abstractmethod
    def rows(self, axis: int, meaning: Meaning) -> tuple[Field, Layout]:
        """The rows along an axis, decoded as ``meaning`` says."""

    @abstractmethod
    def values(self) -> Array:
        """All numbers as stored."""

    @property
    def nbytes(self) -> int:
        """Size of all numbers as stored, in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class Content:
    """The variables of one file, and the dimensions with their lengths; ``unlimited`` are those that may grow."""

    path: str
    variables: Sequence[Variable]
    dimensions: Mapping[str, int]
    unlimited: Sequence[str]

    def sample_dimension(self, wanted: Sequence[Variable], asked: str | None) -> str:
        """The dimension that counts the samples.

        Parameters
        ----------
        wanted : the variables that are to have it.
        asked : its name, or None: the unlimited one, or else the first one of all that are wanted.

        Raises
        ------
        FormatError : there is no such dimension, or several may be meant.
        """
        if asked is not None:
            return self._named(asked)
        used = [name for name in self.unlimited if any(name in v.dimensions for v in wanted)]
        for choice in (used, [name for name in used if "/" not in name]):
            if len(choice) == 1:
                return choice[0]
        data = [v for v in wanted if v.dimensions and v.dimensions != (v.name,)]
        first = Counter(v.dimensions[0] for v in data or wanted if v.dimensions)
        if not used and len(first) == 1:
            return next(iter(first))
        if not first:
            raise self._error("the file has no samples", "a variable with a dimension", self._listed(), None)
        problem = "several dimensions of the file may count the samples"
        raise self._error(problem, "one unlimited or one common first dimension", self._listed(), next(iter(first)))

    def _named(self, asked: str) -> str:
        name = asked.strip("/")
        fitting = [n for n in self.dimensions if n == name] or [
            n for n in self.dimensions if n.rpartition("/")[2] == name
        ]
        if len(fitting) == 1:
            return fitting[0]
        problem = "several dimensions have that name" if fitting else "the file has no such dimension"
        raise self._error(problem, f"sample_dim= one of the file's, not {asked!r}", self._listed(), None)

    def _error(self, problem: str, expected: str, found: str, example: str | None) -> FormatError:
        remedy = f"name it, for example with sample_dim={example!r}, or choose fields with inputs=" if example else None
        if remedy and self.path.lower().endswith(HDF5_SUFFIXES):
            remedy += ", or read the file as plain HDF5 with format='hdf5'"
        return FormatError(problem, file=self.path, expected=expected, found=found, remedy=remedy)

    def _listed(self) -> str:
        """The dimensions as a text."""
        shown = [f"{name} ({length})" for name, length in list(self.dimensions.items())[:24]]
        more = f" and {len(self.dimensions) - 24} more" if len(self.dimensions) > 24 else ""
        return f"the dimensions {', '.join(shown)}{more}" if shown else "no dimensions"
