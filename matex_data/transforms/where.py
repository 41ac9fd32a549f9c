"""Selection of samples by an expression of their fields."""

from __future__ import annotations

from collections.abc import Callable

from matex_data.index.chosen import Samples
from matex_data.index.model import Index
from matex_data.reading.source import Source
from matex_data.transforms.derive import add_expressions
from matex_data.transforms.expressions import Expression, Numbers
from matex_data.transforms.ruling_out import rule_out
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
    found = add_expressions(index, {name: expression})
    field = found.fields[name]
    if field.dtype != bool or field.ragged or field.shape:
        several = (index.fields[other] for other in expression.outside if index.fields[other].sample_shape)
        causes = "".join(f"; {other.name!r} is {other.description}" for other in several)
        raise expression.error(f"values of {field.description}{causes}")
    columns = {key: operand.name for key, operand in expression.operands.items() if isinstance(operand, Numbers)}
    if columns:
        columns_alone = opened(index.select(list(dict.fromkeys(columns.values()))))
        samples = rule_out(columns_alone, samples, expression.code, columns)
    return select_samples(opened(found.select([name])), samples, [name], lambda arrays: arrays[name])
