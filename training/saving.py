"""``save``: write a model of which each rank holds a part."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from matex_data._types import Array
from matex_data.errors import DataError
from matex_data.mpi.activity import busy
from matex_data.mpi.library import MPI
from matex_data.training.comm.channel import Channel, open_channel
from matex_data.training.comm.world import running_alone
from matex_data.training.partition.deferred import is_absent
from matex_data.training.partition.parts import as_whole, part_of, whole_at_root

_END = -1


def save(model: Any, path: str | os.PathLike[str], *, comm: MPI.Intracomm | None = None, **options: Any) -> None:
    """Write a whole model to a file, on rank 0, whichever rank holds what of it. *Collective*.

    Rank 0 gets one variable after the other from the ranks that hold parts of it, and has at most one of them whole.

    Parameters
    ----------
    model : Keras model, also one that was deferred; its optimizer's state is saved, too.
    path : path that ends in ``.keras``, or in ``.weights.h5`` for the weights alone.
    comm : ranks that hold the model; None: all ranks of the job.
    options : of ``keras.Model.save`` or ``save_weights``.

    Raises
    ------
    DataError : on all ranks, if the file cannot be written.

    Examples
    --------
    >>> import keras, pathlib, tempfile, matex_data as md
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.keras"
    >>> md.training.save(model, path)
    >>> keras.saving.load_model(path).count_params()
    8
    """
    channel = open_channel(comm)
    weights_only = str(path).endswith(".weights.h5")
    write = type(model).save_weights if weights_only else type(model).save
    parts, absent = parts_of(model), AbsentValues(model, channel)
    error: DataError | None = None
    if channel.rank == 0:
        try:
            with running_alone(), busy("save()"), _fetching(parts), absent.fetched():
                write(model, path, **options)
        except Exception as cause:
            error = DataError(
                "the model cannot be written",
                file=str(Path(path)),
                expected="a path that rank 0 can write to, and a model that Keras can save",
                found=f"{type(cause).__name__}: {cause}",
                remedy="give another path",
            )
    else:
        if parts and _serves(parts[0], channel):
            _serve(parts)
        absent.serve()
    if channel.size > 1:
        error = channel.host.allgather_object(error)[0]
    if error is not None:
        raise error


class AbsentValues:
    """Values of the weights that rank 0 does not have: each is sent by the lowest rank that has it. *Collective*.

    Parameters
    ----------
    model : model whose weights some ranks lack, such as those of other stages.
    channel : ranks that have all of its weights between them.
    """

    def __init__(self, model: Any, channel: Channel) -> None:
        self._channel, self._variables = channel, model.weights
        holders = [channel.size if is_absent(v) else channel.rank for v in self._variables]
        self._holders = np.array(holders, np.int64)
        if channel.size > 1 and len(holders):
            channel.host.reduce(self._holders, "min")

    @contextlib.contextmanager
    def fetched(self) -> Iterator[None]:
        """Context manager on rank 0: reading a weight fetches it."""
        needed = np.flatnonzero(self._holders > 0)
        try:
            with as_whole([(self._variables[i], functools.partial(self._fetch, int(i))) for i in needed]):
                yield
        finally:
            if needed.size:
                self._channel.host.broadcast(np.array([_END], np.int64))

    def serve(self) -> None:
        """Send weights to rank 0 until it ends."""
        while np.any(self._holders > 0):
            number = np.empty(1, np.int64)
            self._channel.host.broadcast(number)
            if number[0] == _END:
                return
            self._sent(int(number[0]))

    def _fetch(self, number: int) -> Any:
        self._channel.host.broadcast(np.array([number], np.int64))
        return keras.ops.convert_to_tensor(self._sent(number))

    def _sent(self, number: int) -> Array:
        """Return a weight on all ranks. *Collective*."""
        variable, holder = self._variables[number], int(self._holders[number])
        dtype = tf.as_dtype(variable.dtype).as_numpy_dtype
        value = np.empty(tuple(variable.shape), dtype)
        if self._channel.rank == holder:
            value = np.array(variable.value.numpy())
        self._channel.host.broadcast(value.reshape(-1), holder)
        return value


def parts_of(model: Any) -> list[Any]:
    """Return the variables of a model and its optimizer of which each rank holds a part."""
    state = [] if getattr(model, "optimizer", None) is None else model.optimizer.variables
    return [variable for variable in [*model.variables, *state] if part_of(variable) is not None]


@contextlib.contextmanager
def saving_together(model: Any, comm: MPI.Intracomm) -> Iterator[None]:
    """Context manager: ``save`` and ``save_weights`` of a model are *collective*, as all ranks call them."""

    def together(path: Any, **options: Any) -> None:
        save(model, path, comm=comm, **options)

    before = {name: vars(model).get(name) for name in ("save", "save_weights")}
    for name in before:
        object.__setattr__(model, name, together)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                object.__delattr__(model, name)
            else:
                object.__setattr__(model, name, value)


@contextlib.contextmanager
def _fetching(parts: list[Any]) -> Iterator[None]:
    """Context manager on rank 0: reading a variable fetches its parts from the ranks that hold them."""
    channel = part_of(parts[0]).channel if parts else None  # type: ignore[union-attr]

    def fetch(number: int) -> Callable[[], Any]:
        def value() -> Any:
            assert channel is not None
            channel.host.broadcast(np.array([number], np.int64))
            return keras.ops.convert_to_tensor(whole_at_root(parts[number]))

        return value

    try:
        with as_whole([(variable, fetch(i)) for i, variable in enumerate(parts)]):
            yield
    finally:
        if channel is not None:
            channel.host.broadcast(np.array([_END], np.int64))


def _serves(variable: Any, channel: Channel) -> bool:
    """Return whether rank 0 of a channel is among the ranks with the other parts of a variable."""
    part = part_of(variable)
    assert part is not None
    return channel.user.group.Translate_ranks([0], part.channel.user.group)[0] != MPI.UNDEFINED


def _serve(parts: list[Any]) -> None:
    """Send parts of variables to the rank that saves, until it ends."""
    first = part_of(parts[0])
    assert first is not None
    while True:
        number = np.empty(1, np.int64)
        first.channel.host.broadcast(number)
        if number[0] == _END:
            return
        whole_at_root(parts[int(number[0])])
