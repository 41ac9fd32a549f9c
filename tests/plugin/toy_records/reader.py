"""Index of toy files: magic bytes, number of records (uint32), then the records, all big-endian."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from matex_data.abc import (
    Field,
    FieldNotFound,
    FileIndex,
    FormatError,
    Index,
    Layout,
    Strided,
    group_interleaved,
    near_matches,
)
from toy_records import MAGIC

RECORD = np.dtype([("id", ">i8"), ("position", ">f4", (3,)), ("label", ">i2"), ("spare", "V2")])
FIELDS = ("id", "position", "label")
HEADER_BYTES = len(MAGIC) + 4


def index(path: str, names: Sequence[str] | None = None, *, first_record: int = 0) -> Index:
    """Index the records from ``first_record`` on."""
    with Path(path).open("rb") as file:
        head = file.read(HEADER_BYTES)
    if len(head) < HEADER_BYTES or not head.startswith(MAGIC):
        raise FormatError("the file is not a toy file", file=path, expected=repr(MAGIC), found=repr(head))
    rows = struct.unpack_from(">I", head, len(MAGIC))[0] - first_record
    fields: dict[str, Field] = {}
    layouts: dict[str, Layout] = {}
    for name in FIELDS if names is None else names:
        if name not in FIELDS:
            near = near_matches(name, FIELDS)
            raise FieldNotFound("the file has no such field", file=path, field=name, expected=f"one of {near}")
        dtype, position = RECORD.fields[name][:2]
        base = dtype.base
        fields[name] = Field(name, dtype.shape, base.newbyteorder("="))
        offset = HEADER_BYTES + first_record * RECORD.itemsize + position
        layouts[name] = Strided(rows, offset, RECORD.itemsize, base, dtype.shape)
    return Index(fields, [FileIndex(path, rows, group_interleaved(layouts))])
