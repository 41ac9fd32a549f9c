"""``save``: write a model of which each rank holds a part."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

from matex_data._types import Array
from matex_data.errors import DataError
from matex_data.mpi.activity import busy
from matex_data.mpi.library import MPI
from matex_data.training.comm.channel import Channel, open_channel
from matex_data.training.comm.world import running_alone
from matex_data.training.partition.deferred import is_absent
from matex_data.training.partition.parts import as_whole, empty_whole, part_of, whole_at_root

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
    elsewhere = ValuesElsewhere(model, channel)
    error: DataError | None = None
    if channel.rank == 0:
        try:
            with running_alone(), busy("save()"), elsewhere.fetched():
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
        elsewhere.serve()
    if channel.size > 1:
        error = channel.host.allgather_object(error)[0]
    if error is not None:
        raise error


class ValuesElsewhere:
    """Values of variables of which rank 0 has a part or nothing. *Collective*.

    The ranks that hold the parts of a variable join them on the lowest of these, which sends the whole to rank 0.

    Parameters
    ----------
    model : model with an optimizer; of its weights each rank may have some, or parts of them.
    channel : ranks that have all of its weights between them.
    """

    def __init__(self, model: Any, channel: Channel) -> None:
        self._channel = channel
        state = [] if getattr(model, "optimizer", None) is None else model.optimizer.variables
        own = [v for v in [*model.variables, *state] if part_of(v) is not None]
        weights = {id(v) for v in model.weights}
        # Stages have other numbers of slots. Rank 0 saves those of its own: its stage alone joins their parts.
        self._variables = [*model.weights, *(v for v in own if id(v) not in weights)]
        self._shared = len(model.weights)
        holders = [channel.size if is_absent(v) else channel.rank for v in self._variables[: self._shared]]
        cut = [part_of(v) is not None for v in self._variables[: self._shared]]
        self._holders, self._cut = np.array(holders, np.int64), np.array(cut, np.int64)
        if channel.size > 1 and holders:
            channel.host.reduce(self._holders, "min")
            channel.host.reduce(self._cut, "max")

    @contextlib.contextmanager
    def fetched(self) -> Iterator[None]:
        """Context manager on rank 0: reading a variable fetches it."""
        needed = np.flatnonzero((self._holders > 0) | (self._cut > 0)).tolist()
        needed += range(self._shared, len(self._variables))
        try:
            with as_whole([(self._variables[i], functools.partial(self._fetch, i)) for i in needed]):
                yield
        finally:
            if self._channel.size > 1:
                self._channel.host.broadcast(np.array([_END], np.int64))

    def serve(self) -> None:
        """Send variables to rank 0 until it ends."""
        while True:
            number = np.empty(1, np.int64)
            self._channel.host.broadcast(number)
            if number[0] == _END:
                return
            self._sent(int(number[0]))

    def _fetch(self, number: int) -> Any:
        if self._channel.size > 1:
            self._channel.host.broadcast(np.array([number], np.int64))
        return keras.ops.convert_to_tensor(self._sent(number))

    def _sent(self, number: int) -> Array | None:
        """Return a variable on rank 0. *Collective*."""
        holder = int(self._holders[number]) if number < self._shared else 0
        whole = self._joined(number, holder)
        if holder == 0:
            return whole
        value = empty_whole(self._variables[number]) if whole is None else whole
        self._channel.host.broadcast(value.reshape(-1), holder)
        return value

    def _joined(self, number: int, holder: int) -> Array | None:
        """Return a variable on its holder; on the others None, or what they have themselves."""
        if number >= len(self._variables):  # of another stage
            return None
        variable = self._variables[number]
        part = part_of(variable)
        nested = part is not None and part.outer is not None
        if is_absent(variable) or not (nested or self._is_among(holder, part)):
            return None
        return whole_at_root(variable)

    def _is_among(self, holder: int, part: Any) -> bool:
        """Return whether a rank is among those that hold the other parts of a variable, or is this one."""
        if part is None:
            return holder == self._channel.rank
        group = part.channel.user.group
        return bool(self._channel.user.group.Translate_ranks([holder], group)[0] != MPI.UNDEFINED)


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
