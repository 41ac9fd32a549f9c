"""Baskets of a ``TTree``: byte ranges of the file, and their decoding with uproot.

A basket is a TKey, and compressed blocks of data; where entries differ in length, their byte offsets follow the data.
Format: https://root.cern.ch/doc/master/classTBasket.html,
https://github.com/root-project/root/blob/master/io/doc/TFile/datarecord.md
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from struct import Struct
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import uproot
from uproot.compression import decompress
from uproot.interpretation.jagged import AsJagged
from uproot.interpretation.library import NumPy
from uproot.interpretation.numerical import AsDtype
from uproot.interpretation.strings import AsStrings

from matex_data._types import Array, Bytes, Integers
from matex_data.declared import declared
from matex_data.errors import RESTORE, DecodeError
from matex_data.index.decoded import SelectedBlocks
from matex_data.index.model import ReadRequest
from matex_data.index.ragged import RaggedArray
from matex_data.index.table import Outputs
from matex_data.machine import tasks_of_window
from matex_data.readers.root.entries import BranchBlocks, Entries

DECODE_BYTES = (256 << 10, 8 << 20)  # least and most decoded bytes of the baskets of one read request
KEY = Struct(">ihiIhh")  # TKey: bytes, version, uncompressed bytes, date, bytes of the key, cycle
BASKET = Struct(">Hiiii")  # behind it: version, buffer size, entry size, entries, end of the data
_OFFSET = np.dtype(">i4")


@declared
@dataclass(frozen=True)
class Encoding:
    """Encoding of the entries of a basket.

    Parameters
    ----------
    kind : "flat": every entry has one element. "jagged": any number of elements. "text": a string.
    dtype : of an element, as stored; a subarray for elements of more dimensions. Of strings: uint8.
    header_bytes : bytes in front of each entry.
    length_bytes : encoding of a string's length: "1-5" or "4".
    padded : entries may begin with further header bytes.
    """

    kind: Literal["flat", "jagged", "text"]
    dtype: np.dtype[Any]
    header_bytes: int = 0
    length_bytes: str = "1-5"
    padded: bool = False


@declared
@dataclass(frozen=True, eq=False)
class Baskets(BranchBlocks):
    """Branch in baskets, each of which is one byte range.

    Parameters
    ----------
    offset, nbytes : int64[baskets], byte ranges in the file.
    ratio : bytes of the branch in memory for each byte in the file.
    """

    offset: Integers
    nbytes: Integers
    ratio: float
    encoding: Encoding

    def stored_bytes(self) -> int:
        return int(self.nbytes.sum())

    def end(self) -> int:
        return int((self.offset + self.nbytes).max(initial=0))

    def decoded_bytes(self, block: int, outs: Outputs) -> int:
        return int(self.nbytes[block] * self.ratio)

    def inner_bytes(self, name: str) -> int:
        member = self.members[name]
        if member.kind != "jagged":
            return 0
        per_entry = _OFFSET.itemsize + self.encoding.header_bytes
        elements = max(0.0, self.stored_bytes() * self.ratio - self.rows * per_entry) / self.encoding.dtype.itemsize
        return int(elements * member.field.dtype.itemsize * math.prod(member.field.element_shape))

    def block_requests(self, selection: SelectedBlocks, positions: Integers) -> Iterator[ReadRequest]:
        for group in self._groups(selection, positions):
            at = selection.blocks.number[group]
            yield ReadRequest(self.offset[at], self.nbytes[at], on_complete=partial(self._decode, selection, group))

    def _groups(self, selection: SelectedBlocks, positions: Integers) -> list[Integers]:
        """Split the baskets into groups for one thread each: large ones, but at least two for each thread."""
        if not len(positions):
            return []
        ends = np.cumsum(self.nbytes[selection.blocks.number[positions]] * self.ratio)
        least, most = DECODE_BYTES
        size = min(most, max(least, float(ends[-1]) / tasks_of_window()))
        return np.split(positions, np.flatnonzero(np.diff(ends // size)) + 1)

    def _decode(self, selection: SelectedBlocks, positions: Integers, stored: Bytes) -> None:
        """Decode a group of baskets; on an error, fail the one, and give up the others that are left."""
        numbers, end = positions.tolist(), 0
        for done, i in enumerate(numbers):
            basket = int(selection.blocks.number[i])
            begin, end = end, end + int(self.nbytes[basket])
            try:
                self.complete(selection, i, self._entries(basket, stored[begin:end], i in selection.reserved))
            except Exception as error:  # uproot and the codecs raise errors of many kinds
                located = error if isinstance(error, DecodeError | MemoryError) else self._located(basket, error)
                selection.reserved.fail(numbers[done:], located)
                raise located from error

    def _entries(self, basket: int, stored: Bytes, kept: bool) -> Entries:
        """Decode a basket; ``kept``: it outlives the memory of ``stored``."""
        count = int(self.edges[basket + 1] - self.edges[basket])
        data, offsets = unpack(stored, count, self.path)
        if kept and np.may_share_memory(data, stored):
            data = data.copy()
        return decode(data, offsets, count, self.encoding)

    def _located(self, basket: int, error: Exception) -> DecodeError:
        return DecodeError(
            "a basket does not decode",
            file=self.path,
            field=self.branch,
            row=int(self.edges[basket]),
            byte=int(self.offset[basket]),
            found=f"{type(error).__name__}: {error}",
            remedy=RESTORE,
        )


def unpack(stored: Bytes, count: int, path: str) -> tuple[Bytes, Array | None]:
    """Return the uncompressed data of a basket, and the byte offsets of its entries.

    Parameters
    ----------
    stored : the basket as in the file.
    count : number of entries that it should have.

    Raises
    ------
    ValueError : the header is not that of a basket with ``count`` entries, or a checksum is wrong.
    Exception : of the codec, for compressed data that it cannot decode.
    """
    nbytes, _, unpacked, _, key_bytes, _ = KEY.unpack(stored[: KEY.size].tobytes())
    if nbytes != len(stored) or not KEY.size + BASKET.size < key_bytes <= nbytes or unpacked < 0:
        raise ValueError(f"no key of a basket of {len(stored)} bytes")
    *_, entries, last = BASKET.unpack(stored[key_bytes - BASKET.size - 1 : key_bytes - 1].tobytes())
    border = last - key_bytes
    if entries != count or not 0 <= border <= unpacked:
        raise ValueError(f"a basket of {entries} entries and {border} of {unpacked} bytes, instead of {count} entries")
    packed = nbytes - key_bytes
    raw = stored[key_bytes:] if packed == unpacked else _decompress(stored[key_bytes:], unpacked, path)
    if border == unpacked:
        return raw, None
    offsets = raw[border:].view(_OFFSET)[1:] - key_bytes
    if len(offsets) != count + 1:
        raise ValueError(f"{len(offsets)} byte offsets of {count} entries")
    offsets[-1] = border
    if offsets[0] < 0 or (np.diff(offsets) < 0).any():
        raise ValueError("the byte offsets of the entries do not ascend")
    return raw[:border], offsets


def _decompress(packed: Bytes, unpacked: int, path: str) -> Bytes:
    chunk = uproot.source.chunk.Chunk.wrap(SimpleNamespace(file_path=path), packed)
    blocks: list[tuple[str, int, int]] = []
    data = decompress(chunk, uproot.source.cursor.Cursor(0), {}, len(packed), unpacked, blocks)
    filled = sum(nbytes for _, _, nbytes in blocks)
    if filled != unpacked:
        raise ValueError(f"{filled} bytes after decompression, instead of {unpacked}")
    return np.asarray(data.raw_data)


def decode(data: Bytes, offsets: Array | None, count: int, encoding: Encoding) -> Entries:
    """Return the entries of a basket, as they are stored.

    Parameters
    ----------
    data : uncompressed.
    offsets : byte offset of each entry, and the end of the last one; None: all entries are of the same length, or
        strings in one row.
    count : number of entries.

    Raises
    ------
    ValueError : the data are not ``count`` entries of the encoding.
    """
    if encoding.kind == "flat":
        return _flat(data, count, encoding)
    if encoding.kind == "text":
        strings = AsStrings(encoding.header_bytes, encoding.length_bytes)
        found = strings.basket_array(data, offsets, None, None, {}, 0, NumPy(), {})
        return _checked(RaggedArray(np.frombuffer(found.content, np.uint8), np.asarray(found.offsets)), count)
    if offsets is None:
        raise ValueError("no byte offsets of entries of different lengths")
    length = np.diff(offsets) - encoding.header_bytes
    if (length < 0).any() or (length % encoding.dtype.itemsize).any():
        raise ValueError(f"the lengths of the entries are no multiples of {encoding.dtype.itemsize} bytes")
    if offsets[0] and not encoding.header_bytes:
        raise ValueError(f"the first entry begins at byte {offsets[0]}")
    jagged = AsJagged(AsDtype(encoding.dtype), encoding.header_bytes)
    lists = jagged.basket_array(data, offsets, None, None, {}, 0, NumPy(), {})
    return _checked(RaggedArray(lists.content, np.asarray(lists.offsets)), count)


def _flat(data: Bytes, count: int, encoding: Encoding) -> Array:
    itemsize = encoding.dtype.itemsize
    length = len(data) // max(1, count)
    if length * count != len(data) or length < itemsize or (length > itemsize and not encoding.padded):
        raise ValueError(f"{len(data)} bytes for {count} entries of {itemsize} bytes")
    base, shape = encoding.dtype.subdtype or (encoding.dtype, ())
    if length == itemsize:
        return data.view(base).reshape(count, *shape)
    return np.ascontiguousarray(data.reshape(count, length)[:, length - itemsize :]).view(base).reshape(count, *shape)


def _checked(lists: RaggedArray, count: int) -> RaggedArray:
    offsets = lists.offsets
    if len(offsets) != count + 1 or offsets[0] or (np.diff(offsets) < 0).any() or offsets[-1] > len(lists.values):
        raise ValueError(f"no {count} entries within {len(lists.values)} bytes")
    return lists
