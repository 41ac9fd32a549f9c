"""MATLAB 7.3 files: written by hdf5storage, and real ones of MATLAB, against mat73."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import h5py
import hdf5storage
import mat73
import numpy as np
import pytest
from mpi4py import MPI

from matex_data.errors import DataError, FieldNotFound, FormatError
from matex_data.opening.open import open_dataset
from matex_data.readers.hdf5.reader import index
from tests.support.corpus import CORPUS, needs_corpus
from tests.support.ranks import Pool
from tests.support.serial import every_row, random_rows, same

FILES = sorted((CORPUS / "hdf5" / "matlab").glob("*.mat"))
ROWS = 36
RANDOM = np.random.default_rng(2)
TEXTS = [f"té{i}" * (i % 3) for i in range(ROWS)]
CELL = np.empty((ROWS, 1), object)
CELL[:, 0] = TEXTS
ARRAYS: dict[str, Any] = {
    "cube": RANDOM.normal(size=(ROWS, 4, 3)),
    "deep": RANDOM.integers(0, 99, (ROWS, 2, 3, 4)).astype("u2"),
    "matrix": RANDOM.normal(size=(ROWS, 5)).astype("f4"),
    "column": np.arange(ROWS, dtype="i8").reshape(ROWS, 1),
    "flags": RANDOM.random((ROWS, 2)) < 0.5,
    "z": RANDOM.normal(size=(ROWS, 2)) + 1j * RANDOM.normal(size=(ROWS, 2)),
    "letters": np.array([[f"{i:03d}é"] for i in range(ROWS)]),
    "inner": {"a": np.arange(ROWS * 2.0).reshape(ROWS, 2), "note": "units of the inner array"},
    "number": 3.0,
    "text": "a text",
    "nothing": np.zeros((0, 3)),
}
FIELDS = {"cube", "deep", "matrix", "column", "flags", "z", "letters", "inner/a"}


@pytest.fixture(scope="module", params=["contiguous", "compressed"])
def file(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    path = tmp_path_factory.mktemp("matlab") / "a.mat"
    options = {"compress": request.param == "compressed", "compress_size_threshold": 0}
    hdf5storage.savemat(str(path), ARRAYS, format="7.3", oned_as="row", **options)
    return path


def expected(name: str) -> Any:
    values = ARRAYS["inner"]["a"] if name == "inner/a" else ARRAYS[name]
    if name == "letters":
        return np.array([text.encode() for text in values[:, 0]], object)
    return values[:, 0] if values.shape[1:] == (1,) else values


def test_arrays_have_the_axes_of_matlab(file: Path) -> None:
    found = index(str(file))
    assert set(found.fields) == FIELDS and len(found) == ROWS
    for name in FIELDS:
        values, field = expected(name), found.fields[name]
        assert (field.shape, field.dtype) == (values.shape[1:], values.dtype)
        assert same(every_row(found, name), values)
        for _ in range(3):
            rows, numbers = random_rows(found, name, RANDOM)
            assert same(rows, values[numbers])


@pytest.mark.parametrize("axis", [1, 2, -1, -2])
def test_samples_along_another_axis(file: Path, axis: int) -> None:
    for name in ("cube", "deep", "matrix", "flags", "z"):
        values = ARRAYS[name]
        if axis >= values.ndim:
            with pytest.raises(FormatError, match=f"too few axes(.|\n)*{name}|{name}(.|\n)*too few axes"):
                index(str(file), [name], sample_axis=axis)
            continue
        assert same(every_row(index(str(file), [name], sample_axis=axis), name), np.moveaxis(values, axis, 0)), name
    assert same(every_row(index(str(file), ["column"], sample_axis=axis), "column"), expected("column"))
    assert same(every_row(index(str(file), ["letters"], sample_axis=axis), "letters"), expected("letters"))


@pytest.mark.parametrize("stored", [{}, {"chunks": (2, 3, 2), "compression": "gzip"}], ids=["contiguous", "chunked"])
def test_samples_of_plain_hdf5_along_another_axis(tmp_path: Path, pool: Pool, stored: dict[str, Any]) -> None:
    values, labels = RANDOM.normal(size=(3, 4, 12)), np.arange(12)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=values, **stored)
        file["y"] = labels
        layout = h5py.VirtualLayout((3, 4, 12), "f8")
        layout[...] = h5py.VirtualSource(file["x"])
        file.create_virtual_dataset("v", layout)
    for batches in pool.run(_read, str(tmp_path / "a.h5"), True, sample_axis=-1):
        for batch in batches:
            assert same(batch["x"], np.moveaxis(values, -1, 0)[batch["y"]])
            assert same(batch["v"], batch["x"])
    with pytest.raises(FormatError, match="sample_axis="):
        index(str(tmp_path / "a.h5"), sample_axis=1, sample="file")
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file["table"] = np.zeros((2, 4), [("a", "f4"), ("b", "i4", 3)])
    assert index(str(tmp_path / "a.h5"), ["table"], sample_axis=-1).fields["table"].shape == (2,)
    with pytest.raises(FormatError, match="along the first axis"):
        index(str(tmp_path / "a.h5"), ["table/a"], sample_axis=-1)


def _read(comm: Any, path: str, shuffle: bool, **options: Any) -> list[dict[str, Any]]:
    data = open_dataset(path, comm=comm, **options)
    return list(data.batches(12, shuffle=shuffle, seed=3 if shuffle else None))


@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_on_every_number_of_ranks(file: Path, pool: Pool, shuffle: bool) -> None:
    by_rank = pool.run(_read, str(file), shuffle)
    batches = [{name: np.concatenate([rank[i][name] for rank in by_rank]) for name in FIELDS} for i in range(3)]
    for batch in batches:
        for name in FIELDS:
            assert same(batch[name], expected(name)[batch["column"]])
    assert sorted(np.concatenate([batch["column"] for batch in batches]).tolist()) == list(range(ROWS))


def test_single_values_by_name(file: Path) -> None:
    assert every_row(index(str(file), ["number"]), "number").tolist() == [3.0]
    assert every_row(index(str(file), ["text"]), "text").tolist() == [b"a text"]
    with pytest.raises(FormatError, match=r"empty(.|\n)*0 x 3"):
        index(str(file), ["nothing"])


def test_columns_of_hdf5_are_no_columns_of_matlab(file: Path) -> None:
    with pytest.raises(FieldNotFound):
        index(str(file), ["matrix/0"])
    with pytest.raises(FieldNotFound):
        index(str(file), ["z/real"])


def test_cells_of_texts(tmp_path: Path) -> None:
    path = tmp_path / "a.mat"
    mixed = np.empty((ROWS, 1), object)
    mixed[:, 0] = ["text", *range(ROWS - 1)]
    pairs = np.empty((ROWS, 2), object)
    pairs[:, 0], pairs[:, 1] = TEXTS, TEXTS[::-1]
    numbers = np.empty((ROWS, 1), object)
    numbers[:, 0] = [np.arange(i) for i in range(ROWS)]
    arrays = {"cell": CELL, "mixed": mixed, "pairs": pairs, "numbers": numbers}
    hdf5storage.savemat(str(path), arrays, format="7.3", oned_as="row")
    found = index(str(path), ["cell", "pairs"])
    assert every_row(found, "cell").tolist() == [text.encode() for text in TEXTS]
    rows, order = random_rows(found, "pairs", RANDOM)
    assert [[a.decode(), b.decode()] for a, b in rows] == pairs[order].tolist()
    ragged = index(str(path), ["numbers"])
    assert [row.tolist() for row in every_row(ragged, "numbers")] == [list(range(i)) for i in range(ROWS)]
    with pytest.raises(DataError, match=r"elements that are no texts(.|\n)*int64"):
        every_row(index(str(path), ["mixed"]), "mixed")
    assert set(index(str(path)).fields) == {"cell", "pairs", "mixed", "numbers"}


def test_arrays_that_h5py_marks_as_matlab_does(tmp_path: Path) -> None:
    path = tmp_path / "a.mat"
    values = RANDOM.normal(size=(ROWS, 4, 3))
    with h5py.File(path, "w", userblock_size=512) as file:
        made = file.create_dataset("x", data=values.T, chunks=(2, 3, 7), compression=4)
        made.attrs["MATLAB_class"] = np.bytes_("double")
        sparse = file.create_group("s")
        sparse.attrs.update({"MATLAB_class": np.bytes_("double"), "MATLAB_sparse": np.uint64(5)})
        sparse["data"], sparse["ir"], sparse["jc"] = np.ones(2), np.arange(2), np.arange(6)
        made = file.create_dataset("when", data=np.zeros((1, 6), "u4"))
        made.attrs.update({"MATLAB_class": np.bytes_("datetime"), "MATLAB_object_decode": np.int32(3)})
    path.write_bytes(b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM" + path.read_bytes()[128:])
    with pytest.warns(UserWarning, match="sparse matrix") as caught:
        data = open_dataset(path, comm=MPI.COMM_SELF)
    assert "'when'" in str(caught[0].message) and "datetime" in str(caught[0].message)
    assert list(data.schema) == ["x"] and same(data.load()["x"], values)


@needs_corpus
def test_files_of_matlab_against_mat73() -> None:
    compared = 0
    for path in FILES:
        with warnings.catch_warnings(), h5py.File(path) as file:
            warnings.simplefilter("ignore")
            loaded = mat73.loadmat(str(path), verbose=False)
            names: list[str] = []
            file.visititems(lambda name, item, to=names: to.append(name) if isinstance(item, h5py.Dataset) else None)
            for name in names:
                kind = file[name].attrs.get("MATLAB_class")
                if name.startswith("#") or kind not in (b"double", b"single", b"logical"):
                    continue
                values: Any = loaded
                for word in name.split("/"):
                    values = values[word] if isinstance(values, dict) else None
                if values is None or file[name].attrs.get("MATLAB_empty", 0) != 0:
                    continue
                found = index(str(path), [name])
                shape = file[name].shape[::-1]
                assert len(found) == shape[0]
                assert same(every_row(found, name).reshape(shape), np.reshape(values, shape))
                compared += 1
    assert compared > 10
