"""The same values on every rank before the first step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from matex_data.mpi.library import MPI
from matex_data.training.comm.channel import Channel, open_channel


def broadcast(variables: Iterable[Any], root: int = 0, *, comm: MPI.Intracomm | None = None) -> None:
    """Give the variables of all ranks the values of rank ``root``. *Collective*.

    Parameters
    ----------
    variables : Keras or TensorFlow variables, of the same number, shapes and dtypes on every rank.

    Raises
    ------
    RuntimeError : on all ranks, if the ranks have different variables.
    """
    broadcast_in(open_channel(comm), list(variables), root)


def broadcast_in(channel: Channel, variables: list[Any], root: int = 0) -> None:
    """The same, in a channel. *Collective*."""
    if channel.size == 1:
        return
    shapes = [(tuple(variable.shape), str(variable.dtype)) for variable in variables]
    channel.check_same(f"broadcast {shapes} from rank {root}")
    for variable in variables:
        value = np.array(_value(variable), order="C")
        channel.host.broadcast(value.reshape(-1), root)
        if channel.rank != root:
            variable.assign(value)


def _value(variable: Any) -> Any:
    return variable.numpy() if hasattr(variable, "numpy") else variable.value.numpy()
