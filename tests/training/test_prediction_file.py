"""``predict(to=)``: one file with the predictions of all ranks, against pandas and h5py."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest

from tests.support.ranks import Pools

ROWS = 23


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> str:
    path, rng = tmp_path_factory.mktemp("events") / "events.h5", np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file["x"] = rng.normal(size=(ROWS, 3)).astype("f4")
        file["event"] = np.arange(ROWS) + 2**60
        file["name"] = [f"é{i}," for i in range(ROWS)]
        tracks = file.create_dataset("tracks", ROWS, h5py.vlen_dtype("f4"))
        tracks[0] = np.ones(2, "f4")
    return str(path)


def _model(outputs: Any) -> Any:
    import keras

    x = keras.Input((3,))
    return keras.Model(x, outputs(x))


def _one(x: Any) -> Any:
    return x[:, :1] * 2


def _images(x: Any) -> Any:
    import keras

    return {"image": keras.layers.RepeatVector(2)(x), "sum": x[:, 0] + x[:, 1]}


def _write(comm: Any, events: str, folder: str, samples: int) -> None:
    import keras

    import matex_data as md

    data = md.open_dataset(events, inputs="x", comm=comm, where=f"event < {2**60 + samples}")
    assert len(data) == samples
    options: dict[str, Any] = {"comm": comm, "verify": "never", "batch_size": 4}
    for suffix in ("parquet", "csv", "h5"):
        path = Path(folder) / f"one.{suffix}"
        assert md.training.predict(_model(_one), data, to=path, fields=["event", "name"], **options) is None
        assert path.exists()  # on every rank, since the call is collective
    md.training.predict(_model(lambda x: x), data, to=f"{folder}/three.parquet", **options)
    md.training.predict(_model(_images), data, to=f"{folder}/nested.h5", fields=["event"], **options)
    keras.backend.clear_session()


@pytest.mark.parametrize(
    "samples", [pytest.param(ROWS, marks=pytest.mark.slow), 2, pytest.param(0, marks=pytest.mark.slow)]
)
def test_one_file_has_the_predictions_of_all_ranks(samples: int, events: str, ranks: Pools, tmp_path: Path) -> None:
    with h5py.File(events) as file:
        x, event, name = (file[key][:samples] for key in ("x", "event", "name"))
    for size in (1, 2, 3):
        (tmp_path / f".one.csv.{platform.node()}~{2**22 + 1}~0").write_bytes(b"part")  # of a job that was killed
        ranks(size).run(_write, events, str(tmp_path), samples, timeout=120)
        tables = {"parquet": pd.read_parquet(tmp_path / "one.parquet"), "csv": pd.read_csv(tmp_path / "one.csv")}
        for found in tables.values():
            assert list(found) == ["event", "name", "prediction"]
            np.testing.assert_array_equal(found.event, event)
            assert list(found.name) == [text.decode() for text in name]
            np.testing.assert_array_equal(found.prediction.astype("f4"), 2 * x[:, 0])
        with h5py.File(tmp_path / "one.h5") as file:
            np.testing.assert_array_equal(file["prediction"], 2 * x[:, :1])
            assert list(file["name"].asstr()) == [text.decode() for text in name]
        found = pd.read_parquet(tmp_path / "three.parquet")
        np.testing.assert_array_equal(found[["prediction_0", "prediction_1", "prediction_2"]], x)
        with h5py.File(tmp_path / "nested.h5") as file:
            np.testing.assert_allclose(file["image"], np.stack([x, x], axis=1), rtol=1e-6)
            assert file["sum"].shape == (samples,)
        assert len(list(tmp_path.iterdir())) == 5  # no parts


def _write_of_damaged(comm: Any, path: str, to: str) -> None:
    import matex_data as md

    data = md.open_dataset(path, inputs="x", comm=comm, on_error="skip")
    md.training.predict(_model(_one), data, to=to, fields=["event"], comm=comm, verify="never")


def test_fields_are_those_of_the_samples_that_can_be_read(ranks: Pools, tmp_path: Path) -> None:
    path, x = tmp_path / "events.h5", np.random.default_rng(0).normal(size=(ROWS, 3)).astype("f4")
    with h5py.File(path, "w") as file:
        chunk = file.create_dataset("x", data=x, chunks=(5, 3), compression="gzip").id.get_chunk_info(1)
        file["event"] = np.arange(ROWS)
    content = bytearray(path.read_bytes())
    content[chunk.byte_offset + 9] ^= 0xFF
    path.write_bytes(content)
    ranks(2).run(_write_of_damaged, str(path), str(tmp_path / "y.parquet"), timeout=120)
    found = pd.read_parquet(tmp_path / "y.parquet")
    assert found.event.tolist() == [*range(5), *range(10, ROWS)]
    np.testing.assert_array_equal(found.prediction, 2 * x[found.event, 0])


def _refused(comm: Any, events: str, folder: str) -> list[str]:
    import matex_data as md
    from matex_data.training import prediction_file

    data = md.open_dataset(events, inputs="x", comm=comm)
    predict = md.training.predict
    options: dict[str, Any] = {"comm": comm, "verify": "never"}
    save, messages = prediction_file._save, []

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def refuse(error: type[Exception], model: Any, data: Any, **arguments: Any) -> None:
        with pytest.raises(error) as caught:
            predict(_model(model), data, **options, **arguments)
        messages.append(str(caught.value))

    for fields in ("tracks", "nothing"):
        refuse(md.DataError, _one, data, to=f"{folder}/s.csv", fields=[fields])
    refuse(md.PartitionError, _one, data, to=f"{folder}/s.txt")
    refuse(md.PartitionError, _images, data, to=f"{folder}/s.parquet")
    refuse(md.PartitionError, lambda x: {"event": x}, data, to=f"{folder}/s.h5", fields=["event"])
    refuse(md.DataError, _one, data, to=f"{folder}/no/s.h5")
    refuse(TypeError, _one, data, to=f"{folder}/s.h5", gather=True)
    refuse(TypeError, _one, data, fields=["event"])
    refuse(TypeError, _one, data.tf_dataset(3), to=f"{folder}/s.h5")
    if comm.rank == comm.size - 1:
        prediction_file._save = fail
    refuse(md.DataError, _one, data, to=f"{folder}/kept.h5", fields=["event"])
    prediction_file._save = save
    return messages


@pytest.mark.parametrize("size", [1, 3])
def test_an_error_is_the_same_on_all_ranks_and_leaves_no_half_file(
    size: int, events: str, ranks: Pools, tmp_path: Path
) -> None:
    (tmp_path / "kept.h5").write_text("as before")
    found = ranks(size).run(_refused, events, str(tmp_path), timeout=120)
    assert all(messages == found[0] for messages in found)
    assert "tracks" in found[0][0] and "No space left" in found[0][-1] and "event" in found[0][4]
    assert [path.name for path in tmp_path.iterdir()] == ["kept.h5"] and (
        tmp_path / "kept.h5"
    ).read_text() == "as before"


def _joined_slowly(comm: Any, events: str, folder: str) -> bool:
    """Write predictions whose parts take rank 0 longer to join than ranks wait; return whether the file is there."""
    import os
    import time
    from unittest import mock

    import matex_data as md
    from matex_data.training import prediction_file

    join, path = prediction_file._join, Path(folder) / "slow.h5"

    def slowly(*arguments: Any) -> None:
        time.sleep(4)
        join(*arguments)

    data = md.open_dataset(events, inputs="x", comm=comm)
    with mock.patch.object(prediction_file, "_join", slowly), mock.patch.dict(os.environ, MATEX_TIMEOUT="1"):
        md.training.predict(_model(_one), data, to=path, comm=comm, verify="never")
    return path.exists()


def test_ranks_wait_for_the_one_that_joins_the_parts(events: str, ranks: Pools, tmp_path: Path) -> None:
    assert ranks(2).run(_joined_slowly, events, str(tmp_path), timeout=60) == [True, True]


@pytest.mark.parametrize(("most", "count"), [(1500, 3), (1 << 26, 1)])
def test_parts_are_joined_by_the_bytes_that_they_have(most: int, count: int, tmp_path: Path, monkeypatch: Any) -> None:
    """A text counts with its length, however many windows there are."""
    from matex_data.training import prediction_file as pf

    monkeypatch.setattr(pf, "JOINED_BYTES", most)
    windows = [np.array([b"x" * 900, b"%d" % n], object) for n in range(6)]
    with (tmp_path / "part").open("wb") as stream:
        for window in windows:
            pf._save(stream, window)
    joined = [columns["name"] for columns in pf._chunks([tmp_path / "part"], {"name": True})]
    assert len(joined) == count
    assert np.concatenate(joined).tolist() == np.concatenate(windows).tolist()
