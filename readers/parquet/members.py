"""Fields of an Arrow schema: what each column becomes as NumPy arrays.

A type is a tree of lists, structures and values. Each path from a column to a value is one field: structures give the
name, lists the shape. Specification: https://arrow.apache.org/docs/format/Columnar.html
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from matex_data.declared import declared
from matex_data.errors import FormatError
from matex_data.fields import ALL_MISSING, EMPTY_IS_MISSING, EPOCH, Field
from matex_data.index.model import Index
from matex_data.readers.catalogue import Catalogue, Unreadable, given_for

SECONDS = "seconds"
_HUGGING_FACE = "datasets.features.features.Array"  # begin of the names of its types of arrays

ValueKind = Literal["number", "bool", "text", "time", "decimal", "null"]
Step = str | int | None
"""Step from a type towards a value: the name of a structure's member; the length of a fixed list; None: a list."""


@declared
@dataclass(frozen=True)
class ColumnField:
    """Field of a column.

    Parameters
    ----------
    steps : from the column to the values.
    requested : the user has requested the dtype of the field.
    """

    column: str
    steps: tuple[Step, ...]
    kind: ValueKind
    field: Field
    requested: bool = False

    @property
    def depth(self) -> int:
        """Number of the first step within all lists of any length: what is missing before it is an empty list."""
        return len(self.steps) - self.steps[::-1].index(None) if None in self.steps else 0

    def with_missing(self) -> ColumnField:
        """Return the field as it is if values are missing: integers and booleans need a dtype with NaN."""
        if self.requested or self.kind not in ("number", "bool") or self.field.dtype.kind == "f":
            return self
        return replace(self, field=replace(self.field, dtype=np.dtype(np.float64)))


def members(column: pa.Field, categories: list[str] | None) -> Iterator[ColumnField]:
    """Yield the fields of a column: the column itself, or ``<column>.<member>`` for each member of a structure.

    Parameters
    ----------
    column : of the Arrow schema.
    categories : names of the values of an integer column; None: it has none.

    Raises
    ------
    Unreadable : the type has no equivalent as NumPy arrays.
    """
    shape = _declared_shape(column)
    for name, steps, value in leaves_of(column.name, (), column.type):
        steps = steps if shape is None else (*steps[: -len(shape)], *shape)
        kind, found = _value_type(value)
        attributes = _attributes(column, value)
        if kind == "text":
            attributes[EMPTY_IS_MISSING] = True
        if categories is not None and not steps:
            attributes["categories"] = categories
        if kind == "null":
            attributes[ALL_MISSING] = True
        yield ColumnField(column.name, steps, kind, _field(name, steps, found, attributes))


def _field(name: str, steps: tuple[Step, ...], dtype: np.dtype[Any], attributes: dict[str, Any]) -> Field:
    lengths = [step for step in steps if not isinstance(step, str)]
    if None not in lengths:
        return Field(name, tuple(length for length in lengths if length is not None), dtype, attributes=attributes)
    if lengths[0] is None and None not in lengths[1:] and not dtype.hasobject:
        return Field(name, (), dtype, True, attributes, tuple(lengths))
    if any(length is not None for length in lengths):
        raise Unreadable("lists of different lengths within lists of one length, or the reverse")
    deep = {"nested": True} if len(lengths) > 1 else {}
    return Field(name, (), dtype, True, {**attributes, **deep})


def leaves_of(name: str, steps: tuple[Step, ...], kind: pa.DataType) -> Iterator[tuple[str, tuple[Step, ...], Any]]:
    """Yield name, steps and type of each value of a type."""
    kind = storage(kind)
    if pa.types.is_struct(kind):
        for member in kind:
            yield from leaves_of(f"{name}.{member.name}", (*steps, member.name), member.type)
    elif pa.types.is_fixed_size_list(kind):
        yield from leaves_of(name, (*steps, kind.list_size), kind.value_type)
    elif pa.types.is_map(kind):
        raise Unreadable("a map has no fields of its own")
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        yield from leaves_of(name, (*steps, None), kind.value_type)
    elif isinstance(kind, pa.FixedShapeTensorType):
        permutation = kind.permutation or list(range(len(kind.shape)))
        if permutation != sorted(permutation):
            raise Unreadable(f"a tensor stored in the order {permutation} of its axes")
        yield name, (*steps, *kind.shape), kind.value_type
    else:
        yield name, steps, kind


def storage(kind: pa.DataType) -> pa.DataType:
    """Return the type in which an extension type is stored; others, and tensors, as they are."""
    while isinstance(kind, pa.BaseExtensionType) and not isinstance(kind, pa.FixedShapeTensorType):
        kind = kind.storage_type
    return kind


def _value_type(kind: pa.DataType) -> tuple[ValueKind, np.dtype[Any]]:
    if pa.types.is_dictionary(kind):
        return _value_type(kind.value_type)
    if pa.types.is_boolean(kind):
        return "bool", np.dtype(bool)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return "number", np.dtype(kind.to_pandas_dtype())
    if _is_text(kind):
        return "text", np.dtype(object)
    if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        return "time", np.dtype(np.float64)
    if pa.types.is_decimal(kind):
        return "decimal", np.dtype(np.float64)
    if pa.types.is_null(kind):
        return "null", np.dtype(np.float64)
    raise Unreadable(f"{kind} has no equivalent as NumPy arrays")


def _is_text(kind: pa.DataType) -> bool:
    tests = (
        *(pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view),
        *(pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view, pa.types.is_fixed_size_binary),
    )
    return any(test(kind) for test in tests)


def _attributes(column: pa.Field, value: pa.DataType) -> dict[str, Any]:
    """Return the metadata of a column that are texts, and the unit of times."""
    hidden = ("ARROW:", "PARQUET:")
    pairs = ((key.decode("utf-8", "replace"), text) for key, text in (column.metadata or {}).items())
    attributes: dict[str, Any] = {
        key: text.decode("utf-8", "replace") for key, text in pairs if not key.startswith(hidden)
    }
    if pa.types.is_timestamp(value) or pa.types.is_date(value):
        attributes["units"] = EPOCH
    elif pa.types.is_temporal(value):
        attributes["units"] = SECONDS
    return attributes


def _declared_shape(column: pa.Field) -> tuple[int, ...] | None:
    """Return the shape of a column of arrays as Hugging Face's ``datasets`` stores them, in lists; None: of another."""
    metadata = column.metadata or {}
    name, stored = (metadata.get(b"ARROW:extension:" + key, b"") for key in (b"name", b"metadata"))
    if isinstance(column.type, pa.ExtensionType):  # ``datasets`` is imported
        name, stored = column.type.extension_name.encode(), column.type.__arrow_ext_serialize__()
    if not name.startswith(_HUGGING_FACE.encode()):
        return None
    try:
        shape, _ = json.loads(stored)
    except (TypeError, ValueError) as error:
        raise Unreadable(f"the shape of its arrays cannot be read: {error}") from error
    if not all(isinstance(length, int) for length in shape):
        return None
    return tuple(shape)


def _requested(path: str, member: ColumnField, dtype: Any) -> ColumnField:
    if member.kind == "text" and is_text(dtype):
        return member
    found = numeric(dtype)
    if member.kind == "text" or found is None:
        raise FormatError(
            "there is no such type for a column",
            file=path,
            field=member.field.name,
            expected="a dtype of integers, floats or booleans, or 'str' for texts",
            found=f"{dtype!r} for a column of {_KINDS.get(member.kind, 'numbers')}",
        )
    attributes = {key: value for key, value in member.field.attributes.items() if key != ALL_MISSING}
    field = replace(member.field, dtype=found.newbyteorder("="), attributes=attributes)
    return replace(member, field=field, requested=True)


def numeric(dtype: Any) -> np.dtype[Any] | None:
    """Return a user's dtype of integers, floats or booleans as NumPy's; None: it is another one, or none.

    >>> numeric("float32"), numeric("text")
    (dtype('float32'), None)
    """
    try:
        found = np.dtype(dtype)
    except TypeError:
        return None
    return found if found.kind in "iufb" else None


def is_text(dtype: Any) -> bool:
    """Return whether a user's dtype is that of texts."""
    return dtype in (str, "str")


_KINDS = {"text": "texts", "time": "times"}


def class_names(metadata: Mapping[bytes, bytes] | None) -> dict[str, list[str]]:
    """Return the names of the values of integer columns, as Hugging Face's ``datasets`` stores them in the schema."""
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
        labels = {name: kind for name, kind in features.items() if kind.get("_type") == "ClassLabel"}
        return {name: [str(label) for label in kind["names"]] for name, kind in labels.items()}
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}


Leaves = dict[str, tuple[ColumnField, int]]
"""By name of the field: its member, and the number of the leaf of the schema that holds it."""


def columns_of(
    path: str,
    schema: pa.Schema,
    dtype: Mapping[str, Any],
    make: Callable[[Leaves], Index],
    unread: Mapping[str, str] | None = None,
) -> Catalogue:
    """Return the catalogue of the columns of a schema; ``make`` returns the index of chosen ones.

    Parameters
    ----------
    unread : reason for each further column that cannot be read, by name.
    """
    known, unknown = _fields(path, schema, dtype)
    unread = {**(unread or {}), **unknown}
    named = {"dtype": (dtype, {*known, *unread, *schema.names})}

    def chosen(names: Sequence[str]) -> Index:
        return make({name: known[name] for name in names})

    return Catalogue(path, known, chosen, unread, "column", named=named)


def fields_of(members: Mapping[str, ColumnField]) -> dict[str, Field]:
    """Return the fields of members, by name."""
    return {name: member.field for name, member in members.items()}


def _fields(path: str, schema: pa.Schema, dtype: Mapping[str, Any]) -> tuple[Leaves, dict[str, str]]:
    """Return all fields, and the reason for each column that cannot be read."""
    known: Leaves = {}
    unread: dict[str, str] = {}
    labels = class_names(schema.metadata)
    first = 0
    for column in schema:
        leaves = range(first, first := first + _count_leaves(column.type))
        try:
            of_column = list(members(column, labels.get(column.name)))
        except Unreadable as reason:
            unread[column.name] = str(reason)
            continue
        for member, leaf in zip(of_column, leaves, strict=True):
            if member.field.name in known or member.field.name in unread:
                known.pop(member.field.name, None)
                unread[member.field.name] = "several columns, or members of columns, have this name"
            else:
                known[member.field.name] = member, leaf
    requested = dtypes_of(dtype, {name: member.column for name, (member, _) in known.items()})
    for name, given in requested.items():
        member, leaf = known[name]
        known[name] = _requested(path, member, given), leaf
    return known, unread


def dtypes_of(dtype: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return the dtype that the user requests for each field, by its name or that of its column, or by pattern.

    Parameters
    ----------
    columns : column of each field, by name.
    """
    of_columns = given_for(dtype, dict.fromkeys(columns.values()))
    found = {name: of_columns[column] for name, column in columns.items() if column in of_columns}
    named = {name: dtype[column] for name, column in columns.items() if column in dtype and name not in dtype}
    return {**found, **given_for(dtype, columns), **named}


def leaf_numbers(schema: pa.Schema) -> list[tuple[int, int]]:
    """Return for each leaf of a schema the number of its column, and its own number in this column."""
    return [(i, leaf) for i, column in enumerate(schema) for leaf in range(_count_leaves(column.type))]


def _count_leaves(kind: pa.DataType) -> int:
    """Return the number of leaves of a type in the schema of Parquet."""
    kind = storage(kind)
    if isinstance(kind, pa.FixedShapeTensorType):
        return 1
    if pa.types.is_map(kind):
        return _count_leaves(kind.key_type) + _count_leaves(kind.item_type)
    if pa.types.is_struct(kind):
        return sum(_count_leaves(member.type) for member in kind)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _count_leaves(kind.value_type)
    return 1
