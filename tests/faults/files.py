"""Small files of several formats, whose values depend on their row, and ways to damage them."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import netCDF4
import numpy as np
from numpy.typing import NDArray

ROWS = 2048
WIDTH = 16
CHUNK = 128
BATCH = 64

Array = NDArray[Any]


def truth(rows: Array, shift: int = 0) -> Array:
    """Return the values of rows, (n, WIDTH); the first value is the row number, the others look random."""
    columns = np.arange(WIDTH)
    return np.where(columns == 0, rows[:, None], (rows[:, None] * 7919 + columns * 104729 + shift) % 9973)


def write(path: Path, kind: str, shift: int = 0) -> None:
    """Write a file of ``ROWS`` rows; ``shift`` changes all values except the row numbers."""
    values = truth(np.arange(ROWS), shift).astype(np.int32)
    WRITERS[kind](path, values)


def _hdf5(**options: Any) -> Callable[[Path, Array], None]:
    def save(path: Path, values: Array) -> None:
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=values, **options)

    return save


def _netcdf(kind: str, **options: Any) -> Callable[[Path, Array], None]:
    def save(path: Path, values: Array) -> None:
        with netCDF4.Dataset(path, "w", format=kind) as file:
            file.createDimension("time", None)
            file.createDimension("column", WIDTH)
            variable = file.createVariable("x", "i4", ("time", "column"), **options)
            variable[:] = values

    return save


def _csv(path: Path, values: Array) -> None:
    names = ",".join(f"c{i}" for i in range(WIDTH))
    path.write_text(names + "\n" + "".join(",".join(map(str, row)) + "\n" for row in values.tolist()))


def _idx(path: Path, values: Array) -> None:
    path.write_bytes(struct.pack(">HBB2I", 0, 12, 2, *values.shape) + values.astype(">i4").tobytes())


def _npy(path: Path, values: Array) -> None:
    with path.open("wb") as file:
        np.save(file, values)


CHUNKS = (CHUNK, WIDTH)
WRITERS: Mapping[str, Callable[[Path, Array], None]] = {
    "hdf5": _hdf5(),
    "hdf5 gzip": _hdf5(chunks=CHUNKS, compression="gzip"),
    "hdf5 shuffle": _hdf5(chunks=CHUNKS, compression="gzip", shuffle=True),
    "hdf5 fletcher32": _hdf5(chunks=CHUNKS, fletcher32=True),
    "netcdf classic": _netcdf("NETCDF3_64BIT_OFFSET"),
    "netcdf-4": _netcdf("NETCDF4", chunksizes=CHUNKS, zlib=True),
    "csv": _csv,
    "npy": _npy,
    "idx": _idx,
}
SUFFIXES = {"hdf5": ".h5", "netc": ".nc", "csv": ".csv", "npy": ".npy", "idx": ".idx"}


def name(kind: str) -> str:
    """Return the name of a file of a kind."""
    return f"data{SUFFIXES[kind[:4]]}"


def matrix(element: Mapping[str, Array]) -> Array:
    """Return the values of a batch, (n, WIDTH)."""
    if len(element) == 1:
        return next(iter(element.values()))
    return np.stack([element[f"c{i}"] for i in range(WIDTH)], axis=1)


def truncate(path: Path) -> None:
    """Truncate the file to three quarters."""
    os.truncate(path, path.stat().st_size * 3 // 4)


def corrupt(path: Path, kind: str) -> None:
    """Change bytes in the middle of a chunk."""
    if kind.startswith(("hdf5", "netcdf-4")):
        with h5py.File(path) as file:
            dataset = file["x"]
            place = dataset.id.get_chunk_info(dataset.id.get_num_chunks() // 2)
            at = place.byte_offset + place.size // 2
    else:
        at = path.stat().st_size // 2
    with path.open("r+b") as file:
        file.seek(at)
        stored = file.read(16)
        file.seek(at)
        file.write(bytes(byte ^ 0x55 for byte in stored))


def replace(path: Path, kind: str) -> None:
    """Replace the file by another one of the same size."""
    other = path.with_name("other" + path.suffix)
    write(other, kind, shift=1)
    other.replace(path)
