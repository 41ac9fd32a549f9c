"""Fields that the files do not have: those of the names of files, and those that are made of other fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from matex_data.errors import FormatError
from matex_data.fields import is_pattern
from matex_data.index.model import Index
from matex_data.transforms.derive import add_expressions
from matex_data.transforms.expressions import Expression, Numbers, in_order, parse
from matex_data.transforms.file_fields import FileFields, add_file_fields
from matex_data.transforms.missing import Sentinels, check_sentinels, mark_missing

Derive = Mapping[str, str]
"""Expression of each derived field, by name."""


@dataclass(frozen=True)
class NewFields:
    """Fields that ``open_dataset`` adds to those of the files.

    Parameters
    ----------
    file_fields : value ``file_fields=``.
    expressions : of derived fields, by name.
    sentinels : value ``missing_values=``: numbers of the files that stand for missing ones.
    """

    file_fields: FileFields
    expressions: Mapping[str, Expression]
    sentinels: Sentinels | None = None

    @classmethod
    def of(cls, file_fields: FileFields | None, derive: Derive | None, sentinels: Sentinels | None = None) -> NewFields:
        """Return the new fields of these options.

        Raises
        ------
        FormatError : ``derive`` is no dict of expressions, or its fields are made of one another; ``sentinels`` are no
            numbers.
        """
        check_sentinels(sentinels)
        if not isinstance(derive or {}, Mapping):
            raise FormatError(
                "derive= needs an expression for each new field",
                expected='a dict such as {"log_pt": "log(pt)"}',
                found=repr(derive),
            )
        expressions = {name: parse(text, "derive=") for name, text in (derive or {}).items()}
        in_order(expressions, expressions)
        return cls(file_fields or {}, expressions, sentinels)

    def with_paths(self, is_field: Callable[[str], bool]) -> NewFields:
        """Return the new fields with names that have slashes, of these fields or new ones, quoted in expressions."""
        known = cache(lambda name: name in self or is_field(name))
        quoted = {name: one.quoted(known) for name, one in self.expressions.items()}
        return replace(self, expressions=quoted)

    def __contains__(self, name: str) -> bool:
        return name in self.file_fields or name in self.expressions

    def to_read(self, names: Sequence[str] | None) -> list[str] | None:
        """Return the fields of the files to read: those of the names, and those of which new fields are made.

        Parameters
        ----------
        names : of fields; None: all fields of the files, which the result is then, too.
        """
        if names is None:
            return None
        derived = [field for name in in_order(self.expressions, names) for field in self.expressions[name].fields]
        return [name for name in dict.fromkeys([*names, *derived]) if name not in self] or None

    def _sentinels_of(self, names: Sequence[str] | None) -> Sentinels | None:
        """Return the sentinels, of which those of other fields are left out."""
        if names is None or not isinstance(self.sentinels, Mapping):
            return self.sentinels
        used = set(self.to_read(names) or ())
        return {rule: numbers for rule, numbers in self.sentinels.items() if is_pattern(rule) or rule in used}

    def add(
        self, index: Index, names: Sequence[str] | None = None, encode: Callable[[Index], Index] | None = None
    ) -> Index:
        """Return the index with the new fields.

        Parameters
        ----------
        index : of the files.
        names : of the fields that are wanted; None: all.
        encode : called with the index of all fields that are not derived, makes categories of texts; None: nothing.

        Raises
        ------
        FieldNotFound, FormatError, PartitionError : see `add_file_fields` and `add_expressions`.
        """
        ordered = in_order(self.expressions, self.expressions if names is None else names)
        used = {*(names or ()), *(field for name in ordered for field in self.expressions[name].fields)}
        of_files = {name: values for name, values in self.file_fields.items() if names is None or name in used}
        index = add_file_fields(mark_missing(index, self._sentinels_of(names)), of_files)
        index = index if encode is None else encode(index)
        return add_expressions(index, {name: self.expressions[name] for name in ordered})


def named_by(expression: Expression) -> str | None:
    """Return the field that an expression consists of; None: it is made of fields and operators.

    Examples
    --------
    >>> named_by(parse("genWeight")), named_by(parse("`jets/weight`")), named_by(parse("genWeight * xsec"))
    ('genWeight', 'jets/weight', None)
    """
    first = next(iter(expression.operands.values()))
    return first.name if expression.code == "operand_0" and isinstance(first, Numbers) else None
