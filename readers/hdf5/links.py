"""Datasets in other files to which numbered links lead, as one field: those of a detector's master file.

The master file of an Eiger has ``entry/data/data_000001``, ``data_000002``, ... as external links to its data files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import h5py

from matex_data.errors import FormatError, shortened
from matex_data.fields import Field
from matex_data.index.combined import Concatenated
from matex_data.index.model import Layout
from matex_data.paths import natural_sorted
from matex_data.readers.hdf5.files import TrustedFile
from matex_data.readers.hdf5.names import HDF5_ERRORS, MAX_OBJECTS, links_of, objects_of
from matex_data.readers.hdf5.source_rows import SourceRows
from matex_data.warning import warn

_NUMBERED = re.compile(r"(.*?)_?[0-9]+")
MAX_SHOWN = 8

ByteRanges = Callable[[h5py.Dataset, str, str], Layout | None]
"""Function that returns the layout of a dataset of a file, for the field of a name; None if it has no byte ranges."""
LinkedRows = Callable[[h5py.Dataset, str], tuple[Field, Layout]]
"""Function that returns field and layout of a dataset of the open file, by its name."""


@dataclass(frozen=True)
class Links:
    """External links of a file.

    Parameters
    ----------
    series : names of the links, in the order of their numbers, by the field that their datasets are.
    others : names of all other ones, which are followed only if they are named.
    """

    series: Mapping[str, Sequence[str]]
    others: Sequence[str]

    @classmethod
    def of(cls, file: TrustedFile) -> Links:
        """Return the external links of an open file; none if its groups cannot be listed."""
        try:
            names = natural_sorted(_external_links(file))
        except HDF5_ERRORS:
            names = []  # who lists the datasets says what is wrong
        series: dict[str, list[str]] = {}
        others = []
        for name in names:
            group, _, last = name.rpartition("/")
            match = _NUMBERED.fullmatch(last)
            if match is None:
                others.append(name)
            else:
                series.setdefault(f"{group}/{match[1] or 'data'}".lstrip("/"), []).append(name)
        taken = [name for name in series if name in file]
        return cls({n: s for n, s in series.items() if n not in taken}, others + [n for t in taken for n in series[t]])

    def tell_others(self, path: str) -> None:
        """Warn of links that are not followed."""
        if self.others:
            text = f"{path}: links to other files are followed only if inputs= or targets= name them: "
            warn(text + ", ".join(shortened(map(repr, self.others), MAX_SHOWN)))

    def rows(
        self, file: TrustedFile, path: str, name: str, rows: LinkedRows, byte_ranges: ByteRanges
    ) -> tuple[Field, Layout]:
        """Return the field of a series and its layout: the rows of the datasets, one dataset after the other.

        Raises
        ------
        DataError : a link leads to a file that is not trusted.
        FormatError : a link leads to no dataset, or the datasets differ in shape or dtype.
        """
        field: Field | None = None
        parts: list[Layout] = []
        for link in self.series[name]:
            dataset = _target(file, path, link)
            found, layout = rows(dataset, link)
            field = field or found
            if (found.shape, found.dtype, found.ragged) != (field.shape, field.dtype, field.ragged):
                raise FormatError(
                    "the datasets to which the links lead differ",
                    file=path,
                    field=link,
                    expected=f"{field.description}, as of {self.series[name][0]!r}",
                    found=found.description,
                    remedy="name one of the links with inputs=",
                )
            target = os.fsdecode(h5py.h5f.get_name(dataset.id))
            inner = byte_ranges(dataset, target, link)
            parts.append(layout if inner is None else SourceRows(inner, target))
        assert field is not None
        return Field(name, field.shape, field.dtype, field.ragged, field.attributes, field.inner), Concatenated(
            tuple(parts)
        )


def _target(file: TrustedFile, path: str, link: str) -> h5py.Dataset:
    try:
        found = file[link]
    except HDF5_ERRORS as error:
        to = file.get(link, getlink=True)
        raise FormatError(
            "a link leads to no dataset",
            file=path,
            field=link,
            expected=f"{to.filename}:{to.path}",
            found=error,
            remedy="copy the data files beside the file that links them, or select other fields with inputs=",
        ) from error
    if not isinstance(found, h5py.Dataset):
        raise FormatError("a link leads to no dataset", file=path, field=link, expected="a dataset", found="a group")
    return found


def _external_links(file: TrustedFile) -> Iterator[str]:
    """Yield the names of the external links of the groups of a file."""
    for kind, above, link, name in objects_of(file):
        if kind == h5py.h5g.GROUP:
            group, prefix = h5py.h5g.open(above, link), name + b"/" * bool(name)
            yield from (os.fsdecode(name) for *_, name in links_of(group, prefix, MAX_OBJECTS, h5py.h5l.TYPE_EXTERNAL))
