"""Proof that a step of a compiled model may be sharded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from matex_data.training.keras_api import STEP_METHODS
from matex_data.training.proof.axes import Independent, Mixed, PerSample, Reason, State, Total
from matex_data.training.proof.fingerprint import fingerprint
from matex_data.training.proof.propagate import follow
from matex_data.training.proof.sizes import ONE
from matex_data.training.proof.tracing import LossValue, Traced, trace


@dataclass(frozen=True)
class Proof:
    """Result of the search for a proof.

    Parameters
    ----------
    reasons : why there is no proof; empty if there is one.
    batch_statistics : layers that use statistics of the batch in training. The proof holds if these are those of the
        whole batch on every rank, as with ``sync_batch_norm``.
    draws : the model draws random numbers for each row, so it is proven up to these numbers.
    fingerprint : checksum of the graph that was followed; see ``fingerprint``.
    """

    reasons: tuple[Reason, ...] = ()
    batch_statistics: tuple[str, ...] = ()
    draws: bool = False
    fingerprint: int = 0

    @property
    def proven(self) -> bool:
        """Return whether the model is proven."""
        return not self.reasons


def prove(
    model: Any,
    x_spec: Any,
    y_spec: Any = None,
    sample_weight_spec: Any = None,
    *,
    per_sample: Sequence[bool | None] | None = None,
) -> Proof:
    """Prove that the gradients of shards, averaged by their rows, are the gradient of the batch.

    They are if every output and every loss depends on its own sample alone, and if nothing else depends on the batch.
    The model is traced once, with an unknown number of rows, and is left as it was. The proof holds for steps that are
    traced with an unknown number of rows, too, and as long as the Python code of the model stays as it is.

    Parameters
    ----------
    model : built Keras model, with the losses that it is compiled with, if any.
    x_spec, y_spec, sample_weight_spec : nested ``tf.TensorSpec``, as of ``tf.data.Dataset.element_spec``.
    per_sample : for each leaf of ``(x, y, sample_weight)``, as ``leaves_per_sample`` returns, whether its first axis is
        that of the samples; other leaves are the same for all shards. None: all leaves have one.

    Examples
    --------
    >>> import keras, tensorflow as tf
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    >>> model.compile("sgd", "mse")
    >>> _ = model.train_on_batch(tf.zeros([1, 3]), tf.zeros([1, 2]))
    >>> prove(model, tf.TensorSpec([None, 3]), tf.TensorSpec([None, 2])).proven
    True
    """
    own = _own_methods(model)
    if own:
        return Proof(tuple(own))
    compiled = getattr(model, "_compile_loss", None)
    if not model.built or (compiled is not None and not compiled.built):
        return Proof((Reason(model.name, "build", "has not run, so there are no variables or losses yet"),))
    specs = (x_spec, y_spec, sample_weight_spec)
    leaves = tf.nest.flatten(specs)
    has_rows = [_has_rows(leaf) for leaf in leaves] if per_sample is None else list(per_sample)
    if len(has_rows) != len(leaves):  # Keras adds a target and sample weights to a batch, or None
        has_rows += [False] * (len(leaves) - len(has_rows))
    unknown = unknown_rows(model, leaves, has_rows)
    if unknown is not None:
        return unknown
    relaxed = [any_rows(leaf) if known else leaf for leaf, known in zip(leaves, has_rows, strict=True)]
    try:
        traced = trace(model, *tf.nest.pack_sequence_as(specs, relaxed))
    except Exception as error:  # a model may fail with any error where its number of rows is unknown
        return Proof((Reason(model.name, "call", f"cannot be traced: {type(error).__name__}: {_first_line(error)}"),))
    axes = [0 if known else None for leaf, known in zip(leaves, has_rows, strict=True) if leaf is not None]
    return _named(_concluded(traced, axes), {layer.name for layer in model._flatten_layers()})


def unknown_rows(model: Any, leaves: Sequence[Any], has_rows: Sequence[bool | None]) -> Proof | None:
    """Return the proof that fails because of a leaf that may or may not have one row per sample; None if none does."""
    unknown = [leaf for leaf, known in zip(leaves, has_rows, strict=True) if known is None or not _is_tensor(leaf)]
    if not unknown:
        return None
    return Proof((Reason(model.name, "input", f"may or may not have one row per sample: {unknown[0]}"),))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def _is_tensor(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, tf.TensorSpec)


def _has_rows(leaf: Any) -> bool | None:
    """Return whether a leaf has a first axis; None if it is not known."""
    rank = leaf.shape.rank if isinstance(leaf, tf.TensorSpec) else None
    return False if leaf is None else None if rank is None else rank > 0


def any_rows(leaf: Any) -> Any:
    """Return the spec of a leaf with an unknown number of rows."""
    return None if leaf is None else tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype)


def _concluded(traced: Traced, axes: Sequence[int | None]) -> Proof:
    """Return the proof, or the reasons why there is none, by what the outputs of a traced graph depend on."""
    followed, mark = follow(traced.graph, axes), fingerprint(traced.graph)
    reasons = [*traced.changes, *followed.effects]
    outputs = list(followed.outputs)
    end = traced.predictions + len(traced.losses)
    if traced.losses:  # what does not enter a loss does not enter a gradient
        for loss, state in zip(traced.losses, outputs[traced.predictions : end], strict=True):
            reasons += loss_reasons(loss, state)
    for state in outputs[: traced.predictions]:
        reasons += _of_prediction(state)
    for state in outputs[end:]:
        reasons += _of_added_loss(state)
    return Proof(tuple(dict.fromkeys(reasons)), tuple(dict.fromkeys(followed.statistics)), followed.draws, mark)


def _named(proof: Proof, names: set[str]) -> Proof:
    """Return the proof with the names of layers in place of those of scopes, which TensorFlow numbers."""
    reasons = tuple(dict.fromkeys(replace(reason, layer=_layer(reason.layer, names)) for reason in proof.reasons))
    statistics = tuple(dict.fromkeys(_layer(scope, names) for scope in proof.batch_statistics))
    return replace(proof, reasons=reasons, batch_statistics=statistics)


def _layer(scope: str, names: set[str]) -> str:
    """Return a scope in which each component that belongs to a layer is the layer's name.

    Keras opens the scope of a layer twice, to build it and to call it, so the second one has a number.
    """
    plain = [re.sub(r"_\d+$", "", component) for component in scope.split("/")]
    return "/".join(p if p in names else c for p, c in zip(plain, scope.split("/"), strict=True))


def _of_prediction(state: State) -> tuple[Reason, ...]:
    if isinstance(state, Mixed):
        return state.reasons
    if isinstance(state, PerSample) and state.axis == 0 and state.before == state.after == ONE:
        return ()
    return (Reason("model", "output", "has no first axis with one element per sample"),)


def loss_reasons(loss: LossValue, state: State) -> tuple[Reason, ...]:
    """Return the reasons why a loss is not weighed by the ranks so that it is that of the batch."""
    if loss.own_call:
        return (Reason(loss.name, "__call__", "is a method of the loss's own"),)
    if isinstance(state, Mixed):
        return state.reasons
    mean = loss.reduction in ("sum_over_batch_size", "mean", "mean_with_sample_weight")
    if isinstance(state, PerSample) and (mean or loss.reduction == "sum"):
        return ()
    if isinstance(state, Total) and state.mean and mean and not (loss.masked or loss.weighted):
        return ()
    if isinstance(state, Total):
        return (state.reason,)
    return (Reason(loss.name, f"reduction={loss.reduction}", "is neither a mean nor a sum over the samples"),)


def _of_added_loss(state: State) -> tuple[Reason, ...]:
    """Return the reasons why a term that ``add_loss`` or a regularizer has added is not that of the batch."""
    if isinstance(state, Mixed):
        return state.reasons
    if isinstance(state, Independent) or (isinstance(state, Total) and state.mean):
        return ()
    if isinstance(state, Total):
        return (state.reason,)
    return (Reason("model", "add_loss", "adds a term that is no mean over the samples"),)


def _own_methods(model: Any) -> list[Reason]:
    """Return one reason for each method of the model that is not Keras's own."""
    reasons = []
    for name in STEP_METHODS:
        if not _of_keras(model, name):
            reasons.append(Reason(model.name, name, "is a method of the model's own"))
        replaced = vars(model).get(name)
        if replaced is not None and not _is_method(model, name, replaced):
            reasons.append(Reason(model.name, name, "is replaced on the model"))
    if model.run_eagerly:
        reasons.append(Reason(model.name, "run_eagerly", "lets Python code run in every step"))
    return reasons


def own_method(model: Any, name: str) -> Any:
    """Return a method of a model that is not Keras's own, without the wrappers of this package; None if it is."""
    method = _unwrapped(getattr(model, name))
    return None if _is_method(model, name, method) and _of_keras(model, name) else method


def _is_method(model: Any, name: str, replaced: Any) -> bool:
    """Return whether an attribute is the method of the model's class, or wraps it for this package."""
    method = _unwrapped(replaced)
    return getattr(method, "__self__", None) is model and method.__func__ is getattr(type(model), name)


def _unwrapped(method: Any) -> Any:
    while type(method).__module__.startswith("matex_data."):
        method = method.wrapped
    return method


def _of_keras(model: Any, name: str) -> bool:
    return getattr(type(model), name, None) is getattr(_keras_class(model), name, None)


def _keras_class(model: Any) -> Any:
    """Return the class of Keras that a model is derived from."""
    return next(kind for kind in type(model).__mro__ if kind.__module__.partition(".")[0] == "keras")
