"""Selection of samples by an expression of their columns, which numexpr evaluates.

An expression is a Python expression of field names, numbers, ``+ - * / % **``, comparisons, ``& | ~`` and numexpr's
functions. A name that is no Python identifier stands in backticks, as in ``pandas.DataFrame.query``:
```jets/pt` > 30``. Integers are evaluated with 64 bits, floats in double precision, and ``/`` divides truly.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from matex_data._types import Array
from matex_data.errors import FieldNotFound, FormatError, near_matches
from matex_data.fields import Field, Schema
from matex_data.index.chosen import Samples
from matex_data.machine import threads
from matex_data.reading.source import Source
from matex_data.transforms.ruling_out import rule_out
from matex_data.transforms.select import select_samples

REMEDY = "combine comparisons of per-event columns with & | ~ and parentheses: (MET > 30) & (nJet < 4)"
_INT64_MAX = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Expression:
    """Parsed expression.

    Parameters
    ----------
    text : as the user wrote it.
    code : the expression with the names of ``columns`` in place of those of the fields.
    columns : field name of each variable of ``code``.
    """

    text: str
    code: str
    columns: Mapping[str, str]

    @property
    def fields(self) -> list[str]:
        """Names of the fields."""
        return list(self.columns.values())


def parse(text: str) -> Expression:
    """Parse an expression; nothing is evaluated.

    Raises
    ------
    FormatError : it is no expression, or names no field.

    Examples
    --------
    >>> parse("(`jets/pt` > 30) & (MET < 4)").fields
    ['jets/pt', 'MET']
    """
    quoted: dict[str, str] = {}

    def variable(found: re.Match[str]) -> str:
        name = f"quoted_{len(quoted)}"
        while name in text:
            name += "_"
        quoted[name] = found[1]
        return f" {name} "

    try:
        tree = ast.parse(re.sub("`([^`]+)`", variable, text).strip(), mode="eval")
    except (SyntaxError, ValueError) as error:
        raise _error(text, error) from error
    _check_syntax(text, tree)
    rename = _Rename(quoted)
    code = ast.unparse(rename.visit(tree))
    if not rename.columns:
        raise _error(text, "an expression without a field")
    return Expression(text, code, {variable: field for field, variable in rename.columns.items()})


def _check_syntax(text: str, tree: ast.Expression) -> None:
    """Raise ``FormatError`` unless the expression has nothing but fields, numbers, operators and functions."""
    for node in ast.walk(tree):
        chained = isinstance(node, ast.Compare) and len(node.ops) > 1
        called = not isinstance(node, ast.Call) or (isinstance(node.func, ast.Name) and not node.keywords)
        number = not isinstance(node, ast.Constant) or isinstance(node.value, bool | int | float)
        if not isinstance(node, _SYNTAX) or chained or not called or not number:
            raise _error(text, f"the syntax {ast.unparse(node)!r}" if isinstance(node, ast.expr) else ast.dump(node))


_SYNTAX = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Call, ast.Name, ast.Constant, ast.expr_context),
    *(ast.operator, ast.unaryop, ast.cmpop),
)


class _Rename(ast.NodeTransformer):
    """Transformer that gives the fields in an expression names which no function has.

    Parameters
    ----------
    quoted : field name for each variable that stands for a name in backticks.
    """

    def __init__(self, quoted: Mapping[str, str]) -> None:
        self._quoted = quoted
        self.columns: dict[str, str] = {}

    def visit_Name(self, node: ast.Name) -> ast.Name:
        field = self._quoted.get(node.id, node.id)
        return ast.Name(self.columns.setdefault(field, f"column_{len(self.columns)}"), node.ctx)

    def visit_Call(self, node: ast.Call) -> ast.Call:
        node.args = [self.visit(argument) for argument in node.args]
        return node


def check_where(expression: Expression, fields: Schema) -> None:
    """Raise an error unless every field of the expression has one number for each sample.

    Raises
    ------
    FieldNotFound : there is no such field.
    FormatError : a field is ragged, has several numbers for each sample, or holds no numbers.
    """
    for name in expression.fields:
        field = fields.get(name)
        if field is None:
            raise unknown_field(name, fields)
        if field.ragged or field.shape or field.dtype.kind not in "biuf" or field.dtype.itemsize > 8:
            raise FormatError(
                "where= selects by columns with one number for each sample",
                field=name,
                expected=f"one of {near_matches(name, [n for n, f in fields.items() if _is_column(f)])}",
                found=field.description,
                remedy="use a per-event column, such as the number of the objects (nMuon), or select in the model",
            )


def unknown_field(name: str, fields: Schema) -> FieldNotFound:
    """Return the error for a name in an expression that is no field."""
    return FieldNotFound(
        "where= names a field that the data do not have",
        field=name,
        expected=f"one of {near_matches(name, fields)}",
        remedy="correct the name; a name that is no Python identifier stands in backticks: `jets/pt` > 30",
    )


def _is_column(field: Field) -> bool:
    return not field.ragged and not field.shape and field.dtype.kind in "biuf"


def find_where(source: Source, samples: Samples, expression: Expression) -> Samples:
    """Return the samples for which an expression is true, equal on all ranks. *Collective*.

    Each rank reads the columns of its block of the samples, without the blocks that bounds of their numbers rule out.

    Raises
    ------
    FormatError : numexpr is not installed, or cannot evaluate the expression.
    DataError : the first error of any rank, on every rank.
    """
    error: FormatError | None = None
    try:
        numexpr = _numexpr()
        evaluate(numexpr, expression, {name: source.index.fields[name].empty(0) for name in expression.fields})
    except FormatError as wrong:
        error = wrong
    source.comm.agree(error)
    samples = rule_out(source, samples, expression.code, expression.columns)
    before = numexpr.set_num_threads(threads())
    try:
        return select_samples(source, samples, expression.fields, lambda arrays: evaluate(numexpr, expression, arrays))
    finally:
        numexpr.set_num_threads(before)


def _numexpr() -> Any:
    try:
        return import_module("numexpr")
    except ImportError as error:
        raise FormatError(
            "where= needs the package numexpr",
            found=error,
            remedy="python -m pip install 'matex_data[particles]'",
        ) from error


def evaluate(numexpr: Any, expression: Expression, arrays: Mapping[str, Array]) -> Array:
    """Return bool[samples], the values of an expression.

    Parameters
    ----------
    numexpr : the module.
    expression : the expression.
    arrays : columns, by field name.

    Raises
    ------
    FormatError : numexpr cannot evaluate it, or it yields no truth values.
    """
    columns = {variable: _widened(arrays[name], name) for variable, name in expression.columns.items()}
    try:
        found = numexpr.evaluate(
            expression.code, local_dict=columns, global_dict={}, truediv=True, sanitize=True, casting="safe"
        )
    except Exception as error:  # numexpr raises errors of many kinds
        raise _error(expression.text, f"{type(error).__name__}: {error}") from error
    values = np.asarray(found)
    if values.dtype != bool or values.shape != next(iter(columns.values())).shape:
        raise _error(expression.text, f"values of dtype {values.dtype} and shape {values.shape}")
    return values


def _widened(column: Array, name: str) -> Array:
    """Return a column as bool, int64 or float64."""
    if column.dtype.kind == "f":
        return column.astype(np.float64)
    if column.dtype.kind == "u" and len(column) and column.max() > _INT64_MAX:
        raise FormatError(
            "where= evaluates integers of 64 bits with sign",
            field=name,
            expected=f"numbers up to {_INT64_MAX}",
            found=str(column.max()),
            remedy="select by another field",
        )
    return column if column.dtype == bool else column.astype(np.int64)


def _error(text: str, found: object) -> FormatError:
    return FormatError(
        f"where= is no condition that can be evaluated: {text!r}",
        expected="one truth value for each sample",
        found=found,
        remedy=REMEDY,
    )
