"""Whether a file without a telling name is a text table, by its first bytes."""

from __future__ import annotations

import bz2
import lzma
import re
import zlib
from collections.abc import Sequence

import pyarrow as pa

from matex_data.readers.csv.compression import packing
from matex_data.readers.csv.dialect import NUMBER, SPACES, Dialect, detect

_OTHER = re.compile(rb"\s*(<\?xml|<!doctype|<html|#!\s*/)", re.IGNORECASE)
"""How texts begin that are no tables, whatever their names say: XML, web pages, scripts."""
_UNTYPICAL = re.compile(r"\s*[<{\[]")
"""How XML without a declaration, JSON and settings begin."""
_CLOCK = re.compile(r".*\d\d:\d\d:\d\d,\d{3}[^\d,]")
"""A line of a log: the comma belongs to the seconds."""
_CONTROL = bytes({*range(9), *range(14, 32), 127})
"""What no text has in it: all control characters but those between words and lines."""


def beginning(head: bytes) -> bytes:
    """The first bytes of a text, in UTF-8 where its encoding is marked, unpacked as far as they go."""
    packed = packing(head, None)
    try:
        if packed == "gzip":
            return zlib.decompressobj(wbits=31).decompress(head, len(head))
        if packed == "bz2":
            return bz2.BZ2Decompressor().decompress(head, len(head))
        if packed == "xz":
            return lzma.LZMADecompressor().decompress(head, len(head))
        if packed == "zstd":
            return bytes(pa.input_stream(pa.BufferReader(head), compression="zstd").read(len(head)))
        return head.decode(packed, "ignore").encode() if packed else head
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError):
        return b""


def is_other(text: bytes) -> bool:
    """Whether a text says itself that it is something else than a table."""
    return _OTHER.match(text.removeprefix(b"\xef\xbb\xbf")) is not None


def is_binary(text: bytes) -> bool:
    """Whether these are no bytes of a text: more than one in a hundred is a control character, and more than one."""
    return _controls(text) > 1 + len(text) // 100


def _controls(text: bytes) -> int:
    return len(text) - len(text.translate(None, _CONTROL))


def is_table(text: bytes, whole: bool) -> bool:
    """Whether a text is a table of two columns or more: one separator cuts all its records into as many fields.

    Blanks separate words as well as columns, so more than half of such columns have to hold numbers.

    Parameters
    ----------
    whole : whether this is all of the text; else its last record may be cut off.
    """
    if _controls(text) or is_other(text):
        return False
    decoded = text.removeprefix(b"\xef\xbb\xbf").decode("latin-1")
    if _UNTYPICAL.match(decoded) or _CLOCK.match(decoded):
        return False
    dialect = detect(decoded, Dialect(), frozenset())
    records = [record for record in dialect.records(decoded) if record][: None if whole else -1]
    if len(records) < 2 or len({len(record) for record in records}) > 1:
        return False
    columns = [column for column in zip(*records, strict=True) if any(field.strip() for field in column)]
    numeric = sum(_is_numeric(column[1:], dialect) for column in columns)
    return len(columns) > 1 and (dialect.sep != SPACES or 2 * numeric > len(columns))


def _is_numeric(fields: Sequence[str], dialect: Dialect) -> bool:
    return all(NUMBER.match(field.replace(dialect.decimal, ".")) for field in fields)
