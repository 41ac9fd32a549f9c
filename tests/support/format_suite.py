"""Conformance suite of formats: a subclass writes files of its format, and declares their contents.

Expected values come from the library that wrote the files, never from the code under test.
"""

from __future__ import annotations

import gc
import os
import threading
import warnings
from abc import abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from matex_data import DataError, Dataset, FieldNotFound, PartitionError, open_dataset
from matex_data.index.model import Layout
from matex_data.io.counters import process_profile
from tests.support.ranks import Pool, Pools, RanksFailed

BATCH = 24  # samples; every number of ranks divides it
EPOCHS = 3

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Case:
    """Files of one format, and their contents.

    Parameters
    ----------
    paths : as the user names them.
    expected : every field as the independent library reads it, concatenated over the files.
    identity : name of a field whose samples are all different.
    options : options of ``open_dataset``.
    """

    paths: Any
    expected: Arrays
    identity: str
    options: dict[str, Any] = field(default_factory=dict)

    def open(self, comm: MPI.Intracomm, **options: Any) -> Dataset:
        """Open the files. *Collective*."""
        return open_dataset(self.paths, comm=comm, **{**self.options, **options})


class FormatSuite:
    """Tests of a format; subclass as ``TestMyFormat``.

    Attributes
    ----------
    storable : an index of its files can be stored, see ``index=`` of `open_dataset`.
    """

    storable = True

    @abstractmethod
    def write(self, folder: Path) -> Case:
        """Write files of different lengths with at least 100 samples, not a multiple of the batch size."""

    @abstractmethod
    def damage(self, folder: Path) -> Case:
        """Write files of which one is broken, so that opening or reading it fails; ``expected`` is ignored."""

    @pytest.fixture(scope="class")
    @classmethod
    def case(cls, tmp_path_factory: pytest.TempPathFactory) -> Case:
        return cls().write(tmp_path_factory.mktemp("files"))

    def test_schema_has_what_the_library_reads(self, case: Case) -> None:
        data = case.open(MPI.COMM_SELF)
        total = len(case.expected[case.identity])
        assert len(data) == total
        assert set(data.schema) == set(case.expected)
        for name, array in case.expected.items():
            if not data.schema[name].ragged:
                assert data.schema[name].dtype == array.dtype.newbyteorder("=")
                assert data.schema[name].shape == array.shape[1:]

    def test_load_gives_the_blocks_in_order(self, case: Case, pool: Pool) -> None:
        blocks = pool.run(_load, case)
        for name, expected in case.expected.items():
            same(np.concatenate([block[name] for block in blocks]), expected)
        lengths = [len(block[case.identity]) for block in blocks]
        assert max(lengths) - min(lengths) <= 1

    @pytest.mark.rank_counts(1, slow=(3,))
    def test_a_stored_index_reads_the_same(self, case: Case, pool: Pool, tmp_path: Path) -> None:
        if not self.storable:
            with pytest.raises(RanksFailed, match="cannot be stored"):
                pool.run(_load, case, index=str(tmp_path / "run.matex"))
            return
        for _ in range(2):
            blocks = pool.run(_load, case, index=str(tmp_path / "run.matex"))
            for name, expected in case.expected.items():
                same(np.concatenate([block[name] for block in blocks]), expected)
            assert pool.run(_told, case, index=str(tmp_path / "run.matex")) == [[]] * pool.size

    @pytest.mark.parametrize("remainder", ["drop", "pad", "keep"])
    def test_unshuffled_batches_follow_the_files(self, case: Case, pool: Pool, remainder: str) -> None:
        total = len(case.expected[case.identity])
        count = total // BATCH if remainder == "drop" else -(-total // BATCH)
        by_rank = pool.run(_batches, case, remainder=remainder)
        assert [len(batches) for batches in by_rank] == [count] * pool.size
        for step in range(count):
            local = [batches[step] for batches in by_rank]
            for name, expected in case.expected.items():
                real = [_real(batch, name) for batch in local]
                same(np.concatenate(real), expected[step * BATCH : (step + 1) * BATCH])

    def test_every_sample_once_in_an_epoch(self, case: Case, pool: Pool) -> None:
        orders = _by_epoch(pool.run(_identities, case, remainder="keep"))
        everything = in_order(case.expected[case.identity])
        for epoch in orders:
            same(in_order(np.concatenate(epoch)), everything)
        assert not np.array_equal(np.concatenate(orders[0]), np.concatenate(orders[1]))

    @pytest.mark.rank_counts(3, slow=(2, 4))
    def test_global_batches_do_not_depend_on_the_ranks(self, case: Case, ranks: Pools, pool: Pool) -> None:
        alone = _by_epoch(ranks(1).run(_identities, case))
        on_ranks = _by_epoch(pool.run(_identities, case))
        assert len(alone) == len(on_ranks) == EPOCHS
        for one, other in zip(alone, on_ranks, strict=True):
            for a, b in zip(one, other, strict=True):
                same(in_order(a), in_order(b))

    def test_shuffled_samples_stay_whole(self, case: Case, pool: Pool) -> None:
        rows = {key(value): row for row, value in enumerate(case.expected[case.identity])}
        for batches in pool.run(_batches, case, shuffle=True, seed=5):
            for batch in batches:
                numbers = [rows[key(value)] for value in batch[case.identity]]
                for name, expected in case.expected.items():
                    same(batch[name], expected[numbers])

    def test_each_rank_reads_its_own_rows_alone(self, case: Case, pool: Pool) -> None:
        for read, needed, blocks in pool.run(_bytes_read, case):
            assert read <= needed * 1.05 + blocks

    def test_resume_on_another_number_of_ranks(self, case: Case, ranks: Pools, pool: Pool) -> None:
        whole = _by_epoch(ranks(1).run(_identities, case))
        steps = len(whole[0])
        rest = _by_epoch(pool.run(_identities, case, step=steps + steps // 2))
        for a, b in zip(whole[1][steps // 2 :] + whole[2], rest[0] + rest[1], strict=True):
            same(in_order(a), in_order(b))

    @pytest.mark.rank_counts(3, slow=(2, 4))
    def test_tensors_are_the_arrays(self, case: Case, pool: Pool) -> None:
        assert all(pool.run(_tensors_agree, case, timeout=120))

    def test_more_ranks_than_samples(self, case: Case, pool: Pool) -> None:
        first = case.expected[case.identity][:1]
        refused = pool.outcomes(_of_one_sample, case, "drop")
        assert all(isinstance(error, PartitionError) for error in refused), refused
        assert len({str(error) for error in refused}) == 1
        for remainder in ("pad", "keep"):
            by_rank = pool.run(_of_one_sample, case, remainder)
            assert len({len(batches) for batches in by_rank}) == 1
            found = [value for batches in by_rank for batch in batches for value in _real(batch, case.identity)]
            same(np.array(found, first.dtype).reshape(-1, *first.shape[1:]), first)

    def test_damage_is_the_same_error_everywhere(self, pool: Pool, tmp_path: Path) -> None:
        outcomes = pool.outcomes(_read_everything, self.damage(tmp_path), timeout=30)
        assert all(isinstance(error, DataError) for error in outcomes), outcomes
        assert len({str(error) for error in outcomes}) == 1
        assert "file" in str(outcomes[0])

    def test_a_misspelt_field_is_the_same_error_everywhere(self, case: Case, pool: Pool) -> None:
        name = case.identity + "x"
        outcomes = pool.outcomes(_read_everything, case, inputs=name, timeout=30)
        assert all(isinstance(error, FieldNotFound) for error in outcomes), outcomes
        assert len({str(error) for error in outcomes}) == 1
        assert repr(name) in str(outcomes[0]) and repr(case.identity) in str(outcomes[0])

    @pytest.mark.rank_counts(2, slow=(1,))
    def test_memory_threads_and_files_stay(self, case: Case, pool: Pool) -> None:
        for before, after in pool.run(_resources, case, timeout=120):
            assert after["memory"] - before["memory"] < 20e6
            assert after["threads"] <= before["threads"]
            assert after["files"] <= before["files"]

    def test_many_batches_alive(self, case: Case, pool: Pool) -> None:
        rows = {key(value): row for row, value in enumerate(case.expected[case.identity])}
        for batches in pool.run(_held, case):
            assert len(batches) >= 20
            for batch in batches:
                for name, expected in case.expected.items():
                    same(batch[name], expected[[rows[key(value)] for value in batch[case.identity]]])


def key(value: Any) -> Any:
    """Return a hashable value that is equal for equal samples."""
    return value.tobytes() if isinstance(value, np.ndarray | np.generic) else value


def in_order(values: NDArray[Any]) -> NDArray[Any]:
    """Return samples in an order that depends on their values alone."""
    if values.ndim == 1:
        return np.sort(values)
    return values[sorted(range(len(values)), key=lambda row: values[row].tobytes())]


def same(found: NDArray[Any], expected: NDArray[Any]) -> None:
    """Check that arrays are equal by element; NaN equals NaN."""
    assert found.shape == expected.shape
    if expected.dtype.hasobject and expected.dtype.fields is None:
        assert all(np.array_equal(a, b) for a, b in zip(found.ravel(), expected.ravel(), strict=True))
    elif expected.dtype.kind in "fc":
        np.testing.assert_array_equal(found, expected)
    else:
        assert np.array_equal(found, expected)


def _real(batch: Arrays, name: str) -> NDArray[Any]:
    return batch[name][batch["sample_weight"] > 0] if "sample_weight" in batch else batch[name]


def _by_epoch(by_rank: list[list[list[NDArray[Any]]]]) -> list[list[NDArray[Any]]]:
    """Concatenate the batches of all ranks: return epochs of global batches."""
    return [[np.concatenate(batches) for batches in zip(*epochs, strict=True)] for epochs in zip(*by_rank, strict=True)]


def _load(comm: MPI.Intracomm, case: Case, **options: Any) -> Arrays:
    return case.open(comm, **options).load()


def _told(comm: MPI.Intracomm, case: Case, **options: Any) -> list[str]:
    """Return the warnings of opening the files that tell of their index."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        case.open(comm, **options)
    return [str(warning.message) for warning in caught if "index" in str(warning.message)]


def _batches(comm: MPI.Intracomm, case: Case, **options: Any) -> list[Arrays]:
    return [_fields(batch) for batch in case.open(comm).batches(BATCH, **options)]


def _fields(batch: Any) -> Arrays:
    """Return the fields of a batch, with the weights that stand beside them where ``inputs=`` has names."""
    return {**batch[0], "sample_weight": batch[1]} if isinstance(batch, tuple) else dict(batch)


def _identities(comm: MPI.Intracomm, case: Case, step: int = 0, **options: Any) -> list[list[NDArray[Any]]]:
    data = case.open(comm)
    start = data.state(step) if step else None
    batches = data.batches(BATCH, shuffle=True, seed=7, start=start, **options)
    return [[batch[case.identity].copy() for batch in batches] for _ in range(EPOCHS)]


def _bytes_read(comm: MPI.Intracomm, case: Case) -> tuple[int, int, int]:
    """Return the bytes that this rank reads in an epoch, those of its rows, and those of two blocks per field."""
    data = case.open(comm)
    index = data._source.index
    stored = sum(part.stored_bytes() for file in index.files for part in file.layouts.values())
    blocks = sum(max(_block_bytes(file.layouts[name]) for file in index.files) for name in index.fields)
    before = process_profile().bytes
    for _ in data.batches(BATCH, shuffle=True, seed=2, remainder="keep"):
        pass
    return process_profile().bytes - before, stored // comm.size, 2 * blocks


def _block_bytes(part: Layout) -> int:
    return part.stored_bytes() * min(part.block_rows, part.rows) // max(1, part.rows)


def _tensors_agree(comm: MPI.Intracomm, case: Case) -> bool:
    data = case.open(comm)
    plain = {name: f for name, f in data.schema.items() if f.dtype.fields is None and f.dtype.kind != "V"}
    data = case.open(comm, inputs=list(plain))
    for remainder in ("drop", "keep"):
        tensors = data.tf_dataset(BATCH, shuffle=True, seed=3, remainder=remainder)
        arrays = list(data.batches(BATCH, shuffle=True, seed=3, remainder=remainder))
        assert int(tensors.cardinality()) == len(arrays)
        elements = list(tensors)
        assert len(elements) == len(arrays)
        for element, batch in zip(elements, arrays, strict=True):
            for name, spec in tensors.element_spec.items():
                assert spec.is_compatible_with(element[name])
                found = element[name].to_list() if plain[name].ragged else element[name].numpy()
                rows = list(zip(found, batch[name], strict=True) if plain[name].ragged else [(found, batch[name])])
                if plain[name].ragged:  # an empty list has no second axis
                    rows = [(value or np.reshape(value, expected.shape), expected) for value, expected in rows]
                is_float = plain[name].dtype.kind == "f"
                assert all(np.array_equal(value, expected, equal_nan=is_float) for value, expected in rows)
    return True


def _of_one_sample(comm: MPI.Intracomm, case: Case, remainder: str) -> list[Arrays]:
    data = case.open(comm)
    fraction = 1 / len(data)
    return [_fields(batch) for batch in data.split(fraction, 1 - fraction)[0].batches(BATCH, remainder=remainder)]


def _read_everything(comm: MPI.Intracomm, case: Case, **options: Any) -> int:
    return sum(1 for _ in case.open(comm, **options).batches(BATCH, shuffle=True, seed=1, remainder="keep"))


def _resources(comm: MPI.Intracomm, case: Case) -> tuple[dict[str, int], dict[str, int]]:
    batches = case.open(comm).batches(BATCH, shuffle=True, seed=1)
    for _ in range(10):
        for _ in batches:
            pass
    before = _measured()
    for epoch in range(15):
        for number, _ in enumerate(batches):
            if epoch % 3 == 0 and number == 1:
                break
    for _ in batches:
        pass
    return before, _measured()


def _measured() -> dict[str, int]:
    gc.collect()
    process = psutil.Process(os.getpid())
    return {
        "memory": process.memory_info().rss,
        "threads": sum(not t.name.startswith(("matex-decode", "matex-storage")) for t in threading.enumerate()),
        "files": process.num_fds(),
    }


def _held(comm: MPI.Intracomm, case: Case) -> list[Arrays]:
    batches = case.open(comm).batches(BATCH, shuffle=True, seed=4)
    held = []
    while len(held) < 20:
        held += list(batches)
    return held
