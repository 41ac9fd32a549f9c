"""Random chains of options, and of operations in any order, compared with NumPy and pandas on all samples."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import chain as chained
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
from mpi4py import MPI

from matex_data import Dataset, concat, merge, open_dataset

Samples = dict[str, Any]
"""Array of each field, object arrays of lists."""
CLASSES = 3
PAD = 3
QUICK, ALL = 30, 500  # chains
FOLDERS = ("a", "b", "extra")


def write(folder: Path, seed: int) -> None:
    """Write two data sets of the same fields, of some files each, and one with a further field of the first one."""
    rng = np.random.default_rng(seed)
    first = 0
    for name in FOLDERS[:2]:
        (folder / name).mkdir()
        for number, rows in enumerate((int(rng.integers(8, 24)), int(rng.integers(0, 9)), int(rng.integers(4, 16)))):
            own = first + np.arange(rows)
            with h5py.File(folder / name / f"{number}.h5", "w") as file:
                a = rng.normal(size=rows).round(3)
                file.create_dataset("a", data=np.where(rng.random(rows) < 0.2, np.nan, a), **_stored(rng, rows))
                file.create_dataset("b", data=rng.integers(-50, 50, rows), **_stored(rng, rows))
                file.create_dataset("c", data=(np.arange(rows) % CLASSES).astype("i4"), **_stored(rng, rows))
                file.create_dataset("n", data=own, **_stored(rng, rows))
                file.create_dataset("v", data=rng.normal(size=(rows, 2)).astype("f4"), **_stored(rng, rows))
                counts = rng.integers(0, 5, rows)
                for lists, kind in (("pt", "f4"), ("q", "i4")):
                    values = file.create_dataset(lists, (rows,), h5py.vlen_dtype(np.dtype(kind)))
                    for row, count in enumerate(counts.tolist()):
                        values[row] = rng.integers(0, 9, count).astype(kind)
            first += rows
    (folder / "extra").mkdir()
    with h5py.File(folder / "extra" / "0.h5", "w") as file:
        file["n"] = np.arange(first)[::-1]
        file["z"] = np.arange(first)[::-1] ** 2


def _stored(rng: np.random.Generator, rows: int) -> dict[str, Any]:
    chunked: dict[str, Any] = {"chunks": True, "compression": "gzip"}
    return chunked if rows and rng.random() < 0.5 else {}


def read(folder: Path, name: str) -> Samples:
    """Return the samples of a data set, as h5py reads them."""
    parts = []
    for path in sorted((folder / name).iterdir()):
        with h5py.File(path) as file:
            parts.append({key: file[key][:] for key in file})
    found = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    return {**found, "file": np.repeat([10, 11, 12], [len(part["n"]) for part in parts])}


@dataclass
class Chain:
    """Options of ``open_dataset``, and operations on the data set.

    Parameters
    ----------
    options : the options.
    operations : names of the operations, in order.
    """

    options: dict[str, Any] = field(default_factory=dict)
    operations: list[str] = field(default_factory=list)

    @property
    def has_gaps(self) -> bool:
        """Whether a split leaves out samples."""
        return "window" in self.options

    @classmethod
    def draw(cls, draw: random.Random) -> Chain:
        """Return a random chain of two to five computations."""
        chain = cls()
        shape = draw.choice(["plain", "window", "flatten", "pad", "stack"])
        choices = ["derive", "missing", "file_fields", "one_hot", "weights", "where"]
        for name in draw.sample(choices, draw.randint(1, 3)):
            chain._option(name, shape, draw)
        chain._shape(shape, draw)
        for _ in range(draw.randint(1, 2)):
            chain.operations.append(draw.choice(["map", "concat", "merge", "map"]))
        if shape == "flatten" or chain.operations.count("concat") > 1:
            chain.operations = [name for name in chain.operations if name == "map"]
        return chain

    def _option(self, name: str, shape: str, draw: random.Random) -> None:
        options = self.options
        if name == "derive":
            options["derive"] = draw.choice(
                [{"d": "a * 2 + b"}, {"d": "where(b > 0, b, -b)", "e": "d % 7"}, {"d": "sum(pt) + b", "e": "max(v)"}]
            )
        elif name == "missing":
            options["missing"] = draw.choice(["mask", 5.0, {"a": 2.5}])
        elif name == "file_fields":
            options["file_fields"] = {"file": {"0.h5": 10, "1.h5": 11, "2.h5": 12}}
        elif name == "one_hot":
            options["one_hot"] = "c"
        elif name == "weights" and shape not in ("window", "stack"):
            options["weights"] = "abs(b) * 0.5"
        elif name == "where" and shape != "window":
            options["where"] = draw.choice(["b % 3 > 0", "(a > -1) | (n < 5)", "count(pt) > 1"])

    def _shape(self, shape: str, draw: random.Random) -> None:
        options = self.options
        derived = list(options.get("derive", {}))
        if shape == "window":
            options |= {"window": draw.randint(1, 4), "stride": draw.randint(1, 3), "inputs": ["a", "b", "n", *derived]}
            options.pop("one_hot", None)
        elif shape == "flatten":
            options["flatten"] = ["pt", "q"]
        elif shape == "pad":
            options |= {"pad": {"pt": PAD, "q": PAD}, "keep": draw.choice(["first", "pt"])}
            if options.get("missing") == "mask":  # of two masks of one name
                options.pop("missing")
        elif shape == "stack":
            options |= {"stack": draw.choice([True, "first"]), "inputs": ["a", "b", *derived], "targets": ["n"]}
            options.pop("one_hot", None)
            if isinstance(options.get("missing"), dict):
                options.pop("missing")

    def opened(self, comm: MPI.Intracomm, folder: str) -> Dataset:
        """Return the data set that the chain makes."""
        data = open_dataset(f"{folder}/a", comm=comm, **self.options)
        for name in self.operations:
            if name == "map":
                data = _mapped(data)
            elif name == "concat":
                data = concat([data, self._other(comm, folder, data)])
            elif "z" not in data.schema:
                data = merge(data, open_dataset(f"{folder}/extra", inputs="z", comm=comm), on="n", how="inner")
        return data

    def _other(self, comm: MPI.Intracomm, folder: str, data: Dataset) -> Dataset:
        other = open_dataset(f"{folder}/b", comm=comm, **self.options)
        for name in self.operations[: self.operations.index("concat")]:
            if name == "map":
                other = _mapped(other)
            elif "z" not in other.schema:
                other = merge(other, open_dataset(f"{folder}/extra", inputs="z", comm=comm), on="n", how="inner")
        return other

    def expected(self, folder: Path) -> Samples:
        """Return the samples as NumPy makes them."""
        samples = self._of(folder, "a")
        for number, name in enumerate(self.operations):
            if name == "map":
                samples = _with_map(samples)
            elif name == "concat":
                other = self._of(folder, "b")
                for before in self.operations[:number]:
                    other = _with_map(other) if before == "map" else _with_z(other)
                samples = {key: np.concatenate([samples[key], other[key]]) for key in samples}
            else:
                samples = _with_z(samples)
        return samples

    def _of(self, folder: Path, name: str) -> Samples:
        samples = read(folder, name)
        if "file_fields" not in self.options:
            del samples["file"]
        rows = range(len(samples["n"]))
        with np.errstate(invalid="ignore"):
            for text in (*self.options.get("derive", {}).items(),):
                samples[text[0]] = _evaluated(text[1], samples, rows)
            if "weights" in self.options:
                samples["sample_weight"] = np.abs(samples["b"]) * 0.5
            if "where" in self.options:
                chosen = _evaluated(self.options["where"], samples, rows)
                samples = {key: values[chosen] for key, values in samples.items()}
        return _filled(_shaped(samples, read(folder, name), self.options), self.options)


@dataclass
class Operations:
    """Operations on a data set, one after the other, in any order.

    Parameters
    ----------
    steps : name and argument of each.
    """

    steps: list[tuple[str, Any]]

    @property
    def has_gaps(self) -> bool:
        """Whether a split leaves out samples."""
        return any(name in ("window", "flatten") for name, _ in self.steps)

    @classmethod
    def draw(cls, draw: random.Random) -> Operations:
        """Return two to five random operations that fit one another."""
        steps: list[tuple[str, Any]] = []
        lists, made, tied = True, 0, False
        while len(steps) < draw.randint(2, 5):
            name = draw.choice(["derive", "derive", "where", "split", "pad", "flatten", "window", "map"])
            if name == "derive":
                made += 1
                steps.append((name, {f"d{made}": draw.choice(["a * 2 + b", "where(b > 0, b, -b)", "b % 7"])}))
            elif name == "where" and not tied:
                steps.append((name, draw.choice(["b % 3 > 0", "(a > -1) | (n < 9)", "n % 5 < 4"])))
            elif name == "split" and not tied:
                steps.append((name, 0.75))
            elif name == "pad" and lists:
                steps.append((name, {"pt": PAD, "q": PAD}))
                lists = False
            elif name == "flatten" and lists:
                steps.append((name, ["pt", "q"]))
                lists, tied = False, True
            elif name == "window" and not lists and not tied:
                steps.append((name, (draw.randint(1, 3), draw.randint(1, 2))))
                tied = True
            elif name == "map" and ("map", None) not in steps:
                steps.append((name, None))
        return cls(steps)

    def opened(self, comm: MPI.Intracomm, folder: str) -> Dataset:
        """Return the data set that the operations make."""
        data = open_dataset(f"{folder}/a", comm=comm)
        for name, argument in self.steps:
            if name == "derive":
                data = data.derive(argument)
            elif name == "where":
                data = data.where(argument)
            elif name == "split":
                data, _ = data.split(argument, 1 - argument)
            elif name == "pad":
                data = data.pad(argument)
            elif name == "flatten":
                data = data.flatten(argument)
            elif name == "window":
                data = data.window(argument[0], stride=argument[1])
            else:
                data = _mapped(data)
        return data

    def expected(self, folder: Path) -> Samples:
        """Return the samples as NumPy makes them."""
        whole = read(folder, "a")
        samples = {**whole, "row": np.arange(len(whole["n"]))}
        for name, argument in self.steps:
            if name == "derive":
                ((new, text),) = argument.items()
                samples[new] = _evaluated(text, samples, range(0))
            elif name == "where":
                chosen = _evaluated(argument, samples, range(0))
                samples = {key: values[chosen] for key, values in samples.items()}
            elif name == "split":
                count = round(len(samples["n"]) * argument)
                samples = {key: values[:count] for key, values in samples.items()}
            elif name == "pad":
                samples = _shaped(samples, whole, {"pad": argument, "keep": "first"})
            elif name == "flatten":
                samples = _shaped(samples, whole, {"flatten": argument})
            elif name == "window":
                samples = _windows_within(samples, whole, *argument)
            else:
                samples = _with_map(samples)
        return {key: values for key, values in samples.items() if key not in ("row", "file")}


def _windows_within(samples: Samples, whole: Samples, window: int, stride: int) -> Samples:
    """Return the windows of the rows of each file of which all rows are samples."""
    position = {row: at for at, row in enumerate(samples["row"].tolist())}
    borders = np.flatnonzero(np.diff(whole["file"], prepend=-1, append=-1)).tolist()
    of_files = [range(b, b + window) for low, high in pairwise(borders) for b in range(low, high - window + 1, stride)]
    kept = [rows for rows in of_files if all(row in position for row in rows)]
    at = np.array([[position[row] for row in rows] for rows in kept], int).reshape(-1, window)
    return {key: values[at] for key, values in samples.items()}


def _evaluated(text: str, samples: Samples, rows: range) -> Any:
    """Return the values of an expression, by Python's own evaluation of it on whole arrays."""
    lists = {"sum": lambda v: _reduced(np.sum, v), "max": lambda v: _reduced(np.max, v), "count": lambda v: _counts(v)}
    return eval(text, {"where": np.where, "abs": np.abs, **lists}, samples)


def _reduced(function: Any, values: Any) -> Any:
    return np.array([function(value) for value in values])


def _counts(values: Any) -> Any:
    return np.array([len(value) for value in values])


def _shaped(samples: Samples, whole: Samples, options: dict[str, Any]) -> Samples:
    if "one_hot" in options:
        samples["c"] = np.eye(CLASSES, dtype="f4")[samples["c"]]
    if "flatten" in options:
        counts = _counts(samples["pt"])
        event = np.repeat(np.arange(len(counts)), counts)
        flat = {key: np.concatenate([*samples[key], np.empty(0, kind)]) for key, kind in (("pt", "f4"), ("q", "i4"))}
        return {**{key: values[event] for key, values in samples.items()}, **flat}
    if "pad" in options:
        orders = [np.argsort(-v, kind="stable") if options["keep"] == "pt" else slice(None) for v in samples["pt"]]
        filled = np.arange(PAD) < np.minimum(_counts(samples["pt"]), PAD)[:, None]
        for key in ("pt", "q"):
            dense = [np.append(v[o], np.zeros(PAD, v.dtype))[:PAD] for v, o in zip(samples[key], orders, strict=True)]
            samples[key], samples[f"{key}_mask"] = np.array(dense).reshape(-1, PAD), filled
    if "stack" in options:
        columns = [samples[name] for name in options["inputs"]]
        return {"inputs": np.stack(columns, axis=1), "n": samples["n"]}
    if "window" in options:
        return _windows(samples, whole, options)
    return samples


def _windows(samples: Samples, whole: Samples, options: dict[str, Any]) -> Samples:
    window, stride = options["window"], options["stride"]
    borders = np.flatnonzero(np.diff(whole["file"], prepend=-1, append=-1))
    found: dict[str, list[Any]] = {name: [] for name in options["inputs"]}
    for low, high in pairwise(borders.tolist()):
        for begin in range(low, high - window + 1, stride):
            for name in found:
                found[name].append(samples[name][begin : begin + window])
    return {name: np.array(values) for name, values in found.items()}


def _filled(samples: Samples, options: dict[str, Any]) -> Samples:
    missing = options.get("missing", "nan")
    if missing == "nan":
        return samples
    masks: Samples = {}
    for name, values in samples.items():
        if values.dtype.kind != "f" or (isinstance(missing, dict) and name != "a"):
            continue
        absent = np.isnan(values)
        number = 0.0 if missing == "mask" else missing["a"] if isinstance(missing, dict) else missing
        samples[name] = np.where(absent, values.dtype.type(number), values)
        if missing == "mask" and "inputs" not in options and name != "c":  # one-hot vectors have none
            masks[f"{name}_mask"] = ~absent
    return {**samples, **masks}


def _source_name(samples: Any) -> str:
    return "inputs" if "inputs" in samples else "b"


def mapped(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return a number for each sample, after a change of what the function has got."""
    ((name, values),) = arrays.items()
    found = np.nansum(values.reshape(len(values), -1), axis=1) + 1.0
    values[...] = 0
    return {f"sum_{name}": found}


def _mapped(data: Dataset) -> Dataset:
    name = _source_name(data.schema)
    return data.map(mapped, schema={f"sum_{name}": "f8"}, fields=[name])


def _with_map(samples: Samples) -> Samples:
    name = _source_name(samples)
    values = samples[name]
    return {**samples, f"sum_{name}": np.nansum(values.reshape(len(values), -1), axis=1) + 1.0}


def _with_z(samples: Samples) -> Samples:
    return {**samples, "z": _first(samples["n"]) ** 2}


def _loaded(
    comm: MPI.Intracomm, chain: Chain | Operations, folder: str
) -> tuple[Samples, list[Samples], list[Any], list[Any]]:
    """Return this rank's samples, those of the sets of a split, and its rows in the batches of two epochs, resumed."""
    data = chain.opened(comm, folder)
    parts = [part.load() for part in data.split(0.6, 0.4, seed=3)]
    batches = data.batches(6, shuffle=True, seed=2, remainder="keep")
    epochs = [_keys(batch) for _ in range(2) for batch in batches]
    resumed = data.batches(6, shuffle=True, remainder="keep", start=batches.state(1))
    return data.load(), parts, epochs, [_keys(batch) for _, batch in zip(range(2), resumed, strict=False)]


def _keys(batch: Any) -> list[int]:
    """Return the numbers of the samples of a batch."""
    for one in batch if isinstance(batch, tuple) else (batch,):
        if isinstance(one, dict) and "n" in one:
            found: list[int] = _first(np.asarray(one["n"])).tolist()
            return found
    raise AssertionError(f"a batch without numbers: {batch!r}")


def _first(numbers: Any) -> Any:
    """Return the number of each sample; of windows that of the first row."""
    return numbers if numbers.ndim == 1 else numbers[:, 0]


def _joined(by_rank: list[Samples]) -> Samples:
    return {key: np.concatenate([of_rank[key] for of_rank in by_rank]) for key in by_rank[0]}


def _check(found: Samples, expected: Samples) -> None:
    assert set(found) == set(expected)
    for name, values in expected.items():
        if values.dtype == object:
            pairs = zip(found[name], values, strict=True)
            assert all(np.array_equal(one, other) for one, other in pairs), name
        else:
            np.testing.assert_allclose(found[name], values, rtol=1e-6, err_msg=name)


def _rows(samples: Samples) -> pd.DataFrame:
    """Return the samples in an order of their own, to compare sets."""
    dense = {k: v.reshape(len(v), -1) for k, v in samples.items() if v.dtype != object}
    columns = {f"{k}{i}": v[:, i] for k, v in sorted(dense.items()) for i in range(v.shape[1])}
    frame = pd.DataFrame(columns).astype("f8")
    return frame.sort_values(list(frame.columns), ignore_index=True)


def _run(seed: int, folder: Path, ranks: Any, sizes: tuple[int, ...], kind: type[Chain | Operations] = Chain) -> None:
    draw = random.Random(seed)
    write(folder, seed)
    chain = kind.draw(draw)
    expected = chain.expected(folder)
    batches = []
    for size in sizes:
        by_rank = ranks(size).run(_loaded, chain, str(folder))
        _check(_joined([loaded for loaded, _, _, _ in by_rank]), expected)
        parts = [_joined([of_rank[1][part] for of_rank in by_rank]) for part in range(2)]
        both = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
        gap = len(expected["n"]) - len(both["n"])
        assert gap == 0 or (gap > 0 and chain.has_gaps)
        if not gap:
            pd.testing.assert_frame_equal(_rows(both), _rows(expected), rtol=1e-6)
        steps = [
            [sorted(chained.from_iterable(rows)) for rows in zip(*(of_rank[at] for of_rank in by_rank), strict=True)]
            for at in (2, 3)
        ]
        batches.append(steps)
        assert steps[1] == steps[0][1:3][: len(steps[1])]
    assert all(one == batches[0] for one in batches)


@pytest.mark.parametrize("seed", range(QUICK))
def test_random_chains(seed: int, tmp_path: Path, ranks: Any) -> None:
    _run(seed, tmp_path, ranks, ((1, 2), (1, 3))[seed % 2])


def _selected(comm: MPI.Intracomm, folder: str) -> list[list[int]]:
    """Return the samples of conditions on a part of the samples, which has gaps."""
    data = open_dataset(f"{folder}/a", inputs=["n", "b"], comm=comm)
    parts = [data.where("n % 5 < 4"), *data.split(0.6, 0.4, seed=1)]
    return [part.where("(b > -20) & (n > 3)").where("b % 3 > 0").load()["n"].tolist() for part in parts]


def test_conditions_on_a_part_of_the_samples(tmp_path: Path, ranks: Any) -> None:
    write(tmp_path, 3)
    whole = read(tmp_path, "a")
    met = (whole["b"] > -20) & (whole["n"] > 3) & (whole["b"] % 3 > 0)
    for size in (1, 3):
        by_rank = ranks(size).run(_selected, str(tmp_path))
        found = [list(chained.from_iterable(rows)) for rows in zip(*by_rank, strict=True)]
        assert found[0] == whole["n"][met & (whole["n"] % 5 < 4)].tolist()
        assert sorted(found[1] + found[2]) == whole["n"][met].tolist()


@pytest.mark.parametrize("seed", range(QUICK // 3))
def test_operations_apply_in_any_order(seed: int, tmp_path: Path, ranks: Any) -> None:
    _run(seed, tmp_path, ranks, ((1, 3), (1, 2))[seed % 2], Operations)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(QUICK // 3, ALL // 2, 10))
def test_more_operations_apply_in_any_order(seed: int, tmp_path: Path, ranks: Any) -> None:
    for number in range(seed, seed + 10):
        folder = tmp_path / str(number)
        folder.mkdir()
        _run(number, folder, ranks, (1, 2, 3), Operations)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(QUICK, ALL, 10))
def test_more_random_chains(seed: int, tmp_path: Path, ranks: Any) -> None:
    for number in range(seed, seed + 10):
        folder = tmp_path / str(number)
        folder.mkdir()
        _run(number, folder, ranks, (1, 2, 3))
