"""Arrow files, FITS tables and Zarr stores to damage, and their values by pyarrow, astropy and zarr."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from astropy.io import fits

from tests.fuzz import parquet
from tests.readers.arrow import test_reader as test_ipc
from tests.readers.fits import test_reader as fits_reader
from tests.readers.parquet import test_reader
from tests.readers.zarr import test_reader as zarr_reader


def write_arrow(folder: Path) -> list[Path]:
    """Write files and streams of some batches, compressed and not, and a file as polars does."""
    content = test_reader.table(30)
    kinds: dict[str, dict[str, Any]] = {"plain": {}, "zstd": {"compression": "zstd"}, "stream": {"stream": True}}
    paths = [test_ipc.write(folder / f"own_{kind}.arrow", content, **kinds[kind]) for kind in kinds]
    return [*map(Path, paths), Path(test_ipc.as_polars(test_ipc.write(folder / "own_polars.arrow", content)))]


def read_arrow(path: Path) -> dict[str, Any]:
    """Return the values by pyarrow, once it has checked them."""
    with path.open("rb") as file:
        is_file = file.read(6) == b"ARROW1"
    table = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(pa.OSFile(str(path))).read_all()
    table.validate(full=True)
    return parquet.values(table)


def write_fits(folder: Path) -> list[Path]:
    """Write a binary table of all kinds of columns, an ASCII table and a cube."""
    paths = [folder / "own_binary.fits", folder / "own_ascii.fits"]
    fits_reader.write(paths[0], 30)
    columns = [fits.Column("n", "I7", array=range(20)), fits.Column("x", "E15.7", array=[i / 7 for i in range(20)])]
    fits.TableHDU.from_columns(columns).writeto(paths[1])
    return paths


def read_fits(path: Path) -> dict[str, Any]:
    """Return the columns by astropy, whose texts do not end with a NUL as those of the standard do."""
    found = fits_reader.expected(str(path))
    for name, values in found.items():
        if values.dtype.kind == "S":
            texts = [text.partition(b"\0")[0] for text in values.ravel().tolist()]
            found[name] = np.array(texts, values.dtype).reshape(values.shape)
    return found


def write_zarr(folder: Path) -> list[Path]:
    """Write zip files of both versions, with shards and without."""
    kinds = {"two": (2, False), "three": (3, False), "shards": (3, True)}
    content = zarr_reader.arrays(40)
    return [Path(zarr_reader.write(folder / f"own_{name}.zarr.zip", content, *kind)) for name, kind in kinds.items()]


def zarr_folders(folder: Path) -> list[tuple[str, bytes, dict[str, bytes], str]]:
    """Return each file of two stores in folders: its name, its bytes, the other files of its store, and the store."""
    found = []
    for name, kind in (("own_two.zarr", (2, False)), ("own_shards.zarr", (3, True))):
        root = Path(zarr_reader.write(folder / name, zarr_reader.arrays(40), *kind))
        files = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
        found += [(key, data, {k: v for k, v in files.items() if k != key}, name) for key, data in files.items()]
    return found


def read_zarr(path: Path) -> dict[str, Any]:
    """Return the arrays by the zarr package."""
    return zarr_reader.expected(str(path))
