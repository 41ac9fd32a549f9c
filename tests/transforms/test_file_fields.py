"""Fields that follow from the name of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from mpi4py import MPI
from PIL import Image

from matex_data import FormatError, PartitionError, open_dataset
from tests.support.ranks import Pool

ROWS = {"sig_a": 40, "bkg_a": 30, "bkg_b": 26}
LABEL = {"label": {"sig_*": 1, "bkg_*": 0}}
FIELDS = {
    **LABEL,
    "xsec": {"sig_*": 0.5, "bkg_a.h5": 20, "bkg_b.h5": 30.0},
    "sample": {"s*": "signal", "b*": "background"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("samples")
    first = 0
    for name, rows in ROWS.items():
        with h5py.File(found / f"{name}.h5", "w") as file:
            file["x"] = np.arange(first, first + rows, dtype="f4")
        first += rows
    return found


def expected(folder: Path) -> dict[str, Any]:
    """Return the fields that a loop over the files makes, in the order of their names."""
    label, xsec, sample, x = [], [], [], []
    for path in sorted(folder.glob("*.h5")):
        with h5py.File(path) as file:
            rows = file["x"][:]
        is_signal = path.name.startswith("sig_")
        x += rows.tolist()
        label += [int(is_signal)] * len(rows)
        xsec += [0.5 if is_signal else {"bkg_a.h5": 20, "bkg_b.h5": 30}[path.name]] * len(rows)
        sample += [b"signal" if is_signal else b"background"] * len(rows)
    return {"x": np.array(x), "label": np.array(label), "xsec": np.array(xsec), "sample": np.array(sample, object)}


def _load(comm: MPI.Intracomm, folder: Path, **options: Any) -> Any:
    return open_dataset(str(folder / "*.h5"), comm=comm, file_fields=FIELDS, **options).load()


def test_values_follow_the_files(folder: Path, pool: Pool) -> None:
    by_rank = pool.run(_load, folder)
    for name, values in expected(folder).items():
        found = np.concatenate([block[name] for block in by_rank])
        assert found.dtype == (values.dtype if name != "x" else np.float32)
        assert found.tolist() == values.tolist()


def _batches(comm: MPI.Intracomm, folder: Path, start: int) -> list[Any]:
    data = open_dataset(
        str(folder), comm=comm, inputs=["x", "sample"], targets="label", weights="xsec", file_fields=FIELDS
    )
    state = data.state(start) if start else None
    return [
        (x["x"].copy(), x["sample"].copy(), y.copy(), w.copy())
        for x, y, w in data.batches(12, shuffle=True, seed=1, start=state)
    ]


def test_shuffled_batches_go_on_with_the_value_of_their_file(folder: Path, pool: Pool) -> None:
    rows = expected(folder)
    x, *others = (rows[name].tolist() for name in ("x", "sample", "label", "xsec"))
    by_x = dict(zip(x, zip(*others, strict=True), strict=True))
    alone = _batches(MPI.COMM_SELF, folder, 0)
    resumed = pool.run(_batches, folder, 3)
    for step, parts in enumerate(zip(*resumed, strict=True), start=3):
        x, sample, label, weight = (np.concatenate(column) for column in zip(*parts, strict=True))
        assert sorted(x.tolist()) == sorted(alone[step][0].tolist())
        assert [by_x[value] for value in x.tolist()] == list(zip(sample, label.tolist(), weight.tolist(), strict=True))


def test_selection_split_and_statistics(folder: Path) -> None:
    options = {"comm": MPI.COMM_SELF, "inputs": "x", "targets": "label"}
    data = open_dataset(str(folder), file_fields=FIELDS, where="xsec > 1", **options)
    assert len(data) == 56 and set(data.load()["label"].tolist()) == {0}
    whole = open_dataset(str(folder), file_fields=LABEL, **options)
    train, valid = whole.split(0.75, 0.25, seed=1, stratify="label")
    assert train.load()["label"].sum() == 30 and valid.load()["label"].sum() == 10
    assert whole.statistics("label")["label"].mean == pytest.approx(40 / 96)


def test_patterns_of_inputs_do_not_stand_for_them(folder: Path) -> None:
    data = open_dataset(str(folder), comm=MPI.COMM_SELF, inputs="*", targets="label", file_fields=LABEL)
    x, _ = next(iter(data.batches(8)))
    assert list(x) == ["x"]


def test_folders_may_be_named(folder: Path) -> None:
    values = {"day": {f"{folder.name}/*": 1, "elsewhere/*": 2}}
    assert set(open_dataset(str(folder), comm=MPI.COMM_SELF, file_fields=values).load()["day"].tolist()) == {1}


@pytest.mark.parametrize(
    ("values", "kind", "text"),
    [
        ({"label": {"sig_*": 1}}, PartitionError, r"no pattern for a file \(file '.*bkg_a.h5', field 'label'\)"),
        ({"label": {"*": 1, "sig_*": 0}}, PartitionError, r"2 patterns for a file \(file '.*sig_a.h5'"),
        ({"x": {"*": 1}}, FormatError, "a field of this name already"),
        ({"label": {"sig_*": 1, "bkg_*": "no"}}, FormatError, "numbers alone or texts alone"),
        ({"label": {}}, FormatError, "numbers alone or texts alone"),
    ],
)
def test_errors(folder: Path, values: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        open_dataset(str(folder), comm=MPI.COMM_SELF, file_fields=values)


def test_images_of_a_folder_have_one_value(tmp_path: Path) -> None:
    for kind in ("cats", "dogs"):
        (tmp_path / kind).mkdir()
        for number in range(3):
            Image.fromarray(np.full((4, 4), number, np.uint8)).save(tmp_path / kind / f"{number}.png")
    folders = [str(tmp_path / "cats"), str(tmp_path / "dogs")]
    data = open_dataset(folders, file_fields={"kind": {"cats": 0, "dogs": 1}}, comm=MPI.COMM_SELF)
    assert data.load()["kind"].tolist() == [0, 0, 0, 1, 1, 1]
    with pytest.raises(PartitionError, match=r"fits no folder(.|\n)*found: '0.png'(.|\n)*metadata.csv"):
        open_dataset(folders[0], file_fields={"kind": {"0.png": 0, "*": 1}}, comm=MPI.COMM_SELF)
