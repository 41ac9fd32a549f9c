"""Preprocessing layers whose state each rank may have adapted to its own rows alone."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from matex_data.errors import PartitionError
from matex_data.training.comm.channel import Channel


def check_preprocessing(model: Any, channel: Channel) -> None:
    """Raise an error unless all ranks have the same state of each layer that has been adapted. *Collective*.

    Raises
    ------
    PartitionError : on all ranks, naming the first layer whose state differs.
    """
    layers = [layer for layer in model._flatten_layers() if hasattr(layer, "adapt")] if channel.size > 1 else []
    if not layers:
        return
    by_rank = channel.host.allgather_object([(layer.name, _digest(layer)) for layer in layers])
    for rank, states in enumerate(by_rank):
        differ = [name for (name, state), (_, first) in zip(states, by_rank[0], strict=False) if state != first]
        if differ:
            raise PartitionError(
                f"the preprocessing layer {differ[0]!r} has another state on rank {rank} than on rank 0",
                expected="a layer that all ranks have adapted to the same samples",
                found="states that differ, as after layer.adapt() of a rank's own rows",
                remedy="adapt it to the samples of all ranks: data.adapt(layer)",
            )


def _digest(layer: Any) -> str:
    """Return a text that identifies the weights, the vocabulary and the borders of bins of a layer."""
    digest = hashlib.blake2b(digest_size=16)
    for value in layer.get_weights():
        digest.update(np.ascontiguousarray(value).data)
    if hasattr(layer, "get_vocabulary"):
        digest.update(repr([str(token) for token in layer.get_vocabulary()]).encode("utf-8", "surrogateescape"))
    digest.update(repr(np.asarray(getattr(layer, "bin_boundaries", None)).tolist()).encode())
    return digest.hexdigest()
