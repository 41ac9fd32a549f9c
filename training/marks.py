"""What has become of gradients so far: tensors carry it as an attribute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_OWN, _AVERAGED = "_matex_own", "_matex_averaged"


def mark_own(gradients: Sequence[Any]) -> None:
    """These are of this rank's batch."""
    _mark(gradients, _OWN)


def mark_averaged(gradients: Sequence[Any]) -> None:
    """These are of the global batch, or were made of such."""
    _mark(gradients, _AVERAGED)


def _mark(gradients: Sequence[Any], name: str) -> None:
    for gradient in gradients:
        if gradient is not None:
            setattr(gradient, name, True)


def are_own(gradients: Sequence[Any]) -> bool:
    """Whether these are gradients as they were taken, of this rank's batch alone."""
    some = [gradient for gradient in gradients if gradient is not None]
    return bool(some) and all(hasattr(gradient, _OWN) and not hasattr(gradient, _AVERAGED) for gradient in some)


def averaged_once(gradients: Sequence[Any], average: Callable[[list[Any]], list[Any]]) -> list[Any]:
    """All of them averaged; those that are already stay as they are."""
    left = [i for i, gradient in enumerate(gradients) if not hasattr(gradient, _AVERAGED)]
    result = list(gradients)
    for i, gradient in zip(left, average([gradients[i] for i in left]) if left else [], strict=True):
        result[i] = gradient
    return result
