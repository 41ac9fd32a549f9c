"""Files and groups as samples, on one rank and on three: dense where the shapes agree, else ragged."""

import gc
import json
import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.io
import tifffile
from PIL import Image

import matex_data as md
from matex_data.readers.csv.rows import CsvRows
from tests.support.loading import check_samples
from tests.support.ranks import Pool

pytestmark = pytest.mark.rank_counts(1, 3)

RNG = np.random.default_rng(5)
MOLECULES = 13


def test_tables_of_equal_and_of_other_lengths(pool: Pool, tmp_path: Path) -> None:
    frames = [pd.DataFrame({"t": np.arange(n) / 2, "n": np.arange(n) + 7}) for n in (3, 5, 5, 2, 9, 1, 4)]
    for number, frame in enumerate(frames):
        frame.to_csv(tmp_path / f"log{number}.csv", index=False)
        frame[:1].to_parquet(tmp_path / f"log{number}.parquet")
    wanted = {name: [frame[name].to_numpy() for frame in frames] for name in ("t", "n")}
    check_samples(pool, str(tmp_path / "*.csv"), wanted, {"t": (None,), "n": (None,)}, sample="file")
    first = {name: [values[:1] for values in arrays] for name, arrays in wanted.items()}
    check_samples(pool, str(tmp_path / "*.parquet"), first, {"t": (1,), "n": (1,)}, sample="file")


def _numbers(comm: Any, path: str) -> list[list[int]]:
    return [sample.tolist() for sample in md.open_dataset(path, sample="file", inputs="n", comm=comm)[:]]


def test_more_ranks_than_tables(pool: Pool, tmp_path: Path) -> None:
    for rows in (1, 2):
        (tmp_path / f"{rows}.csv").write_text("n\n" + "".join(f"{row}\n" for row in range(rows)))
    assert all(found == [[0], [0, 1]] for found in pool.run(_numbers, str(tmp_path), timeout=60))


def test_arrays_of_other_lengths_and_numbers(pool: Pool, tmp_path: Path) -> None:
    images = [RNG.normal(size=(4, 3 + number % 2)) for number in range(7)]
    for number, image in enumerate(images):
        content = {"image": image, "label": np.int64(number), "axis": np.arange(3.0)}
        np.savez(tmp_path / f"a{number}.npz", **content)
        scipy.io.savemat(tmp_path / f"a{number}.mat", content)
        with h5py.File(tmp_path / f"a{number}.h5", "w") as file:
            for name, value in content.items():
                file[name] = value
            file["person"] = f"subject {number}"
    wanted = {"image": images, "label": list(range(7)), "axis": [np.arange(3.0)] * 7}
    shapes: dict[str, Any] = {"image": (4, None), "label": (), "axis": (3,)}
    for kind in ("npz", "mat", "h5"):
        persons = {"person": [f"subject {number}".encode() for number in range(7)]} if kind == "h5" else {}
        more: dict[str, Any] = {"person": ()} if kind == "h5" else {}
        check_samples(pool, str(tmp_path / f"*.{kind}"), wanted | persons, shapes | more, sample="file")


@pytest.mark.parametrize("kind", [int, float])
def test_a_table_without_a_number_has_as_many_missing_ones(tmp_path: Path, kind: type) -> None:
    """Also beside tables of integers, which have a missing one then, and texts, which are read with them."""
    tables = [[kind(1)], [None, None, None], [kind(2), kind(3)], [0.5, 1.5]]
    for number, column in enumerate(tables):
        rows = ({"x": x, "s": str(x)} for x in column)
        (tmp_path / f"{number}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for chosen in ([0, 1, 2], [1, 0, 2, 3], [2, 1], [1, 3], [1, 2, 1]):
        found = md.open_dataset([tmp_path / f"{number}.jsonl" for number in chosen], sample="file").load()
        for number, x, s in zip(chosen, found["x"], found["s"], strict=True):
            np.testing.assert_array_equal(x, np.array(tables[number], float))
            assert s.tolist() == [str(x).encode() for x in tables[number]]


def _molecules(path: Path) -> dict[str, list[Any]]:
    """Write a file as ANI-1x is: a group for each molecule, of so many conformations and atoms."""
    wanted: dict[str, list[Any]] = {"coordinates": [], "energy": [], "forces": [], "smiles": []}
    with h5py.File(path, "w") as file:
        for number in range(MOLECULES):
            shape = (1 + number % 4, 2 + number % 3)
            values = {
                "coordinates": RNG.normal(size=(*shape, 3)).astype("f4"),
                "energy": RNG.normal(size=shape[:1]),
                "forces": RNG.normal(size=(*shape, 3)),
                "smiles": f"C{number}".encode(),
            }
            group = file.create_group(f"C{number}")
            for name, value in values.items():
                packed = {"compression": "gzip"} if name == "forces" else {}
                group.create_dataset(name, data=value, **packed)
                wanted[name].append(value)
    return wanted


def test_molecules_as_groups(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "ani.h5"
    wanted = _molecules(path)
    several = (None, None, 3)
    shapes = {"coordinates": several, "energy": (None,), "forces": several, "smiles": ()}
    check_samples(pool, str(path), wanted, shapes, sample="group", index=str(tmp_path / "stored"))
    check_samples(pool, str(path), wanted, shapes, sample="group", index=str(tmp_path / "stored"))


def test_demonstrations_as_groups(pool: Pool, tmp_path: Path) -> None:
    path, other = tmp_path / "robot.hdf5", tmp_path / "robot2.hdf5"
    wanted: dict[str, list[Any]] = {"actions": [], "obs/eef": []}
    for name, lengths in ((path, [4] * 11), (other, [4, 6])):
        with h5py.File(name, "w") as file:
            file["mask/train"] = np.array([b"demo_0"])
            for number, length in enumerate(lengths):
                for inner in wanted:
                    values = RNG.normal(size=(length, 3))
                    file[f"data/demo_{number}/{inner}"] = values
                    wanted[inner].append(values)
    alone = {name: rows[:11] for name, rows in wanted.items()}
    check_samples(pool, str(path), alone, {"actions": (4, 3), "obs/eef": (4, 3)}, sample="group")
    both = [str(path), str(other)]
    check_samples(pool, both, wanted, {"actions": (None, 3), "obs/eef": (None, 3)}, sample="group", group="data")


def test_groups_that_differ(tmp_path: Path) -> None:
    path = tmp_path / "few.h5"
    with h5py.File(path, "w") as file:
        file["a/x"], file["b/x"], file["b/y"], file["a/z"], file["b/z"] = [1.0], [2.0], [3.0], [1.0], [1]
    with pytest.warns(UserWarning, match="2 fields cannot be read and are left out"):
        assert list(md.open_dataset(path, sample="group").schema) == ["x"]
    with pytest.raises(md.FormatError, match="'a' lacks it"):
        md.open_dataset(path, sample="group", inputs="y")
    with pytest.raises(md.FieldNotFound, match="the file has no such field"):
        md.open_dataset(path, sample="group", inputs="q")
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["x"] = [1.0]
    with pytest.raises(md.FormatError, match="the file has no groups"):
        md.open_dataset(tmp_path / "rows.h5", sample="group")


def test_a_link_of_a_group_leads_nowhere(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["x"] = [1.0]
    folder = tmp_path / "own"
    folder.mkdir()
    with h5py.File(folder / "few.h5", "w") as file:
        file["a/y"], file["b/y"] = [1.0], [2.0]
        file["a/x"] = h5py.ExternalLink(str(tmp_path / "secret.h5"), "x")
    assert list(md.open_dataset(folder / "few.h5", sample="group").schema) == ["y"]


def test_samples_that_a_format_lacks(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 2)))
    with pytest.raises(md.FormatError, match=r"one of \('file',\), or none"):
        md.open_dataset(tmp_path / "a.npy", sample="iteration")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.zeros(3)
    with pytest.raises(md.FormatError, match=r"one of \('file', 'group'\)"):
        md.open_dataset(tmp_path / "a.h5", sample="particle")
    with pytest.raises(md.DataError, match="sample= is an option of files"):
        md.open_dataset({"x": np.zeros(3)}, sample="file")


def test_files_of_other_axes_are_no_samples_of_one_field(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 2)))
    np.save(tmp_path / "b.npy", np.zeros((3, 2, 2)))
    with pytest.raises(md.FormatError, match="the files do not have the same fields") as caught:
        md.open_dataset(str(tmp_path / "*.npy"), sample="file")
    assert "b.npy" in str(caught.value) and "a.npy" in str(caught.value)


def _warned(comm: Any, paths: str) -> tuple[int, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = md.open_dataset(paths, comm=comm)
    return len(data), [str(warning.message) for warning in caught]


def test_many_small_arrays_say_what_a_sample_is(pool: Pool, tmp_path: Path) -> None:
    for number in range(40):
        np.save(tmp_path / f"{number}.npy", np.full((4, 5), number))
    found = pool.run(_warned, str(tmp_path / "*.npy"), timeout=60)
    assert [length for length, _ in found] == [160] * pool.size
    lines = [line for _, said in found for line in said]
    assert len(lines) == 1 and "4 samples, its rows; sample='file'" in lines[0]


def test_a_table_of_a_file_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        pd.DataFrame({name: np.arange(4) + number for name in "abcdef"}).to_csv(tmp_path / f"{number}.csv", index=False)
    data = md.open_dataset(str(tmp_path / "*.csv"), sample="file")
    parsed: list[int] = []
    before = CsvRows.columns

    def counted(*given: Any) -> Any:
        parsed.append(len(given[2]))
        return before(*given)

    monkeypatch.setattr(CsvRows, "columns", counted)
    assert [values.tolist() for values in data.load()["f"]] == [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5]]
    assert len(parsed) == 3


def test_pictures_and_stacks(tmp_path: Path) -> None:
    planes = RNG.integers(0, 255, (5, 6, 7)).astype("u1")
    for number, plane in enumerate(planes):
        Image.fromarray(plane).save(tmp_path / f"{number}.png")
    assert len(md.open_dataset(tmp_path, sample="file")) == 5
    stacks = tmp_path / "stacks"
    stacks.mkdir()
    for number in range(3):
        tifffile.imwrite(stacks / f"{number}.tif", planes, photometric="minisblack")
    data = md.open_dataset(stacks, sample="file", inputs=["image"])
    assert len(data) == 3 and data.load()["image"].reshape(3, 5, 6, 7).tolist() == [planes.tolist()] * 3


def test_groups_are_no_objects_of_python(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "many.h5", "w") as file:
        for number in range(1500):
            file[f"g{number}/x"], file[f"g{number}/text"] = np.zeros(1 + number % 3), "text"
    md.open_dataset(tmp_path / "many.h5", sample="group", inputs=["x", "text"])  # imports
    gc.collect()
    before = len(gc.get_objects())
    data = md.open_dataset(tmp_path / "many.h5", sample="group", inputs=["x", "text"])
    gc.collect()
    assert len(gc.get_objects()) - before < 500 and len(data) == 1500
