"""Data sets for PyTorch's ``DataLoader``. Importing needs no PyTorch; making a data set does.

``python -m pip install torch``
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from matex_data._types import Remainder
from matex_data.arguments import check_arguments
from matex_data.batching import Shuffle
from matex_data.dataset import Dataset as Samples
from matex_data.errors import PartitionError, install_command
from matex_data.sampling.permutation import whole_number
from matex_data.sampling.state import State

if TYPE_CHECKING:
    from torch.utils.data import Dataset as SampleBase
    from torch.utils.data import IterableDataset as BatchBase
else:
    try:
        from torch.utils.data import Dataset as SampleBase
        from torch.utils.data import IterableDataset as BatchBase
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] != "torch":
            raise

        class BatchBase:
            """Stand-in of PyTorch's classes."""

            def __init__(self, *_: object, **__: object) -> None:
                raise ModuleNotFoundError(
                    f"PyTorch is not installed\n  remedy: {install_command('matex_data[torch]')}", name="torch"
                )

        SampleBase = BatchBase

__all__ = ["Dataset", "IterableDataset"]


class IterableDataset(BatchBase):  # type: ignore[misc]  # not checked against PyTorch
    """Batches of this rank for a ``DataLoader(..., batch_size=None)``. *Collective*.

    The global batches are those of ``Dataset.batches``: the same on any number of ranks, and of workers. Each pass over
    the loader is the next epoch. Of ``num_workers`` workers, forked or started afresh, each reads the share of the rank
    and delivers every n-th batch of it, so that each sample comes once; without workers, threads read ahead, which is
    mostly faster.

    Of processes that ``torch.distributed`` connects and MPI does not, such as those of ``torchrun``, each has the share
    of its rank there. These cannot compare their arguments: ``shuffle=True`` needs a seed, ``shuffle="global"`` MPI.

    Parameters
    ----------
    dataset : matex_data.Dataset.
    batch_size, shuffle, seed, remainder, start : see ``Dataset.batches``.

    Raises
    ------
    ArgumentError : see ``Dataset.batches``; ``dataset`` is none.
    PartitionError : see ``Dataset.batches``; MPI and ``torch.distributed`` have different numbers of ranks;
        ``torch.distributed`` was initialised after this data set was made.
    ModuleNotFoundError : PyTorch is not installed.

    Examples
    --------
    >>> from torch.utils.data import DataLoader
    >>> import matex_data.torch
    >>> data = md.open_dataset("events.h5", inputs="image", targets="label")
    >>> loader = DataLoader(md.torch.IterableDataset(data, 20, shuffle=True, seed=1), batch_size=None)
    >>> [tuple(x.shape) for x, y in loader]
    [(20, 8, 8), (20, 8, 8), (20, 8, 8), (20, 8, 8), (20, 8, 8)]
    """

    def __init__(
        self,
        dataset: Samples,
        batch_size: int,
        *,
        shuffle: Shuffle = False,
        seed: int | None = None,
        remainder: Remainder = "drop",
        start: State | None = None,
    ) -> None:
        super().__init__()
        check_arguments(IterableDataset.__init__, locals(), "matex_data.torch.IterableDataset")
        shared = _of_process_group(dataset)
        self._batches = shared.batches(batch_size, shuffle=shuffle, seed=seed, remainder=remainder, start=start)

    def __len__(self) -> int:
        """Return the number of batches of the next epoch."""
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches of the next epoch, or those of this worker, as tensors. *Collective*."""
        from torch.utils.data import get_worker_info

        ranks = self._batches.comm.size
        if _process_group()[1] not in (1, ranks):
            raise _other_ranks(ranks, "make the data set after torch.distributed.init_process_group()")
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        yield from map(_as_tensors, itertools.islice(self._batches, first, None, step))

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch, from 0 on, which begins with its first batch.

        Examples
        --------
        >>> import matex_data.torch
        >>> batches = md.torch.IterableDataset(md.open_dataset("events.h5", inputs="energy"), 20, shuffle=True, seed=1)
        >>> first = [batch.tolist() for batch in batches]
        >>> batches.set_epoch(0)
        >>> [batch.tolist() for batch in batches] == first
        True
        """
        self._batches.begin_at(whole_number(epoch, 0, "there is no such epoch", "epoch= an integer of 0 or more"))

    def state(self, step: int) -> dict[str, Any]:
        """Return the state after ``step`` batches, counted from epoch 0, for ``start=``; see ``Dataset.state``.

        Examples
        --------
        >>> import matex_data.torch
        >>> data = md.open_dataset("events.h5", inputs="energy")
        >>> batches = md.torch.IterableDataset(data, 20, shuffle=True, seed=1)
        >>> rest = md.torch.IterableDataset(data, 20, shuffle=True, start=batches.state(3))
        >>> [batch.tolist() for batch in rest] == [batch.tolist() for batch in batches][3:]
        True
        """
        return self._batches.state(step)


class Dataset(SampleBase):  # type: ignore[misc]
    """Samples by number for a ``DataLoader`` with a sampler, such as PyTorch's ``DistributedSampler``.

    Each process reads the samples that its sampler asks for, those of a batch in one go. Their order is the sampler's:
    for reads in large ranges, and equal global batches on any number of ranks, take ``IterableDataset``.

    Parameters
    ----------
    dataset : matex_data.Dataset.

    Raises
    ------
    ArgumentError : ``dataset`` is none.
    ModuleNotFoundError : PyTorch is not installed.

    Examples
    --------
    >>> from torch.utils.data import DataLoader
    >>> import matex_data.torch
    >>> data = md.open_dataset("events.h5", inputs="image", targets="label")
    >>> x, y = next(iter(DataLoader(md.torch.Dataset(data), batch_size=20, shuffle=True)))
    >>> tuple(x.shape), tuple(y.shape)
    ((20, 8, 8), (20,))
    """

    def __init__(self, dataset: Samples) -> None:
        super().__init__()
        check_arguments(Dataset.__init__, locals(), "matex_data.torch.Dataset")
        self._dataset = dataset

    def __len__(self) -> int:
        """Return the number of samples over all files and ranks."""
        return len(self._dataset)

    def __getitem__(self, number: int) -> Any:
        """Return one sample, with NumPy arrays, which the loader makes tensors."""
        return self._dataset[number]

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        """Return the samples of a batch, which are read in one go."""
        batch = self._dataset[numbers]
        return [_row(batch, row) for row in range(len(numbers))]


def _process_group() -> tuple[int, int]:
    """Return rank and number of the processes of ``torch.distributed``: 0 and 1 if it is not initialised."""
    from torch import distributed

    known = distributed.is_available() and distributed.is_initialized()
    return (distributed.get_rank(), distributed.get_world_size()) if known else (0, 1)


def _of_process_group(dataset: Samples) -> Samples:
    """Return the data set, with the ranks of ``torch.distributed`` where MPI has one; raise ``PartitionError`` if MPI
    has several ranks, and another number of them.
    """
    rank, ranks = _process_group()
    if ranks in (1, dataset.ranks):
        return dataset
    if dataset.ranks > 1:
        raise _other_ranks(
            dataset.ranks, "start as many processes as torch.distributed has, or initialise it with MPI's"
        )
    return dataset._of_rank(rank, ranks)


def _other_ranks(ranks: int, remedy: str) -> PartitionError:
    return PartitionError(
        "torch.distributed has another number of ranks than this data set",
        expected=f"{ranks} of the data set",
        found=f"{_process_group()[1]} of torch.distributed",
        remedy=remedy,
    )


def _as_tensors(element: Any) -> Any:
    """Return an element with tensors in place of numeric arrays."""
    if isinstance(element, Mapping):
        return {name: _as_tensors(value) for name, value in element.items()}
    if isinstance(element, tuple):
        return tuple(map(_as_tensors, element))
    if element.dtype.kind not in "biufc":
        return element
    import torch

    return torch.from_numpy(element if element.flags.writeable else element.copy())


def _row(element: Any, row: int) -> Any:
    """Return one sample of a batch."""
    if isinstance(element, Mapping):
        return {name: _row(value, row) for name, value in element.items()}
    if isinstance(element, tuple):
        return tuple(_row(value, row) for value in element)
    array = np.asarray(element)
    return array[row, ...] if array.dtype == np.uint64 else array[row]  # of such a scalar PyTorch makes no tensor
