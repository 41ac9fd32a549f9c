"""One declaration of each option: what ranks compare, what takes it, and how often they agree on it."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import matex_data as md
from matex_data.io.sessions import read_sessions
from matex_data.mpi.communicator import Communicator, Equal
from matex_data.opening.assembly import SampleOptions
from matex_data.reading.source import ReadOptions
from tests.support.ranks import Pool

OF_OPENING = {"paths", "format", "sample", "comm", "index", "trusted", "absent", "options"}
MADE = {"inputs", "targets", "weights", "file_fields", "derive", "missing_values", "stride", "horizon", "lead"}
MADE |= {"patch", "patches_per_image"}
OTHERS: dict[str, Any] = {
    "format": "hdf5",
    "sample": "file",
    "inputs": "y",
    "targets": "y",
    "weights": "y",
    "where": "x > 1",
    "file_fields": {"label": {"*": 1}},
    "derive": {"z": "x + 1"},
    "one_hot": "n",
    "flatten": "x",
    "pad": {"x": 2},
    "keep": "first",
    "stack": True,
    "static_as_inputs": True,
    "patch": 1,
    "patches_per_image": 2,
    "window": 2,
    "stride": 2,
    "horizon": 1,
    "lead": 2,
    "along": "x",
    "io": "independent",
    "window_bytes": 1 << 20,
    "block_bytes": 1 << 16,
    "global_reads": "rows",
    "cache": "memory",
    "missing": "drop",
    "on_error": "skip",
    "index": "other.matex",
    "trusted": "/other",
    "absent": {"x": 1.0},
    "missing_values": -9999,
    "dtype": {"x": "float64"},
}
"""Another valid value of each option."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("options") / "x.h5"
    with h5py.File(path, "w") as file:
        file["x"], file["y"], file["n"] = np.arange(60.0), np.ones(60), np.arange(60) % 3
    return path


def test_each_option_has_what_takes_it() -> None:
    """A parameter that nothing takes, or that two take, is an error here, and so is a name that is none."""
    parameters = list(inspect.signature(md.open_dataset).parameters)
    parts = {"elements", "created", "patches", "categories"}
    taking = [field.name for kind in (SampleOptions, ReadOptions) for field in fields(kind) if field.name not in parts]
    assert sorted([*taking, *OF_OPENING, *MADE]) == sorted(parameters)
    assert set(parameters) - {"paths", "comm", "options"} | {"dtype"} == set(OTHERS)


def _differing(comm: MPI.Intracomm, path: Path) -> dict[str, str]:
    """Return the error of each option that the last rank alone gives."""
    found = {}
    usual = {"window": 3, "targets": "x", "inputs": "x"}
    for name, value in OTHERS.items():
        alone = name in ("where", "flatten", "weights", "patch", "patches_per_image")
        of_all: dict[str, Any] = {"targets": "x", "inputs": "x"} if alone else usual
        options = {**of_all, name: value} if comm.rank == comm.size - 1 else of_all
        if name == "patches_per_image":
            options = {**options, "patch": 1}
        if name == "keep":
            options = {**of_all, "pad": {"x": 2}, "keep": {"x": "y"}} if comm.rank else {**of_all, "pad": {"x": 2}}
        try:
            md.open_dataset(path, comm=comm, **options)
        except md.PartitionError as error:
            found[name] = str(error)
    try:
        md.open_dataset(path, comm=comm, inputs="x", **({"io": "parallel"} if comm.rank == comm.size - 1 else {}))
    except md.PartitionError as error:
        found["wrong"] = str(error)
    return found


@pytest.mark.rank_counts(3)
def test_an_option_that_differs_is_named_alone(pool: Pool, path: Path) -> None:
    for found in pool.run(_differing, path):
        assert "takes no io= of this kind" in found.pop("wrong")  # of the last rank alone, on all of them
        assert list(found) == list(OTHERS)
        for name, error in found.items():
            assert "the ranks open different data sets" in error
            lines = [line.strip() for line in error.splitlines()]
            (told,) = [line for line in lines if line.startswith("found: on rank ")]
            assert name in told and not any(f" {other}=" in told for other in set(OTHERS) - {name})


def _counted(comm: MPI.Intracomm, path: Path) -> list[int]:
    """Return the reductions, which begin each collective call, of opening batches a second time, by their options."""
    data, counts = md.open_dataset(path, comm=comm, inputs="x", io="independent"), []
    kept, calls = data.batches(6), []
    del kept
    plain = Communicator.start_maximum

    def counting(self: Communicator, values: Any) -> Any:
        calls.append(len(values))
        return plain(self, values)

    Communicator.start_maximum = counting  # type: ignore[method-assign]
    try:
        for options in ({}, {"shuffle": True}, {"shuffle": True, "seed": 2}, {"remainder": "keep"}):
            calls.clear()
            made = data.batches(6, **options)
            counts.append(len(calls))
            del made
    finally:
        Communicator.start_maximum = plain  # type: ignore[method-assign]
    return counts


@pytest.mark.rank_counts(3)
def test_batches_are_agreed_on_at_once(pool: Pool, path: Path) -> None:
    """One agreement on all options, seed and costs; another reduction finds a communicator that no rank uses."""
    assert pool.run(_counted, path) == [[2, 2, 2, 2]] * pool.size


def _seeds(comm: MPI.Intracomm, path: Path) -> tuple[Any, str]:
    """Return the drawn seed, and the error of ranks that give other options."""
    data = md.open_dataset(path, comm=comm, inputs="x")
    state = data.batches(6, shuffle=True).state(1)
    with pytest.raises(md.PartitionError) as caught:
        data.batches(6 + 6 * comm.rank, shuffle=True)
    return state["seed"], str(caught.value)


@pytest.mark.rank_counts(3)
def test_a_drawn_seed_is_that_of_rank_0(pool: Pool, path: Path) -> None:
    found = pool.run(_seeds, path)
    assert len(set(found)) == 1
    assert "batch_size=12" in found[0][1] and "seed" not in found[0][1].split("found")[1].split("remedy")[0]


def _agreed(comm: MPI.Intracomm) -> list[Any]:
    ranks = read_sessions(comm).comm
    found: list[Any] = [
        ranks.same(7, comm.rank, -1),
        ranks.agree(None, None, [ranks.of_root(comm.rank + 5), comm.rank]),
    ]
    equal = [Equal({"a": 1, "b": value}, "they differ", "give the same") for value in (2, comm.rank)]
    found.append(ranks.agree(None, equal[0], [3]))
    errors = [(None, equal[1]), (ValueError(comm.rank) if comm.rank == ranks.size - 1 else None, equal[1])]
    for error, compared in errors:
        try:
            found.append(ranks.agree(error, compared))
        except (md.PartitionError, ValueError) as raised:
            found.append(" ".join(str(raised).split()))
    return found


@pytest.mark.rank_counts(1, 3)
def test_one_agreement_on_errors_arguments_and_numbers(pool: Pool) -> None:
    for same, numbers, plain, differing, error in pool.run(_agreed):
        last = pool.size - 1
        assert same == [True, last == 0, True] and numbers == [5, last] and plain == [3]
        if last:
            assert differing == ("they differ expected: as on rank 0: b=0 found: on rank 1: b=1 remedy: give the same")
        assert error == str(last)


def test_opened_files_do_not_change(path: Path) -> None:
    data = md.open_dataset(path, inputs="x")
    joined, mapped = md.concat([data, data]), data.map(lambda a: {"x": a["x"] + 1})
    for source in (data._source, joined._source, mapped._source):
        for name in ("index", "transforms", "profile", "shared", "repeats", "io"):
            with pytest.raises((FrozenInstanceError, AttributeError)):
                setattr(source, name, None)
