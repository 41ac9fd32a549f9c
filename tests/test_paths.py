"""Order and existence of many paths."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

import matex_data as md
from matex_data.mpi.library import MPI
from matex_data.opening.given import expand
from matex_data.paths import LISTED, existing_files, natural_sorted, numbered


def natural_key(path: str) -> tuple[list[tuple[int, str]], str]:
    """Return a sort key with numbers by value; ties are broken by the path itself."""
    words = re.split(r"([0-9]+)", path)
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in words], path


@given(st.lists(st.text("ab019./", max_size=6)))
def test_names_that_differ_in_digits_are_sorted_as_all_others(names: list[str]) -> None:
    assert natural_sorted(names) == sorted(names, key=natural_key)


def test_existing_files(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}" for number in range(LISTED + 5)]
    for path in files[:-1]:
        path.touch()
    (tmp_path / "folder").mkdir()
    paths = [str(path) for path in (*files, tmp_path / "folder", tmp_path / "none" / "1")]
    assert existing_files(paths) == set(paths[: len(files) - 1])
    assert existing_files(paths[:3]) == set(paths[:3])


@pytest.mark.parametrize(
    "pattern",
    ("a-{0..3}", "a-{0..11}", "a-{8..11}", "a-{008..011}", "{2..0}", "{1..2}/{01..03}", "a", "{a,b"),
)
def test_ranges_in_braces_are_those_of_the_shell(pattern: str) -> None:
    shell = subprocess.run(["bash", "-c", f"printf '%s\n' {pattern}"], capture_output=True, text=True, check=True)
    assert list(numbered(pattern)) == shell.stdout.splitlines()


def test_files_of_a_range(tmp_path: Path) -> None:
    for number in range(12):
        np.save(tmp_path / f"a-{number:03d}.npy", np.full(2, number))
    np.save(tmp_path / "{1..2}.npy", np.zeros(5))
    data = md.open_dataset(str(tmp_path / "a-{008..010}.npy"), comm=MPI.COMM_SELF)
    assert data.load()["data"].tolist() == [8, 8, 9, 9, 10, 10]
    assert expand([tmp_path / "a-{000..001}.npy", tmp_path / "{1..2}.npy"]) == [
        str(tmp_path / name) for name in ("a-000.npy", "a-001.npy", "{1..2}.npy")
    ]
    with pytest.raises(md.DataError, match=r"no such file.*a-012\.npy"):
        expand(tmp_path / "a-{010..012}.npy")


@pytest.mark.parametrize("recursive", [False, True])
def test_folders_that_a_pattern_matches_are_those_that_are_named(tmp_path: Path, recursive: bool) -> None:
    for year in (2020, 2021, 1999):
        (tmp_path / f"year={year}").mkdir()
        pd.DataFrame({"n": [year % 100] * 2}).to_parquet(tmp_path / f"year={year}" / "a.parquet")
    wells = zarr.open_group(tmp_path / "plate.zarr", mode="w")
    for field in range(3):
        wells.create_array(f"A/1/{field}/x", shape=(2,), chunks=(1,), dtype="i4")[:] = field
    found = md.open_dataset(tmp_path / ("**/year=20*" if recursive else "year=20*"), comm=MPI.COMM_SELF).load()
    assert (found["n"].tolist(), found["year"].tolist()) == ([20, 20, 21, 21], [2020, 2020, 2021, 2021])
    fields = md.open_dataset(tmp_path / "plate.zarr" / "*" / "*" / "[0-9]", comm=MPI.COMM_SELF, inputs="x")
    assert fields.load()["x"].tolist() == [0, 0, 1, 1, 2, 2]
    (tmp_path / "empty1").mkdir()
    with pytest.raises(md.DataError, match=r"the directories hold no files.*empty\*"):
        expand(tmp_path / "empty*")
    (tmp_path / "year=2022").mkdir()
    assert len(expand(tmp_path / "year=20*")) == 2


ANNEXED = "../.git/annex/objects/Xk/9Q/SHA256E-s212--aa.npy/SHA256E-s212--aa.npy"


@pytest.mark.parametrize("named", ["", "*.npy", "[ab].npy", "b.npy", "**/*.npy"])
def test_a_link_that_leads_nowhere_is_an_error(tmp_path: Path, named: str) -> None:
    np.save(tmp_path / "a.npy", np.arange(3))
    (tmp_path / "b.npy").symlink_to(ANNEXED)
    (tmp_path / "notes").symlink_to("nowhere")  # no data, as its name tells
    with pytest.raises(md.DataError, match="a link leads to no file") as caught:
        md.open_dataset(str(tmp_path / named))
    assert (caught.value.file, caught.value.found) == (str(tmp_path / "b.npy"), f"{ANNEXED}: No such file or directory")
    assert "git annex get" in str(caught.value.remedy)
    (tmp_path / "b.npy").unlink()
    assert len(md.open_dataset(str(tmp_path))) == 3


def test_a_link_in_a_partition_that_leads_nowhere_is_an_error(tmp_path: Path) -> None:
    for year in (1, 2):
        (tmp_path / f"year={year}").mkdir()
        np.save(tmp_path / f"year={year}" / "a.npy", np.arange(3))
    (tmp_path / "year=2" / "b.npy").symlink_to("nowhere")
    with pytest.raises(md.DataError, match="a link leads to no file"):
        md.open_dataset(str(tmp_path))


@pytest.mark.parametrize("sharded", [False, True])
def test_a_chunk_whose_link_leads_nowhere_is_no_fill_value(tmp_path: Path, sharded: bool) -> None:
    store = tmp_path / "a.zarr"
    group = zarr.open_group(store, mode="w")
    array = group.create_array("x", shape=(4, 2), chunks=(1, 2), shards=(2, 2) if sharded else None, dtype="f4")
    array[:] = np.arange(8).reshape(4, 2)
    chunk = store / "x" / "c" / "1" / "0"
    chunk.unlink()
    absent = md.open_dataset(store).load()["x"]
    assert absent.any(axis=1).tolist() == ([True, True, False, False] if sharded else [True, False, True, True])
    chunk.symlink_to(ANNEXED)
    with pytest.raises(md.DataError, match="a link leads to no file") as caught:
        md.open_dataset(store).load()
    assert caught.value.file == str(chunk)
