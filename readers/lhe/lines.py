"""Lines of LHE events, checked before pylhe reads them. It takes 1.9 for 1, rounds large integers, skips entries."""

from __future__ import annotations

import re
from collections.abc import Sequence

from matex_data.errors import DecodeError
from matex_data.readers.text.lines import REAL, SHOWN_BYTES

_INTEGER = rb"[-+]?\d{1,15}(?:\.0*)?(?=\s)"  # some programs write 2.0
_REAL = REAL + rb"(?=\s)"
_BLANK, _END = rb"[ \t]+", rb"[ \t\r]*+\n"
_HEAD = _BLANK.join([_INTEGER] * 2 + [_REAL] * 4)
_PARTICLE = _BLANK.join([_INTEGER] * 6 + [_REAL] * 7)
_LINE = rb"[ \t]*+(?:" + _PARTICLE + rb"|#[^\n]*+)?+" + _END
_EVENT = re.compile(rb"<event[^>]*+>\s*+" + _HEAD + _END + rb"(?:" + _LINE + rb")*+\s*+<")
_ONE_LINE = re.compile(_LINE)


def check_numbers(text: bytes, starts: Sequence[int]) -> None:
    """Check the lines of events, of which each begins at a byte of ``starts``.

    Raises
    ------
    DecodeError : a line has another number of entries, or an entry is no number, or no integer where it has to be.
    """
    for row, start in enumerate(starts):
        if _EVENT.match(text, start) is None:
            begin = text.find(b">", start) + 1
            lines = text[begin : text.find(b"<", begin)].strip().splitlines() or [b""]
            wrong = [line for line in lines[1:] if not _ONE_LINE.fullmatch(line.rstrip() + b"\n")]
            raise DecodeError(
                "text that is not of LHE",
                row=row,
                byte=start,
                expected="6 numbers of the event, 2 of them integers, and 13 of each particle, 6 of them integers",
                found=repr((wrong or lines)[0].strip()[:SHOWN_BYTES].decode("latin-1")),
            )
