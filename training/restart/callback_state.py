"""State of callbacks that goes through a restart: what they have counted and kept, never their options."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from matex_data.training.keras_api import CALLBACK_STATE
from matex_data.training.learning_rate import ScaledLearningRate

log = logging.getLogger("matex_data.training")

KNOWN = (*CALLBACK_STATE, (ScaledLearningRate, ("_base",)))
"""Attributes that change in the course of training, by the class of a callback."""
IDENTITY = ("monitor", "mode")
"""Options without which the state means something else: a best loss is no best accuracy."""

Entry = Mapping[str, Any]


def identity(callback: Any) -> dict[str, Any]:
    """Return the class of a callback and its plain options, by which it is found again. Call it before training."""
    state = _attributes(callback)
    options: dict[str, Any] = {
        name: value
        for name, value in vars(callback).items()
        if name not in state and not name.startswith("_") and isinstance(value, bool | int | float | str | None)
    }
    if isinstance(options.get("min_delta"), int | float):
        options["min_delta"] = abs(options["min_delta"])  # Keras turns its sign in the first epoch
    kind = type(callback)
    return {"class": f"{kind.__module__}.{kind.__qualname__}", "options": options}


def capture(callback: Any) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Return what a callback has counted, and lists of arrays that it keeps, by attribute.

    A class of the user's own is asked by its ``get_state()``, which returns what JSON can hold, if it has that and
    ``set_state(state)``.
    """
    facts: dict[str, Any] = {}
    arrays: dict[str, list[Any]] = {}
    for name in _attributes(callback):
        value = getattr(callback, name, None)
        if isinstance(value, list | tuple):
            arrays[name] = [np.asarray(array) for array in value]
        else:
            facts[name] = value if isinstance(value, bool | int | float | str | None) else np.asarray(value).item()
    return {"state": facts, **({"own": callback.get_state()} if _has_hooks(callback) else {})}, arrays


def restore(callback: Any, saved: Entry, arrays: Mapping[str, list[Any]]) -> None:
    """Set what ``capture`` has returned."""
    known = _attributes(callback)
    vars(callback).update({name: value for name, value in {**saved["state"], **arrays}.items() if name in known})
    if "own" in saved and _has_hooks(callback):
        callback.set_state(saved["own"])


def match(callbacks: Sequence[Any], saved: Sequence[Entry], warn: bool) -> list[tuple[Any, int]]:
    """Return pairs of a callback and its place in ``saved``.

    Callbacks of one class that watch the same quantity are told apart by their options, equal ones by their order;
    one that is left over on each side is the same with other options. Others begin afresh.

    Parameters
    ----------
    warn : log those that have a state of their class, but which of them is not clear.
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
                "%s begins afresh: the checkpoint has no state, or several, of such a callback with %s\n"
                "  remedy: give the callbacks the options that the run began with",
                type(callbacks[i]).__name__,
                ", ".join(f"{name}={value!r}" for name, value in now[i]["options"].items()),
            )
    return pairs


def _watched(entry: Entry) -> tuple[Any, ...]:
    return (entry["class"], *(entry["options"].get(name) for name in IDENTITY))


def _attributes(callback: Any) -> tuple[str, ...]:
    return next((names for kind, names in KNOWN if isinstance(callback, kind)), ())


def _has_hooks(callback: Any) -> bool:
    return all(callable(getattr(callback, name, None)) for name in ("get_state", "set_state"))
