"""DICOM images for matex_data: each frame of a file is a sample, and its numbers are fields by their DICOM keywords.

Format: https://www.dicomstandard.org/current, read by pydicom, which needs further packages for some compressions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pydicom
from pydicom.pixels import pixel_array

from matex_data.abc import (
    DecodeError,
    Field,
    FieldNotFound,
    FileIndex,
    Format,
    FormatError,
    Index,
    Layout,
    LibraryRows,
    MemoryRows,
    declared,
    near_matches,
)

IMAGE = "image"


def index(path: str, names: Sequence[str] | None = None, *, rescale: bool = True) -> Index:
    """Index the frames of a file.

    Parameters
    ----------
    names : "image", and keywords of elements that are numbers, such as "SliceLocation". None: the image.
    rescale : apply the slope and the intercept of the file, such as those to Hounsfield units: float32.

    Raises
    ------
    FieldNotFound : the file has no such element, or it is no number.
    FormatError : the file is damaged, or has no image.
    """
    try:
        header = pydicom.dcmread(path, stop_before_pixels=True)
        frames = int(header.get("NumberOfFrames") or 1)
        first = pixel_array(path, index=0)
    except Exception as error:  # pydicom raises errors of many kinds for a damaged file
        raise FormatError("the file has no image of DICOM that can be read", file=path, found=error) from error
    scaling = (float(header.get("RescaleSlope", 1)), float(header.get("RescaleIntercept", 0))) if rescale else (1, 0)
    dtype = np.dtype("f4") if scaling != (1, 0) else first.dtype
    fields: dict[str, Field] = {}
    layouts: dict[str, Layout] = {}
    for name in [IMAGE] if names is None else names:
        if name == IMAGE:
            fields[name] = Field(name, first.shape, dtype)
            layouts[name] = Frames(path, frames, dtype, scaling)
        else:
            value = _number(header, path, name)
            fields[name] = Field(name, value.shape, value.dtype)
            layouts[name] = MemoryRows(np.repeat(value[None], frames, axis=0))
    return Index(fields, [FileIndex(path, frames, layouts)])


def _number(header: pydicom.Dataset, path: str, name: str) -> np.ndarray[Any, Any]:
    """Return the value of an element as a number or an array of numbers."""
    try:
        return np.array(header[name].value, "f8")
    except (KeyError, TypeError, ValueError) as error:
        keywords = [element.keyword for element in header if element.keyword]
        raise FieldNotFound(
            "the file has no such number",
            file=path,
            field=name,
            expected=f"{IMAGE!r}, or {near_matches(name, keywords)}",
        ) from error


@declared
@dataclass(frozen=True)
class Frames(LibraryRows):
    """Frames that pydicom decodes, one of them at a time.

    Parameters
    ----------
    path : of the file.
    rows : number of frames.
    dtype : of the values.
    scaling : slope and intercept.
    """

    path: str
    rows: int
    dtype: np.dtype[Any]
    scaling: tuple[float, float]

    block_rows = 1

    def read(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        slope, intercept = self.scaling
        try:
            frames = np.stack([pixel_array(self.path, index=frame) for frame in range(start, stop)])
        except Exception as error:
            raise DecodeError("the frame cannot be decoded", file=self.path, row=start, found=error) from error
        return frames if self.scaling == (1, 0) else (frames * slope + intercept).astype(self.dtype)


DICOM = Format(index, suffixes=(".dcm", ".dicom"), magic=((128, b"DICM"),))
