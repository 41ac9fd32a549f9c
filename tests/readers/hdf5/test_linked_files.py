"""Master files of detectors, as h5py writes them, whose data are external links to other files."""

from pathlib import Path

import h5py
import hdf5plugin
import numpy as np
import pytest

import matex_data as md
from tests.support.loading import check_samples
from tests.support.ranks import Pool

pytestmark = pytest.mark.rank_counts(1, 3)
FRAMES = np.random.default_rng(2).integers(0, 99, (23, 16, 12)).astype("u4")


def _write(folder: Path, data: Path) -> Path:
    """Write a master file, and 10 frames in each of its data files."""
    master = folder / "lyso_master.h5"
    with h5py.File(master, "w") as file:
        group = file.create_group("entry/data")
        file["entry/instrument/detector/pixel_mask"] = np.zeros((16, 12), "u4")
        for number, begin in enumerate(range(0, len(FRAMES), 10), 1):
            name = f"lyso_data_{number:06d}.h5"
            with h5py.File(data / name, "w") as other:
                other.create_dataset(
                    "entry/data/data", data=FRAMES[begin : begin + 10], chunks=(1, 16, 12), **hdf5plugin.Bitshuffle()
                )
            target = str(data / name) if data != folder else name
            group[f"data_{number:06d}"] = h5py.ExternalLink(target, "/entry/data/data")
    return master


def test_an_eiger_master_file(pool: Pool, tmp_path: Path) -> None:
    master = _write(tmp_path, tmp_path)
    wanted = {"entry/data/data": FRAMES}
    check_samples(pool, str(master), wanted, inputs=["entry/data/data"])
    check_samples(pool, str(master), {"/entry/data/data": FRAMES}, inputs=["/entry/data/data"])
    check_samples(pool, str(master), wanted, inputs=["entry/data/*"], index=str(tmp_path / "stored"))
    check_samples(pool, str(master), wanted, inputs=["entry/data/*"], index=str(tmp_path / "stored"))
    with pytest.raises(md.FormatError, match=r"23 samples in 'entry/data/data'"):
        md.open_dataset(master)
    assert len(md.open_dataset(master, inputs="entry/data/data_000003")) == 3
    (tmp_path / "lyso_data_000002.h5").unlink()
    with pytest.raises(md.FormatError, match="a link leads to no dataset") as caught:
        md.open_dataset(master, inputs="entry/data/data")
    assert "lyso_data_000002.h5" in str(caught.value)
    with pytest.warns(UserWarning, match=r"entry/data/data(.|\n)*leads to no dataset"):
        assert list(md.open_dataset(master).schema) == ["entry/instrument/detector/pixel_mask"]


def test_links_that_are_not_followed_are_told(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = np.arange(3)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["y"], file["x"] = np.arange(3), h5py.ExternalLink("other.h5", "x")
    with pytest.warns(UserWarning, match="followed only if inputs= or targets= name them: 'x'"):
        assert list(md.open_dataset(tmp_path / "a.h5").schema) == ["y"]
    assert list(md.open_dataset(tmp_path / "a.h5", inputs=["x", "y"]).schema) == ["x", "y"]


def test_links_to_what_is_no_file_of_hdf5_are_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"no HDF5" * 100)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["d/data_1"] = h5py.ExternalLink(str(tmp_path / "secret"), "x")
    with pytest.raises(md.DataError):
        md.open_dataset(tmp_path / "a.h5", inputs="d/data")
