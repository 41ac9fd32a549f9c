"""``save``: write a model of which each rank holds a part. ``model.save`` of all ranks, which may name one path."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

from matex_data.errors import DataError
from matex_data.mpi.activity import busy
from matex_data.mpi.library import MPI
from matex_data.mpi.processes import remove_unfinished, unfinished_name
from matex_data.training.arguments import check_model, open_checked
from matex_data.training.comm.channel import Channel
from matex_data.training.comm.world import running_alone
from matex_data.training.exact.variables import inner_optimizer
from matex_data.training.model_parallel.deferred import AbsentVariable, is_absent
from matex_data.training.partition.parts import PartVariable, as_whole, part_of
from matex_data.training.partition.whole import WholeVariables, whole_optimizer
from matex_data.training.replacements import Replacements, replaced

WAITS_FOR_ROOT = "waits_for_root"  # attribute of the functions that matex run has replaced
ONE_FILE = {".keras", ".h5"}

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
    ArgumentError : ``model`` is no model, or ``path`` no path.
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
    check = functools.partial(check_model, "training.save", model)
    channel = open_checked("training.save", save, locals(), check)
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
    channel.communicator.agree(error)


class ValuesElsewhere:
    """Values of variables of which rank 0 has a part or nothing. *Collective*.

    Parameters
    ----------
    model : model with an optimizer; of its weights and of the state for them each rank may have some, or parts of them.
    channel : ranks that have all of its weights between them.
    """

    def __init__(self, model: Any, channel: Channel) -> None:
        self._channel, self._model = channel, model
        optimizer = getattr(model, "optimizer", None)
        state = [] if optimizer is None else optimizer.variables
        weights = list({id(v): v for v in model.weights}.values())
        held = [None if is_absent(v) else v for v in weights]
        self._whole = self._whole_optimizer(optimizer)
        if self._whole is not None:
            own = {v.path: v for v in state}
            of_whole = self._whole.variables
            self._variables = WholeVariables(
                channel, [*weights, *of_whole], [*held, *(own.get(v.path) for v in of_whole)]
            )
            if (self._variables.holders[len(weights) :] < channel.size).all():
                return
            self._whole = None  # no rank has trained some weight
        cut = [v for v in [*model.variables, *state] if part_of(v) is not None and not any(v is x for x in weights)]
        self._variables = WholeVariables(channel, [*weights, *cut], [*held, *cut])

    def _whole_optimizer(self, optimizer: Any) -> Any:
        """Return the optimizer for all weights, without values; None unless ranks have the state for some of them."""
        lacks, variables = 0, self._model.trainable_variables
        if optimizer is not None and optimizer.built:
            lacks = int(len(inner_optimizer(optimizer)._trainable_variables) < len(variables))
        if self._channel.size == 1 or not self._channel.communicator.maximum(lacks)[0]:
            return None
        return whole_optimizer(optimizer, variables)

    @contextlib.contextmanager
    def fetched(self) -> Iterator[None]:
        """Context manager on rank 0: reading a variable fetches it; the optimizer has the state for all weights."""
        variables = self._variables
        wholes: list[tuple[Any, Callable[[], Any]]] = []
        state = {id(v) for v in ([] if self._whole is None else self._whole.variables)}
        for i, (described, held) in enumerate(zip(variables.described, variables.held, strict=True)):
            variable = described if held is None or id(described) in state else held
            if id(described) in state:  # of the optimizer for all weights, without values
                variable.__class__ = AbsentVariable
            elif not variables.is_elsewhere(i) or not isinstance(variable, (PartVariable, AbsentVariable)):
                continue
            wholes.append((variable, functools.partial(self._value, i)))
        optimizer = contextlib.nullcontext() if self._whole is None else replaced(self._model, optimizer=self._whole)
        try:
            with as_whole(wholes), optimizer:
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
            self._variables.at_root(int(number[0]))

    def _value(self, number: int) -> Any:
        if not self._variables.is_elsewhere(number):
            return self._variables.held[number].value
        if self._channel.size > 1:
            self._channel.host.broadcast(np.array([number], np.int64))
        return keras.ops.convert_to_tensor(self._variables.at_root(number))


def saving_on_all(model: Any, comm: MPI.Intracomm) -> Replacements:
    """Return a context manager: ``save`` and ``save_weights`` of a model are *collective*, as all ranks call them."""

    def save_on_all(path: Any, **options: Any) -> None:
        save(model, path, comm=comm, **options)

    return replaced(model, save=save_on_all, save_weights=save_on_all)


def save_by_renaming(model: Any) -> None:
    """Let ``save`` and ``save_weights`` write a file of their own, and rename it: all ranks may name one path."""
    for name in ("save", "save_weights"):
        write = getattr(type(model), name)
        if write is getattr(keras.Model, name) and WAITS_FOR_ROOT not in vars(write):
            object.__setattr__(model, name, _renaming(functools.partial(write, model)))


def _renaming(write: Callable[..., None]) -> Callable[..., None]:
    """Return one of Keras's functions, which writes a file by another name first."""

    def save(filepath: Any, overwrite: bool = True, **options: Any) -> None:
        local = isinstance(filepath, str | os.PathLike) and "://" not in str(filepath)
        if not local or not overwrite or Path(filepath).suffix not in ONE_FILE:
            return write(filepath, overwrite=overwrite, **options)
        target = Path(filepath).resolve()
        own = _draft(target)
        try:
            write(own, **options)
            own.replace(target)
        finally:
            own.unlink(missing_ok=True)

    return save


def _draft(target: Path) -> Path:
    """Return the path at which this rank writes a file first; remove those of killed ranks."""
    remove_unfinished(target.parent, ".")
    return target.with_name(unfinished_name(".", f"{MPI.COMM_WORLD.rank}-{target.name}"))
