"""One file that holds all that training needs to go on: written by rank 0, whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from matex_data.errors import FormatError, PartitionError
from matex_data.training.build import state
from matex_data.training.channel import Channel
from matex_data.training.replicas import broadcast_in

Array = NDArray[Any]

FILE = "training.npz"
_FACTS = "facts"
VERSION = 1


def write(folder: Path, arrays: Mapping[str, Array], facts: Mapping[str, Any]) -> None:
    """Replace the checkpoint of that folder; whoever reads it meanwhile sees the old one or the new one."""
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{FILE}.{os.getpid()}"
    text = np.frombuffer(json.dumps({**facts, "version": VERSION}).encode(), np.uint8)
    columns: dict[str, Any] = {_FACTS: text, **{name: _plain(array) for name, array in arrays.items()}}
    with draft.open("wb") as file:
        np.savez(file, **columns)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(folder / FILE)


def read(folder: Path) -> tuple[dict[str, Array], dict[str, Any]] | None:
    """Arrays and facts of the checkpoint in that folder; None where there is none.

    Raises
    ------
    FormatError : it is not such a file.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        facts = json.loads(arrays.pop(_FACTS).tobytes())
        version = facts["version"]
    except (OSError, ValueError, KeyError) as error:
        raise FormatError(
            "this is no checkpoint of a training run", file=str(path), remedy="remove it to start anew"
        ) from error
    if version != VERSION:
        raise FormatError("a checkpoint of another version", file=str(path), expected=VERSION, found=version)
    return arrays, facts


def read_together(opened: Channel, folder: Path) -> tuple[dict[str, Array], dict[str, Any]] | None:
    """The same, read by rank 0, for all ranks. *Collective*.

    Raises
    ------
    FormatError : on all ranks.
    """
    found: Any = None
    if opened.rank == 0:
        try:
            found = read(folder)
        except FormatError as error:
            found = error
    found = opened.host.objects(found)[0] if opened.size > 1 else found
    if isinstance(found, FormatError):
        raise found
    return None if found is None else (found[0], found[1])


def capture(model: Any, opened: Channel) -> dict[str, Array]:
    """All variables of a model: those alike on all ranks, and those of each rank. *Collective*."""
    arrays = {f"common{i}": np.array(v.value.numpy()) for i, v in enumerate(state(model))}
    own = [np.array(v.value.numpy()) for v in own_variables(model)]
    everyone = opened.host.objects(own) if opened.size > 1 else [own]
    return arrays | {f"own{i}": np.stack(values) for i, values in enumerate(zip(*everyone, strict=True))}


def restore(model: Any, opened: Channel, arrays: Mapping[str, Array]) -> None:
    """Set the variables that are alike on all ranks, and this rank's own where the number of ranks is the same.

    Raises
    ------
    PartitionError : the checkpoint is one of another model or optimizer.
    """
    variables = state(model)
    stored = [arrays[f"common{i}"] for i in range(sum(name.startswith("common") for name in arrays))]
    shapes = [[_shape(a, v) for a, v in zip(stored, variables, strict=False)], [tuple(v.shape) for v in variables]]
    if len(stored) != len(variables) or shapes[0] != shapes[1]:
        raise PartitionError(
            "this checkpoint is one of another model or optimizer",
            expected=f"{len(variables)} variables of shapes {shapes[1]}",
            found=f"{len(stored)} variables of shapes {[a.shape for a in stored]}",
            remedy="give another folder as checkpoint, or build the model that the run began with",
        )
    for variable, array in zip(variables, stored, strict=True):
        variable.assign(_typed(array, variable))
    broadcast_in(opened, variables)
    restore_own(model, opened, arrays)


def restore_own(model: Any, opened: Channel, arrays: Mapping[str, Array]) -> None:
    """Set metrics, seeds and statistics. For another number of ranks: sums go to rank 0, seeds are drawn anew."""
    metrics = len(model.metrics_variables)
    for i, variable in enumerate(own_variables(model)):
        if f"own{i}" not in arrays or arrays[f"own{i}"].shape[1:] != tuple(variable.shape):
            continue
        values = arrays[f"own{i}"]
        if len(values) == opened.size:
            variable.assign(_typed(values[opened.rank], variable))
        elif i < metrics:
            variable.assign(values.sum(0, dtype=values.dtype) * (opened.rank == 0))


def own_variables(model: Any) -> list[Any]:
    """Variables that may differ between ranks: first the metrics', then seeds and moving statistics."""
    return [*model.metrics_variables, *model.non_trainable_variables]


def _plain(array: Array) -> Array:
    """Types that NumPy's files do not have (bfloat16, float8) as their bytes, along one more axis."""
    return array[..., None].view(np.uint8) if array.dtype.kind == "V" or array.dtype.isbuiltin != 1 else array


def _typed(array: Array, variable: Any) -> Array:
    dtype = variable.value.numpy().dtype
    if array.shape == tuple(variable.shape):
        return array
    typed: Array = np.ascontiguousarray(array).view(dtype)[..., 0]
    return typed


def _shape(array: Array, variable: Any) -> tuple[int, ...]:
    extra = array.ndim == len(variable.shape) + 1 and array.dtype == np.uint8
    return array.shape[:-1] if extra else array.shape
