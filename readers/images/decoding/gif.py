"""Transparency of GIF frames.

Source of the format: Graphics Interchange Format, version 89a, sections 18 to 26.
"""

from __future__ import annotations

EXTENSION, IMAGE, CONTROL = 0x21, 0x2C, 0xF9


def has_transparency(data: bytes | memoryview) -> bool:
    """Return whether a frame of the file has a transparent colour. A damaged file is looked at as far as possible."""
    at = 13 + _table_bytes(data[10])
    try:
        while data[at] in (EXTENSION, IMAGE):
            if data[at] == EXTENSION:
                if data[at + 1] == CONTROL and data[at + 2] and data[at + 3] & 1:
                    return True
                at = _after_blocks(data, at + 2)
            else:
                at = _after_blocks(data, at + 11 + _table_bytes(data[at + 9]))
    except IndexError:
        pass
    return False


def _table_bytes(flags: int) -> int:
    """Return the size of the colour table that the flags announce."""
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _after_blocks(data: bytes | memoryview, at: int) -> int:
    """Return the position after a sequence of sub-blocks."""
    while data[at]:
        at += data[at] + 1
    return at + 1
