"""Detection of formats by content and by name, and files of no known format."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
from pathlib import Path
from typing import Any

import h5py
import netCDF4
import numpy as np
import pandas as pd
import pytest
from mpi4py import MPI

from matex_data import FormatError, open_dataset
from matex_data.readers import HEAD_BYTES, detect, known_formats
from matex_data.readers.hdf5 import files
from tests.support.corpus import CORPUS, needs_corpus

TABLES = {
    "with commas": b"a,b\n1,2\n3,4\n",
    "of texts": b"name;town\nann;rome\nbob;oslo\n",
    "without a last newline": b"a\tb\n1\t2\n3\t4",
    "of numbers between blanks": b"  1.0  2.5 x\n  3.0 -4.5 y\n",
    "with names between blanks": b"time temperature\n0 1.5\n1 2.5\n",
    "behind comments": b"# made by hand\n# x y\n1.5 2\n3 4\n",
    "with quoted newlines": b'a,b\n1,"x\ny, z"\n2,"w"\n',
    "with empty columns": b"a,b,,\n1,2,,\n3,4,,\n",
    "of times": b"time,value\n2024-01-01 12:00:00,5\n2024-01-01 12:00:01,123\n",
    "with a byte order mark": b"\xef\xbb\xbfa,b\n1,2\n",
    "in UTF-16": "a,b\n1,2\n3,ü\n".encode("utf-16"),
    "in Latin-1": "größe,b\n1,2\n3,4\n".encode("latin-1"),
    "gzipped": gzip.compress(b"a,b\n1,2\n3,4\n"),
    "compressed by bzip2": bz2.compress(b"a,b\n1,2\n3,4\n"),
    "compressed by xz": lzma.compress(b"a,b\n1,2\n3,4\n"),
    "longer than the head": b"a,b\n" + b"".join(b"%d,%d\n" % (i, i * i) for i in range(10000)),
    "with a long record": b"a,b\n" + b"".join(b"%d,%s\n" % (i, b"x" * 9999) for i in range(10)),
}

OTHERS = {
    "nothing": b"",
    "one line": b"Dear Ann, how are you\n",
    "one column": b"1\n2\n3\n",
    "prose": b"The mass, the energy\nand all the rest\nare here.\n",
    "prose of equal lines": b"one two three\nfour five six\nseven eight nine\n",
    "XML": b'<?xml version="1.0"?>\n<a x="1,2">\n<b y="3,4">\n</a>\n',
    "XML without a declaration": b"<a,b>\n<c,d>\n",
    "a web page": b"<!DOCTYPE html>\n<html>, x\n</html>, y\n",
    "a script": b"#!/bin/sh\ncat x | grep a\ncat y | grep b\n",
    "a script without its first line": b"set -e\nfor f in *.h5; do\n  echo $f\ndone\n",
    "a log": b"2024-01-01 12:00:00,123 INFO start\n2024-01-01 12:00:01,456 INFO stop\n",
    "a log with blanks": b"2024-01-01 12:00:00 INFO reader started\n2024-01-01 12:00:01 INFO reader stopped\n",
    "a log of a server": b'1.2.3.4 - - [01/Jan/2024:00:00:01] "GET /" 200 12\n5.6.7.8 - - [x] "GET /a b" 404 0\n',
    "lists of JSON": b"[[1, 2],\n[3, 4]]\n",
    "an object of JSON": b'{"a": 1,\n "b": 2}\n',
    "settings": b"[run]\na = 1\nb = 2\n",
    "YAML": b"rate: 1\nsteps: 20\n",
    "C": b"int a;\nint b;\n",
    "a ragged table": b"a,b\n1,2\n3,4,5\n",
    "two separators": b"a,b\n1;2\n3;4\n",
    "a table with a NUL": b"a,b\n1,2\n3,\0\n",
    "numbers": np.arange(100.0).tobytes(),
    "a damaged gzip file": gzip.compress(b"a,b\n1,2\n")[:15] + b"\xff" * 20,
}


def detected(folder: Path, content: bytes, name: str) -> str:
    path = folder / name
    path.write_bytes(content)
    return detect(str(path), content[:HEAD_BYTES])


@pytest.mark.parametrize("kind", TABLES)
def test_tables_are_detected_by_content(tmp_path: Path, kind: str) -> None:
    for name in ("table", "table.log", "table.csv", "table.dat"):
        assert detected(tmp_path, TABLES[kind], name) == "csv"


@pytest.mark.parametrize("kind", OTHERS)
def test_other_texts_are_no_tables(tmp_path: Path, kind: str) -> None:
    with pytest.raises(FormatError, match=r"cannot tell the format(.|\n)*'cifar', 'csv', 'fits', 'hdf5'(.|\n)*format="):
        detected(tmp_path, OTHERS[kind], "data.out")


@pytest.mark.parametrize("name", ["x.json", "x.out"])
def test_json_lines_under_any_name(tmp_path: Path, name: str) -> None:
    assert detected(tmp_path, b'{"a": 1, "b": [2]}\r\n{"a": 3, "b": []}\r\n', name) == "jsonl"


@pytest.mark.parametrize("name", ["x.csv", "x.txt", "x.dat", "x.tsv.gz"])
def test_xml_and_scripts_are_no_tables_under_any_name(tmp_path: Path, name: str) -> None:
    for kind in ("XML", "a web page", "a script"):
        content = gzip.compress(OTHERS[kind]) if name.endswith(".gz") else OTHERS[kind]
        with pytest.raises(FormatError, match="cannot tell the format"):
            detected(tmp_path, content, name)


def test_tables_of_astropy_are_tables_by_name(tmp_path: Path) -> None:
    """Their columns may be described in many lines, with one record behind them."""
    lines = (f"# - {{name: c{number}, datatype: string, description: 'one, two'}}\n" for number in range(200))
    table = ("# %ECSV 1.0\n# ---\n# datatype:\n" + "".join(lines) + "a\n1\n").encode()
    assert detected(tmp_path, table, "x.ecsv") == "csv"
    with pytest.raises(FormatError, match="cannot tell the format"):
        detected(tmp_path, table, "x.out")


def test_other_texts_are_tables_by_name(tmp_path: Path) -> None:
    for kind in (
        "nothing",
        "one line",
        "one column",
        "a ragged table",
        "a log",
        "a table with a NUL",
        "a damaged gzip file",
    ):
        for name in ("x.csv", "x.tab", "x.txt"):
            assert detected(tmp_path, OTHERS[kind], name) == "csv"
    for name in ("x.txt", "x.dat", "x.asc"):
        with pytest.raises(FormatError, match="cannot tell the format"):
            detected(tmp_path, OTHERS["numbers"], name)


EVENT_TEXTS = {
    "Les Houches": b'<LesHouchesEvents version="3.0">\n<init>\n',
    "Les Houches behind a declaration": b'<?xml version="1.0"?>\n<!-- a > b -->\n<LesHouchesEvents version="1.0">\n',
    "HepMC": b"\nHepMC::Version 2.06.09\nHepMC::IO_GenEvent-START_EVENT_LISTING\n",
}


@pytest.mark.parametrize("kind", EVENT_TEXTS)
def test_texts_of_events_are_no_tables_under_any_name(tmp_path: Path, kind: str) -> None:
    for name in ("events", "events.dat", "events.csv", "events.txt.gz", "events.lhe.bz2"):
        packer = {".gz": gzip.compress, ".bz2": bz2.compress}.get(Path(name).suffix, bytes)
        assert detected(tmp_path, packer(EVENT_TEXTS[kind]), name) == ("hepmc" if kind == "HepMC" else "lhe")


def test_root_files(tmp_path: Path) -> None:
    head = b"root\x00\x00\xf2\x88\x00\x00\x00d"
    assert detected(tmp_path, head, "events.dat") == "root"
    with pytest.raises(FormatError, match=r"the format 'root', compressed by gzip(.|\n)*decompress it"):
        detected(tmp_path, gzip.compress(head), "events.root.gz")
    assert detected(tmp_path, b"root,1\n2,3\n4,5\n", "users") == "csv"


def test_magic_bytes_come_before_names_and_names_before_parsing(tmp_path: Path) -> None:
    memory = io.BytesIO()
    with h5py.File(memory, "w") as file:
        file["x"] = np.arange(3)
    assert detected(tmp_path, memory.getvalue(), "x.csv") == "hdf5"
    assert detected(tmp_path, b"root,1\n2,3\n", "x.raw") == "raw"
    for name in ("mnist-train.tfrecord-00000-of-00004", "train-00017-of-01024", "data_tfrecord-00000-of-00001.gz"):
        assert detected(tmp_path, bytes(64), name) == "tfrecord"


def test_a_table_without_a_suffix_against_pandas(tmp_path: Path) -> None:
    frame = pd.DataFrame({"x": np.arange(5000) / 7, "y": [f"n {i}" for i in range(5000)]})
    path = tmp_path / "measured"
    frame.to_csv(path, index=False, sep="|")
    data = open_dataset(str(path), comm=MPI.COMM_SELF).load()
    np.testing.assert_array_equal(data["x"], pd.read_csv(path, sep="|")["x"])


@needs_corpus
def test_every_file_of_the_corpus_has_its_format() -> None:
    found: dict[str, set[str]] = {}
    for path in sorted(CORPUS.rglob("*")):
        if not path.is_file() or path.suffix in (".json", ".md"):
            continue
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
        try:
            kind = detect(str(path), head)
        except FormatError as error:
            kind = "particle" if "there is no reader" in str(error) else "unknown"
        # Les Houches events in HDF5 and openPMD are HDF5 files; the rows of rank.train differ in length.
        found.setdefault("rank.train" if path.name == "rank.train" else path.relative_to(CORPUS).parts[0], set()).add(
            kind
        )
    assert found["csv"] == {"csv"}
    assert found["rank.train"] == {"unknown"} and found["images"] == {"images", "fits"}
    assert {"lhe", "hepmc", "root"} <= found["particle"] <= {"root", "hdf5", "openpmd", "lhe", "hepmc"}
    assert found["hdf5"] | found["netcdf"] <= {"hdf5", "netcdf"}


def test_formats_are_listed() -> None:
    assert {"hdf5", "netcdf", "csv", "npy", "npz", "raw", "idx", "cifar"} <= set(known_formats())


def _metadata_operations(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Return how often opening a data set opens or looks up each file, but for what the HDF5 library does itself."""
    counts: dict[str, int] = {}
    originals = {"stat": os.stat, "open": io.open}

    def counting(name: str) -> Any:
        def function(path: Any, *arguments: Any, **options: Any) -> Any:
            counts[Path(str(path)).name] = counts.get(Path(str(path)).name, 0) + 1
            return originals[name](path, *arguments, **options)

        return function

    class Counting(files.TrustedFile):
        def __init__(self, path: Any, *arguments: Any, **options: Any) -> None:
            counts[Path(str(path)).name] = counts.get(Path(str(path)).name, 0) + 1
            super().__init__(path, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", counting("stat"))
        patched.setattr(io, "open", counting("open"))
        patched.setattr(files, "TrustedFile", Counting)
        open_dataset(folder, comm=MPI.COMM_SELF)
    return {name: count for name, count in counts.items() if (folder / name).exists() and Path(name).suffix}


@pytest.mark.parametrize(("suffix", "least"), [(".npy", 2), (".h5", 3)])  # of HDF5, its superblock is looked at first
def test_each_file_is_opened_and_looked_up_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, least: int
) -> None:
    for number in range(6):
        if suffix == ".npy":
            np.save(tmp_path / f"{number}.npy", np.zeros((3, 2)))
        else:
            with h5py.File(tmp_path / f"{number}.h5", "w") as file:
                file["x"], file["y"] = np.zeros((3, 2)), np.zeros(3)
    first, *others = sorted(_metadata_operations(tmp_path, monkeypatch).items())
    assert first[1] <= 4 + least
    assert [count for _, count in others] == [least] * 5  # a stamp, and the reader


def test_a_text_that_describes_a_folder_is_no_table_of_it(tmp_path: Path) -> None:
    for name in ("1.csv", "2.csv"):
        (tmp_path / name).write_text("a,b\n1,2\n")
    for name in ("README.txt", "readme.md", "LICENSE.txt", "SHA256SUMS"):
        (tmp_path / name).write_text("hello world\n")
    assert len(open_dataset(tmp_path)) == 2
    alone = tmp_path / "only"
    alone.mkdir()
    (alone / "readme.txt").write_text("a,b\n1,2\n")
    assert len(open_dataset(alone)) == 1


def test_files_of_other_formats_among_many(tmp_path: Path) -> None:
    """A file is read by its content, whatever the files before it are, and whatever its name says."""
    rows = np.arange(12.0).reshape(4, 3)
    for first, second in ((".npy", "hdf5"), (".h5", "npy"), (".h5", "netcdf")):
        folder = tmp_path / f"{first[1:]}-{second}"
        folder.mkdir()
        for number in range(2):
            path = folder / f"{number}{first}"
            written = ("npy" if first == ".npy" else "hdf5") if number == 0 else second
            if written == "npy":
                with path.open("wb") as stream:
                    np.save(stream, rows + number)
            elif written == "hdf5":
                with h5py.File(path, "w") as file:
                    file["data"] = rows + number
            else:
                with netCDF4.Dataset(path, "w") as file:
                    file.createDimension("row", None)
                    file.createDimension("column", 3)
                    packed = file.createVariable("data", "i2", ("row", "column"))
                    packed.scale_factor = 0.5
                    packed[:] = rows + number
        data = open_dataset(folder, comm=MPI.COMM_SELF)
        assert np.array_equal(data.load()["data"], np.concatenate([rows, rows + 1]))
