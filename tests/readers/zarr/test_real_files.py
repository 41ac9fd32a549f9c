"""Stores as zarr writes them: times of NumPy, and pyramids of images by OME-Zarr."""

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.storage import ZipStore

import matex_data as md
from tests.support.loading import check_samples
from tests.support.object_store import object_store
from tests.support.ranks import Pool

pytestmark = pytest.mark.rank_counts(1, 3)


@pytest.mark.parametrize("version", [2, 3])
def test_times_of_numpy(pool: Pool, tmp_path: Path, version: Any) -> None:
    when = np.array(["2000-01-01T06", "NaT", "2020-02-29", "1969-12-31"], "M8[ns]")
    took = np.array([1, 2, "NaT", -4], "m8[10s]")
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=version)
    for name, values in (("when", when), ("took", took), ("days", when.astype("M8[D]"))):
        group.create_array(name, shape=4, chunks=3, dtype=values.dtype)[:] = values
    wanted = {"took": [10, 20, np.nan, -40]}
    for name, values in (("when", when), ("days", when.astype("M8[D]"))):
        wanted[name] = np.where(np.isnat(values), np.nan, values.astype("M8[s]").astype(float)).tolist()
    check_samples(pool, str(tmp_path / "a.zarr"), wanted)
    units = {name: field.attributes["units"] for name, field in md.open_dataset(tmp_path / "a.zarr").schema.items()}
    assert units == {"took": "seconds", "when": "seconds since 1970-01-01 00:00:00", "days": units["when"]}


def _write_pyramid(group: Any, image: np.ndarray[Any, Any], axes: str, version: str) -> None:
    levels = [image, image[..., ::2, ::2], image[..., ::4, ::4]]
    for number, level in enumerate(levels):
        group.create_array(str(number), data=level, chunks=tuple(min(n, 4) for n in level.shape))
    multiscales = {
        "axes": [{"name": name, "type": "space" if name in "zyx" else "time"} for name in axes],
        "datasets": [{"path": str(number)} for number in range(3)],
    }
    if version == "0.4":
        group.attrs["multiscales"] = [multiscales | {"version": version}]
    else:
        group.attrs["ome"] = {"version": version, "multiscales": [multiscales]}


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_pyramids_of_images(pool: Pool, tmp_path: Path, version: str) -> None:
    path, image = tmp_path / "cells.zarr", np.arange(5 * 2 * 8 * 12, dtype="u2").reshape(5, 2, 8, 12)
    group: Any = zarr.open_group(path, mode="w", zarr_format=2 if version == "0.4" else 3)
    _write_pyramid(group, image, "tcyx", version)
    _write_pyramid(group.create_group("labels/nuclei"), image // 7, "tcyx", version)
    check_samples(pool, str(path), {"0": image, "labels/nuclei/0": image // 7})
    lower = {"1": image[..., ::2, ::2], "labels/nuclei/1": (image // 7)[..., ::2, ::2]}
    check_samples(pool, str(path), lower, level=1)
    assert md.open_dataset(path, inputs="2").schema["2"].shape == (2, 2, 3)
    assert md.open_dataset(path, inputs="0", isel={"c": 1, "y": slice(2, 4)}).schema["0"].shape == (2, 12)
    assert len(md.open_dataset(path, inputs="0", sample_dim="x")) == 12
    with pytest.raises(md.FormatError, match="the store has no such level"):
        md.open_dataset(path, level=3)


def test_a_store_without_pyramids_has_no_levels(tmp_path: Path) -> None:
    zarr.open_group(tmp_path / "a.zarr", mode="w").create_array("x", data=np.zeros(3))
    with pytest.raises(md.FormatError, match="a pyramid of OME-Zarr"):
        md.open_dataset(tmp_path / "a.zarr", level=0)


def _references(folder: Path, arrays: int) -> Path:
    """Write references of kerchunk to 20 chunks of each array of groups, and the file that they lead to."""
    refs: dict[str, Any] = {".zgroup": '{"zarr_format": 2}'}
    (folder / "chunks.bin").write_bytes(np.arange(80, dtype="<f4").tobytes())
    array = {"shape": [20, 4], "chunks": [1, 4], "dtype": "<f4", "fill_value": 0, "order": "C", "zarr_format": 2}
    for number in range(arrays):
        group = f"g{number % 7}"
        refs[f"{group}/.zgroup"] = refs[".zgroup"]
        refs[f"{group}/v{number}/.zarray"] = json.dumps({**array, "filters": None, "compressor": None})
        for chunk in range(20):
            refs[f"{group}/v{number}/{chunk}.0"] = ["chunks.bin", 16 * chunk, 16]
    (folder / "refs.json").write_text(json.dumps({"version": 1, "refs": refs}))
    return folder / "refs.json"


def test_references_are_read_in_time_linear_in_their_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, compared = _references(tmp_path, 300), [0]

    class Key(str):
        __slots__ = ()

        def startswith(self, *given: Any) -> bool:
            compared[0] += 1
            return str.startswith(self, *given)

        def __lt__(self, other: str) -> bool:
            compared[0] += 1
            return str.__lt__(self, other)

    def parsed(text: bytes, **options: Any) -> Any:
        found = loads(text, **options)
        if isinstance(found, dict) and "refs" in found:
            found["refs"] = {Key(key): value for key, value in found["refs"].items()}
        return found

    loads = json.loads
    monkeypatch.setattr(json, "loads", parsed)
    data = md.open_dataset(path)
    keys = 300 * 21 + 8
    assert len(data.schema) == 300
    assert compared[0] < keys * (np.log2(keys) + 5)  # to sort them, and each once
    assert np.array_equal(data.load()["g0/v0"].ravel(), np.arange(80))


def test_zip_files_of_other_headers(pool: Pool, tmp_path: Path) -> None:
    values = np.random.default_rng(0).random((24, 16, 20))
    path = tmp_path / "a.zarr.zip"
    with ZipStore(path, mode="w") as store:
        zarr.create_array(store, name="x", data=values, chunks=(1, 16, 20), compressors=None)
    check_samples(pool, str(path), {"x": values})
    with zipfile.ZipFile(path) as file, zipfile.ZipFile(tmp_path / "b.zarr.zip", "w") as other:
        for member in file.infolist():  # with headers of another length, and descriptors behind the data
            with other.open(member.filename, "w", force_zip64=True) as stream:
                stream.write(file.read(member))
    assert np.array_equal(md.open_dataset(tmp_path / "b.zarr.zip").load()["x"], values)


def test_a_zip_file_of_a_store_is_opened_by_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).random((48, 160, 200))
    path = tmp_path / "a.zarr.zip"
    with ZipStore(path, mode="w") as store:
        zarr.create_array(store, name="x", data=values, chunks=(1, 160, 200), compressors=None)
    with object_store() as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        url = running.put(path, "a.zarr.zip")
        running.forget()
        data = md.open_dataset(url)
        assert running.requests < 20 and running.sent < values.nbytes // 4
        assert np.array_equal(data.load()["x"], values)
