"""Undamaged files of each format: those of the corpus that are small, and some that are written here."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import netCDF4
import numpy as np
from numpy.typing import NDArray

from tests.fuzz import images, particles

LARGEST = 200_000  # bytes of a file of the corpus that is taken
LEFT_OUT = {
    *("gb18030.txt", "wine_data.csv", "SA2-by-DJZ.csv", "noquote.csv"),  # need options
    "tbigdims.h5",  # four thousand million rows that nobody has written: to go through them takes long
    "f03tst_open_mem.nc",  # the library shows memory that nobody has written to
}
FOLDERS = {"hdf5": "hdf5", "netcdf": "netcdf", "csv": "csv"}


@dataclass(frozen=True)
class Source:
    """A file that is to be damaged.

    Parameters
    ----------
    name : of the file; its end tells the format.
    data : its bytes.
    beside : other files that belong to it, by name; they stay as they are.
    opened : name of the file that is opened; None: this one.
    """

    name: str
    data: bytes
    beside: Mapping[str, bytes] = field(default_factory=dict)
    opened: str | None = None

    def write(self, folder: Path, data: bytes) -> Path:
        """Write the file with other contents, and those beside it; yield the path of the file to open."""
        for name, content in {**self.beside, self.name: data}.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return folder / (self.opened or self.name)


def sources(format: str, corpus: Path | None) -> list[Source]:
    """Return the files of one format, in a fixed order."""
    found = []
    if corpus is not None and format in FOLDERS:
        for path in sorted((corpus / FOLDERS[format]).rglob("*")):
            wanted = path.is_file() and path.suffix != ".json" and path.name not in LEFT_OUT
            if wanted and 0 < path.stat().st_size <= LARGEST:
                found.append(Source(path.name, path.read_bytes()))
    if format in images.KINDS:
        return [Source(f"own_{i}.{format}", data) for i, data in enumerate(images.seeds(format))]
    if format in particles.FORMATS:
        return [Source(*seed) for seed in particles.seeds(format)]
    written = {
        "hdf5": _hdf5,
        "netcdf": _netcdf,
        "csv": _csv,
        "npy": _npy,
        "npz": _npz,
        "idx": _idx,
        "cifar": _cifar,
    }[format]
    return found + written()


def _numbers(*shape: int, dtype: Any = "f4") -> NDArray[Any]:
    count = int(np.prod(shape))
    return (np.arange(count) * 37 % 251).astype(dtype).reshape(shape)


def _hdf5() -> list[Source]:
    found = []
    for version in ("earliest", "latest"):
        memory = io.BytesIO()
        with h5py.File(memory, "w", libver=version) as file:
            file["plain"] = _numbers(20, 3, 4)
            file["big"] = _numbers(20, dtype=">i2")
            file["flags"] = _numbers(20) > 100
            file["names"] = np.array([b"alpha", b"be", b""] * 6 + [b"x", b"yz"], "S5")
            file.create_dataset("texts", data=[f"text {i}" * (i % 4) for i in range(20)])
            file.create_dataset("gzip", data=_numbers(20, 8), chunks=(6, 5), compression="gzip", shuffle=True)
            file.create_dataset("checked", data=_numbers(20, 8, dtype="i8"), chunks=(4, 8), fletcher32=True)
            file.create_dataset("lzf", data=_numbers(20, 8, dtype="u2"), chunks=(20, 8), compression="lzf")
            file.create_dataset("late", shape=(20, 4), maxshape=(None, 4), chunks=(5, 4), dtype="f8", fillvalue=7)
            file["late"][3:9] = 1.5
            ragged = file.create_dataset("ragged", (20,), h5py.vlen_dtype("i4"))
            for i in range(20):
                ragged[i] = np.arange(i % 5)
            pair = np.zeros(20, [("x", "<f4"), ("n", ">i4", (2,))])
            pair["x"] = _numbers(20)
            group = file.create_group("run/one")
            group["pair"] = pair
            group["plain"] = h5py.SoftLink("/plain")
            file["plain"].attrs["units"] = "m"
            file["gzip"].attrs["scale"] = [1.0, 2.0]
        found.append(Source(f"own_{version}.h5", memory.getvalue()))
    return found


def _netcdf() -> list[Source]:
    kinds = ("NETCDF3_CLASSIC", "NETCDF3_64BIT_OFFSET", "NETCDF3_64BIT_DATA", "NETCDF4", "NETCDF4_CLASSIC")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            path = Path(folder) / "own.nc"
            with netCDF4.Dataset(path, "w", format=kind) as file:
                packing: dict[str, Any] = {"zlib": True, "shuffle": True} if kind.startswith("NETCDF4") else {}
                file.createDimension("time", None)
                file.createDimension("x", 6)
                file.createDimension("letters", 4)
                time = file.createVariable("time", "f8", ("time",))
                time.units = "hours since 2001-01-01"
                x = file.createVariable("x", "f4", ("x",))
                packed = file.createVariable("packed", "i2", ("time", "x"), fill_value=-9999, **packing)
                packed.setncatts({"scale_factor": 0.5, "add_offset": 10.0})
                packed.set_auto_maskandscale(False)
                plain = file.createVariable("plain", "f4", ("time", "x"))
                letters = file.createVariable("name", "S1", ("time", "letters"))
                time[:] = np.arange(12.0)
                x[:] = np.arange(6)
                packed[:] = _numbers(12, 6, dtype="i2")
                packed[3, 2] = -9999
                plain[:] = _numbers(12, 6)
                letters[:] = np.array([list("abcd")] * 12, "S1")
            found.append(Source(f"own_{kind.lower()}.nc", path.read_bytes()))
    return found


def _csv() -> list[Source]:
    rows = [f"{i},{i / 8},name {i},{'true' if i % 2 else 'false'},2020-01-{i % 28 + 1:02d}" for i in range(40)]
    plain = "n,value,name,flag,day\n" + "\n".join(rows) + "\n"
    quoted = "a;b;c\n" + "".join(f'{i};"{i},5; ""x""";"two\nlines"\n' for i in range(30))
    spaced = "".join(f"{i:5d} {i * 1.5:10.3f}  {-i:6d}\n" for i in range(50))
    missing = "x\ty\tz\n" + "".join(f"{'' if i % 5 == 0 else i}\tNA\t{i * 0.1!r}\n" for i in range(50))
    texts = {"plain.csv": plain, "quoted.csv": quoted, "spaced.dat": spaced, "missing.tsv": missing}
    return [Source(f"own_{name}", text.encode()) for name, text in texts.items()] + [
        Source("own_packed.csv.gz", gzip.compress(plain.encode(), mtime=0))
    ]


def _arrays() -> dict[str, NDArray[Any]]:
    pair = np.zeros(12, [("x", "<f4"), ("n", "<i4", (2,)), ("s", "S3")])
    pair["x"] = _numbers(12)
    return {
        "floats": _numbers(30, 4, 5),
        "big": _numbers(30, 4, dtype=">i2"),
        "fortran": np.asfortranarray(_numbers(6, 5, 4, dtype="f8")),
        "flags": _numbers(50) > 100,
        "bytes": np.array([b"abc", b"de", b""] * 5, "S3"),
        "texts": np.array(["abc", "dé", ""] * 5),
        "complex": _numbers(9, 2, dtype="c8"),
        "times": np.arange(20).astype("M8[s]"),
        "pairs": pair,
        "single": np.float64(3),
        "empty": np.zeros((0, 3)),
    }


def _saved(array: NDArray[Any], version: tuple[int, int] | None = None) -> bytes:
    memory = io.BytesIO()
    np.lib.format.write_array(memory, array, version=version, allow_pickle=False)
    return memory.getvalue()


def _npy() -> list[Source]:
    found = [Source(f"{name}.npy", _saved(array)) for name, array in _arrays().items()]
    return [*found, *(Source(f"v{n}.npy", _saved(_numbers(9, 7), (n, 0))) for n in (1, 2, 3))]


def _npz() -> list[Source]:
    arrays = _arrays()
    few = {name: arrays[name] for name in ("floats", "fortran", "big")}
    alike = {name: _numbers(25, 3, dtype=kind) for name, kind in (("a", "f4"), ("b", "i8"), ("c", ">f8"))}
    found = []
    for name, content, method in (
        ("stored", alike, zipfile.ZIP_STORED),
        ("deflated", alike, zipfile.ZIP_DEFLATED),
        ("bzip", alike, zipfile.ZIP_BZIP2),
        ("lzma", alike, zipfile.ZIP_LZMA),
        ("one", {"data": few["floats"]}, zipfile.ZIP_STORED),
        ("fortran", {"data": few["fortran"]}, zipfile.ZIP_DEFLATED),
        ("unequal", few, zipfile.ZIP_STORED),
    ):
        memory = io.BytesIO()
        with zipfile.ZipFile(memory, "w", method) as archive:
            for key, array in content.items():
                archive.writestr(zipfile.ZipInfo(f"{key}.npy", (2000, 1, 1, 0, 0, 0)), _saved(array), method)
        found.append(Source(f"{name}.npz", memory.getvalue()))
    return found


def idx_bytes(array: NDArray[Any]) -> bytes:
    """Return an IDX file; the array's dtype is one of IDX, in big-endian byte order."""
    code = {"u1": 8, "i1": 9, "i2": 11, "i4": 12, "f4": 13, "f8": 14}[array.dtype.str[1:]]
    return struct.pack(f">HBB{array.ndim}I", 0, code, array.ndim, *array.shape) + array.tobytes()


def _idx() -> list[Source]:
    kinds = ("u1", "i1", ">i2", ">i4", ">f4", ">f8")
    found = [Source(f"{kind.strip('>')}.idx", idx_bytes(_numbers(12, 5, dtype=kind))) for kind in kinds]
    found += [Source(f"{s.name}.gz", gzip.compress(s.data, mtime=0)) for s in found[:4]]
    images, labels = idx_bytes(_numbers(15, 6, 6, dtype="u1")), idx_bytes(_numbers(15, dtype="u1"))
    one, other = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
    for end, pack in (("", bytes), (".gz", lambda data: gzip.compress(data, mtime=0))):
        pair = {f"{one}{end}": pack(images), f"{other}{end}": pack(labels)}
        for name, data in pair.items():
            beside = {key: value for key, value in pair.items() if key != name}
            found.append(Source(name, data, beside, f"{one}{end}"))
    return found


def _cifar() -> list[Source]:
    pixels = _numbers(6, 3072, dtype="u1")
    labels = _numbers(6, dtype="u1") % 10
    ten = np.concatenate([labels[:, None], pixels], axis=1).tobytes()
    hundred = np.concatenate([labels[:, None], labels[::-1, None], pixels], axis=1).tobytes()
    found = [Source("data_batch_1.bin", ten), Source("train.bin", hundred)]
    for protocol in (2, 4):
        for name, keys in (("data_batch_1", ["labels"]), ("train", ["coarse_labels", "fine_labels"])):
            content = {b"data": pixels, **{key.encode(): labels.tolist() for key in keys}, b"batch_label": b"one"}
            found.append(Source(name, pickle.dumps(content, protocol=protocol)))
    return found
