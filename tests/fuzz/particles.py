"""Particle files and lists of images that are to be damaged, and their comparison with readers that are independent."""

from __future__ import annotations

import codecs
import gzip
import io
import re
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import awkward as ak
import h5py
import numpy as np
import uproot
from numpy.typing import NDArray
from PIL import Image

from matex_data import DataError
from matex_data.readers.lhe.reader import CLOSE
from tests.fuzz import parquet, records, tables
from tests.fuzz.readings import (
    EQUAL,
    WRONG,
    Read,
    Refused,
    Verdict,
    attempt,
    compare,
    gravest,
    libraries_apart,
    ours,
    refusal,
    theirs,
)
from tests.readers.hepmc import test_reader as test_hepmc
from tests.readers.lhe import test_reader as test_lhe
from tests.readers.openpmd import test_reader as openpmd
from tests.readers.tar import test_reader as test_tar
from tests.support.serial import same

Stage = Callable[[str], None]
Fields = dict[str, Any]
PICTURES = {f"{number}.png": test_tar.encoded(test_tar.pixels(number)) for number in range(6)}

MISSING = (b"", b"NA", b"nan")

HEPMC_3 = {"pid": 3, "status": 9, "px": 4, "py": 5, "pz": 6, "e": 7, "generated_mass": 8}
HEPMC_2 = {"pid": 2, "status": 8, "px": 3, "py": 4, "pz": 5, "e": 6, "generated_mass": 7}
INTEGERS = {"pid", "status", "id", "mother1", "mother2", "color1", "color2", "nparticles"}


def check_particles(format: str, path: Path, stage: Stage) -> Verdict:
    """Read a file by this package, then independently of it in a process of its own, and compare all fields of both."""
    stage("ours")
    found = attempt(lambda: ours(path, format=NAMES.get(format, format)))
    if isinstance(found, Verdict):
        return found
    stage("reference")
    with libraries_apart():
        expected = theirs(lambda: REFERENCES[format](path))
    if isinstance(found, DataError):
        return refusal(found, expected)
    if not found.fields:
        return Verdict(EQUAL)
    return gravest([_field(name, array, found, expected) for name, array in found.fields.items()])


def _field(name: str, array: NDArray[Any], found: Read, expected: Any) -> Verdict:
    wanted = expected if isinstance(expected, Refused) else expected.get(name)
    return compare(name, array, wanted, found.whole, same)


def _rows(rows: list[Any], dtype: Any) -> NDArray[Any]:
    """Return lists as an object array of arrays."""
    found = np.empty(len(rows), object)
    for number, row in enumerate(rows):
        found[number] = np.array(row, dtype)
    return found


def read_hepmc(path: Path) -> Fields:
    """Return the particles of the events of a text, by its lines."""
    text = path.read_bytes()
    lines = [line.rstrip() for line in text.split(b"\n")]
    columns = HEPMC_3 if b"HepMC::Asciiv3" in text else HEPMC_2
    events: list[list[list[bytes]]] = []
    for line in lines:
        if line.startswith(b"HepMC::") and b"END_EVENT_LISTING" in line:
            break
        if line.startswith(b"E"):
            events.append([])
        elif line.startswith(b"P"):
            events[-1].append(line.split(b" "))
    fields: Fields = {"nparticles": np.array([len(event) for event in events], np.int64)}
    for name, column in columns.items():
        number, dtype = (int, np.int32) if name in INTEGERS else (float, np.float64)
        fields[name] = _rows([[number(particle[column]) for particle in event] for event in events], dtype)
    return fields


def _whole(entry: str) -> int:
    """Return an integer that may be written as 2.0."""
    if float(entry) != int(float(entry)):
        raise ValueError(entry)
    return int(float(entry))


def read_lhe(path: Path) -> Fields:
    """Return the events of a text, by Python's XML."""
    text = path.read_bytes()
    end = text.find(CLOSE) + len(CLOSE)
    root = ElementTree.fromstring(text[:end])  # what follows is of no event
    heads, particles = [], []
    for event in root.iter("event"):
        lines = [line.split() for line in (event.text or "").strip().splitlines() if not line.lstrip().startswith("#")]
        heads.append(lines[0])
        particles.append([line for line in lines[1:] if line])
    fields: Fields = {}
    for column, name in enumerate(("nparticles", "pid", "weight", "scale", "aqed", "aqcd")):
        number, dtype = (_whole, np.int64) if column < 2 else (float, np.float64)
        fields[name] = np.array([number(head[column]) for head in heads], dtype)
    names = ("id", "status", "mother1", "mother2", "color1", "color2", "px", "py", "pz", "e", "m", "lifetime", "spin")
    for column, name in enumerate(names):
        number, dtype = (_whole, np.int64) if column < 6 else (float, np.float64)
        fields[name] = _rows([[number(particle[column]) for particle in event] for event in particles], dtype)
    return fields


def read_root(path: Path) -> Fields:
    """Return the numbers of the only tree of a file, by uproot."""
    with uproot.open(path) as file:
        (key,) = [key for key, kind in file.classnames().items() if kind in ("TTree", "ROOT::RNTuple")]
        fields: Fields = {}
        for name in file[key].keys():  # noqa: SIM118 (a tree is no dictionary)
            array = file[key][name].array(library="ak")
            if array.ndim > 1 and "var" in str(array.type):
                fields[name] = _rows([ak.to_numpy(row) for row in array], ak.to_numpy(ak.flatten(array)).dtype)
            else:
                fields[name] = ak.to_numpy(array)
        return fields


def read_openpmd(path: Path) -> Fields:
    """Return the particles of a series, by h5py."""
    iterations = openpmd.by_hand(path)
    return {name: np.concatenate([fields[name] for fields in iterations]) for name in iterations[0]}


def read_tar(path: Path) -> Fields:
    """Return the members of a shard, by Python's tarfile and Pillow."""
    members: dict[str, list[Any]] = {"png": [], "cls": [], "json": [], "box.npy": []}
    data = path.read_bytes()
    data = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        for member in archive:
            stored = archive.extractfile(member)
            if member.isreg() and stored is not None:
                members[member.name.rpartition("/")[2].partition(".")[2].lower()].append(stored.read())
    texts = np.empty(len(members["json"]), object)
    texts[:] = members["json"]
    return {
        "png": np.array([np.asarray(Image.open(io.BytesIO(data))) for data in members["png"]]),
        "cls": np.array([int(data) for data in members["cls"]]),
        "json": texts,
        "box.npy": np.array([np.load(io.BytesIO(data)) for data in members["box.npy"]], "f4"),
    }


def check_manifest(path: Path, stage: Stage) -> Verdict:
    """Read a table of images; each sample must be one of its records, with the image that it names."""
    stage("ours")
    found = attempt(lambda: ours(path, format="images"))
    if isinstance(found, Verdict):
        return found
    lines = re.split(rb"[\r\n]+", path.read_bytes())
    if isinstance(found, DataError):
        return refusal(found, lines)
    files = found.fields["path"].tolist()
    known = [line for line in re.split(rb"[\r\n]+", _in_utf_8(path.read_bytes())) if b".png" in line]
    if len(known) < len(files):
        return Verdict(WRONG, f"{len(files)} samples of {len(known)} lines")
    for row, name in enumerate(files):
        with Image.open(path.parent / name.decode()) as image:
            if not same(found.fields["image"][row], np.asarray(image)):
                return Verdict(WRONG, f"sample {row} is not the image {name!r}")
        number = found.fields["number"][row] if "number" in found.fields else None
        of_name = [line for line in known if name in line]
        if not of_name or not any(_has_number(line, number) for line in of_name):
            return Verdict(WRONG, f"sample {row} has the number {number!r}, and {of_name}")
    return Verdict(EQUAL)


def _in_utf_8(text: bytes) -> bytes:
    marked = text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    for encoding in ("utf-16",) if marked else ("utf-8", "cp1252"):
        with suppress(UnicodeDecodeError):
            return text.decode(encoding).encode()
    return text.decode("latin-1").encode()


def _has_number(line: bytes, number: Any) -> bool:
    """Return whether a value stands in a line, None in any."""
    text = number if isinstance(number, bytes) else str(number).encode()
    if number is None or text in line:
        return True
    if number != number:
        return any(entry.strip(b' "\t') in MISSING for entry in re.split(rb"[,;]", line))
    return any(_same_number(entry, number) for entry in re.split(rb"[,;\s\"]+", line))


def _same_number(entry: bytes, number: Any) -> bool:
    try:
        return float(entry) == float(number)
    except (TypeError, ValueError):
        return entry.lower() == str(number).lower().encode()


REFERENCES: dict[str, Callable[[Path], Fields]] = {
    "hepmc": read_hepmc,
    "lhe": read_lhe,
    "root": read_root,
    "openpmd": read_openpmd,
    "parquet": parquet.read,
    "arrow": tables.read_arrow,
    "fits_table": tables.read_fits,
    "zarr": tables.read_zarr,
    "zarr_folder": tables.read_zarr,
    "tar": read_tar,
    **dict.fromkeys(records.WRITERS, records.loaded),
}
NAMES = {"fits_table": "fits", "zarr_folder": "zarr"}
"""Format of the package, where its name is another one."""
FORMATS = (*REFERENCES, "manifest")


def seeds(format: str) -> Sequence[tuple[str, bytes, dict[str, bytes]] | tuple[str, bytes, dict[str, bytes], str]]:
    """Return name, content and the files beside each file of a format, and the name of a store that is opened."""
    if format == "hepmc":
        versions = [(f"own_{kind}.hepmc", test_hepmc.written(0, 6, kind)) for kind in test_hepmc.KINDS]
        return [(name, data, {}) for name, data in versions]
    if format == "manifest":
        rows = [f"{number}.png,{number * 7 % 5},name {number}" for number in range(6)]
        texts = {"own.csv": "file,number,text\n" + "\n".join(rows) + "\n", "own.txt": "\n".join(rows).replace(",", " ")}
        return [(name, text.encode(), dict(PICTURES)) for name, text in texts.items()]
    with tempfile.TemporaryDirectory() as folder:
        if format == "zarr_folder":
            return tables.zarr_folders(Path(folder))
        paths = WRITERS[format](Path(folder))
        return [(path.name, path.read_bytes(), {}) for path in paths]


def _write_lhe(folder: Path) -> list[Path]:
    paths = [folder / "own.lhe", folder / "own_plain.lhe"]
    test_lhe.written(0, 8).tofile(paths[0])
    test_lhe.written(8, 8, weights=()).tofile(paths[1])
    return paths


def _write_tar(folder: Path) -> list[Path]:
    paths = []
    for name, format in (("own_pax.tar", tarfile.PAX_FORMAT), ("own_gnu.tar", tarfile.GNU_FORMAT)):
        members = {key: data for number in range(4) for key, data in test_tar.sample(number).items()}
        paths.append(Path(test_tar.write_tar(folder / name, members, format)))
    paths.append(folder / "own.tar.gz")
    paths[-1].write_bytes(gzip.compress(paths[0].read_bytes(), mtime=0))
    return paths


def _write_root(folder: Path) -> list[Path]:
    rng, paths = np.random.default_rng(0), []
    counts = rng.integers(0, 4, 30)
    lists = ak.unflatten(rng.normal(size=int(counts.sum())).astype("f4"), counts)
    numbers = {"x": rng.normal(size=30), "n": np.arange(30, dtype="i4"), "grid": rng.normal(size=(30, 3)).astype("f4")}
    for name, compression in (("plain", None), ("zlib", uproot.ZLIB(1)), ("zstd", uproot.ZSTD(1))):
        paths.append(folder / f"own_{name}.root")
        with uproot.recreate(paths[-1], compression=compression) as file:
            file.mktree("events", {"x": "f8", "n": "i4", "grid": ("f4", (3,)), "lists": "var * float32"})
            for begin in (0, 15):
                part = {key: array[begin : begin + 15] for key, array in numbers.items()}
                file["events"].extend({**part, "lists": lists[begin : begin + 15]})
    paths.append(folder / "own_ntuple.root")
    with uproot.recreate(paths[-1]) as file:
        file.mkrntuple("events", {"x": numbers["x"], "n": numbers["n"], "lists": lists})
    return paths


def _write_openpmd(folder: Path) -> list[Path]:
    path = folder / "own.h5"
    with h5py.File(path, "w") as file:
        openpmd.begin_series(file)
        for number, count in ((1, 20), (2, 7)):
            openpmd.electrons(openpmd.iteration(file, number), number * 100, count)
    return [path]


WRITERS: dict[str, Callable[[Path], list[Path]]] = {
    "lhe": _write_lhe,
    "tar": _write_tar,
    "root": _write_root,
    "openpmd": _write_openpmd,
    "parquet": parquet.write,
    "arrow": tables.write_arrow,
    "fits_table": tables.write_fits,
    "zarr": tables.write_zarr,
    **records.WRITERS,
}
