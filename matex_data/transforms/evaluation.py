"""Values of expressions for many samples at once, by NumPy.

Integers are evaluated with 64 bits, floats in double precision, ``/`` divides truly, and ``%`` has the sign of the
divisor, as in Python. Truth values count as 0 and 1. Both sides of a comparison are rounded to the floats in which
NumPy compares the fields: 0.1 equals the number of 32 bits that is nearest to it. Fields of floats are delivered
with 32 bits if all fields of floats in the expression have at most 32 bits, and with 64 bits otherwise.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from math import prod
from typing import Any

import numpy as np
from cftime import num2date
from numpy.typing import NDArray

from matex_data._types import Array, Integers
from matex_data.errors import FormatError
from matex_data.fields import EXACT, MISSING_INTEGER, Field, is_category
from matex_data.locks import cached_property
from matex_data.readers.dimensions.cf import NAT, ORIGIN, calendar_of, time_origin
from matex_data.transforms.expressions import (
    REDUCTIONS,
    TIMES,
    Expression,
    compared_as,
    constants,
    stand_for_others,
)
from matex_data.transforms.names import check_lengths

TILE = 1 << 18  # numbers that are widened and evaluated at once, 2 MB for each operand
MOST_SECONDS = 9e12  # from 1970 on, either way: NumPy counts microseconds in 64 bits
_INT64_MAX = np.iinfo(np.int64).max
FEW_TEXTS = 8  # comparisons that take as long as a set: 262,144 texts take 3 ms each, and a set 25 ms


@dataclass(frozen=True)
class Values:
    """Values of a field or an expression for some samples.

    Parameters
    ----------
    content : [samples, ...]; of lists, the elements of all samples, one after the other.
    lengths : int64[samples], elements of each sample; None: the samples have one shape.
    field : that has them; None: an expression.
    name : of the field, or of one that the expression has, for errors.
    """

    content: Array
    lengths: Integers | None = None
    field: Field | None = None
    name: str = ""

    @property
    def rows(self) -> int:
        """Number of samples."""
        return len(self.content if self.lengths is None else self.lengths)

    @property
    def shape(self) -> tuple[int | None, ...]:
        """Shape of a sample, with None for an axis that varies."""
        return (None,) if self.lengths is not None else self.content.shape[1:]

    @cached_property
    def _ends(self) -> Integers:
        assert self.lengths is not None
        return np.concatenate([[0], np.cumsum(self.lengths)])

    def part(self, low: int, high: int) -> Values:
        """Return the values of samples ``low`` to ``high``."""
        if self.lengths is None:
            return replace(self, content=self.content[low:high])
        lengths = self.lengths[low:high]
        content = self.content[self._ends[low] : self._ends[low + len(lengths)]]
        return replace(self, content=content, lengths=lengths)


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
    used = {name: replace(fields[name], name=name) for name in expression.fields}
    rows = max(one.rows for one in used.values())
    step = max(1, TILE * max(1, rows) // max(1, *(one.content.size for one in used.values())))
    tiles: list[Values] = []
    for low in range(0, max(1, rows), step):
        tile = _Tile(expression, {name: one.part(low, low + step) for name, one in used.items()})
        try:
            tiles.append(tile.value(expression.tree))
        except FormatError as error:
            if error.row is not None:
                error.at_row(low + error.row)
            raise
    if len(tiles) == 1:
        return tiles[0]
    lengths = [tile.lengths for tile in tiles if tile.lengths is not None]
    return Values(np.concatenate([tile.content for tile in tiles]), np.concatenate(lengths) if lengths else None)


def delivered_dtype(expression: Expression, dtype: np.dtype[Any], fields: Mapping[str, Field]) -> np.dtype[Any]:
    """Return the dtype of a derived field, given that of its values."""
    floats = [fields[name].dtype for name in expression.numbers if fields[name].dtype.kind == "f"]
    narrow = dtype.kind == "f" and floats and all(one.itemsize <= 4 for one in floats)
    return np.dtype(np.float32) if narrow else dtype


class _Tile:
    """Values of an expression, and of all that it consists of, for as many samples as fit into the processor's cache.

    Parameters
    ----------
    expression : the expression.
    fields : values of its fields.
    """

    def __init__(self, expression: Expression, fields: Mapping[str, Values]) -> None:
        self._expression, self._fields = expression, fields
        self._known: dict[str, Any] = {}

    def value(self, node: ast.expr) -> Any:
        """Return the values of a node of the syntax tree, or the number that a constant one has."""
        match node:
            case ast.Constant(value=number):
                return number
            case ast.Name() | ast.Call() | ast.Subscript():
                key = ast.dump(node)
                if key not in self._known:
                    self._known[key] = self._operand(node)
                return self._known[key]
            case ast.UnaryOp(op=kind, operand=operand):
                return self._apply(_UNARY[type(kind)], operand)
            case ast.BinOp(left=left, op=kind, right=right):
                return self._apply(partial(_arithmetic, kind), left, right)
            case ast.Compare(left=ast.Name(id=name), comparators=[ast.Constant(value=str(text))]):
                return self._is_text(name, (text,))
            case ast.Compare(
                left=ast.Name(id=name), comparators=[ast.Tuple(elts=[ast.Constant(value=str()), *_]) as values]
            ):
                return self._is_text(name, constants(values))
            case ast.Compare(left=left, ops=[ast.In()], comparators=[values]):
                return self._apply(partial(_is_among, constants(values), self._rounded(node)), left)
            case ast.Compare(left=left, ops=[kind], comparators=[right]):
                return self._apply(self._comparison(node, kind), left, right)
        raise TypeError(f"the syntax {ast.unparse(node)!r}")

    def _operand(self, node: ast.Name | ast.Call | ast.Subscript) -> Any:
        """Return the values of a field, a function or elements, which an expression may have more than once."""
        match node:
            case ast.Name(id=name):
                return self._numbers(name)
            case ast.Call(func=ast.Name(id=function), args=[ast.Name(id=name)]) if function in TIMES:
                return self._time_part(function, name)
            case ast.Call(func=ast.Name(id=function), args=[argument]) if function in REDUCTIONS:
                return self._reduced(function, self.value(argument), argument)
            case ast.Call(func=ast.Name(id=function), args=arguments):
                return self._apply(np.where if function == "where" else _of_numbers(function), *arguments)
            case ast.Subscript(value=value, slice=ast.Constant(value=int(number))):
                return self._element(self.value(value), number, value)
            case ast.Subscript(value=value, slice=condition):
                return self._elements(self.value(value), self.value(condition), value, condition)
        raise TypeError(f"the syntax {ast.unparse(node)!r}")

    def _numbers(self, name: str) -> Values:
        """Return the numbers of a field as bool, int64 or float64."""
        values, error = self._fields[name], partial(self._expression.error, field=name)
        content, field = values.content, values.field
        if field is not None and MISSING_INTEGER in field.attributes:
            held = "integers that float64 cannot hold, of which one stands for missing values"
            raise error(held, expected="numbers without missing values, or floats")
        categories: Sequence[str] = field.attributes["categories"] if field is not None and is_category(field) else ()
        if stand_for_others(categories):
            remedy = f"compare the field with texts: `{name}` == {categories[0]!r}, `{name}` in {categories[:2]}"
            raise error("codes that stand for other numbers", expected="texts", remedy=remedy)
        if content.dtype.kind not in "biuf" or content.dtype.itemsize > 8:
            raise error(f"{content.dtype}", expected="numbers, or texts in a comparison: field == 'text'")
        if content.dtype == np.uint64 and content.size and content.max() > _INT64_MAX:
            raise error(
                str(content.max()),
                expected=f"integers of 64 bits with sign, up to {_INT64_MAX}",
                remedy="compute it with NumPy by data.map(function), and select by where() of the field that it adds",
            )
        wide: Any = {"b": bool, "f": np.float64}.get(content.dtype.kind, np.int64)
        return replace(values, content=content.astype(wide, copy=False))

    def _apply(self, function: Callable[..., Any], *nodes: ast.expr) -> Any:
        """Return the values of a function of NumPy, given the numbers of nodes, which are broadcast."""
        given = list(map(self.value, nodes))
        arrays = [one for one in given if isinstance(one, Values)]
        lists = [(one.name, one.lengths) for one in arrays if one.lengths is not None]
        for one in lists[1:]:
            option, examples = self._expression.option, self._expression.examples
            check_lengths(
                f"{option} combines lists of different lengths: {self._expression.text!r}",
                one,
                lists[0],
                "combine fields of the same objects, or reduce the lists first: sum({}) + sum({})".format(*examples),
            )
        shapes = {one.shape for one in arrays} - {()}
        if len(shapes) > 1:
            raise self._expression.error(
                ", ".join(f"{one.name!r} of shape {one.shape}" for one in arrays),
                expected="fields of one shape, beside those with one number for each sample",
            )
        like = max(arrays, key=lambda one: len(one.shape), default=Values(np.empty(0)))
        contents = [_broadcast(one, like) if isinstance(one, Values) else one for one in given]
        try:
            with np.errstate(all="ignore"):
                content = function(*contents)
        except ZeroDivisionError as error:
            raise self._expression.error(str(error), expected="integers that are divided by others than 0") from error
        except Exception as error:  # NumPy raises errors of many kinds
            raise self._expression.error(f"{type(error).__name__}: {error}") from error
        if not arrays:
            return content
        if content.dtype.kind not in "bif":
            raise self._expression.error(f"values of dtype {content.dtype}")
        return Values(content, like.lengths, name=like.name)

    def _rounded(self, node: ast.Compare) -> Callable[[Any], Any] | None:
        return compared_as(node, {name: values.content.dtype for name, values in self._fields.items()})

    def _comparison(self, node: ast.Compare, kind: ast.cmpop) -> Callable[[Any, Any], Any]:
        rounded = self._rounded(node)
        if rounded is None:
            return _OPERATORS[type(kind)]
        return lambda left, right: _OPERATORS[type(kind)](rounded(_number(left)), rounded(_number(right)))

    def _is_text(self, name: str, texts: Sequence[str]) -> Values:
        """Return which samples have one of some texts, or the code of a category of such a name."""
        values = self._fields[name]
        content, field = values.content, values.field
        if field is not None and is_category(field):
            known = field.codes
            codes = [known.get(text, -2 if text else -1) for text in texts]  # -1 is missing, no code is -2
            return replace(values, content=np.isin(content, codes), field=None)
        if content.dtype.kind not in "SUO" or values.lengths is not None:
            raise self._expression.error(f"{content.dtype}", field=name, expected="one text for each sample")
        is_letters = content.dtype.kind == "U"
        stored: list[Any] = [text if is_letters else text.encode("utf-8", "surrogateescape") for text in texts]
        return replace(values, content=_is_any(content, stored), field=None)

    def _time_part(self, part: str, name: str) -> Values:
        """Return a number in the date of each time, to a microsecond, int64 of the same shape."""
        values, error = self._fields[name], partial(self._expression.error, field=name)
        times, known = values.content, {} if values.field is None else values.field.attributes
        origin = time_origin(known.get("units"), calendar_of(known))
        if origin is None:
            held = f"a field of units {known['units']!r}" if known.get("units") else "a field without units"
            raise error(held, expected="times, such as seconds since 1970-01-01")
        if times.dtype.kind not in "iuf":
            raise error(f"{times.dtype}", expected="numbers since a date")
        seconds = origin.seconds(times)
        undated = times[~(np.abs(seconds) < MOST_SECONDS) | (times == NAT)]
        if len(undated):
            most = min(MOST_SECONDS / origin.unit, -float(NAT) * 0.9)
            remedy = f'where="abs(`{name}`) < {most:.0e}" keeps the samples that have one'
            held = f"the time {undated[0]} {origin.stored_units}"
            raise error(held, expected="a time for each sample", remedy=remedy)
        if origin.is_gregorian(seconds):
            numbers = _gregorian_part(part, np.rint(seconds * 1e6).astype("datetime64[us]"))
        else:
            different, position = np.unique(seconds, return_inverse=True)
            dates = num2date(different, f"seconds since {ORIGIN}", origin.calendar)
            of_date = {"dayofyear": "dayofyr"}.get(part, part)
            numbers = np.array([getattr(date, of_date) for date in dates], np.int64)[position].reshape(times.shape)
        return replace(values, content=numbers, field=None)

    def _reduced(self, name: str, values: Values, argument: ast.expr) -> Values:
        """Return one number for each sample, given several."""
        content, lengths, error = values.content, values.lengths, self._expression.error
        if lengths is None and content.ndim == 1:
            raise error(
                f"{ast.unparse(argument)!r}, where {name}() gets one number for each sample",
                expected=f"several numbers for each sample in {name}()",
            )
        if name in ("any", "all") and content.dtype != bool:
            example = f"{name}({self._expression.examples[0]} > 30)"
            raise error(f"numbers in {name}()", expected=f"truth values in {name}(), such as {example}")
        if name in ("min", "max") and content.dtype == bool:
            raise error(f"truth values in {name}()", expected="any() or all()")
        if lengths is None:
            content = content.reshape(len(content), prod(content.shape[1:]))
            counts: Integers = np.full(len(content), content.shape[1], np.int64)
        else:
            counts = lengths
        if name == "count" and content.dtype != bool:
            return Values(counts)
        if name in ("any", "all"):
            function = np.logical_or if name == "any" else np.logical_and
            return Values(_fold(function, content, counts, np.array(name == "all")))
        if name in ("min", "max"):
            return Values(self._extremes(np.minimum if name == "min" else np.maximum, content, counts, argument))
        dtype = np.float64 if content.dtype.kind == "f" or name == "mean" else np.int64
        sums = _fold(np.add, content.astype(dtype, copy=False), counts, np.zeros((), dtype))
        if name != "mean":
            return Values(sums)
        with np.errstate(invalid="ignore"):
            return Values(np.where(counts > 0, sums / np.maximum(counts, 1), np.nan))

    def _extremes(self, function: np.ufunc, content: Array, counts: Integers, argument: ast.expr) -> Array:
        """Return the least or greatest numbers. Integers stay what they are; NaN is one of lists that are empty. Raise
        ``FormatError`` if an integer of lists that may be empty is not exact in float64.
        """
        if content.dtype.kind == "f":
            return _fold(function, content, counts, np.array(np.nan))
        if content.ndim == 2 and not content.shape[1]:
            raise self._expression.error("no numbers in the samples", expected="one number at least in each sample")
        extremes = _fold(function, content, counts, np.zeros((), np.int64))
        return extremes if content.ndim == 2 else self._or_nan(extremes, counts > 0, argument)

    def _element(self, values: Values, number: int, node: ast.expr) -> Values:
        """Return one of the numbers of each sample; NaN where a list is too short."""
        content, lengths = values.content, values.lengths
        if lengths is None:
            if content.ndim == 1 or not -content.shape[1] <= number < content.shape[1]:
                held = f"{content.shape[1]} numbers" if content.ndim > 1 else "one number"
                expected = f"a position {number} in {ast.unparse(node)!r}"
                raise self._expression.error(f"{held} for each sample", expected=expected)
            return Values(content[:, number], name=values.name)
        within = (number < lengths) if number >= 0 else (-number <= lengths)
        position = np.cumsum(lengths) - (lengths if number >= 0 else 0) + number
        numbers = np.zeros(len(lengths), content.dtype)
        numbers[within] = content[position[within]]
        return Values(self._or_nan(numbers, within, node))

    def _or_nan(self, numbers: Array, exists: Array, node: ast.expr) -> Array:
        """Return numbers of lists, and NaN for lists without them; an integer that float64 rounds is an error."""
        if numbers.dtype == bool:
            raise self._expression.error("truth values", expected="numbers, of which NaN is one where there are none")
        large = np.flatnonzero((np.abs(numbers) > EXACT) & (numbers.dtype.kind != "f"))
        if len(large):
            raise FormatError(
                "an integer of lists that may be empty is not exact in float64, which has NaN for empty ones",
                field=ast.unparse(node),
                row=int(large[0]),
                expected="less than 2**53",
                found=str(numbers[large[0]]),
                remedy="store the lists with a fixed length, or compute the number with map()",
            )
        return np.where(exists, numbers, np.nan)

    def _elements(self, values: Values, condition: Values, node: ast.expr, choice: ast.expr) -> Values:
        """Return those of the numbers of each sample for which a condition is true, as lists."""
        expression, chosen = self._expression, condition.content
        if chosen.dtype != bool:
            example = f"{expression.examples[0]}[{expression.examples[0]} > 30]"
            raise expression.error("numbers in []", expected=f"truth values, such as {example}, or a position")
        if values.lengths is None or condition.lengths is None:
            if values.shape != condition.shape:
                shapes = f"shapes {values.shape} and {condition.shape}"
                raise expression.error(shapes, expected="as many truth values as numbers")
            if values.content.ndim != 2:
                shape = f"samples of shape {values.shape}"
                raise expression.error(shape, expected="a list of numbers for each sample")
            return Values(values.content[chosen], chosen.sum(axis=1), name=ast.unparse(node))
        check_lengths(
            f"{expression.option} selects of lists by others of different lengths: {expression.text!r}",
            (ast.unparse(choice), condition.lengths),
            (ast.unparse(node), values.lengths),
            "use fields of the same objects",
        )
        kept = _fold(np.add, chosen.astype(np.int64), values.lengths, np.zeros((), np.int64))
        return Values(values.content[chosen], kept, name=ast.unparse(node))


def _broadcast(values: Values, like: Values) -> Array:
    """Return values with as many axes as others have, or repeated for each element of their lists."""
    content = values.content
    if like.lengths is not None and values.lengths is None:
        return np.repeat(content, like.lengths)
    return content.reshape(len(content), *(1,) * len(like.shape)) if content.ndim == 1 and not values.shape else content


def _of_numbers(function: str) -> Callable[..., Any]:
    """Return a function of NumPy for which truth values are integers."""
    return lambda *arguments: getattr(np, function)(*map(_number, arguments))


def _arithmetic(kind: ast.operator, left: Any, right: Any) -> Any:
    """Return the result of an operator; raise ``ZeroDivisionError`` for integers that are divided by 0."""
    if not isinstance(kind, ast.BitAnd | ast.BitOr):
        left, right = _number(left), _number(right)
    if isinstance(kind, ast.FloorDiv | ast.Mod) and _is_whole(left) and _is_whole(right):
        if not np.all(right):
            raise ZeroDivisionError("an integer that is divided by 0")
    elif isinstance(kind, ast.Pow) and isinstance(right, int) and right < 0:
        right = float(right)
    return _OPERATORS[type(kind)](left, right)


def _number(value: Any) -> Any:
    """Return truth values as integers."""
    if isinstance(value, bool):
        return int(value)
    return value.astype(np.int64) if isinstance(value, np.ndarray | np.generic) and value.dtype == bool else value


def _is_among(numbers: Sequence[float], rounded: Callable[[Any], Any] | None, values: Any) -> Any:
    """Return which values equal one of some numbers, as comparisons with each of them would.

    Parameters
    ----------
    rounded : floats in which they are compared; None: float64, or integers.

    >>> _is_among([2**53 + 1, 4.5], None, np.array([2**53, 2**53 + 1, 4])).tolist()
    [False, True, False]
    """
    values = _number(values)
    if not isinstance(values, np.ndarray):
        return any(values == number for number in numbers)
    if rounded is not None:
        values = rounded(values)
    if values.dtype.kind == "f":
        return np.isin(values, np.array(list(map(values.dtype.type, numbers))))
    whole = [number for number in numbers if isinstance(number, int) and -_INT64_MAX <= number + 1 <= _INT64_MAX + 1]
    fractions = [number for number in numbers if not isinstance(number, int)]
    found = np.isin(values, np.array(whole, np.int64))
    return found | np.isin(values.astype(np.float64), fractions) if fractions else found


def _is_any(content: Array, texts: Sequence[Any]) -> Array:
    """Return which texts of an array are some others.

    >>> _is_any(np.array([b"a", b"b"], object), [b"a\\0"]).tolist()
    [False, False]
    """
    listed = np.array(texts, object if content.dtype.hasobject else None)  # else NumPy cuts NULs off, as in the array
    if len(listed) <= FEW_TEXTS:
        return reduce(np.logical_or, [np.asarray(content == listed[i : i + 1], bool) for i in range(len(listed))])
    among = frozenset(listed.tolist())
    return np.fromiter(map(among.__contains__, content.ravel().tolist()), bool, content.size).reshape(content.shape)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, np.ndarray | np.generic) and value.dtype.kind == "i")


_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: lambda value: +_number(value),
    ast.USub: lambda value: -_number(value),
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
