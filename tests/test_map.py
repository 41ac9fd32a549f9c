"""``Dataset.map``: fields that functions compute, compared with NumPy on all samples."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from matex_data import Dataset, FieldNotFound, FormatError, PartitionError, concat, merge, open_dataset
from matex_data.errors import FunctionError
from tests.support.ranks import Pool

SHAPE = (4, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with two files of 70 and 50 numbered images, and measurements that are missing at times."""
    folder = tmp_path_factory.mktemp("map")
    number = np.arange(120)
    for name, part in (("0.h5", number[:70]), ("1.h5", number[70:])):
        with h5py.File(folder / name, "w") as file:
            image = np.broadcast_to(part[:, None, None], (len(part), *SHAPE)).astype("u1")
            file.create_dataset("image", data=image, chunks=(8, *SHAPE), compression="gzip")
            file["number"] = part
            file["measured"] = np.where(part % 3 == 0, np.nan, part).astype("f4")
            file["unused"] = np.zeros((len(part), 1000))
    return str(folder)


def _open(comm: MPI.Intracomm, folder: str, **options: Any) -> Dataset:
    return open_dataset(folder, comm=comm, **{"inputs": "image", "targets": "number", **options})


def noisy(arrays: dict[str, Any], seeds: Any) -> dict[str, Any]:
    """Add a random number below 100 to each image."""
    assert len(seeds) == len(arrays["image"])
    noise = np.array([np.random.default_rng(seed).integers(0, 100) for seed in seeds])
    return {"image": arrays["image"].astype("f4") + noise[:, None, None].astype("f4")}


def _noisy(data: Dataset) -> Dataset:
    return data.map(noisy, schema={"image": (SHAPE, "f4")}, fields=["image"], seed=5)


def doubled(arrays: dict[str, Any]) -> Any:
    """Return twice the image."""
    return arrays["image"] * np.float32(2)


def _epochs(comm: MPI.Intracomm, folder: str, shuffle: Any, cache: Any, start: Any) -> Any:
    """Return this rank's images and numbers of each batch of two epochs, and the state of the second one."""
    data = _noisy(_open(comm, folder, cache=cache)).map(doubled, schema={"image": (SHAPE, "f4")}, fields=["image"])
    train, _ = data.split(0.8, 0.2, seed=3, stratify="number")
    batches = train.batches(24, shuffle=shuffle, seed=2, start=start)
    return [(x[:, 0, 0].copy(), y.copy()) for _ in range(2) for x, y in batches], batches.state(5)


@pytest.mark.parametrize(("shuffle", "cache"), [(False, None), (True, None), ("global", None), (True, "memory")])
def test_random_numbers_of_samples_do_not_depend_on_ranks(folder: str, pool: Pool, shuffle: Any, cache: Any) -> None:
    expected, state = _epochs(MPI.COMM_SELF, folder, shuffle, cache, None)
    for (first, numbers), (second, again) in zip(expected[:4], expected[4:], strict=True):
        for images, of in ((first, numbers), (second, again)):
            noise = images / 2 - of
            assert (noise >= 0).all() and (noise < 100).all() and len(set(noise.tolist())) > 10
    one, two = (
        dict(zip(*map(np.concatenate, (n, x)), strict=True))
        for x, n in (zip(*expected[:4], strict=True), zip(*expected[4:], strict=True))
    )
    assert sum(one[number] == two[number] for number in one) < 10  # each epoch draws anew
    by_rank = pool.run(_epochs, folder, shuffle, cache, state)
    for step, (images, numbers) in enumerate(expected[5:]):
        for at, whole in ((0, images), (1, numbers)):
            np.testing.assert_array_equal(np.concatenate([batches[step][at] for batches, _ in by_rank]), whole)


def statistics_of(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return a sum, a list and a text of each sample, from the image and its number."""
    number = arrays["number"]
    return {
        "total": arrays["image"].sum((1, 2), dtype="i8"),
        "list": [np.arange(n % 5, dtype="f4") for n in number],
        "text": np.array([f"n{n}" for n in number]),
    }


DECLARED = {"total": "i8", "list": ((None,), "f4"), "text": "U8"}


def _new_fields(comm: MPI.Intracomm, folder: str) -> None:
    data = _open(comm, folder).map(statistics_of, schema=DECLARED, inputs=["total", "list", "text"], targets="number")
    for shuffle in (False, True, "global"):
        for x, y in data.batches(24, shuffle=shuffle, seed=1):
            np.testing.assert_array_equal(x["total"], y % 256 * 16)
            assert [len(values) for values in x["list"]] == (y % 5).tolist()
            assert [text.decode() for text in x["text"]] == [f"n{n}" for n in y]
    assert data.statistics("total").mean == pytest.approx(np.mean(np.arange(120) * 16))
    own = data.load()["total"]
    assert comm.allreduce(int(own.sum())) == sum(range(120)) * 16
    x, y = data[[100, 3]]
    assert x["total"].tolist() == [1600, 48]
    assert y.tolist() == [100, 3]
    assert data.split(0.5, 0.5, stratify="total")[0].value_counts("total")[0] == 1
    both = concat([data, data])
    assert both[[5, 125]][0]["total"].tolist() == [80, 80]
    merged = merge(open_dataset(folder, inputs="measured", comm=comm), data, on="number")
    for x, y in merged.batches(24, shuffle=True, seed=4):
        np.testing.assert_array_equal(x["total"], y * 16)
        np.testing.assert_array_equal(x["measured"], np.where(y % 3, y, np.nan))


def test_new_fields_in_all_ways_to_samples(folder: str, pool: Pool) -> None:
    pool.run(_new_fields, folder, timeout=100)


def test_bytes_are_those_of_the_fields_in_use(folder: str) -> None:
    data = open_dataset(folder, inputs=["measured", "number"])
    assert "unused" not in data.schema
    sums = data.map(lambda a: a["number"] * 2, schema={"twice": "i8"}, fields=["number"], inputs="twice")
    assert [x.tolist() for x in sums.batches(120)] == [list(range(0, 240, 2))]
    assert sums.profile.bytes == 120 * 8


def test_the_function_gets_what_missing_replaces(folder: str) -> None:
    data = open_dataset(folder, inputs=["measured", "measured_mask", "number"], missing="mask")
    schema = {"present": "?", "value": "f4"}
    function = lambda a: {"present": a["measured_mask"].copy(), "value": a["measured"] + 1}  # noqa: E731
    (x,) = data.map(function, schema=schema, fields=["measured", "measured_mask"]).batches(120)
    missing = x["number"] % 3 == 0
    np.testing.assert_array_equal(x["present"], ~missing)
    np.testing.assert_array_equal(x["measured_mask"], ~missing)
    np.testing.assert_array_equal(x["value"], np.where(missing, 0, x["number"]) + 1)
    replaced = data.map(lambda a: {"measured": a["measured"] * 0 - 1}, schema={"measured": "f4"}, fields=["measured"])
    (x,) = replaced.batches(120)
    assert (x["measured"] == -1).all()
    np.testing.assert_array_equal(x["measured_mask"], ~missing)


def test_windows(folder: str) -> None:
    data = open_dataset(folder, inputs="number", window=5, lead=3, horizon=1)
    mean = data.map(lambda a: {"number": a["number"].mean(1)}, schema={"number": "f8"}, fields=["number"])
    x, y = mean[:]
    np.testing.assert_array_equal(x + 5, y[:, 0])
    train, valid = mean.split(0.5, 0.5)
    assert len(train) + len(valid) < len(mean)  # windows that share rows stay apart


def _fails_late(arrays: dict[str, Any]) -> Any:
    if (arrays["number"] == 100).any():
        raise ValueError("no hundred")
    return arrays["number"]


def _fails_in_epoch(arrays: dict[str, Any], seeds: Any) -> Any:
    return _fails_late(arrays)


def _failure(comm: MPI.Intracomm, folder: str, shuffle: Any, function: Any, **options: Any) -> str:
    data = _open(comm, folder, **options).map(function, schema={"number": "i8"}, fields=["number"])
    try:
        for _ in data.batches(24, shuffle=shuffle, seed=1):
            pass
    except FunctionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("shuffle", [True, "global"])
def test_an_error_of_the_function_is_that_of_all_ranks(folder: str, pool: Pool, shuffle: Any) -> None:
    errors = pool.run(_failure, folder, shuffle, _fails_late, on_error="skip" if shuffle is True else "raise")
    assert len(set(errors)) == 1
    assert "_fails_late() of map() raises an error, given samples of rows" in errors[0]
    assert "1.h5" in errors[0] and "ValueError: no hundred" in errors[0]
    from_memory = pool.run(_failure, folder, shuffle, _fails_in_epoch, cache="memory" if shuffle is True else None)
    assert len(set(from_memory)) == 1
    assert "_fails_in_epoch() of map() raises an error" in from_memory[0] and "no hundred" in from_memory[0]


WRONG = {
    "dtype": (lambda a: a["number"] * 1.0, "found: float64 of shape (4,)"),
    "shape": (lambda a: a["image"], "expected: int64 of shape (4,), for 4 samples"),
    "length": (lambda a: a["number"][:2], "found: int64 of shape (2,)"),
    "other": (lambda a: {"b": a["number"]}, "found: ['b']"),
    "nothing": (lambda a: None, "returns no dict"),
}


@pytest.mark.parametrize("case", WRONG)
def test_other_results_than_declared(folder: str, case: str) -> None:
    function, text = WRONG[case]
    data = open_dataset(folder, inputs="image", targets="number").map(function, schema={"a": "i8"})
    with pytest.raises(FunctionError) as caught:
        data[:4]
    assert text in str(caught.value)
    assert "field 'a'" in str(caught.value) or case in ("other", "nothing")


def test_arguments(folder: str) -> None:
    data = open_dataset(folder, inputs="image", targets="number")
    with pytest.raises(FieldNotFound, match="'imag'"):
        data.map(doubled, fields=["imag"])
    with pytest.raises(FormatError, match="not understood"):
        data.map(doubled, schema={"a": "no dtype"})
    with pytest.raises(FieldNotFound, match="'b'"):
        data.map(doubled, schema={"a": "i8"}, inputs="b")
    with pytest.raises(PartitionError, match="joined after map"):
        concat([_noisy(data), _noisy(data)]).batches(20, shuffle="global")
    state = _noisy(data).batches(30, shuffle=True, seed=1).state(1)
    with pytest.raises(PartitionError, match="digest"):
        data.map(noisy, schema={"image": (SHAPE, "f4")}, fields=["image"], seed=6).batches(
            30, shuffle=True, start=state
        )


def test_pickles_need_a_function_of_a_module(folder: str, tmp_path: Path) -> None:
    data = _noisy(open_dataset(folder, inputs="image", targets="number"))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(data))[7][0], data[7][0])
    local = data.map(lambda a: a["image"] * 2, schema={"image": (SHAPE, "f4")}, fields=["image"])
    assert local[7][0][0, 0] == 2 * data[7][0][0, 0]
    with pytest.raises(pickle.PicklingError, match="function of a module"):
        pickle.dumps(local)


def _undeclared(comm: MPI.Intracomm, folder: str) -> Any:
    calls: list[int] = []

    def of_image(arrays: dict[str, Any]) -> dict[str, Any]:
        calls.append(len(arrays["image"]))
        mean = arrays["image"].mean(axis=(1, 2))
        return {"mean": mean.astype("f4"), "kind": np.where(mean > 60, "high", "low"), "rows": arrays["image"][:, 0]}

    data = _open(comm, folder).map(of_image, inputs=["mean", "kind", "rows"])
    assert calls == ([1] if comm.rank == 0 else [])
    return {name: (field.shape, str(field.dtype)) for name, field in data.schema.items()}, data.load()


@pytest.mark.rank_counts(1, 3)
def test_what_a_function_returns_need_not_be_declared(folder: str, pool: Pool) -> None:
    schemas, loaded = zip(*pool.run(_undeclared, folder), strict=True)
    assert list(schemas) == [{"mean": ((), "float32"), "kind": ((), "object"), "rows": ((4,), "uint8")}] * pool.size
    found = {name: np.concatenate([part[name] for part in loaded]) for name in ("mean", "kind", "rows")}
    number = np.arange(120)
    np.testing.assert_array_equal(found["mean"], number)
    np.testing.assert_array_equal(found["rows"], np.tile(number[:, None], 4))
    assert found["kind"].tolist() == [b"high" if n > 60 else b"low" for n in number]


UNDECLARED = {
    "an error": (lambda arrays: 1 / 0, "raises an error"),
    "nothing": (lambda arrays: None, "returns no dict"),
    "lists": (lambda arrays: {"x": np.array([np.arange(3), None], object)[:1]}, "one sample does not tell"),
    "a number": (lambda arrays: {"x": 3.0}, "one sample does not tell"),
}


def _undeclared_error(comm: MPI.Intracomm, folder: str, case: str) -> None:
    with pytest.raises(FunctionError, match=UNDECLARED[case][1]):
        _open(comm, folder).map(UNDECLARED[case][0])


@pytest.mark.rank_counts(2)
@pytest.mark.parametrize("case", UNDECLARED)
def test_what_one_sample_does_not_tell_is_an_error_of_all_ranks(folder: str, pool: Pool, case: str) -> None:
    pool.run(_undeclared_error, folder, case)


SPECIES = {"c": np.array(["a", "b", "b", "", "c", "a"]), "x": np.arange(6.0)}


def raised(arrays: dict[str, Any]) -> dict[str, Any]:
    return {**arrays, "x": arrays["x"] + 1}


def drawn(arrays: dict[str, Any], seeds: Any) -> dict[str, Any]:
    return {**arrays, "x": arrays["x"] + seeds % 2}


@pytest.mark.parametrize("function", [raised, drawn])
@pytest.mark.parametrize("options", [{"one_hot": "c"}, {"dtype": {"c": "category"}}])
def test_fields_that_are_passed_through_keep_their_attributes(options: Any, function: Any) -> None:
    data = open_dataset(SPECIES, inputs=["c", "x"], comm=MPI.COMM_SELF, **options)
    mapped = data.map(function)
    assert mapped.schema["c"].attributes == data.schema["c"].attributes
    assert mapped.class_weights("c") == data.class_weights("c") == {0: 5 / 6, 1: 5 / 6, 2: 5 / 3}
    assert len(mapped.where("c == 'b'")) == 2
    np.testing.assert_array_equal(mapped.load()["c"], data.load()["c"])
    batches = [batch["c"].copy() for batch in mapped.batches(3, shuffle="global", seed=1)]
    assert sorted(np.concatenate(batches).tolist()) == sorted(data.load()["c"].tolist())
    with pytest.raises(FormatError, match="do not agree on 'categories' of 'c'"):
        others = {**SPECIES, "c": np.array(["a", "b", "z"] * 2)}
        concat([mapped, open_dataset(others, inputs=["c", "x"], comm=MPI.COMM_SELF, **options).map(function)])


def test_times_that_are_passed_through_are_times_and_changed_ones_are_numbers() -> None:
    times = {"time": np.array(["2020-01-05", "2020-02-05", "2020-02-06"], "M8[D]"), "x": np.array([1.0, 2.0, 4.0])}
    data = open_dataset(times, inputs=["time", "x"], comm=MPI.COMM_SELF)
    assert {month: one.mean for month, one in data.map(raised).statistics("x", by="month").items()} == {1: 2, 2: 4}
    assert [len(part) for part in data.map(raised).split(at=["2020-02-01"], along="time")] == [1, 2]

    def later(arrays: dict[str, Any]) -> dict[str, Any]:
        arrays["time"] += 1  # in place
        return arrays

    assert not data.map(later).schema["time"].attributes


@pytest.mark.parametrize("texts", [["A", "B", "B"], [b"A", "B", "B"], ["A", "B", "ü"]])
def test_texts_in_arrays_of_objects_are_texts(texts: list[Any]) -> None:
    data = open_dataset({"s": np.array(["a", "b", "c"]), "x": np.arange(3)}, inputs=["s", "x"], comm=MPI.COMM_SELF)
    mapped = data.map(lambda arrays: {**arrays, "s": np.array(texts, object)[arrays["x"]]})
    assert len(mapped.where("s == 'B'")) == texts.count("B")
    assert mapped.load()["s"].tolist() == [text.encode() if isinstance(text, str) else text for text in texts]
    numbers = open_dataset({"s": np.array(["A", "B", "Z"]), "y": np.arange(3)}, inputs=["s", "y"], comm=MPI.COMM_SELF)
    assert len(merge(mapped, numbers, on="s", how="left")) == 3


def test_objects_that_are_no_texts_are_an_error() -> None:
    data = open_dataset({"s": np.array(["a", ""])}, comm=MPI.COMM_SELF)
    mapped = data.map(lambda arrays: {"s": np.array([None] * len(arrays["s"]), object)})
    with pytest.raises(FunctionError, match=r"other objects than texts(.*\n)*.*NoneType"):
        mapped.load()


def test_fields_that_nobody_gets_are_named(folder: str) -> None:
    data = _open(MPI.COMM_SELF, folder)
    with pytest.warns(UserWarning, match="map adds the fields img, of which none is among the inputs"):
        data.map(lambda arrays: {"img": arrays["image"]}, inputs="image", schema={"img": (SHAPE, "u1")})


def _split(comm: MPI.Intracomm, folder: str, way: str) -> list[str]:
    """Return the errors of calls."""
    data = _open(comm, folder)
    if way == "split":
        data, _ = data.split(0.8, 0.2, seed=comm.rank)
    elif way == "concat":
        data = concat([data, data] if comm.rank else [data, data.split(0.5, 0.5, seed=1)[0]])
    else:
        data, _ = data.split(0.5, 0.5, seed=1)[:: 1 - 2 * comm.rank]
    found = []
    for call in (
        lambda: data.batches(10, shuffle=True, seed=1),
        data.load,
        lambda: data.load(fields=["number"]),
        lambda: data.statistics("number"),
    ):
        with pytest.raises(PartitionError) as caught:
            call()
        found.append(str(caught.value))
    return found


@pytest.mark.rank_counts(2)
@pytest.mark.parametrize("way", ["split", "concat", "part"])
def test_ranks_with_other_samples_are_an_error(pool: Pool, folder: str, way: str) -> None:
    """Their shares would overlap, and leave samples out."""
    first, second = pool.run(_split, folder, way)
    assert all("differ between the ranks" in error for error in (first[0], second[0]))
    assert all("do not read the same samples" in error for error in first[1:] + second[1:])
    assert all("split with the same seed=" in error for error in first + second)
