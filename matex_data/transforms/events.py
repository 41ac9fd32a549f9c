"""Events of variable length: the options of ``open_dataset`` that select events and shape their objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from matex_data.errors import PartitionError
from matex_data.fields import ElementSpec, Names, as_list, matching
from matex_data.index.chosen import Samples
from matex_data.index.model import Index
from matex_data.index.runs import Runs
from matex_data.locks import cached_property
from matex_data.reading.source import Source
from matex_data.transforms.expressions import Expression, parse
from matex_data.transforms.flatten import Flat, flatten_fields
from matex_data.transforms.pad import FIRST, Keep, Pad, check_pad, pad_fields, sort_fields
from matex_data.transforms.where import find_where


@dataclass(frozen=True)
class EventOptions:
    """Options of ``open_dataset`` in the order in which they apply.

    Parameters
    ----------
    where : expression that selects events; None: all.
    flatten : names and patterns of ragged fields whose elements become the samples.
    pad : lengths of ragged fields that become dense, by name or pattern.
    keep : rule by which padding keeps elements.

    Raises
    ------
    FormatError : ``where`` is no expression.
    PartitionError : a length of ``pad`` is below 1; there is nothing to keep.
    """

    where: str | None = None
    flatten: Names = None
    pad: Pad | None = None
    keep: Keep = FIRST

    def __post_init__(self) -> None:
        _ = self.expression
        check_pad(self.pad or {})
        if self.keep != FIRST and not self.pad:
            raise PartitionError("keep= is a rule for pad=", expected="pad=", found=f"keep={self.keep!r} alone")

    @cached_property
    def expression(self) -> Expression | None:
        """Parsed ``where``."""
        return None if self.where is None else parse(self.where)

    def with_paths(self, is_field: Callable[[str], bool]) -> EventOptions:
        """Return the options with names that have slashes quoted in ``where``."""
        return self if self.expression is None else replace(self, where=self.expression.quoted(is_field).text)

    def check_windows(self, weights: str | None) -> None:
        """Raise ``PartitionError`` if windows of the samples would have gaps or no weight."""
        given = {"where": self.where, "flatten": self.flatten, "weights": weights}
        excluded = [name for name, value in given.items() if value]
        if excluded:
            raise PartitionError(
                f"window= and {excluded[0]}= exclude each other: windows consist of consecutive events of a file",
                expected=f"window= or {excluded[0]}=",
                remedy=f"leave out {excluded[0]}=, or write the wanted events to a file of their own",
            )

    def fields_to_read(self, names: Sequence[str] | None) -> list[str] | None:
        """Return the fields to read: those named, and those that the options need. None: all fields."""
        if names is None:
            return None
        columns = self.expression.fields if self.expression else []
        return list(dict.fromkeys([*names, *columns, *(sort_fields(self.keep) if self.pad else [])]))

    def apply(
        self, index: Index, opened: Callable[[Index], Source], elements: ElementSpec
    ) -> tuple[Index, Samples | None, str, Flat | None]:
        """Return the index, the selected samples, a text that identifies these, and what flattening did. *Collective*.

        The samples are None for all, and the last one without ``flatten``.

        Parameters
        ----------
        index : index of the files, whose samples are events.
        opened : function that opens the files of an index. *Collective*.
        elements : structure of a batch; fields that it does not require are left out of the result.
        """
        identity = ""
        samples: Samples | None = None
        flat: Flat | None = None
        if self.expression is not None or self.flatten:
            samples = Runs(np.array([0]), np.array([len(index)]))
        if self.expression is not None and samples is not None:
            samples = find_where(opened, index, samples, self.expression)
        if self.flatten and samples is not None:
            flat, samples = flatten_fields(opened(index), samples, as_list(self.flatten)), None
            index, identity = flat.index, flat.digest
        if self.pad:
            index = pad_fields(index, self.pad, self.keep, elements.names)
            identity += repr(self.keep) if self.keep != FIRST else ""
        return _only(index, elements.required), samples, identity, flat


def _only(index: Index, required: Sequence[str] | None) -> Index:
    """Return the index with the fields that any of the required names and patterns fits."""
    if required is None:
        return index
    wanted = {name for pattern in required for name in matching(pattern, index.fields)}
    return index.select([name for name in index.fields if name in wanted])
