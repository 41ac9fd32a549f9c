"""FITS tables, cubes and extensions: conformance suite, types against astropy, and error messages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from astropy.io import fits
from astropy.table import Table
from mpi4py import MPI

from matex_data import DataError, FieldNotFound, FormatError, open_dataset
from matex_data.errors import DecodeError
from matex_data.readers import detect
from tests.support.corpus import CORPUS, needs_corpus
from tests.support.format_suite import Case, FormatSuite, same

ROWS = (150, 37, 1, 110)
C = fits.Column


def objects(rows: list[Any], dtype: Any) -> np.ndarray[Any, Any]:
    return np.fromiter((np.array(row, dtype) for row in rows), object, len(rows))


def columns(rows: int, first: int = 0) -> list[fits.Column]:
    """Return columns of all kinds."""
    rng = np.random.default_rng(first)
    counts = rng.integers(0, 5, rows)
    return [
        C("event", "J", array=np.arange(first, first + rows)),
        C("time", "D", unit="s", array=rng.normal(size=rows)),
        C("flux", "12E", dim="(4,3)", array=rng.normal(size=(rows, 3, 4)).astype("f4")),
        C("counts", "I", bzero=2**15, array=rng.integers(0, 2**16, rows).astype("u2")),
        C("good", "L", array=rng.integers(0, 2, rows).astype(bool)),
        C("status", "11X", array=rng.integers(0, 2, (rows, 11)).astype(bool)),
        C("name", "8A", array=np.array([f"src {i}" for i in range(rows)])),
        C("bands", "12A", dim="(4,3)", array=np.array([["g", "rr", f"i{i % 9}"] for i in range(rows)])),
        C("z", "C", array=(rng.normal(size=rows) + 1j).astype("c8")),
        C("pha", "PI()", array=objects([rng.integers(0, 99, n) for n in counts], "i2")),
        C("energy", "QD()", array=objects([rng.normal(size=n) for n in counts], "f8")),
        C("raw", "B", array=rng.integers(0, 255, rows).astype("u1")),
    ]


def write(path: Path, rows: int, first: int = 0, **scaled: dict[str, float]) -> str:
    """Write a table behind an empty primary unit; ``raw`` is scaled in its header."""
    unit = fits.BinTableHDU.from_columns(columns(rows, first), name="EVENTS")
    unit.writeto(path)
    for keyword, value in (("TSCAL12", 0.5), ("TZERO12", 3.0)):
        fits.setval(path, keyword, value=value, ext=1)
    return str(path)


def expected(path: str, unit: int = 1) -> dict[str, Any]:
    """Return the columns as astropy reads them."""
    found: dict[str, Any] = {}
    with fits.open(path) as file:
        for name in file[unit].columns.names:
            values = file[unit].data[name]
            if values.dtype == object:
                rows = [np.asarray(row) for row in values]
                texts = (rows and rows[0].dtype.kind == "U") or any(row.dtype.kind == "U" for row in rows)
                found[name] = (
                    np.array(["".join(row.tolist()).encode() for row in rows], object)
                    if texts
                    else objects(rows, rows[0].dtype.newbyteorder("="))
                )
                continue
            values = np.asarray(values)
            column = file[unit].columns[name]
            dims = (column.dim or "").strip("() ").split(",")[0] or column.format.strip("A") or "1"
            dtype = f"S{dims}" if values.dtype.kind == "U" else values.dtype.newbyteorder("=")
            found[name] = np.char.rstrip(values).astype(dtype) if values.dtype.kind == "U" else values.astype(dtype)
    return found


class TestFits(FormatSuite):
    def write(self, folder: Path) -> Case:
        first = np.cumsum((0, *ROWS[:-1])).tolist()
        paths = [write(folder / f"part{i}.fits", n, at) for i, (n, at) in enumerate(zip(ROWS, first, strict=True))]
        tables = [expected(path) for path in paths]
        return Case(paths, {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}, "event")

    def damage(self, folder: Path) -> Case:
        case = self.write(folder)
        with fits.open(case.paths[0]) as file:
            begin = file[1].fileinfo()["datLoc"]
            width = file[1].header["NAXIS1"]
        with Path(case.paths[0]).open("r+b") as stream:
            stream.seek(begin + 70 * width)
            stream.write(b"\x7f" * width)  # descriptors that point out of the heap
        return case


def read(path: Any, **options: Any) -> dict[str, Any]:
    return open_dataset(path, comm=MPI.COMM_SELF, **options).load()


def test_a_folder_of_tables(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{number}.fits", 20, 20 * number) for number in range(3)]
    assert detect(paths[0], Path(paths[0]).read_bytes()) == "fits"
    same(read(tmp_path)["event"], np.arange(60))
    assert open_dataset(tmp_path, comm=MPI.COMM_SELF).schema["time"].attributes["units"] == "s"


def test_only_the_chosen_columns_are_read(tmp_path: Path) -> None:
    data = open_dataset(write(tmp_path / "a.fits", 1000), inputs="flux", targets="time", comm=MPI.COMM_SELF)
    for _ in data.batches(100):
        pass
    assert 1 <= data.profile.bytes / (1000 * (12 * 4 + 8)) < 1.02


@pytest.mark.parametrize("keyword", [b"NAXIS2", b"TFIELDS"])
def test_a_header_without_a_length_is_damaged(tmp_path: Path, keyword: bytes) -> None:
    path = Path(write(tmp_path / "a.fits", 30))
    before, _, after = path.read_bytes().rpartition(keyword.ljust(8) + b"=")
    path.write_bytes(before + keyword.lower().ljust(8) + b"=" + after)  # of one damaged bit, NAXIS2 counted as 0
    with pytest.raises(FormatError, match=f"(?s)header.* is damaged.*{keyword.decode()} = None"):
        open_dataset(path, comm=MPI.COMM_SELF)


def test_a_table_without_axes_is_damaged(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.fits", 30))
    before, _, after = path.read_bytes().rpartition(b"NAXIS   =                    2")
    path.write_bytes(before + b"NAXIS   =                    0" + after)
    with pytest.raises(FormatError, match=r"(?s)header of the table is damaged.*NAXIS"):
        open_dataset(path, comm=MPI.COMM_SELF)


def test_missing_integers_are_nan(tmp_path: Path) -> None:
    unit = fits.BinTableHDU.from_columns(
        [C("n", "J", null=-99, array=[1, -99, 3]), C("m", "B", null=0, array=np.array([0, 7, 9], "u1"))]
    )
    unit.writeto(tmp_path / "a.fits")
    table = Table.read(tmp_path / "a.fits")
    for name, values in read(tmp_path / "a.fits").items():
        np.testing.assert_array_equal(values, np.ma.filled(table[name].astype("f8"), np.nan))


@pytest.mark.parametrize("form", ["K", "QK()", "I20"])
def test_integers_that_may_be_missing_are_exact(tmp_path: Path, form: str) -> None:
    kind = fits.TableHDU if form == "I20" else fits.BinTableHDU
    for largest in (2**53 - 1, 2**53 + 1):
        rows = np.array([largest, -99, 5])
        values = objects([[row] for row in rows], "i8") if form == "QK()" else rows
        path = tmp_path / f"{largest}.fits"
        kind.from_columns([C("id", form, null="-99" if form == "I20" else -99, array=values)]).writeto(path)
        if largest < 2**53:
            same(np.array([np.ravel(row)[0] for row in read(path)["id"]]), np.array([largest, np.nan, 5]))
        else:
            with pytest.raises(DecodeError, match=r"not exact as float64.*field 'id'(.|\n)*9007199254740993"):
                read(path)


def test_unsigned_integers_that_may_be_missing(tmp_path: Path) -> None:
    """``TNULL`` is a stored number: that of the unsigned one less ``TZERO`` (FITS 4.0, section 7.3.2)."""
    unsigned = {code: np.array([7, 0, 2 ** (bits - 1)], f"u{bits // 8}") for code, bits in (("I", 16), ("K", 64))}
    stored = [C(code, code, array=array, bzero=int(array[2])) for code, array in unsigned.items()]
    path = tmp_path / "a.fits"
    fits.BinTableHDU.from_columns(stored).writeto(path)
    for number, bits in ((1, 16), (2, 64)):
        fits.setval(path, f"TNULL{number}", value=-(2 ** (bits - 1)), ext=1)
    with pytest.raises(DecodeError, match="9223372036854775808"):
        read(path)
    same(read(path, inputs="I")["I"], np.array([7, np.nan, 2**15]))
    assert read(path, inputs="K", where="I < 9")["K"].tolist() == [7]


def test_texts_in_the_form_of_ascii_tables(tmp_path: Path) -> None:
    """astropy reads ``A7`` as ``7A`` in binary tables, too."""
    path = tmp_path / "a.fits"
    fits.BinTableHDU.from_columns([C("name", "7A", array=["abc", "defghij"]), C("n", "J", array=[1, 2])]).writeto(path)
    path.write_bytes(path.read_bytes().replace(b"'7A      '", b"'A7      '"))
    assert Table.read(path)["n"].tolist() == [1, 2]
    assert {name: values.tolist() for name, values in read(path).items()} == {"name": [b"abc", b"defghij"], "n": [1, 2]}


def test_columns_of_one_name_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.fits"
    fits.BinTableHDU.from_columns([C(name, "J", array=[1]) for name in ("xx", "yy", "zz")]).writeto(path)
    path.write_bytes(path.read_bytes().replace(b"'yy      '", b"'xx      '"))
    with pytest.warns(UserWarning, match="'xx': several columns have this name"):
        assert list(read(path)) == ["zz"]


def test_texts_of_variable_length_and_scaled_lists(tmp_path: Path) -> None:
    texts = ["a", "", "longer text"]
    lists = objects([[1, 2], [], [3]], "i2")
    path = tmp_path / "a.fits"
    fits.BinTableHDU.from_columns([C("t", "PA()", array=texts), C("v", "PI()", array=lists)]).writeto(path)
    fits.setval(path, "TSCAL2", value=0.5, ext=1)
    data = read(path)
    assert data["t"].tolist() == [text.encode() for text in texts]
    assert [row.tolist() for row in data["v"]] == [[0.5, 1.0], [], [1.5]]


def test_ascii_tables(tmp_path: Path) -> None:
    path = str(tmp_path / "a.fits")
    made = [
        C("short", "I3", array=[1, -2, 3]),
        C("whole", "I7", array=[1, -2, 3]),
        C("long", "I15", array=[1, 2**40, -3]),
        C("fixed", "F9.3", array=[1.5, -2.25, 1e3]),
        C("single", "E15.7", array=[1.5, -2.25, 1e30]),
        C("double", "D25.17", array=[0.1, -2.25, 1e-300]),
        C("text", "A7", array=["x", "yy", "a b"]),
    ]
    fits.TableHDU.from_columns(made).writeto(path)
    data = read(path)
    for name, values in expected(path).items():
        same(data[name], values)


@pytest.mark.parametrize("null", [None, "-99", ""])
def test_blank_numbers_of_ascii_tables(tmp_path: Path, null: str | None) -> None:
    """A blank integer is 0 (FITS 4.0, section 7.2.5); a blank real number is missing, as astropy has it."""
    path = str(tmp_path / "a.fits")
    texts = [C("whole", "A7", array=["     12", "", "    -99"]), C("real", "A9", array=["    1.5  ", "", "  -99    "])]
    fits.TableHDU.from_columns(texts).writeto(path)
    for number, form in ((1, "I7"), (2, "F9.3")):
        fits.setval(path, f"TFORM{number}", value=form, ext=1)
    if null is not None:
        fits.setval(path, "TNULL2", value=null, ext=1)
    data = read(path)
    same(data["whole"], np.array([12, 0, -99], "i4"))
    same(data["real"], expected(path)["real"])
    same(data["real"], np.array([1.5, np.nan, np.nan if null == "-99" else -99]))


def test_cubes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    cube = rng.integers(0, 2**16, (6, 5, 4)).astype("u2")
    path = tmp_path / "a.fits"
    fits.PrimaryHDU(cube).writeto(path)
    assert detect(str(path), path.read_bytes()) == "fits"
    same(read(path)["data"], cube)
    for axis in (0, 1, 2, -1):
        same(read(path, sample_axis=axis)["data"], np.moveaxis(cube, axis, 0))
    scaled = fits.ImageHDU(rng.integers(-99, 99, (7, 3)).astype("i2"), name="SCI")
    scaled.header["BLANK"] = 5
    fits.HDUList([fits.PrimaryHDU(cube.astype("f4")), scaled]).writeto(path, overwrite=True)
    for keyword, value in (("BSCALE", 0.25), ("BZERO", 10.0)):
        fits.setval(path, keyword, value=value, ext=1)
    with fits.open(path) as file:
        same(read(path, hdu="sci")["SCI"], file[1].data.astype("f4"))
    with pytest.raises(FormatError, match="no such axis"):
        read(path, sample_axis=3)
    with pytest.raises(FieldNotFound, match="'data'"):
        read(path, inputs="image")


def test_compressed_cubes(tmp_path: Path) -> None:
    cube = np.random.default_rng(0).integers(0, 999, (6, 5, 8)).astype("i4")
    path = tmp_path / "a.fits"
    fits.HDUList([fits.PrimaryHDU(), fits.CompImageHDU(cube, name="CUBE")]).writeto(path)
    for axis in (0, 1):
        same(read(path, hdu=1, sample_axis=axis)["CUBE"], np.moveaxis(cube, axis, 0))


def test_extensions_as_samples(tmp_path: Path) -> None:
    planes = np.random.default_rng(0).normal(size=(5, 4, 3)).astype("f4")
    units = [fits.ImageHDU(plane, name="SCI", ver=i + 1) for i, plane in enumerate(planes)]
    masks = [fits.ImageHDU(np.zeros((4, 3), "u1"), name="DQ", ver=i + 1) for i in range(5)]
    pairs = [unit for pair in zip(units, masks, strict=True) for unit in pair]
    path = tmp_path / "a.fits"
    fits.HDUList([fits.PrimaryHDU(), *pairs]).writeto(path)
    same(read(path, hdu="SCI")["SCI"], planes)
    for chosen, at in (([1, 5], [0, 2]), ([5, 1], [2, 0]), ([3], [1]), ([1, 1], [0, 0])):
        same(read(path, hdu=chosen)["SCI"], planes[at])
    with pytest.raises(FormatError, match="the extensions differ"):
        read(path, hdu=[1, 2])
    with pytest.raises(FormatError, match=r"no such data(.|\n)*SCI"):
        read(path, hdu="SCX")
    for wanted, unknown in (([1, 99], 99), (["SCI", "ZZ"], "ZZ"), (True, True), ([], [])):
        with pytest.raises(FormatError, match=re.escape(f"hdu={unknown!r}")):
            read(path, hdu=wanted)
    with pytest.raises(FormatError, match="axis of one image"):
        read(path, hdu=[1, 5], sample_axis=1)


def test_options_choose_the_reader_for_further_files(tmp_path: Path) -> None:
    planes = np.arange(48, dtype="f4").reshape(4, 4, 3)
    for number, plane in enumerate(planes[:3]):
        fits.HDUList([fits.PrimaryHDU(), fits.ImageHDU(plane, name="SCI")]).writeto(tmp_path / f"{number}.fits")
    for paths, format in ((tmp_path / "*.fits", None), (tmp_path, "fits"), (tmp_path, None)):
        found = open_dataset(paths, hdu=["SCI"], format=format, comm=MPI.COMM_SELF).load()["SCI"]
        same(found, planes[:3])
    fits.PrimaryHDU(planes[:3]).writeto(tmp_path / "a.fit")
    fits.PrimaryHDU(planes[3:]).writeto(tmp_path / "b.fit")
    same(open_dataset(tmp_path / "*.fit", sample_axis=0, comm=MPI.COMM_SELF).load()["data"], planes)


def test_long_texts_of_headers(tmp_path: Path) -> None:
    path, unit = tmp_path / "a.fits", "10**-7 & erg/'s'" * 20
    table = fits.BinTableHDU.from_columns([C("flux", "E", unit=unit, array=np.arange(4)), C("b", "J", unit="m")])
    table.writeto(path)
    assert fits.getval(path, "TUNIT1", 1) == unit
    assert open_dataset(path).schema["flux"].attributes["units"] == unit
    with pytest.raises(FormatError, match="axis of one image"):
        read(path, sample_axis=0)


def test_images_stay_images(tmp_path: Path) -> None:
    image = np.arange(12, dtype="f4").reshape(3, 4)
    table = fits.BinTableHDU.from_columns(columns(20), name="EVENTS")
    path = tmp_path / "a.fits"
    fits.HDUList([fits.PrimaryHDU(image), table]).writeto(path)
    assert detect(str(path), path.read_bytes()) == "images"
    same(read(path, hdu="events")["event"], np.arange(20))


def test_errors(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.fits", 30))
    with pytest.raises(FieldNotFound, match=r"'evnt'(.|\n)*'event'"):
        read(path, inputs="evnt")
    content = path.read_bytes()
    for length in (len(content) - 2880, 2880 * 3 + 7):
        path.write_bytes(content[:length])
        with pytest.raises(FormatError, match="truncated"):
            read(path, format="fits")
    for old, new in (
        (b"TFORM3  = '12E", b"TFORM3  = '99E"),
        (b"TFORM1  = 'J", b"TFORM1  = 'I"),
        (b"TFIELDS =  ", b"TFIELDS = x"),
        (b"NAXIS   ", b"NAXOS   "),
    ):
        at = content.index(b"XTENSION")
        path.write_bytes(content[:at] + content[at:].replace(old, new, 1))
        with pytest.raises(DataError, match=str(path)):
            read(path, format="fits")


def test_random_groups_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "a.fits")
    groups = fits.GroupData(np.ones((2, 1, 3, 4), "f4"), parnames=["u"], pardata=[np.zeros(2)], bitpix=-32)
    fits.HDUList([fits.GroupsHDU(groups), fits.ImageHDU(np.eye(3))]).writeto(path)
    for options in ({}, {"hdu": 0}):
        with pytest.raises(FormatError, match=r"found: random groups(.|\n)*hdu="):
            read(path, **options)
    assert np.array_equal(read(path, hdu=1)["data"], np.eye(3))


@needs_corpus
@pytest.mark.parametrize("name", ["table", "variable_length_table"])
def test_files_of_others(name: str) -> None:
    path = f"{CORPUS}/images/fits/{name}.fits"
    data = read(path)
    for column, values in expected(path).items():
        same(data[column], values)
