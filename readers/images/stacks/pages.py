"""Pages of a TIFF file that are stored alike: byte ranges of their strips or tiles, and the decoding of these."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import tifffile
from PIL import Image

from matex_data._types import Array, Bytes, Integers
from matex_data.declared import declared
from matex_data.errors import RESTORE, DecodeError
from matex_data.index.cache import ChunkCache
from matex_data.index.model import Layout, ReadRequest, RowSelection, call_after_last
from matex_data.index.runs import neighbours
from matex_data.index.scatter import as_bytes
from matex_data.locks import Lock, cached_property
from matex_data.readers.images.decoding import ImageInfo, ImageOptions
from matex_data.readers.images.decoding.decode import deliver, delivered_info
from matex_data.readers.images.decoding.picture import Header, Pixels

REQUEST_BYTES = 256 << 10  # of the segments that one thread decodes in one go, about
LONG8 = 16  # type of a tag's values: 64-bit integers
OFFSETS, COUNTS = {False: 273, True: 324}, {False: 279, True: 325}  # of strips, of tiles
STRUCTURE = (256, 257, 258, 259, 262, 266, 277, 278, 284, 317, 322, 323, 338, 339)
"""Tags that tell how segments are stored, from the width of the image to the format of its numbers."""
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
PILLOW_MODES = {"uint16": "I;16", "int32": "I", "float32": "F"}
DecodePage = Callable[..., Any]


@declared
@dataclass(frozen=True)
class StoredPage:
    """Form in which every page is stored.

    Parameters
    ----------
    height, width, samples : in pixels; numbers of each pixel.
    planar : each sample is stored on its own plane.
    dtype : as stored, of either byte order.
    tags : the tags `STRUCTURE`, as pairs of code and values.
    segments : number of strips or tiles.
    """

    height: int
    width: int
    samples: int
    planar: bool
    dtype: np.dtype[Any]
    tags: tuple[tuple[int, tuple[int, ...]], ...]
    segments: int

    @classmethod
    def of(cls, page: tifffile.TiffPage, byteorder: str) -> StoredPage:
        """Return the form of a page of a file with this byte order."""
        values = [(code, page.tags.valueof(code)) for code in STRUCTURE]
        tags = tuple((code, tuple(np.atleast_1d(value).tolist())) for code, value in values if value is not None)
        stored: np.dtype[Any] = np.dtype(f"{byteorder}{np.dtype(page.dtype).str[1:]}")
        planar = page.planarconfig == 2 and page.samplesperpixel > 1
        return cls(page.imagelength, page.imagewidth, page.samplesperpixel, planar, stored, tags, len(page.dataoffsets))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array of a page."""
        return (self.height, self.width) if self.samples == 1 else (self.height, self.width, self.samples)

    @property
    def nbytes(self) -> int:
        """Size of the array of a page."""
        return self.height * self.width * self.samples * self.dtype.itemsize

    @property
    def native(self) -> np.dtype[Any]:
        """Dtype of a page as Pillow gives it, which has no mode for gray of signed 16-bit integers."""
        widened = self.samples == 1 and self.dtype.kind == "i" and self.dtype.itemsize == 2
        return np.dtype(np.int32) if widened else self.dtype.newbyteorder("=")

    @property
    def is_raw(self) -> bool:
        """Return whether the bytes of a page are those of its array, but for the byte order."""
        return dict(self.tags).get(259, (1,)) == (1,) and not self.planar

    def info(self, options: ImageOptions) -> ImageInfo:
        """Return shape and dtype of a page as it is delivered."""
        name = PILLOW_MODES.get(self.native.name, "L") if self.samples == 1 else MODES[self.samples]
        channels = None if self.samples == 1 else self.samples
        return delivered_info(Header(name, self.height, self.width, channels, self.native), options)

    def deliver(self, array: Array, options: ImageOptions) -> Array:
        """Return the array of a page, of the dtype ``native``, in the mode, size and dtype of the options."""
        array = np.ascontiguousarray(array)
        picture = Image.fromarray(array) if array.dtype == np.uint8 else Pixels(array, MODES[self.samples])
        return deliver(picture, options)

    def planes(self, array: Array) -> Array:
        """Return the view of a page's array by plane: [planes, height, width, samples of the plane]."""
        if self.planar:
            return np.moveaxis(array, -1, 0)[..., None]
        return array[None, ..., None] if array.ndim == 2 else array[None]

    def decoder(self) -> DecodePage:
        """Return tifffile's function that decodes a segment: ``decode(bytes, number)``."""
        with _DECODERS_LOCK:
            return _decoder(self)

    def blank_file(self) -> bytes:
        """Return a TIFF file with one page of this form, without pixels."""
        tiled = 322 in dict(self.tags)
        nothing = (0,) * self.segments
        tags = sorted([*self.tags, (OFFSETS[tiled], nothing), (COUNTS[tiled], nothing)])
        order = "<" if self.dtype.str[0] in "<|" else ">"
        at, entries, values = 16 + 8 + 20 * len(tags) + 8, b"", b""
        for code, numbers in tags:
            stored = struct.pack(f"{order}{len(numbers)}q", *numbers)
            where = stored if len(numbers) == 1 else struct.pack(f"{order}q", at + len(values))
            values += stored if len(numbers) > 1 else b""
            entries += struct.pack(f"{order}HHq", code, LONG8, len(numbers)) + where
        head = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HHHqq", 43, 8, 0, 16, len(tags))
        return head + entries + bytes(8) + values


_DECODERS_LOCK = Lock()  # tifffile builds the function on its first use, which is not safe in threads


@lru_cache(maxsize=64)
def _decoder(page: StoredPage) -> DecodePage:
    with tifffile.TiffFile(io.BytesIO(page.blank_file())) as file:
        decode: DecodePage = file.pages.first.decode
        return decode


@declared
@dataclass(frozen=True, eq=False)
class StackPages(Layout):
    """Pages of a TIFF file.

    Parameters
    ----------
    page : form of every page.
    offset, nbytes : integers[pages, segments], the byte range of each strip or tile; with one range for each page of
        ``page.nbytes``, of the whole page.
    options : mode, size and dtype in which pages are delivered.
    """

    page: StoredPage
    offset: Array
    nbytes: Array
    options: ImageOptions
    block_rows = 1

    @property
    def rows(self) -> int:  # type: ignore[override]
        return len(self.offset)

    def stored_bytes(self) -> int:
        return int(self.nbytes.sum(dtype=np.int64))

    def end(self) -> int:
        return int((self.offset.astype(np.int64) + self.nbytes).max(initial=0))

    @cached_property
    def is_whole(self) -> bool:
        """Return whether each page is one range of raw bytes."""
        return self.page.is_raw and self.nbytes.shape[1] == 1 and bool((self.nbytes == self.page.nbytes).all())

    @property
    def is_plain(self) -> bool:
        """Return whether pages are delivered as they are stored, but for their dtype."""
        return self.options.mode == "native" and self.options.size in (None, (self.page.height, self.page.width))

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        numbers = rows.numbers
        if self.is_whole and self.is_plain and out.dtype == self.page.dtype and out.flags.c_contiguous:
            at = rows.destination * self.page.nbytes
            yield ReadRequest(*self._ranges(numbers), target=as_bytes(out), at=at)
            return
        sizes = self.nbytes[numbers].sum(axis=1, dtype=np.int64)
        for selected in neighbours(sizes, REQUEST_BYTES):
            if len(selected) == 1 and sizes[selected[0]] > REQUEST_BYTES and not self.is_whole:
                yield from self._read_large(int(numbers[selected[0]]), int(rows.destination[selected[0]]), out)
            else:
                to_read, destination = numbers[selected], rows.destination[selected].tolist()
                complete = partial(self._decode_pages, to_read.tolist(), destination, out)
                yield ReadRequest(*self._ranges(to_read), on_complete=complete)

    def _read_large(self, number: int, destination: int, out: Array) -> Iterator[ReadRequest]:
        """Yield the reads of a page whose segments several threads decode."""
        array = self._target(out, destination)
        requests = []
        for segments in neighbours(self.nbytes[number].astype(np.int64), REQUEST_BYTES):
            offset, nbytes = (table[number, segments].astype(np.int64) for table in (self.offset, self.nbytes))
            complete = partial(self._decode_segments, number, segments.tolist(), array)
            requests.append(ReadRequest(offset, nbytes, on_complete=complete))
        return iter(call_after_last(requests, partial(self._finish, array, destination, out)))

    def _ranges(self, numbers: Integers) -> tuple[Integers, Integers]:
        """Return offset and size of all segments of pages, page by page."""
        offset, nbytes = (table[numbers].reshape(-1).astype(np.int64) for table in (self.offset, self.nbytes))
        return offset, nbytes

    def _target(self, out: Array, destination: int) -> Array:
        """Return the array that receives the pixels of a page."""
        return out[destination] if self.is_plain else np.empty(self.page.shape, self.page.native)

    def _finish(self, array: Array, destination: int, out: Array) -> None:
        if not self.is_plain:
            out[destination] = self.page.deliver(array, self.options)

    def _decode_pages(self, numbers: Sequence[int], destinations: Sequence[int], out: Array, data: Bytes) -> None:
        begin = 0
        for number, destination in zip(numbers, destinations, strict=True):
            end = begin + int(self.nbytes[number].sum(dtype=np.int64))
            array = self._target(out, destination)
            if self.is_whole:
                array[...] = data[begin:end].view(self.page.dtype).reshape(self.page.shape)
            else:
                self._decode_segments(number, range(self.page.segments), array, data[begin:end])
            self._finish(array, destination, out)
            begin = end

    def _decode_segments(self, number: int, segments: Sequence[int], array: Array, data: Bytes) -> None:
        """Decode segments of a page into its array."""
        decode, planes, end = self.page.decoder(), self.page.planes(array), 0
        for segment in segments:
            begin, end = end, end + int(self.nbytes[number, segment])
            try:
                pixels, (plane, _, top, left, _), _ = decode(data[begin:end], segment)
                target = planes[plane, top : top + pixels.shape[1], left : left + pixels.shape[2]]
                target[...] = pixels[0, : target.shape[0], : target.shape[1]]
            except MemoryError:
                raise
            except Exception as error:  # the codecs raise many kinds
                raise DecodeError(
                    "a strip or tile of the page does not decode",
                    row=number,
                    byte=int(self.offset[number, segment]),
                    expected=f"{self.page.dtype} of shape {self.page.shape}",
                    found=error,
                    remedy=RESTORE,
                ) from error
