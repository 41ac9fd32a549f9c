"""Keras's preprocessing layers refuse to be adapted to the rows of one rank of several."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from matex_data.errors import PartitionError

LAYERS = ("Normalization", "Discretization", "TextVectorization", "StringLookup", "IntegerLookup")


def refuse_own_rows() -> None:
    """Let ``adapt`` of the layers raise an error for data of which other ranks have other rows.

    Called when files are opened, since ``layer.adapt(data.tf_dataset(48))`` takes the method before there is such data,
    and once there is; the layers of a Keras that nobody has imported need nothing.
    """
    layers = getattr(sys.modules.get("keras"), "layers", None)
    for name in LAYERS if layers else ():
        for owner in getattr(layers, name).__mro__:
            adapt = vars(owner).get("adapt")
            if adapt is not None and not hasattr(adapt, "matex_guarded"):
                owner.adapt = _guarded(adapt)


def _is_partial(data: Any) -> bool:
    tensors = sys.modules.get("matex_data.epochs.tfdata")
    return tensors is not None and bool(tensors.has_other_rows_elsewhere(data))


def _guarded(adapt: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method ``adapt`` that looks at its data first."""

    @functools.wraps(adapt)
    def guarded(layer: Any, data: Any, *arguments: Any, **options: Any) -> Any:
        if _is_partial(data):
            raise PartitionError(
                f"the layer {layer.name!r} would be adapted to the rows of this rank alone",
                expected="the samples of all ranks",
                found="a data set of which other ranks have other rows",
                remedy="adapt it to the samples of all ranks: data.adapt(layer)",
            )
        return adapt(layer, data, *arguments, **options)

    guarded.matex_guarded = True  # type: ignore[attr-defined]
    return guarded
