"""Metrics over all ranks: their states are combined, not their results."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from matex_data.training.channel import Channel

Array = NDArray[Any]


def combined_result(model: Any, opened: Channel, logs: Any) -> Any:
    """What Keras takes for the logs of an epoch, of all ranks together. *Collective*.

    Parameters
    ----------
    logs : what the last step of this rank returned; empty where it had no batch.
    """
    combine_states(opened, list(model.metrics_variables))
    result = model.get_metrics_result()
    mine = None if isinstance(logs, dict) and logs and set(logs) == set(result) else _numbers(logs)
    everyone = opened.host.objects(mine)
    if any(numbers is None for numbers in everyone):
        return result
    names = dict.fromkeys(name for numbers in everyone for name in numbers)
    return {name: np.mean([numbers[name] for numbers in everyone if name in numbers], axis=0) for name in names}


def _numbers(logs: Any) -> dict[str, Array]:
    logs = logs if isinstance(logs, dict) else {}
    return {name: np.asarray(value, np.float64) for name, value in logs.items() if np.ndim(value) == 0}


def combine_states(opened: Channel, variables: list[Any]) -> None:
    """Give each metric variable its value over all ranks, by its own rule: mostly the sum. *Collective*."""
    if opened.size == 1:
        return
    shapes = [(tuple(v.shape), str(v.dtype), _rule(v)) for v in variables]
    opened.agree(f"combine metrics {shapes}")
    for exact in (np.dtype(np.int64), np.dtype(np.float64)):
        chosen = [v for v in variables if _rule(v) != "root" and _exact_dtype(v) == exact]
        _combine(opened, chosen, exact)
    for variable in variables:
        if _rule(variable) == "root":
            value = np.array(variable.value.numpy(), order="C")
            opened.host.share(value.reshape(-1))
            variable.assign(value)


def _combine(opened: Channel, variables: list[Any], dtype: np.dtype[Any]) -> None:
    if not variables:
        return
    values = [v.value.numpy() for v in variables]
    flat = np.concatenate([value.reshape(-1).astype(dtype) for value in values])
    opened.host.reduce(flat)
    ends = np.cumsum([value.size for value in values])
    for variable, old, end in zip(variables, values, ends, strict=True):
        value = flat[end - old.size : end].reshape(old.shape)
        variable.assign((value / opened.size if _rule(variable) == "mean" else value).astype(old.dtype))


def _exact_dtype(variable: Any) -> np.dtype[Any]:
    kind = np.dtype(variable.dtype).kind if variable.dtype != "bfloat16" else "f"
    return np.dtype(np.int64) if kind in "iub" else np.dtype(np.float64)


def _rule(variable: Any) -> str:
    """ "sum", "mean" or "root" (the value of rank 0), as the metric declared it."""
    declared = getattr(variable, "aggregation", "sum")
    return {"sum": "sum", "mean": "mean"}.get(declared, "root")
