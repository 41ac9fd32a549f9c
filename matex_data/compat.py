"""``DataSet``, as scripts written for MaTEx (2018) use it: data by name, this rank's part as arrays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from matex_data._types import Array
from matex_data.dataset import Dataset
from matex_data.errors import FieldNotFound, FormatError
from matex_data.opening import open_dataset
from matex_data.pipeline import data_parallel

if TYPE_CHECKING:
    from mpi4py import MPI


FOLDERS = {"MNIST": "MNIST_data", "CIFAR10": "CIFAR_data", "CIFAR100": "CIFAR_data"}
"""Where these data lie unless ``data_directory`` says otherwise; nothing is downloaded."""
FORMATS = {"MNIST": "idx", "CIFAR10": "cifar", "CIFAR100": "cifar", "CSV": "csv", "HDF5": "hdf5", "PNETCDF": "netcdf"}
"""The formats by their names in MaTEx."""
LABELS = ("label", "labels", "fine_label", "target", "targets", "class", "y")
"""Fields that hold labels, where the file has one; otherwise it is the last field."""


class LocalShard(np.ndarray[Any, Any]):
    """An array that is this rank's part already: nobody shares it out again. Slices of it are such parts, too."""

    matex_sharded = True


class DataSet:
    """Training, validation and test data, of which every rank has its own part. *Collective*.

    Parameters
    ----------
    data_name : "MNIST", "CIFAR10", "CIFAR100", "CSV", "HDF5" or "PNETCDF".
    delim : between the columns of a CSV file; None: found out.
    train_batch_size, test_batch_size : of ``next_train_batch`` and its kin; samples over all ranks.
    normalize : by which the data is divided.
    train_file, validation_file, test_file : in ``data_directory``; MNIST and CIFAR need none.
    valid_pct, test_pct : fractions (up to 1) or percentages of the training data that are set aside.

    Attributes
    ----------
    training_data, training_labels, validation_data, ... : arrays of shape (samples of this rank, ...); labels one-hot.

    Raises
    ------
    FormatError : there is no such name, or a file is missing.
    """

    def __init__(
        self,
        data_name: str,
        delim: str | None = None,
        train_batch_size: int = 32,
        test_batch_size: int = 32,
        normalize: float = 1.0,
        train_file: str | None = None,
        validation_file: str | None = None,
        test_file: str | None = None,
        data_directory: str | None = None,
        valid_pct: float = 0.0,
        test_pct: float = 0.0,
        *,
        comm: MPI.Intracomm | None = None,
    ) -> None:
        if data_name.upper() not in FORMATS:
            raise FormatError("there are no data of this name", expected=sorted(FORMATS), found=data_name)
        data_parallel.enable()
        self._name = data_name.upper()
        self._folder = Path(data_directory or FOLDERS.get(self._name, "."))
        self._options: dict[str, Any] = {"sep": delim} if self._name == "CSV" and delim else {}
        self._comm = comm
        sources = self._sources(train_file, validation_file, test_file, _fraction(valid_pct), _fraction(test_pct))
        loaded = {part: _loaded(source, normalize) for part, source in sources.items()}
        classes = self._classes([labels for _, labels in loaded.values()])
        for part in ("training", "validation", "testing"):
            data, labels = loaded.get(part, (None, None))
            setattr(self, f"{part}_data", None if data is None else data.view(LocalShard))
            setattr(self, f"{part}_labels", None if labels is None else _one_hot(labels, classes).view(LocalShard))
        ranks = self._ranks()
        sizes = {"training": train_batch_size, "validation": test_batch_size, "testing": test_batch_size}
        self._batches = {part: self._endless(part, max(1, sizes[part] // ranks.size)) for part in sources}

    def next_train_batch(self) -> tuple[Array, Array]:
        """Data and labels of this rank's next training batch; after the last comes the first again."""
        return next(self._batches["training"])

    def next_validation_batch(self) -> tuple[Array, Array]:
        """The same of the validation data."""
        return next(self._batches["validation"])

    def next_test_batch(self) -> tuple[Array, Array]:
        """The same of the test data."""
        return next(self._batches["testing"])

    def _endless(self, part: str, size: int) -> Iterator[tuple[Array, Array]]:
        data, labels = getattr(self, f"{part}_data"), getattr(self, f"{part}_labels")
        while True:
            for start in range(0, max(len(data), 1), size):
                yield data[start : start + size], labels[start : start + size]

    def _sources(
        self, train: str | None, valid: str | None, test: str | None, valid_part: float, test_part: float
    ) -> dict[str, Dataset]:
        named = {"training": train, "validation": valid, "testing": test}
        if self._name in FOLDERS:
            found = {"training": self._open(None, "train"), "testing": self._open(None, "test")}
        else:
            found = {part: self._open(file, None) for part, file in named.items() if file}
        wanted = {"validation": valid_part, "testing": test_part}
        aside = {part: size for part, size in wanted.items() if size and part not in found}
        if aside:
            pieces = found["training"].split(1 - sum(aside.values()), *aside.values())
            found |= dict(zip(["training", *aside], pieces, strict=True))
        return found

    def _open(self, file: str | None, subset: str | None) -> Dataset:
        options = dict(self._options) if subset is None else {"subset": subset}
        path = str(self._folder / file if file else self._folder)
        return open_dataset(path, format=FORMATS[self._name], comm=self._comm, **options)

    def _ranks(self) -> MPI.Intracomm:
        from matex_data.mpi.library import MPI

        return self._comm or MPI.COMM_WORLD

    def _classes(self, labels: list[Array]) -> int:
        """Number of classes: one more than the largest label of all parts and ranks."""
        largest = max((int(part.max()) for part in labels if len(part)), default=0)
        return int(max(self._ranks().allgather(largest))) + 1


def _fraction(part: float) -> float:
    return part / 100 if part > 1 else part


def _loaded(source: Dataset, normalize: float) -> tuple[Array, Array]:
    """This rank's samples in float32, divided by ``normalize``, and their labels."""
    names = list(source.schema)
    if len(names) < 2:
        raise FieldNotFound("the data has no labels", field="label", found=names, expected=f"one of {LABELS}")
    target = next((name for wanted in LABELS for name in names if name.lower() == wanted), names[-1])
    arrays = source.load()
    fields = [name for name in names if name != target and not name.endswith("_label")]
    columns = [np.asarray(arrays[name], np.float32) for name in fields]
    data = columns[0] if len(columns) == 1 else np.stack(columns, axis=1)
    return data / np.float32(normalize), np.asarray(arrays[target]).astype(np.int64)


def _one_hot(labels: Array, classes: int) -> Array:
    return np.eye(classes, dtype=np.float32)[labels]
