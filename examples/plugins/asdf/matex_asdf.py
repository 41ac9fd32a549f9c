"""ASDF files for matex_data: arrays of equal length are fields, named by their places in the tree, as "roman/data".

Format: https://asdf-standard.readthedocs.io. asdf reads the tree as plain YAML, so that no class is made. Arrays lie in
blocks behind it; rows of those that are not compressed are byte ranges, which any number of ranks reads together.
"""

from __future__ import annotations

import bz2
import struct
import zlib
from collections import Counter, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import IO, Any

import asdf
import numpy as np

from matex_data import abc

MAGIC, HEADER = b"\xd3BLK", struct.Struct(">HI4sQQQ")
NUMBERS = "int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
DTYPES = {name: np.dtype(name) for name in NUMBERS.split()} | {"bool8": np.dtype(bool)}
UNPACK = {"zlib": zlib.decompressobj, "bzp2": bz2.BZ2Decompressor}
Block = namedtuple("Block", "offset stored size packing")  # bytes in the file, size once unpacked, compression


def index(path: str) -> abc.Catalogue:
    """Index the arrays that have as many rows as most of them. Raise ``FormatError`` for a damaged file."""
    try:
        with abc.open_binary(path) as file:
            tree = asdf.util.load_yaml(file, tagged=True)
            blocks = list(_blocks(file, abc.size_of(path)))
        found = {name: _array(path, name, array, blocks) for name, array in _arrays(tree, "", set())}
    except Exception as error:  # of asdf, and of trees that are none of ASDF
        raise abc.FormatError("the file cannot be read as ASDF", file=path, found=error) from error
    lengths = Counter(rows for rows, entry in found.values() if rows is not None)
    most = max(lengths, key=lengths.__getitem__, default=None)
    entries = {n: e if rows in (most, None) else f"it has {rows} rows, others {most}" for n, (rows, e) in found.items()}
    return abc.Catalogue.of(path, entries, "array")


def _arrays(node: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the arrays below a node; what has several names, or holds itself, once."""
    if id(node) in seen or not isinstance(node, dict | list):
        return
    seen.add(id(node))
    if "core/ndarray-" in str(getattr(node, "_tag", "")):
        yield name, node
    else:
        for key, inner in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _arrays(inner, f"{name}/{key}".lstrip("/"), seen)


def _blocks(file: IO[bytes], size: int) -> Iterator[Block]:
    """Yield the blocks, which follow each other behind the end of the tree."""
    file.seek(0)
    while (line := file.readline()) and line.rstrip() != b"...":
        pass
    at = (begin := file.tell()) + file.read(1 << 20).find(MAGIC)
    while at >= begin and file.seek(at) + 4 + HEADER.size <= size and file.read(4) == MAGIC:
        length, flags, packing, allocated, used, unpacked = HEADER.unpack(file.read(HEADER.size))
        data, kind, streamed = at + 6 + length, packing.rstrip(b"\0").decode("ascii"), flags & 1
        stored = max(0, min(size if streamed else used, size - data))
        yield Block(data, stored, unpacked if kind else stored, kind)
        at = size if streamed else data + allocated


def _array(path: str, name: str, array: Any, blocks: list[Block]) -> tuple[int | None, Any]:
    """Return the rows of an array, with its field and layout; None and the reason, if it cannot be read."""
    source = str(array.get("source", "")) if isinstance(array, dict) else ""
    if not source.isdecimal() and source != "-1":  # the last one: a stream
        return None, "it lies in the tree, or in another file"
    dtype = DTYPES.get(str(array["datatype"]))
    if dtype is None or "mask" in array or "strides" in array or not array["shape"]:
        return None, "it is masked, transposed, a single number, or of a type other than numbers"
    block, offset = blocks[int(source)], int(array.get("offset", 0))
    inner, length = tuple(map(int, array["shape"][1:])), str(array["shape"][0])
    stride = prod(inner) * dtype.itemsize
    rows = (block.size - offset) // max(1, stride) if length == "*" else int(length)
    if min(rows, offset, *inner, 0) < 0 or offset + rows * stride > block.size:
        raise ValueError(f"{name!r} ends at byte {offset + rows * stride} of a block of {block.size}")
    stored, field = dtype.newbyteorder(">" if array["byteorder"] == "big" else "<"), abc.Field(name, inner, dtype)
    if not block.packing:
        return rows, (field, partial(abc.Strided, rows, block.offset + offset, stride, stored, inner))
    if block.packing not in UNPACK:
        return None, f"its block is compressed by {block.packing!r}"
    return rows, (field, partial(PackedRows, path, rows, max(1, rows), tuple(block), offset, stored, inner))


@abc.declared
@dataclass(frozen=True)
class PackedRows(abc.LibraryRows):
    """Rows of a block that is compressed as a whole: a rank that needs some unpacks all before them."""

    path: str
    rows: int
    block_rows: int
    block: tuple[int, int, int, str]
    begin: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def read(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        (offset, stored, _, packing), count = self.block, prod(self.shape)
        size = count * self.dtype.itemsize
        try:
            with abc.open_binary(self.path) as file:
                file.seek(offset)
                data = UNPACK[packing]().decompress(file.read(stored), self.begin + stop * size)
            rows = np.frombuffer(data, self.dtype, (stop - start) * count, self.begin + start * size)
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise abc.DecodeError("the block does not unpack", file=self.path, row=start, found=error) from error
        return rows.reshape(stop - start, *self.shape).astype(self.dtype.newbyteorder("="))


ASDF = abc.Format(index, suffixes=(".asdf",), magic=((0, b"#ASDF "),), remote=True)
