"""Names of new fields and of weights, compared with the fields of the first file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from matex_data.errors import DataError, FormatError, without_hints
from matex_data.fields import WEIGHT, ElementSpec, name_taken
from matex_data.mpi.communicator import Communicator
from matex_data.opening.indexing import Reading, index_files
from matex_data.transforms.expressions import parse
from matex_data.transforms.new_fields import NewFields, named_by


def with_weights(
    comm: Communicator, files: Sequence[str], reading: Reading, elements: ElementSpec, created: NewFields
) -> tuple[ElementSpec, NewFields]:
    """Return the elements with the name of the weights, and the new fields with their expression. *Collective*.

    A field of the first file is no expression, although ``jets/weight`` might be one.

    Parameters
    ----------
    comm : the ranks.
    files : paths of the files.
    reading : of a field with the name of the weights.
    elements, created : as the user gave them.
    """
    text = elements.weights or ""
    wrong: FormatError | None = None
    try:
        expression = parse(text, "weights=")
        name = named_by(expression)
        if name is not None:
            return replace(elements, weights=name), created
    except FormatError as error:
        wrong = error
    if wrong is None:
        if _is_field(comm, files, reading):
            return elements, created
        expressions = {**created.expressions, WEIGHT: expression}
        return replace(elements, weights=WEIGHT), replace(created, expressions=expressions)
    try:
        index_files(comm, files[:1], reading, None)
    except DataError as no_field:
        raise (wrong if set(text) & set("()*+") else no_field) from wrong
    return elements, created


def _is_field(comm: Communicator, files: Sequence[str], reading: Reading) -> bool:
    """Return whether the first file can be read so. *Collective*. Opening all files raises any error but a name's."""
    try:
        with without_hints():
            index_files(comm, files[:1], reading, None)
    except DataError:
        return False
    return True


def is_known(comm: Communicator, files: Sequence[str], reading: Reading, name: str) -> bool:
    """Return whether the first file has a field of a name. *Collective*."""
    return _is_field(comm, files, replace(reading, names=[name]))


def refuse_hidden(comm: Communicator, files: Sequence[str], reading: Reading, created: NewFields) -> None:
    """Raise an error if a new field would hide one of the files that is not read. *Collective*.

    Parameters
    ----------
    comm : the ranks.
    files : paths of the files.
    reading : how they are read.
    created : the new fields.

    Raises
    ------
    FormatError : the first file has a field with the name of a new one.
    """
    for option, names in (("file_fields", created.file_fields), ("derive", created.expressions)):
        for name in names:
            if name == WEIGHT or reading.names is None:  # of all fields, the name is compared when it is added
                continue
            if is_known(comm, files, reading, name):
                raise name_taken(name, f"{option}=", files[0])
