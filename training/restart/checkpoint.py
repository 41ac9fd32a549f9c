"""Checkpoint: one file with everything that training needs to resume. Rank 0 replaces it atomically.

The file is an uncompressed ``.npz`` with the facts of the run as JSON and one array for each variable. Variables that
are equal on all ranks are stored once, and matched by name; so are metrics, over all ranks. Seeds are stored for each
replica. Variables of which ranks hold parts are stored whole; so a run resumes on any mesh. Writing and reading, each
rank holds its own values alone, and one whole variable at a time.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from matex_data._types import Array
from matex_data.errors import DataError, FormatError, PartitionError
from matex_data.mpi.processes import is_running
from matex_data.training.comm.channel import Channel
from matex_data.training.exact.batch_norm import average_moving_statistics, moving_statistics
from matex_data.training.exact.metrics import combined_values, note_combined
from matex_data.training.exact.variables import (
    changing_variables,
    check_equal_weights,
    replicated_variables,
    replicated_weights,
    row_states,
)
from matex_data.training.partition.parts import Part, part_of, whole_array_at_root, whole_shape
from matex_data.training.partition.whole import WholeVariables

FILE = "training.npz"
VERSION = 6
_FACTS = "facts"
_OPTIONAL: dict[str, Any] = {
    "pipeline": {},
    "history": {"epoch": [], "logs": {}},
    "metrics": [],
    "moving": [],
    "rows": [],
    "micro_batches": [],
    "rates": [],
}
"""Facts that have these values unless they are given; rates are learning rates, with which the run began."""
_KINDS = {"position": dict, "data": list, "callbacks": list, "stopped": bool, "common": list, "own": list}
_KINDS |= {name: type(value) for name, value in _OPTIONAL.items()}
"""Facts of a checkpoint and their types in JSON, beside the version and the dtypes and shapes of the arrays."""
_POSITION = ("epoch", "step", "steps")


class StoredArrays:
    """Arrays of a checkpoint, each read when it is asked for.

    The file stays open: one that replaces it in the meantime changes nothing.

    Parameters
    ----------
    file : of NumPy arrays.
    table : dtype and shape of each array, by name; they are compared, and so are the checksums of all arrays.
    compared : called with the number of bytes that have been compared since the last call.

    Raises
    ------
    ValueError, zipfile.BadZipFile : the file has other arrays.
    """

    def __init__(self, file: Any, table: Mapping[str, Any], compared: Callable[[int], None]) -> None:
        self._file, self._table = file, dict(table)
        if {*file.files, _FACTS} - {_FACTS} != table.keys():
            raise ValueError(f"arrays {sorted({*file.files} ^ {*table, _FACTS})} are missing or unknown")
        for name in table:
            compared(self[name].nbytes)

    def __getitem__(self, name: str) -> Array:
        """Return an array, whose checksum NumPy compares; raise ``ValueError`` if it is not that of the table."""
        dtype, shape = _dtype(self._table[name][0]), tuple(self._table[name][1])
        array: Array = self._file[name]
        if array.dtype == np.uint8:  # the bytes of a dtype that NumPy files do not have
            array = array.view(dtype).reshape(shape)
        if array.dtype != dtype or array.shape != shape:
            raise ValueError(f"an array of {array.dtype}{list(array.shape)} where {dtype}{list(shape)} was saved")
        return np.ascontiguousarray(array).reshape(shape)


class Checkpoint:
    """Checkpoint that was read: its facts on all ranks, its arrays on rank 0.

    Parameters
    ----------
    channel : ranks that resume from it.
    path : path of the file.
    facts : facts of the run, equal on all ranks.
    arrays : arrays by name, read when they are asked for; empty on ranks other than 0.
    replicas : replicas of this rank's part of the model; None: every rank is one.

    Attributes
    ----------
    ranks, replica : number of replicas that resume from it, and the number of this one.
    was_read : called with the bytes of each array that rank 0 has read.
    """

    def __init__(
        self,
        channel: Channel,
        path: Path,
        facts: dict[str, Any],
        arrays: StoredArrays | dict[str, Array],
        replicas: Channel | None = None,
    ) -> None:
        self.path = path
        self.facts = facts
        self._channel, replicas = channel, replicas or channel
        self.ranks, self.replica = replicas.size, replicas.rank
        self.was_read: Callable[[int], None] = _ignore
        self._arrays = arrays

    def array(self, name: str) -> Array:
        """Return an array on all ranks. *Collective*."""
        dtype, shape = self.facts["arrays"][name]
        if self._channel.rank == 0:
            array = self._arrays[name]
            self.was_read(array.nbytes)
        else:
            array = np.empty(shape, _dtype(dtype))
        if self._channel.size > 1:
            self._channel.host.broadcast(array.reshape(-1))
        return array


def open_checkpoint(
    channel: Channel, folder: Path, replicas: Channel | None = None, compared: Callable[[int], None] | None = None
) -> Checkpoint | None:
    """Read the checkpoint of a folder on rank 0; return None if there is none. *Collective*.

    Remove the drafts that interrupted saves have left behind, too, and make the folder if there is none.

    Parameters
    ----------
    channel, replicas : as of ``Checkpoint``.
    folder : folder of the checkpoint.
    compared : called on rank 0 with the number of bytes that have been compared since the last call.

    Raises
    ------
    FormatError : on all ranks, if the checkpoint is damaged.
    DataError : on all ranks, if rank 0 cannot write to the folder.
    """
    arrays: list[StoredArrays] = []

    def stored() -> dict[str, Any] | None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):  # drafts do no harm
                _remove_drafts(folder)
            _draft(folder).touch()
            _draft(folder).unlink()
        except OSError as error:
            raise unwritable(folder, error) from error
        loaded = read(folder, compared or _ignore)
        arrays.extend(loaded[:1] if loaded else ())
        return loaded[1] if loaded else None

    facts = channel.communicator.on_root(stored)
    return None if facts is None else Checkpoint(channel, folder / FILE, facts, arrays[0] if arrays else {}, replicas)


def write(folder: Path, arrays: Iterable[tuple[str, Array]], facts: Mapping[str, Any]) -> None:
    """Replace the checkpoint of a folder atomically: a reader gets the old one or the new one.

    Parameters
    ----------
    arrays : names and arrays, of which each is written before the next one is asked for.
    facts : facts of the run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draft, table = _draft(folder), {}
    try:
        with draft.open("wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                for name, array in arrays:
                    table[name] = [keras.backend.standardize_dtype(array.dtype), array.shape]
                    _add(archive, name, _plain(array))
                text = json.dumps({**facts, "version": VERSION, "arrays": table}).encode()
                _add(archive, _FACTS, np.frombuffer(text, np.uint8))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(folder / FILE)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _draft(folder: Path) -> Path:
    """Return the path at which this process writes a checkpoint before it replaces that of a folder."""
    return folder / f".{FILE}.{os.getpid()}"


def unwritable(folder: Path, cause: OSError) -> DataError:
    """Return the error for a checkpoint that cannot be written."""
    intact = "; the previous one is intact" if os.path.lexists(folder / FILE) else ""
    return DataError(
        f"the checkpoint cannot be written{intact}",
        file=str(folder / FILE),
        expected="a folder that rank 0 can write to, with enough free space",
        found=cause,
        remedy="free space there, or give another folder",
    )


def _ignore(nbytes: int) -> None:
    """Do nothing with a number of bytes."""


def _add(archive: zipfile.ZipFile, name: str, array: Array) -> None:
    """Add an array to an archive, as ``np.savez`` does it."""
    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
        np.lib.format.write_array(member, array, allow_pickle=False)


def read(folder: Path, compared: Callable[[int], None] = _ignore) -> tuple[StoredArrays, dict[str, Any]] | None:
    """Return arrays and facts of the checkpoint in a folder; None if there is none.

    The whole file is compared with its checksums, so that a damaged one is found before anything is restored.

    Parameters
    ----------
    compared : called with the number of bytes that have been compared since the last call.

    Raises
    ------
    FormatError : the file is no checkpoint, is damaged, or cannot be read.
    """
    path = folder / FILE
    try:
        if not path.exists():
            return None
        file = np.load(path, allow_pickle=False)
        facts = {**_OPTIONAL, **json.loads(file[_FACTS].tobytes())}
        version = facts.pop("version")
    except Exception as error:  # a damaged file makes NumPy, zipfile and json raise errors of any class
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    if version != VERSION:
        raise FormatError(
            "the checkpoint has another format version",
            file=str(path),
            expected=VERSION,
            found=version,
            remedy="resume with the release of matex_data that wrote it, or delete it to start again",
        )
    try:
        _check(facts)
        return StoredArrays(file, facts["arrays"], compared), facts
    except Exception as error:  # as above
        raise _damaged(path, f"{type(error).__name__}: {error}") from error


def restore_rank_variables(found: Checkpoint, model: Any, of_all: bool = False) -> None:
    """Set the variables that differ between replicas: metrics and seeds. *Collective*.

    Another number of replicas gets the seeds of the first one. Metrics begin anew if the checkpoint has others.

    Parameters
    ----------
    of_all : each replica gets the metrics of all; otherwise the first one does, and the others begin anew.
    """
    shapes = {name: tuple(shape) for name, (_, shape) in found.facts["arrays"].items()}
    metrics, paths = model.metrics_variables, found.facts["metrics"]
    if [_unnumbered(v.path) for v in metrics] == [_unnumbered(path) for path in paths]:
        for i, variable in enumerate(metrics):
            if shapes[f"metrics{i}"] == tuple(variable.shape):
                value = found.array(f"metrics{i}")
                variable.assign(value if of_all or not found.replica else np.zeros_like(value))
    for i, variable in zip(range(len(found.facts["own"])), rank_variables(model), strict=False):
        if shapes[f"own{i}"][1:] == tuple(variable.shape):
            rows = found.array(f"own{i}")
            variable.assign(rows[found.replica if len(rows) == found.ranks else 0])
    if of_all:
        note_combined(model)


def _own_rows(found: Checkpoint, name: str, variable: Any) -> Array:
    """Return this replica's rows of a state of each row; raise ``PartitionError`` for another batch. *Collective*."""
    stack = found.array(name)
    rows = stack.reshape(-1, *stack.shape[2:])
    if rows.shape != (found.ranks * variable.shape[0], *variable.shape[1:]):
        raise _other_model(found, f"states of {variable.path} for another batch", f"states of {len(rows)} rows")
    own: Array = rows.reshape(found.ranks, *variable.shape)[found.replica]
    return own


def restore_replicated(found: Checkpoint, model: Any, described: Sequence[Any], held: Sequence[Any]) -> None:
    """Set variables that all replicas have alike. *Collective*.

    Parameters
    ----------
    described : these variables of the whole model, with their paths, shapes and dtypes.
    held : those of them that this rank has, or has a part of; None for others.

    Raises
    ------
    PartitionError : the checkpoint belongs to another model or optimizer.
    """
    positions = positions_of(found, names_of(model, described))
    table = [found.facts["arrays"][f"common{i}"] for i in positions]
    differ = [
        (f"{v.path} of {v.dtype}{list(whole_shape(v))}", f"{dtype}{list(shape)}")
        for v, (dtype, shape) in zip(described, table, strict=True)
        if tuple(shape) != whole_shape(v) or dtype != keras.backend.standardize_dtype(v.dtype)
    ]
    if differ:
        raise _other_model(found, *differ[0])
    for variable, i in zip(held, positions, strict=True):
        whole = found.array(f"common{i}")
        if variable is not None:
            part = part_of(variable)
            variable.assign(whole if part is None else part.own(whole))


class ModelState:
    """State of a model of which every rank holds all variables, or its part of each.

    Parameters
    ----------
    model : compiled model.
    channel : replicas of this rank's part of the model.
    world : all ranks; None: each of them is a replica.
    """

    def __init__(self, model: Any, channel: Channel, world: Channel | None = None) -> None:
        self._model, self._channel, self._world = model, channel, world or channel

    def capture(self, exact: bool = False) -> tuple[Iterator[tuple[str, Array]], dict[str, Any]]:
        """Return the variables of all ranks, and their names. *Collective*, and so is each step of the iterator.

        Moving statistics are averaged first, as at the end of an epoch, so that the run goes on with what is saved.
        Variables that may differ between ranks are stacked over all ranks.

        Parameters
        ----------
        exact : return the moving statistics of each rank as well: a run that would not have saved goes on with these.

        Returns
        -------
        arrays : names and arrays; all of them on the first rank of all, fewer on others.
        facts : names of the variables.

        Raises
        ------
        PartitionError : on all ranks, if they have different weights.
        """
        model, channel = self._model, self._channel
        check_equal_weights(model, channel)
        moving = moving_statistics(model) if exact and channel.size > 1 else []
        moving = [] if any(part_of(variable) is not None for variable in moving) else moving
        stacks = [channel.host.gather_at_root(np.array(v.value.numpy())) for v in moving]
        average_moving_statistics(model, channel)
        names = names_of(model, replicated_variables(model))
        kept = ((f"moving{i}", stack) for i, stack in enumerate(stacks) if stack is not None)
        stored = {"metrics": model.metrics_variables, "own": rank_variables(model)}
        stored |= {"moving": moving, "rows": row_states(model)}
        facts = {"common": names, **{kind: [v.path for v in variables] for kind, variables in stored.items()}}
        return itertools.chain(kept, self._arrays()), facts

    def _arrays(self) -> Iterator[tuple[str, Array]]:
        model, channel = self._model, self._channel
        metrics = combined_values(channel, model)
        yield from ((f"metrics{i}", value) for i, value in enumerate(metrics) if channel.rank == 0)
        for kind, variables in (("own", rank_variables(model)), ("rows", row_states(model))):
            for i, variable in enumerate(variables):
                stack = channel.host.gather_at_root(np.array(variable.value.numpy()))
                if stack is not None:
                    yield f"{kind}{i}", stack
        variables = replicated_variables(model)
        yield from ((f"common{i}", whole) for i, whole in WholeVariables(self._world, variables, variables).wholes())

    def restore(self, found: Checkpoint) -> None:
        """Set all variables; raise ``PartitionError`` if the checkpoint has others. *Collective*."""
        model = self._model
        variables = replicated_variables(model)
        restore_replicated(found, model, variables, variables)
        for i, variable in zip(range(len(found.facts["moving"])), moving_statistics(model), strict=False):
            if found.facts["arrays"][f"moving{i}"][1] == [found.ranks, *variable.shape]:
                variable.assign(found.array(f"moving{i}")[found.replica])
        for i, variable in zip(range(len(found.facts["rows"])), row_states(model), strict=True):
            variable.assign(_own_rows(found, f"rows{i}", variable))
        restore_rank_variables(found, model, of_all=True)

    def whole_weights(self, arrays: Sequence[Array]) -> Iterator[Array | None]:
        """Yield arrays that a callback has kept, those of parts of weights whole on the first rank. *Collective*."""
        for part, array in zip(self._parts(arrays), arrays, strict=True):
            yield whole_array_at_root(part, array)

    def own_weights(self, arrays: Sequence[Array]) -> list[Array]:
        """Return the arrays of ``whole_weights`` as a callback of this rank keeps them."""
        parts = self._parts(arrays)
        return [array if part is None else part.own(array) for part, array in zip(parts, arrays, strict=True)]

    def _parts(self, arrays: Sequence[Array]) -> list[Part | None]:
        """Return the parts of which such arrays are: those of all weights, or of none."""
        seen = self._seen_parts()
        return seen if len(seen) == len(arrays) else [None] * len(arrays)

    def _seen_parts(self) -> list[Part | None]:
        """Return the parts of the weights that callbacks see; None for those that they see whole."""
        return [part_of(variable) for variable in self._model.weights]


def rank_variables(model: Any) -> list[Any]:
    """Return the variables of layers that may differ between ranks: seeds and counters.

    Moving statistics that have been averaged are not among them: they are equal. States of rows are stored otherwise.
    """
    others = {id(v) for v in (*moving_statistics(model), *row_states(model))}
    return [v for v in changing_variables(model) if id(v) not in others]


def positions_of(found: Checkpoint, names: list[str]) -> list[int]:
    """Return the position of each variable in the checkpoint.

    Names decide. Keras numbers layers in the order in which a process creates them; if only these numbers differ, the
    order decides.

    Raises
    ------
    PartitionError : the checkpoint has other variables.
    """
    stored = found.facts["common"]
    if len(stored) == len(names) == len(set(names)) and set(stored) == set(names):
        by_name = {name: i for i, name in enumerate(stored)}
        return [by_name[name] for name in names]
    if [_unnumbered(name) for name in stored] == [_unnumbered(name) for name in names]:
        return list(range(len(names)))
    plain = [{_unnumbered(name) for name in of} for of in (names, stored)]
    missing = [name for name in names if _unnumbered(name) not in plain[1]]
    unknown = [name for name in stored if _unnumbered(name) not in plain[0]]
    raise _other_model(
        found,
        f"{len(names)} variables, {(missing or names)[:3]} among them",
        f"{len(stored)} variables, {(unknown or stored)[:3]} among them",
    )


def names_of(model: Any, variables: Sequence[Any]) -> list[str]:
    """Return the names of the replicated variables, without the numbers that Keras gives models and optimizers.

    Parameters
    ----------
    variables : weights of the model, and then variables of its optimizers.
    """
    pattern = rf"(?<![A-Za-z0-9]){re.escape(model.name)}(?=[/_])"
    names = [re.sub(pattern, "model", variable.path) for variable in variables]
    weights = len(replicated_weights(model))
    optimizers = (name.partition("/") for name in names[weights:])
    return names[:weights] + [f"{_unnumbered(optimizer)}/{name}" for optimizer, _, name in optimizers]


def _unnumbered(name: str) -> str:
    return re.sub(r"_\d+(?=[/_]|$)", "", name)


def _other_model(found: Checkpoint, expected: str, stored: str) -> PartitionError:
    return PartitionError(
        "this checkpoint belongs to another model or optimizer",
        file=str(found.path),
        expected=expected,
        found=stored,
        remedy="give another checkpoint folder, or build the model of the interrupted run",
    )


def _damaged(path: Path, found: str) -> FormatError:
    return FormatError(
        "this file is no checkpoint of a training run, or it is damaged",
        file=str(path),
        expected="a file written by training.fit",
        found=found,
        remedy="delete it to start again",
    )


def _check(facts: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` unless the facts are complete and of the types that ``training.fit`` saves."""
    kinds = {**_KINDS, "arrays": dict}
    wrong = [name for name in {*facts, *kinds} if not isinstance(facts.get(name), kinds.get(name, ()))]
    if wrong:
        raise ValueError(f"facts {sorted(wrong)} are missing, unknown or of another type")
    position = facts["position"]
    if position.keys() != set(_POSITION) or not all(isinstance(position[name], int) for name in _POSITION):
        raise ValueError(f"the position is {position}")
    if facts["history"].keys() != {"epoch", "logs"}:
        raise ValueError("facts of the history are missing")
    if not all({"class", "options", "state", "arrays"} <= entry.keys() for entry in facts["callbacks"]):
        raise ValueError("facts of callbacks are missing")
    for kind in ("common", "metrics", "own", "moving", "rows"):
        if any(f"{kind}{i}" not in facts["arrays"] for i in range(len(facts[kind]))):
            raise ValueError(f"arrays of {kind} variables are missing")


def _remove_drafts(folder: Path) -> None:
    """Remove the drafts of processes that no longer run."""
    for draft in folder.glob(f".{FILE}.*"):
        writer = draft.name.rpartition(".")[2]
        if not writer.isdecimal() or int(writer) == os.getpid() or not is_running(int(writer)):
            draft.unlink(missing_ok=True)


def _plain(array: Array) -> Array:
    """Return the bytes of an array whose dtype NumPy files do not have (bfloat16, float8), or the array itself."""
    return array.reshape(-1).view(np.uint8) if array.dtype.kind == "V" or array.dtype.isbuiltin != 1 else array


def _dtype(name: str) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(tf.as_dtype(name).as_numpy_dtype)
    return dtype
