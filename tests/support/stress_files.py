"""Small files of every kind of layout, whose samples contain their own numbers in every value.

Every file is written by the library with which users write its format.
"""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import netCDF4
import numpy as np
import pandas as pd
import pylhe
import tifffile
import uproot
from numpy.typing import NDArray
from PIL import Image

Integers = NDArray[np.int64]
Sample = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Kind:
    """Format or layout.

    Parameters
    ----------
    write : writes the samples of these numbers, int64[n], to a file.
    numbers : returns the numbers of the samples of a batch, int64[n], after it has compared all their values.
    suffix : of the files.
    options : of ``open_dataset``.
    """

    write: Callable[[Path, Integers], None]
    numbers: Callable[[Sample], Integers]
    suffix: str
    options: dict[str, Any] = field(default_factory=dict)

    def fill(self, folder: Path, files: int, rows: int) -> str:
        """Write files of ``rows`` samples each, and return their pattern."""
        folder.mkdir(parents=True)
        for number in range(files):
            self.write(folder / f"{number:05d}{self.suffix}", np.arange(number * rows, (number + 1) * rows))
        return str(folder / f"*{self.suffix}")


def vectors(numbers: Integers) -> Integers:
    """Return int64[n, 8], different in every element of every sample."""
    return numbers[:, None] * 8 + np.arange(8)


def _vectors(batch: Sample) -> Integers:
    (values,) = (array for name, array in batch.items() if not name.startswith("label"))
    numbers = values[:, 0] // 8
    assert np.array_equal(values, vectors(numbers).astype(values.dtype))
    return numbers.astype(np.int64)


def _counts(numbers: Integers) -> Integers:
    return numbers * 7 % 5


def _lists(numbers: Integers) -> list[NDArray[np.float64]]:
    """Return lists of 0 to 4 elements."""
    return [number + np.arange(count) / 8 for number, count in zip(numbers, _counts(numbers), strict=True)]


def _columns(numbers: Integers) -> dict[str, NDArray[Any]]:
    return {"n": numbers, "half": numbers / 2, "minus": -numbers}


def _check_columns(batch: Sample) -> Integers:
    numbers = np.asarray(batch["n"], np.int64)
    for name, column in _columns(numbers).items():
        assert np.array_equal(batch[name], column), name
    return numbers.copy()


def _check_lists(batch: Sample) -> Integers:
    numbers = np.asarray(batch["n"], np.int64)
    for found, expected in zip(batch["list"], _lists(numbers), strict=True):
        assert np.array_equal(found, expected)
    return numbers.copy()


def _check_texts(batch: Sample) -> Integers:
    numbers = np.asarray(batch["n"], np.int64)
    texts = [text.decode() if isinstance(text, bytes) else str(text) for text in batch["text"]]
    assert texts == [f"sample {number}" for number in numbers]
    return numbers.copy()


def _write_npy(path: Path, numbers: Integers) -> None:
    np.save(path, vectors(numbers))


def _write_transposed(path: Path, numbers: Integers) -> None:
    np.save(path, np.asfortranarray(vectors(numbers)))


def _write_npz(path: Path, numbers: Integers) -> None:
    np.savez_compressed(path, x=vectors(numbers))


def _write_hdf5(**options: Any) -> Callable[[Path, Integers], None]:
    def write(path: Path, numbers: Integers) -> None:
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=vectors(numbers), **options)

    return write


def _write_virtual(path: Path, numbers: Integers) -> None:
    with h5py.File(path, "w") as file:
        stored = file.create_dataset("stored", data=vectors(numbers), chunks=(2, 8), compression="gzip")
        layout = h5py.VirtualLayout(stored.shape, stored.dtype)
        layout[...] = h5py.VirtualSource(stored)
        file.create_virtual_dataset("x", layout)


def _write_compound(path: Path, numbers: Integers) -> None:
    rows = np.zeros(len(numbers), [(name, column.dtype) for name, column in _columns(numbers).items()])
    for name, column in _columns(numbers).items():
        rows[name] = column
    with h5py.File(path, "w") as file:
        file.create_dataset("rows", data=rows, chunks=(max(1, len(rows) // 2),), compression="gzip")


def _check_compound(batch: Sample) -> Integers:
    return _check_columns({name.removeprefix("rows/"): array for name, array in batch.items()})


def _write_texts(path: Path, numbers: Integers) -> None:
    with h5py.File(path, "w") as file:
        file["n"] = numbers
        file["text"] = [f"sample {number}" for number in numbers]


def _write_jagged(path: Path, numbers: Integers) -> None:
    with h5py.File(path, "w") as file:
        file["n"] = numbers
        file["list"] = np.concatenate([*_lists(numbers), np.empty(0)])
        file["offsets"] = np.concatenate([[0], np.cumsum(_counts(numbers))])


def _write_netcdf(form: Any, **options: Any) -> Callable[[Path, Integers], None]:
    def write(path: Path, numbers: Integers) -> None:
        with netCDF4.Dataset(path, "w", format=form) as file:
            file.createDimension("time", None)
            for name, column in _columns(numbers.astype("i4")).items():
                file.createVariable(name, column.dtype, ("time",), **options)[:] = column

    return write


def _write_csv(path: Path, numbers: Integers) -> None:
    pd.DataFrame(_columns(numbers)).to_csv(path, index=False)


def _write_ttree(path: Path, numbers: Integers) -> None:
    with uproot.recreate(path) as file:
        file.mktree("events", {name: column.dtype for name, column in _columns(numbers).items()})
        for half in np.array_split(numbers, 2):
            file["events"].extend(_columns(half))


def _write_ntuple(path: Path, numbers: Integers) -> None:
    with uproot.recreate(path) as file:
        file.mkrntuple("events", _columns(numbers))


def _picture(number: int) -> NDArray[np.uint8]:
    """Return uint8[6, 5, 3], which shows the number in its first pixels."""
    pixels = np.random.default_rng(number).integers(0, 256, (6, 5, 3), np.uint8)
    pixels.reshape(-1)[:8] = np.frombuffer(np.int64(number).tobytes(), np.uint8)
    return pixels


def _png(number: int) -> bytes:
    memory = io.BytesIO()
    Image.fromarray(_picture(number)).save(memory, "png")
    return memory.getvalue()


def _check_pictures(batch: Sample) -> Integers:
    name = next(name for name in batch if name in ("image", "png"))
    pixels = np.asarray(batch[name])
    numbers = np.ascontiguousarray(pixels.reshape(len(pixels), -1)[:, :8]).view(np.int64)[:, 0]
    for image, number in zip(pixels, numbers.tolist(), strict=True):
        assert np.array_equal(image, _picture(number)), number
    return numbers


def _write_pictures(path: Path, numbers: Integers) -> None:
    for number in numbers.tolist():
        path.with_name(f"{number:06d}.png").write_bytes(_png(number))


def _write_tar(path: Path, numbers: Integers) -> None:
    with tarfile.open(path, "w") as archive:
        for number in numbers.tolist():
            info = tarfile.TarInfo(f"{number:06d}.png")
            content = _png(number)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def _write_stack(path: Path, numbers: Integers) -> None:
    tifffile.imwrite(path, np.stack([_picture(n) for n in numbers.tolist()]), compression="zlib", photometric="rgb")


def _write_lhe(path: Path, numbers: Integers) -> None:
    process = pylhe.LHEProcInfo(1.0, 0.1, 1.0, 1)
    init = pylhe.LHEInit(pylhe.LHEInitInfo(2212, 2212, 6500.0, 6500.0, 0, 0, 1, 1, -4, 1), [process], [])
    particle = (21, -1, 0, 0, 501, 502, 0.0, 0.0, 1.0, 2.0, 0.0, 0.0, 9.0)
    events = [
        pylhe.LHEEvent(pylhe.LHEEventInfo(1, n, n / 2, -n, 0.0, 0.0), [pylhe.LHEParticle(*particle)])
        for n in numbers.tolist()
    ]
    text = pylhe.LHEFile(init=init, events=events).tolhe()
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def _check_lhe(batch: Sample) -> Integers:
    return _check_columns({"n": batch["pid"], "half": batch["weight"], "minus": batch["scale"]})


KINDS = {
    "npy": Kind(_write_npy, _vectors, ".npy"),
    "transposed": Kind(_write_transposed, _vectors, ".npy"),
    "npz": Kind(_write_npz, _vectors, ".npz"),
    "hdf5": Kind(_write_hdf5(), _vectors, ".h5"),
    "gzip": Kind(_write_hdf5(chunks=(3, 4), compression="gzip", shuffle=True, fletcher32=True), _vectors, ".h5"),
    "virtual": Kind(_write_virtual, _vectors, ".h5", {"inputs": ["x"]}),
    "compound": Kind(_write_compound, _check_compound, ".h5", {"inputs": ["rows/n", "rows/half", "rows/minus"]}),
    "texts": Kind(_write_texts, _check_texts, ".h5"),
    "jagged": Kind(_write_jagged, _check_lists, ".h5", {"offsets": {"list": "offsets"}}),
    "classic": Kind(_write_netcdf("NETCDF3_CLASSIC"), _check_columns, ".nc"),
    "netcdf": Kind(_write_netcdf("NETCDF4", zlib=True, chunksizes=(3,)), _check_columns, ".nc"),
    "csv": Kind(_write_csv, _check_columns, ".csv"),
    "csv-gzip": Kind(_write_csv, _check_columns, ".csv.gz"),
    "ttree": Kind(_write_ttree, _check_columns, ".root"),
    "rntuple": Kind(_write_ntuple, _check_columns, ".root"),
    "pictures": Kind(_write_pictures, _check_pictures, ".png"),
    "tar": Kind(_write_tar, _check_pictures, ".tar"),
    "stacks": Kind(_write_stack, _check_pictures, ".tif"),
    "lhe": Kind(_write_lhe, _check_lhe, ".lhe"),
    "lhe-gzip": Kind(_write_lhe, _check_lhe, ".lhe.gz"),
}
