"""Samples that the options of ``open_dataset`` make of the rows of the files: new fields, events, windows, no gaps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from matex_data.errors import FieldNotFound, FormatError, PartitionError, near_matches
from matex_data.fields import LISTED, WEIGHT, ElementSpec, Names, Schema, as_list, matching
from matex_data.index.model import Index
from matex_data.index.runs import Runs, Samples
from matex_data.locks import cached_property
from matex_data.reading.source import Source, taken
from matex_data.sampling.split import Ties
from matex_data.transforms.categories import encode_categories
from matex_data.transforms.categories import one_hot as make_one_hot
from matex_data.transforms.continuity import continuing
from matex_data.transforms.expressions import Expression, parse
from matex_data.transforms.file_fields import add_static_fields
from matex_data.transforms.flatten import FlatIndex, flatten_fields
from matex_data.transforms.missing import Missing, check_missing, fill_missing
from matex_data.transforms.names import fields_to_read
from matex_data.transforms.new_fields import NewFields
from matex_data.transforms.pad import FIRST, Keep, Pad, check_pad, pad_fields, sort_fields
from matex_data.transforms.patches import PatchShape, patch_shape, ties_of
from matex_data.transforms.sequences import SequenceShape, sequence_shape, sliding_sequences
from matex_data.transforms.stack import Stack, check_stack, stack_fields
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

    def check_sequences(self, weights: str | None) -> None:
        """Raise ``PartitionError`` if sequence windows of the samples would have gaps or no weight."""
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
    ) -> tuple[Index, Samples | None, str, FlatIndex | None]:
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
        flat: FlatIndex | None = None
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


STACKED = "inputs"  # name of the field of stack=True


@dataclass(frozen=True)
class SampleOptions:
    """Options of ``open_dataset`` that make samples of the rows of the files.

    A new one is a parameter there, and a field here or of what this consists of; the ranks compare all parameters.

    Parameters
    ----------
    elements, events, created, window : structure of a batch, selection, new fields, extent of sequence windows.
    patches : extent of patches; None: samples are whole.
    categories : fields that become codes.
    one_hot, stack, static_as_inputs, along, missing : arguments of ``open_dataset``.

    Raises
    ------
    FormatError, PartitionError : an option is not valid, or excludes another one.
    """

    elements: ElementSpec
    events: EventOptions
    created: NewFields
    window: SequenceShape | None
    one_hot: Names
    stack: Stack
    static_as_inputs: bool
    along: str | None
    missing: Missing
    patches: PatchShape | None = None
    categories: tuple[str, ...] = ()

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> SampleOptions:
        """Return the request that arguments of ``open_dataset`` make, by name. Raises like the constructor."""
        extent = {name: arguments[name] for name in ("window", "stride", "horizon", "lead", "targets")}
        parts = {
            "elements": taken(ElementSpec, arguments),
            "events": taken(EventOptions, arguments),
            "created": NewFields.of(*(arguments[name] for name in ("file_fields", "derive", "missing_values"))),
            "window": None if extent["window"] is None else sequence_shape(**extent),
            "patches": patch_shape(arguments["patch"], arguments["patches_per_image"]),
        }
        return taken(cls, {**arguments, **parts})

    def __post_init__(self) -> None:
        if self.patches is not None and (self.window is not None or self.events.flatten):
            raise PartitionError(
                "patch= excludes window= and flatten=",
                expected="patch= alone",
                remedy="call window() or flatten() of the data set",
            )
        if self.window is not None:
            self.events.check_sequences(self.elements.weights)
        check_missing(self.missing)
        check_stack(self.stack)
        check_elements(self.elements)

    def names(self, files: int) -> list[str] | None:
        """Return the fields of the files to read; None: all.

        Parameters
        ----------
        files : number of the files.
        """
        made = [STACKED] if self.stack else []
        masked = ["*"] if self.missing == "mask" or isinstance(self.missing, Mapping) else list(self.events.pad or ())
        named = fields_to_read(self.elements.required, masked, *made, *self.created.expressions)
        named = self.events.fields_to_read(named)
        named = self.created.to_read(None if named is None else [*named, *self.created.expressions])
        if named is not None and self.along is not None and self.spans(files):
            named = list(dict.fromkeys([*named, self.along]))
        return named

    def spans(self, files: int) -> bool:
        """Return whether sequence windows may reach from one file into the next."""
        return self.window is not None and files > 1


@dataclass(frozen=True)
class Assembled:
    """Samples, before their missing values are known.

    Parameters
    ----------
    index : of the samples.
    elements : structure of a batch.
    samples : the selected ones; None: all.
    ties : samples that belong together.
    identity : text that identifies the transforms.
    reshape : turns an index of rows of the files into one of these samples.
    """

    index: Index
    elements: ElementSpec
    samples: Samples | None
    ties: Ties
    identity: str
    reshape: Callable[[Index], Index]


def assemble(
    request: SampleOptions, index: Index, names: list[str] | None, by_value: bool, opened: Callable[[Index], Source]
) -> Assembled:
    """Return the samples that a request makes of the rows of the files. *Collective*.

    Parameters
    ----------
    request : the options.
    index : of the files.
    names : fields that were read; None: all.
    by_value : the rows were selected by ``sel=``.
    opened : opens the files of an index. *Collective*.

    Raises
    ------
    DataError : the options do not fit the fields of the files; a file cannot be read.
    """
    elements = request.elements.expanded(index.fields)
    _check_selected(index, by_value)
    created, events = request.created, request.events
    coded = [name for name in request.categories if names is None or name in names or name in created]
    index = add_static_fields(index, names) if request.static_as_inputs else index
    index = created.add(index, encode=partial(encode_categories, names=coded, opened=opened))
    continues = None if request.window is None else continuing(opened, index, request.along)
    index, samples, identity, flat = events.apply(index, opened, elements)
    check_weights(elements, index.fields)
    index = make_one_hot(index, as_list(request.one_hot), opened)
    if request.stack:
        index, elements = _stacked(index, elements, request.stack)
    if request.window is not None:
        slid = sliding_sequences(index, elements.inputs, elements.targets, request.window, continues)
        index, elements = slid.index, ElementSpec(slid.inputs, slid.targets)
        ties, reshape = slid.ties, slid.reshape
    else:
        ties = Ties() if request.patches is None else ties_of(index)
        ties = ties if flat is None else Ties(events=flat.events)
        reshape = _unchanged if flat is None else flat.reshape
    index = fill_missing(index, request.missing, elements.names)
    return Assembled(index, elements, samples, ties, identity, reshape)


def _stacked(index: Index, elements: ElementSpec, stack: Stack) -> tuple[Index, ElementSpec]:
    """Return the index with all inputs as one field, and the elements with its name."""
    others = dict.fromkeys([*as_list(elements.targets), *as_list(elements.weights)])
    kept = [name for name in others if name in index.fields]
    index = stack_fields(index, as_list(elements.inputs), STACKED, kept, stack)
    return index, replace(elements, inputs=STACKED)


def _check_selected(index: Index, by_value: bool) -> None:
    """Raise ``FormatError`` if ``sel=`` selects no sample, or lists samples by value that the files do not have."""
    listed = index.facts.get(LISTED)
    if len(index) != int(listed) if listed is not None else by_value and not len(index):
        raise FormatError(
            "sel= names samples that the files do not have",
            file=index.files.paths[0],
            expected="one sample at least" if listed is None else f"{listed} samples, one for each value",
            found=f"{len(index)}",
            remedy='correct the values; a slice selects what there is, such as slice("2015-01", "2015-03")',
        )


def _unchanged(index: Index) -> Index:
    return index


def check_elements(elements: ElementSpec) -> None:
    """Raise ``FormatError`` if elements of this structure cannot have weights.

    Keras takes the second item of a tuple for the targets, so that (inputs, weights) would train on the weights.
    """
    if elements.weights is not None and elements.names is not None and None in (elements.inputs, elements.targets):
        side = "targets" if elements.targets is None else "inputs"
        raise FormatError(
            f"weights= needs {side}: Keras would take the second item of (x, w) for the targets",
            field=elements.weights,
            expected="inputs= and targets=, for elements (x, y, w); or neither, for dicts",
            found=f"inputs={elements.inputs!r}, targets={elements.targets!r}",
            remedy=f"name the {side}, or leave out weights= and name the weights as a field",
        )


def check_weights(elements: ElementSpec, fields: Schema) -> None:
    """Raise an error unless the weights are numbers, one for each sample.

    Raises
    ------
    FieldNotFound : there is no such field.
    FormatError : the field has several numbers for each sample, or none; in dicts, another field has the name of the
        weights.
    """
    name = elements.weights
    if name is None:
        return
    field = fields.get(name)
    if field is None:
        raise FieldNotFound("weights= names no field", field=name, expected=f"one of {near_matches(name, fields)}")
    if field.ragged or field.shape or field.dtype.kind not in "biuf":
        raise FormatError(
            "weights= needs one number for each sample",
            field=name,
            expected="integers or floats of shape ()",
            found=f"{field.dtype} of shape {field.shape}{' (ragged)' if field.ragged else ''}",
            remedy="name a field of the events, or make the objects the samples with flatten=",
        )
    if elements.names is None and WEIGHT in fields and name != WEIGHT:
        raise FormatError(
            f"the data already have a field with the name of the weights, {WEIGHT!r}",
            field=WEIGHT,
            remedy="select fields with inputs= and targets=",
        )
