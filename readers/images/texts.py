"""Texts, and lists of numbers, of many rows in one block of memory: file names, and columns of manifests."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from matex_data._types import Array, Bytes, Integers
from matex_data.declared import declared
from matex_data.index.ragged import RaggedArray, take_lists
from matex_data.storage.objects import is_url


@declared
@dataclass(frozen=True, eq=False)
class Texts:
    """Byte strings, one behind the other: a million Python objects would take 100 MB on every rank.

    Parameters
    ----------
    data : uint8[bytes], all bytes: an array, which the ranks of a machine share.
    end : integers[n], end of each text in ``data``.

    Examples
    --------
    >>> names = Texts.of(["a.png", "b.png"])
    >>> len(names), names[1], names.take(np.array([1, 0])).tolist()
    (2, b'b.png', [b'b.png', b'a.png'])
    """

    data: Bytes
    end: Integers

    @classmethod
    def of(cls, texts: Iterable[str]) -> Texts:
        """Return texts, encoded as the system encodes file names."""
        encoded = [os.fsencode(text) for text in texts]
        end = np.cumsum([len(text) for text in encoded], dtype=np.int64)
        data = np.frombuffer(b"".join(encoded), np.uint8)
        return cls(data, end.astype(np.int32) if len(data) < 2**31 else end)

    def __len__(self) -> int:
        return len(self.end)

    def __getitem__(self, number: int) -> bytes:
        return self.data[int(self.end[number - 1]) if number else 0 : int(self.end[number])].tobytes()

    def __iter__(self) -> Iterator[bytes]:
        begin, data = 0, self.data.tobytes()
        for end in self.end.tolist():
            yield data[begin:end]
            begin = end

    def text(self, number: int) -> str:
        """Return one text, decoded."""
        return os.fsdecode(self[number])

    def path(self, root: str, number: int) -> bytes:
        """Return the path of a file whose name relative to ``root``, or absolute, or URL is a text of these."""
        name = self[number]
        return name if is_url(name) else os.path.join(os.fsencode(root), name)  # noqa: PTH118 (a Path: ten times slower)

    def take(self, numbers: Integers) -> Array:
        """Return some of the texts, object[numbers] of bytes."""
        taken = np.empty(len(numbers), object)
        taken[:] = [self[number] for number in numbers.tolist()]
        return taken


@declared
@dataclass(frozen=True, eq=False)
class NumberLists:
    """Lists of numbers, one behind the other.

    Parameters
    ----------
    values : [numbers, ...], those of all lists.
    end : int64[n], end of each list in ``values``.
    class_names : names of the classes, if the numbers are classes.

    Examples
    --------
    >>> boxes = NumberLists(np.arange(12).reshape(3, 4), np.array([2, 2, 3]))
    >>> len(boxes), [box.shape for box in boxes.take(np.array([0, 1])).samples()]
    (3, [(2, 4), (0, 4)])
    """

    values: Array
    end: Integers
    class_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.end)

    def take(self, numbers: Integers) -> RaggedArray:
        """Return some of the lists, copied."""
        lengths = np.diff(self.end, prepend=0)[numbers]
        return take_lists(self.values, self.end[numbers] - lengths, lengths)
