"""Index of netCDF files, classic and netCDF-4: variables along the sample dimension, decoded by the CF conventions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from matex_data.errors import DataError, FormatError
from matex_data.index.model import Index
from matex_data.readers.dimensions.samples import Options, index_content
from matex_data.readers.dimensions.variables import FileContent
from matex_data.readers.formats import HDF5_MAGIC
from matex_data.readers.hdf5.files import open_file
from matex_data.readers.hdf5.names import HDF5_ERRORS
from matex_data.readers.netcdf import classic, netcdf4
from matex_data.storage.files import open_binary
from matex_data.storage.trust import Trust


def index(
    path: str,
    names: Sequence[str] | None = None,
    *,
    sample_dim: str | None = None,
    decode: bool = True,
    decode_times: bool | None = None,
    mask_and_scale: bool | None = None,
    valid_range: bool | None = None,
    static: bool = True,
    static_as_inputs: bool = False,
    sel: Mapping[str, Any] | None = None,
    isel: Mapping[str, Any] | None = None,
    dtype: str | None = None,
    coordinate: bool = False,
    method: str | None = None,
    trust: Trust | None = None,
) -> Index:
    """Index the variables of a netCDF file along one of its dimensions.

    Parameters
    ----------
    names : variables; with groups, for example, ``"forecast/t2m"``. None: all that have the sample dimension.
    sample_dim : dimension that counts the samples. None: the one whose coordinate is a time by its units ("hours since
        2000-01-01"), else the unlimited one, else the first one of all variables. Dimensions of groups that have its
        name and its values are the same one.
    decode : decode times, packed and missing numbers, and letters along the last axis to texts. False: values as they
        are stored.
    decode_times : convert times to seconds since 1970. None: as ``decode``.
    mask_and_scale : undo packing (``scale_factor``, ``add_offset``, ``_Unsigned``), and replace missing numbers by NaN.
        None: as ``decode``.
    valid_range : whether decoded numbers outside of ``valid_min``, ``valid_max`` or ``valid_range`` are missing. None:
        only of variables that become floats and have neither ``_FillValue`` nor ``missing_value``.
    static : read the variables without the sample dimension too, up to ``MAX_STATIC_BYTES`` each. A data set uses
        those of its first file.
    static_as_inputs : take the variables without the sample dimension that are named for fields of every sample.
    sel : values of coordinates by dimension: one (the axis is dropped), a list, or a slice, both ends included:
        ``{"level": [500, 850], "lat": slice(20, 70)}``. Values are exact; along a descending coordinate a slice may
        begin at either end. Of the sample dimension dates as text, such as ``slice("2015", "2016-06")``. Only the
        bytes of the selection are read, where they lie as such.
    isel : positions, likewise, by dimension of a sample: an int, a list, or a slice as of Python.
    dtype : of packed variables and of other floats of 64 bits but times: "float32". They are decoded in double
        precision, and then rounded. None: as xarray decodes them.
    coordinate : add the coordinate of the samples, if there is one, to the variables that are named: windows need it.
    method : "nearest": a value of ``sel`` stands for the nearest of the coordinate, as in xarray; ends of slices, and
        values of the sample dimension, do not. None: values are exact.
    trust : where bytes may come from beside the folder of the file.

    Raises
    ------
    DataError : the file leads to another one that is not trusted.
    FieldNotFound : there is no variable of that name.
    FormatError : the file is damaged or no netCDF file, or does not determine the sample dimension.
    """
    options = Options(
        names=names,
        sample_dim=sample_dim,
        decode=decode,
        decode_times=decode_times,
        mask_and_scale=mask_and_scale,
        valid_range=valid_range,
        static=static,
        static_as_inputs=static_as_inputs,
        sel=sel,
        isel=isel,
        dtype=dtype,
        coordinate=coordinate,
        method=method,
    )
    with open_content(path, trust) as content:
        return index_content(content, options)


@contextmanager
def open_content(path: str, trust: Trust | None = None) -> Iterator[FileContent]:
    """Read variables and dimensions of a netCDF or HDF5 file, which is open meanwhile.

    Raises
    ------
    FormatError : the file is damaged or no such file.
    """
    with open_binary(path) as file:
        head = file.read(max(offset + len(magic) for offset, magic in HDF5_MAGIC))
    magic = head[:3]
    if magic == b"CDF" or magic[:2] == classic.GZIP_MAGIC:
        yield classic.read_content(path)
        return
    if not any(head[offset:].startswith(magic) for offset, magic in HDF5_MAGIC):
        raise FormatError(
            "the file is not a netCDF file",
            file=path,
            expected="'CDF' or the magic bytes of HDF5 at its start",
            found=repr(magic),
        )
    try:
        with open_file(path, trust) as hdf5:
            yield netcdf4.read_content(hdf5, path)
    except DataError:
        raise
    except HDF5_ERRORS as error:
        raise FormatError("the file cannot be read as netCDF-4", file=path, found=error) from error
