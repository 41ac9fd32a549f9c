"""Sections of images before they are resized: of the wanted shape around the center, padded to it, or drawn."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from matex_data._types import Array
from matex_data.readers.images.decoding.options import CROP_RATIO, FLIPS, ImageOptions
from matex_data.readers.images.decoding.picture import Pixels

TRIES = 10
"""Sections that are drawn until one lies within the image, as in torchvision."""


class Box(NamedTuple):
    """Section of an image, in pixels: rows ``top`` to ``bottom``, columns ``left`` to ``right``, maybe beyond it."""

    top: int
    left: int
    bottom: int
    right: int


def center_box(height: int, width: int, size: tuple[int, int]) -> Box:
    """Return the largest section around the center with the aspect ratio of a size.

    As ``crop_to_aspect_ratio`` of Keras (``keras.preprocessing.image.smart_resize``) rounds it.

    Examples
    --------
    >>> center_box(100, 300, (50, 50))
    Box(top=0, left=100, bottom=100, right=200)
    """
    rows = max(1, min(height, int(width * size[0] / size[1])))
    columns = max(1, min(width, int(height * size[1] / size[0])))
    top, left = (height - rows) // 2, (width - columns) // 2
    return Box(top, left, top + rows, left + columns)


def padding_box(height: int, width: int, size: tuple[int, int]) -> Box:
    """Return the smallest section around an image with the aspect ratio of a size.

    As ``pad_to_aspect_ratio`` of Keras rounds it: equally many pixels on either side.

    Examples
    --------
    >>> padding_box(100, 300, (50, 50))
    Box(top=-100, left=0, bottom=200, right=300)
    """
    rows = (max(height, int(width * size[0] / size[1])) - height) // 2
    columns = (max(width, int(height * size[1] / size[0])) - width) // 2
    return Box(-rows, -columns, height + rows, width + columns)


def random_box(
    height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float], generator: np.random.Generator
) -> Box:
    """Return a section of random area and aspect ratio, drawn as in ``torchvision.transforms.RandomResizedCrop``.

    Parameters
    ----------
    scale : least and largest area, as fractions of that of the image.
    ratio : least and largest width over height.
    generator : source of the numbers.
    """
    limits = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(TRIES):
        area = height * width * generator.uniform(*scale)
        aspect = math.exp(generator.uniform(*limits))
        rows, columns = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < rows <= height and 0 < columns <= width:
            top, left = int(generator.integers(height - rows + 1)), int(generator.integers(width - columns + 1))
            return Box(top, left, top + rows, left + columns)
    least, most = ratio
    rows = round(width / least) if width < height * least else height
    columns = round(height * most) if width > height * most else width
    top, left = (height - rows) // 2, (width - columns) // 2
    return Box(top, left, top + rows, left + columns)


def drawn(options: ImageOptions, height: int, width: int, seed: int | None) -> tuple[Box | None, tuple[int, ...]]:
    """Return the section of an image that options choose, None for all of it, and the axes that are mirrored.

    Parameters
    ----------
    seed : of the sample in this epoch; None: nothing is drawn. Images of one seed and one size get equal results.
    """
    if options.crop_to_aspect_ratio or options.pad_to_aspect_ratio:
        assert options.size is not None
        find = center_box if options.crop_to_aspect_ratio else padding_box
        box: Box | None = find(height, width, options.size)
    else:
        box = None
    if seed is None or not options.is_random:
        return box, ()
    mirroring, section = np.random.SeedSequence(seed).spawn(2)
    if options.random_resized_crop is not False:
        generator = np.random.default_rng(section)
        box = random_box(height, width, options.random_resized_crop, CROP_RATIO, generator)
    chances = np.random.default_rng(mirroring).random(2)
    return box, tuple(axis for axis in FLIPS.get(options.random_flip or "", ()) if chances[axis] < 0.5)


def cut(picture: Image.Image | Pixels, box: Box) -> Image.Image | Pixels:
    """Return a section of an image; what lies beyond the image is zero."""
    if isinstance(picture, Image.Image):
        return picture.crop((box.left, box.top, box.right, box.bottom))
    array = picture.array
    height, width = array.shape[:2]
    within = array[max(0, box.top) : box.bottom, max(0, box.left) : box.right]
    beyond: list[Any] = [
        (max(0, -box.top), max(0, box.bottom - height)),
        (max(0, -box.left), max(0, box.right - width)),
    ]
    if not any(map(any, beyond)):
        return Pixels(within, picture.mode)
    return Pixels(np.pad(within, [*beyond, *[(0, 0)] * (array.ndim - 2)]), picture.mode)


def height_and_width(picture: Image.Image | Pixels) -> tuple[int, int]:
    """Return the height and width of an image, in pixels."""
    if isinstance(picture, Image.Image):
        return picture.height, picture.width
    return int(picture.array.shape[0]), int(picture.array.shape[1])


def flipped(array: Array, axes: tuple[int, ...]) -> Array:
    """Return an image mirrored along axes: 0 upside down, 1 left to right."""
    return np.flip(array, axes) if axes else array
