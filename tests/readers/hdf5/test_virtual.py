"""Virtual datasets: their sources, those that are missing, and filters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pytest

from matex_data.errors import DataError, FormatError
from matex_data.index.combined import Concatenated
from matex_data.opening.open import open_dataset
from matex_data.readers.hdf5.reader import index
from matex_data.readers.hdf5.rows import Hdf5Rows
from matex_data.readers.hdf5.virtual import SourceFiles, sources_of
from tests.support.launch import run_script
from tests.support.ranks import Pool
from tests.support.serial import every_row, random_rows, read_rows, same

FILES, ROWS = 3, 8
LIBRARY = hdf5plugin.Zfp(reversible=True)
"""Filter that only the HDF5 library undoes."""


def _values() -> np.ndarray[Any, Any]:
    return np.random.default_rng(5).normal(size=(FILES * ROWS, 4))


def _write(folder: Path, prefix: str = "", **options: Any) -> Path:
    """Write a virtual dataset "x" over the files s0.h5, s1.h5, ... of its folder."""
    layout = h5py.VirtualLayout((FILES * ROWS, 4), "f8")
    for i in range(FILES):
        rows = slice(i * ROWS, (i + 1) * ROWS)
        with h5py.File(folder / f"s{i}.h5", "w") as file:
            file.create_dataset("inner/x", data=_values()[rows], chunks=(4, 4), **options)
        layout[rows] = h5py.VirtualSource(f"{prefix}s{i}.h5", "inner/x", (ROWS, 4))
    path = folder / "all.h5"
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("x", layout, fillvalue=-1)
        file["y"] = np.arange(FILES * ROWS)
    return path


def _open(comm: Any, path: str, **options: Any) -> tuple[str, int, Any]:
    try:
        data = open_dataset(path, comm=comm, **options)
    except FormatError as error:
        return str(error), 0, None
    return "", len(data), data.load()["x"]


def test_a_missing_source_is_an_error_on_all_ranks(tmp_path: Path, pool: Pool) -> None:
    path = _write(tmp_path)
    (tmp_path / "s1.h5").unlink()
    for text, _, _ in pool.run(_open, str(path), inputs="x", targets="y"):
        for word in (str(path), "'x'", str(tmp_path / "s1.h5"), "allow_missing_sources=True"):
            assert word in text
    expected = _values()
    expected[ROWS : 2 * ROWS] = -1
    results = pool.run(_open, str(path), allow_missing_sources=True)
    assert {text for text, _, _ in results} == {""}
    assert same(np.concatenate([x for _, _, x in results]), expected)


def test_other_fields_are_read_beside_one_with_a_missing_source(tmp_path: Path) -> None:
    path = _write(tmp_path)
    (tmp_path / "s0.h5").unlink()
    with pytest.warns(UserWarning, match=r"s0\.h5"):
        assert list(index(str(path)).fields) == ["y"]


@pytest.mark.parametrize("options", [{}, LIBRARY], ids=["byte ranges", "library"])
def test_a_source_that_vanishes_is_an_error_where_its_rows_are_read(tmp_path: Path, options: Any) -> None:
    found = index(str(_write(tmp_path, **options)), ["x"])
    assert isinstance(found.files[0].layouts["x"], Hdf5Rows if options else Concatenated)
    (tmp_path / "s2.h5").unlink()
    numbers = np.arange(2 * ROWS + 1)
    assert same(read_rows(found, "x", numbers[:-1], numbers[:-1]), _values()[: 2 * ROWS])
    with pytest.raises(DataError, match=r"missing(.|\n)*s2\.h5"):
        read_rows(found, "x", numbers, numbers)


def test_a_source_without_the_dataset(tmp_path: Path) -> None:
    path = _write(tmp_path)
    with h5py.File(tmp_path / "s1.h5", "r+") as file:
        del file["inner/x"]
    with pytest.raises(FormatError, match=r"'inner/x' in .*s1\.h5"):
        index(str(path), ["x"])
    assert (every_row(index(str(path), ["x"], allow_missing_sources=True), "x")[ROWS : 2 * ROWS] == -1).all()


@pytest.mark.parametrize("allowed", [False, True])
def test_a_source_that_is_damaged(tmp_path: Path, allowed: bool) -> None:
    path = _write(tmp_path)
    (tmp_path / "s1.h5").write_bytes(b"damaged" * 100)
    with pytest.raises(FormatError, match=r"cannot be opened(.|\n)*s1\.h5"):
        index(str(path), ["x"], allow_missing_sources=allowed)


@pytest.mark.parametrize(
    "filters",
    [hdf5plugin.Bitshuffle(cname="lz4"), hdf5plugin.LZ4(), hdf5plugin.Blosc2()],
    ids=lambda options: type(options).__name__,
)
def test_sources_with_filters_of_plugins(tmp_path: Path, pool: Pool, filters: Any) -> None:
    path = _write(tmp_path, **filters)
    results = pool.run(_open, str(path))
    assert same(np.concatenate([x for _, _, x in results]), _values())


WITHOUT_PLUGINS = """
import sys
sys.modules["hdf5plugin"] = None
import h5py, numpy as np, matex_data as md
data = md.open_dataset(sys.argv[1], inputs="x")
x = np.concatenate([batch for batch in data.batches(5, shuffle=True, seed=1, remainder="keep")])
assert not h5py.h5z.filter_avail(int(sys.argv[2]))
print(np.sort(x[:, 0]).tobytes().hex())
"""


@pytest.mark.parametrize("filters", [hdf5plugin.Bitshuffle(cname="lz4"), hdf5plugin.LZ4()], ids=["bitshuffle", "lz4"])
def test_the_codecs_of_this_package_read_the_sources(tmp_path: Path, filters: Any) -> None:
    path = _write(tmp_path, **filters)
    finished = run_script(0, WITHOUT_PLUGINS, str(path), str(filters.filter_id), forked=False)
    assert finished.returncode == 0, finished.stderr
    assert np.array_equal(np.frombuffer(bytes.fromhex(finished.stdout)), np.sort(_values()[:, 0]))


def test_a_damaged_chunk_of_a_source_is_an_error(tmp_path: Path, pool: Pool) -> None:
    path = _write(tmp_path, compression="gzip", fletcher32=True)
    with h5py.File(tmp_path / "s1.h5") as file:
        chunk = file["inner/x"].id.get_chunk_info(1)
    content = bytearray((tmp_path / "s1.h5").read_bytes())
    content[chunk.byte_offset + 9] ^= 255
    (tmp_path / "s1.h5").write_bytes(content)
    for text in pool.run(_read_error, str(path)):
        assert "'x'" in text and str(path) in text and "decode" in text


def _read_error(comm: Any, path: str) -> str:
    with pytest.raises(DataError) as caught:
        list(open_dataset(path, comm=comm, inputs="x").batches(12, shuffle=True, seed=0))
    return str(caught.value)


@pytest.mark.parametrize("shape", ["rows in other order", "columns", "every second row", "converted"])
def test_mappings(tmp_path: Path, shape: str) -> None:
    _write(tmp_path, compression="gzip")
    layout, names = h5py.VirtualLayout((2 * ROWS, 4), "f4" if shape == "converted" else "f8"), ("s1.h5", "s0.h5")
    for i, name in enumerate(names):
        source = h5py.VirtualSource(tmp_path / name, "inner/x", (ROWS, 4))
        if shape == "columns":
            layout[:ROWS, 2 * i : 2 * i + 2] = source[:, 2 * i : 2 * i + 2]
        elif shape == "every second row":
            layout[i::2] = source
        else:
            layout[(1 - i) * ROWS + 2 : (2 - i) * ROWS] = source[2:]
            layout[(1 - i) * ROWS : (1 - i) * ROWS + 2] = source[:2]
    with h5py.File(tmp_path / "mapped.h5", "w") as file:
        file.create_virtual_dataset("x", layout, fillvalue=-1)
    found = index(str(tmp_path / "mapped.h5"), ["x"])
    assert isinstance(found.files[0].layouts["x"], Concatenated) == (shape == "rows in other order")
    with h5py.File(tmp_path / "mapped.h5") as file:
        expected = file["x"][...]
    assert same(every_row(found, "x"), expected)
    rows, numbers = random_rows(found, "x", np.random.default_rng(0))
    assert same(rows, expected[numbers])


def test_members_of_a_virtual_table(tmp_path: Path) -> None:
    table = np.array([(i, i / 2) for i in range(6)], [("a", "i4"), ("b", "f8")])
    layout = h5py.VirtualLayout(table.shape, table.dtype)
    layout[:] = h5py.VirtualSource("source.h5", "t", table.shape)
    with h5py.File(tmp_path / "source.h5", "w") as source, h5py.File(tmp_path / "all.h5", "w") as file:
        source["t"] = table
        file.create_virtual_dataset("t", layout)
    found = index(str(tmp_path / "all.h5"), ["t/a", "t/b"])
    assert all(same(every_row(found, f"t/{name}"), table[name]) for name in table.dtype.names)


def test_numbered_sources(tmp_path: Path) -> None:
    _write(tmp_path)
    path = tmp_path / "numbered.h5"
    endless = h5py.h5s.UNLIMITED
    with h5py.File(path, "w") as file:
        space = h5py.h5s.create_simple((ROWS, 4), (endless, 4))
        space.select_hyperslab((0, 0), (endless, 1), (ROWS, 1), (ROWS, 4))
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_virtual(space, b"s%b.h5", b"inner/x", h5py.h5s.create_simple((ROWS, 4)))
        whole = h5py.h5s.create_simple((ROWS, 4), (endless, 4))
        h5py.h5d.create(file.id, b"x", h5py.h5t.IEEE_F64LE, whole, plist)
    found = index(str(path), ["x"])
    assert same(every_row(found, "x"), _values())
    layout: Any = found.files[0].layouts["x"]
    assert [part.path for part in layout.parts] == [str(tmp_path / f"s{i}.h5") for i in range(FILES)]
    assert [part.rows for part in layout.parts] == [ROWS] * FILES
    with h5py.File(path) as file:
        sources = SourceFiles.of(list(sources_of(file["x"], str(path))))
    assert sources.paths == tuple(str(tmp_path / f"s{i}.h5") for i in range(FILES))
    assert sources.start.tolist() == [0, 8, 16] and sources.stop.tolist() == [8, 16, 24]


@pytest.mark.parametrize("where", ["variable", "absolute", "moved", "behind a link"])
def test_sources_are_found_where_hdf5_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    folder = tmp_path / "sources"
    folder.mkdir()
    path = _write(folder, prefix={"absolute": f"{folder}/", "moved": "/nowhere/"}.get(where, ""))
    moved = tmp_path / "all.h5"
    if where == "behind a link":
        moved.symlink_to(path)
    else:
        path.rename(moved)
    if where in ("variable", "moved"):
        monkeypatch.setenv("HDF5_VDS_PREFIX", f"{tmp_path / 'no'}:{folder}")
    with h5py.File(moved) as file:
        assert same(file["x"][...], _values())
    found = index(str(moved), ["x"])
    assert same(every_row(found, "x"), _values())
    rows, numbers = random_rows(found, "x", np.random.default_rng(0))
    assert same(rows, _values()[numbers])


def test_the_working_directory_is_no_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "sources"
    folder.mkdir()
    moved = _write(folder).rename(tmp_path / "all.h5")
    monkeypatch.chdir(folder)
    with pytest.raises(DataError, match="working directory") as caught:
        index(str(moved), ["x"])
    assert "HDF5_VDS_PREFIX" in str(caught.value.remedy)


ORIGIN = """
import sys
from matex_data import open_dataset
from matex_data.readers.hdf5.reader import index
layout = index(sys.argv[1], ["x"]).files[0].layouts["x"]
print(layout.parts[0].path, open_dataset(sys.argv[1], inputs="x").load()["x"].sum())
"""


def test_the_variable_may_name_the_folder_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "sources").mkdir()
    path = _write(tmp_path / "sources").rename(tmp_path / "all.h5")
    environment = {"HDF5_VDS_PREFIX": "${ORIGIN}/sources"}
    finished = run_script(0, ORIGIN, str(path), env=environment, forked=False)  # HDF5 reads it when it is loaded
    assert finished.returncode == 0, finished.stderr
    source, total = finished.stdout.split()
    assert Path(source).samefile(tmp_path / "sources" / "s0.h5") and float(total) == pytest.approx(_values().sum())


def test_a_virtual_dataset_of_virtual_datasets(tmp_path: Path) -> None:
    _write(tmp_path)
    path = tmp_path / "outer.h5"
    with h5py.File(path, "w") as file:
        layout = h5py.VirtualLayout((FILES * ROWS, 4), "f8")
        layout[...] = h5py.VirtualSource("all.h5", "x", (FILES * ROWS, 4))
        file.create_virtual_dataset("x", layout)
    assert same(every_row(index(str(path), ["x"]), "x"), _values())
    (tmp_path / "s2.h5").unlink()
    for names in (["x"], None):
        with pytest.raises(FormatError, match=r"missing(.|\n)*s2\.h5(.|\n)*HDF5_VDS_PREFIX"):
            index(str(path), names)
