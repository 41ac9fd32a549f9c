"""Resizing with antialiasing, as Pillow does it."""

from __future__ import annotations

import numpy as np
from PIL import Image

from matex_data._types import Array
from matex_data.readers.images.decoding.convert import as_dtype
from matex_data.readers.images.decoding.resample import resample, takes

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
