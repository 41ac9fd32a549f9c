"""Index of netCDF files, classic and netCDF-4: variables along the sample dimension, decoded by the CF conventions.

Format: CDF-1, CDF-2 and CDF-5, and netCDF-4 in HDF5,
https://docs.unidata.ucar.edu/netcdf-c/current/file_format_specifications.html. Conventions: CF 1.11,
https://cfconventions.org.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from matex_data.errors import FormatError
from matex_data.index.model import Index
from matex_data.readers.dimensions.samples import VariableOptions, index_content
from matex_data.readers.dimensions.variables import FileContent
from matex_data.readers.formats import HDF5_MAGIC
from matex_data.readers.hdf5.files import open_file
from matex_data.readers.hdf5.names import reported
from matex_data.readers.netcdf import header, netcdf4
from matex_data.readers.options import takes
from matex_data.storage.files import open_binary
from matex_data.storage.trust import Trust

GZIP_MAGIC = b"\x1f\x8b"
NASA_MAGIC = b"\xcd\xf3", b"\xcd\xf2"
NASA_REMEDY = "it is CDF of NASA, another format: convert it by cdflib.cdf_to_xarray(path).to_netcdf('a.nc')"
DAMAGED = "if it is a netCDF file, it is damaged: restore it from its source"


@takes(VariableOptions)
def index(path: str, names: Sequence[str] | None = None, *, trust: Trust | None = None, **options: Any) -> Index:
    """Index the variables of a netCDF file along one of its dimensions.

    Parameters
    ----------
    names : variables; with groups, for example, ``"forecast/t2m"``. None: all that have the sample dimension.
    trust : where bytes may come from beside the folder of the file.
    options : those of `matex_data.readers.dimensions.samples.VariableOptions`.

    Raises
    ------
    DataError : the file leads to another one that is not trusted.
    FieldNotFound : there is no variable of that name.
    FormatError : the file is damaged or no netCDF file, or does not determine the sample dimension.
    """
    with open_content(path, trust) as content:
        return index_content(content, VariableOptions(**options, names=names))


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
    if magic == b"CDF" or magic[:2] == GZIP_MAGIC:
        yield header.read_content(path)
        return
    if not any(head[offset:].startswith(magic) for offset, magic in HDF5_MAGIC):
        raise FormatError(
            "the file is not a netCDF file",
            file=path,
            expected="'CDF' or the magic bytes of HDF5 at its start",
            found=repr(magic),
            remedy=NASA_REMEDY if magic[:2] in NASA_MAGIC else DAMAGED,
        )
    with reported("the file cannot be read as netCDF-4", path), open_file(path, trust) as hdf5:
        yield netcdf4.read_content(hdf5, path)
