"""Fields of variable length: contents with offsets or counts beside them, by ``offsets=`` or a known convention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import h5py

from matex_data._types import Integers
from matex_data.errors import DataError, FieldNotFound, FormatError, near_matches, without_hints
from matex_data.fields import Field
from matex_data.index.jagged import Content, jagged_columns
from matex_data.index.model import Layout
from matex_data.readers.hdf5.checks import all_values, check_filters
from matex_data.readers.hdf5.conventions import RANGES, VECTOR_OF_VECTORS, Conventions, Pairing
from matex_data.readers.hdf5.members import find_field, read_column
from matex_data.readers.hdf5.names import dataset_names
from matex_data.readers.hdf5.offsets import KINDS, as_integers, offsets_of, offsets_of_ranges, readings
from matex_data.warning import warn

Layouts = dict[str, tuple[Field, Layout]]
"""Field and layout, by the name of the field."""
EXAMPLE = 'offsets={"jets": "jets/offsets"} or {"jets": ("jets/n", "counts")}'


@dataclass(frozen=True)
class Pairings:
    """Contents and their offsets in an open file.

    Parameters
    ----------
    given : of the option ``offsets=``.
    conventions : known conventions; None: only ``given``.
    """

    file: h5py.File
    path: str
    given: tuple[Pairing, ...]
    conventions: Conventions | None

    @classmethod
    def of(cls, file: h5py.File, path: str, offsets: Mapping[str, Any] | None) -> Pairings:
        """Return the pairings of a file for a value of the option ``offsets=``.

        Raises
        ------
        FormatError : the option has another form.
        """
        if offsets is None:
            return cls(file, path, (), Conventions(file))
        if not isinstance(offsets, Mapping):
            raise _option_error(path, offsets)
        given = tuple(_pairing(path, name, value) for name, value in offsets.items())
        for name in (pairing.content for pairing in given):
            if not _has_content(file, path, name):
                known = near_matches(name, dataset_names(file, path))
                warn(f"offsets= names {name!r}, which a file does not have; it has {known}")
        return cls(file, path, given, None)

    def pairing(self, name: str) -> Pairing | None:
        """Return the pairing that covers a field, the one with the longest name; None if there is none."""
        plain = name.strip("/")
        given = [pairing for pairing in self.given if pairing.covers(plain)]
        if given or self.conventions is None:
            return max(given, key=lambda pairing: len(pairing.content), default=None)
        return self.conventions.pairing(plain)

    def dataset_name(self, name: str) -> str:
        """Return the name of the dataset of a field: that of a vector of vectors of LH5 is within its group."""
        if self.conventions is not None and self.conventions.is_vectors(name.strip("/")):
            return f"{name}/{VECTOR_OF_VECTORS[0]}"
        return name

    def listed(self, names: Sequence[str]) -> list[str]:
        """Return the fields to read if none is asked for, of a file with these datasets."""
        return list(names) if self.conventions is None else self.conventions.listed(names)

    def pair(self, rows: Layouts, whole: bool) -> Layouts:
        """Return the fields with those of variable length in place of their contents.

        Parameters
        ----------
        rows : fields as their datasets are.
        whole : they are all fields of the file: offsets are left out, but not counts.

        Raises
        ------
        FormatError : the offsets do not fit their content, or fit in several ways.
        """
        paired: dict[Pairing, list[str]] = {}
        for name, (field, _) in rows.items():
            pairing = self.pairing(self.dataset_name(name))
            if pairing is not None and not (pairing.found and field.shape):
                paired.setdefault(pairing, []).append(name)
        sources = {source for pairing in paired for source in pairing.sources}
        other = {name.strip("/") for name in sources.union(*paired.values())}
        lengths = {layout.rows for name, (_, layout) in rows.items() if name.strip("/") not in other}
        samples = lengths.pop() if len(lengths) == 1 else None
        jagged: Layouts = {}
        for pairing, names in paired.items():
            divided, kinds = self._jagged(pairing, {name: rows[name] for name in names}, samples)
            jagged |= divided
            if kinds <= {"counts", RANGES}:
                sources -= set(pairing.sources)
        return {name: jagged.get(name, row) for name, row in rows.items() if not whole or name not in sources}

    def _jagged(self, pairing: Pairing, rows: Layouts, samples: int | None) -> tuple[Layouts, set[str]]:
        """Return the fields of a pairing that are divided into samples, and the kinds of offsets that divide them."""
        sources = [self._numbers(pairing, name) for name in pairing.sources]
        found: Layouts = {}
        kinds: set[str] = set()
        for length in {layout.rows for _, layout in rows.values()}:
            fields = {name: field for name, (field, layout) in rows.items() if layout.rows == length}
            kind, offsets = self._offsets(pairing, sources, length, samples)
            if offsets is None:
                continue
            for field in fields.values():
                self._check(field)
            contents = {name: Content(rows[name][1], field.dtype) for name, field in fields.items()}
            layouts = jagged_columns(offsets, contents)
            found |= {name: (replace(field, ragged=True), layouts[name]) for name, field in fields.items()}
            kinds.add(kind)
        return found, kinds

    def _numbers(self, pairing: Pairing, name: str) -> Integers:
        """Read the numbers of a source; raise ``FormatError`` if there are no such numbers, or they are no offsets."""
        try:
            found = find_field(self.file, self.path, name)
        except FieldNotFound as error:
            raise FormatError(
                f"there is no dataset of the offsets, {name!r}",
                file=self.path,
                field=pairing.content,
                expected=error.expected,
                remedy=f"name it as in {EXAMPLE}",
            ) from error
        if isinstance(found, h5py.Dataset):
            values = all_values(found, self.path)
        else:
            check_filters(found[0].dataset, self.path, name)
            values = read_column(*found)
        numbers = as_integers(values)
        if numbers is None:
            raise FormatError(
                f"the numbers of {name!r} are no offsets",
                file=self.path,
                field=pairing.content,
                expected="whole numbers of 0 or more, along one axis",
                found=_describe(values),
            )
        return numbers

    def _offsets(
        self, pairing: Pairing, sources: list[Integers], length: int, samples: int | None
    ) -> tuple[str, Integers | None]:
        """Return their kind and the offsets; None for a dataset of a group that is not divided: it has n rows."""
        if pairing.kind == RANGES:
            return RANGES, self._of_ranges(pairing, sources, length)
        (values,) = sources
        if pairing.kind is not None:
            offsets = offsets_of(values, pairing.kind, length)
            found = {} if offsets is None else {pairing.kind: offsets}
        else:
            found = readings(values, length, samples)
        if len(found) == 1:
            return next(iter(found.items()))
        is_group = isinstance(self.file.get(pairing.content), h5py.Group)
        if not found and is_group and length in (len(values), len(values) - 1):
            return "", None
        raise self._mismatch(pairing, values, length, found)

    def _of_ranges(self, pairing: Pairing, sources: list[Integers], length: int) -> Integers:
        begin, count = sources
        if len(begin) != len(count):
            raise FormatError(
                "first elements and counts differ in number",
                file=self.path,
                field=pairing.content,
                expected=f"{len(begin)} numbers in {pairing.sources[1]!r}, as in {pairing.sources[0]!r}",
                found=len(count),
            )
        offsets = offsets_of_ranges(begin, count, length)
        if isinstance(offsets, int):
            raise FormatError(
                "the samples do not follow one another in the content",
                file=self.path,
                field=pairing.content,
                row=offsets,
                expected=f"each sample to begin where the one before ends, within {length} elements",
                found=f"{count[offsets]} elements from {begin[offsets]} on, by {' and '.join(pairing.sources)}",
                remedy="the file is damaged, or follows another convention: offsets={} reads its datasets as they are",
            )
        return offsets

    def _mismatch(self, pairing: Pairing, values: Integers, length: int, found: Mapping[str, Integers]) -> FormatError:
        source = pairing.sources[0]
        if found:
            kinds = [f"as {kind!r}: {len(offsets) - 1} samples" for kind, offsets in found.items()]
            return FormatError(
                f"the numbers of {source!r} can be read in several ways",
                file=self.path,
                field=pairing.content,
                expected="numbers that are only offsets, or only counts",
                found="; ".join(kinds),
                remedy=f"say which: {self._told(pairing, list(found)[-1])}",
            )
        remedy = f"name the dataset that belongs to this content, as in {EXAMPLE}"
        if pairing.kind is None and offsets_of(values, "starts", length) is not None:
            remedy = f"if these are the first elements of samples, say so: {self._told(pairing, 'starts')}"
        kinds = [pairing.kind] if pairing.kind else [kind for kind in KINDS if kind != "starts"]
        return FormatError(
            f"the numbers of {source!r} do not divide the content",
            file=self.path,
            field=pairing.content,
            expected=f"{length} elements, divided by " + ", or ".join(KINDS[kind] for kind in kinds),
            found=_describe(values),
            remedy=remedy,
        )

    def _told(self, pairing: Pairing, kind: str) -> str:
        """Return the option that says what the source of a pairing holds."""
        return f'offsets={{"{pairing.content}": ("{pairing.sources[0]}", "{kind}")}}'

    def _check(self, field: Field) -> None:
        if field.shape or field.ragged:
            columns = [f"{field.name}/{i}" for i in range(2)]
            raise FormatError(
                "the content of a field of variable length has elements of more than one number",
                file=self.path,
                field=field.name,
                expected="a dataset of one axis, or a member or column of that kind",
                found="elements of variable length" if field.ragged else f"elements of shape {field.shape}",
                remedy=f"select its columns, as in inputs={columns}" if len(field.shape) == 1 else None,
            )


def _has_content(file: h5py.File, path: str, name: str) -> bool:
    """Return whether a file has a dataset, a group, or a member of a table of that name."""
    try:
        with without_hints():
            find_field(file, path, name)
    except DataError as error:  # of a group, or of what whoever reads it is told
        return not isinstance(error, FieldNotFound)
    return True


def _describe(values: Any) -> str:
    shown = f"{values.dtype} of shape {values.shape}"
    if values.ndim != 1 or values.dtype.kind not in "iuf" or not len(values):
        return shown
    return f"{shown}, from {values[0]} to {values[-1]}, the least {values.min()}, with the sum {values.sum()}"


def _pairing(path: str, name: str, value: Any) -> Pairing:
    """Return the pairing of one entry of ``offsets=``."""
    words = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else ()
    if not isinstance(name, str) or len(words) not in (1, 2) or not all(isinstance(word, str) for word in words):
        raise _option_error(path, {name: value})
    content, first, *second = (word.strip("/") for word in (name, *words))
    if not second:
        return Pairing(content, (first,))
    return Pairing(content, (first,), words[1]) if words[1] in KINDS else Pairing(content, (first, *second), RANGES)


def _option_error(path: str, value: object) -> DataError:
    return FormatError(
        "the option offsets= has no such value",
        file=path,
        expected=f"{EXAMPLE}, with one of {', '.join(map(repr, KINDS))}; or a pair of datasets with the first element "
        "and the number of elements of each sample",
        found=repr(value),
    )
