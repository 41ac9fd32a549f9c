"""State of callbacks in a checkpoint: their counters and arrays, without their options."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from matex_data.training.keras_api import CALLBACK_STATE
from matex_data.training.learning_rate import ScaledLearningRate

log = logging.getLogger("matex_data.training")

KNOWN = (*CALLBACK_STATE, (ScaledLearningRate, ("_base", "_done")))
"""Attributes that change during training, by the class of a callback."""
IDENTITY = ("monitor", "mode")
"""Options that give the state its meaning: the best loss is no best accuracy."""

CallbackEntry = Mapping[str, Any]


def identity(callback: Any) -> dict[str, Any]:
    """Return the class and the plain options of a callback, by which ``match`` finds it. Call it before training."""
    state = _attributes(callback)
    options: dict[str, Any] = {
        name: value
        for name, value in vars(callback).items()
        if name not in state and not name.startswith("_") and isinstance(value, bool | int | float | str | None)
    }
    if isinstance(options.get("min_delta"), int | float):
        options["min_delta"] = abs(options["min_delta"])  # Keras may change its sign in the first epoch
    kind = type(callback)
    return {"class": f"{kind.__module__}.{kind.__qualname__}", "options": options}


def capture(callback: Any) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Return the state of a callback.

    A callback class of the user is captured, too, if it has the methods ``get_state()``, which returns a value for
    JSON, and ``set_state(value)``.

    Returns
    -------
    entry : state for JSON.
    arrays : lists of arrays, by attribute.
    """
    facts: dict[str, Any] = {}
    arrays = kept_arrays(callback)
    for name in _attributes(callback):
        value = getattr(callback, name, None)
        if name not in arrays:
            facts[name] = value if isinstance(value, bool | int | float | str | None) else np.asarray(value).item()
    return {"state": facts, **({"own": callback.get_state()} if _has_hooks(callback) else {})}, arrays


def kept_arrays(callback: Any) -> dict[str, list[Any]]:
    """Return the lists of arrays that a callback keeps, such as weights, by attribute."""
    values = {name: getattr(callback, name, None) for name in _attributes(callback)}
    return {
        name: [np.asarray(array) for array in kept] for name, kept in values.items() if isinstance(kept, list | tuple)
    }


def restore(callback: Any, saved: CallbackEntry, arrays: Mapping[str, list[Any]]) -> None:
    """Restore the state that ``capture`` has returned."""
    known = _attributes(callback)
    vars(callback).update({name: value for name, value in {**saved["state"], **arrays}.items() if name in known})
    if "own" in saved and _has_hooks(callback):
        callback.set_state(saved["own"])


def match(callbacks: Sequence[Any], saved: Sequence[CallbackEntry], warn: bool) -> list[tuple[Any, int]]:
    """Return pairs of a callback and its position in ``saved``.

    Options distinguish callbacks of one class that monitor the same quantity; order distinguishes equal ones. If one
    such callback remains on each side, they match in spite of different options. Others start without state.

    Parameters
    ----------
    saved : entries of the checkpoint.
    warn : log callbacks that start without state although the checkpoint has one of their class.
    """
    pairs: list[tuple[Any, int]] = []
    now = [identity(callback) for callback in callbacks]
    free = list(range(len(saved)))
    unmatched = [i for i, callback in enumerate(callbacks) if _attributes(callback) or _has_hooks(callback)]
    for i in list(unmatched):
        equal = [k for k in free if saved[k]["class"] == now[i]["class"] and saved[k]["options"] == now[i]["options"]]
        if equal:
            pairs.append((callbacks[i], equal[0]))
            free.remove(equal[0])
            unmatched.remove(i)
    groups = {i: [k for k in free if _watched(saved[k]) == _watched(now[i])] for i in unmatched}
    for i, group in groups.items():
        rivals = [other for other in unmatched if _watched(now[other]) == _watched(now[i])]
        if len(group) == len(rivals) == 1:
            pairs.append((callbacks[i], group[0]))
        elif warn and any(saved[k]["class"] == now[i]["class"] for k in free):
            log.warning(
                "%s starts without its saved state: the checkpoint has none, or several, for the options %s\n"
                "  remedy: give the callbacks the options that they had when the run began",
                type(callbacks[i]).__name__,
                ", ".join(f"{name}={value!r}" for name, value in now[i]["options"].items()),
            )
    return pairs


def _watched(entry: CallbackEntry) -> tuple[Any, ...]:
    return (entry["class"], *(entry["options"].get(name) for name in IDENTITY))


def _attributes(callback: Any) -> tuple[str, ...]:
    return next((names for kind, names in KNOWN if isinstance(callback, kind)), ())


def _has_hooks(callback: Any) -> bool:
    return all(callable(getattr(callback, name, None)) for name in ("get_state", "set_state"))
