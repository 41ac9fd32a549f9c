"""NIfTI images for matex_data: a volume is a sample, so that a file of four axes is a series of samples.

Format: NIfTI 1 and 2, https://nifti.nimh.nih.gov/pub/dist/src/niftilib/nifti1.h. nibabel reads the header, and nothing
else is read to index a file. The first axis varies fastest, so that volumes are byte ranges of the file: any number of
ranks reads them together.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import IO, Any

import nibabel
import numpy as np

from matex_data import abc

NAME, SPATIAL = "image", 3  # axes of a volume
HEADERS = {b"\x5c\x01\0\0": nibabel.Nifti1Header, b"\x1c\x02\0\0": nibabel.Nifti2Header}


def index(path: str) -> abc.Catalogue:
    """Index a file: the field "image" has the axes of a volume in their order. Scaled values are float32.

    Raises
    ------
    FormatError : the file is damaged or truncated, or its values are no numbers.
    """
    try:
        with opened(path) as file:
            begin = file.read(4)
            kind = HEADERS.get(begin) or HEADERS[begin[::-1]]
            file.seek(0)
            header: Any = kind.from_fileobj(file)
        shape, stored = tuple(map(int, header.get_data_shape())), np.dtype(header.get_data_dtype())
        offset, (slope, inter) = int(header.get_data_offset()), header.get_slope_inter()
    except Exception as error:  # nibabel raises errors of many kinds for a damaged file
        raise abc.FormatError("the file cannot be read as NIfTI", file=path, found=error) from error
    volume, rows = shape[:SPATIAL], prod(shape[SPATIAL:])
    if not shape or stored.kind not in "iuf":
        raise abc.FormatError("the image has no numbers", file=path, found=f"{stored} of shape {shape}")
    nbytes = prod(volume) * stored.itemsize
    if not is_packed(path) and abc.size_of(path) < offset + rows * nbytes:
        expected = f"{offset + rows * nbytes} bytes"
        raise abc.FormatError("the file is truncated", file=path, expected=expected, found=abc.size_of(path))
    values = Values(1.0 if slope is None else float(slope), float(inter or 0))
    native = stored.newbyteorder("=") if values == Values(1.0, 0.0) else np.dtype("f4")
    attributes = {"zooms": list(map(float, header.get_zooms())), "affine": header.get_best_affine().ravel().tolist()}

    def layout() -> abc.Layout:
        rows_of = partial(PackedVolumes, path) if is_packed(path) else abc.Strided
        return rows_of(rows, offset, nbytes, stored, volume[::-1], convert=values)

    return abc.Catalogue.of(path, {NAME: (abc.Field(NAME, volume, native, attributes=attributes), layout)})


def is_packed(path: str) -> bool:
    """Return whether the file is compressed as a whole."""
    return path.lower().endswith(".gz")


@contextmanager
def opened(path: str) -> Iterator[IO[bytes]]:
    """Open the content of a file, which may be an object of a store."""
    with abc.open_binary(path) as file:
        yield gzip.GzipFile(fileobj=file) if is_packed(path) else file  # type: ignore[misc]


@abc.declared
@dataclass(frozen=True)
class Values:
    """Conversion of stored volumes, whose first axis varies fastest, to values: ``slope * stored + inter``."""

    slope: float
    inter: float

    def __call__(self, stored: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> None:
        values = stored.transpose(0, *range(stored.ndim - 1, 0, -1))
        out[...] = values if (self.slope, self.inter) == (1, 0) else values * self.slope + self.inter


@abc.declared
@dataclass(frozen=True)
class PackedVolumes(abc.LibraryRows):
    """Volumes of a compressed file, which is read from its begin: decompress it, and ranks read their own alone."""

    path: str
    rows: int
    offset: int
    nbytes: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    convert: Values

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return max(1, self.rows)

    def read(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        try:
            with opened(self.path) as file:
                file.seek(self.offset + start * self.nbytes)
                stored = np.frombuffer(file.read((stop - start) * self.nbytes), self.dtype)
            stored = stored.reshape(stop - start, *self.shape)
        except (OSError, EOFError, ValueError) as error:
            raise abc.DecodeError("the volumes do not unpack", file=self.path, row=start, found=error) from error
        plain = self.convert == Values(1.0, 0.0)
        out = np.empty((stop - start, *self.shape[::-1]), self.dtype.newbyteorder("=") if plain else "f4")
        self.convert(stored, out)
        return out


NIFTI = abc.Format(index, suffixes=(".nii",), magic=((344, b"n+1\0"), (4, b"n+2\0")), verified=True, remote=True)
NIFTI_GZ = abc.Format(index, suffixes=(".nii.gz",), remote=True)
