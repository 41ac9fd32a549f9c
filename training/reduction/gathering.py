"""Arrays and Python objects of all ranks, for scripts: gathered, broadcast from one rank, or none, to meet."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import tensorflow as tf

from matex_data._types import Array
from matex_data.errors import PartitionError
from matex_data.mpi.activity import collective
from matex_data.mpi.library import MPI
from matex_data.training.arguments import open_checked
from matex_data.training.comm.channel import Channel, check_root, open_channel
from matex_data.training.reduction.ops import gather_rows


def allgather(array: Any, *, comm: MPI.Intracomm | None = None) -> Any:
    """Return the rows of the arrays of all ranks, one after the other in the order of ranks. *Collective*.

    Every rank has all of them in memory: gather results, not data sets.

    Parameters
    ----------
    array : ndarray or tensor of shape (rows, ...), whose number of rows may differ between the ranks; or a number or
        text, which is one row. Tensors may be those of a ``tf.function``.
    comm : communicator; None: all ranks of the job.

    Returns
    -------
    array : of shape (rows of all ranks, ...), the same on every rank; a tensor for a tensor, otherwise an ndarray.

    Raises
    ------
    PartitionError : on all ranks, if dtypes, or shapes behind the first axis, differ between ranks that have rows; in a
        ``tf.function``, an error of TensorFlow when it runs.
    RuntimeError : on all ranks, if one of them calls something else instead, also of the two functions below.

    Examples
    --------
    >>> import numpy as np, matex_data as md
    >>> md.training.allgather(np.array([3, 1])).tolist()  # on one rank: its own rows
    [3, 1]
    >>> md.training.allgather(0.5).tolist()  # on two ranks: two numbers
    [0.5]
    """
    channel = open_channel(comm)
    is_tensor = isinstance(array, tf.Tensor | tf.Variable)
    if is_tensor and not tf.executing_eagerly():
        tensor = tf.convert_to_tensor(array)
        rows = tensor[tf.newaxis] if tensor.shape.rank == 0 else tensor
        return rows if channel.size == 1 else gather_rows(channel, [rows])[0]
    with collective("allgather()"):
        if channel.size > 1:
            channel.check_same("call allgather()")
        found = gathered(channel, np.atleast_1d(np.asarray(array)))
    return tf.convert_to_tensor(found, tf.string if found.dtype.hasobject else None) if is_tensor else found


def gathered(channel: Channel, rows: Array) -> Array:
    """Return the concatenated rows of all ranks, in the order of ranks. *Collective*.

    Parameters
    ----------
    rows : array of shape (rows, ...), as for ``allgather``; texts may be of different lengths.
    """
    if channel.size == 1:
        return rows
    kinds = channel.host.allgather_object((rows.dtype, rows.shape[1:], len(rows)))
    with_rows = [rank for rank, (*_, count) in enumerate(kinds) if count] or [0]
    dtype, shape, _ = kinds[with_rows[0]]
    for rank in with_rows:
        other, inner, _ = kinds[rank]
        if inner != shape or (other != dtype and (other.kind != dtype.kind or dtype.kind not in "SU")):
            raise PartitionError(
                "the arrays of the ranks cannot be gathered",
                expected=f"rows of {dtype} of shape {shape}, as on rank {with_rows[0]}",
                found=f"rows of {other} of shape {inner} on rank {rank}",
                remedy="give arrays of one dtype and one shape on all ranks, but for the number of rows",
            )
    if dtype.kind == "O":
        return np.concatenate([of_rank for of_rank in channel.host.allgather_object(rows) if len(of_rank)])
    common = max((kinds[rank][0] for rank in with_rows), key=lambda other: other.itemsize)
    own = rows if len(rows) else np.empty((0, *shape), common)  # an empty list has no dtype of its own
    return channel.host.gather(np.ascontiguousarray(own, common))


def broadcast_object(value: Any, root: int = 0, *, comm: MPI.Intracomm | None = None) -> Any:
    """Return a Python object of rank ``root`` on all ranks. *Collective*.

    Parameters
    ----------
    value : object that can be pickled, of any size; that of other ranks is ignored.
    root : rank whose object all ranks get.
    comm : communicator; None: all ranks of the job.

    Returns
    -------
    value : on rank ``root`` the object itself, on other ranks a copy.

    Raises
    ------
    PartitionError : on all ranks, if the object cannot be pickled, or there is no such rank.

    Examples
    --------
    >>> import matex_data as md
    >>> settings = {"rate": 0.01} if md.training.world().rank == 0 else None
    >>> md.training.broadcast_object(settings)
    {'rate': 0.01}
    """
    channel = open_checked("training.broadcast_object", broadcast_object, locals())
    check_root(channel, root)
    if channel.size == 1:
        return value
    communicator = channel.communicator
    with collective("broadcast_object()"):
        channel.check_same(f"call broadcast_object(root={root})")
        packed = communicator.agreed(lambda: _pickled(value, root) if channel.rank == root else b"")
        (nbytes,) = communicator.maximum(len(packed))
        content = np.frombuffer(bytearray(packed or nbytes), np.uint8)
        channel.host.broadcast(content, root)
    return value if channel.rank == root else pickle.loads(content.tobytes())


def _pickled(value: Any, rank: int) -> bytes:
    """Return the pickle of an object of a rank; raise ``PartitionError`` if there is none."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # of any kind: the other ranks wait
        raise PartitionError(
            "an object cannot be sent to the other ranks",
            expected="an object that can be pickled",
            found=f"on rank {rank}: {type(error).__name__}: {error}",
            remedy="send numbers, texts, or arrays of NumPy",
        ) from error


def barrier(*, comm: MPI.Intracomm | None = None) -> None:
    """Return once all ranks have called this; a rank that waits leaves its core to others. *Collective*.

    Parameters
    ----------
    comm : communicator; None: all ranks of the job.

    Examples
    --------
    >>> import matex_data as md
    >>> if md.training.world().rank == 0:
    ...     pass  # write a file that all ranks read next
    >>> md.training.barrier()
    """
    channel = open_channel(comm)
    if channel.size > 1:
        with collective("barrier()"):
            channel.check_same("call barrier()")
