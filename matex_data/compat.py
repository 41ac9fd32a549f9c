"""``DataSet`` of MaTEx (2018): data sets by name, whose shard on this rank is in arrays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from matex_data._types import Array
from matex_data.dataset import Dataset
from matex_data.errors import FieldNotFound, FormatError
from matex_data.io.sessions import read_sessions
from matex_data.opening.open import open_dataset

if TYPE_CHECKING:
    from mpi4py import MPI


FOLDERS = {"MNIST": "MNIST_data", "CIFAR10": "CIFAR_data", "CIFAR100": "CIFAR_data"}
"""Default folders of data sets with several files. Nothing is downloaded."""
FORMATS = {"MNIST": "idx", "CIFAR10": "cifar", "CIFAR100": "cifar", "CSV": "csv", "HDF5": "hdf5", "PNETCDF": "netcdf"}
"""Formats by their names in MaTEx."""
LABELS = ("label", "labels", "fine_label", "target", "targets", "class", "y")
"""Names of label fields. In files without any, the last field holds the labels."""


class LocalShard(np.ndarray[Any, Any]):
    """Array that is sharded already: the launcher does not shard it, or a slice of it, again."""

    matex_sharded = True


class DataSet:
    """Training, validation and test data, sharded over the ranks and loaded into memory. *Collective*.

    Parameters
    ----------
    data_name : "MNIST", "CIFAR10", "CIFAR100", "CSV", "HDF5" or "PNETCDF".
    delim : str. Separator of the columns of a CSV file. None: detected.
    train_batch_size, test_batch_size : int, in samples over all ranks. Sizes of the batches of ``next_train_batch``,
        and of ``next_validation_batch`` and ``next_test_batch``.
    normalize : float. Divisor of the data.
    train_file, validation_file, test_file : str. Names of files in ``data_directory``. MNIST and CIFAR need none.
    data_directory : str. Folder of the files. None: the working directory, or the usual one for MNIST and CIFAR.
    valid_pct, test_pct : float. Fractions (up to 1) or percentages of the training data to split off.
    comm : mpi4py.MPI.Intracomm. The ranks that share the data. None: all ranks.

    Attributes
    ----------
    training_data, validation_data, testing_data : float32[samples of this rank, ...], or None.
    training_labels, validation_labels, testing_labels : float32[samples of this rank, classes], one-hot, or None.

    Raises
    ------
    FormatError : the name is unknown, or a file is damaged.
    FieldNotFound : the data has no labels.
    DataError : a file does not exist, or cannot be read.

    Examples
    --------
    >>> data = md.DataSet("HDF5", train_file="digits.h5", train_batch_size=32, normalize=255.0, valid_pct=20)
    >>> data.training_data.shape, data.training_labels.shape
    ((80, 8, 8), (80, 10))
    >>> x, y = data.next_train_batch()
    >>> x.shape, y.shape
    ((32, 8, 8), (32, 10))
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
            raise FormatError("unknown data_name", expected=sorted(FORMATS), found=data_name)
        self._name = data_name.upper()
        self._folder = Path(data_directory or FOLDERS.get(self._name, "."))
        self._options: dict[str, Any] = {"sep": delim} if self._name == "CSV" and delim else {}
        self._comm = comm
        sources = self._sources(train_file, validation_file, test_file, _fraction(valid_pct), _fraction(test_pct))
        loaded = {subset: _load(source, normalize) for subset, source in sources.items()}
        read_sessions(comm).comm.note_sharded_data()
        classes = self._classes([labels for _, labels in loaded.values()])
        for subset in ("training", "validation", "testing"):
            data, labels = loaded.get(subset, (None, None))
            setattr(self, f"{subset}_data", None if data is None else data.view(LocalShard))
            setattr(self, f"{subset}_labels", None if labels is None else _one_hot(labels, classes).view(LocalShard))
        size = self._mpi().size
        sizes = {"training": train_batch_size, "validation": test_batch_size, "testing": test_batch_size}
        self._batches = {subset: self._cycle(subset, max(1, sizes[subset] // size)) for subset in sources}

    def next_train_batch(self) -> tuple[Array, Array]:
        """Return data and labels of this rank's next training batch; the first one follows the last one.

        Examples
        --------
        >>> data = md.DataSet("HDF5", train_file="digits.h5", train_batch_size=32)
        >>> x, y = data.next_train_batch()
        >>> x.shape, y.shape
        ((32, 8, 8), (32, 10))
        """
        return next(self._batches["training"])

    def next_validation_batch(self) -> tuple[Array, Array]:
        """Like ``next_train_batch``, for the validation data.

        Examples
        --------
        >>> data = md.DataSet("HDF5", train_file="digits.h5", test_batch_size=10, valid_pct=20)
        >>> x, y = data.next_validation_batch()
        >>> x.shape, y.shape
        ((10, 8, 8), (10, 10))
        """
        return next(self._batches["validation"])

    def next_test_batch(self) -> tuple[Array, Array]:
        """Like ``next_train_batch``, for the test data.

        Examples
        --------
        >>> data = md.DataSet("HDF5", train_file="digits.h5", test_batch_size=10, test_pct=20)
        >>> x, y = data.next_test_batch()
        >>> x.shape, y.shape
        ((10, 8, 8), (10, 10))
        """
        return next(self._batches["testing"])

    def _cycle(self, subset: str, size: int) -> Iterator[tuple[Array, Array]]:
        """Yield batches of this rank without end."""
        data, labels = getattr(self, f"{subset}_data"), getattr(self, f"{subset}_labels")
        while True:
            for start in range(0, max(len(data), 1), size):
                yield data[start : start + size], labels[start : start + size]

    def _sources(
        self, train: str | None, valid: str | None, test: str | None, valid_fraction: float, test_fraction: float
    ) -> dict[str, Dataset]:
        """Open the files, and split off the missing subsets from the training data."""
        named = {"training": train, "validation": valid, "testing": test}
        if self._name in FOLDERS:
            found = {"training": self._open(None, "train"), "testing": self._open(None, "test")}
        else:
            found = {subset: self._open(file, None) for subset, file in named.items() if file}
        fractions = {"validation": valid_fraction, "testing": test_fraction}
        split_off = {name: fraction for name, fraction in fractions.items() if fraction and name not in found}
        if split_off:
            subsets = found["training"].split(1 - sum(split_off.values()), *split_off.values())
            found |= dict(zip(["training", *split_off], subsets, strict=True))
        return found

    def _open(self, file: str | None, subset: str | None) -> Dataset:
        options = dict(self._options) if subset is None else {"subset": subset}
        path = str(self._folder / file if file else self._folder)
        return open_dataset(path, format=FORMATS[self._name], comm=self._comm, **options)

    def _mpi(self) -> MPI.Intracomm:
        from matex_data.mpi.library import MPI

        return self._comm or MPI.COMM_WORLD

    def _classes(self, labels: list[Array]) -> int:
        """Return the number of classes: one more than the largest label of all subsets and ranks. *Collective*."""
        largest = max((int(of_subset.max()) for of_subset in labels if len(of_subset)), default=0)
        return int(max(self._mpi().allgather(largest))) + 1


def _fraction(amount: float) -> float:
    """Return a fraction; amounts above 1 are percentages."""
    return amount / 100 if amount > 1 else amount


def _load(source: Dataset, normalize: float) -> tuple[Array, Array]:
    """Return this rank's samples, float32 and divided by ``normalize``, and their labels, int64. *Collective*."""
    names = list(source.schema)
    if len(names) < 2:
        raise FieldNotFound("the data has no labels", field="label", found=names, expected=f"one of {LABELS}")
    target = next((name for label in LABELS for name in names if name.lower() == label), names[-1])
    arrays = source.load()
    fields = [name for name in names if name != target and not name.endswith("_label")]
    columns = [np.asarray(arrays[name], np.float32) for name in fields]
    data = columns[0] if len(columns) == 1 else np.stack(columns, axis=1)
    return data / np.float32(normalize), np.asarray(arrays[target]).astype(np.int64)


def _one_hot(labels: Array, classes: int) -> Array:
    return np.eye(classes, dtype=np.float32)[labels]
