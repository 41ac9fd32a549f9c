"""The state of an iteration determines the order of batches, and only an equal fingerprint resumes it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import matex_data as md
from matex_data.errors import PartitionError
from matex_data.sampling.state import read_seed, read_step
from tests.support.ranks import Pools

ROWS = 250
BATCH = 24
RUN: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "seed": 1, "remainder": "keep"}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _written(tmp_path_factory.mktemp("data") / "table.h5")


def _written(path: Path, rows: int = ROWS, chunk: int = 10) -> Path:
    path.parent.mkdir(exist_ok=True)
    with h5py.File(path, "w") as file:
        file.create_dataset("number", data=np.arange(rows), chunks=(chunk,))
        file.create_dataset("wide", data=np.zeros((rows, 64)), chunks=(chunk, 64))
    return path


def _open(comm: MPI.Intracomm, path: Path, **options: Any) -> md.Dataset:
    return md.open_dataset(path, **{"inputs": ["number", "wide"], "comm": comm, "window_bytes": 1 << 15, **options})


def _numbers(element: Any) -> list[int]:
    return [int(n) for n in element["number"]]


def _first(comm: MPI.Intracomm, path: Path, steps: int) -> tuple[list[list[int]], str]:
    """Return the samples of the first batches, with a drawn seed, and the state after them."""
    data = _open(comm, path)
    batches = iter(data.batches(BATCH, shuffle=True, remainder="keep"))
    return [_numbers(next(batches)) for _ in range(steps)], json.dumps(data.state(steps))


def _rest(comm: MPI.Intracomm, path: Path, state: str, **options: Any) -> tuple[list[list[int]], str]:
    """Return the samples of the other batches, and the state at their begin."""
    data = _open(comm, path)
    given = {"shuffle": True, "remainder": "keep", "start": json.loads(state), **options}
    return [_numbers(batch) for batch in data.batches(BATCH, **given)], json.dumps(data.state(0))


def _whole(by_rank: list[tuple[list[list[int]], str]]) -> list[list[int]]:
    return [sorted(n for rows in by_step for n in rows) for by_step in zip(*(r for r, _ in by_rank), strict=True)]


def test_resume_a_drawn_seed_on_any_number_of_ranks(table: Path, tmp_path: Path, ranks: Pools) -> None:
    began = ranks(2).run(_first, table, 4)
    state = began[0][1]
    assert began[1][1] == state
    moved = shutil.copy(table, tmp_path)
    rests = {size: ranks(size).run(_rest, moved, state) for size in (1, 3)}
    assert sorted(n for step in _whole(began) + _whole(rests[1]) for n in step) == list(range(ROWS))
    assert _whole(rests[3]) == _whole(rests[1])
    expected = {**json.loads(state), "step": 0}
    assert all(json.loads(again) == expected for rest in rests.values() for _, again in rest)


def test_every_call_draws_its_own_seed(table: Path) -> None:
    seeds = {_open(MPI.COMM_SELF, table).batches(BATCH, shuffle=True).state(0)["seed"] for _ in range(2)}
    assert len(seeds) == 2


@pytest.mark.parametrize(
    ("name", "changed", "opened", "facts"),
    [
        ("batch_size", {"batch_size": 48}, {}, ("batch_size=24", "batch_size=48")),
        ("shuffle", {"shuffle": False}, {}, ("shuffle=True", "shuffle=False")),
        ("seed", {"seed": 2}, {}, ("seed=1", "seed=2")),
        ("remainder", {"remainder": "drop"}, {}, ("remainder='keep'", "remainder='drop'")),
        ("inputs", {}, {"inputs": "number"}, ("inputs=['number', 'wide']", "inputs='number'")),
        ("targets", {}, {"inputs": "wide", "targets": "number"}, ("targets=None", "targets='number'")),
        ("lanes", {}, {"window_bytes": 1 << 12}, ("window_steps=", "window_bytes=")),
        ("cache", {}, {"cache": "memory"}, ("cache=None", "cache='memory'")),
    ],
)
def test_error_names_the_difference(
    table: Path, name: str, changed: dict[str, Any], opened: dict[str, Any], facts: tuple[str, str]
) -> None:
    data = _open(MPI.COMM_SELF, table)
    data.tf_dataset(**RUN)
    state = json.loads(json.dumps(data.state(5)))
    other = _open(MPI.COMM_SELF, table, **opened)
    with pytest.raises(PartitionError, match=f"another .*{name}") as raised:
        other.batches(**{**RUN, **changed}, start=state)
    assert all(fact in str(raised.value) for fact in facts)
    assert len(other.batches(**{**RUN, **changed})) > 0


@pytest.mark.parametrize("name", ["lanes", "window_steps", "blocks"])
def test_error_names_another_release(table: Path, name: str) -> None:
    state = _open(MPI.COMM_SELF, table).batches(**RUN).state(5)
    state[name] = "0" * 32 if name == "blocks" else 2 * state[name]
    with pytest.raises(PartitionError, match=f"another {name}") as raised:
        _open(MPI.COMM_SELF, table).batches(**RUN, start=state)
    assert "release" in str(raised.value)


def test_error_for_other_samples(table: Path, tmp_path: Path) -> None:
    data = _open(MPI.COMM_SELF, table)
    halves = data.split(0.5, 0.5, seed=1)
    halves[0].batches(**RUN)
    state = halves[0].state(3)
    renamed = _open(MPI.COMM_SELF, Path(shutil.copy(table, tmp_path / "renamed.h5")))
    longer = _open(MPI.COMM_SELF, _written(tmp_path / "longer" / "table.h5", ROWS + 10))
    chunks = _open(MPI.COMM_SELF, _written(tmp_path / "chunks" / "table.h5", chunk=5))
    for name, other in (
        ("digest", halves[1]),
        ("samples", data),
        ("digest", data.split(0.5, 0.5, seed=2)[0]),
        ("digest", renamed.split(0.5, 0.5, seed=1)[0]),
        ("samples", longer.split(0.5, 0.5, seed=1)[0]),
        ("blocks", chunks.split(0.5, 0.5, seed=1)[0]),
    ):
        with pytest.raises(PartitionError, match=f"another .*{name}"):
            other.batches(**RUN, start=state)
    assert len(data.split(0.5, 0.5, seed=1)[0].batches(**RUN, start=state)) == 3


def test_file_order_resumes_with_another_layout(table: Path, tmp_path: Path) -> None:
    ordered = {"batch_size": BATCH, "seed": 3}
    data = _open(MPI.COMM_SELF, table)
    data.batches(**ordered)
    chunks = _open(MPI.COMM_SELF, _written(tmp_path / "table.h5", chunk=5), window_bytes=1 << 12, cache="memory")
    rest = list(chunks.batches(BATCH, start=data.state(2)))
    assert [n for batch in rest for n in _numbers(batch)] == list(range(2 * BATCH, ROWS // BATCH * BATCH))


def test_state_before_any_batches_needs_a_seed(table: Path) -> None:
    state = _open(MPI.COMM_SELF, table).state(4)
    assert len(_open(MPI.COMM_SELF, table).batches(BATCH, start=state)) == ROWS // BATCH - 4
    with pytest.raises(PartitionError, match="holds no seed"):
        _open(MPI.COMM_SELF, table).batches(BATCH, shuffle=True, start=state)
    began = list(_open(MPI.COMM_SELF, table).batches(**RUN))[4:]
    rest = _open(MPI.COMM_SELF, table).tf_dataset(**RUN, start=state)
    assert [_numbers(batch) for batch in rest] == [_numbers(batch) for batch in began]


def test_incomplete_state(table: Path) -> None:
    data = _open(MPI.COMM_SELF, table)
    state = data.batches(**RUN).state(2)
    broken: list[Any] = [{**state, "step": step} for step in (-1, 1.5, "2", None, True)]
    broken += [{k: v for k, v in state.items() if k != name} for name in ("seed", "digest", "blocks", "step")]
    with pytest.raises(PartitionError, match="takes no start= of this kind"):
        data.batches(**RUN, start=7)
    for start in [*broken, {}, {"step": 2, "samples": ROWS}]:
        with pytest.raises(PartitionError, match="not the state of a data set"):
            data.batches(**RUN, start=start)


def test_state_of_the_latest_batches(table: Path) -> None:
    data = _open(MPI.COMM_SELF, table)
    for size in (12, 24):
        data.batches(size)
        assert data.state(1)["batch_size"] == size
    first = data.batches(BATCH, shuffle=True)
    assert data.state(1) == first.state(1)
    resumed = _open(MPI.COMM_SELF, table)
    resumed.batches(BATCH, shuffle=True, start=first.state(1))
    assert resumed.state(1) == first.state(1)
    second = data.batches(BATCH, shuffle=True)
    with pytest.raises(PartitionError, match="seeds that were drawn"):
        data.state(1)
    assert first.state(1)["seed"] != second.state(1)["seed"]
    data.batches(2 * BATCH, shuffle=True, seed=5)
    assert data.state(1)["seed"] == 5


def _differing(comm: MPI.Intracomm, path: Path, what: str) -> str:
    data = _open(comm, path)
    data.batches(**RUN)
    own: dict[str, Any] = {
        "start": {"start": data.state(3) if comm.rank == 0 else None},
        "seed": {"seed": comm.rank},
        "refused": {"seed": 1 + comm.rank, "start": data.state(3)},
        "drawn": {"seed": None if comm.rank else 1},
        "batch_size": {"batch_size": BATCH * (1 + comm.rank)},
    }[what]
    with pytest.raises(PartitionError) as raised:
        data.batches(**{**RUN, **own})
    return str(raised.value)


@pytest.mark.parametrize("what", ["start", "seed", "refused", "drawn", "batch_size"])
def test_ranks_with_different_options(table: Path, ranks: Pools, what: str) -> None:
    texts = ranks(2).run(_differing, table, what)
    assert texts[0] == texts[1]
    assert {"start": "step=3", "refused": "seed=2"}.get(what, what) in texts[0]


@pytest.mark.parametrize("step", [-1, 2.5, "3", float("nan"), True])
def test_states_are_those_after_whole_batches(table: Path, step: Any) -> None:
    with pytest.raises(PartitionError, match="number of batches"):
        _open(MPI.COMM_SELF, table).batches(**RUN).state(step)


def test_state_with_integers_of_numpy_is_resumed(table: Path) -> None:
    state = md.open_dataset(table).batches(**RUN).state(2)
    given = {**state, "step": np.int64(3), "seed": np.int64(7)}
    step, seed = read_step(given), read_seed(given)
    assert (step, seed) == (3, 7)
    assert type(step) is type(seed) is int
