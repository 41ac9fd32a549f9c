"""Values of expressions for many samples at once, by NumPy.

Integers are evaluated with 64 bits, floats in double precision, ``/`` divides truly, and ``%`` has the sign of the
divisor, as in Python. Truth values count as 0 and 1. Both sides of a comparison are rounded to the floats in which
NumPy compares the fields: 0.1 equals the number of 32 bits that is nearest to it. Fields of floats are delivered
with 32 bits if all fields of floats in the expression have at most 32 bits, and with 64 bits otherwise.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from cftime import num2date
from numpy.typing import NDArray

from matex_data._types import Array, Integers
from matex_data.errors import FormatError
from matex_data.fields import EXACT, Field
from matex_data.locks import cached_property
from matex_data.readers.dimensions.cf import NAT, ORIGIN
from matex_data.transforms.expressions import (
    NAN,
    Element,
    Expression,
    Numbers,
    OfExpressions,
    Operand,
    Reduction,
    TimePart,
)
from matex_data.transforms.names import check_lengths

TILE = 1 << 18  # numbers that are widened and evaluated at once, 2 MB for each operand
MOST_SECONDS = 9e12  # from 1970 on, either way: NumPy counts microseconds in 64 bits
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


def evaluate(expression: Expression, fields: Mapping[str, Values]) -> Values:
    """Return the values of an expression.

    Parameters
    ----------
    expression : the expression.
    fields : values of its fields, at least, of the same samples.

    Raises
    ------
    FormatError : the fields do not fit together, or the expression cannot be evaluated. ``row`` is the position of a
        sample.

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
    if isinstance(operand, OfExpressions):
        given = [evaluate(argument, fields) for argument in operand.arguments]
        if isinstance(operand, Reduction):
            return Values(_reduce(operand, *given))
        return Values(_element(operand, *given)) if isinstance(operand, Element) else _elements(operand, *given)
    values = fields[operand.name]
    content = values.content
    if isinstance(operand, TimePart):
        return Values(_time_part(expression, operand, content), values.lengths)
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
        check_lengths(
            f"{expression.option} combines lists of different lengths: {expression.text!r}",
            (name, one.lengths),
            first,
            "combine fields of the same objects, or reduce the lists first: sum({}) + sum({})".format(
                *expression.examples
            ),
        )
    return None if first is None else first[1]


def _name(operand: Operand) -> str:
    return operand.argument.text if isinstance(operand, OfExpressions) else operand.name


def _common_shape(expression: Expression, values: Mapping[str, Values], lengths: Integers | None) -> tuple[int, ...]:
    """Return the shape of a sample; () for lists. Operands with one number for each sample fit to any shape."""
    shapes = {one.content.shape[1:] for one in values.values() if one.lengths is None} - {()}
    if len(shapes) > 1 or (shapes and lengths is not None):
        by_name = {_name(expression.operands[variable]): one.shape for variable, one in values.items()}
        raise expression.error(
            ", ".join(f"{name!r} of shape {shape}" for name, shape in by_name.items()),
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
    try:
        with np.errstate(all="ignore"):
            result = np.asarray(_value(ast.parse(expression.code, mode="eval").body, columns))
    except ZeroDivisionError as error:
        raise expression.error(str(error), expected="integers that are divided by others than 0") from error
    except Exception as error:  # NumPy raises errors of many kinds
        raise expression.error(f"{type(error).__name__}: {error}") from error
    if result.dtype.kind not in "bif":
        raise expression.error(f"values of dtype {result.dtype}")
    result = result.astype(np.int64) if result.dtype.kind == "i" else result
    return np.broadcast_to(result, (rows, *shape))


def _value(node: ast.expr, columns: Mapping[str, Array]) -> Any:
    """Return the value of a syntax tree, which has been checked: an array, or a number."""
    match node:
        case ast.Name():
            return np.nan if node.id == NAN else columns[node.id]
        case ast.Constant():
            return node.value
        case ast.UnaryOp():
            value = _value(node.operand, columns)
            return _UNARY[type(node.op)](value if isinstance(node.op, ast.Invert) else _number(value))
        case ast.Compare():
            return _OPERATORS[type(node.ops[0])](_value(node.left, columns), _value(node.comparators[0], columns))
        case ast.BinOp():
            left, right = _value(node.left, columns), _value(node.right, columns)
            if not isinstance(node.op, ast.BitAnd | ast.BitOr):
                left, right = _number(left), _number(right)
            if isinstance(node.op, ast.FloorDiv | ast.Mod) and _is_whole(left) and _is_whole(right):
                if not np.all(right):
                    raise ZeroDivisionError("an integer that is divided by 0")
            elif isinstance(node.op, ast.Pow) and isinstance(right, int) and right < 0:
                right = float(right)
            return _OPERATORS[type(node.op)](left, right)
        case ast.Call(func=ast.Name(id="where")):
            condition, *values = (_value(argument, columns) for argument in node.args)
            return np.where(condition, *values)
        case ast.Call(func=ast.Name(id=name)):
            return getattr(np, name)(*(_number(_value(argument, columns)) for argument in node.args))
    raise TypeError(f"the syntax {ast.unparse(node)!r}")


def _number(value: Any) -> Any:
    """Return truth values as integers."""
    if isinstance(value, bool):
        return int(value)
    return value.astype(np.int64) if isinstance(value, np.ndarray | np.generic) and value.dtype == bool else value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, np.ndarray | np.generic) and value.dtype.kind == "i")


_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Invert: np.invert,
}
_OPERATORS: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: np.true_divide,
    ast.FloorDiv: np.floor_divide,
    ast.Mod: np.mod,
    ast.Pow: np.power,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


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
        raise argument.error(
            f"numbers in {name}()", expected=f"truth values in {name}(), such as {name}({argument.examples[0]} > 30)"
        )
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
        return _extremes(argument, _EXTREME[name], content, counts)
    dtype = np.float64 if content.dtype.kind == "f" or name == "mean" else np.int64
    sums = _fold(np.add, content.astype(dtype, copy=False), counts, np.zeros((), dtype))
    if name == "mean":
        with np.errstate(invalid="ignore"):
            return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return sums


def _time_part(expression: Expression, operand: TimePart, times: Array) -> Integers:
    """Return a number in the date of each time, to a microsecond, int64 of the same shape."""
    if times.dtype.kind not in "iuf":
        raise expression.error(f"{times.dtype}", field=operand.name, expected="numbers since a date")
    origin = operand.origin
    assert origin is not None
    seconds = origin.seconds(times)
    undated = times[~(np.abs(seconds) < MOST_SECONDS) | (times == NAT)]
    if len(undated):
        most = min(MOST_SECONDS / origin.unit, -float(NAT) * 0.9)
        remedy = f'where="abs(`{operand.name}`) < {most:.0e}" keeps the samples that have one'
        held = f"the time {undated[0]} {origin.stored_units}"
        raise expression.error(held, field=operand.name, expected="a time for each sample", remedy=remedy)
    if origin.is_gregorian(seconds):
        return _gregorian_part(operand.part, np.rint(seconds * 1e6).astype("datetime64[us]"))
    different, position = np.unique(seconds, return_inverse=True)
    dates = num2date(different, f"seconds since {ORIGIN}", origin.calendar)
    name = {"dayofyear": "dayofyr"}.get(operand.part, operand.part)
    return np.array([getattr(date, name) for date in dates], np.int64)[position].reshape(times.shape)


def _gregorian_part(part: str, times: NDArray[np.datetime64]) -> Integers:
    """Return a number in the date of each time.

    >>> times = np.array(["1969-12-31T23:30", "2024-03-01T05:00"], "datetime64[us]")
    >>> [_gregorian_part(part, times).tolist() for part in ("year", "month", "day", "dayofyear", "hour")]
    [[1969, 2024], [12, 3], [31, 1], [365, 61], [23, 5]]
    """
    unit, whole, first = _PARTS[part]
    begin = times.astype(f"datetime64[{whole}]") if whole else np.datetime64("0000", "Y")
    return (times.astype(f"datetime64[{unit}]") - begin).astype(np.int64) + first


_PARTS = {
    "year": ("Y", "", 0),
    "month": ("M", "Y", 1),
    "day": ("D", "M", 1),
    "dayofyear": ("D", "Y", 1),
    "hour": ("h", "D", 0),
}
"""Unit in which a part of a date counts, the unit within which it counts, and the first number."""


def _element(element: Element, values: Values) -> Array:
    """Return one of the numbers of each sample; NaN where a list is too short."""
    argument, number = element.argument, element.number
    content, lengths = values.content, values.lengths
    if lengths is None:
        if content.ndim == 1 or not -content.shape[1] <= number < content.shape[1]:
            held = f"{content.shape[1]} numbers" if content.ndim > 1 else "one number"
            raise argument.error(f"{held} for each sample", expected=f"a position {number} in {argument.text!r}")
        return content[:, number]
    within = (number < lengths) if number >= 0 else (-number <= lengths)
    position = np.cumsum(lengths) - (lengths if number >= 0 else 0) + number
    numbers = np.zeros(len(lengths), content.dtype)
    numbers[within] = content[position[within]]
    return _or_nan(argument, numbers, within)


def _elements(elements: OfExpressions, values: Values, condition: Values) -> Values:
    """Return those of the numbers of each sample for which a condition is true, as lists."""
    argument = elements.argument
    if condition.content.dtype != bool:
        example = f"{argument.examples[0]}[{argument.examples[0]} > 30]"
        raise argument.error("numbers in []", expected=f"truth values, such as {example}, or a position")
    if values.lengths is None or condition.lengths is None:
        if values.lengths is not condition.lengths or values.content.shape != condition.content.shape:
            raise argument.error(
                f"shapes {values.shape} and {condition.shape}", expected="as many truth values as numbers"
            )
        if values.content.ndim != 2:
            raise argument.error(f"samples of shape {values.shape}", expected="a list of numbers for each sample")
        return Values(values.content[condition.content], condition.content.sum(axis=1))
    check_lengths(
        f"{argument.option} selects of lists by others of different lengths: {argument.text!r}",
        (elements.arguments[1].text, condition.lengths),
        (argument.text, values.lengths),
        "use fields of the same objects",
    )
    kept = _fold(np.add, condition.content.astype(np.int64), values.lengths, np.zeros((), np.int64))
    return Values(values.content[condition.content], kept)


_EXTREME = {"min": np.minimum, "max": np.maximum}


def _extremes(argument: Expression, function: np.ufunc, content: Array, counts: Integers) -> Array:
    """Return the least or greatest numbers. Integers stay what they are, unless lists may be empty: then NaN is one.

    Raises
    ------
    FormatError : an integer of lists that may be empty is not exact in float64.
    """
    if content.dtype.kind == "f":
        return _fold(function, content, counts, np.array(np.nan))
    if content.ndim == 2:
        if not content.shape[1]:
            raise argument.error("no numbers in the samples", expected="one number at least in each sample")
        return _fold(function, content, counts, np.zeros((), np.int64))
    return _or_nan(argument, _fold(function, content, counts, np.zeros((), np.int64)), counts > 0)


def _or_nan(argument: Expression, numbers: Array, exists: Array) -> Array:
    """Return numbers of lists, and NaN for lists without them.

    Raises
    ------
    FormatError : an integer is not exact in float64.
    """
    if numbers.dtype == bool:
        raise argument.error("truth values", expected="numbers, of which NaN is one where there are none")
    large = np.flatnonzero((np.abs(numbers) > EXACT) & (numbers.dtype.kind != "f"))
    if len(large):
        raise FormatError(
            "an integer of lists that may be empty is not exact in float64, which has NaN for empty ones",
            field=argument.text,
            row=int(large[0]),
            expected="less than 2**53",
            found=str(numbers[large[0]]),
            remedy="store the lists with a fixed length, or compute the number with map()",
        )
    return np.where(exists, numbers, np.nan)


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
