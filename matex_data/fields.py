"""Fields of a sample, and the structure of the elements that batches consist of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from matex_data.declared import declared
from matex_data.errors import FieldNotFound, FormatError, near_matches
from matex_data.locks import cached_property


@declared
@dataclass(frozen=True)
class Field:
    """Named quantity of a sample.

    Parameters
    ----------
    name : for example ``"run1/images"``.
    shape : of one sample, without the sample axis.
    dtype : as delivered, in native byte order. ``object``: byte strings of any length. A structured dtype: compound
        data, which are available as NumPy arrays only.
    ragged : each sample is an array of ``dtype`` of its own shape; a batch of them is an object array.
    attributes : of the field in the file (units, names, ...). ``nested=True``: the elements of the ragged samples are
        arrays themselves.
    inner : shape of a ragged sample, with None for the axes that vary: ``(None,)`` for lists, ``(None, None, 3)`` for
        colour images.
    scratch_bytes : memory that a sample takes while it is made of other fields, in bytes.

    Examples
    --------
    >>> image = Field("image", (28, 28), np.dtype("u1"))
    >>> image.row_bytes, image.empty(10).shape
    (784, (10, 28, 28))
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    ragged: bool = False
    attributes: Mapping[str, Any] = field(default_factory=dict, compare=False)
    inner: tuple[int | None, ...] = (None,)
    scratch_bytes: int = field(default=0, compare=False)

    @property
    def array_dtype(self) -> np.dtype[Any]:
        """Dtype of an array of samples.

        Examples
        --------
        >>> jets = Field("jets", (), np.dtype("f4"), ragged=True, inner=(None, 4))  # px, py, pz, E of each jet
        >>> jets.array_dtype, Field("label", (), np.dtype("i8")).array_dtype
        (dtype('O'), dtype('int64'))
        """
        return np.dtype(object) if self.ragged else self.dtype

    @cached_property
    def codes(self) -> Mapping[str, int]:
        """Code of each category of a field of categories.

        Examples
        --------
        >>> Field("species", (), np.dtype("i4"), attributes={"categories": ["setosa", "virginica"]}).codes
        {'setosa': 0, 'virginica': 1}
        """
        return {str(category): code for code, category in enumerate(self.attributes["categories"])}

    @property
    def nested(self) -> bool:
        """Return whether the elements of a sample are arrays of different lengths; available as NumPy arrays only.

        Examples
        --------
        >>> Field("hits", (), np.dtype("f4"), ragged=True, attributes={"nested": True}).nested
        True
        """
        return bool(self.attributes.get("nested", False))

    @property
    def element_shape(self) -> tuple[int, ...]:
        """Shape of an element of a ragged sample: the axes behind the last one that varies, such as the channels.

        Examples
        --------
        >>> jets = Field("jets", (), np.dtype("f4"), ragged=True, inner=(None, 4))  # px, py, pz, E of each jet
        >>> jets.element_shape
        (4,)
        """
        varying = [axis for axis, length in enumerate(self.inner) if length is None]
        return tuple(length for length in self.inner[max(varying, default=-1) + 1 :] if length is not None)

    @property
    def sample_shape(self) -> tuple[int | None, ...]:
        """Shape of a sample, with None for the axes that vary.

        Examples
        --------
        >>> jets = Field("jets", (), np.dtype("f4"), ragged=True, inner=(None, 4))  # px, py, pz, E of each jet
        >>> jets.sample_shape
        (None, 4)
        """
        return (*self.shape, *self.inner) if self.ragged else self.shape

    @property
    def description(self) -> str:
        """Dtype and shape of a sample as text, for errors.

        Examples
        --------
        >>> jets = Field("jets", (), np.dtype("f4"), ragged=True, inner=(None, 4))  # px, py, pz, E of each jet
        >>> jets.description
        'float32 of shape (None, 4) (ragged)'
        """
        return f"{self.dtype_name} of shape {self.sample_shape}" + (" (ragged)" if self.ragged else "")

    @property
    def dtype_name(self) -> str:
        """Dtype as text for people: "text" for texts of any length, which are Python objects.

        Examples
        --------
        >>> Field("name", (), np.dtype(object)).dtype_name, Field("x", (), np.dtype("f4")).dtype_name
        ('text', 'float32')
        """
        return "text" if self.dtype.hasobject else str(self.dtype)

    @property
    def row_bytes(self) -> int:
        """Size of one sample in memory, in bytes; of an object, that of its reference.

        Examples
        --------
        >>> Field("image", (28, 28), np.dtype("f4")).row_bytes
        3136
        """
        return int(np.prod(self.shape, dtype=np.int64)) * self.array_dtype.itemsize

    def empty(self, rows: int) -> np.ndarray[Any, Any]:
        """Return an uninitialized array for ``rows`` samples.

        Examples
        --------
        >>> Field("image", (28, 28), np.dtype("f4")).empty(10).shape
        (10, 28, 28)
        """
        return np.empty((rows, *self.shape), self.array_dtype)

    def blank(self, samples: np.ndarray[Any, Any]) -> None:
        """Overwrite samples with padding: zeros, empty strings, empty arrays.

        Examples
        --------
        >>> label = Field("label", (), np.dtype("i8"))
        >>> samples = np.array([3, 1, 4])
        >>> label.blank(samples[1:])
        >>> samples.tolist()
        [3, 0, 0]
        """
        if self.ragged:
            objects = samples.reshape(-1) if self.shape else samples
            for i in range(len(objects)):
                objects[i] = np.empty([length or 0 for length in self.inner], self.dtype)
        elif len(samples):
            samples[...] = b"" if self.dtype == object else np.zeros((), self.dtype)

    def join(self, samples: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the elements of ragged samples, one sample after the other: ``(elements, *element_shape)``.

        Parameters
        ----------
        samples : object[samples].

        Examples
        --------
        Two gray images, of 1 x 2 and 2 x 1 pixels:

        >>> image = Field("image", (), np.dtype("u1"), ragged=True, inner=(None, None))
        >>> samples = image.empty(2)
        >>> samples[0], samples[1] = np.array([[1, 2]], "u1"), np.array([[3], [4]], "u1")
        >>> image.join(samples).tolist()
        [1, 2, 3, 4]
        """
        none = np.empty((0, *self.element_shape), self.dtype)
        lists = samples if len(self.inner) == 1 else [sample.reshape(-1, *self.element_shape) for sample in samples]
        return np.concatenate([*lists, none])


Schema = Mapping[str, Field]
"""Fields by name."""


WEIGHT = "sample_weight"
"""Name of the sample weights in a dict element."""
MASK = "{}_mask"
"""Name of the field that is True for the numbers of another field that are there, neither missing nor padding."""
MISSING_INTEGER = "missing_integer"
"""Attribute of a field of integers: the one that stands for a missing value, where float64 cannot hold the others."""
EMPTY_IS_MISSING = "empty_is_missing"
"""Attribute of a field of texts: False if an empty text is a value."""
ALL_MISSING = "all_missing"
"""Attribute of a field whose file has no value of it and no type for it: True."""
PARTLY_MISSING = "partly_missing"
"""Attribute of a field that samples of a file lack, of which it has missing values there: True."""
AS_TEXT = "as_text"
"""Attribute of a field of numbers whose layouts have them as texts, too: True."""
ALL_ROWS = "all_rows"
"""Attribute of a field whose samples are all rows of a file or group, whose numbers may differ: True."""
LISTS = "lists"
"""Attribute of a field that files store as lists, of which those of a file may all be of one length: True."""
RANDOM = "random"
"""Attribute of a field whose samples are drawn anew in each epoch: True."""
SAMPLE_COORDINATE = "sample_coordinate"
"""Attribute of the field that is the coordinate of the samples: True."""
UNITS = ("units", "calendar")
"""Attributes of a field of numbers: in what they count."""
EPOCH = "seconds since 1970-01-01 00:00:00 UTC"
"""Units of times of tables and of NumPy, whose calendar is the Gregorian one for all times."""
NAMES_OF_CODES = ("categories", "class_names", "enum")
"""Attributes of a field of codes: what each code stands for."""
COORDINATES = "the coordinates"
"""Begin of the fact with the values of a coordinate, before its name."""
LISTED = "samples that sel= lists"
"""Fact of an index: number of samples that the files have to have together, as text; of a file that has some of them,
also the positions of its first and last one in the list."""
EXACT = 1 << 53
"""Magnitude up to which float64 has all integers."""
MOST_SHOWN = 120  # characters of an attribute in an error
NO_MATCH = "no field matches the pattern"
Names = str | Sequence[str] | None
"""Field names or patterns: a single one, a list, or none."""


def unlike(first: Field, other: Field) -> str | None:
    """Return the attribute by which equal numbers of two fields are different quantities; None: there is none.

    Units that only one of them has are no difference, unless they are those of times, which have an origin.

    >>> none, kelvin, hours = (
    ...     Field("t", (), np.dtype("f4"), attributes=units)
    ...     for units in ({}, {"units": "K"}, {"units": "hours since 2000-01-01"})
    ... )
    >>> unlike(kelvin, hours), unlike(kelvin, none), unlike(none, hours)
    ('units', None, 'units')
    """
    for key in (*UNITS, *NAMES_OF_CODES):
        mine, theirs = first.attributes.get(key), other.attributes.get(key)
        only = mine if theirs is None else theirs if mine is None else None
        if mine is theirs or (key in UNITS and only is not None and " since " not in str(only)):
            continue
        if str(mine).removesuffix(" UTC") != str(theirs).removesuffix(" UTC"):  # in which times are without it, too
            return key
    return None


def shown(field: Field, attribute: str | None) -> str:
    """Return an attribute of a field as text for an error, without the end of a long one; None: dtype and shape."""
    if attribute is None:
        return field.description
    text = str(field.attributes.get(attribute, "unspecified"))
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]} ..."


def as_list(names: Names) -> list[str]:
    """Return the names as a list."""
    return [] if names is None else [names] if isinstance(names, str) else list(names)


def is_pattern(name: str) -> bool:
    """Return whether a name has wildcards: ``*``, ``?`` or ``[...]``."""
    return any(character in name for character in "*?[")


def matching(pattern: str, available: Collection[str]) -> list[str]:
    """Return the available names that fit a name or pattern. A name that is available is no pattern.

    Parameters
    ----------
    pattern : wildcards are those of ``fnmatch``: ``*``, ``?`` and ``[...]``.
    available : names, in order.

    Examples
    --------
    >>> matching("Muon_*", ["nMuon", "Muon_pt"]), matching("hits[0]", ["hits0", "hits[0]"])
    (['Muon_pt'], ['hits[0]'])
    """
    return [pattern] if pattern in available else [name for name in available if fnmatchcase(name, pattern)]


def fits_any(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Return the function that tells of a name whether it is among these names, or fits a pattern among them.

    >>> known = fits_any(["run", "Muon_*"])
    >>> known("Muon_pt"), known("run"), known("nMuon")
    (True, True, False)
    """
    names = set(patterns)
    wild = [name for name in names if is_pattern(name)]
    return lambda name: name in names or any(fnmatchcase(name, pattern) for pattern in wild)


def by_pattern(patterns: Collection[str], available: Collection[str]) -> dict[str, str]:
    """Return the pattern that each available name fits: a name comes before patterns, and these in their order.

    Examples
    --------
    >>> by_pattern(["Muon_*", "Muon_pt"], ["nMuon", "Muon_pt", "Muon_eta"])
    {'Muon_pt': 'Muon_pt', 'Muon_eta': 'Muon_*'}
    """
    fitting: dict[str, str] = {}
    for pattern in sorted(patterns, key=lambda name: name not in available):
        fitting |= {name: pattern for name in matching(pattern, available) if name not in fitting}
    return fitting


def check_name(name: Any) -> None:
    """Raise ``FieldNotFound`` unless a field is given by one name, and not by a list of them."""
    if not isinstance(name, str):
        raise FieldNotFound(
            "a field is given by its name", expected="a str", found=repr(name), remedy="give names one by one"
        )


def field_of(fields: Schema, name: str) -> Field:
    """Return the field of a name; raise ``FieldNotFound`` if there is no such field."""
    check_name(name)
    if name not in fields:
        raise FieldNotFound(
            "no such field",
            field=name,
            expected=f"one of {near_matches(name, fields)}",
            remedy="correct the name: data.schema, and matex inspect for files, list the fields",
        )
    return fields[name]


def is_category(field: Field) -> bool:
    """Return whether the values of a field are positions in the list of its categories."""
    return field.dtype.kind == "i" and isinstance(field.attributes.get("categories"), list)


def is_time(field: Field) -> bool:
    """Return whether a field has times, by its units: numbers since a date.

    >>> is_time(Field("time", (), np.dtype("i4"), attributes={"units": "hours since 1900-01-01"}))
    True
    """
    return "since" in str(field.attributes.get("units"))


def name_taken(name: str, option: str, file: str | None) -> FormatError:
    """Return the error of an option that gives a new field the name of one of the files."""
    return FormatError(
        "the files have a field of this name already",
        file=file,
        field=name,
        remedy=f"give the field of {option} another name",
    )


def mask_of(name: str, fields: Collection[str], remedy: str) -> str:
    """Return the name of the mask of a field; raise ``FormatError`` if there is a field of this name."""
    mask = MASK.format(name)
    if mask in fields:
        raise FormatError("the data already have a field with the name of a mask", field=mask, remedy=remedy)
    return mask


def is_mask(name: str, fields: Collection[str]) -> bool:
    """Return whether a field is the mask of another one."""
    base = name.removesuffix(MASK.format(""))
    return base != name and base in fields


def expand_names(names: Iterable[str], available: Collection[str], file: str | None = None) -> list[str]:
    """Return the names with each pattern replaced by the available names that match it, without duplicates.

    A name without wildcards is kept as it is.

    Parameters
    ----------
    names : names and patterns; see `matching`.
    available : names of the fields, in order.
    file : path of the file, for the error.

    Raises
    ------
    FieldNotFound : no available name matches a pattern.

    Examples
    --------
    >>> expand_names(["MET_pt", "Muon_*"], ["run", "Muon_pt", "Muon_eta", "MET_pt"])
    ['MET_pt', 'Muon_pt', 'Muon_eta']
    """
    expanded: dict[str, None] = {}
    known = frozenset(available)
    for name in names:
        if name in known or not is_pattern(name):
            expanded[name] = None
            continue
        matched = matching(name, available)
        if not matched:
            raise FieldNotFound(
                NO_MATCH,
                file=file,
                field=name,
                expected=f"a pattern that matches one of {near_matches(name, available)}",
                found=f"{len(available)} fields, none of which match",
                remedy="correct the pattern, or give the names one by one: matex inspect lists the fields of files",
            )
        expanded.update(dict.fromkeys(matched))
    return list(expanded)


@dataclass(frozen=True)
class ElementSpec:
    """Structure of an element: a dict of all fields; inputs only; or (inputs, targets).

    Parameters
    ----------
    inputs, targets : a field name, for a single array; a list of names, or a pattern, for a dict; or None.
    weights : name of the field with the sample weights; None: each sample counts 1.

    Examples
    --------
    >>> ElementSpec("x", ["y"]).assemble({"x": 1, "y": 2})
    (1, {'y': 2})
    """

    inputs: Names = None
    targets: Names = None
    weights: str | None = None

    @property
    def names(self) -> list[str] | None:
        """Names of the fields of an element, without duplicates; None: all fields."""
        if self.inputs is None and self.targets is None:
            return None
        return list(dict.fromkeys([*as_list(self.inputs), *as_list(self.targets)]))

    @property
    def required(self) -> list[str] | None:
        """Names of the fields of an element and of its weights, without duplicates; None: all fields."""
        return None if self.names is None else list(dict.fromkeys([*self.names, *as_list(self.weights)]))

    def expanded(self, available: Collection[str]) -> ElementSpec:
        """Return the structure with patterns replaced by the available names that match them.

        Raises
        ------
        FieldNotFound : no available name matches a pattern.

        Examples
        --------
        >>> spec = ElementSpec("Muon_*", "weight").expanded(["Muon_pt", "Muon_eta", "weight"])
        >>> spec.inputs, spec.targets
        (['Muon_pt', 'Muon_eta'], 'weight')
        """
        return replace(self, inputs=_expanded(self.inputs, available), targets=_expanded(self.targets, available))

    def assemble(self, values: Mapping[str, Any], weight: Any = None) -> Any:
        """Return the element with the given values.

        Parameters
        ----------
        values : by field name.
        weight : sample weights. They become the last item of a tuple, as in Keras, or ``sample_weight`` of a dict.
        """
        if self.inputs is None and self.targets is None:
            return dict(values) if weight is None else {**values, WEIGHT: weight}
        sides = [_side(names, values) for names in (self.inputs, self.targets) if names is not None]
        if weight is not None:
            sides.append(weight)
        return sides[0] if len(sides) == 1 else tuple(sides)


def mapped_elements(elements: ElementSpec, before: Schema, after: Schema, inputs: Names, targets: Names) -> ElementSpec:
    """Return the structure of elements to which fields are added.

    Parameters
    ----------
    elements : without the new fields.
    before, after : fields of a sample, without and with the new ones.
    inputs, targets : names of the new structure; None for both: the same one, with new fields among its inputs.

    Raises
    ------
    FieldNotFound : there is no such field.
    FormatError : the weights are no numbers any more, one for each sample.

    Examples
    --------
    >>> fields = {name: Field(name, (), np.dtype("f4")) for name in "abc"}
    >>> mapped_elements(ElementSpec("a", "b"), {name: fields[name] for name in "ab"}, fields, None, None).inputs
    ['a', 'c']
    """
    check_weights(elements, after)
    if inputs is not None or targets is not None:
        chosen = replace(elements, inputs=inputs, targets=targets).expanded(after)
        for name in chosen.names or ():
            field_of(after, name)
        return chosen
    new = [name for name in after if name not in before]
    if elements.names is None or not new:
        return elements
    return replace(elements, inputs=[*as_list(elements.inputs), *new])


def check_weights(elements: ElementSpec, fields: Schema) -> None:
    """Raise an error unless the weights are numbers, one for each sample.

    Raises
    ------
    FieldNotFound : there is no such field.
    FormatError : the field has several numbers for each sample, or none, or codes; in dicts, another field has the name
        of the weights.
    """
    name = elements.weights
    if name is None:
        return
    field = fields.get(name)
    if field is None:
        raise FieldNotFound(
            "weights= names no field",
            field=name,
            expected=f"one of {near_matches(name, fields)}",
            remedy='correct the name, or give an expression of fields, such as weights="w / 2"',
        )
    classes = is_category(field)
    if classes or field.ragged or field.shape or field.dtype.kind not in "biuf":
        raise FormatError(
            "weights= needs one number for each sample",
            field=name,
            expected="integers or floats of shape ()",
            found="codes of categories" if classes else field.description,
            remedy="leave the field out of dtype= and one_hot="
            if classes
            else "name a field of the events, or make the objects the samples with flatten=",
        )
    if elements.names is None and WEIGHT in fields and name != WEIGHT:
        raise FormatError(
            f"the data already have a field with the name of the weights, {WEIGHT!r}",
            field=WEIGHT,
            remedy="select fields with inputs= and targets=",
        )


def _expanded(names: Names, available: Collection[str]) -> Names:
    if names is None or (isinstance(names, str) and (names in available or not is_pattern(names))):
        return names
    return expand_names(as_list(names), available)


def _side(names: Names, values: Mapping[str, Any]) -> Any:
    return values[names] if isinstance(names, str) else {name: values[name] for name in as_list(names)}
