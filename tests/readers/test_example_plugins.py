"""The packages of ``examples/plugins`` read what their libraries read, on any number of ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import matex_data as md
from matex_data import DataError, FieldNotFound, FormatError
from tests.support.launch import ROOT
from tests.support.plugins import installed
from tests.support.ranks import Pools

eccodes = pytest.importorskip("eccodes")
nibabel = pytest.importorskip("nibabel")
pydicom = pytest.importorskip("pydicom")

LEVELS, TIMES = (1000, 850, 500), (0, 6, 12, 18)


@pytest.fixture(scope="module", autouse=True)
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Install the packages."""
    folders = [ROOT / "examples" / "plugins" / name for name in ("nifti", "dicom", "grib")]
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


def _message(file: Any, name: str, kind: str, level: int, time: int, values: np.ndarray[Any, Any]) -> None:
    handle = eccodes.codes_grib_new_from_samples("regular_ll_sfc_grib2")
    grid = {"Ni": 8, "Nj": 5, "latitudeOfFirstGridPointInDegrees": 40, "latitudeOfLastGridPointInDegrees": 20}
    grid |= {"longitudeOfFirstGridPointInDegrees": 0, "longitudeOfLastGridPointInDegrees": 35}
    grid |= {"iDirectionIncrementInDegrees": 5, "jDirectionIncrementInDegrees": 5}
    for key, value in {**grid, "dataDate": 20240229, "dataTime": time * 100, "bitsPerValue": 24}.items():
        eccodes.codes_set(handle, key, value)
    eccodes.codes_set(handle, "typeOfLevel", kind)
    eccodes.codes_set(handle, "level", level)
    eccodes.codes_set(handle, "shortName", name)
    eccodes.codes_set(handle, "bitmapPresent", 1)
    eccodes.codes_set(handle, "missingValue", 1e30)
    eccodes.codes_set_values(handle, np.nan_to_num(values, nan=1e30).ravel())
    eccodes.codes_write(handle, file)
    eccodes.codes_release(handle)


def _batches(comm: MPI.Intracomm, path: str, names: list[str]) -> list[dict[str, np.ndarray[Any, Any]]]:
    data = md.open_dataset(path, inputs=names, comm=comm)
    return list(data.batches(4, shuffle=True, seed=1, remainder="keep"))


def _loaded(path: Path, *names: str) -> dict[str, np.ndarray[Any, Any]]:
    return md.open_dataset(path, inputs=list(names) or None, comm=MPI.COMM_SELF).load()


@pytest.mark.parametrize("name", ["functional.nii", "anatomical.nii", "example4d.nii.gz", "example_nifti2.nii.gz"])
@pytest.mark.parametrize("unpacked", [False, True])
def test_nifti_samples_are_those_of_nibabel(tmp_path: Path, name: str, unpacked: bool) -> None:
    path = tmp_path / name
    shutil.copy(_of_nibabel(name), path)
    image = nibabel.load(path)
    if unpacked:
        nibabel.save(image, path := tmp_path / "plain.nii")
        image = nibabel.load(path)
    found = _loaded(path)["image"]
    np.testing.assert_allclose(found, np.moveaxis(np.asarray(image.dataobj), -1, 0), rtol=1e-6)


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


def _several_gribs(folder: Path) -> list[str]:
    for number in range(3):
        _write_grib(folder / f"day{number}.grib2")
    return ["t", "sp"]


def _several_niftis(folder: Path) -> list[str]:
    for number in range(2):
        shutil.copy(_of_nibabel("functional.nii"), folder / f"run{number}.nii")
    return ["image"]


def _several_dicoms(folder: Path) -> list[str]:
    for number in range(5):
        shutil.copy(_of_pydicom("CT_small.dcm"), folder / f"slice{number}.dcm")
    return ["image", "InstanceNumber"]


@pytest.mark.parametrize("write", [_several_gribs, _several_niftis, _several_dicoms])
def test_batches_are_the_same_on_two_ranks(tmp_path: Path, ranks: Pools, write: Callable[[Path], list[str]]) -> None:
    names = write(tmp_path)
    (alone,) = ranks(1).run(_batches, str(tmp_path), names)
    shares = ranks(2).run(_batches, str(tmp_path), names)
    assert len(alone) == len(shares[0]) == len(shares[1])
    for batch, *parts in zip(alone, *shares, strict=True):
        for name in names:
            np.testing.assert_array_equal(batch[name], np.concatenate([part[name] for part in parts]))


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
