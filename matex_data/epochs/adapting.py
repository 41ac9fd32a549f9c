"""Keras's preprocessing layers refuse to be adapted to the rows of one rank of several."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from matex_data.errors import PartitionError

LAYERS = ("Normalization", "Discretization", "TextVectorization", "StringLookup", "IntegerLookup")


def refuse_own_rows(is_partial: Callable[[Any], bool]) -> None:
    """Let ``adapt`` of the layers raise an error for data of which other ranks have other rows.

    Called once there is such data; the layers of a Keras that nobody has imported need nothing.

    Parameters
    ----------
    is_partial : tells such data.
    """
    layers = getattr(sys.modules.get("keras"), "layers", None)
    for name in LAYERS if layers else ():
        for owner in getattr(layers, name).__mro__:
            adapt = vars(owner).get("adapt")
            if adapt is not None and not hasattr(adapt, "matex_is_partial"):
                owner.adapt = _guarded(adapt, is_partial)


def _guarded(adapt: Callable[..., Any], is_partial: Callable[[Any], bool]) -> Callable[..., Any]:
    """Return a method ``adapt`` that looks at its data first."""

    @functools.wraps(adapt)
    def guarded(layer: Any, data: Any, *arguments: Any, **options: Any) -> Any:
        if is_partial(data):
            raise PartitionError(
                f"the layer {layer.name!r} would be adapted to the rows of this rank alone",
                expected="the samples of all ranks",
                found="a data set of which other ranks have other rows",
                remedy="adapt it to the samples of all ranks: data.adapt(layer)",
            )
        return adapt(layer, data, *arguments, **options)

    guarded.matex_is_partial = is_partial  # type: ignore[attr-defined]
    return guarded
