"""Values of expressions for many samples at once. numexpr evaluates them, and NumPy reduces lists to numbers.

Integers are evaluated with 64 bits, floats in double precision, and ``/`` divides truly. Fields of floats are delivered
with 32 bits if all fields of floats in the expression have at most 32 bits, and with 64 bits otherwise.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from math import prod
from typing import Any

import numpy as np

from matex_data._types import Array, Integers
from matex_data.errors import FormatError
from matex_data.fields import Field
from matex_data.locks import cached_property
from matex_data.machine import threads
from matex_data.transforms.expressions import Expression, Numbers, Operand, Reduction

TILE = 1 << 18  # numbers that are widened and evaluated at once, 2 MB for each operand
_INT64_MAX = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Values:
    """Values of a field or an expression for some samples.

    Parameters
    ----------
    content : [samples, ...]; of lists, the elements of all samples, one after the other.
    lengths : int64[samples], elements of each sample; None: the samples have one shape.
    """

    content: Array
    lengths: Integers | None = None

    @cached_property
    def shape(self) -> tuple[int | None, ...]:
        """Shape of a sample, with None for an axis that varies."""
        return (None,) if self.lengths is not None else self.content.shape[1:]


class _Engine:
    """numexpr in this process, used by one thread at a time, and by none while the process forks."""

    def __init__(self) -> None:
        self._numexpr: Any = None
        self._lock = threading.Lock()
        os.register_at_fork(
            before=self._lock.acquire, after_in_parent=self._lock.release, after_in_child=self._lock.release
        )

    def load(self) -> Any:
        """Return the module; raise ``FormatError`` if it is not installed."""
        try:
            module = import_module("numexpr")
        except ImportError as error:
            raise FormatError(
                "expressions of fields need the package numexpr",
                found=error,
                remedy="python -m pip install 'numexpr>=2.10'",
            ) from error
        if self._numexpr is None:
            module.set_num_threads(min(module.get_num_threads(), threads()))  # it takes all cores, which ranks share
            self._numexpr = module
        return module

    def evaluate(self, code: str, variables: Mapping[str, Array]) -> Array:
        """Return the values of a code."""
        module = self._numexpr or self.load()
        options = {"global_dict": {}, "truediv": True, "sanitize": True, "casting": "safe"}
        with self._lock:
            return np.asarray(module.evaluate(code, local_dict=dict(variables), **options))


_ENGINE = _Engine()


def missing_engine() -> FormatError | None:
    """Return the error of a rank on which numexpr is not installed."""
    try:
        _ENGINE.load()
    except FormatError as error:
        return error
    return None


def evaluate(expression: Expression, fields: Mapping[str, Values]) -> Values:
    """Return the values of an expression.

    Parameters
    ----------
    expression : the expression.
    fields : values of its fields, at least, of the same samples.

    Raises
    ------
    FormatError : the fields do not fit together, or numexpr cannot evaluate it. ``row`` is the position of a sample.

    Examples
    --------
    Two events, of one and two jets:

    >>> from matex_data.transforms.expressions import parse
    >>> fields = {"pt": Values(np.array([35.0, 20.0, 50.0]), np.array([1, 2])), "met": Values(np.array([9.0, 7.0]))}
    >>> evaluate(parse("sum(pt) + met"), fields).content.tolist()
    [44.0, 77.0]
    >>> evaluate(parse("pt > 4 * met"), fields).content.tolist()
    [False, False, True]
    """
    values = {variable: _operand(expression, operand, fields) for variable, operand in expression.operands.items()}
    lengths = _common_lengths(expression, values)
    shape = _common_shape(expression, values, lengths)
    columns = {variable: _broadcast(one, lengths, len(shape)) for variable, one in values.items()}
    rows = max(len(column) for column in columns.values())
    tiles = [_evaluate_tile(expression, tile, shape) for tile in _tiles(columns, rows, prod(shape))]
    content = tiles[0] if len(tiles) == 1 else np.concatenate(tiles)
    return Values(content, lengths)


def delivered_dtype(expression: Expression, dtype: np.dtype[Any], fields: Mapping[str, Field]) -> np.dtype[Any]:
    """Return the dtype of a derived field, given that of its values."""
    floats = [fields[name].dtype for name in expression.numbers if fields[name].dtype.kind == "f"]
    narrow = dtype.kind == "f" and floats and all(one.itemsize <= 4 for one in floats)
    return np.dtype(np.float32) if narrow else dtype


def _operand(expression: Expression, operand: Operand, fields: Mapping[str, Values]) -> Values:
    if isinstance(operand, Reduction):
        return Values(_reduce(operand, evaluate(operand.argument, fields)))
    values = fields[operand.name]
    content = values.content
    if isinstance(operand, Numbers):
        if content.dtype.kind not in "biuf" or content.dtype.itemsize > 8:
            raise expression.error(
                f"{content.dtype}", field=operand.name, expected="numbers, or texts in a comparison: field == 'text'"
            )
        if content.dtype.kind == "u" and content.dtype.itemsize == 8 and content.size and content.max() > _INT64_MAX:
            raise expression.error(
                str(content.max()), field=operand.name, expected=f"integers of 64 bits with sign, up to {_INT64_MAX}"
            )
        return values
    if operand.value is None or isinstance(operand.value, int):
        return Values(content == (-2 if operand.value is None else operand.value), values.lengths)  # no code is -2
    if content.dtype.kind not in "SUO" or values.lengths is not None:
        raise expression.error(f"{content.dtype}", field=operand.name, expected="one text for each sample")
    text: Any = operand.value if content.dtype.kind == "U" else operand.value.encode("utf-8", "surrogateescape")
    return Values(np.asarray(content == text, bool))


def _common_lengths(expression: Expression, values: Mapping[str, Values]) -> Integers | None:
    """Return the number of elements of each sample that all lists have in common; None without lists."""
    first: tuple[str, Integers] | None = None
    for variable, one in values.items():
        if one.lengths is None:
            continue
        name = _name(expression.operands[variable])
        if first is None:
            first = name, one.lengths
            continue
        differ = np.flatnonzero(first[1] != one.lengths)
        if len(differ):
            row = int(differ[0])
            raise FormatError(
                f"{expression.option} combines lists of different lengths: {expression.text!r}",
                field=name,
                row=row,
                expected=f"{first[1][row]} elements, as in {first[0]!r}",
                found=f"{one.lengths[row]} elements",
                remedy="combine fields of the same objects, or reduce the lists first: sum(Jet_pt) + sum(Muon_pt)",
            )
    return None if first is None else first[1]


def _name(operand: Operand) -> str:
    return operand.argument.text if isinstance(operand, Reduction) else operand.name


def _common_shape(expression: Expression, values: Mapping[str, Values], lengths: Integers | None) -> tuple[int, ...]:
    """Return the shape of a sample; () for lists. Operands with one number for each sample fit to any shape."""
    shapes = {one.content.shape[1:] for one in values.values() if one.lengths is None} - {()}
    if len(shapes) > 1 or (shapes and lengths is not None):
        found = {_name(expression.operands[variable]): one.shape for variable, one in values.items()}
        raise expression.error(
            ", ".join(f"{name!r} of shape {shape}" for name, shape in found.items()),
            expected="fields of one shape, beside those with one number for each sample",
        )
    return next(iter(shapes), ())


def _broadcast(values: Values, lengths: Integers | None, axes: int) -> Array:
    """Return the values with as many axes as the others, or repeated for each element of a list."""
    content = values.content
    if lengths is not None and values.lengths is None:
        return np.repeat(content, lengths)
    return content.reshape(len(content), *(1,) * axes) if content.ndim == 1 and axes else content


def _tiles(columns: Mapping[str, Array], rows: int, numbers: int) -> Iterator[dict[str, Array]]:
    step = max(1, TILE // max(1, numbers))
    for low in range(0, max(1, rows), step):
        yield {variable: _widened(column[low : low + step]) for variable, column in columns.items()}


def _widened(column: Array) -> Array:
    """Return numbers as bool, int64 or float64."""
    if column.dtype.kind == "f":
        return column.astype(np.float64, copy=False)
    return column if column.dtype == bool else column.astype(np.int64, copy=False)


def _evaluate_tile(expression: Expression, columns: Mapping[str, Array], shape: tuple[int, ...]) -> Array:
    rows = len(next(iter(columns.values())))
    if not rows:  # numexpr gets a number for each dtype
        columns = {variable: np.ones((1, *column.shape[1:]), column.dtype) for variable, column in columns.items()}
    try:
        found = _ENGINE.evaluate(expression.code, columns)
    except FormatError:
        raise
    except Exception as error:  # numexpr raises errors of many kinds
        raise expression.error(f"{type(error).__name__}: {error}") from error
    if found.dtype.kind not in "bif":
        raise expression.error(f"values of dtype {found.dtype}")
    found = found.astype(np.int64) if found.dtype.kind == "i" else found
    return np.broadcast_to(found, (max(1, rows), *shape))[:rows]


def _reduce(reduction: Reduction, values: Values) -> Array:
    """Return one number for each sample, given several."""
    name, argument = reduction.function, reduction.argument
    content, lengths = values.content, values.lengths
    if lengths is None and content.ndim == 1:
        raise argument.error(
            f"{argument.text!r}, where {name}() gets one number for each sample",
            expected=f"several numbers for each sample in {name}()",
        )
    if name in ("any", "all") and content.dtype != bool:
        raise argument.error(f"numbers in {name}()", expected=f"truth values in {name}(), such as any(Jet_pt > 30)")
    if name in ("min", "max") and content.dtype == bool:
        raise argument.error(f"truth values in {name}()", expected="any() or all()")
    if lengths is None:
        content = content.reshape(len(content), prod(content.shape[1:]))
        counts: Integers = np.full(len(content), content.shape[1], np.int64)
    else:
        counts = lengths
    if name == "count" and content.dtype != bool:
        return counts
    if name in ("any", "all"):
        return _fold(np.logical_or if name == "any" else np.logical_and, content, counts, np.array(name == "all"))
    if name in ("min", "max"):
        return _fold(_EXTREME[name], content, counts, np.array(np.nan))
    dtype = np.float64 if content.dtype.kind == "f" else np.int64
    sums = _fold(np.add, content.astype(dtype, copy=False), counts, np.zeros((), dtype))
    if name == "mean":
        with np.errstate(invalid="ignore"):
            return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return sums


_EXTREME = {"min": np.minimum, "max": np.maximum}


def _fold(function: np.ufunc, content: Array, counts: Integers, empty: Array) -> Array:
    """Return one value for each sample: of the numbers of each sample by a function, of samples without any ``empty``.

    Parameters
    ----------
    content : [samples, numbers], or the numbers of all samples, one sample after the other.
    counts : int64[samples].
    """
    filled = counts > 0
    result = np.full(len(counts), empty)
    if not filled.any():
        return result
    if content.ndim == 2:
        result[...] = function.reduce(content, axis=1)
    else:
        result[filled] = function.reduceat(content, (np.cumsum(counts) - counts)[filled])
    return result
