"""Variables of a MATLAB file of version 5 to 7, inflated to the sizes that they declare.

A variable is a data element: its type and its length in bytes, four each, and as many bytes. A compressed element holds
another one. https://www.mathworks.com/help/pdf_doc/matlab/matfile_format.pdf
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Collection
from typing import IO

import numpy as np

from matex_data.codecs.bounded import decompress
from matex_data.machine import check_fits

HEADER = 128  # bytes of a file in front of its elements
TAG = 8  # bytes
ORDERS = {b"IM": "<", b"MI": ">"}  # what stands at the end of the header
MATRIX, COMPRESSED = 14, 15
FLAGS = 16  # bytes of the element with the flags, the first one of a variable
HEAD = 4096  # bytes of a variable that have its name
REMEDY = "name the variables that you need with inputs= and targets=, or save the file as version 7.3"


def inflated(stored: IO[bytes], names: Collection[str]) -> IO[bytes]:
    """Return a file with some of the variables of another one, none of them compressed; version 4 as it is.

    Parameters
    ----------
    stored : the file.
    names : of the variables; empty: all.

    Raises
    ------
    PartitionError : the variables do not fit into memory.
    ValueError, struct.error, zlib.error : the file is damaged.
    """
    header = stored.read(HEADER)
    order = ORDERS.get(header[-2:], "")
    if len(header) < HEADER or not order:
        stored.seek(0)
        return stored
    content = io.BytesIO()
    content.write(header)
    while tag := stored.read(TAG):
        kind, nbytes = struct.unpack(f"{order}II", tag)
        data = np.frombuffer(stored.read(nbytes), np.uint8)
        if len(data) < nbytes:
            raise ValueError(f"an element of {nbytes} bytes, of which the file has {len(data)}")
        is_compressed = kind == COMPRESSED
        if is_compressed:
            head = zlib.decompressobj().decompress(data.data, HEAD)
            kind, nbytes = struct.unpack(f"{order}II", head[:TAG])
        else:
            head = tag + data[:HEAD].tobytes()
        if kind == MATRIX and names and _name(head, order) not in names:
            continue
        check_fits(content.tell() + nbytes, "the variables of the file", remedy=REMEDY)
        content.write(decompress("zlib", data, TAG + nbytes).data if is_compressed else tag + data.tobytes())
    content.seek(0)
    return content


def _name(head: bytes, order: str) -> str:
    """Return the name of a variable, of which the flags and the lengths of the axes stand in front."""
    at = TAG + FLAGS
    (axes,) = struct.unpack_from(f"{order}I", head, at + 4)
    at += TAG + axes + -axes % TAG
    kind, nbytes = struct.unpack_from(f"{order}II", head, at)
    small = kind >> 16  # up to four bytes stand in the tag
    return head[at + 4 : at + 4 + small].decode() if small else head[at + TAG : at + TAG + nbytes].decode()
