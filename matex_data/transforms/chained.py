"""Operations on a data set, one after the other: each makes samples of those that the one before has made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from matex_data._types import Array, Integers
from matex_data.errors import PartitionError
from matex_data.fields import ElementSpec, Names, mapped_elements
from matex_data.index.model import Index
from matex_data.index.runs import Runs, Samples, merge
from matex_data.reading.source import Source
from matex_data.sampling.split import Ties
from matex_data.transforms.continuity import continuing
from matex_data.transforms.expressions import parse
from matex_data.transforms.flatten import flatten_fields
from matex_data.transforms.new_fields import Derive, NewFields
from matex_data.transforms.pad import Keep, Pad, check_pad, pad_fields
from matex_data.transforms.sequences import Chains, SequenceShape, sliding_sequences
from matex_data.transforms.splits import SourceOf
from matex_data.transforms.where import find_where


@dataclass(frozen=True, eq=False)
class Selected:
    """Samples of a data set, and the structure of its batches.

    Parameters
    ----------
    source : the opened files.
    elements : structure of a batch.
    samples : of the index of the source, ascending.
    ties : samples that belong together.
    further : opens a field that the index does not have, or has.
    """

    source: Source
    elements: ElementSpec
    samples: Samples
    ties: Ties
    further: SourceOf

    def derive(self, expressions: Derive, inputs: Names, targets: Names) -> Selected:
        """Add fields that are made of others by expressions. *Collective*."""
        before = self.source.index
        index = NewFields.of(None, expressions).with_paths(before.fields.__contains__).add(before)
        elements = mapped_elements(self.elements, before.fields, index.fields, inputs, targets)
        return self._with_fields(index, elements, f"derive {dict(expressions)}")

    def where(self, condition: str) -> Selected:
        """Keep the samples for which an expression is true. *Collective*."""
        opened = partial(self.source.of_index, transforms="")
        expression = parse(condition).quoted(self.source.index.fields.__contains__)
        return replace(self, samples=find_where(opened, self.source.index, self.samples, expression))

    def pad(self, lengths: Pad, keep: Keep, inputs: Names, targets: Names) -> Selected:
        """Make ragged fields dense, with masks. *Collective*."""
        check_pad(lengths)
        given = inputs is not None or targets is not None
        wanted = replace(self.elements, inputs=inputs, targets=targets) if given else self.elements
        index = pad_fields(self.source.index, lengths, keep, wanted.names)
        elements = mapped_elements(self.elements, index.fields, index.fields, inputs, targets)
        return self._with_fields(index, elements, f"pad {dict(lengths)} {keep}")

    def flatten(self, names: Sequence[str]) -> Selected:
        """Make the elements of ragged fields the samples. *Collective*."""
        self._check_untied("flatten()")
        flat = flatten_fields(self.source, self.samples, names)
        reshaped = replace(self, further=_Reshaped(self.further, flat.reshape).open, ties=Ties(events=flat.events))
        whole = Runs(np.array([0]), np.array([len(flat.index)]))
        return replace(reshaped, samples=whole)._with_fields(flat.index, self.elements, f"flatten {flat.digest}")

    def window(self, shape: SequenceShape, along: str | None) -> Selected:
        """Make sequence windows of consecutive rows, all of which are samples, the samples. *Collective*."""
        self._check_untied("window()")
        index, elements = self.source.index, self.elements
        if elements.weights is not None:
            raise PartitionError("windows have no weights", expected="no weights=", found=repr(elements.weights))
        continues = continuing(partial(self.source.of_index, transforms=""), index, along)
        slid = sliding_sequences(index, elements.inputs, elements.targets, shape, continues)
        within = sequences_within(self.samples, index, Chains.of(index.files.rows, shape, continues), shape)
        if not within.total:
            raise PartitionError(
                "no window has its rows among the samples",
                expected=f"{shape.span} consecutive rows of a file",
                found=f"{self.samples.total} of {len(index)} rows, with gaps",
                remedy="make the windows before split() and where(), or shorter ones",
            )
        further = _Reshaped(self.further, slid.reshape).open
        made = replace(self, samples=within, ties=slid.ties, further=further)
        return made._with_fields(slid.index, ElementSpec(slid.inputs, slid.targets), f"window {shape}")

    def load(self, names: Sequence[str]) -> dict[str, Array]:
        """Read fields of this rank's block of the samples, also those that batches do not have. *Collective*."""
        fields = self.source.index.fields
        known = [name for name in names if name in fields]
        found = self.source.of_index(self.source.index.select(known), "").load(self.samples) if known else {}
        for name in names:
            if name not in found:
                source, other = self.further(name)
                found[name] = source.of_index(source.index.select([other]), "").load(self.samples)[other]
        return {name: found[name] for name in names}

    def _with_fields(self, index: Index, elements: ElementSpec, identity: str) -> Selected:
        chosen = index.select(elements.expanded(index.fields).required or list(index.fields))
        return replace(self, source=self.source.with_map(chosen, identity), elements=elements)

    def _check_untied(self, operation: str) -> None:
        if self.ties.overlap or self.ties.events is not None:
            raise PartitionError(
                f"{operation} would make samples of rows that samples share already",
                expected="samples that are rows of the files",
                found="sequence windows, or objects of events",
                remedy=f"call {operation} before window() or flatten()",
            )


@dataclass(frozen=True)
class _Reshaped:
    """Way to further fields of samples that an operation has made of others."""

    before: SourceOf
    reshape: Callable[[Index], Index]

    def open(self, name: str | None) -> tuple[Source, str]:
        """Return the opened files with a field as samples of the data set, and its name. *Collective*."""
        source, found = self.before(name)
        if found not in source.index.fields:
            return source, found
        return source.of_index(self.reshape(source.index.select([found])), ""), found


def sequences_within(samples: Samples, rows: Index, chains: Chains, shape: SequenceShape) -> Runs:
    """Return the sequence windows of which all rows, those of the target included, are samples.

    Parameters
    ----------
    samples : rows, ascending.
    rows : index of the rows.
    chains : files of the rows, and the sequence windows that begin in each of them.
    shape : extent of the sequence windows.
    """
    whole = merge(samples.slice(np.array([0]), np.array([samples.total])))
    first: Integers = np.cumsum(chains.counts) - chains.counts

    def before(row: Integers) -> Integers:
        """Return the number of sequence windows that begin in front of each row."""
        file = np.clip(np.searchsorted(rows.first_row, row, side="right") - 1, 0, len(chains.counts) - 1)
        begin = rows.first_row[file] + -chains.begin[file] % shape.stride
        number: Integers = first[file] + np.clip(-(-(row - begin) // shape.stride), 0, chains.counts[file])
        return number

    low, high = before(whole.start), before(whole.start + whole.count - shape.span + 1)
    filled = high > low
    return Runs(low[filled], (high - low)[filled])
