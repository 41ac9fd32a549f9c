"""Selection of samples by an expression of their fields, some blocks of which the bounds of numbers rule out."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from matex_data._types import Array
from matex_data.fields import EXACT, Schema
from matex_data.index.model import Index, Layout
from matex_data.index.runs import Runs, Samples, merge, within
from matex_data.reading.source import Source
from matex_data.sampling.schedule import rank_range
from matex_data.transforms.expressions import Expression, compared_as, constants, uses
from matex_data.transforms.new_fields import add_expressions
from matex_data.transforms.select import select_samples


def find_where(opened: Callable[[Index], Source], index: Index, samples: Samples, expression: Expression) -> Samples:
    """Return the samples for which an expression is true, equal on all ranks. *Collective*.

    Each rank reads the fields of its block of the samples, without the blocks that bounds of their numbers rule out.

    Parameters
    ----------
    opened : function that opens the files of an index. *Collective*.
    index : of the files.
    samples : samples to choose from, ascending.
    expression : with one truth value for each sample.

    Raises
    ------
    FieldNotFound : the expression names no field.
    FormatError : it cannot be evaluated, or has no truth value for each sample.
    DataError : the first error of any rank, on every rank.
    """
    name = f"where={expression.text!r}"  # the name of no other field
    computed = add_expressions(index, {name: expression})
    field = computed.fields[name]
    if field.dtype != bool or field.ragged or field.shape:
        arrays = (index.fields[other] for other in expression.outside if index.fields[other].sample_shape)
        causes = "".join(f"; {other.name!r} is {other.description}" for other in arrays)
        raise expression.error(f"values of {field.description}{causes}")
    columns = [use.name for use in uses(expression.tree) if use.is_number and not use.is_inner]
    if columns:
        source = opened(index.select(list(dict.fromkeys(columns))))
        samples = rule_out(source, samples, expression.tree, index.fields)
    return select_samples(opened(computed.select([name])), samples, name)


Bounds = tuple[Array, Array]
_UNKNOWN = (np.array(-np.inf), np.array(np.inf))


def rule_out(source: Source, samples: Samples, tree: ast.expr, fields: Schema) -> Samples:
    """Return the samples of blocks in which an expression may be true, equal on all ranks. *Collective*.

    Each rank looks at the bounds in its block of all rows of the files.

    Parameters
    ----------
    source : opened files, with the fields whose numbers may be bounded.
    samples : samples to choose from, ascending.
    tree : of the expression.
    fields : of all samples.

    Raises
    ------
    DataError : the first error of any rank, on every rank.
    """
    index = source.index
    begin, end = rank_range(len(index), source.comm.rank, source.comm.size)
    starts, counts = [], []
    first, last = index.file_of(np.array([begin, max(begin, end - 1)])).tolist() if end > begin else (0, -1)

    def look() -> None:
        for number in range(first, last + 1) if _rules_out(tree) else ():
            edges, is_possible = _possible(tree, fields, index.files[number].layouts)
            edges = np.clip(edges + int(index.first_row[number]), begin, end)
            kept = is_possible & (np.diff(edges) > 0)
            starts.append(edges[:-1][kept])
            counts.append(np.diff(edges)[kept])

    source.comm.agreed(look)
    if not _rules_out(tree):
        return samples
    empty = [np.zeros(0, np.int64)]
    own = merge(Runs(np.concatenate(empty + starts), np.concatenate(empty + counts)))
    by_rank = source.comm.allgather((own.start, own.count))
    starts, counts = ([part[side] for part in by_rank] for side in (0, 1))
    return within(samples, merge(Runs(np.concatenate(starts), np.concatenate(counts))))


def _possible(
    tree: ast.expr, fields: Schema, layouts: Mapping[str, Layout]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return edges of blocks of a file, int64[blocks + 1], and bool[blocks]: the expression may be true in it."""
    limits = {name: layout.limits() for name, layout in layouts.items()}
    rows = next(iter(layouts.values())).rows
    known = {name: found for name, found in limits.items() if found is not None}
    edges = np.unique(np.concatenate([np.array([0, rows], np.int64), *(found.edges for found in known.values())]))
    bounds: dict[str, Bounds] = {}
    for name, found in known.items():
        if len(found.low):
            block = np.searchsorted(found.edges, edges[:-1], side="right") - 1
            bounds[name] = found.low[block], found.high[block]
    dtypes = {name: field.dtype for name, field in fields.items()}
    return edges, np.broadcast_to(_may_be_true(tree, bounds, dtypes), len(edges) - 1)


def _rules_out(tree: ast.expr) -> bool:
    """Return whether an expression has comparisons by which bounds could rule it out."""
    return isinstance(tree, ast.Compare) or (
        isinstance(tree, ast.BinOp)
        and isinstance(tree.op, ast.BitAnd | ast.BitOr)
        and (_rules_out(tree.left) or _rules_out(tree.right))
    )


def _may_be_true(tree: ast.expr, bounds: Mapping[str, Bounds], dtypes: Mapping[str, np.dtype[Any]]) -> Any:
    """Return bool[blocks], False where the expression is true for no numbers within the bounds, and for no NaN.

    >>> bounds = {"x": (np.array([0.0, 5.0]), np.array([4.0, 9.0]))}
    >>> tree = ast.parse("(x + 1 > 6) & (x < 8)", mode="eval").body
    >>> _may_be_true(tree, bounds, {"x": np.dtype("f8")}).tolist()
    [False, True]
    """
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.BitAnd | ast.BitOr):
        left, right = (_may_be_true(side, bounds, dtypes) for side in (tree.left, tree.right))
        return left & right if isinstance(tree.op, ast.BitAnd) else left | right
    if not isinstance(tree, ast.Compare):
        return np.array(True)
    numbers = compared_as(tree, dtypes) or np.float64
    if isinstance(tree.ops[0], ast.In):
        return _may_be_among(constants(tree.comparators[0]), numbers, _bounds(tree.left, bounds))
    with np.errstate(over="ignore"):
        (a_low, a_high), (b_low, b_high) = (
            [numbers(bound).astype(np.float64) for bound in _bounds(side, bounds)]
            for side in (tree.left, tree.comparators[0])
        )
    match tree.ops[0]:
        case ast.Lt():
            return a_low < b_high
        case ast.LtE():
            return a_low <= b_high
        case ast.Gt():
            return a_high > b_low
        case ast.GtE():
            return a_high >= b_low
        case ast.Eq():
            return (a_low <= b_high) & (b_low <= a_high)
    return np.array(True)  # NaN differs from every number, and bounds do not tell of it


def _may_be_among(values: list[Any], numbers: Callable[[Any], Any], within: Bounds) -> Any:
    """Return bool[blocks], False where none of the values of a list lies within the bounds."""
    if not all(isinstance(value, int | float) and abs(value) < EXACT for value in values):
        return np.array(True)
    with np.errstate(over="ignore"):
        low, high, among = (numbers(part).astype(np.float64) for part in (*within, np.array(values, np.float64)))
    among.sort()
    return np.searchsorted(among, low, "left") < np.searchsorted(among, high, "right")


def _bounds(tree: ast.expr, bounds: Mapping[str, Bounds]) -> Bounds:
    """Return bounds of a number, float64[blocks] each; infinite ones if they are unknown."""
    if isinstance(tree, ast.Name):
        return bounds.get(tree.id, _UNKNOWN)
    if isinstance(tree, ast.Constant) and isinstance(tree.value, int | float) and abs(tree.value) < EXACT:
        return np.array(float(tree.value)), np.array(float(tree.value))
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        low, high = _bounds(tree.operand, bounds)
        return -high, -low
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add | ast.Sub):
        (a_low, a_high), (b_low, b_high) = _bounds(tree.left, bounds), _bounds(tree.right, bounds)
        if isinstance(tree.op, ast.Sub):
            b_low, b_high = -b_high, -b_low
        return np.nextafter(a_low + b_low, -np.inf), np.nextafter(a_high + b_high, np.inf)  # sums are rounded
    return _UNKNOWN
