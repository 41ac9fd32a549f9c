"""Formats whose files are HDF5 files with a mark of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matex_data.readers.hdf5.files import open_file
from matex_data.readers.hdf5.names import HDF5_ERRORS
from matex_data.readers.netcdf.netcdf4 import is_netcdf4
from matex_data.readers.openpmd.series import is_openpmd


def kind_of(path: str, head: bytes, options: Mapping[str, Any]) -> str:
    """Return the format of an HDF5 file; "hdf5" if it has no other mark, or cannot be opened."""
    try:
        with open_file(path) as file:
            return "openpmd" if is_openpmd(file) else "netcdf" if is_netcdf4(file) else "hdf5"
    except HDF5_ERRORS:
        return "hdf5"
