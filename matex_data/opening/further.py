"""Fields of the files that batches do not have: those that splits look at, and names that the first file may have."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np

from matex_data._types import Array
from matex_data.errors import DataError, FieldNotFound, FormatError, without_hints
from matex_data.fields import WEIGHT, ElementSpec, field_of, name_taken
from matex_data.index.model import Index
from matex_data.mpi.communicator import Communicator
from matex_data.opening.indexing import WITH_COORDINATE, Reading, index_files, resolve_format
from matex_data.readers.formats import format_named
from matex_data.reading.source import Source
from matex_data.transforms.continuity import sample_coordinate, warn_of_order
from matex_data.transforms.expressions import parse
from matex_data.transforms.new_fields import NewFields, named_by
from matex_data.warning import quiet

MOST_CHECKED = 64  # files whose order in time is looked at: to index them once more takes 5 ms each


@dataclass(frozen=True)
class FurtherFields:
    """Way to the fields of the files that the index of a data set does not have.

    Parameters
    ----------
    comm : the ranks.
    files : paths of the files.
    reading : how they were read.
    created : fields that are added to theirs.
    rows : integers[files], rows of each file.
    opened : function that opens the files of an index. *Collective*.
    reshape : function that turns an index of the rows of the files into one of the samples of the data set.
    stored : path of the stored index, beside which those of further fields are stored; None: there is none.
    opened_before : what `open` has returned, by field.
    """

    comm: Communicator
    files: Sequence[str]
    reading: Reading
    created: NewFields
    rows: Array
    opened: Callable[[Index], Source]
    reshape: Callable[[Index], Index]
    stored: str | None = None
    opened_before: dict[str | None, tuple[Source, str]] = field(default_factory=dict, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what another process makes of it, which shares no communicator: nothing is to be opened there."""
        return _Nowhere, ()

    def open(self, name: str | None) -> tuple[Source, str]:
        """Return the opened files with a field as samples of the data set, and its name. *Collective*.

        The files are indexed once for each field.

        Parameters
        ----------
        name : of the field; None: the coordinate of the samples.

        Raises
        ------
        FieldNotFound : there is no such field, or no coordinate.
        FormatError : the files have changed.
        """
        if name not in self.opened_before:
            self.opened_before[name] = self._open(name)
        return self.opened_before[name]

    def _open(self, name: str | None) -> tuple[Source, str]:
        names = self.reading.names if name is None else self.created.to_read([name])
        if name is not None and names is None:  # of the names of the files alone
            names = self.reading.names
        reading = replace(self.reading, names=names, coordinate=name is None)
        with nullcontext() if name else quiet():  # what is to be said of the fields has been said
            index = index_files(self.comm, self.files, reading, self._path(name or "coordinate"))
        index = index if name is None else self.created.add(index, [name])
        found = field_of(index.fields, name).name if name else sample_coordinate(index.fields)
        if found is None:
            raise FieldNotFound(
                "the files have no coordinate of their samples",
                file=self.files[0],
                expected="netCDF files, or Zarr arrays, with a variable of the sample dimension",
                remedy='name the field of times or numbers, such as along="time"',
            )
        if not np.array_equal(index.files.rows, self.rows):
            raise FormatError(
                "the files have changed since they were opened",
                file=self.files[0],
                expected=f"{int(self.rows.sum())} samples in all files",
                found=f"{len(index)}",
                remedy="open the data set again",
            )
        return self.opened(self.reshape(index.select([found]))), found

    def warn_of_order(self, index: Index) -> None:
        """Warn on rank 0 of files that overlap in time, or are not in its order. *Collective*.

        Where the times are not among the fields, files of netCDF and Zarr without a stored index are opened for them.

        Parameters
        ----------
        index : of the samples, which are rows of the files.
        """
        name = sample_coordinate(index.fields)
        if not 1 < len(self.files) <= MOST_CHECKED:
            return
        if name is not None:
            warn_of_order(self.opened(index.select([name])), name)
        elif self.stored is None and self._has_coordinate():
            with suppress(DataError):  # without times that all files have alike nothing is known of their order
                warn_of_order(*self.open(None))

    def _has_coordinate(self) -> bool:
        """Return whether the first file is of netCDF or Zarr, by its name too: others are not opened. *Collective*."""
        path, format = self.files[0], self.reading.format
        named = format in WITH_COORDINATE or any(format_named(name).matches_name(path) for name in WITH_COORDINATE)
        return named and resolve_format(self.comm, path, format, self.reading.options) in WITH_COORDINATE

    def _path(self, name: str) -> str | None:
        """Return the path of the stored index of a field."""
        if self.stored is None:
            return None
        plain = name if name.isidentifier() else hashlib.blake2b(os.fsencode(name), digest_size=8).hexdigest()
        return f"{self.stored}.{plain}"


class _Nowhere:
    """Way to no further fields, in a process that has got a data set from another one."""

    def open(self, name: str | None) -> NoReturn:
        """Raise ``FieldNotFound``."""
        raise FieldNotFound(
            "a data set that another process has opened has the fields of its batches alone",
            field=name,
            remedy="split before the data set is sent to other processes, or select the field with inputs=",
        )


IsField = Callable[[str], bool]
"""Function that tells whether the files have a field of a name. *Collective*."""


def is_known(comm: Communicator, files: Sequence[str], reading: Reading, name: str) -> bool:
    """Return whether the first file has a field of a name. *Collective*. Opening all files raises other errors."""
    try:
        with without_hints():
            index_files(comm, files[:1], replace(reading, names=[name]), None)
    except DataError:
        return False
    return True


def with_weights(elements: ElementSpec, created: NewFields, is_field: IsField) -> tuple[ElementSpec, NewFields]:
    """Return the elements with the name of the weights, and the new fields with their expression. *Collective*.

    A field of the files is no expression, although ``jets/weight`` might be one.

    Parameters
    ----------
    elements, created : as the user gave them.
    is_field : whether the files have a field.

    Raises
    ------
    FormatError : the weights are neither the name of a field nor an expression.
    """
    text = elements.weights
    if text is None or text in created:
        return elements, created
    try:
        expression = parse(text, "weights=")
    except FormatError:
        if is_field(text) or not set(text) & set("()*+"):  # a name: the files tell if it is none of theirs
            return elements, created
        raise
    name = named_by(expression) or (text if is_field(text) else None)
    if name is not None:
        return replace(elements, weights=name), created
    expressions = {**created.expressions, WEIGHT: expression}
    return replace(elements, weights=WEIGHT), replace(created, expressions=expressions)


def refuse_hidden(file: str, names: Sequence[str] | None, created: NewFields, is_field: IsField) -> None:
    """Raise an error if a new field would hide one of the files that is not read. *Collective*.

    Parameters
    ----------
    file : path of the first file.
    names : of the fields that are read; None: all, with which the name is compared when it is added.
    created : the new fields.
    is_field : whether the files have a field.

    Raises
    ------
    FormatError : the files have a field with the name of a new one.
    """
    for option, of_option in (("file_fields", created.file_fields), ("derive", created.expressions)):
        for name in () if names is None else of_option:
            if name != WEIGHT and is_field(name):
                raise name_taken(name, f"{option}=", file)
