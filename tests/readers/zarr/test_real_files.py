"""Stores as zarr writes them: times of NumPy, and pyramids of images by OME-Zarr."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import matex_data as md
from tests.support.loading import check_samples
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
