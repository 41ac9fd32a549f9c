"""NIfTI images for matex_data: volumes of a series, or slices of one volume, along the last axis.

Format: https://nifti.nimh.nih.gov/pub/dist/src/niftilib/nifti1.h, read by nibabel. The first axis varies fastest, so
that samples along the last one are byte ranges of the file: any number of ranks reads them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import nibabel
import numpy as np

from matex_data.abc import (
    Field,
    FieldNotFound,
    FileIndex,
    Format,
    FormatError,
    Index,
    Layout,
    LibraryRows,
    Strided,
    declared,
)

NAME = "image"


def index(path: str, names: Sequence[str] | None = None) -> Index:
    """Index a file of two or more axes, the last of which counts the samples.

    The field "image" has the axes in front of it, in their order. Scaled values are float32: nibabel's are float64.

    Raises
    ------
    FieldNotFound : another field is asked for.
    FormatError : the file is damaged, or its values are no numbers.
    """
    for name in names or ():
        if name != NAME:
            raise FieldNotFound("the file has no such field", file=path, field=name, expected=repr(NAME))
    try:
        image: Any = nibabel.load(path)
        stored, is_scaled = image.dataobj, image.dataobj.slope != 1 or image.dataobj.inter != 0
        shape, dtype = tuple(map(int, stored.shape)), np.dtype(stored.dtype)
    except Exception as error:  # nibabel raises errors of many kinds for a damaged file
        raise FormatError("the file cannot be read as NIfTI", file=path, found=error) from error
    if len(shape) < 2 or dtype.kind not in "iufc":
        found = f"{dtype} of shape {shape}"
        raise FormatError("the image has no samples", file=path, expected="numbers with two or more axes", found=found)
    native = np.dtype("f4") if is_scaled else dtype.newbyteorder("=")
    attributes = {"zooms": [float(zoom) for zoom in image.header.get_zooms()], "affine": image.affine.ravel().tolist()}
    field = Field(NAME, shape[:-1], native, attributes=attributes)
    layout: Layout = Slices(path, shape[-1], native)
    if not path.endswith(".gz"):
        nbytes = prod(shape[:-1]) * dtype.itemsize
        convert = FirstAxisFastest(float(stored.slope), float(stored.inter))
        layout = Strided(shape[-1], int(stored.offset), nbytes, dtype, shape[-2::-1], convert=convert)
    return Index({NAME: field}, [FileIndex(path, shape[-1], {NAME: layout})])


@declared
@dataclass(frozen=True)
class FirstAxisFastest:
    """Conversion of stored samples, whose first axis varies fastest, to values.

    Parameters
    ----------
    slope, inter : a value is ``slope * stored + inter``.
    """

    slope: float
    inter: float

    def __call__(self, stored: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> None:
        values = stored.transpose(0, *range(stored.ndim - 1, 0, -1))
        out[...] = values if (self.slope, self.inter) == (1, 0) else values * self.slope + self.inter


@declared
@dataclass(frozen=True)
class Slices(LibraryRows):
    """Samples of a compressed file, which nibabel reads from its begin: decompress it to read fast.

    Parameters
    ----------
    path : of the file.
    rows : number of samples.
    dtype : of the values.
    """

    path: str
    rows: int
    dtype: np.dtype[Any]

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return self.rows

    def read(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        image: Any = nibabel.load(self.path)
        samples = np.asarray(image.dataobj[..., start:stop])
        return np.moveaxis(samples, -1, 0).astype(self.dtype)


NIFTI = Format(index, suffixes=(".nii",), magic=((344, b"n+1\0"), (4, b"n+2\0")), verified=True)
NIFTI_GZ = Format(index, suffixes=(".nii.gz",))
