"""Samples that the options of ``open_dataset`` make of the rows of the files: new fields, events, windows, no gaps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from matex_data._types import Array
from matex_data.errors import FormatError, PartitionError
from matex_data.fields import LISTED, MASK, ElementSpec, Names, as_list, check_weights, fits_any, matching
from matex_data.index.computed import compute_all
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
from matex_data.transforms.flatten import flatten_fields
from matex_data.transforms.imputing import Imputation, find_rules, texts_to_fill
from matex_data.transforms.missing import (
    KEEP,
    Missing,
    check_missing,
    fill_missing,
    filling,
    find_complete,
    is_nullable,
    numbers_in,
)
from matex_data.transforms.names import fields_to_read, named_by_rules
from matex_data.transforms.new_fields import NewFields
from matex_data.transforms.pad import FIRST, Keep, Pad, check_pad, pad_fields, sort_fields
from matex_data.transforms.patches import PatchShape, patch_shape, ties_of
from matex_data.transforms.remade import Remade
from matex_data.transforms.sequences import SequenceShape, Slid, sequence_shape, sliding_sequences
from matex_data.transforms.stack import Stack, check_stack, stack_fields
from matex_data.transforms.where import find_where


def _only(index: Index, required: Sequence[str] | None) -> Index:
    """Return the index with the fields that any of the required names and patterns fits."""
    if required is None:
        return index
    wanted = {name for pattern in required for name in matching(pattern, index.fields)}
    return index.select([name for name in index.fields if name in wanted])


MOST_NAMED = 3  # files in an error
STACKED = "inputs"  # name of the field of stack=True


@dataclass(frozen=True)
class SampleOptions:
    """Options of ``open_dataset`` that make samples of the rows of the files.

    A new one is a parameter there, and a field here or of what this consists of; the ranks compare all parameters.

    Parameters
    ----------
    elements, created, window : structure of a batch, new fields, extent of sequence windows.
    patches : extent of patches; None: samples are whole.
    categories : fields that become codes.
    one_hot, stack, static_as_inputs, along, missing, where, flatten, pad, keep : arguments of ``open_dataset``.

    Raises
    ------
    FormatError, PartitionError : an option is not valid, or excludes another one.
    """

    elements: ElementSpec
    created: NewFields
    window: SequenceShape | None
    one_hot: Names
    stack: Stack
    static_as_inputs: bool
    along: str | None
    missing: Missing
    where: str | None = None
    flatten: Names = None
    pad: Pad | None = None
    keep: Keep = FIRST
    patches: PatchShape | None = None
    categories: tuple[str, ...] = ()

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> SampleOptions:
        """Return the request that arguments of ``open_dataset`` make, by name. Raises like the constructor."""
        extent = {name: arguments[name] for name in ("window", "stride", "horizon", "lead", "targets")}
        parts = {
            "elements": taken(ElementSpec, arguments),
            "created": NewFields.of(*(arguments[name] for name in ("file_fields", "derive", "missing_values"))),
            "window": None if extent["window"] is None else sequence_shape(**extent),
            "patches": patch_shape(arguments["patch"], arguments["patches_per_image"]),
        }
        return taken(cls, {**arguments, **parts})

    def __post_init__(self) -> None:
        _ = self.expression
        check_pad(self.pad or {})
        if self.keep != FIRST and not self.pad:
            raise PartitionError("keep= is a rule for pad=", expected="pad=", found=f"keep={self.keep!r} alone")
        if self.patches is not None and (self.window is not None or self.flatten):
            raise PartitionError(
                "patch= excludes window= and flatten=",
                expected="patch= alone",
                remedy="call window() or flatten() of the data set",
            )
        if self.window is not None:
            self._check_sequences()
        check_missing(self.missing)
        check_stack(self.stack)
        check_elements(self.elements)

    def _check_sequences(self) -> None:
        """Raise ``PartitionError`` if sequence windows of the samples would have gaps or no weight."""
        given = {"where": self.where, "flatten": self.flatten, "weights": self.elements.weights}
        excluded = [name for name, value in given.items() if value]
        if excluded:
            raise PartitionError(
                f"window= and {excluded[0]}= exclude each other: windows consist of consecutive events of a file",
                expected=f"window= or {excluded[0]}=",
                remedy=f"leave out {excluded[0]}=, or write the wanted events to a file of their own",
            )

    @cached_property
    def expression(self) -> Expression | None:
        """Parsed ``where``."""
        return None if self.where is None else parse(self.where)

    def with_paths(self, is_field: Callable[[str], bool]) -> SampleOptions:
        """Return the options with names that have slashes, of these fields or new ones, quoted in expressions."""
        created, where = self.created.with_paths(is_field), self.where
        if self.expression is not None:
            where = self.expression.quoted(lambda name: name in created or is_field(name)).text
        return replace(self, created=created, where=where)

    def names(self, files: int, is_field: Callable[[str], bool]) -> list[str] | None:
        """Return the fields of the files to read; None: all.

        Parameters
        ----------
        files : number of the files.
        is_field : whether the files have a field; asked for names that may be those of masks.
        """
        made = [STACKED] if self.stack else []
        masked = ["*"] if self.missing == "mask" or isinstance(self.missing, Mapping) else list(self.pad or ())

        def exists(name: str) -> bool:
            return name in self.created or is_field(name)

        self._check_masks(fits_any(masked), exists)
        named = fields_to_read(self.elements.required, masked, exists, *made, *self.created.expressions)
        if named is None:
            return None
        named += [*(self.expression.fields if self.expression else ()), *(sort_fields(self.keep) if self.pad else ())]
        read = self.created.to_read([*named, *self.created.expressions])
        if read is not None and self.along is not None and self.spans(files):
            read = list(dict.fromkeys([*read, self.along]))
        return read

    def _check_masks(self, is_masked: Callable[[str], bool], exists: Callable[[str], bool]) -> None:
        """Raise ``FormatError`` if an expression, or the weights, are those of a mask, which is made later."""
        expressions = [*self.created.expressions.values(), *([self.expression] if self.expression else ())]
        named = [(expression.option, name) for expression in expressions for name in expression.fields]
        for option, name in [*named, *(("weights=", name) for name in as_list(self.elements.weights))]:
            base = name.removesuffix(MASK.format(""))
            if base != name and is_masked(base) and exists(base) and not exists(name):
                raise FormatError(
                    f"{option} names a mask, and masks are made after what {option} needs",
                    field=name,
                    expected="fields of the files, or of derive=",
                    remedy=f"test for missing numbers, which are NaN there: {base} == {base} where none is missing; "
                    "where() and map() of the data set have the masks",
                )

    def spans(self, files: int) -> bool:
        """Return whether sequence windows may reach from one file into the next."""
        return self.window is not None and files > 1


def assemble(
    request: SampleOptions, index: Index, names: list[str] | None, selecting: str, opened: Callable[[Index], Source]
) -> tuple[Remade, ElementSpec, Samples | None, Imputation | None]:
    """Return the samples that a request makes of the rows of the files, before their missing values are known.

    *Collective*.

    Parameters
    ----------
    request : the options.
    index : of the files.
    names : fields that were read; None: all.
    selecting : option of the reader that names samples, ``"sel"`` or ``"iterations"``; "": none.
    opened : opens the files of an index. *Collective*.

    Returns
    -------
    The samples, the structure of a batch, the selected ones of the samples (None: all), and the treatment of missing
    values by field, which is to be fitted.

    Raises
    ------
    DataError : the options do not fit the fields of the files; a file cannot be read.
    """
    elements = request.elements.expanded(index.fields)
    _check_selected(index, selecting)
    created = request.created
    coded = [name for name in request.categories if names is None or name in names or name in created]
    index = add_static_fields(index, names) if request.static_as_inputs else index
    index = created.add(index, encode=partial(encode_categories, names=coded, opened=opened))
    continues = None if request.window is None else continuing(opened, index, request.along)
    samples: Samples | None = None
    made: Remade | None = None
    if request.expression is not None:
        samples = find_where(opened, index, Runs.between(0, len(index)), request.expression)
    of_all: Index | None = None
    if request.flatten:
        every, objects = Runs.between(0, len(index)), partial(flatten_fields, opened(index))
        if samples is not None and request.one_hot:  # whose categories no condition changes
            of_all = objects(every, as_list(request.flatten)).index
        made = objects(samples or every, as_list(request.flatten))
        index, samples = made.index, None
    if request.pad:
        index = pad_fields(index, request.pad, request.keep, elements.names)
    index = _only(index, elements.required)
    one_hot, rules = as_list(request.one_hot), request.missing if isinstance(request.missing, Mapping) else {}
    named_by_rules(one_hot, index.fields, "one_hot=")
    filled = texts_to_fill(index.fields, rules, one_hot) if one_hot and rules else {}
    steps = [filling(index.fields[name], text, f"missing {text}") for name, text in filled.items()]
    index, of_all = compute_all(index, steps), None if of_all is None else compute_all(of_all, steps)
    rows = encode_categories(index, one_hot, opened, of_all)
    check_weights(elements, rows.fields)
    if request.missing == "drop":
        samples = find_complete(opened, _slid(request, continues, rows, elements)[0].index, samples)
    whole, arranged = _arranged(request, continues, rows, elements)
    made = made or whole
    identity = made.identity + (repr(request.keep) if request.keep != FIRST else "") + (repr(filled) if filled else "")
    index = fill_missing(whole.index, request.missing, arranged.names)
    imputation: Imputation | None = None
    if isinstance(request.missing, Mapping):
        others = find_rules(rows.fields, {**rules, **dict.fromkeys(filled, KEEP)})
        finish = partial(_finished, request, continues, elements)
        rows_of = whole.index.made.rows_of if isinstance(whole.index.made, Slid) else None
        imputation = Imputation(others, rows, finish, identity, rows_of)
    return replace(made, index=index, identity=identity), arranged, samples, imputation


def _finished(request: SampleOptions, continues: Array | None, elements: ElementSpec, rows: Index) -> Index:
    """Return the index of samples that a request makes of rows whose missing values are replaced by field."""
    whole, arranged = _arranged(request, continues, rows, elements)
    return fill_missing(whole.index, request.missing, arranged.names)


def _arranged(
    request: SampleOptions, continues: Array | None, rows: Index, elements: ElementSpec
) -> tuple[Remade, ElementSpec]:
    """Return rows with one-hot vectors and stacked, or sequence windows of them, and the structure of a batch."""
    index = make_one_hot(rows, as_list(request.one_hot))
    if request.stack:
        index, elements = _stacked(index, elements, request.stack)
    return _slid(request, continues, index, elements)


def _slid(
    request: SampleOptions, continues: Array | None, rows: Index, elements: ElementSpec
) -> tuple[Remade, ElementSpec]:
    """Return sequence windows of rows, or the rows where a request has none, and the structure of a batch."""
    if request.window is not None:
        if request.window.horizon and elements.names is None and request.missing == "mask":
            masks = (MASK.format(field.name) for field in numbers_in(rows) if is_nullable(field))
            elements = ElementSpec(inputs=[*rows.fields, *masks])
        return sliding_sequences(rows, elements, request.window, continues)
    return Remade(rows, Ties() if request.patches is None else ties_of(rows), _unchanged), elements


def _stacked(index: Index, elements: ElementSpec, stack: Stack) -> tuple[Index, ElementSpec]:
    """Return the index with all inputs as one field, and the elements with its name."""
    others = dict.fromkeys([*as_list(elements.targets), *as_list(elements.weights)])
    kept = [name for name in others if name in index.fields]
    index = stack_fields(index, as_list(elements.inputs), STACKED, kept, stack)
    return index, replace(elements, inputs=STACKED)


def _check_selected(index: Index, selecting: str) -> None:
    """Raise ``FormatError`` if an option selects no sample, or lists samples by value that the files do not have."""
    listed, paths = index.facts.get(LISTED), index.files.paths
    if len(index) != int(listed) if listed is not None else selecting and not len(index):
        more = f" and {len(paths) - MOST_NAMED} more" if len(paths) > MOST_NAMED else ""
        raise FormatError(
            f"{selecting or 'sel'}= names samples that the files do not have",
            file=paths[0],
            expected="one sample at least" if listed is None else f"{listed} samples, one for each value",
            found=f"{len(index)} in {', '.join(map(repr, paths[:MOST_NAMED]))}{more}",
            remedy='correct the values; a slice of sel= selects what there is, such as slice("2015-01", "2015-03")',
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
