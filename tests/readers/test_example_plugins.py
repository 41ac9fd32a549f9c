"""The packages of ``examples/plugins`` read what their libraries read, on any number of ranks."""

from __future__ import annotations

import shutil
from abc import abstractmethod
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import matex_data as md
from matex_data import DataError, FieldNotFound, FormatError
from tests.support.format_suite import Case, FormatSuite
from tests.support.launch import ROOT
from tests.support.plugins import installed
from tests.support.ranks import Pool, Pools

asdf = pytest.importorskip("asdf")
eccodes = pytest.importorskip("eccodes")
nibabel = pytest.importorskip("nibabel")
pydicom = pytest.importorskip("pydicom")

LEVELS, TIMES = (1000, 850, 500), (0, 6, 12, 18)


@pytest.fixture(scope="module", autouse=True)
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Install the packages."""
    folders = [ROOT / "examples" / "plugins" / name for name in ("nifti", "dicom", "grib", "asdf")]
    with installed(tmp_path_factory.mktemp("plugins"), *folders) as folder:
        yield folder


@pytest.fixture(scope="module")
def ranks(site: Path) -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()


def _of_nibabel(name: str) -> Path:
    return Path(nibabel.__file__).parent / "tests" / "data" / name


def _of_pydicom(name: str) -> Path:
    return Path(pydicom.__file__).parent / "data" / "test_files" / name


def _write_grib(path: Path, missing: bool = False) -> dict[str, np.ndarray[Any, Any]]:
    """Write temperatures on levels, and a pressure, on a grid of 5 x 8; return them."""
    rng = np.random.default_rng(0)
    expected = {
        "t": rng.normal(270, 10, (len(TIMES), len(LEVELS), 5, 8)),
        "sp": rng.normal(1e5, 1e3, (len(TIMES), 5, 8)),
    }
    if missing:
        expected["sp"][1, 2, 3] = np.nan
    with path.open("wb") as file:
        for i, time in enumerate(TIMES):
            for j, level in enumerate(LEVELS):
                _message(file, "t", "isobaricInhPa", level, time, expected["t"][i, j])
            _message(file, "sp", "surface", 0, time, expected["sp"][i])
    return expected


def _message(
    file: Any, name: str, kind: str, level: int, time: int, values: np.ndarray[Any, Any], day: int | None = None
) -> None:
    handle = eccodes.codes_grib_new_from_samples("regular_ll_sfc_grib2")
    grid = {"Ni": 8, "Nj": 5, "latitudeOfFirstGridPointInDegrees": 40, "latitudeOfLastGridPointInDegrees": 20}
    grid |= {"longitudeOfFirstGridPointInDegrees": 0, "longitudeOfLastGridPointInDegrees": 35}
    grid |= {"iDirectionIncrementInDegrees": 5, "jDirectionIncrementInDegrees": 5}
    date = datetime(2024, 2, 29, time) if day is None else datetime(2024, 1, 1) + timedelta(100 * day, time * 3600)
    when = {"dataDate": int(f"{date:%Y%m%d}"), "dataTime": date.hour * 100}
    for key, value in {**grid, **when, "bitsPerValue": 24}.items():
        eccodes.codes_set(handle, key, value)
    eccodes.codes_set(handle, "typeOfLevel", kind)
    eccodes.codes_set(handle, "level", level)
    eccodes.codes_set(handle, "shortName", name)
    eccodes.codes_set(handle, "bitmapPresent", 1)
    eccodes.codes_set(handle, "missingValue", 1e30)
    eccodes.codes_set_values(handle, np.nan_to_num(values, nan=1e30).ravel())
    eccodes.codes_write(handle, file)
    eccodes.codes_release(handle)


def _loaded(path: Path, *names: str) -> dict[str, np.ndarray[Any, Any]]:
    return md.open_dataset(path, inputs=list(names) or None, comm=MPI.COMM_SELF).load()


@pytest.mark.parametrize("name", ["functional.nii", "anatomical.nii", "example4d.nii.gz", "example_nifti2.nii.gz"])
@pytest.mark.parametrize("unpacked", [False, True])
def test_a_volume_of_nifti_is_a_sample(tmp_path: Path, name: str, unpacked: bool) -> None:
    path = tmp_path / name
    shutil.copy(_of_nibabel(name), path)
    image = nibabel.load(path)
    if unpacked:
        nibabel.save(image, path := tmp_path / "plain.nii")
        image = nibabel.load(path)
    volumes = np.asarray(image.dataobj).reshape(*image.shape[:3], -1)
    np.testing.assert_allclose(_loaded(path)["image"], np.moveaxis(volumes, -1, 0), rtol=1e-6)


@pytest.mark.parametrize("name", ["CT_small.dcm", "MR_small_RLE.dcm", "SC_rgb_rle_2frame.dcm", "rtdose.dcm"])
def test_dicom_frames_are_those_of_pydicom(name: str) -> None:
    read = pydicom.dcmread(_of_pydicom(name))
    frames = int(read.get("NumberOfFrames") or 1)
    expected = read.pixel_array.reshape(frames, *read.pixel_array.shape[-3 + (read.SamplesPerPixel == 1) :])
    slope, intercept = float(read.get("RescaleSlope", 1)), float(read.get("RescaleIntercept", 0))
    found = _loaded(_of_pydicom(name), "image", "Rows")
    np.testing.assert_allclose(found["image"], expected * slope + intercept, rtol=1e-6)
    assert found["Rows"].tolist() == [read.Rows] * frames


def test_grib_fields_are_what_was_written(tmp_path: Path) -> None:
    expected = _write_grib(tmp_path / "a.grib2", missing=True)
    found = _loaded(tmp_path / "a.grib2")
    np.testing.assert_allclose(found["t"], expected["t"][:, np.argsort(LEVELS)], rtol=1e-5)
    np.testing.assert_allclose(found["sp"], expected["sp"], rtol=1e-5)
    assert np.isnan(found["sp"]).sum() == 1
    times = np.datetime64("2024-02-29T00", "s") + np.array(TIMES) * np.timedelta64(3600, "s")
    assert found["time"].tolist() == times.astype(np.int64).tolist()


class PluginSuite(FormatSuite):
    """Conformance of a package, whose pools import TensorFlow anew."""

    LENGTHS = (41, 37, 33)  # samples of the files
    FILE = ""
    CUT = 50  # bytes at the end of a damaged file

    @abstractmethod
    def write_file(self, path: Path, rows: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
        """Write a file, and return its fields."""

    def write(self, folder: Path) -> Case:
        parts = [self.write_file(folder / self.FILE.format(n), rows, n) for n, rows in enumerate(self.LENGTHS)]
        expected = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return Case(str(folder), expected, next(iter(expected)))

    def damage(self, folder: Path) -> Case:
        case = self.write(folder)
        path = folder / self.FILE.format(1)
        path.write_bytes(path.read_bytes()[: -self.CUT])
        return case

    @pytest.mark.rank_counts(1)
    def test_tensors_are_the_arrays(self, case: Case, pool: Pool) -> None:
        super().test_tensors_are_the_arrays(case, pool)


class TestNifti(PluginSuite):
    FILE = "run{}.nii"

    def write_file(self, path: Path, rows: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
        volumes = np.random.default_rng(seed).normal(size=(4, 3, 2, rows)).astype("f4")
        nibabel.save(nibabel.Nifti1Image(volumes, np.eye(4)), path)
        return {"image": np.moveaxis(volumes, -1, 0)}


class TestDicom(PluginSuite):
    FILE = "series{}.dcm"
    CUT = 1000  # since padding follows the pixels

    def write_file(self, path: Path, rows: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
        frames = np.random.default_rng(seed).integers(0, 4000, (rows, 5, 6), np.uint16)
        made = pydicom.dcmread(_of_pydicom("CT_small.dcm"))
        made.Rows, made.Columns, made.NumberOfFrames = 5, 6, rows
        made.PixelRepresentation, made.RescaleIntercept, made.RescaleSlope = 0, -10, 2
        made.PixelData = frames.tobytes()
        made.save_as(path)
        return {"image": frames.astype("f4") * 2 - 10}


class TestGrib(PluginSuite):
    FILE = "day{}.grib2"

    def write_file(self, path: Path, rows: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
        rng, found = np.random.default_rng(seed), {"t": [], "sp": []}
        with path.open("wb") as file:
            for hour in range(rows):
                for level in LEVELS[::-1]:
                    _message(file, "t", "isobaricInhPa", level, hour, rng.normal(270, 10, (5, 8)), seed)
                _message(file, "sp", "surface", 0, hour, rng.normal(1e5, 1e3, (5, 8)), seed)
        for message in _decoded(path):
            found[message[0]].append(message[1])
        t = np.array(found["t"], "f4").reshape(rows, len(LEVELS), 5, 8)
        begin = np.datetime64("2024-01-01T00", "s").astype(np.int64) + seed * 100 * 86400
        time = begin + np.arange(rows) * 3600
        return {"t": t, "sp": np.array(found["sp"], "f4").reshape(rows, 5, 8), "time": time}


def _decoded(path: Path) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield name and values of the messages of a file, as ecCodes reads them one after the other."""
    with path.open("rb") as file:
        while (handle := eccodes.codes_grib_new_from_file(file)) is not None:
            yield eccodes.codes_get(handle, "shortName"), eccodes.codes_get_values(handle)
            eccodes.codes_release(handle)


class TestAsdf(PluginSuite):
    FILE = "visit{}.asdf"

    def write_file(self, path: Path, rows: int, seed: int) -> dict[str, np.ndarray[Any, Any]]:
        rng = np.random.default_rng(seed)
        tree = {"meta": {"exposure": 1.5}, "roman": {"data": rng.normal(size=(rows, 4, 5)).astype(">f4"), "dq": None}}
        tree["roman"]["dq"] = rng.integers(0, 9, (rows, 4), np.uint16)
        asdf.AsdfFile(tree).write_to(path)
        with asdf.open(path) as read:
            return {
                f"roman/{name}": np.array(read["roman"][name]).astype(kind)
                for name, kind in (("data", "f4"), ("dq", "u2"))
            }


def _write_asdf(path: Path, tree: dict[str, Any], **options: Any) -> Path:
    asdf.AsdfFile(tree).write_to(path, **options)
    return path


@pytest.mark.parametrize("packing", ["zlib", "bzp2"])
def test_compressed_arrays_of_asdf(tmp_path: Path, packing: str) -> None:
    """Also several views of one block, and arrays with several names."""
    rng = np.random.default_rng(0)
    whole, ids = rng.normal(size=(30, 6)), np.arange(30)
    path = _write_asdf(tmp_path / "a.asdf", {"x": whole, "ids": [ids], "again": ids}, all_array_compression=packing)
    found = _loaded(path)
    assert set(found) == {"x", "again"}
    np.testing.assert_array_equal(found["x"], whole)
    data = md.open_dataset(path, inputs=["x", "again"], comm=MPI.COMM_SELF)
    for batch in data.batches(7, shuffle=True, seed=1):
        np.testing.assert_array_equal(batch["x"], whole[batch["again"]])
    content = path.read_bytes()
    at = content.rindex(b"\xd3BLK") + 60
    path.write_bytes(content[:at] + bytes(40) + content[at + 40 :])
    with pytest.raises(DataError, match=r"a\.asdf"):
        _loaded(path)


def test_arrays_of_asdf_that_are_left_out(tmp_path: Path) -> None:
    rows = np.arange(20.0).reshape(10, 2)
    masked = np.ma.masked_array(np.arange(10), np.arange(10) < 5)
    tree = {
        "rows": rows,
        "half": rows[5:],
        "columns": np.asfortranarray(rows),
        "masked": masked,
        "text": np.array(["a"] * 10),
    }
    path = _write_asdf(tmp_path / "a.asdf", {**tree, "more": np.arange(10), "records": np.zeros(10, "i4,f4")})
    with pytest.warns(UserWarning, match=r"5 arrays[\s\S]*'half': it has 5 rows, others 10[\s\S]*transposed"):
        found = _loaded(path)
    assert set(found) == {"rows", "more"}
    np.testing.assert_array_equal(found["rows"], rows)
    inline = _write_asdf(tmp_path / "b.asdf", {"x": np.arange(9)}, all_array_storage="inline")
    with pytest.raises(FormatError, match="lies in the tree"):
        _loaded(inline)


def test_a_stream_of_asdf_has_the_rows_that_are_there(tmp_path: Path) -> None:
    path, rows = tmp_path / "a.asdf", np.random.default_rng(0).normal(size=(11, 3))
    with path.open("wb") as file:
        asdf.AsdfFile({"x": asdf.tags.core.Stream([3], np.float64)}).write_to(file)
        file.write(rows.tobytes())
    np.testing.assert_array_equal(_loaded(path)["x"], rows)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"shape: [30, 6]", b"shape: [90, 9]"),
        (b"shape: [30, 6]", b"shape: [-3, 6]"),
        (b"source: 0", b"source: 9"),
        (b"datatype: float64", b"datatype: [1, 2]"),
        (b"source: 0", b"source: !!python/object/apply:os.getcwd []"),
        (b"x: ", b"y: *x "),
    ],
)
def test_damaged_files_of_asdf(tmp_path: Path, before: bytes, after: bytes) -> None:
    path = _write_asdf(tmp_path / "a.asdf", {"x": np.zeros((30, 6))})
    path.write_bytes(path.read_bytes().replace(before, after))
    with pytest.raises(FormatError, match=r"a\.asdf"):
        _loaded(path)


def test_no_frame_is_decoded_and_no_volume_read_to_index_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a DICOM file without its pixels, and of a NIfTI file, the header is enough."""
    path = tmp_path / "a.dcm"
    content = pydicom.dcmread(_of_pydicom("CT_small.dcm"))
    content.PixelData = bytes(len(content.PixelData))
    content.save_as(path)
    monkeypatch.setattr("pydicom.pixels.decoders.base.DecodeRunner.decode", None)
    data = md.open_dataset(path, inputs="image", comm=MPI.COMM_SELF)
    assert data.schema["image"].shape == (content.Rows, content.Columns)


def test_errors_name_the_file(tmp_path: Path) -> None:
    _write_grib(tmp_path / "a.grib2")
    content = (tmp_path / "a.grib2").read_bytes()
    with pytest.raises(FieldNotFound, match="no such variable"):
        _loaded(tmp_path / "a.grib2", "u10")
    (tmp_path / "a.grib2").write_bytes(content[:-500])
    with pytest.raises(DataError, match=r"a\.grib2"):
        _loaded(tmp_path / "a.grib2")
    with pytest.raises(FieldNotFound, match="no such number"):
        _loaded(_of_pydicom("CT_small.dcm"), "Rows", "Nothing")
    shutil.copy(_of_nibabel("functional.nii"), tmp_path / "a.nii")
    (tmp_path / "a.nii").write_bytes((tmp_path / "a.nii").read_bytes()[:5000])
    with pytest.raises(FormatError, match="truncated"):
        _loaded(tmp_path / "a.nii")
