"""Selection of a part of each variable: by values of coordinates (``sel=``) or by positions (``isel=``)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from matex_data._types import Array
from matex_data.errors import FieldNotFound, FormatError, near_matches
from matex_data.fields import Field
from matex_data.index.model import Layout
from matex_data.index.strided import Indices
from matex_data.index.subset import Axis, subset, subset_rows, take, taken_shape
from matex_data.readers.dimensions.labels import Labels, is_list, no_entry, plain
from matex_data.readers.dimensions.variables import FileContent, Variable

ReadCoordinate = Callable[[Variable], tuple[Array, Mapping[str, Any]]]
"""Callable that returns the decoded values of a coordinate, and its attributes."""


@dataclass(frozen=True)
class Selection:
    """Entries that are taken along the dimensions of a file.

    Parameters
    ----------
    axes : entries of each selected dimension, by name.
    rows : entries of the sample dimension; None: all.
    listed : fact `LISTED` of a list of values along the sample dimension, of which a file has some; None: no list.
    """

    axes: Mapping[str, Axis]
    rows: Indices | None = None
    listed: str | None = None

    def of_dimensions(self, names: Sequence[str]) -> tuple[Axis, ...]:
        """Return the entries along each of these dimensions."""
        return tuple(self.axes.get(name) for name in names)

    def field(self, field: Field, layout: Layout, names: Sequence[str]) -> tuple[Field, Layout]:
        """Return a field with the selected entries of a sample, and the selected samples; see `entries`."""
        selected, layout = self.entries(field, layout, names)
        return selected, layout if self.rows is None else subset_rows(layout, self.rows)

    def entries(self, field: Field, layout: Layout, names: Sequence[str]) -> tuple[Field, Layout]:
        """Return a field with the selected entries of all rows.

        Parameters
        ----------
        field, layout : of whole rows.
        names : of the dimensions of a row.
        """
        axes = self.of_dimensions(names)[: len(field.shape)]
        axes += (None,) * (len(field.shape) - len(axes))
        return replace(field, shape=taken_shape(field.shape, axes)), subset(layout, field.shape, axes)

    def values(self, values: Array, names: Sequence[str]) -> Array:
        """Return the selected entries of an array over these dimensions."""
        axes = self.of_dimensions(names)[: values.ndim]
        return take(values, axes + (None,) * (values.ndim - len(axes)))


def selection_of(
    content: FileContent,
    dimension: str,
    alike: Collection[str],
    used: Collection[str],
    sel: Mapping[str, Any] | None,
    isel: Mapping[str, Any] | None,
    coordinate: ReadCoordinate,
    nearest: bool = False,
) -> Selection:
    """Return the selection of a file.

    Parameters
    ----------
    dimension : that counts the samples.
    alike : this dimension, and those of groups that are the same one.
    used : dimensions of the variables that are asked for.
    sel : values of coordinates: one, a list, or a slice with both ends, by dimension.
    isel : positions, likewise, by dimension.
    nearest : values of ``sel`` may lie between those of a coordinate of a sample.

    Raises
    ------
    FieldNotFound : there is no such dimension, or it has no coordinate.
    FormatError : a coordinate has no such value, or a position is out of range.
    """
    if not sel and not isel:
        return Selection({})
    axes: dict[str, Axis] = {}
    rows: Indices | None = None
    listed: str | None = None
    for option, wanted in (("sel", sel), ("isel", isel)):
        for key, given in (wanted or {}).items():
            value = plain(given)
            named = _dimension(content, key, option, dimension, used)
            name = dimension if named in alike else named
            if name in axes or (name == dimension and rows is not None):
                raise FormatError(
                    f"sel= and isel= both select along {name!r}",
                    file=content.path,
                    expected="one of them",
                    remedy="leave out one of them along this dimension",
                )
            if option == "isel":
                if name == dimension:
                    raise _counts_samples(content, name)
                axes[name] = _positions(content, name, value)
                continue
            values, attributes = _coordinate(content, name, coordinate, dimension)
            labels = Labels(content.path, name, values, attributes, nearest and name != dimension)
            if name == dimension:
                rows, listed = labels.samples(value)
            else:
                axes[name] = labels.entries(value)
    return Selection(axes, rows, listed)


def _counts_samples(content: FileContent, name: str) -> FormatError:
    return FormatError(
        f"isel= selects along {name!r}, which counts the samples",
        file=content.path,
        expected="dimensions of a sample",
        remedy=f'select samples by values, such as sel={{"{name}": slice("2015", "2016")}}, or split the data set',
    )


def _dimension(content: FileContent, key: str, option: str, samples: str, used: Collection[str]) -> str:
    """Return the dimension that a key names, with or without its group.

    Of several, the one that counts the samples, else the only one that is ``used``, else the one outside of all groups.
    """
    plain = key.strip("/")
    found = [name for name in content.dimensions if plain in (name, name.rpartition("/")[2])]
    for choice in ({samples}, used, {plain}, found):
        chosen = [name for name in found if name in choice]
        if len(chosen) == 1:
            return chosen[0]
    problem = "names several dimensions of the file" if found else "names a dimension that the file does not have"
    near = near_matches(plain, found or content.dimensions, 12)
    raise FieldNotFound(f"{option}= {problem}", file=content.path, field=key, expected=f"one of {near}")


def _coordinate(content: FileContent, name: str, read: ReadCoordinate, samples: str) -> tuple[Array, Mapping[str, Any]]:
    """Return the values of the coordinate of a dimension, and its attributes."""
    for variable in content.variables:
        if variable.is_coordinate(name):
            values, attributes = read(variable)
            if values.ndim == 1:  # no letters, as they are with decode=False
                return values, attributes
    raise FieldNotFound(
        f"sel= selects along {name!r}, which has no coordinate",
        file=content.path,
        field=name,
        expected="a variable of this name along the dimension",
        remedy="split the data set, or give where="
        if name == samples
        else f'select by position, such as isel={{"{name}": 0}}',
    )


def _positions(content: FileContent, name: str, value: Any) -> Axis:
    """Return the entries along a dimension at given positions."""
    length = content.dimensions[name]
    expected = f"positions from {-length} to {length - 1}"
    if isinstance(value, slice):
        try:
            given: Sequence[Any] = range(*value.indices(length))
        except (TypeError, ValueError) as error:
            raise no_entry(content.path, name, value, "a slice of whole numbers, by a step other than 0") from error
    else:
        given = list(value) if is_list(value) else [value]
        if len(given) == length and all(isinstance(one, bool) for one in given):
            given = [number for number, is_chosen in enumerate(given) if is_chosen]
    if not len(given):
        raise no_entry(content.path, name, value, expected)
    for one in given:
        if not isinstance(one, Integral) or isinstance(one, bool) or not -length <= int(one) < length:
            raise no_entry(content.path, name, one, expected)
    if isinstance(given, range):
        return given
    found = tuple(int(one) % length for one in given)
    return found if is_list(value) else found[0]
