"""Comparison of each format, field by field, with the format's own library."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import os
import pickle
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from math import isnan, prod
from pathlib import Path
from typing import Any

import h5py
import netCDF4
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from matex_data import DataError
from tests.fuzz.images import KINDS, check_image
from tests.fuzz.particles import REFERENCES, check_manifest, check_particles
from tests.fuzz.readings import (
    DIFFERS,
    EQUAL,
    LIBRARY_REFUSES,
    UNCOMPARED,
    WRONG,
    Read,
    Refused,
    Verdict,
    attempt,
    compare,
    gravest,
    ours,
    refusal,
    theirs,
)
from tests.support.serial import same

MOST_FIELDS = 8  # of a file that are opened one by one
LARGEST = 64 << 20  # bytes of an array that another library reads

import_module("hdf5plugin")  # h5py is the reference for its filters too

Stage = Callable[[str], None]
"""Says which library works now, so that a crash is put down to it."""


STRICT = ("npz", "idx", "cifar", "hepmc", "lhe", "tar")
"""Formats of which the other library checks all that can be checked: what it refuses nobody may read."""
CHECKSUM = re.compile("filter returned failure|[Cc]hecksum")
LENIENT = re.compile("parse header|format version|array header|File name in directory")
"""NumPy is stricter about a header than its meaning asks for, and ``zipfile`` about names that stand twice."""


def check(format: str, path: Path, stage: Stage) -> Verdict:
    """Read a file by this package and by the format's library, and compare."""
    verdict = CHECKS[format](path, stage)
    checked = format in STRICT or CHECKSUM.search(verdict.text)
    if verdict.outcome == LIBRARY_REFUSES and checked and not LENIENT.search(verdict.text):
        return Verdict(WRONG, f"read, though the library refuses: {verdict.text}")
    return verdict


def check_hdf5(path: Path, stage: Stage) -> Verdict:
    stage("library")
    names = theirs(lambda: _hdf5_names(path))
    values = {} if isinstance(names, Refused) else {n: theirs(lambda n=n: _hdf5_values(path, n)) for n in names}
    stage("ours")
    found = attempt(lambda: ours(path, format="hdf5"))
    if isinstance(found, Verdict):
        unstable = found.outcome == WRONG and any(
            theirs_or(lambda n=n: _unstable(path, n, values[n]), False) for n in values
        )
        return Verdict(DIFFERS, f"HDF5 shows memory that nobody has written to: {found.text}") if unstable else found
    if isinstance(found, Read):
        parts = [found]
        others = [name for name in values if name not in found.fields][:MOST_FIELDS] if found.whole else []
    else:
        parts = []
        others = list(values)[:MOST_FIELDS]
        if not others:
            return refusal(found, names)
    verdicts = []
    for name in others:
        single = attempt(lambda name=name: ours(path, [name], format="hdf5"))
        if isinstance(single, DataError):
            verdicts.append(refusal(single, values[name]))
        elif isinstance(single, Verdict):
            verdicts.append(single)
        else:
            parts.append(single)
    stage("library")
    for part in parts:
        for name, array in part.fields.items():
            if name not in values:
                values[name] = theirs(lambda name=name: _hdf5_values(path, name))
            verdict = compare(name, array, values[name], part.whole, same)
            if verdict.outcome == WRONG and theirs_or(lambda name=name: _contradicts_itself(path, name), False):
                verdict = Verdict(DIFFERS, f"HDF5 lists chunks that it does not find: {verdict.text}")
            if verdict.outcome == WRONG and theirs_or(lambda name=name: _unstable(path, name, values[name]), False):
                verdict = Verdict(DIFFERS, f"HDF5 shows memory that nobody has written to: {verdict.text}")
            verdicts.append(verdict)
    return gravest(verdicts)


def _unstable(path: Path, name: str, before: Any) -> bool:
    """Return whether HDF5 reads other values of a dataset than before: memory that it has not filled."""
    return not isinstance(before, Refused) and not same(_hdf5_values(path, name), before)


def _contradicts_itself(path: Path, name: str) -> bool:
    """Return whether HDF5 lists a chunk of a dataset but does not find it by its offset: a damaged
    key in the tree of chunks."""
    with h5py.File(path, locking=False) as file:
        dataset = file[name].id
        for number in range(min(dataset.get_num_chunks(), 1000)):
            try:
                dataset.read_direct_chunk(dataset.get_chunk_info(number).chunk_offset)
            except (OSError, RuntimeError) as error:
                if "not allocated" in str(error):
                    return True
    return False


def _hdf5_names(path: Path) -> list[str]:
    """Return all datasets that h5py finds."""
    found: list[str] = []

    def visit(name: str | bytes, item: object) -> None:
        if isinstance(item, h5py.Dataset):
            found.append(os.fsdecode(name))  # h5py gives a name that is no UTF-8 as bytes

    with h5py.File(path, locking=False) as file, suppress(Exception):
        file.visititems(visit)
    return found


def _hdf5_values(path: Path, name: str) -> Any:
    """Return a dataset's values; None if they are too many, or h5py has no type for them where we deliver bytes."""
    with h5py.File(path, locking=False) as file:
        dataset = file[name]
        if not dataset.shape:
            raise ValueError("no first axis")
        if dataset.size * dataset.dtype.itemsize > LARGEST:
            return None
        if dataset.dtype.kind == "V" and dataset.dtype.names is None:
            return None
        if "PSEUDOATOM" in dataset.attrs:
            return None  # lists of numbers that PyTables means as texts
        values = dataset[...]
        if _references(values.dtype):
            return None
        is_matlab = "MATLAB_class" in dataset.attrs or "MATLAB_class" in dataset.parent.attrs
        return _of_matlab(dataset, values) if is_matlab else values


def _of_matlab(dataset: h5py.Dataset, values: np.ndarray[Any, Any]) -> Any:
    """Return the numbers of an array of MATLAB with its axes; None for any other class."""
    kind = dataset.attrs.get("MATLAB_class", b"")
    if kind in (b"char", b"cell") or values.dtype.names is not None or "MATLAB_empty" in dataset.attrs:
        return None
    array = values.T != 0 if kind == b"logical" else values.T
    return array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array


def _references(dtype: np.dtype[Any]) -> bool:
    if dtype.names is not None:
        return any(_references(dtype[name]) for name in dtype.names)
    if dtype.subdtype is not None:
        return _references(dtype.subdtype[0])
    inner = h5py.check_vlen_dtype(dtype)
    if isinstance(inner, np.dtype):
        return _references(inner)
    return h5py.check_ref_dtype(dtype) is not None


def probe_hdf5(path: Path) -> None:
    """Read everything of a file through h5py alone, which may crash."""
    with suppress(Exception), h5py.File(path, locking=False) as file:
        with suppress(Exception):
            file.id.links.visit(lambda name, info: None, info=True)
        for name in [".", *theirs_or(lambda: _hdf5_names(path), [])]:
            with suppress(Exception):
                item = file[name]
                for key in list(item.attrs):
                    with suppress(Exception):
                        item.attrs[key]
            with suppress(Exception):
                dataset = file[name]
                if isinstance(dataset, h5py.Dataset) and dataset.chunks:
                    dataset.id.chunk_iter(lambda info: None)
                    for number in range(min(dataset.id.get_num_chunks(), 1000)):
                        dataset.id.get_chunk_info(number)
            with suppress(Exception):
                _hdf5_values(path, name)


def theirs_or(read: Callable[[], Any], otherwise: Any) -> Any:
    """Return the values that another library reads, or a stand-in."""
    found = theirs(read)
    return otherwise if isinstance(found, Refused) else found


def check_netcdf(path: Path, stage: Stage) -> Verdict:
    stage("library")
    library = theirs(lambda: _netcdf_values(path))
    dims = [] if isinstance(library, Refused) else library[0]
    raw = {} if isinstance(library, Refused) else library[1]
    stage("ours")
    options: dict[str, Any] = {"sample_dim": dims[0]} if dims else {}
    found = attempt(lambda: ours(path, format="netcdf", decode=False, **options))
    decoded = attempt(lambda: ours(path, format="netcdf", **options))
    if isinstance(decoded, Verdict):
        return decoded
    if isinstance(found, Verdict):
        return found
    if isinstance(found, DataError):
        return refusal(found, library)
    verdicts = []
    for name, array in found.fields.items():
        values = library if isinstance(library, Refused) else _along(raw.get(name), dims)
        verdict = compare(name, array, values, found.whole, _same_numbers)
        if verdict.outcome == WRONG and theirs_or(lambda name=name: _contradicts_itself(path, name), False):
            verdict = Verdict(DIFFERS, f"HDF5 lists chunks that it does not find: {verdict.text}")
        verdicts.append(verdict)
    for name, array in found.static.items():
        values = library if isinstance(library, Refused) else raw.get(name, (None, None))[1]
        verdicts.append(compare(name, np.asarray(array), values, True, _same_numbers))
    return gravest(verdicts)


def _same_numbers(found: NDArray[Any], expected: Any) -> bool:
    return same(found, expected) and found.dtype == np.asarray(expected).dtype.newbyteorder("=")


def _along(variable: tuple[list[str], Any] | None, dims: list[str]) -> Any:
    """Return the values with the first of ``dims`` as their first axis."""
    if variable is None or variable[1] is None or isinstance(variable[1], Refused):
        return None if variable is None else variable[1]
    return np.moveaxis(variable[1], variable[0].index(dims[0]), 0) if dims[0] in variable[0] else None


def _netcdf_values(path: Path) -> tuple[list[str], dict[str, tuple[list[str], Any]]]:
    """Dimensions, the best to count samples first, and by name the dimensions and stored values of each variable."""
    packed = path.read_bytes() if path.suffix == ".gz" else b""
    if packed:
        path = path.with_suffix(".unpacked")
        path.write_bytes(gzip.decompress(packed))
    values: dict[str, tuple[list[str], Any]] = {}
    with netCDF4.Dataset(path) as file:
        file.set_auto_maskandscale(False)
        unlimited, used = [], []
        for group, variable in _netcdf_variables(file):
            name = f"{group.path}/{variable.name}".strip("/")
            dims = [_full(group, dim) for dim in variable.dimensions]
            numeric = isinstance(variable.dtype, np.dtype) and variable.dtype.kind in "iufS" and not variable._isvlen
            fits = numeric and prod(variable.shape) * variable.dtype.itemsize <= LARGEST
            values[name] = (dims, theirs(lambda v=variable: np.asarray(v[...])) if fits else None)
            used += dims[:1]
            unlimited += [_full(group, d.name) for d in variable.get_dims() if d.isunlimited()]
        ranked = sorted(dict.fromkeys(unlimited + used), key=lambda d: (d not in unlimited, -used.count(d)))
        return ranked, values


def _netcdf_variables(group: Any) -> Iterator[tuple[Any, Any]]:
    for variable in group.variables.values():
        yield group, variable
    for inner in group.groups.values():
        yield from _netcdf_variables(inner)


def _full(group: Any, dimension: str) -> str:
    while dimension not in group.dimensions:
        group = group.parent
    return f"{group.path}/{dimension}".strip("/")


def probe_netcdf(path: Path) -> None:
    """Read everything of a file through netCDF4-python and h5py, which may crash."""
    theirs(lambda: _netcdf_values(path))
    probe_hdf5(path)


def check_npy(path: Path, stage: Stage) -> Verdict:
    stage("library")
    expected = theirs(lambda: np.load(path, allow_pickle=False))
    stage("ours")
    found = attempt(lambda: ours(path, format="npy"))
    return _one(found, expected)


def _one(found: Read | DataError | Verdict, expected: Any) -> Verdict:
    if isinstance(found, Verdict):
        return found
    if isinstance(found, DataError):
        return refusal(found, expected)
    ((name, array),) = found.fields.items()
    return compare(name, array, expected, found.whole, _same_array)


def _same_array(found: NDArray[Any], expected: Any) -> bool:
    expected = np.asarray(expected)
    native = expected.astype(expected.dtype.newbyteorder("="))
    return found.dtype.newbyteorder("=") == native.dtype and same(found, native)


def check_npz(path: Path, stage: Stage) -> Verdict:
    stage("library")
    expected = theirs(lambda: _npz_members(path))
    stage("ours")
    found = attempt(lambda: ours(path, format="npz"))
    if isinstance(found, Verdict):
        return found
    parts: list[Read] = [found] if isinstance(found, Read) else []
    verdicts = []
    if isinstance(found, DataError):
        if isinstance(expected, Refused) or not expected:
            return refusal(found, expected)
        for name in list(expected)[:MOST_FIELDS]:
            single = attempt(lambda name=name: ours(path, [name], format="npz"))
            if isinstance(single, DataError):
                verdicts.append(refusal(single, expected[name]))
            elif isinstance(single, Verdict):
                verdicts.append(single)
            else:
                parts.append(single)
    for part in parts:
        for name, array in part.fields.items():
            wanted = expected if isinstance(expected, Refused) else expected.get(name, Refused("no such member"))
            verdicts.append(compare(name, array, wanted, part.whole, _same_array))
    return gravest(verdicts)


def _npz_members(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as file:
        return {name: theirs(lambda name=name: _array(file[name])) for name in file.files}


def _array(value: Any) -> NDArray[Any]:
    if not isinstance(value, np.ndarray):
        raise TypeError("no array")
    return value


def check_idx(path: Path, stage: Stage) -> Verdict:
    stage("library")
    images = theirs(lambda: _idx_array(path))
    beside = path.with_name(path.name.replace("images-idx3", "labels-idx1"))
    labels = theirs(lambda: _idx_array(beside)) if beside != path and beside.exists() else None
    if not isinstance(images, Refused) and isinstance(labels, np.ndarray) and len(labels) != len(images):
        labels = Refused("another number of labels than of images")
    stage("ours")
    found = attempt(lambda: ours(path, format="idx"))
    if isinstance(found, Verdict):
        return found
    if isinstance(found, DataError):
        return refusal(found, labels if isinstance(labels, Refused) else images)
    expected = {"image": images, "data": images, "label": labels}
    names = found.fields.items()
    return gravest([compare(name, array, expected[name], found.whole, _same_array) for name, array in names])


def _idx_array(path: Path) -> NDArray[Any]:
    data = path.read_bytes()
    if data.startswith(b"\x1f\x8b"):
        data = gzip.decompress(data)
    zero, kind, axes = struct.unpack_from(">HBB", data)
    if zero or not axes:
        raise ValueError("no IDX file")
    shape = struct.unpack_from(f">{axes}I", data, 4)
    dtype = np.dtype({8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}[kind])
    if len(data) != 4 + 4 * axes + prod(shape) * dtype.itemsize:
        raise ValueError("another length than the header says")
    return np.frombuffer(data, dtype, offset=4 + 4 * axes).reshape(shape)


def check_cifar(path: Path, stage: Stage) -> Verdict:
    stage("library")
    expected = theirs(lambda: _cifar_arrays(path))
    stage("ours")
    found = attempt(lambda: ours(path, format="cifar"))
    if isinstance(found, Verdict):
        return found
    if isinstance(found, DataError):
        return refusal(found, expected)
    if isinstance(expected, Refused):
        return Verdict(LIBRARY_REFUSES, str(expected.error))
    if set(found.fields) != set(expected):
        return Verdict(WRONG, f"fields {list(found.fields)} instead of {list(expected)}")
    names = found.fields.items()
    return gravest([compare(name, array, expected[name], found.whole, same) for name, array in names])


class _Plain(pickle.Unpickler):
    """Makes arrays and nothing else: a damaged pickle may ask for anything."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode") or (
            module.startswith("numpy") and name in ("_reconstruct", "ndarray", "dtype", "scalar")
        ):
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        raise pickle.UnpicklingError(f"{module}.{name}")


def _cifar_arrays(path: Path) -> dict[str, NDArray[Any]]:
    data = path.read_bytes()
    if data.startswith(b"\x80") and path.suffix != ".bin":
        content = _Plain(io.BytesIO(data), encoding="bytes").load()
        stored = content[b"data"]
        if stored.dtype != np.uint8 or stored.shape[1:] != (3072,):
            raise ValueError("no images")
        names = {"label": b"labels", "coarse_label": b"coarse_labels", "fine_label": b"fine_labels"}
        found = {name: _labels(content[key], len(stored)) for name, key in names.items() if key in content}
        return {"image": _pixels(stored), **found}
    labels = [count for count in (1, 2) if data and len(data) % (count + 3072) == 0]
    if len(labels) != 1:
        raise ValueError("not whole records")
    records = np.frombuffer(data, np.uint8).reshape(-1, labels[0] + 3072)
    keys = ["label"] if labels == [1] else ["coarse_label", "fine_label"]
    return {"image": _pixels(records[:, labels[0] :]), **{key: records[:, at] for at, key in enumerate(keys)}}


def _labels(stored: Any, count: int) -> NDArray[Any]:
    if isinstance(stored, np.ndarray):
        stored = stored.tolist()
    if not isinstance(stored, list) or len(stored) != count:
        raise ValueError("not one label an image")
    if any(type(label) is not int or not 0 <= label < 256 for label in stored):
        raise ValueError("labels are bytes")
    return np.array(stored, np.uint8)


def _pixels(stored: NDArray[Any]) -> NDArray[Any]:
    return stored.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def check_csv(path: Path, stage: Stage) -> Verdict:
    stage("ours")
    found = attempt(lambda: ours(path, format="csv"))
    if isinstance(found, Verdict):
        return found
    stage("library")
    if isinstance(found, DataError):
        return refusal(found, theirs(lambda: pd.read_csv(path, sep=None, engine="python", nrows=1000)))
    said = next(iter(found.attributes.values()))
    width = len(found.fields)
    typed = theirs(lambda: _pandas(path, said, width))
    texts = theirs(lambda: _pandas(path, said, width, dtype=str, keep_default_na=False, na_values=[]))
    if isinstance(typed, Refused) or isinstance(texts, Refused):
        verdict = Verdict(LIBRARY_REFUSES, str(typed))
    else:
        verdict = gravest([_column(found, place, name, typed, texts) for place, name in enumerate(found.fields)])
    if verdict.outcome in (EQUAL, UNCOMPARED):
        return verdict
    by_csv = theirs(lambda: _by_csv(path, said))
    if isinstance(by_csv, Refused):
        return verdict
    cells = gravest([_cells(found, place, name, by_csv) for place, name in enumerate(found.fields)])
    if cells.outcome != EQUAL:
        return Verdict(verdict.outcome, f"{verdict.text}\nand by Python's csv: {cells.text}")
    return Verdict(DIFFERS if verdict.outcome == WRONG else verdict.outcome, verdict.text)


EPOCH = "seconds since 1970-01-01 00:00:00 UTC"
MISSING = {
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA",
    "NULL", "NaN", "None", "n/a", "nan", "null",
}  # fmt: skip
"""What pandas takes for missing, by its documentation."""
TRUTH = {"true": 1.0, "false": 0.0}


def _pandas(path: Path, said: Any, width: int, **options: Any) -> pd.DataFrame:
    """Return the table as pandas reads it; where records have one field more than the header, the first has no name."""
    names = ("sep", "quotechar", "escapechar", "comment", "decimal", "encoding", "header")
    told = {name: said[name] for name in names}
    if told["quotechar"] is None:
        told.update(quoting=csv.QUOTE_NONE)
        del told["quotechar"]
    told.update(options, float_precision="round_trip")
    with suppress(pd.errors.ParserError):
        found = pd.read_csv(path, index_col=False, **told)
        if found.shape[1] + 1 != width:
            return found
    found = pd.read_csv(path, **told)
    return found.reset_index() if found.shape[1] + 1 == width else found


def _column(found: Read, place: int, name: str, typed: pd.DataFrame, texts: pd.DataFrame) -> Verdict:
    """Compare a column with the numbers and the texts of pandas."""
    array = found.fields[name]
    if typed.shape[1] == place and not name.startswith("Unnamed: 0"):
        return Verdict(UNCOMPARED, f"{name!r} is one column more than the header has")
    if typed.shape[1] <= place or len(array) > len(typed) or (found.whole and len(array) < len(typed)):
        width, rows = typed.shape[1], len(typed)
        return Verdict(WRONG, f"{len(found.fields)} columns, {len(array)} rows; of pandas {width} columns, {rows} rows")
    column = typed.iloc[:, place]
    if column.dtype.kind in "iufb" and array.dtype.kind in "iufb" and found.attributes[name].get("units") != EPOCH:
        return compare(name, array.astype(float), column.to_numpy(float), found.whole, same)
    return _values(found, name, texts.iloc[:, place].tolist())


def _values(found: Read, name: str, texts: list[str]) -> Verdict:
    """Compare a column with the texts of the file."""
    array, said = found.fields[name], found.attributes[name]
    texts = [text if isinstance(text, str) else "" for text in texts][: len(array) if not found.whole else None]
    if len(array) != len(texts):
        return Verdict(WRONG, f"{name!r}: {len(array)} rows instead of {len(texts)}")
    for row, (value, text) in enumerate(zip(array.tolist(), texts, strict=True)):
        if not _is(value, text, said):
            return Verdict(WRONG, f"{name!r}, row {row}: {value!r} instead of {text!r}")
    return Verdict(EQUAL)


def _is(value: Any, text: str, said: Any) -> bool:
    """Return whether a value is what a text stands for; ``said`` are the attributes of its field."""
    if isinstance(value, bytes):
        return value == text.encode() or (value == b"" and text.strip() in MISSING)
    bare = text.strip()
    if bare in MISSING:
        return value != value
    if said.get("units") == EPOCH:
        return _is_time(value, bare)
    if bare.lower() in TRUTH:
        return float(value) == TRUTH[bare.lower()]
    if "_" in bare:
        return False
    try:
        number = float(bare.replace(said["decimal"], "."))
    except ValueError:
        return False
    return (isnan(number) and value != value) or number == value


def _is_time(value: float, text: str) -> bool:
    try:
        stamp = pd.Timestamp(text)
    except ValueError:
        return False
    stamp = stamp.tz_localize("UTC") if stamp.tz is None else stamp
    return bool(abs(stamp.timestamp() - value) <= 1e-6)


def _by_csv(path: Path, said: Any) -> list[list[str]]:
    """Records as Python's csv cuts them, without the header, blank lines and comments."""
    packed = {".gz": gzip.decompress}.get(path.suffix, bytes)
    text = packed(path.read_bytes()).removeprefix(codecs.BOM_UTF8).decode(said["encoding"])
    if said["comment"]:
        text = "".join(line for line in text.splitlines(True) if not line.lstrip().startswith(said["comment"]))
    spaced = said["sep"] == r"\s+"
    reader = csv.reader(
        io.StringIO(text.replace("\t", " ") if spaced else text, newline=""),
        delimiter=" " if spaced else said["sep"],
        quotechar=said["quotechar"],
        quoting=csv.QUOTE_MINIMAL if said["quotechar"] else csv.QUOTE_NONE,
        escapechar=said["escapechar"],
        skipinitialspace=spaced,
    )
    records = [record for record in reader if record and (len(record) > 1 or not record[0].isspace())]
    if spaced:
        records = [record[:-1] if not record[-1] else record for record in records]
    return records if said["header"] is None else records[said["header"] + 1 :]


def _cells(found: Read, place: int, name: str, records: list[list[str]]) -> Verdict:
    column = found.attributes[name]["column"]
    return _values(found, name, [record[column] if column < len(record) else "" for record in records])


CHECKS: dict[str, Callable[[Path, Stage], Verdict]] = {
    "hdf5": check_hdf5,
    "netcdf": check_netcdf,
    "csv": check_csv,
    "npy": check_npy,
    "npz": check_npz,
    "idx": check_idx,
    "cifar": check_cifar,
    **{kind: partial(check_image, kind) for kind in KINDS},
    **{format: partial(check_particles, format) for format in REFERENCES},
    "manifest": check_manifest,
}
PROBES: dict[str, Callable[[Path], None]] = {"hdf5": probe_hdf5, "netcdf": probe_netcdf, "openpmd": probe_hdf5}
