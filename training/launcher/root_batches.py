"""Batches of rank 0 for all ranks, where threads of an input pipeline draw random numbers: each rank draws others."""

from __future__ import annotations

import logging
from typing import Any

import tensorflow as tf

from matex_data.errors import PartitionError
from matex_data.training.comm.channel import Channel
from matex_data.training.exact.digests import Difference

log = logging.getLogger("matex_data.training")


def draws_in_parallel(dataset: tf.data.Dataset) -> bool:
    """Return whether a pipeline draws random numbers in a parallel ``map``, where their order depends on the threads.

    They come of operations of TensorFlow with a state, or of Keras's layers, which count in a variable.
    """
    if "Parallel" in type(dataset).__name__:
        graphs = [function.function.graph.as_graph_def() for function in dataset._functions()]
        nodes = (node for graph in graphs for part in (graph, *graph.library.function) for node in _nodes(part))
        if any(node.op.startswith(("Random", "Stateful", "Assign")) for node in nodes):
            return True
    return any(map(draws_in_parallel, dataset._inputs()))


def _nodes(graph: Any) -> Any:
    return graph.node if hasattr(graph, "node") else graph.node_def


def warn_of_difference(rank: int, found: Difference, step: int, equal: int) -> None:
    """Warn on rank 0 that the batches of the ranks differ, so that those of rank 0 go to all from now on.

    Parameters
    ----------
    step, equal : number of that step, and of the latest one of which the batches were compared, and equal; 0: none.
    """
    if rank == 0:
        log.warning(
            "the ranks' batches of step %d of fit() differ (%s), since threads of its tf.data pipeline draw random "
            "numbers, in another order on each rank; %s\n"
            "  from this step on each rank trains on its rows of rank 0's batches, which are sent to all\n"
            "  remedy: augment in the model, or in a map() without num_parallel_calls, or by random numbers that "
            "follow from the sample (tf.random.stateless_uniform), so that all ranks make the same batches",
            *(step, found, f"those of step {equal} were equal" if equal else "none were compared before"),
        )


def batches_of_root(channel: Channel, batches: list[Any]) -> list[Any]:
    """Return rank 0's batches; raise ``PartitionError`` if their numbers differ. *Collective*."""
    values = [_components(leaf) for batch in batches for leaf in tf.nest.flatten(batch)]
    by_rank = channel.host.allgather_object((len(batches), values if channel.rank == 0 else None))
    if len({count for count, _ in by_rank}) > 1:
        raise PartitionError(
            "the ranks' tf.data pipelines end after different numbers of batches",
            expected="as many batches on each rank",
            found=f"rank 0 has {by_rank[0][0]} more, others {sorted({count for count, _ in by_rank[1:]})}",
            remedy="draw no random numbers that decide which samples there are, or seed them",
        )
    of_root = iter(by_rank[0][1])
    return [tf.nest.map_structure(lambda leaf: _packed(leaf, next(of_root)), batch) for batch in batches]


def _components(leaf: Any) -> list[Any]:
    """Return the arrays of a tensor; none for the optional that stands for None in Keras's datasets."""
    if isinstance(leaf, tf.experimental.Optional):
        return []
    return [tensor.numpy() for tensor in tf.nest.flatten(leaf, expand_composites=True)]


def _packed(leaf: Any, values: list[Any]) -> Any:
    if isinstance(leaf, tf.experimental.Optional):
        return leaf
    own = tf.nest.flatten(leaf, expand_composites=True)
    tensors = [tf.constant(value, tensor.dtype) for value, tensor in zip(values, own, strict=True)]
    return tf.nest.pack_sequence_as(leaf, tensors, expand_composites=True)
