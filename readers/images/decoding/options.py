"""Options of decoding, and the description of an image as it is delivered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from matex_data.declared import declared
from matex_data.errors import FormatError, near_matches
from matex_data.fields import Field
from matex_data.sampling.permutation import check_seed

MODES = ("native", "rgb", "gray")
METHODS = ("nearest", "bilinear", "bicubic", "lanczos", "box")
GAP = 2
"""Factor to the wanted size that an image keeps when it is scaled down while it is decoded."""
FLIPS: dict[str, tuple[int, ...]] = {"horizontal": (1,), "vertical": (0,), "horizontal_and_vertical": (0, 1)}
"""Axes of (height, width) that are mirrored at random, by the names of ``keras.layers.RandomFlip``."""
SECTIONS = ("crop_to_aspect_ratio", "pad_to_aspect_ratio", "random_resized_crop")
CROP_SCALE, CROP_RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
"""Areas and aspect ratios of ``torchvision.transforms.RandomResizedCrop``."""
MAX_PIXELS = 178_956_970
"""Limit of Pillow: a quarter of a GiB, in pixels of three bytes, and half of this."""


@declared
@dataclass(frozen=True)
class ImageOptions:
    """Mode, size and dtype of decoded images.

    Parameters
    ----------
    mode : "native": as Pillow gives the array, shape (height, width) or (height, width, channels). Palette images are
        indices into their palette, images of one bit are bool. Colours of 16 bits per channel stay uint16, and
        floating-point numbers stay as they are. Several frames (GIF, APNG, WebP) are RGB, or RGBA where the first
        one has transparent pixels.
        "rgb": shape (height, width, 3); palettes are expanded, gray is repeated, alpha is left out.
        "gray": shape (height, width, 1); colours by ITU-R 601-2, ``0.299 R + 0.587 G + 0.114 B``, as Pillow's "L".
        Neither changes the dtype of 16-bit, 32-bit and floating-point images.
    size : (height, width) in pixels, or None: as stored.
    resample : "nearest", "bilinear", "bicubic", "lanczos" or "box"; with antialiasing, except "nearest". Palette
        indices and images of one bit are always resized by "nearest", as Pillow does.
    dtype : of the result; numbers are cast, never scaled. None: as stored.
    max_pixels : limit of width x height; a larger image is an error.
    crop_to_aspect_ratio : resize the largest section around the center that has the aspect ratio of ``size``, as Keras
        chooses it, instead of distorting the image.
    pad_to_aspect_ratio : put zeros beside the image instead, as Keras does.
    random_resized_crop : (least, largest) area of a random section, as fractions of that of the image, which is resized
        to ``size``; True: (0.08, 1), as in torchvision. Its aspect ratio is from 3/4 to 4/3. Drawn anew for each sample
        and epoch.
    random_flip : "horizontal", "vertical" or "horizontal_and_vertical", as in Keras: mirror half of the images.
    augment_seed : seed of both.

    Raises
    ------
    FormatError : an option has another value.

    Examples
    --------
    >>> ImageOptions(mode="rgb", size=(224, 224)).size
    (224, 224)
    """

    mode: str = "native"
    size: tuple[int, int] | None = None
    resample: str = "bilinear"
    dtype: np.dtype[Any] | None = None
    max_pixels: int = MAX_PIXELS
    crop_to_aspect_ratio: bool = False
    pad_to_aspect_ratio: bool = False
    random_resized_crop: Any = False
    random_flip: str | None = None
    augment_seed: int = 0

    def __post_init__(self) -> None:
        _check_choice("mode", self.mode, MODES)
        _check_choice("resample", self.resample, METHODS)
        if self.size is not None:
            object.__setattr__(self, "size", _checked_size(self.size))
        if self.dtype is not None:
            object.__setattr__(self, "dtype", _checked_dtype(self.dtype))
        if not _is_positive(self.max_pixels):
            raise FormatError(
                "max_pixels is no limit", expected="a positive number of pixels", found=repr(self.max_pixels)
            )
        if self.random_flip is not None:
            _check_choice("random_flip", self.random_flip, tuple(FLIPS))
        if self.random_resized_crop is not False:
            object.__setattr__(self, "random_resized_crop", _checked_scale(self.random_resized_crop))
        check_seed(self.augment_seed)
        sections = [name for name in SECTIONS if getattr(self, name) is not False]
        if len(sections) > 1:
            raise FormatError("an image has one section", expected=f"one of {SECTIONS}", found=" and ".join(sections))
        if sections and self.size is None:
            raise FormatError(
                f"{sections[0]} needs the size of the result", expected="size=(height, width)", found="size=None"
            )

    @property
    def is_random(self) -> bool:
        """True if an image is decoded differently in each epoch."""
        return self.random_resized_crop is not False or self.random_flip is not None

    @property
    def takes_section(self) -> bool:
        """True if a section of an image is resized, or it is mirrored."""
        return self.crop_to_aspect_ratio or self.pad_to_aspect_ratio or self.is_random

    def reduces(self, width: int, height: int) -> bool:
        """Return whether a JPEG of this size is scaled down while it is decoded.

        It is at least four times as large as wanted, and stays at least twice as large, as Pillow's ``thumbnail`` has
        it. Photographs then differ from a resized whole image by 0.2 to 1.1 levels of 255 on average. (If twice as
        large were enough, by 0.4 to 1.8.)
        """
        if self.size is None or self.resample == "nearest" or self.takes_section:
            return False
        return height >= 2 * GAP * self.size[0] and width >= 2 * GAP * self.size[1]


def _check_choice(option: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise FormatError(
            f"there is no {option} of that name",
            expected=f"one of {near_matches(str(value), choices)}",
            found=repr(value),
            remedy=f"choose another {option}=",
        )


def _is_positive(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) > 0


def _checked_size(size: Any) -> tuple[int, int]:
    numbers = tuple(size) if isinstance(size, tuple | list) else ()
    if len(numbers) != 2 or not all(_is_positive(number) for number in numbers):
        raise FormatError(
            "size is no size of an image",
            expected="(height, width), two positive integers",
            found=repr(size),
            remedy="for example size=(224, 224)",
        )
    return int(numbers[0]), int(numbers[1])


def _checked_scale(scale: Any) -> tuple[float, float]:
    if scale is True:
        return CROP_SCALE
    numbers = tuple(scale) if isinstance(scale, tuple | list) else ()
    if (
        len(numbers) != 2
        or not all(isinstance(n, int | float) for n in numbers)
        or not 0 < numbers[0] <= numbers[1] <= 1
    ):
        raise FormatError(
            "random_resized_crop= is no range of areas",
            expected="True, or the least and the largest fraction of the image, such as (0.5, 1)",
            found=repr(scale),
        )
    return float(numbers[0]), float(numbers[1])


def _checked_dtype(dtype: Any) -> np.dtype[Any]:
    try:
        checked: np.dtype[Any] = np.dtype(dtype)
    except (TypeError, ValueError):
        checked = np.dtype(object)
    if checked.kind not in "biuf":
        raise FormatError(
            "pixels cannot have that dtype",
            expected="a real number type, for example 'uint8' or 'float32'",
            found=repr(dtype),
            remedy="choose another dtype=",
        )
    return checked.newbyteorder("=")


@declared
@dataclass(frozen=True)
class ImageInfo:
    """Image as it is delivered: after orientation, mode, size and dtype.

    Parameters
    ----------
    shape : (height, width) or (height, width, channels).
    pages : of the file; 1 where they are not counted.
    attributes : ``"mode"`` and, for integers, ``"value_range"``, for example ``"0 to 255"``.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    pages: int = 1
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def field(self, name: str, ragged: bool) -> Field:
        """Return the field of such images; ``ragged``: each has a height and width of its own."""
        if ragged:
            return Field(name, (), self.dtype, True, dict(self.attributes), (None, None, *self.shape[2:]))
        return Field(name, self.shape, self.dtype, attributes=dict(self.attributes))
