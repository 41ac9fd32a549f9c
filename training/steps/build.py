"""Variables of a model before its first batch, so that all ranks can start from the same values."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

SEED_STEP = 0x9E3779B9
"""Seeds of neighbouring ranks differ by this (2**32 over the golden ratio: far apart for every rank)."""


def build(model: Any, element_spec: Any) -> None:
    """Make the variables of a compiled model, its metrics and its optimizer from the shapes of its data.

    No data is read: a pass over a dataset may be one epoch of it.

    Parameters
    ----------
    element_spec : of the dataset that the model will be trained on.
    """
    try:
        model._symbolic_build(data_batch=element_spec)
    except Exception:  # a model may be callable in its own train_step alone, and fail in any way elsewhere
        tf.function(model.train_step).get_concrete_function(element_spec)
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def optimizers(model: Any) -> list[Any]:
    """Return the optimizer that a model is compiled with, and those that it has as attributes."""
    own = [v for v in vars(model).values() if hasattr(v, "apply_gradients") and v is not model.optimizer]
    return [optimizer for optimizer in [model.optimizer, *own] if optimizer is not None]


def replicated_variables(model: Any) -> list[Any]:
    """Return the variables that are the same on all ranks: weights and the optimizer's, not seeds nor metrics."""
    return [*model.weights, *(variable for optimizer in optimizers(model) for variable in optimizer.variables)]


def separate_seeds(model: Any, rank: int) -> None:
    """Let dropout and its like draw other numbers on every rank; rank 0 draws those of one process."""
    for layer in model._flatten_layers():
        for generator in getattr(layer, "_seed_generators", []):
            if rank == getattr(generator, "_matex_rank", 0):
                continue
            shift = (rank - getattr(generator, "_matex_rank", 0)) * SEED_STEP
            seed, *rest = (int(x) for x in generator.state.value.numpy())
            generator.state.assign([(seed + shift) % 2**32, *rest])
            object.__setattr__(generator, "_matex_rank", rank)
