"""FITS files that are open, and the compressed images among them that stay open while their rows are read."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, BinaryIO
from weakref import ref

from matex_data.readers.text.compression import stored_as, unpacked
from matex_data.readers.text.unpacked import REMEDY
from matex_data.storage.files import open_binary
from matex_data.storage.objects import is_url

MAX_OPEN = 8  # files of a process whose images are compressed by the tile


@contextmanager
def opened(path: str) -> Iterator[tuple[BinaryIO | io.BytesIO, str]]:
    """Context manager: open a file, decompressed in memory if it is compressed as a whole, and return how.

    Raises
    ------
    DecodeError : the file is damaged.
    """
    with open_binary(path) as file:
        stored = stored_as(file.read(8), "")
        file.seek(0)
        yield (unpacked(file, stored, "the unpacked file", REMEDY) if stored else file), stored


class TiledImage:
    """Compressed image of an open file.

    Parameters
    ----------
    path : of the file.
    number : of the unit.
    """

    def __init__(self, path: str, number: int) -> None:
        from astropy.io import fits

        self.block: tuple[int, Any] = -1, None
        with ExitStack() as stack:
            file, stored = stack.enter_context(opened(path))
            whole = stack.enter_context(fits.open(file, memmap=not stored and not is_url(path)))
            self.section = whole[number].section
            self._opened = stack.pop_all()

    def close(self) -> None:
        """Close the file."""
        self._opened.close()


_open: OrderedDict[ref[Any], TiledImage] = OrderedDict()


def tiled_image(rows: Any, path: str, number: int) -> TiledImage:
    """Return an open image. Its file stays open while ``rows`` exists and is among those used last."""
    key = ref(rows, _closed)
    if key not in _open:
        _open[key] = TiledImage(path, number)
        if len(_open) > MAX_OPEN:
            _open.popitem(last=False)[1].close()
    _open.move_to_end(key)
    return _open[key]


def _closed(key: ref[Any]) -> None:
    image = _open.pop(key, None)
    if image is not None:
        image.close()
