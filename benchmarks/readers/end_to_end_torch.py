"""One epoch of the networks of ``end_to_end`` with PyTorch's ``DistributedDataParallel``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from mpi4py import MPI
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info

from benchmarks.harness.data import GRATING_CLASSES, GRATING_SIDE, Task
from benchmarks.readers import batches, peers
from benchmarks.readers.end_to_end import EPSILON, NETWORKS, RATE, SEED, Probe, held_out, trained

PORT = 24_327  # below those that Linux gives to clients


def distributed(task: Task, network: str, order: str, workers: int) -> Probe:
    """Train with ``DistributedDataParallel`` over gloo.

    Parameters
    ----------
    order : "samples" for ``DistributedSampler`` and batched reads of h5py, "blocks" for an ``IterableDataset``.
    workers : processes of the ``DataLoader`` of each rank.
    """
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{PORT}", rank=rank, world_size=size)
    torch.manual_seed(SEED)
    module = _module(network).to(memory_format=torch.channels_last)
    model, loss_of = DistributedDataParallel(module), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), RATE, eps=EPSILON)

    def step(images: Any, labels: Any) -> None:
        optimizer.zero_grad()
        loss_of(model(images), labels).backward()
        optimizer.step()

    def correct() -> int:
        images, labels = held_out()
        with torch.no_grad():
            return int((module(torch.from_numpy(images)).argmax(1).numpy() == labels).sum())

    def loader() -> DataLoader[Any]:
        if order == "blocks":
            return DataLoader(_Blocks(task, rank, size), batch_size=None, num_workers=workers)
        samples: Any = peers.Batches(task)
        sampler = DistributedSampler(samples, seed=SEED)
        rows = task.batch_size // size
        return DataLoader(samples, rows, sampler=sampler, num_workers=workers, collate_fn=peers.as_tensors)

    return trained(task, loader, step, correct)


class _Blocks(IterableDataset[Any]):
    """Batches of this rank's blocks, a share of them from each worker process.

    Parameters
    ----------
    rank, size : of the training.
    """

    def __init__(self, task: Task, rank: int, size: int) -> None:
        self.task, self.rank, self.size = task, rank, size

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker else (0, 1)
        rows = self.task.batch_size // self.size
        return batches.by_block(self.task, self.rank * count + number, self.size * count, rows)


def _module(network: str) -> nn.Module:
    """Return a network that begins as Keras's do: Glorot's distribution, and biases of zero."""
    chosen, channels, side = NETWORKS[network], 1, GRATING_SIDE // NETWORKS[network].binning
    layers: list[nn.Module] = [nn.Unflatten(1, (1, GRATING_SIDE))]
    if chosen.binning > 1:
        layers.append(nn.AvgPool2d(chosen.binning))
    for filters, width, stride in chosen.convolutions:
        layers += [nn.Conv2d(channels, filters, width, stride), nn.ReLU()]
        channels, side = filters, (side - width) // stride + 1
    layers += [nn.Flatten(), nn.Linear(channels * side**2, GRATING_CLASSES)]
    for layer in layers:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)
