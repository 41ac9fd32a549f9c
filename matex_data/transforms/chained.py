"""Operations on a data set, one after the other: each makes samples of those that the one before has made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from matex_data._types import Array, Integers
from matex_data.errors import PartitionError
from matex_data.fields import ElementSpec, Names, check_name, is_time, mapped_elements
from matex_data.index.model import Index
from matex_data.index.runs import Runs, Samples, compress, merge, within
from matex_data.mpi.communicator import Equal
from matex_data.reading.source import Source, open_source
from matex_data.sampling.mixing import Mixture
from matex_data.sampling.split import Ties, check_folds, check_fractions, folds, leave_gaps, split
from matex_data.transforms.continuity import continuing
from matex_data.transforms.expressions import TIMES, parse
from matex_data.transforms.flatten import flatten_fields
from matex_data.transforms.imputing import Imputation
from matex_data.transforms.joining import join_samples
from matex_data.transforms.new_fields import Derive, NewFields
from matex_data.transforms.pad import Keep, Pad, check_pad, pad_fields
from matex_data.transforms.sequences import Chains, SequenceShape, sliding_sequences
from matex_data.transforms.splits import SourceOf, SplitOptions
from matex_data.transforms.strata import Assignment, divide_at, group, stratify
from matex_data.transforms.where import find_where


@dataclass(frozen=True, eq=False)
class Selected:
    """Samples of a data set, the structure of its batches, and what belongs to them.

    Parameters
    ----------
    source : the opened files.
    elements : structure of a batch.
    samples : of the index of the source, ascending.
    ties : samples that belong together.
    further : opens a field that the index does not have; None: there are no others.
    mixture : shares of several data sets in each batch; None: it is one.
    imputation : treatment of missing values by statistics of the first set of a split; None: there is none.
    """

    source: Source
    elements: ElementSpec
    samples: Samples
    ties: Ties
    further: SourceOf | None = None
    mixture: Mixture | None = None
    imputation: Imputation | None = None

    def source_of(self, name: str | None) -> tuple[Source, str]:
        """Return opened files that have a field, and its name; see ``SourceOf``. *Collective*."""
        if name is not None:
            check_name(name)
        if (name is not None and name in self.source.index.fields) or self.further is None:
            return self.source, name or ""
        return self.further(name)

    def split(self, fractions: Sequence[float], options: SplitOptions) -> tuple[Selected, ...]:
        """Return disjoint sets of the samples; see ``Dataset.split``. *Collective* if values have to be read."""
        (sets,) = self._divided(fractions, options)
        return self._sets(sets)

    def folds(self, number: int, options: SplitOptions) -> tuple[tuple[Selected, ...], ...]:
        """Return pairs of training and validation; see ``Dataset.kfold``. *Collective* if values have to be read."""
        pairs = self._divided([1 / check_folds(number)] * number, options, in_folds=True)
        if not all(held_out.total for _, held_out in pairs):
            raise PartitionError(
                "a fold has no samples",
                expected=f"a sample at least for each of {number} folds",
                found=f"{self.samples.total} samples",
                remedy="give fewer folds",
            )
        return tuple(map(self._sets, pairs))

    def _divided(
        self, fractions: Sequence[float], options: SplitOptions, in_folds: bool = False
    ) -> tuple[tuple[Samples, ...], ...]:
        """Return the sets of a split as one tuple; or the pairs of folds. *Collective* if values have to be read."""
        options.check(fractions, self.ties)
        if self.mixture is not None and options.groups is None and options.at is None:
            parts = [part._divided(fractions, options, in_folds) for part in self._parts(self.mixture)]
            of_all = (zip(*of_parts, strict=True) for of_parts in zip(*parts, strict=True))
            return tuple(tuple(_joined(self.mixture, sets) for sets in one) for one in of_all)
        gap, sections = options.gap_of(self.ties)
        if options.by_value:
            assigned = self._assignment(fractions, options)
            return tuple(assigned.pairs()) if in_folds else (leave_gaps(assigned.sets(), gap, sections),)
        if in_folds:
            return folds(self.samples, len(fractions), options.seed, gap, sections, self.ties.events)
        return (split(self.samples, fractions, options.seed, gap, sections, self.ties.events),)

    def _parts(self, mixture: Mixture) -> list[Selected]:
        """Return the samples of each data set of a mixture, which is split alone but by groups and borders."""
        return [replace(self, samples=samples, mixture=None) for samples in mixture.parts(self.samples)]

    def _assignment(self, fractions: Sequence[float], options: SplitOptions) -> Assignment:
        """Return the set of each sample by its values. *Collective*."""
        remedy = "call split and kfold with the same arguments on every rank"
        arguments = {"fractions": fractions, **vars(options)}
        self.source.comm.agree(equal=Equal(arguments, "the ranks split differently", remedy))
        if options.at is not None:
            source, name = self.source_of(options.along)
            return divide_at(source, self.samples, name, options.at, slid=self.ties.slid)
        check_fractions(fractions)
        choose, wanted = (stratify, options.stratify) if options.stratify is not None else (group, options.groups)
        source, name = self.source_of(wanted)
        return choose(source, self.samples, name, fractions, options.seed)

    def _sets(self, parts: Sequence[Samples]) -> tuple[Selected, ...]:
        """Return sets of the samples. *Collective* where missing values get statistics: those of the first set."""
        source = self.source
        if self.imputation is not None:
            if self.imputation.mapped:
                raise PartitionError(
                    "a split cannot compute the means of missing values anew, of which operations have made samples",
                    expected="data sets that are split before map(), derive(), pad(), flatten() and window()",
                    remedy="split first, and call these methods of each set",
                )
            source = self.imputation.fitted(source, parts[0])
        return tuple(replace(self, source=source, samples=samples) for samples in parts)

    def derive(self, expressions: Derive, inputs: Names, targets: Names) -> Selected:
        """Add fields that are made of others by expressions. *Collective*."""
        before = self.source.index
        index = NewFields.of(None, expressions).with_paths(before.fields.__contains__).add(before)
        elements = mapped_elements(self.elements, before.fields, index.fields, inputs, targets)
        return self.with_fields(index, elements, f"derive {dict(expressions)}")

    def with_groups(self, by: str) -> Selected:
        """Add the field of this name, if it is none of the data but an expression, or a part of the only times.

        *Collective* then.
        """
        fields = self.source.index.fields
        times = [name for name, field in fields.items() if is_time(field)]
        if by not in fields and by in TIMES and len(times) == 1:
            return self.derive({by: f"{by}(`{times[0]}`)"}, None, None)
        return self if by in fields or by.isidentifier() else self.derive({by: by}, None, None)

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
        return self.with_fields(index, elements, f"pad {dict(lengths)} {keep}")

    def flatten(self, names: Sequence[str]) -> Selected:
        """Make the elements of ragged fields the samples. *Collective*."""
        self._check_rows("flatten()")
        flat = flatten_fields(self.source, self.samples, names)
        whole = Runs.between(0, len(flat.index))
        made = replace(self, samples=whole, ties=flat.ties, further=flat.further(self.source_of))
        return made.with_fields(flat.index, self.elements, f"flatten {flat.identity}")

    def window(self, shape: SequenceShape, along: str | None) -> Selected:
        """Make sequence windows of consecutive rows, all of which are samples, the samples. *Collective*."""
        self._check_rows("window()")
        index, elements = self.source.index, self.elements
        if elements.weights is not None:
            raise PartitionError(
                "windows have no weights",
                expected="no weights=",
                found=repr(elements.weights),
                remedy="open the data without weights=",
            )
        continues = continuing(partial(self.source.of_index, transforms=""), index, along)
        slid, of_windows = sliding_sequences(index, elements, shape, continues)
        samples = sequences_within(self.samples, index, Chains.of(index.files.rows, shape, continues), shape)
        if not samples.total:
            raise PartitionError(
                "no window has its rows among the samples",
                expected=f"{shape.length} consecutive rows of a file"
                + f", and {shape.horizon} as target" * bool(shape.horizon),
                found=f"{self.samples.total} of {len(index)} rows, with gaps",
                remedy="make the windows before split() and where(), or shorter ones",
            )
        made = replace(self, samples=samples, ties=slid.ties, further=slid.further(self.source_of))
        return made.with_fields(slid.index, of_windows, f"window {shape}")

    def load(self, names: Sequence[str]) -> dict[str, Array]:
        """Read fields of this rank's block of the samples, also those that batches do not have. *Collective*.

        Of samples that cannot be read, those are left out that batches leave out; others are an error.
        """
        source, fields = self.source, self.source.index.fields
        source.compare_reads(names, self.samples)
        block = source.block(self.samples)
        if source.skipped is not None:  # each field of the batches may decide which samples they have
            source.use_block(self.samples, list(fields), lambda *_: None)
            block = compress(np.delete(block.numbers(np.arange(block.total)), source.skipped.positions(block)))
        known = [name for name in names if name in fields]
        arrays = _read_all_of(source, known, block) if known else {}
        for name in names:
            if name not in arrays:
                other, stored = self.source_of(name)
                arrays[name] = _read_all_of(other, [stored], block)[stored]
        return {name: arrays[name] for name in names}

    def with_fields(self, index: Index, elements: ElementSpec, identity: str) -> Selected:
        """Return what an operation makes of the samples.

        Parameters
        ----------
        index : with its fields, of which those that batches do not need are left out.
        elements : structure of a batch.
        identity : text that identifies the operation.
        """
        chosen = index.select(elements.expanded(index.fields).required or list(index.fields))
        imputation = None if self.imputation is None else replace(self.imputation, mapped=True)
        source = self.source.with_map(chosen, identity)
        return replace(self, source=source, elements=elements, imputation=imputation)

    def _check_rows(self, operation: str) -> None:
        if self.mixture is not None:
            raise PartitionError(f"{operation} of a mixture", remedy=f"call {operation} of each data set, then mix()")
        if self.ties.overlap or self.ties.events is not None:
            raise PartitionError(
                f"{operation} would make samples of rows that samples share already",
                expected="samples that are rows of the files",
                found="sequence windows, or objects of events",
                remedy=f"call {operation} before window() or flatten()",
            )


def _read_all_of(source: Source, names: Sequence[str], samples: Samples) -> dict[str, Array]:
    """Read fields of this rank's samples, all of which have to be readable. *Collective*."""
    options = replace(source.options, on_error="raise")
    return open_source(source.sessions, source.index.select(names), options).read(samples)[0]


def _joined(mixture: Mixture, sets: Sequence[Samples]) -> Samples:
    return join_samples(sets, [0] * len(sets), mixture.first[-1])


def sequences_within(samples: Samples, rows: Index, chains: Chains, shape: SequenceShape) -> Samples:
    """Return the sequence windows of which all rows, and all rows of the target, are samples; others may lie between.

    Parameters
    ----------
    samples : rows, ascending.
    rows : index of the rows.
    chains : files of the rows, and the sequence windows that begin in each of them.
    shape : extent of the sequence windows.
    """
    whole = merge(samples.part(0, samples.total))
    first_window: Integers = np.cumsum(chains.counts) - chains.counts

    def before(row: Integers) -> Integers:
        """Return the number of sequence windows that begin in front of each row."""
        file = np.clip(np.searchsorted(rows.first_row, row, side="right") - 1, 0, len(chains.counts) - 1)
        begin = rows.first_row[file] + -chains.begin[file] % shape.stride
        number: Integers = first_window[file] + np.clip(-(-(row - begin) // shape.stride), 0, chains.counts[file])
        return number

    def passing(ahead: bool) -> Runs:
        """Return the sequence windows of which all rows, or all those of the target, are samples."""
        first, length = shape.extent(ahead)
        low, high = before(whole.start - first), before(whole.stop - first - length + 1)
        filled = high > low
        return Runs(low[filled], (high - low)[filled])

    return within(passing(False), passing(True)) if shape.horizon else passing(False)
