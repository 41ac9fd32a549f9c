"""Resizing of 8-bit images with antialiasing, as Pillow does it, to the same numbers.

Source: Pillow, ``src/libImaging/Resample.c``: weights in integers of 22 bits after the point, rounded to 8 bits after
the horizontal pass and after the vertical one.

Numba compiles the loops, which run without the interpreter lock on the array of the JPEG decoder. From 256 x 256 to
224 x 224 pixels, bilinear, they take 0.2 ms; Pillow takes 0.8 ms, with the copy to four bytes per pixel and back, and
decoding 0.36 ms.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import numpy as np
from PIL import Image

from matex_data._types import Array
from matex_data.codecs.scratch import filter_output
from matex_data.index.scatter import as_bytes
from matex_data.locks import Lock
from matex_data.readers.images.decoding.convert import as_dtype

BITS = 22
"""Of the weights after the binary point: 32, less 8 of the pixels, less 2 for sums beyond 1."""
Kernel = Callable[[Array], Array]


def compiled(loop: Callable[..., None], signature: Any) -> Callable[..., None]:
    """Compile a loop over arrays for one signature, or load it from the cache that Numba keeps on disk.

    The loop runs without the lock of the interpreter.
    """
    from numba import njit  # importing Numba takes most of a second

    try:
        return njit(signature, nogil=True, cache=True)(loop)  # type: ignore[no-any-return]
    except (RuntimeError, OSError):  # no writable folder for the cache, or a full one
        return njit(signature, nogil=True)(loop)  # type: ignore[no-any-return]


def _triangle(x: Array) -> Array:
    weights: Array = np.maximum(1 - np.abs(x), 0)
    return weights


def _box(x: Array) -> Array:
    return ((x > -0.5) & (x <= 0.5)).astype("f8")


def _cubic(x: Array) -> Array:
    x, a = np.abs(x), -0.5
    near, far = ((a + 2) * x - (a + 3)) * x * x + 1, (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _lanczos(x: Array) -> Array:
    return np.where((x >= -3) & (x < 3), np.sinc(x) * np.sinc(x / 3), 0)


FILTERS: dict[str, tuple[Kernel, float]] = {
    "box": (_box, 0.5),
    "bilinear": (_triangle, 1.0),
    "bicubic": (_cubic, 2.0),
    "lanczos": (_lanczos, 3.0),
}
"""Weight as a function of the distance, and the distance beyond which it is 0, by method."""


def resample(pixels: Array, size: tuple[int, int], method: str, out: Array | None = None) -> Array:
    """Return an image of another size.

    Parameters
    ----------
    pixels : uint8, (height, width) or (height, width, 3), contiguous.
    size : (height, width) of the result.
    method : a name of ``FILTERS``.
    out : uint8, contiguous, for as many numbers as the result; None: new memory.
    """
    height, width = size
    channels = 1 if pixels.ndim == 2 else pixels.shape[2]
    weigh, transpose = compiled_weighting(), compiled_transposition(channels)
    result = np.empty(height * width * channels, np.uint8) if out is None else out.reshape(-1)
    rows = pixels.reshape(len(pixels), -1)
    if pixels.shape[1] != width:  # by columns as by rows: these are long, the loop over them uses vector instructions
        columns = _scratch(rows, pixels.shape[1], len(pixels) * channels)
        transpose(rows, columns)
        weighed = _scratch(columns, width, len(pixels) * channels)
        weigh(columns, *_weights(pixels.shape[1], width, method), weighed)
        is_last = len(pixels) == height
        rows = result.reshape(height, -1) if is_last else _scratch(weighed, len(pixels), width * channels)
        transpose(weighed, rows)
    if len(pixels) != height:
        weigh(rows, *_weights(len(pixels), height, method), result.reshape(height, -1))
    return result.reshape(height, width, *pixels.shape[2:])


def _scratch(source: Array, rows: int, row_bytes: int) -> Array:
    """Return memory of this thread that ``source`` does not use, uint8[rows, row_bytes]."""
    return filter_output(as_bytes(source), False, None, rows * row_bytes).reshape(rows, row_bytes)


def takes(pixels: Array, size: tuple[int, int], method: str) -> bool:
    """Return whether `resample` gives the numbers of Pillow, and its loops are compiled.

    Pillow, from version 13 on, does the vertical pass first where that reduces the image more, and its rounding shows.
    """
    kind = pixels.dtype == np.uint8 and (pixels.ndim == 2 or pixels.shape[2] == 3)
    fewer_rows, fewer_columns = pixels.shape[0] - size[0], pixels.shape[1] - size[1]
    return kind and method in FILTERS and (fewer_rows <= 0 or fewer_rows <= 2 * fewer_columns) and _is_compiled()


def compile_loops() -> None:
    """Compile all loops, or load them from Numba's cache, which takes 0.8 s with the import of Numba."""
    compiled_weighting()
    for channels in (1, 3):
        compiled_transposition(channels)
    _compiled_all.set()


_compiled_all = threading.Event()
_started = Lock()  # taken once, by the thread that begins to compile; a forked process begins anew


def _is_compiled() -> bool:
    """Return whether the loops are compiled; begin with it at the first call: the first images are Pillow's."""
    if not _compiled_all.is_set() and _started.acquire(blocking=False):
        threading.Thread(target=compile_loops, name="matex compiles the resizing of images").start()
    return _compiled_all.is_set()


@lru_cache(maxsize=256)
def _weights(length: int, wanted: int, method: str) -> tuple[Array, Array, Array]:
    """Return the first source position, the number of sources, and their weights, for each new position."""
    function, reach = FILTERS[method]
    scale = length / wanted
    stretch = max(scale, 1.0)
    reach *= stretch
    centers = (np.arange(wanted) + 0.5) * scale
    first = np.maximum((centers - reach + 0.5).astype("i8"), 0)
    counts = np.minimum((centers + reach + 0.5).astype("i8"), length) - first
    steps = np.arange(counts.max())
    weights = function((steps + first[:, None] - centers[:, None] + 0.5) / stretch)
    weights[steps >= counts[:, None]] = 0
    weights /= weights.sum(axis=1, keepdims=True)
    fixed = np.trunc(weights * (1 << BITS) + np.copysign(0.5, weights)).astype("i4")
    return first, counts, fixed


@cache
def compiled_weighting() -> Callable[..., None]:
    """Compile the weighted sums of rows."""
    from numba import int32, int64, types, uint8  # importing Numba takes most of a second

    half, bits, most = np.int32(1 << (BITS - 1)), np.int32(BITS), np.int32(255)

    def weighted(source: Any, first: Any, counts: Any, weights: Any, out: Any) -> None:
        width = source.shape[1]
        totals = np.empty(width, np.int32)
        for row in range(len(first)):
            totals[:] = half
            for step in range(counts[row]):
                weight, line = weights[row, step], first[row] + step
                for column in range(width):
                    product = np.int32(np.int32(source[line, column]) * weight)
                    totals[column] = np.int32(totals[column] + product)
            for column in range(width):
                out[row, column] = np.uint8(min(max(totals[column] >> bits, np.int32(0)), most))

    pixels, numbers = types.Array(uint8, 2, "C", readonly=True), types.Array(int64, 1, "C", readonly=True)
    matrix = types.Array(int32, 2, "C", readonly=True)
    return compiled(weighted, types.void(pixels, numbers, numbers, matrix, types.Array(uint8, 2, "C")))


@cache
def compiled_transposition(channels: int) -> Callable[[Array, Array], None]:
    """Compile the exchange of rows and columns of pixels with ``channels`` bytes."""
    from numba import types, uint8

    def transposed(source: Any, out: Any) -> None:
        height, width = source.shape[0], source.shape[1] // channels
        for row in range(height):
            for column in range(width):
                for channel in range(channels):
                    out[column, row * channels + channel] = source[row, column * channels + channel]

    return compiled(transposed, types.void(types.Array(uint8, 2, "C", readonly=True), types.Array(uint8, 2, "C")))


METHODS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
    "box": Image.Resampling.BOX,
}


def resize_image(image: Image.Image, size: tuple[int, int], method: str) -> Array:
    """Return an image of Pillow as an array of (height, width)."""
    height, width = size
    if image.size == (width, height):
        return np.asarray(image)
    if image.mode in ("L", "RGB") and takes(pixels := np.asarray(image), size, method):
        return resample(pixels, size, method)
    return np.asarray(image.resize((width, height), METHODS[method]))


def resize_array(array: Array, size: tuple[int, int], method: str, out: Array | None = None) -> Array:
    """Return an array of shape (height, width[, channels]), in its dtype.

    "nearest" moves the numbers as they are. The other methods compute 8-bit gray and colours as Pillow does, all else
    in float32, a channel at a time; integers are rounded. ``out`` is memory for the result, which need not be used.
    """
    if array.shape[:2] == size:
        return array
    if method == "nearest":
        return array[_nearest(array.shape[0], size[0])][:, _nearest(array.shape[1], size[1])]
    if array.ndim == 3 and array.shape[2] == 1:
        return resize_array(array[..., 0], size, method, out)[..., None]
    if takes(array, size, method):
        return resample(np.ascontiguousarray(array), size, method, out)
    if array.dtype == np.uint8 and (array.ndim == 2 or array.shape[2] == 3):
        return np.asarray(Image.fromarray(array).resize(size[::-1], METHODS[method]))
    if array.ndim == 2:
        return as_dtype(_resize_channel(array, size, method), array.dtype)
    channels = [_resize_channel(array[..., channel], size, method) for channel in range(array.shape[2])]
    return as_dtype(np.stack(channels, axis=2), array.dtype)


def _resize_channel(channel: Array, size: tuple[int, int], method: str) -> Array:
    plane = Image.fromarray(np.ascontiguousarray(channel, dtype=np.float32))
    resized: Array = np.asarray(plane.resize((size[1], size[0]), METHODS[method]))
    return resized


def _nearest(length: int, wanted: int) -> Array:
    """Return the row or column that Pillow takes for each of the new ones."""
    numbers = Image.fromarray(np.arange(length, dtype=np.int32)[None])
    chosen: Array = np.asarray(numbers.resize((wanted, 1), Image.Resampling.NEAREST)).reshape(-1)
    return chosen
