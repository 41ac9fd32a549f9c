"""Contents of PyTables files beside the data: indexes of tables, pickled attributes, texts as lists of numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from matex_data._types import Array
from matex_data.declared import declared
from matex_data.readers import pickles
from matex_data.readers.hdf5.names import has_attribute

MARK = b"PYTABLES_FORMAT_VERSION"  # attribute of the root group
HIDDEN = ("_i_", "_p_")  # begin of the names of groups that PyTables does not show, such as the index of a table
TEXTS = {"vlstring": "latin-1", "vlunicode": "utf-32-le"}
"""Encodings of texts that are lists of numbers, by the attribute ``PSEUDOATOM``."""


def is_pytables(file: h5py.File) -> bool:
    """Return whether PyTables wrote the file."""
    return bool(has_attribute(file, MARK))


def is_hidden(name: str) -> bool:
    """Return whether a dataset of a file of PyTables belongs to what it does not show.

    >>> is_hidden("jets/_i_table/pt/sorted"), is_hidden("jets/table")
    (True, False)
    """
    return any(word.startswith(HIDDEN) for word in name.split("/"))


def text_encoding(dataset: h5py.Dataset) -> str | None:
    """Return the encoding of texts that are lists of numbers; None for any other dataset."""
    return TEXTS.get(_pseudo_atom(dataset))


def is_pickled(dataset: h5py.Dataset) -> bool:
    """Return whether the rows of a dataset are pickled objects."""
    return _pseudo_atom(dataset) == "object"


def _pseudo_atom(dataset: h5py.Dataset) -> str:
    return text_of(dataset.attrs["PSEUDOATOM"]) if has_attribute(dataset, b"PSEUDOATOM") else ""


def text_of(value: Any) -> str:
    """Return an attribute as text; "" if it is none."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str) else ""


def unpickled(value: Any) -> Any:
    """Return the Python object that PyTables has pickled to an attribute; the attribute itself if it is no pickle."""
    return pickles.load(bytes(value)) if isinstance(value, bytes) and value.endswith(b".") else value


@declared
@dataclass(frozen=True)
class ListedTexts:
    """Decoder of texts that PyTables has stored as lists of numbers.

    Parameters
    ----------
    encoding : of the bytes of the numbers.
    """

    encoding: str

    def decode(self, stored: Array) -> Array:
        """Return object[n], the texts in UTF-8; bytes of "latin-1" as they are."""
        texts = np.empty(len(stored), object)
        texts[:] = [self._text(numbers) for numbers in stored]
        return texts

    def _text(self, numbers: Array) -> bytes:
        data = np.asarray(numbers).tobytes()
        return data if self.encoding == "latin-1" else data.decode(self.encoding, "surrogatepass").encode()
