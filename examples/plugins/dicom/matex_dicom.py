"""DICOM images for matex_data: a frame is a sample, and numbers of the header are fields by their DICOM keywords.

Format: https://www.dicomstandard.org/current, read by pydicom, which needs further packages for some compressions. The
header tells shape and type of the frames: none is decoded to index a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pydicom
from pydicom.pixels import iter_pixels

from matex_data.abc import (
    Catalogue,
    DecodeError,
    Field,
    Format,
    FormatError,
    LibraryRows,
    MemoryRows,
    declared,
    open_binary,
)

IMAGE = "image"


def index(path: str, *, rescale: bool = True) -> Catalogue:
    """Index the frames of a file: "image", and if they are named, elements of numbers, such as "SliceLocation".

    Parameters
    ----------
    rescale : apply the slope and the intercept of the file, such as those to Hounsfield units: float32.

    Raises
    ------
    FormatError : the file is damaged, or has no image.
    """
    try:
        with open_binary(path) as file:
            header = pydicom.dcmread(file, stop_before_pixels=True)
        frames, shape, stored = int(header.get("NumberOfFrames") or 1), shape_of(header), dtype_of(header)
        scaling = float(header.get("RescaleSlope", 1)), float(header.get("RescaleIntercept", 0))
    except Exception as error:  # pydicom raises errors of many kinds for a damaged file
        raise FormatError("the file has no image of DICOM that can be read", file=path, found=error) from error
    scaling = scaling if rescale else (1.0, 0.0)
    layout = Frames(path, frames, shape, stored, scaling)
    entries: dict[str, Any] = {IMAGE: (Field(IMAGE, shape, layout.dtype), lambda: layout)}
    for element in header:
        value = number_of(element)
        if element.keyword and value is not None:
            rows = partial(np.repeat, value[None], frames, axis=0)
            field = Field(element.keyword, value.shape, value.dtype)
            entries[element.keyword] = field, lambda rows=rows: MemoryRows(rows())
    return Catalogue.of(path, entries, "number", listed=[IMAGE])


def shape_of(header: pydicom.Dataset) -> tuple[int, ...]:
    """Return the shape of a frame: rows, columns, and colours if there are any."""
    colours = int(header.get("SamplesPerPixel", 1))
    return (int(header.Rows), int(header.Columns)) + ((colours,) if colours > 1 else ())


def dtype_of(header: pydicom.Dataset) -> np.dtype[Any]:
    """Return the type of the pixels as pydicom decodes them."""
    bits = int(header.BitsAllocated)
    return np.dtype(f"{'i' if int(header.get('PixelRepresentation', 0)) else 'u'}{max(8, bits) // 8}")


def number_of(element: Any) -> np.ndarray[Any, Any] | None:
    """Return the value of an element as a number or an array of numbers; None if it is none."""
    try:
        value = np.array(element.value, "f8")
    except (TypeError, ValueError):
        return None
    return value if value.size and element.VR not in ("SQ", "DA", "TM", "DT", "UI", "LO", "SH") else None


@declared
@dataclass(frozen=True)
class Frames(LibraryRows):
    """Frames that pydicom decodes, one of them at a time. ``scaling``: slope and intercept."""

    path: str
    rows: int
    shape: tuple[int, ...]
    stored: np.dtype[Any]
    scaling: tuple[float, float]

    block_rows = 1

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the values."""
        return self.stored if self.scaling == (1.0, 0.0) else np.dtype("f4")

    def read(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        slope, intercept = self.scaling
        try:
            with open_binary(self.path) as file:
                frames = np.stack(list(iter_pixels(file, indices=range(start, stop))))
            if frames.shape[1:] != self.shape or frames.dtype != self.stored:
                raise ValueError(f"{frames.dtype} of shape {frames.shape[1:]}, not {self.stored} of {self.shape}")
        except Exception as error:
            raise DecodeError("the frame cannot be decoded", file=self.path, row=start, found=error) from error
        return frames if self.scaling == (1.0, 0.0) else (frames * slope + intercept).astype(self.dtype)


DICOM = Format(index, suffixes=(".dcm", ".dicom"), magic=((128, b"DICM"),), remote=True)
