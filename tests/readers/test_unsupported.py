"""Files of formats without a reader: the error names the format and the tool that converts it."""

from __future__ import annotations

import bz2
import gzip
import pickle
import re
import sqlite3
import struct
import wave
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.orc
import pytest
from mpi4py import MPI

from matex_data import DataError, FormatError, open_dataset
from matex_data.readers import HEAD_BYTES, detect, known_formats
from matex_data.readers.detection import unsupported_formats
from matex_data.readers.formats import FORMATS
from tests.cli.test_commands import CALL
from tests.support.launch import run_script
from tests.support.ranks import Pools

FRAME = pd.DataFrame({"x": np.arange(50) / 7, "label": np.arange(50)})
PDB_ATOMS = "".join(
    f"ATOM  {i:5d}  CA  ALA A{i:4d}    {i * 1.5:8.3f}{-i:8.3f}{0.25:8.3f}  1.00  0.00           C  \n"
    for i in range(1, 40)
)


def write_sqlite(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        FRAME.to_sql("events", connection)
    connection.close()


def write_zip(*names: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in names:
                archive.writestr(name, b"content " * 50)

    return write


def write_sound(path: Path) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(bytes(1000))


def write_npz(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, x=np.arange(9))


def write_bytes(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None


WRITTEN: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "stata": (lambda path: FRAME.to_stata(path), "Stata", "read_stata"),
    "stata 105": (lambda path: FRAME.to_stata(path, version=114), "Stata", "read_stata"),
    "pickle": (lambda path: FRAME.to_pickle(path, compression=None), "pickle", "read_pickle"),
    "pickle 2": (write_bytes(pickle.dumps({"x": [1, 2]}, protocol=2)), "pickle", "read_pickle"),
    "pickle gz": (lambda path: FRAME.to_pickle(path, compression="gzip"), "pickle.*, compressed by gzip", "decompress"),
    "records": (lambda path: FRAME.to_json(path, orient="records"), "JSON array", "lines=True"),
    "indented records": (lambda path: FRAME.to_json(path, orient="records", indent=1), "JSON array", "lines=True"),
    "orc": (lambda path: pa.orc.write_table(pa.Table.from_pandas(FRAME), path), "ORC", "pyarrow.orc.read_table"),
    "sqlite": (write_sqlite, "SQLite", "read_sql"),
    "sound": (write_sound, "sound", "soundfile"),
    "zip": (write_zip("notes.txt"), "zip archive", "unzip"),
    "workbook": (write_zip("[Content_Types].xml", "_rels/.rels", "xl/workbook.xml"), "Excel", "read_excel"),
    "other workbook": (write_zip("docProps/app.xml", "xl/worksheets/sheet1.xml"), "Excel", "read_excel"),
    "document": (write_zip("[Content_Types].xml", "word/document.xml"), "zip archive", "unzip"),
    "weights": (write_zip("model/data.pkl", "model/data/0"), "PyTorch", "torch.load"),
    "arrays": (write_npz, "NumPy arrays", 'format="npz"'),
}
"""By name: a function that writes the file by a library, a description and a remedy in the error."""

BEGINS: dict[str, tuple[bytes, str, str]] = {
    "grib1": (b"GRIB\0\1\x72\1" + bytes(200), "GRIB", "cfgrib"),
    "grib2": (b"GRIB\xff\xff\0\2" + bytes(200), "GRIB", "cdo -f nc4"),
    "bufr": (b"BUFR\0\1\x40\4" + bytes(200), "BUFR", "pdbufr"),
    "hdf4": (b"\x0e\x03\x13\x01" + bytes(200), "HDF4", "h4toh5convert"),
    "dicom": (bytes(128) + b"DICM\2\0\0\0UL\4\0", "DICOM", "pydicom"),
    "dicom behind a header of TIFF": (b"II*\0\x08\0\0\0" + bytes(120) + b"DICM\2\0\0\0UL\4\0", "DICOM", "pydicom"),
    "nifti": (struct.pack("<i", 348) + bytes(340) + b"n+1\0" + bytes(100), "NIfTI", "nibabel"),
    "nifti gz": (gzip.compress(struct.pack("<i", 348) + bytes(340) + b"n+1\0" + bytes(100)), "NIfTI", "nibabel"),
    "sas": (bytes(12) + bytes.fromhex("c2ea8160b31411cfbd92080009c7318c181f1011"), "SAS", "read_sas"),
    "transport": (b"HEADER RECORD*******LIBRARY HEADER RECORD!!!!!!!000000", "SAS", "read_sas"),
    "spss": (b"$FL2@(#) SPSS DATA FILE" + bytes(100), "SPSS", "read_spss"),
    "rds": (gzip.compress(b"X\n\0\0\0\3\0\4\1\2"), "objects of R", "readRDS"),
    "rdata": (bz2.compress(b"RDX3\nX\n\0\0\0\3"), "objects of R", "load()"),
    "xls": (bytes.fromhex("d0cf11e0a1b11ae1") + bytes(500), "before 2007", "read_excel"),
    "arff": (b"% of flowers\n\n@relation iris\n@attribute length numeric\n\n@data\n5.1\n4.9\n", "Weka", "loadarff"),
    "avro": (b"Obj\x01\x04\x14avro.codec", "Avro", "polars"),
    "shape": (struct.pack(">i", 9994) + bytes(96), "shapefile", "geopandas"),
    "lmdb": (bytes(16) + bytes.fromhex("dec0efbe01000000"), "LMDB", "lmdb.open"),
    "mdf": (b"MDF     4.10    ", "MDF", "asammdf"),
    "tdms": (b"TDSm\x0e\0\0\0", "TDMS", "nptdms"),
    "las": (b"LASF\0\0\0\0", "LAS", "laspy"),
    "asdf": (b"#ASDF 1.0.0\n#ASDF_STANDARD 1.6.0\n%YAML 1.1\n", "ASDF", "asdf.open"),
    "nrrd": (b"NRRD0004\ntype: float\n", "NRRD", "nrrd.read"),
    "edf": (b"0       " + b"patient".ljust(80) + b"record".ljust(80) + b"01.02.2312.00.00", "EDF", "mne"),
    "dcd": (b"T\0\0\0CORD" + bytes(100), "trajectory", "MDAnalysis"),
    "xtc": (b"\0\0\x07\xcb\0\0\0\x0a", "trajectory", "MDAnalysis"),
    "density": (bytes(208) + b"MAP DD\0\0" + bytes(100), "MRC", "mrcfile"),
    "vtk": (b"# vtk DataFile Version 3.0\nout\nASCII\n", "VTK", "meshio"),
    "vtu": (b'<?xml version="1.0"?>\n<VTKFile type="UnstructuredGrid">\n', "VTK", "meshio"),
    "fasta": (b">sp|P1|A, B\nMKTAYIAKQRQISFVKSHFSRQ\nMKT\n>b\nMKTA\n", "FASTA", "Bio.SeqIO"),
    "fastq": (b"@read/1\nACGTNACGT\n+\nIIIIIIIII\n", "FASTQ", "Bio.SeqIO"),
    "exr": (b"\x76\x2f\x31\x01\x02\0\0\0channels\0chlist\0", "OpenEXR", "imageio"),
    "lcio": (b"\0\0\0\x44\xab\xad\xca\xfe\0\1\0\0", "LCIO", "pylcio"),
    "lcio gz": (gzip.compress(b"\0\0\0\x44\xab\xad\xca\xfe\0\1\0\0"), "LCIO", "decompress it"),
    "7z": (bytes.fromhex("377abcaf271c0004"), "7z", "7z x"),
    "pdf": (b"%PDF-1.7\n", "PDF", "camelot"),
    "safetensors": (struct.pack("<Q", 60) + b'{"weight":{"dtype":"F32"', "safetensors", "load_file"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 12\n", "Git LFS", "git lfs pull"),
    "annex": (b"/annex/objects/SHA256E-s120--aa.nc\n", "git-annex", "git annex get"),
    "atoms": (PDB_ATOMS.encode(), "Protein Data Bank", "MDAnalysis"),
    "protein": (
        b"HEADER    HYDROLASE                               01-FEB-99   1ABC              \n"
        b"TITLE     A, B, AND C                                                           \n" + PDB_ATOMS.encode(),
        "Protein Data Bank",
        "MDAnalysis",
    ),
    "remarked": (b"REMARK    made by hand\nMODEL        1\n" + PDB_ATOMS.encode(), "Protein Data Bank", "MDAnalysis"),
    "cif": (b"data_1ABC\n#\n_entry.id 1ABC\nloop_\n", "CIF", "gemmi"),
    "hdf5 gz": (gzip.compress(b"\x89HDF\r\n\x1a\n" + bytes(100)), "'hdf5', compressed by gzip", "decompress it"),
}
"""By name: the first bytes of a file by the specification of its format, a description and a remedy in the error."""


def refused(path: Path) -> str:
    with pytest.raises(FormatError) as caught:
        detect(str(path), path.read_bytes()[:HEAD_BYTES])
    return str(caught.value)


@pytest.mark.parametrize("kind", WRITTEN)
def test_files_of_libraries(tmp_path: Path, kind: str) -> None:
    write, title, remedy = WRITTEN[kind]
    for name in ("data", "data.out", "data.csv", "data.h5"):
        path = tmp_path / name
        write(path)
        text = refused(path)
        assert re.search(f"found: .*{title}", text) and remedy in text, text
        assert repr(str(path)) in text


@pytest.mark.parametrize("kind", BEGINS)
def test_first_bytes(tmp_path: Path, kind: str) -> None:
    content, title, remedy = BEGINS[kind]
    for name in ("data", "data.txt", "data.tsv", "data.nc"):
        path = tmp_path / name
        path.write_bytes(content)
        text = refused(path)
        assert re.search(f"found: .*{title}", text) and remedy in text, text


def test_suffixes_decide_last(tmp_path: Path) -> None:
    path = tmp_path / "run.dbf"
    path.write_bytes(b"\x03\x7c\x0b\x10" + bytes(100))
    assert 'dbfread.DBF("run.dbf"))).to_parquet("run.parquet")' in refused(path)
    path.write_text("x,y\n1,2\n3,4\n")
    assert detect(str(path), path.read_bytes()) == "csv"
    suffixes = [suffix for unsupported in unsupported_formats() for suffix in unsupported.suffixes]
    assert not set(suffixes) & {suffix for format in FORMATS.values() for suffix in format.suffixes}
    for suffix in suffixes:
        path = tmp_path / f"run{suffix}"
        path.write_bytes(b"\x01\x02\x03\x04")
        assert "there is no reader for files of this format" in refused(path)


def test_raw_files_may_begin_as_they_like(tmp_path: Path) -> None:
    path = tmp_path / "volume.raw"
    path.write_bytes(BEGINS["grib1"][0])
    assert detect(str(path), path.read_bytes()) == "raw"


TABLES = (
    b"ORC,GRIB,BUFR\n1,2,3\n4,5,6\n",
    b"ATOM,x\n1,2\n3,4\n",
    b"HEADER,TITLE\n1,2\n3,4\n",
    b"pressure\ttime\n1\t2\n3\t4\n",
    b"sample,count\n1,2\n3,4\n",
    b"PK,count\n1,2\n3,4\n",
    b"MDF,x\n1,2\n3,4\n",
    b"A,B\n2,3\n4,5\n",
)


@pytest.mark.parametrize("content", TABLES)
def test_tables_stay_tables(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "table"
    path.write_bytes(content)
    assert detect(str(path), content) == "csv"


FOLDERS = {
    "run.bp": (("data.0", "md.0", "md.idx", "mmd.0"), "ADIOS2", "openpmd-pipe"),
    "run.lmdb": (("data.mdb", "lock.mdb"), "LMDB", "lmdb.open"),
}


def test_folders(tmp_path: Path) -> None:
    for name, (files, title, remedy) in FOLDERS.items():
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_bytes(b"12345678")
        with pytest.raises(FormatError) as caught:
            open_dataset(tmp_path / name, comm=MPI.COMM_SELF)
        assert title in str(caught.value) and remedy in str(caught.value)


def test_remedies_name_the_file() -> None:
    for unsupported in unsupported_formats():
        text = str(unsupported.error("folder/run.7.bin", known_formats()))
        assert "{" not in text.split("remedy:")[1].replace("{'", "") and "folder/run.7.bin" in text
    assert len(unsupported_formats()) >= 50


def _open(comm: MPI.Intracomm, path: str) -> None:
    open_dataset(path, comm=comm)


def test_all_ranks_raise_the_error(ranks: Pools, tmp_path: Path) -> None:
    FRAME.to_stata(tmp_path / "survey.dta")
    outcomes = ranks(3).outcomes(_open, str(tmp_path / "survey.dta"))
    assert all(isinstance(error, DataError) for error in outcomes)
    assert {str(error).splitlines()[-1].strip() for error in outcomes} == {
        'remedy: pandas.read_stata("survey.dta").to_parquet("survey.parquet")'
    }


def test_inspect_says_so(tmp_path: Path) -> None:
    FRAME.to_stata(tmp_path / "survey.dta")
    done = run_script(0, CALL, "inspect", str(tmp_path / "survey.dta"))
    assert done.returncode != 0 and "pandas.read_stata" in done.stdout + done.stderr
